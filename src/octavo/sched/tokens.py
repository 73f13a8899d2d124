"""What the tokens of a step do to the sequences that drew them."""

from __future__ import annotations

from octavo.kv.manager import KVCacheManager
from octavo.plan import StepResult
from octavo.sched.roster import Roster
from octavo.sched.sequence import SequenceStatus, SeqUpdate
from octavo.sched.stopping import why_it_ends

_RUNNING = SequenceStatus.RUNNING


def take_tokens(
    result: StepResult, roster: Roster, kv: KVCacheManager, updates: list[SeqUpdate]
) -> None:
    """Append the tokens that were sampled, and end whom they end; the news is added to
    `updates`. A loop over all who run in every step."""
    commit = kv.commit
    sequences, now_s, num_taken = roster.sequences, roster.now_s, 0
    prompt_logprobs = dict(result.prompt_logprobs)
    for seq_id, token_id, logprobs in result.sampled:
        seq = sequences.get(seq_id)
        if seq is None:
            continue  # it ended while the step ran
        group, token_ids = seq.group, seq.token_ids
        if group.expected:
            roster.give_birth(seq)
        num_taken += 1
        token_ids.append(token_id)
        num_known = len(token_ids)
        seq.num_pending = num_pending = seq.num_pending - 1
        if num_pending and seq.status is _RUNNING:  # its KV is computed in a plan under way
            commit(seq_id, num_known)
        metrics = group.stats.metrics
        metrics.num_generation_tokens += 1
        metrics.last_token_s = now_s
        if metrics.first_token_s is None:
            metrics.first_token_s = now_s
        if num_known >= group.max_total_tokens or token_id in group.stop_ids:
            ending = why_it_ends(seq)
            if ending is not None:
                roster.end(seq, *ending)
        if group.told_at_end and seq.finish_reason is None:
            continue
        of_token = () if logprobs is None else (logprobs,)
        of_prompt = tuple(prompt_logprobs.pop(seq_id, ())) if prompt_logprobs else ()
        updates.append(seq.news((token_id,), of_token, of_prompt))
    for seq_id, of_chunk in prompt_logprobs.items():
        if seq_id in sequences:
            updates.append(sequences[seq_id].news(prompt_logprobs=tuple(of_chunk)))
    roster.num_output_tokens += num_taken
