"""A runner's replica for scheduler tests: it believes nothing but plans, and checks each one.

Its "KV" of a token is a hash of all tokens up to it, stored in a physical pool of slots; its
"model" samples from the hash at the last position. So a wrong block table, a missing copy, a token
computed twice or in the wrong order changes what is sampled, or fails a check at once.
"""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass, field

from octavo.kv import KVCacheManager, SeqDemand
from octavo.plan import (
    BeamCandidate,
    BlockCopy,
    CopyKind,
    SeqResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from octavo.request import BeamSearchParams, FinishReason, Request, SamplerParams
from octavo.sched import Scheduler, SeqUpdate
from octavo.sched.beams import BeamState, FinishedBeam

VOCAB_SIZE = 40
OUTSIDE = 10**6
"""A sequence that no scheduler knows."""


def make_request(request_id: str, num_prompt: int, **fields: object) -> Request:
    """A request whose prompt depends on its id, or on `like` and, from position `differs_at` on,
    on its id. `min_tokens` and `num_prompt_logprobs` go to the sampler."""
    sampler = SamplerParams(
        min_tokens=fields.pop("min_tokens", 0),  # type: ignore[arg-type]
        num_prompt_logprobs=fields.pop("num_prompt_logprobs", None),  # type: ignore[arg-type]
    )
    own = sum(map(ord, request_id))
    salt = sum(map(ord, str(fields.pop("like", request_id))))
    border = int(fields.pop("differs_at", num_prompt))  # type: ignore[call-overload]
    prompt = [((salt if i < border else own) * 7 + 3 * i) % VOCAB_SIZE for i in range(num_prompt)]
    return Request(request_id=request_id, prompt_token_ids=prompt, sampler=sampler, **fields)  # type: ignore[arg-type]


def make_beams(request_id: str, num_prompt: int, width: int, **fields: object) -> Request:
    """A request that is decoded by beam search. `eos_token_ids`, `like`, `differs_at` as above."""
    of_request = (
        "eos_token_ids", "like", "differs_at", "priority", "arrival_s", "cache_salt", "client_id",
        "max_kv_share",
    )  # fmt: skip
    others = {name: fields.pop(name) for name in of_request if name in fields}
    params = BeamSearchParams(beam_width=width, **fields)  # type: ignore[arg-type]
    return make_request(
        request_id, num_prompt, n=width, beam=params, max_tokens=params.max_tokens, **others
    )


def make_scheduler(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    kv: KVCacheManager | None = None,
    **limits: object,
) -> tuple[Scheduler, KVCacheManager]:
    """A scheduler and its pool; no watermark unless asked for."""
    caching = bool(limits.pop("enable_prefix_caching", False))
    kv = kv or KVCacheManager(num_blocks, block_size, enable_prefix_caching=caching)
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


def candidates_of(
    states: list[int], scores: tuple[float, ...], num_candidates: int
) -> list[BeamCandidate]:
    """The best continuations of beams that end in these states."""
    found = []
    for beam, (state, score) in enumerate(zip(states, scores, strict=True)):
        for token_id in range(VOCAB_SIZE):
            mixed = (state ^ token_id * 0x9E3779B97F4A7C15) * 0xBF58476D1CE4E5B9 % 2**64
            logprob = -((mixed >> 40) % 997) / 100 - 0.01
            found.append(BeamCandidate(beam, token_id, c_float(score + logprob).value))
    found.sort(key=lambda c: (-c.score, c.beam, c.token_id))
    return found[:num_candidates]


def lonely_beams(request: Request) -> list[FinishedBeam]:
    """What a beam search must find, whatever else runs."""
    assert request.beam is not None
    state = BeamState(request.beam, request.eos_token_ids, request.beam.max_tokens)
    outputs: list[list[int]] = [[]]
    while not state.is_done:
        ends = [chain(request.prompt_token_ids + output) for output in outputs]
        chosen = state.advance(candidates_of(ends, state.scores, state.num_candidates), outputs)
        outputs = [[*outputs[c.beam], c.token_id] for c in chosen]
    return state.finished


@dataclass
class ReplicaSeq:
    """What a runner keeps of a sequence."""

    token_ids: list[int]
    sample_index: int
    num_prompt: int
    block_ids: list[int] = field(default_factory=list)
    num_computed: int | None = None
    """None: it has no blocks, and may start wherever its KV is in those that it gets."""
    num_prompt_logprobs: int | None = None
    num_answered: int = 0


class ReplicaRunner:
    """Executes plans on a pool of hashes and asserts that each is consistent with those before."""

    def __init__(self, num_blocks: int, block_size: int, *, max_tokens: int, max_seqs: int) -> None:
        self.block_size = block_size
        self.max_tokens, self.max_seqs = max_tokens, max_seqs
        self.pool: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.host: dict[int, list[int | None]] = {}
        self.disk: dict[int, list[int | None]] = {}
        self.seqs: dict[int, ReplicaSeq] = {}
        self.seen: set[int] = set()
        self.next_step_id = 0
        self.num_copies: dict[CopyKind, int] = dict.fromkeys(CopyKind, 0)
        self.has_failed = False
        """In the last plan: the next one may repeat what it said."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Check a plan and run it."""
        assert plan.step_id == self.next_step_id
        self.next_step_id += 1
        assert plan.num_tokens <= self.max_tokens
        assert len(plan.seqs) <= self.max_seqs
        self._meet(plan)
        self._forget(plan)
        for copy in plan.copies:
            self._copy(copy)
        self._apply_tables(plan)
        self._check_plan(plan)
        self.has_failed = False
        states = self._compute(plan)
        beams = []
        for draw in plan.beams:
            ends = [states[seq_id] for seq_id in draw.seq_ids]
            beams.append(candidates_of(ends, draw.scores, draw.num_candidates))
        sampled = self._sample(plan, states)
        return StepResult(plan.step_id, sampled, self._prompt_logprobs(plan), beams)

    def fail(self, plan: StepPlan, *, late: bool) -> None:
        """Fail in a plan, before or after all that comes before computing. Nobody knows what is
        in the blocks that it was to write."""
        assert plan.step_id == self.next_step_id
        self.next_step_id += 1
        if late:
            self._meet(plan)
            self._forget(plan)
            for copy in plan.copies:
                self._copy(copy)
            self._apply_tables(plan)
        for share in plan.seqs:
            seq = self.seqs.get(share.seq_id)
            block_ids = [] if seq is None else list(seq.block_ids)
            if not late:
                block_ids += share.new_block_ids
                if share.replaced is not None:
                    block_ids[share.replaced[0]] = share.replaced[1]
            for block_id in block_ids[share.start // self.block_size :]:
                self.pool[block_id] = [None] * self.block_size
        for copy in plan.copies:
            if not late and copy.kind in (CopyKind.WITHIN, CopyKind.FROM_HOST, CopyKind.FROM_DISK):
                self.pool[copy.dst] = [None] * self.block_size
        self.has_failed = True

    def resize(self, num_blocks: int) -> None:
        """Blocks behind the new end are gone."""
        more = num_blocks - len(self.pool)
        self.pool += [[None] * self.block_size for _ in range(more)]
        del self.pool[num_blocks:]

    def _meet(self, plan: StepPlan) -> None:
        for new in plan.new_seqs:
            self._see(new.seq_id)
            num_top = new.sampler.num_prompt_logprobs
            seq = ReplicaSeq(list(new.token_ids), new.sample_index, len(new.token_ids))
            seq.num_prompt_logprobs = num_top
            self.seqs[new.seq_id] = seq
        for fork in plan.forks:
            self._see(fork.child_id)
            parent = self.seqs[fork.parent_id]
            assert fork.num_tokens == len(parent.token_ids)
            self.seqs[fork.child_id] = ReplicaSeq(
                list(parent.token_ids), fork.sample_index, parent.num_prompt
            )
        for seq_id, token_id in plan.appends:
            self.seqs[seq_id].token_ids.append(token_id)

    def _see(self, seq_id: int) -> None:
        assert seq_id not in self.seen, f"sequence {seq_id} is new twice"
        self.seen.add(seq_id)

    def _forget(self, plan: StepPlan) -> None:
        for seq_id in plan.finished:
            assert self.seqs.pop(seq_id, None) is not None or self.has_failed
        for seq_id in plan.preempted:
            seq = self.seqs[seq_id]
            assert seq.block_ids or self.has_failed, f"{seq_id} was preempted without blocks"
            seq.block_ids, seq.num_computed = [], None
        if plan.moved:
            new_ids = dict(plan.moved)
            assert len(new_ids) == len(plan.moved)
            for seq in self.seqs.values():
                seq.block_ids = [new_ids.get(i, i) for i in seq.block_ids]

    def _copy(self, copy: BlockCopy) -> None:
        src, dst = {
            CopyKind.WITHIN: (self.pool, self.pool),
            CopyKind.TO_HOST: (self.pool, self.host),
            CopyKind.FROM_HOST: (self.host, self.pool),
            CopyKind.TO_DISK: (self.host, self.disk),
            CopyKind.FROM_DISK: (self.disk, self.pool),
        }[copy.kind]
        dst[copy.dst] = list(src[copy.src])  # type: ignore[index]
        self.num_copies[copy.kind] += 1

    def _apply_tables(self, plan: StepPlan) -> None:
        for share in plan.seqs:
            seq = self.seqs[share.seq_id]
            if share.replaced is not None:
                index, block_id = share.replaced
                seq.block_ids[index] = block_id
            seq.block_ids.extend(share.new_block_ids)

    def _check_plan(self, plan: StepPlan) -> None:
        ids = {s.seq_id for s in plan.seqs}
        assert len(ids) == len(plan.seqs), "a sequence twice in a plan"
        assert {new.seq_id for new in plan.new_seqs} <= ids
        assert sum(bool(seq.block_ids) for seq in self.seqs.values()) <= self.max_seqs
        drawing = {s.seq_id for s in plan.seqs if s.sample}
        beams = [seq_id for draw in plan.beams for seq_id in draw.seq_ids]
        further = [seq_id for ids in plan.extra_draws.values() for seq_id in ids]
        assert set(plan.extra_draws) <= drawing and set(beams) <= drawing
        assert not set(beams) & set(plan.extra_draws)
        assert len(set(beams)) == len(beams)
        of_forks: dict[int, list[int]] = {}
        for fork in plan.forks:
            of_forks.setdefault(fork.parent_id, []).append(fork.child_id)
        for carrier_id, children in plan.extra_draws.items():
            assert list(children) == of_forks[carrier_id]
        assert len(drawing) + len(further) <= self.max_seqs, "more draws than seats"

    def _compute(self, plan: StepPlan) -> dict[int, int]:
        """The state behind each sequence of the plan."""
        owners: dict[int, int] = {}
        for seq in self.seqs.values():
            for block_id in seq.block_ids:
                owners[block_id] = owners.get(block_id, 0) + 1
        # Within a layer all K and V are written before attention reads any.
        states = {}
        for share in plan.seqs:
            seq = self.seqs[share.seq_id]
            end = share.start + share.num_tokens
            assert share.num_tokens >= 1
            assert seq.num_computed in (None, share.start), "tokens skipped or computed twice"
            assert end <= len(seq.token_ids), "a token computed before it exists"
            assert end <= len(seq.block_ids) * self.block_size, "no slot for a token"
            assert share.sample == (end == len(seq.token_ids))
            state = chain(seq.token_ids[: share.start])
            for position in range(share.start, end):
                block_id = seq.block_ids[position // self.block_size]
                assert owners[block_id] == 1 or self._is_shared_now(plan, share.seq_id, block_id), (
                    f"a write to the shared block {block_id} (I2)"
                )
                state = step_chain(state, seq.token_ids[position])
                self.pool[block_id][position % self.block_size] = state
            seq.num_computed = end
            states[share.seq_id] = state
        # Attention reads the whole context out of the pool.
        for share in plan.seqs:
            seq = self.seqs[share.seq_id]
            state = 17
            for position in range(share.start + share.num_tokens):
                state = step_chain(state, seq.token_ids[position])
                assert self._slot(seq, position) == state, f"wrong KV at {position} of {share}"
        return states

    def _is_shared_now(self, plan: StepPlan, writer_id: int, block_id: int) -> bool:
        """Whether the other owners of a block found it in the step in which its one writer fills
        it: they only read."""
        for share in plan.seqs:
            if share.seq_id == writer_id:
                continue
            blocks = self.seqs[share.seq_id].block_ids
            written = blocks[share.start // self.block_size :]
            if block_id in written:
                return False
        return True

    def _sample(self, plan: StepPlan, states: dict[int, int]) -> list[SeqResult]:
        beams = {seq_id for draw in plan.beams for seq_id in draw.seq_ids}
        sampled = []
        for share in plan.seqs:
            if not share.sample or share.seq_id in beams:
                continue
            for seq_id in (share.seq_id, *plan.extra_draws.get(share.seq_id, ())):
                seq = self.seqs[seq_id]
                token_id = sample_from(states[share.seq_id], seq.sample_index)
                seq.token_ids.append(token_id)
                logprobs = TokenLogprobs(token_id, -1.0, 1, ())
                sampled.append(SeqResult(seq_id, token_id, logprobs))
        return sampled

    def _prompt_logprobs(self, plan: StepPlan) -> dict[int, list[TokenLogprobs]]:
        found = {}
        for share in plan.seqs:
            seq = self.seqs[share.seq_id]
            if seq.num_prompt_logprobs is None:
                continue
            assert share.start <= seq.num_answered, "prompt logprobs are skipped"
            stop = min(share.start + share.num_tokens, seq.num_prompt - 1)
            targets = seq.token_ids[seq.num_answered + 1 : stop + 1]
            if targets:
                found[share.seq_id] = [TokenLogprobs(t, -1.0, 1, ()) for t in targets]
            seq.num_answered = max(seq.num_answered, share.start + share.num_tokens)
        return found

    def _slot(self, seq: ReplicaSeq, position: int) -> int | None:
        return self.pool[seq.block_ids[position // self.block_size]][position % self.block_size]


def hold_blocks(kv: KVCacheManager, num_blocks: int, seq_id: int = OUTSIDE) -> None:
    """Take blocks out of the pool behind the scheduler's back."""
    num_tokens = num_blocks * kv.block_size
    kv.start(seq_id, SeqDemand(num_tokens, num_tokens))
    assert kv.grow(seq_id, num_tokens, 0) is not None


def make_runner(kv: KVCacheManager) -> ReplicaRunner:
    """A replica for `make_scheduler`'s default limits."""
    return ReplicaRunner(kv.num_blocks, kv.block_size, max_tokens=32, max_seqs=8)


def answer(plan: StepPlan, token_id: int = 5) -> StepResult:
    """A result that samples the same token everywhere."""
    assert not plan.beams
    sampled = [
        SeqResult(seq_id, token_id, None)
        for s in plan.seqs
        if s.sample
        for seq_id in (s.seq_id, *plan.extra_draws.get(s.seq_id, ()))
    ]
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
