"""What live requests may still come to need: a smaller pool must leave them that."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.errors import CapacityError
from octavo.kv.manager import KVCacheManager
from octavo.request import Request
from octavo.sched.sequence import Sequence, SequenceGroup, SequenceStatus


def check_resize(kv: KVCacheManager, num_blocks: int, groups: Iterable[SequenceGroup]) -> None:
    """Raise `CapacityError` if the pool could not have that many blocks: a live request could
    not have what it was promised, or pins would have more than half of it.

    A request without max_tokens takes what there is: it was promised its next token.
    """
    if num_blocks >= kv.num_blocks:
        return
    kv.check_size(num_blocks)
    start = f"the KV pool of {kv.num_blocks:,} blocks cannot shrink to {num_blocks:,}: "
    _check(kv, num_blocks, groups, start)


def check_pins(kv: KVCacheManager, groups: Iterable[SequenceGroup]) -> None:
    """Raise `CapacityError` if pins leave a live request less than it was promised."""
    start = f"of the KV pool's {kv.num_blocks:,} blocks so many cannot be pinned: "
    _check(kv, kv.num_blocks, groups, start)


def _check(
    kv: KVCacheManager, num_blocks: int, groups: Iterable[SequenceGroup], start: str
) -> None:
    needs = ((_num_promised(kv, group), group.request.request_id) for group in groups)
    most, request_id = max(needs, default=(0, ""))
    num_pinned = kv.num_pinned_blocks
    if num_blocks < most + num_pinned and most:
        raise CapacityError(
            f"{start}request {request_id} may come to need {most:,} blocks"
            + (f" besides {num_pinned:,} that are pinned" if num_pinned else "")
        )


def _num_promised(kv: KVCacheManager, group: SequenceGroup) -> int:
    """Blocks that must not be pinned for the request to go on when it is alone, at most."""
    request = group.request
    in_prompt = num_pinned_for(kv, request)
    if group.search is not None:
        num_prompt = len(request.prompt_token_ids)
        num_shared, num_own = kv.num_needed_by_forks(num_prompt, group.max_total_tokens)
        pinned = min(_num_pinned_of(kv, beam, in_prompt) for beam in group.search.beams)
        return num_shared + group.search.width * num_own - min(pinned, num_shared)
    most = 0
    for seq in group.sequences:
        if seq.status is SequenceStatus.ENDED:
            continue
        num_tokens = group.max_total_tokens
        if request.max_tokens is None:
            num_tokens = max(len(seq.token_ids), len(request.prompt_token_ids)) + 1
        most = max(most, kv.num_needed(num_tokens) - _num_pinned_of(kv, seq, in_prompt))
    return most


def num_pinned_for(kv: KVCacheManager, request: Request) -> int:
    """Pinned blocks that the prompt of a request will find when it starts."""
    if request.sampler.num_prompt_logprobs is not None or not kv.num_pinned_blocks:
        return 0
    return kv.num_pinned_in(request.prompt_token_ids, request.cache_salt)


def _num_pinned_of(kv: KVCacheManager, seq: Sequence, in_prompt: int) -> int:
    """Pinned blocks that a sequence has, or will find."""
    is_running = seq.status is SequenceStatus.RUNNING
    return kv.num_pinned_of(seq.seq_id) if is_running else in_prompt
