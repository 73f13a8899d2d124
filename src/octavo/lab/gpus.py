"""GPUs, and what software gets out of them (`data/gpus.json`, each figure with its source)."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from octavo.errors import CapacityError, ConfigError
from octavo.kv.shape import KVShape
from octavo.lab.model_shape import ModelShape
from octavo.util import human_bytes

DEFAULT_SOFTWARE = "2026"
PAPER_SOFTWARE = "2023"
"""That of the PagedAttention paper's figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as its data sheet has it; bandwidths in one direction."""

    name: str
    memory_bytes: int
    """As a program sees it."""
    hbm_bytes_s: float
    flops: float
    """Of dense bfloat16 or float16 products, a second."""
    pcie_bytes_s: float
    nvlink_bytes_s: float
    """To the other GPUs of the host; 0: they talk over PCIe."""
    source: str
    date: str
    """When that was looked up."""

    @property
    def link_bytes_s(self) -> float:
        """Between GPUs."""
        return self.nvlink_bytes_s or self.pcie_bytes_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """What an engine and its kernels reach of it. `source` has the derivation of every figure."""

    name: str
    weight_share: float
    """Of the memory bandwidth, when weights are read for a few tokens."""
    flops_share: float
    """Of the products, when there are many tokens."""
    attention_share: float
    """Of the products, in the attention of prompts."""
    kv_share: float
    """Of the memory bandwidth, when decodes read K and V that lie in one piece."""
    block_overhead_tokens: float
    """Reading a block costs as much besides as so many of its tokens."""
    step_s: float
    layer_s: float
    """Of each layer in a step: launches, and the kernels that are no matrix product."""
    prefill_step_s: float
    """Besides, of a step with prompt tokens."""
    seq_s: float
    """Of each sequence in a step, one after another with the GPU's work."""
    host_step_s: float
    """Of the host beside the GPU: a step takes at least so long..."""
    host_seq_s: float
    """...and so much for each of its sequences."""
    parallel_step_s: float
    """Of a step on more than one GPU."""
    all_reduce_s: float
    """Of one, before its bytes; there are two a layer."""
    link_share: float
    """Of the bandwidth between GPUs."""
    pcie_share: float
    piece_s: float
    """Of one copy to or from the host, before its bytes."""
    pieces_per_layer: int
    """Copies that a block takes for each layer; 0: the block of all layers is one."""
    pool_share: float
    """Of the memory bandwidth, when a block is copied inside the pool."""
    source: str
    date: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """How many blocks are left for KV, and why. Bytes of one GPU."""

    num_blocks: int
    block_size: int
    num_gpus: int
    memory_bytes: int
    utilization: float
    weight_bytes: int
    activation_bytes: int
    reserved_bytes: int
    """Of the runtime: context, collectives, graphs."""
    shape: KVShape
    """What one GPU keeps of a token."""

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds, each in all layers."""
        return self.num_blocks * self.block_size // len(self.shape.windows)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the pool on one GPU."""
        return self.num_blocks * self.shape.bytes_per_block(self.block_size)

    def terms(self) -> dict[str, int]:
        """What the usable memory of one GPU goes into; the last is less than a block."""
        usable = int(self.memory_bytes * self.utilization)
        terms = {
            "weights": self.weight_bytes,
            "activations": self.activation_bytes,
            "runtime": self.reserved_bytes,
            "KV cache": self.kv_bytes,
        }
        return terms | {"left over": usable - sum(terms.values())}

    def __str__(self) -> str:
        usable = int(self.memory_bytes * self.utilization)
        each = " (each GPU)" if self.num_gpus > 1 else ""
        lines = [
            f"  {'usable' + each:<20} {human_bytes(usable):>12}  "
            f"{human_bytes(self.memory_bytes)} x {self.utilization:g}"
        ]
        lines += [
            f"- {name:<20} {human_bytes(size):>12}"
            for name, size in self.terms().items()
            if name in ("weights", "activations", "runtime")
        ]
        shape = self.shape
        of_groups = f", {shape.groups_phrase}" if any(shape.windows) else ""
        in_all = " in all layers" * any(shape.windows)
        lines.append(
            f"= {'KV cache':<20} {human_bytes(self.kv_bytes):>12}  {self.num_blocks:,} blocks x "
            f"{shape.block_terms(self.block_size)}{of_groups}; room for {self.num_slots:,} "
            f"tokens{in_all}"
        )
        return "\n".join(lines)


