"""Steps whose tokens are on their way to the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.plan import BeamCandidate, SeqResult, StepResult, TokenLogprobs
from octavo.runner.gpu.failure import device_errors
from octavo.runner.gpu.inputs import GpuInputs
from octavo.runner.gpu.steps import NUM_BUFFERS
from octavo.runner.gpu.tokens import NOBODY, Sampled
from octavo.runner.kv_store import HostTraffic
from octavo.sampling.batch import SeqSampling
from octavo.sampling.device import DeviceDraw
from octavo.sampling.sampler import not_finite


class Answer:
    """Where the tokens of one step arrive, and when."""

    __slots__ = ("_array", "_begun", "_buffer", "_ended", "device")

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device = device
        self._buffer = torch.zeros(max_num_seqs, dtype=torch.int32, pin_memory=on_gpu)
        self._array: NDArray[np.int32] = self._buffer.numpy()
        self._begun = torch.cuda.Event(enable_timing=True) if on_gpu else None
        self._ended = torch.cuda.Event(enable_timing=True) if on_gpu else None

    def begin(self) -> None:
        """From here on the step's time counts."""
        if self._begun is not None:
            self._begun.record()

    def fetch(self, tokens: Tensor | None) -> None:
        """Queue the copy of int32 [num_rows] tokens, if any: the last thing of the step."""
        if tokens is not None:
            self._buffer[: len(tokens)].copy_(tokens, non_blocking=True)
        if self._ended is not None:
            self._ended.record()

    def wait(self) -> None:
        """Until the step has ended; no later work of the device is waited for."""
        if self._ended is not None:
            self._ended.synchronize()

    def tokens(self, num_rows: int) -> list[int]:
        """What was fetched, of a step that has been waited for."""
        return self._array[:num_rows].tolist()

    def seconds(self) -> float:
        """What the device took, of a step that has been waited for; 0 where it has no clock."""
        if self._begun is None or self._ended is None:
            return 0.0
        return self._begun.elapsed_time(self._ended) / 1e3


class Answers:
    """Answers in turn: of two steps under way and one that is handed out."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._answers = [Answer(max_num_seqs, device) for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def next(self) -> Answer:
        """The one that was used longest ago."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        return self._answers[self._turn]

    def take_back(self) -> None:
        """The step that has the last one failed: however many fail, those under way keep theirs."""
        self._turn = (self._turn - 1) % NUM_BUFFERS


@dataclass(slots=True)
class PendingStep:
    """A step under way; call it once to wait for its result."""

    step_id: int
    traffic: HostTraffic
    answer: Answer
    inputs: GpuInputs
    """Where its tokens go."""
    runner: object
    """Holds all there is on the device, this step included, for when that is lost."""
    computes: bool = False
    """Whether there was anything to compute."""
    sampled: Sampled = NOBODY
    """In the plan's order, beams excepted."""
    learners: Sequence[tuple[int, SeqSampling]] = ()
    """(Place in them, sampling state) of those for which it matters what was drawn."""
    draw: DeviceDraw | None = None
    """Of rows that are not simply greedy; it brings its tokens itself."""
    further: dict[int, list[SeqResult]] = field(default_factory=dict)
    """By sequence: what its further samples drew."""
    candidates: list[list[BeamCandidate]] = field(default_factory=list)
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)

    def __call__(self) -> StepResult:
        """Wait. Raises `NumericsError` naming sequences, or `DeviceLostError`."""
        with device_errors(self.answer.device, self.runner):
            self.answer.wait()
            seconds = self.answer.seconds() if self.computes else 0.0
        tokens, logprobs = self._drawn()
        self.inputs.learn(self.sampled, tokens)
        for place, seq in self.learners:
            seq.learn(tokens[place])
        # SeqResult(*each), at a third of the time
        new = partial(tuple.__new__, SeqResult)
        results = list(map(new, zip(self.sampled.seq_ids, tokens, logprobs)))  # noqa: B905
        if self.further:
            results = [
                each
                for result in results
                for each in (result, *self.further.get(result.seq_id, ()))
            ]
        return StepResult(
            self.step_id,
            sampled=results,
            prompt_logprobs=self.prompt_logprobs,
            beams=self.candidates,
            copy_s=self.traffic.seconds,
            num_host_copies=self.traffic.num_blocks,
            compute_s=seconds,
        )

    def _drawn(self) -> tuple[list[int], Iterable[TokenLogprobs | None]]:
        if self.draw is not None:
            return self.draw.collect()
        seq_ids = self.sampled.seq_ids
        tokens = self.answer.tokens(len(seq_ids))
        if tokens and min(tokens) < 0:
            raise not_finite([i for i, t in zip(seq_ids, tokens, strict=True) if t < 0])
        return tokens, repeat(None)
