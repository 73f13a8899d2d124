"""When a sequence ends by its tokens. Stop strings are found in text, outside this room."""

from __future__ import annotations

from octavo.request import FinishReason
from octavo.sched.sequence import Sequence


def why_it_ends(seq: Sequence) -> tuple[FinishReason, int | None] | None:
    """(finish reason, stop reason) if the token just appended ends the sequence, else None.

    End-of-sequence wins over a stop token, both over the length. The sampler masks what may not
    come before `min_tokens`; a stop that comes all the same is an ordinary token here.
    """
    group = seq.group
    token_id = seq.token_ids[-1]
    if token_id in group.stop_ids and seq.num_output_tokens > group.request.sampler.min_tokens:
        is_eos = token_id in group.request.eos_token_ids
        return FinishReason.STOP, None if is_eos else token_id
    if len(seq.token_ids) >= group.max_total_tokens:
        return FinishReason.LENGTH, None
    return None
