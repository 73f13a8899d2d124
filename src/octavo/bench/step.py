"""`octavo bench step`: the model's decode and prefill steps alone, against the machine's rates.

Plans that no scheduler made are carried out by the engine's own runner, as a serving engine would
have it: under overlap the next one is launched before the result of the one before is waited for.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from octavo.bench.roofline import Rates, measure_rates
from octavo.bench.step_runs import StepRuns, Times
from octavo.engine.kernels import device_name
from octavo.errors import InvalidRequestError
from octavo.plan import SeqPlan
from octavo.util import cdiv, flag_name

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.arch import ModelArch
    from octavo.config import EngineConfig

_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class StepOptions:
    """What to measure."""

    batch_sizes: tuple[int, ...] = (1, 8, 32, 128, 256)
    context: int = 512
    """Tokens of each sequence before the first measured step."""
    prefill_batch: int = 8
    """Prompts; 0 leaves the prefill out."""
    prefill_len: int = 512
    num_steps: int = 20
    """Decode steps in a row."""
    num_iters: int = 5
    """How often; medians are kept."""

    def check(self) -> None:
        """Raise `InvalidRequestError` for what cannot be measured."""
        minima = {"context": 1, "prefill_batch": 0, "prefill_len": 1, "num_steps": 1,
                  "num_iters": 1}  # fmt: skip
        values = [(name, getattr(self, name), least) for name, least in minima.items()]
        for name, value, least in [*values, *(("batch_sizes", b, 1) for b in self.batch_sizes)]:
            if value < least:
                raise InvalidRequestError(
                    f"{flag_name(name)} must be at least {least}, got {value}", parameter=name
                )

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence, with what is generated."""
        steps = _WARM_UP + self.num_steps * (self.num_iters + 1)
        return max(self.context + steps + 1, self.prefill_len + 1)

    def num_blocks(self, block_size: int) -> int:
        """Blocks that the largest measurement takes."""
        each = cdiv(self.max_context, block_size)
        return max([*self.batch_sizes, self.prefill_batch, 1]) * each


@dataclass(frozen=True, slots=True)
class StepRow:
    """One kind of step; seconds are medians."""

    kind: str
    """"decode" or "prefill"."""
    batch: int
    tokens: int
    """Context of each sequence, or tokens of each prompt."""
    num_steps: int
    """Steps that the work takes: more than one where the prompts do not fit one."""
    step_s: float
    """From one result to the next."""
    device_s: float
    """The device's own time, from the end of the copies to the last token."""
    host_s: float
    """Until the step was launched: tables and inputs; on a CPU what is not computing."""
    num_bytes: float
    """Of weights and KV, each read once, and the KV written."""
    num_flops: float
    floor_s: float
    """What the machine needs for those at least."""

    @property
    def share(self) -> float:
        """`floor_s` of `step_s`."""
        return self.floor_s / self.step_s


@dataclass(frozen=True, slots=True)
class StepResults:
    """Everything that was measured."""

    model: str
    dtype: str
    block_size: int
    overlap: bool
    rates: Rates
    rows: list[StepRow]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        values = asdict(self)
        for row, plain in zip(self.rows, values["rows"], strict=True):
            plain["share"] = row.share
        return values

    def __str__(self) -> str:
        overlap = "launched ahead" if self.overlap else "one after another"
        lines = [
            f"{self.model}, {self.dtype}, blocks of {self.block_size}; steps {overlap}",
            str(self.rates),
            "",
            f"{'':10}{'batch x tokens':<17}{'step ms':>9}{'device ms':>11}{'host ms':>9}"
            f"{'tokens/s':>10}{'GB':>9}{'TFLOP':>10}{'floor ms':>10}{'reached':>9}",
        ]
        for row in self.rows:
            num_tokens = row.batch * (row.tokens if row.kind == "prefill" else 1)
            lines.append(
                f"{row.kind:<10}{f'{row.batch:,} x {row.tokens:,}':<17}{1e3 * row.step_s:>9.3f}"
                f"{1e3 * row.device_s:>11.3f}{1e3 * row.host_s:>9.3f}"
                f"{num_tokens / row.step_s:>10,.0f}{1e-9 * row.num_bytes:>9.3g}"
                f"{1e-12 * row.num_flops:>10.3g}{1e3 * row.floor_s:>10.3f}{row.share:>9.0%}"
            )
        return "\n".join(lines)


