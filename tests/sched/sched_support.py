"""A runner's replica for scheduler tests: it believes nothing but plans, and checks each one.

Its "KV" of a token is a hash of all tokens up to it, stored in a physical pool of slots; its
"model" samples from the hash at the last position. So a wrong block table, a missing copy, a token
computed twice or in the wrong order changes what is sampled, or fails a check at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.kv import KVCacheManager
from octavo.plan import SeqResult, StepPlan, StepResult, TokenLogprobs
from octavo.request import FinishReason, Request, SamplerParams
from octavo.sched import Scheduler, SeqUpdate

VOCAB_SIZE = 40


def make_request(request_id: str, num_prompt: int, **fields: object) -> Request:
    """A request whose prompt depends on its id. `min_tokens` goes to the sampler."""
    sampler = SamplerParams(min_tokens=int(fields.pop("min_tokens", 0)))  # type: ignore[call-overload]
    salt = sum(map(ord, request_id))
    prompt = [(salt * 7 + 3 * i) % VOCAB_SIZE for i in range(num_prompt)]
    return Request(request_id=request_id, prompt_token_ids=prompt, sampler=sampler, **fields)  # type: ignore[arg-type]


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    kv: KVCacheManager | None = None,
    **limits: object,
) -> tuple[Scheduler, KVCacheManager]:
    """A scheduler and its pool; no watermark unless asked for."""
    kv = kv or KVCacheManager(num_blocks, block_size)
    settings = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 1000,
        "watermark": 0.0,
    } | limits
    return Scheduler(kv, **settings), kv  # type: ignore[arg-type]


def chain(token_ids: list[int]) -> int:
    """The "KV" of the last token: it depends on every token before."""
    state = 17
    for token_id in token_ids:
        state = step_chain(state, token_id)
    return state


def step_chain(state: int, token_id: int) -> int:
    return (state * 6364136223846793005 + token_id + 1442695040888963407) % 2**64


def sample_from(state: int, sample_index: int) -> int:
    return ((state >> 20) + 7 * sample_index) % VOCAB_SIZE


def lonely_run(
    request: Request, sample_index: int, max_total_tokens: int
) -> tuple[list[int], FinishReason, int | None]:
    """What a sequence must generate, whatever else runs: tokens, finish and stop reason."""
    output: list[int] = []
    state = chain(request.prompt_token_ids)
    while True:
        token_id = sample_from(state, sample_index)
        output.append(token_id)
        if len(output) > request.sampler.min_tokens:
            if token_id in request.eos_token_ids:
                return output, FinishReason.STOP, None
            if token_id in request.stop_token_ids:
                return output, FinishReason.STOP, token_id
        if len(request.prompt_token_ids) + len(output) == max_total_tokens:
            return output, FinishReason.LENGTH, None
        state = step_chain(state, token_id)


@dataclass
class ReplicaSeq:
    """What a runner keeps of a sequence."""

    token_ids: list[int]
    sample_index: int
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0


class ReplicaRunner:
    """Executes plans on a pool of hashes and asserts that each is consistent with those before."""

    def __init__(self, num_blocks: int, block_size: int, *, max_tokens: int, max_seqs: int) -> None:
        self.block_size = block_size
        self.max_tokens, self.max_seqs = max_tokens, max_seqs
        self.pool: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.seqs: dict[int, ReplicaSeq] = {}
        self.seen: set[int] = set()
        self.next_step_id = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Check a plan and run it."""
        assert plan.step_id == self.next_step_id
        self.next_step_id += 1
        assert plan.seqs, "an empty plan"
        assert plan.num_tokens <= self.max_tokens
        assert len(plan.seqs) <= self.max_seqs
        self._apply_changes(plan)
        for copy in plan.copies:
            self.pool[copy.dst] = list(self.pool[copy.src])
        self._apply_tables(plan)
        return StepResult(plan.step_id, self._compute(plan))

    def _apply_changes(self, plan: StepPlan) -> None:
        for seq_id in plan.finished:
            del self.seqs[seq_id]
        for seq_id in plan.preempted:
            seq = self.seqs[seq_id]
            assert seq.block_ids, f"sequence {seq_id} was preempted without blocks"
            seq.block_ids, seq.num_computed = [], 0
        for new in plan.new_seqs:
            assert new.seq_id not in self.seen, f"sequence {new.seq_id} is new twice"
            self.seen.add(new.seq_id)
            self.seqs[new.seq_id] = ReplicaSeq(list(new.token_ids), new.sample_index)
        ids = [s.seq_id for s in plan.seqs]
        assert len(set(ids)) == len(ids), "a sequence twice in a plan"
        assert {new.seq_id for new in plan.new_seqs} <= set(ids)

    def _apply_tables(self, plan: StepPlan) -> None:
        for share in plan.seqs:
            seq = self.seqs[share.seq_id]
            if share.replaced is not None:
                index, block_id = share.replaced
                seq.block_ids[index] = block_id
            seq.block_ids.extend(share.new_block_ids)

    def _compute(self, plan: StepPlan) -> list[SeqResult]:
        owners: dict[int, int] = {}
        for seq in self.seqs.values():
            for block_id in seq.block_ids:
                owners[block_id] = owners.get(block_id, 0) + 1
        sampled = []
        for share in plan.seqs:
            seq = self.seqs[share.seq_id]
            end = share.start + share.num_tokens
            assert share.num_tokens >= 1
            assert share.start == seq.num_computed, "tokens skipped or computed twice"
            assert end <= len(seq.token_ids), "a token computed before it exists"
            assert end <= len(seq.block_ids) * self.block_size, "no slot for a token"
            assert share.sample == (end == len(seq.token_ids))
            # Attention reads the whole context out of the pool.
            state = 17
            for position in range(share.start):
                state = step_chain(state, seq.token_ids[position])
                assert self._slot(seq, position) == state, f"wrong KV at {position} of {share}"
            for position in range(share.start, end):
                block_id = seq.block_ids[position // self.block_size]
                assert owners[block_id] == 1, f"a write to the shared block {block_id} (I2)"
                state = step_chain(state, seq.token_ids[position])
                self.pool[block_id][position % self.block_size] = state
            seq.num_computed = end
            if share.sample:
                token_id = sample_from(state, seq.sample_index)
                seq.token_ids.append(token_id)
                logprobs = TokenLogprobs(token_id, -1.0, 1, ())
                sampled.append(SeqResult(share.seq_id, token_id, logprobs))
        return sampled

    def _slot(self, seq: ReplicaSeq, position: int) -> int | None:
        return self.pool[seq.block_ids[position // self.block_size]][position % self.block_size]


def make_runner(kv: KVCacheManager) -> ReplicaRunner:
    """A replica for `make_scheduler`'s default limits."""
    return ReplicaRunner(kv.num_blocks, kv.block_size, max_tokens=32, max_seqs=8)


def answer(plan: StepPlan, token_id: int = 5) -> StepResult:
    """A result that samples the same token everywhere."""
    sampled = [SeqResult(s.seq_id, token_id, None) for s in plan.seqs if s.sample]
    return StepResult(plan.step_id, sampled)


def shares(plan: StepPlan | None) -> list[tuple[int, int, int, bool]]:
    """(sequence, start, tokens, sample) of each share of a plan."""
    assert plan is not None
    return [(s.seq_id, s.start, s.num_tokens, s.sample) for s in plan.seqs]


def run_step(scheduler: Scheduler, token_id: int = 5) -> tuple[StepPlan, list[SeqUpdate]]:
    """One whole step."""
    plan = scheduler.schedule(0.0)
    assert plan is not None
    return plan, scheduler.update(answer(plan, token_id), 0.0)


def drain(scheduler: Scheduler, runner: ReplicaRunner, max_steps: int) -> list[SeqUpdate]:
    """Run until nothing is left; fails when that takes more steps than it may (I5)."""
    updates = []
    for _ in range(max_steps):
        if not scheduler.has_unfinished():
            return updates
        plan = scheduler.schedule(0.0)
        if plan is None:
            updates += scheduler.take_updates()
        else:
            updates += scheduler.update(runner.execute(plan), 0.0)
    assert not scheduler.has_unfinished(), f"not done after {max_steps} steps"
    return updates


def assert_drained(kv: KVCacheManager) -> None:
    """I3."""
    kv.check_integrity()
    assert kv.num_free_blocks == kv.num_blocks
    assert kv.num_sequences == 0
