"""What it costs to preempt one sequence and bring it back: computed again, or copied."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.errors import InvalidRequestError
from octavo.plan import BlockCopy, CopyKind, NewSeq, SeqPlan, StepPlan, StepResult
from octavo.request import SamplerParams
from octavo.util import cdiv, flag_name

if TYPE_CHECKING:
    from octavo import LLM

StartEngine = Callable[[EngineConfig], "LLM"]


@dataclass(frozen=True, slots=True)
class RestoreCosts:
    """One sequence preempted and brought back, at one block size; median seconds."""

    block_size: int
    num_blocks: int
    """Blocks of the sequence: so many copies in each direction."""
    block_bytes: int
    recompute_s: float
    """Its tokens computed again, less `decode_s`: that step yields the next token too."""
    swap_out_s: float
    """Its blocks copied to host memory."""
    swap_in_s: float
    """And back into the pool."""
    decode_s: float
    """One token of it, alone: what has to follow once its blocks are back."""

    @property
    def swap_s(self) -> float:
        """Out and in."""
        return self.swap_out_s + self.swap_in_s


def measure_costs(
    config: EngineConfig,
    start: StartEngine,
    *,
    num_tokens: int,
    block_sizes: Sequence[int],
    num_iters: int,
) -> list[RestoreCosts]:
    """The cost of bringing one sequence back, for each block size (PagedAttention paper, Fig. 19a).

    An engine is started for each; what is timed is its own runner carrying out the plans that
    recomputing, swapping out and swapping in are made of.
    """
    _check(num_tokens, block_sizes, num_iters)
    costs = []
    for block_size in block_sizes:
        changed = config.replace(
            block_size=block_size,
            num_gpu_blocks_override=cdiv(num_tokens + 1, block_size),
            kv_cache_memory_bytes=None,
            max_model_len=num_tokens + 1,
            enable_prefix_caching=False,
            preemption_mode="swap",
            disable_hybrid_kv_cache_manager=True,  # plans that no scheduler made know one group
            skip_tokenizer_init=True,
            tokenizer=None,
        )
        with start(changed) as llm:
            costs.append(_costs_of(llm, num_tokens, num_iters))
    return costs


class _Steps:
    """Carries out plans that no scheduler made, on an engine that has no requests."""

    def __init__(self, llm: LLM, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._execute = llm._engine.engine.core.execute
        self._chunk = llm.config.limits().max_num_batched_tokens
        rng, vocab_size = random.Random(llm.config.seed), llm.arch.vocab_size
        self._token_ids = [rng.randrange(vocab_size) for _ in range(num_tokens)]
        self._table = tuple(range(cdiv(num_tokens + 1, llm.config.block_size)))
        self._num_blocks = cdiv(num_tokens, llm.config.block_size)
        self._step_id = 0

    def start(self) -> None:
        """A sequence that the runner has not seen."""
        self._run(new_seqs=[NewSeq(0, self._token_ids, SamplerParams())])

    def end(self) -> None:
        """It is over."""
        self._run(finished=[0])

    def preempt(self) -> None:
        """It loses its blocks."""
        self._run(preempted=[0])

    def recompute(self) -> None:
        """All its tokens, in as many steps as the engine takes; the last one samples."""
        for first in range(0, self.num_tokens, self._chunk):
            count = min(self._chunk, self.num_tokens - first)
            blocks = () if first else self._table
            last = first + count == self.num_tokens
            self._run(seqs=[SeqPlan(0, first, count, blocks, None, last)])

    def decode(self) -> None:
        """The token after those; it has its blocks."""
        self._run(seqs=[SeqPlan(0, self.num_tokens, 1, (), None, True)])

    def swap_out(self) -> None:
        """All its blocks to the host."""
        self._run(copies=[BlockCopy(i, i, CopyKind.TO_HOST) for i in range(self._num_blocks)])

    def swap_in(self) -> None:
        """And back."""
        self._run(copies=[BlockCopy(i, i, CopyKind.FROM_HOST) for i in range(self._num_blocks)])

    def _run(self, **parts: Any) -> StepResult:
        self._step_id += 1
        return self._execute(StepPlan(self._step_id, **parts))


def _costs_of(llm: LLM, num_tokens: int, num_iters: int) -> RestoreCosts:
    steps = _Steps(llm, num_tokens)
    times: dict[str, list[float]] = {}
    for _ in range(num_iters + 1):
        steps.start()
        # between any two, weights go through the processor's caches, as they do while serving
        for step in (
            steps.recompute, steps.decode, steps.swap_out, steps.decode, steps.swap_in, steps.decode
        ):  # fmt: skip
            begin = time.perf_counter()
            step()
            times.setdefault(step.__name__, []).append(time.perf_counter() - begin)
        steps.preempt()
        steps.end()
    median = {name: statistics.median(values[1:]) for name, values in times.items()}
    block_size = llm.config.block_size
    return RestoreCosts(
        block_size=block_size,
        num_blocks=cdiv(num_tokens, block_size),
        block_bytes=llm.memory_report().ledger.bytes_per_block,
        recompute_s=max(0.0, median["recompute"] - median["decode"]),
        swap_out_s=median["swap_out"],
        swap_in_s=median["swap_in"],
        decode_s=median["decode"],
    )


def _check(num_tokens: int, block_sizes: Sequence[int], num_iters: int) -> None:
    """Raise `InvalidRequestError` for what cannot be measured."""
    values = [("num_tokens", num_tokens), ("num_iters", num_iters)]
    for name, value in [*values, *(("block_sizes", size) for size in block_sizes)]:
        if value < 1:
            flag = flag_name(name)
            raise InvalidRequestError(f"{flag} must be at least 1, got {value}", parameter=name)