def engine_config(config: EngineConfig, options: StepOptions, *, gpu: bool) -> EngineConfig:
    """The engine that is measured: with room for the largest batch.

    On a GPU the pool stays as large as it serves with, and the batches' blocks lie all over it.
    """
    changes: dict[str, Any] = {
        "enable_prefix_caching": False, "skip_tokenizer_init": True, "tokenizer": None,
        "swap_space": 0, "preemption_mode": "recompute",
        "disable_hybrid_kv_cache_manager": True,  # plans that no scheduler made know one group
    }  # fmt: skip
    largest = max([*options.batch_sizes, options.prefill_batch])
    if config.max_model_len is None:
        changes["max_model_len"] = options.max_context
    if config.max_num_seqs is not None and config.max_num_seqs < largest:
        raise InvalidRequestError(
            f"--max-num-seqs {config.max_num_seqs} is less than the largest batch, {largest}: "
            "raise it, or lower --batch-sizes",
            parameter="batch_sizes",
        )
    if not gpu and config.num_gpu_blocks_override is None and config.kv_cache_memory_bytes is None:
        changes["num_gpu_blocks_override"] = options.num_blocks(config.block_size)
    return config.replace(**changes)


def run_steps(
    llm: LLM, options: StepOptions, tell: Callable[[str], None] = lambda _: None
) -> StepResults:
    """Measure all of it. llm: an engine of `engine_config`, without requests.

    Raises `InvalidRequestError` for a batch that the engine's pool or limits have no room for.
    """
    options.check()
    device = torch.device(llm.config.device)
    tell("measuring the machine")
    dtype = getattr(torch, llm.config.dtype)
    rates = measure_rates(device, device_name(device), dtype)
    runs = StepRuns(llm)
    rows = []
    for batch in options.batch_sizes:
        tell(f"decode, batch {batch}")
        rows.append(_decode(llm, runs, options, batch, rates))
    if options.prefill_batch:
        tell("prefill")
        rows.append(_prefill(llm, runs, options, rates))
    config = llm.config
    return StepResults(config.model, config.dtype, config.block_size, runs.overlap, rates, rows)


def _decode(llm: LLM, runs: StepRuns, options: StepOptions, batch: int, rates: Rates) -> StepRow:
    """Steps in which each of `batch` sequences computes one token."""
    tables = runs.tables(batch, options.max_context)
    runs.fill(tables, options.context)
    with runs.known(batch, options.context + 1) as seqs:
        position = options.context

        def run(count: int) -> Times:
            nonlocal position
            plans = []
            for _ in range(count):
                blocks = tables if position == options.context else [()] * batch
                pairs = zip(seqs, blocks, strict=True)
                plans.append([SeqPlan(seq, position, 1, own, None, True) for seq, own in pairs])
                position += 1
            return runs.run(plans)

        run(_WARM_UP)
        times = [run(options.num_steps) for _ in range(options.num_iters)]
    context = options.context + _WARM_UP + options.num_steps * options.num_iters // 2
    attended = mean_attended(llm.arch, context)
    weights = linear_weights(llm.arch)
    num_bytes = weights * _element_bytes(llm) + batch * (attended + 1) * _token_bytes(llm)
    num_flops = batch * (2.0 * weights + attention_flops(llm.arch, attended))
    return StepRow(
        "decode", batch, options.context, 1,
        statistics.median(t.wall_s / t.num_steps for t in times),
        statistics.median(t.compute_s / t.num_steps for t in times),
        statistics.median(t.host_s / t.num_steps for t in times),
        num_bytes, num_flops, rates.floor_s(num_bytes, num_flops),
    )  # fmt: skip


