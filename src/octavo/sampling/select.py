"""The most probable tokens of each row, in one order that nothing but the row decides.

Order everywhere: higher logit first, equal logits by smaller token id. A library's top-k breaks
ties as it likes, and with bfloat16 logits ties are the rule, not the exception. So a token's
logit and id are packed into one integer whose order is the wanted one and which has no ties.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

RUNGS = (64, 256, 2048)
"""Numbers of candidates that are tried before the whole vocabulary is sorted."""

_BLOCK = 64
_ID_MASK = 0xFFFFFFFF


def rung_of(num_tokens: int, vocab_size: int) -> int:
    """The smallest number of candidates to try for the `num_tokens` most probable tokens."""
    return next((rung for rung in RUNGS if num_tokens <= rung < vocab_size), vocab_size)


def looks_at_all(num: int, vocab_size: int) -> bool:
    """Whether `top_candidates` orders the whole vocabulary, and needs memory for it."""
    return 2 * num > vocab_size // _BLOCK


def argmax(logits: Tensor) -> Tensor:
    """[num_rows] int64: each row's most probable token, the smallest id among equals."""
    if logits.device.type == "cpu":
        # numpy's is vectorised; torch's takes ten times as long on a CPU.
        return torch.from_numpy(np.argmax(logits.numpy(), axis=-1))
    return logits.argmax(dim=-1)


def top_candidates(logits: Tensor, num: int) -> Tensor:
    """[num_rows, num] int64: token ids of each row's `num` first tokens, in order.

    logits: [num_rows, vocab] float32, unit stride along the vocabulary; num <= vocab.
    The answer for a smaller `num` is a prefix of the answer for a larger one.
    """
    vocab_size = logits.shape[1]
    num_blocks = vocab_size // _BLOCK
    if looks_at_all(num, vocab_size):
        ids = torch.arange(vocab_size, device=logits.device)
        return _ids_of(_largest(_ordered(logits, ids), num))
    # The first `num` tokens lie in the `num` blocks whose best tokens come first: any other block
    # has as many tokens before its own best one as there are chosen blocks.
    whole = num_blocks * _BLOCK
    best = logits[:, :whole].view(len(logits), num_blocks, _BLOCK).amax(dim=-1)
    blocks = torch.arange(num_blocks, device=logits.device)
    chosen = _ids_of(_largest(_ordered(best, blocks), num))
    inside = torch.arange(_BLOCK, device=logits.device)
    ids = (chosen[:, :, None] * _BLOCK + inside).flatten(1)
    if whole < vocab_size:
        rest = torch.arange(whole, vocab_size, device=logits.device)
        ids = torch.cat([ids, rest.expand(len(ids), -1)], dim=1)
    return _ids_of(_largest(_ordered(logits.gather(1, ids), ids), num))


def _ordered(values: Tensor, ids: Tensor) -> Tensor:
    """int64 whose order is: by value (float32), then by falling id (below 2**32)."""
    bits = (values + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # two's complement order of a float's bits
    return (bits.to(torch.int64) << 32) + (_ID_MASK - ids)


def _ids_of(ordered: Tensor) -> Tensor:
    return _ID_MASK - (ordered & _ID_MASK)


def _largest(ordered: Tensor, num: int) -> Tensor:
    """[num_rows, num]: the largest of each row, falling."""
    if ordered.device.type != "cpu":
        return ordered.topk(num, dim=-1).values
    array = ordered.numpy()
    size = array.shape[-1]
    if num < size:
        array = np.partition(array, size - num, axis=-1)[:, size - num :]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())
