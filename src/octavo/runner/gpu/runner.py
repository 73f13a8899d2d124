"""The runner on a GPU: a step is queued, and its tokens are picked up when they have arrived.

A launch waits for the device only where it has to know numbers on the host (beams, further samples
of a prompt, prompt logprobs), and in rare cases for memory that a copy still reads: after blocks
moved or a launch failed (the whole block tables are sent, from pageable memory), where a step's
block tables change in more places than it has room for, and each step of a model with dynamic rope.
It runs on tensors of a CPU as well, under Triton's interpreter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.layers.workspace import Workspace
from octavo.models.decoder import Decoder
from octavo.ops.gpu import pdl
from octavo.ops.gpu.inputs import take_tokens
from octavo.ops.gpu.sampling import argmax_into
from octavo.plan import SeqPlan, StepPlan, StepResult
from octavo.request import SamplerParams
from octavo.runner.base import RunnerBase, check_finite
from octavo.runner.gpu.failure import device_errors
from octavo.runner.gpu.forward import Forward, attention_shape
from octavo.runner.gpu.graphs import Captured, RoomCalls, StepGraphs, graph_sizes, mixed_sizes
from octavo.runner.gpu.inputs import GpuInputs
from octavo.runner.gpu.layout import Room
from octavo.runner.gpu.pending import Answer, Answers, PendingStep
from octavo.runner.gpu.steps import (
    FIRST_EAGER_STEPS,
    FIRST_STEPS,
    NO_STEP,
    NUM_BUFFERS,
    HostStep,
    large_steps,
    longest_chunks,
    scratch_step,
)
from octavo.runner.gpu.tokens import Sampled
from octavo.runner.kv_store import MAX_SLOTS, KVStore
from octavo.sampling.batch import SeqSampling
from octavo.sampling.device import DeviceSampler
from octavo.sampling.sampler import Sampled as Drawn
from octavo.weights.progress import Progress

_ALL_AT_ONCE = SamplerParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, num_logprobs=1)
"""Takes every way that needs memory."""


class _Group(NamedTuple):
    """Sequences that sample in one step."""

    seq_ids: list[int]
    special: list[SeqSampling]
    """Those that are not plain (greedy and nothing else): it matters how many tokens they have."""
    learners: list[tuple[int, SeqSampling]]
    """(Place, sequence) of those for which it matters what was drawn."""


_ALL_PLAIN = _Group([], [], [])


class Transient(NamedTuple):
    """Memory that the largest step takes while it runs, beside all buffers; 0 on a CPU."""

    forward_bytes: int
    """Until its logits are there."""
    sampling_bytes: int
    """After that, when the first is free again."""


class GpuRunner(RunnerBase):
    """Model, KV pool, buffers and per-sequence state on a GPU.

    Sizes as in `Runner`. graphs: whether `capture` records steps, as far as the model's
    parts allow it; num_sms: multiprocessors, of the device by default.
    """

    def __init__(
        self,
        model: Decoder,
        kv_store: KVStore,
        workspace: Workspace,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks_per_seq: int,
        num_groups: int = 1,
        graphs: bool = True,
        num_sms: int | None = None,
    ) -> None:
        device = model.device
        assert kv_store.max_blocks * kv_store.data.shape[4] <= MAX_SLOTS, "slots beyond 32 bits"
        self.inputs = GpuInputs(
            kv_store.data.shape[4],
            max_num_seqs,
            max_num_tokens,
            max_blocks_per_seq,
            attention_shape(model, num_sms or pdl.num_sms(device)),
            device,
            with_prompt_lens=model.rotary.is_dynamic,
            num_groups=num_groups,
        )
        super().__init__(model, kv_store, workspace, self.inputs)
        self.device = device
        self.max_num_seqs, self.max_num_tokens = max_num_seqs, max_num_tokens
        self._longest = min(self.inputs.max_seq_tokens, model.rotary.max_position)
        self._can_record = graphs and model.capturable
        self._forward = Forward(model, kv_store, self.inputs, workspace)
        self.graphs = StepGraphs(device, self._calls_of)
        max_rows = len(workspace.logits)
        self.sampler = DeviceSampler(model.arch.vocab_size, max_rows, device)
        self._group = _ALL_PLAIN
        self._answers = Answers(max_num_seqs, device)
        self._latest: deque[PendingStep] = deque(maxlen=NUM_BUFFERS)
        """Steps that may be under way: kept if the device is lost. (One whose launch fails is kept
        by its error.)"""
        self._tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._finite = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._answer = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    # -- steps

    def execute(self, plan: StepPlan) -> StepResult:
        """Carry out one plan and wait for its result."""
        return self.launch(plan)()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Queue a plan: copies, the forward pass, sampling. See `RunnerBase.launch`.

        `compute_s` of the result is the device's own time from the end of the copies to the last
        token, without what it waited for before.
        """
        answer = self._answers.next()
        try:
            with device_errors(self.device, self):
                pending = self._launch(plan, answer)
        except BaseException:
            self.inputs.step_failed()
            self._answers.take_back()
            raise
        self._latest.append(pending)
        return pending

    def _launch(self, plan: StepPlan, answer: Answer) -> PendingStep:
        traffic = self._apply(plan)
        pending = PendingStep(plan.step_id, traffic, answer, self.inputs, self)
        if plan.seqs:
            answer.begin()
            pending.computes = True
            step = self.inputs.describe(plan.seqs)
            logits, rows = self._compute(plan, step, pending)
            if step.seq_ids:
                self._choose(plan, step, logits, rows, pending)
        answer.fetch(None if pending.draw else self._answer[: len(pending.sampled.seq_ids)])
        return pending

    def _compute(
        self, plan: StepPlan, step: HostStep, pending: PendingStep
    ) -> tuple[Tensor, Tensor]:
        """([num sampled, vocab_size] logits, their sequences' rows of the tables), with each one's
        best token in its place."""
        num_rows, room = len(step.seq_ids), self._room_for(step)
        placed = self.inputs.upload(step, room)
        rows = placed.sample_rows[:num_rows]
        if room is None:
            hidden = self._forward.hidden(step, placed)
        else:
            self.graphs.replay(room)
            if not room.mixed:
                return self.workspace.logits[:num_rows], rows
            hidden = self.workspace.hidden[: room.num_tokens]
        if self._num_prompt_logprobs:
            pending.prompt_logprobs = self._prompt_logprobs(_in_batch_order(plan.seqs), hidden)
        if num_rows:
            last = hidden
            if not step.only_decodes:
                last = hidden.index_select(0, placed.last_rows[:num_rows])
            self._best(self.model.logits(last, self.workspace), rows)
        return self.workspace.logits[:num_rows], rows

    def _room_for(self, step: HostStep) -> Room | None:
        """The recorded step that computes it; None: it is launched kernel by kernel."""
        mixed = not step.only_decodes
        for room in self.graphs.rooms_for(len(step.token_ids), mixed):
            if not mixed or self.inputs.fits(step, room):
                return room
        return None

    def _best(self, logits: Tensor, rows: Tensor) -> None:
        num_rows = len(logits)
        tokens, finite = self._tokens[:num_rows], self._finite[:num_rows]
        argmax_into(logits, tokens, finite, self.sampler.argmax_scratch)
        self._take(tokens, finite, rows)

    def _take(self, tokens: Tensor, finite: Tensor, rows: Tensor) -> None:
        take_tokens(tokens, finite, rows, self.inputs.last_tokens, self._answer[: len(rows)])

    # -- sampling

    def _choose(
        self, plan: StepPlan, step: HostStep, logits: Tensor, rows: Tensor, pending: PendingStep
    ) -> None:
        """Settle what each row draws. `_best` has been there: greedy rows have their token."""
        seq_ids, new = step.seq_ids, (step.sample_rows, step.sample_positions)
        if plan.beams or plan.extra_draws:
            check_finite(logits, seq_ids)
            pending.candidates, seq_ids, logits = self._draw_beams(plan, seq_ids, logits)
            if len(seq_ids) < len(step.seq_ids):
                kept = set(seq_ids)
                places = [i for i, seq_id in enumerate(step.seq_ids) if seq_id in kept]
                new = (new[0][places], new[1][places])
                index = torch.tensor(places, dtype=torch.int64, device=self.device)
                rows = rows.index_select(0, index)
                tokens, finite = (x.index_select(0, index) for x in (self._tokens, self._finite))
                self._take(tokens, finite, rows)
            if plan.extra_draws:
                pending.further = self._draw_further(plan.extra_draws, seq_ids, logits)
        if not seq_ids:
            return
        pending.sampled = Sampled(seq_ids, *new, self.inputs.recent.tenures(new[0]))
        group = self._group_of(seq_ids)
        pending.learners = group.learners
        if group.special:
            pending.draw = draw = self.sampler.launch(logits, seq_ids, self.sampling)
            self._take(draw.token_ids, draw.finite, rows)
        for seq in group.special:
            seq.advance()
        self.inputs.sampled_on_device(*new)

    def _drawn_now(self, logits: Tensor, seq_ids: list[int]) -> Drawn:
        # A seed's tokens shall not depend on whether a sample shares its prompt's step.
        draw = self.sampler.launch(logits, seq_ids, self.sampling)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return draw.collect()

    def _group_of(self, seq_ids: list[int]) -> _Group:
        """Kept while the same sequences run on."""
        if self.sampling.all_plain:
            return _ALL_PLAIN
        if self._group.seq_ids != seq_ids:
            seqs = self.sampling.sequences(seq_ids)
            learners = [
                (i, s) for i, s in enumerate(seqs) if s.counts is not None or s.tail is not None
            ]
            self._group = _Group(seq_ids, [seq for seq in seqs if not seq.plain], learners)
        return self._group

    # -- recorded steps

    def capture(self, progress: Progress | None = None) -> Captured:
        """Record steps of all sizes, unless that is off; before or between requests.

        Recorded steps name the addresses of inputs, workspace and pool, and outlive a change of the
        pool's size as long as its address stays.
        """
        with torch.inference_mode(), device_errors(self.device, self):
            return self.graphs.capture(*self._recorded_sizes(), progress)

    def _recorded_sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Sizes of steps of decodes, and of mixed ones, that are recorded."""
        if not self._can_record:
            return (), ()
        return graph_sizes(self.max_num_seqs), mixed_sizes(self.max_num_tokens)

    def _calls_of(self, room: Room) -> RoomCalls:
        """The calls of a step on fixed addresses: all of one of decodes but the sampling. Of a
        mixed one, where other rows sample each time, up to the last layer."""
        placed = self.inputs.upload(NO_STEP, room)

        def finish(hidden: Tensor) -> None:
            assert hidden.data_ptr() == self.workspace.hidden.data_ptr()
            if not room.mixed:
                self._best(self.model.logits(hidden, self.workspace), placed.sample_rows)

        return RoomCalls(
            prepare=lambda: finish(self._forward.each_kind(placed)),
            step=lambda: finish(self._forward.hidden(None, placed)),
        )

    def resize_pool(self, num_blocks: int) -> None:
        """See `RunnerBase.resize_pool`; steps are recorded anew if the pool had to move."""
        with device_errors(self.device, self):
            moved = self.kv_store.resize(num_blocks)
        if moved and self.graphs.has_any:
            self.capture()

    # -- measuring and compiling

    def compile_kernels(self) -> None:
        """Compile in threads what steps will launch, but for sampling; before all else, as nothing
        runs: what they would compute is left as it was."""
        if self.device.type != "cuda":
            return
        from octavo.ops.gpu.compiling import compiling_only

        sizes, mixed = self._recorded_sizes()
        rooms = [Room(size, True) for size in mixed] + [Room(size, False) for size in sizes]
        with torch.inference_mode(), device_errors(self.device, self), compiling_only():
            for room in rooms:
                self._calls_of(room).prepare()
            self._first_steps(recorded=bool(rooms))
            self._wait()

    def profile_run(self) -> Transient:
        """A step of the most tokens and sequences, and the most that sampling takes: its memory is
        the peak. Only while there are no sequences; leaves nothing behind but compiled kernels."""
        num_seqs = min(self.max_num_seqs, self.max_num_tokens)
        chunks = longest_chunks(self.max_num_tokens - num_seqs, num_seqs, self._longest)
        self._forget_peak()
        logits, seq_ids = self._scratch_step(num_seqs - len(chunks), chunks)
        forward_bytes = self._given_back()
        self._forget_peak()
        self._scratch_sampling(logits, seq_ids)
        return Transient(forward_bytes, self._given_back())

    def _forget_peak(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def _given_back(self) -> int:
        """Memory that was in use since `_forget_peak`, and is not now."""
        if self.device.type != "cuda":
            return 0
        stats = torch.cuda.memory_stats(self.device)
        peak, held = (int(stats[f"allocated_bytes.all.{which}"]) for which in ("peak", "current"))
        return peak - held

    def warm_up(self) -> None:
        """Run steps like those that a user meets first, so that their kernels are compiled; as
        `profile_run`."""
        self._first_steps(recorded=self.graphs.has_any)

    def _first_steps(self, *, recorded: bool) -> None:
        steps = FIRST_STEPS[: FIRST_EAGER_STEPS if recorded else None]
        steps += large_steps(self.inputs.cutter.shape.fresh_tokens, self._longest)
        if not recorded:
            steps += tuple((num_decodes, []) for num_decodes in (1, 2, 16))
        for num_decodes, chunks in steps:
            num_tokens = num_decodes + sum(chunks)
            fits = num_tokens <= self.max_num_tokens and max(chunks, default=0) <= self._longest
            if fits and num_decodes + len(chunks) <= self.max_num_seqs:
                self._scratch_step(num_decodes, chunks)

    @torch.inference_mode()
    def _scratch_step(self, num_decodes: int, chunks: list[int]) -> tuple[Tensor, list[int]]:
        """(Logits in the workspace, their sequences, which do not exist)."""
        self.inputs.clear_tables()
        step = scratch_step(num_decodes, chunks)
        with device_errors(self.device, self):
            placed = self.inputs.upload(step)
            hidden = self._forward.hidden(step, placed)
            last = hidden.index_select(0, placed.last_rows)
            logits = self.model.logits(last, self.workspace)
            self._best(logits, placed.sample_rows)
            self._wait()
        self.inputs.clear_tables()
        return logits, step.seq_ids

    @torch.inference_mode()
    def _scratch_sampling(self, logits: Tensor, seq_ids: list[int]) -> None:
        with device_errors(self.device, self):
            for seq_id in seq_ids:
                self.sampling.add(seq_id, _ALL_AT_ONCE, [0])
            self.sampler.launch(logits.nan_to_num_(), seq_ids, self.sampling)
            for seq_id in seq_ids:
                self.sampling.forget(seq_id)
            self._wait()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> Tensor:
        """All of a plan but the sampling: hidden states [num_tokens, hidden_size], in the plan's
        order; for tests."""
        self._apply(plan)
        step = self.inputs.describe(plan.seqs)
        hidden = self._forward.hidden(step, self.inputs.upload(step))
        of: dict[int, Tensor] = {}
        first = 0
        for seq in _in_batch_order(plan.seqs):
            of[seq.seq_id] = hidden[first : first + seq.num_tokens]
            first += seq.num_tokens
        return torch.cat([of[seq.seq_id] for seq in plan.seqs])


def _in_batch_order(seqs: list[SeqPlan]) -> list[SeqPlan]:
    return sorted(seqs, key=lambda seq: seq.num_tokens != 1)