def _prefill(llm: LLM, runs: StepRuns, options: StepOptions, rates: Rates) -> StepRow:
    """All prompts from their first token to the first one sampled."""
    batch, length = options.prefill_batch, options.prefill_len
    tables = runs.tables(batch, length + 1)

    def run() -> Times:
        with runs.known(batch, length) as seqs:
            return runs.run(runs.chunks(seqs, tables, length))

    run()
    times = [run() for _ in range(options.num_iters)]
    layers = linear_weights(llm.arch, head=False)
    head = linear_weights(llm.arch) - layers
    num_steps = times[0].num_steps
    num_bytes = 1.0 * (layers * num_steps + head) * _element_bytes(llm)
    num_bytes += 2 * batch * length * _token_bytes(llm)
    num_flops = batch * (2.0 * (length * layers + head))
    num_flops += batch * attention_flops(llm.arch, length * mean_attended(llm.arch, 1, length))
    return StepRow(
        "prefill", batch, length, num_steps,
        statistics.median(t.wall_s for t in times),
        statistics.median(t.compute_s for t in times),
        statistics.median(t.host_s for t in times),
        num_bytes, num_flops, rates.floor_s(num_bytes, num_flops),
    )  # fmt: skip


def _element_bytes(llm: LLM) -> int:
    return int(getattr(torch, llm.config.dtype).itemsize)


def _token_bytes(llm: LLM) -> float:
    """Of K and V of a token, over all layers."""
    return llm.memory_report().ledger.bytes_per_block / llm.config.block_size


def linear_weights(arch: ModelArch, *, head: bool = True) -> int:
    """Elements of the matrices that a token is multiplied with, of experts only those that serve
    it; the head is one of them."""
    layers = sum(_attention_weights(arch) + _mlp_weights(arch, i) for i in range(arch.num_layers))
    return layers + (arch.hidden_size * arch.vocab_size if head else 0)


def _attention_weights(arch: ModelArch) -> int:
    width, heads, mla = arch.hidden_size, arch.num_heads, arch.mla
    if mla is None:
        return 2 * width * (heads + arch.num_kv_heads) * arch.head_dim
    per_head = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    rank = mla.q_lora_rank
    query = width * heads * per_head if rank is None else rank * (width + heads * per_head)
    up = mla.kv_lora_rank * heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return query + width * arch.kv_head_dim + up + heads * mla.v_head_dim * width


def _mlp_weights(arch: ModelArch, layer: int) -> int:
    width, moe = arch.hidden_size, arch.moe
    if moe is None or not arch.is_moe_layer(layer):
        return (3 if arch.gated_mlp else 2) * width * arch.intermediate_size
    sizes = moe.experts_per_token * moe.expert_size + moe.shared_size
    return width * (3 * sizes + moe.num_experts)


def mean_attended(arch: ModelArch, first: int, last: int | None = None) -> float:
    """Tokens that one attends to, itself included, where it has `first` to `last` (or `first`)
    tokens of context: the mean over layers, whose windows may differ, and over those lengths."""
    last = first if last is None else last
    total = 0.0
    for layer in range(arch.num_layers):
        window = arch.window(layer) or last
        whole = max(0, min(window, last) - first + 1)  # lengths that the window holds
        total += whole * (2 * first + whole - 1) / 2 + (last - first + 1 - whole) * window
    return total / arch.num_layers / (last - first + 1)


def attention_flops(arch: ModelArch, num_pairs: float) -> float:
    """Of both products of attention, over all layers, for pairs of a token and one it attends
    to."""
    width = 2 * arch.head_dim if arch.mla is None else arch.kv_head_dim + arch.mla.kv_lora_rank
    return 2.0 * arch.num_layers * arch.num_heads * width * num_pairs