def gpu_names() -> tuple[str, ...]:
    """Names that `find_gpu` knows."""
    return tuple(_data()["gpus"])


def find_gpu(name: str) -> Gpu:
    """Raises `ConfigError`, with the known names and the nearest, for another one."""
    known = _data()["gpus"]
    key = name.lower()
    if key not in known:
        raise _unknown("GPU", name, known)
    return Gpu(name=key, **known[key])


def find_software(name: str = DEFAULT_SOFTWARE) -> Software:
    """Raises `ConfigError`, with the known names and the nearest, for another one."""
    known = _data()["software"]
    if name not in known:
        raise _unknown("software", name, known)
    return Software(name=name, **known[name])


def paper_slots(model: str) -> int:
    """KV slots that the PagedAttention paper's Table 1 has for a model on its GPUs.

    Raises `ConfigError` for a model that is not in it.
    """
    return int(_paper_row(model)["max_slots"])


def paper_gpus(model: str) -> tuple[Gpu, int]:
    """(GPU, how many of them) that the paper ran a model on; raises as `paper_slots`."""
    row = _paper_row(model)
    return find_gpu(row["gpu"]), int(row["num_gpus"])


def pool_blocks(
    shape: ModelShape,
    gpu: Gpu,
    *,
    num_gpus: int = 1,
    block_size: int = 16,
    utilization: float = 0.9,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    reserved_bytes: int = 1 << 30,
    max_model_len: int | None = None,
) -> PoolSize:
    """Size the pool of a model on GPUs that share it by tensor parallelism: memory less weights,
    less activations of the largest step, less what the runtime takes. Layers with a window are in
    groups for sequences of at most `max_model_len` tokens (see `ModelShape.kv_shape`).

    Raises `CapacityError`, with the arithmetic, where nothing is left, and `ConfigError` for limits
    that make no sense.
    """
    if num_gpus < 1 or block_size < 1 or not 0 < utilization <= 1:
        raise ConfigError(
            f"a pool needs at least one GPU, blocks of at least one token and a utilization in "
            f"(0, 1]; got {num_gpus}, {block_size} and {utilization}"
        )
    weights = shape.weight_bytes // num_gpus
    activations = shape.activation_bytes(max_num_batched_tokens, max_num_seqs, num_gpus)
    kv = shape.kv_shape(num_gpus, max_model_len)
    block_bytes = kv.bytes_per_block(block_size)
    usable = int(gpu.memory_bytes * utilization)
    left = usable - weights - activations - reserved_bytes
    num_blocks = left // block_bytes
    if num_blocks < 1:
        raise CapacityError(
            f"{shape.name} leaves no room for KV on {num_gpus} x {gpu.name}: "
            f"{human_bytes(gpu.memory_bytes)} x {utilization:g} - {human_bytes(weights)} weights - "
            f"{human_bytes(activations)} activations - {human_bytes(reserved_bytes)} runtime = "
            f"{human_bytes(left)} each, and a block is {human_bytes(block_bytes)}; take "
            "more or larger GPUs, or a smaller model"
        )
    return PoolSize(
        num_blocks=num_blocks,
        block_size=block_size,
        num_gpus=num_gpus,
        memory_bytes=gpu.memory_bytes,
        utilization=utilization,
        weight_bytes=weights,
        activation_bytes=activations,
        reserved_bytes=reserved_bytes,
        shape=kv,
    )


def _paper_row(model: str) -> dict[str, Any]:
    rows: dict[str, dict[str, Any]] = {row["model"]: row for row in _data()["pools"]}
    if model not in rows:
        raise _unknown("model of the paper", model, rows)
    return rows[model]


def _unknown(what: str, name: str, known: dict[str, Any]) -> ConfigError:
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else ""
    return ConfigError(f"unknown {what} {name!r}; known: {', '.join(known)}{hint}")


def _data() -> dict[str, Any]:
    text = (files("octavo.lab") / "data" / "gpus.json").read_text(encoding="utf-8")
    data = json.loads(text)
    assert isinstance(data, dict)
    return data
