"""What a sequence asks of the pool."""

from __future__ import annotations

from octavo.kv.policy import SeqDemand
from octavo.request import Request
from octavo.sched.sequence import Sequence


def demand_of(seq: Sequence, num_seqs: int = 1) -> SeqDemand:
    """What a sequence brings, and will need at most; `num_seqs` is how many of its request will
    run, it and those that will be forked from it.

    If prompt logprobs are asked for, only what it computed before may be found: those tokens'
    successors were answered.
    """
    group = seq.group
    request = group.request
    unanswered = request.sampler.num_prompt_logprobs is not None and not group.has_forked
    most = seq.num_answered if unanswered else None
    if seq.search is not None and seq.search.rejoin_at is not None:
        most = seq.search.rejoin_at
    return SeqDemand(
        len(seq.token_ids),
        group.max_total_tokens,
        expected_total(request, group.max_total_tokens),
        token_ids=seq.token_ids,
        salt=request.cache_salt,
        resumed=seq.has_run,
        max_hit_tokens=most,
        num_seqs=num_seqs,
        is_only=not group.is_family,
        forks_again=seq.search is not None,
    )


def expected_total(request: Request, max_total_tokens: int) -> int | None:
    """Tokens, prompt and output, that each sequence will have, where that is known."""
    if request.expected_output_tokens is None:
        return None
    return min(len(request.prompt_token_ids) + request.expected_output_tokens, max_total_tokens)
