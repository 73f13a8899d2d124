"""Log probabilities of chosen tokens and of the most probable ones, in pieces of bounded memory.

Always of the model's unmodified distribution: before masks, penalties and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.plan import TokenLogprobs
from octavo.sampling.draw import block_sums, rows_per_chunk, rows_per_sort
from octavo.sampling.layout import RowSet
from octavo.sampling.select import looks_at_all, top_candidates


def token_logprobs(
    logits: Tensor, rows: RowSet, token_ids: Tensor, num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Logprobs of one token a row.

    logits: [num_rows, vocab] float32, not changed; rows: which of them; token_ids: [len(rows)]
    int64; num_top: for each, how many most probable tokens to report (cut to the vocabulary).
    """
    found: list[TokenLogprobs] = []
    vocab_size = logits.shape[1]
    sorts = looks_at_all(max(num_top, default=0), vocab_size)
    max_rows = rows_per_sort(vocab_size) if sorts else rows_per_chunk(vocab_size)
    for first, last in rows.chunks(max_rows):
        chunk = rows.take(logits, first, last)
        found += _of_chunk(chunk, token_ids[first:last], num_top[first:last])
    return found


def prompt_logprobs(
    logits: Tensor, target_ids: Tensor | Sequence[int], num_top: int
) -> list[TokenLogprobs]:
    """Logprobs of a prompt's tokens, each given the tokens before it.

    logits: [num_tokens, vocab] float32, row i computed from the position before target_ids[i].
    """
    targets = torch.as_tensor(target_ids, dtype=torch.int64, device=logits.device)
    rows = RowSet(range(len(logits)), logits.device)
    return token_logprobs(logits, rows, targets, [num_top] * len(logits))


def _of_chunk(logits: Tensor, token_ids: Tensor, num_top: Sequence[int]) -> list[TokenLogprobs]:
    best = logits.amax(dim=-1, keepdim=True)
    log_sum = block_sums((logits - best).exp_()).sum(dim=-1, keepdim=True).log().to(torch.float32)
    own = logits.gather(1, token_ids[:, None])
    ranks = (logits > own).sum(dim=-1, dtype=torch.int32) + 1
    own_logprobs = (own - best - log_sum)[:, 0]

    most = min(max(num_top), logits.shape[1])
    top_ids: list[list[int]] = [[]] * len(num_top)
    top_logprobs: list[list[float]] = [[]] * len(num_top)
    if most:
        ids = top_candidates(logits, most)
        top_ids = ids.tolist()
        top_logprobs = (logits.gather(1, ids) - best - log_sum).tolist()
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:num], values[:num], strict=True)))
        for token_id, logprob, rank, ids, values, num in zip(
            token_ids.tolist(),
            own_logprobs.tolist(),
            ranks.tolist(),
            top_ids,
            top_logprobs,
            num_top,
            strict=True,
        )
    ]
