"""The engine's configuration: one frozen dataclass, from which the command line is generated.

Names are vLLM's wherever octavo has the thing. A field's docstring is its `--help` text. None
means "chosen when the model and the machine are known"; the choice is shown by the memory report.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from os import PathLike, fspath
from typing import Any, Literal, NamedTuple

from octavo.errors import ConfigError
from octavo.foreign import why_not
from octavo.util import flag_name

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""Served when no model is named."""

Device = Literal["auto", "cpu", "cuda"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "fp8", "int8"]
AttentionName = Literal["auto", "triton", "flashinfer", "fa3", "latent", "cpu", "gather"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
QuantizationName = Literal["none", "int8", "fp8", "gguf", "awq", "gptq", "compressed-tensors"]
MAX_THREADS = 1024
"""Far more than any machine makes use of; far fewer than bring a process down."""

MAX_SWAP_SPACE = 65_536
"""GiB: more than any host has."""

GPU_MEMORY_UTILIZATION = 0.92
_DISK_BYTES = 4 * 2**30
"""Of the disk tier, where nothing else was asked for."""

KVPolicy = Literal["paged", "contiguous", "orca-max", "orca-pow2", "orca-oracle"]
PreemptionMode = Literal["recompute", "swap", "auto"]
PreemptionVictim = Literal["last-come", "lowest-cost", "priority"]
SchedulingPolicy = Literal["fcfs", "priority", "fair"]


class StepLimits(NamedTuple):
    """How much one step computes at most."""

    max_num_seqs: int
    max_num_batched_tokens: int


_DEFAULT_LIMITS = {"cpu": StepLimits(256, 2048), "cuda": StepLimits(1024, 8192)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that shapes an engine. Raises `ConfigError` naming the field it refuses."""

    model: str = DEFAULT_MODEL
    """A local folder, a local .gguf file, or a name on the Hugging Face hub; after a colon, which
    of its GGUF files (org/name:Q4_K_M)."""
    tokenizer: str | None = None
    """Folder, .gguf file or hub name of the tokenizer; the model's own by default."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    device: Device = "auto"
    """Where the model runs; auto: the first NVIDIA GPU, or the CPU where there is none."""
    dtype: DType = "auto"
    """Computation type; auto: the checkpoint's own on a GPU (float32 ones in bfloat16), on a CPU
    bfloat16 where it multiplies that fast, else float32."""
    quantization: QuantizationName | None = None
    """How the weights of linear layers are held. By default quantized ones stay so where a kernel
    makes them fast here (GGUF on a CPU: in 8 bits), else they are expanded to dtype, as
    --dtype float32 on a CPU and none always do. int8 (CPU; 8 bits, a scale for each output channel)
    and fp8 (GPU) are made of any weights while they are read; the others say that a checkpoint's
    own must be kept (gguf on a CPU: 4 bits stay 4 bits, faster and less exact)."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Type of the KV cache; auto: as dtype. A scale for each token and head beside codes halves it:
    fp8 (e4m3) on a GPU, int8 on a CPU."""
    max_model_len: int | None = None
    """Longest context (prompt and output) of a sequence; the model's own limit by default."""
    block_size: int = 16
    """Tokens in a KV block."""
    max_num_seqs: int | None = None
    """Most sequences in one step; by default 256 on a CPU, 1,024 on a GPU."""
    max_num_batched_tokens: int | None = None
    """Most tokens computed in one step; longer prompts are computed in chunks. By default 2,048 on
    a CPU, 8,192 on a GPU."""
    gpu_memory_utilization: float = GPU_MEMORY_UTILIZATION
    """Share of the GPU's whole memory that the engine takes, other processes' included: weights,
    activations, graphs, and what is left for the KV pool."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV pool. By default, on a GPU what gpu_memory_utilization leaves; on a CPU half
    of what is free after the weights, and never more than max_num_seqs sequences of max_model_len
    can use."""
    num_gpu_blocks_override: int | None = None
    """Exact number of KV blocks (the name is vLLM's; it holds for CPUs too)."""
    kv_policy: KVPolicy = "paged"
    """How sequences get KV memory: in blocks as they grow (paged), or in contiguous regions, as the
    systems before reserved them: of the longest context for each request of a batch that runs to
    its end (contiguous: FasterTransformer), or, joining any time, of the longest context
    (orca-max), a power of two (orca-pow2) or max_tokens (orca-oracle)."""
    enable_prefix_caching: bool = True
    """Keep the KV of finished requests while there is room, and reuse it where prompts begin
    alike."""
    disable_hybrid_kv_cache_manager: bool = False
    """Keep the KV of layers with a sliding window as long as that of all others, instead of giving
    back what is behind the window."""
    preemption_mode: PreemptionMode = "auto"
    """What becomes of a preempted sequence's KV: recompute it later, swap it to host memory, or
    whichever is cheaper by measured speeds."""
    preemption_victim: PreemptionVictim = "last-come"
    """Who is preempted when the pool is full: the last come, the cheapest to bring back, or the
    one with the largest priority number."""
    swap_space: float | None = None
    """GiB of host memory for preempted sequences and evicted cached blocks; by default a quarter
    of what is left beside the KV pool (on a GPU: of free host memory), at most 4 and at most four
    times the pool. 0 turns it off."""
    kv_disk_dir: str | None = None
    """Folder for cached blocks that host memory has no room for; they survive a restart."""
    kv_disk_bytes: int = _DISK_BYTES
    """Most bytes kept in kv_disk_dir."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """Order in which waiting requests are admitted; priority: smaller numbers first; fair: of the
    client who got the fewest tokens (output counts twice)."""
    attention_backend: AttentionName = "auto"
    """Attention kernels; auto: the fastest that this machine can run, with the reason logged."""
    enforce_eager: bool = False
    """Launch every kernel of a step from Python instead of replaying recorded steps (CUDA graphs,
    or the CPU's recorded calls): slower, with less memory."""
    async_scheduling: bool | None = None
    """Plan and launch a step before the tokens of the one before have reached the host; by default
    on a GPU only. Tokens are the same; a stop is noticed one step late. Beams, and samples with
    penalties or bad words of several tokens, must know each token first: beside others they run in
    every second step, and an engine that has none but them does not overlap."""
    seed: int = 0
    """Source of the seeds of requests that bring none, and of dummy weights."""
    load_format: LoadFormat = "auto"
    """Where weights come from; dummy: random, from config.json alone."""
    skip_tokenizer_init: bool = False
    """Load no tokenizer: prompts are token ids and outputs have no text."""
    num_threads: int | None = None
    """CPU threads for computing; torch's default when not set."""
    record: str | None = None
    """File (.jsonl, or .gz) for every plan and decision of the engine, to replay with octavo lab
    replay. It is overwritten, and holds the token ids of prompts and answers. With 256 sequences a
    step takes some 0.2 ms more (.gz: more still), and 4 kB of the file."""

    def __post_init__(self) -> None:
        for name in (
            "max_model_len", "block_size", "max_num_seqs", "max_num_batched_tokens",
            "kv_cache_memory_bytes", "num_gpu_blocks_override", "num_threads", "kv_disk_bytes",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is None and name not in ("block_size", "kv_disk_bytes"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name, kind in _CHOICES.items():
            value = getattr(self, name)
            if value is None and name == "quantization":
                continue
            choices = kind.__args__
            if not isinstance(value, str) or value not in choices:
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
        self._check_text_and_switches()
        self._check_policy()
        self._check_tiers()
        self._check_device()
        if self.skip_tokenizer_init and self.tokenizer is not None:
            raise ConfigError(
                f"tokenizer={self.tokenizer!r} would not be loaded under skip_tokenizer_init: "
                "leave one of the two out"
            )
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            raise ConfigError(f"num_threads must be at most {MAX_THREADS}, got {self.num_threads}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"seed must be a whole number, got {self.seed!r}")

    def _check_text_and_switches(self) -> None:
        for name in ("model", "tokenizer", "revision", "kv_disk_dir", "record"):
            value = getattr(self, name)
            if isinstance(value, PathLike):
                value = fspath(value)
                object.__setattr__(self, name, value)
            if not isinstance(value, str) and (value is not None or name == "model"):
                raise ConfigError(f"{name} must be a string, got {value!r}")
        for name in (
            "skip_tokenizer_init", "enable_prefix_caching", "enforce_eager",
            "disable_hybrid_kv_cache_manager",
        ):  # fmt: skip
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")

    def _check_device(self) -> None:
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise ConfigError(
                f"max_num_batched_tokens={tokens} is less than max_num_seqs={seqs}: every running "
                "sequence computes at least one token a step; raise the first or lower the second"
            )
        share = self.gpu_memory_utilization
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not number or not 0 < share <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be a share above 0 and at most 1, got {share!r}"
            )
        if not isinstance(self.async_scheduling, bool | None):
            raise ConfigError(
                f"async_scheduling must be True, False or None, got {self.async_scheduling!r}"
            )
        if self.device == "cuda" and self.kv_cache_dtype == "int8":
            raise ConfigError(
                "kv_cache_dtype='int8' is for CPUs and device is 'cuda': use --kv-cache-dtype fp8, "
                "or --device cpu"
            )
        name = self.needs_gpu
        if self.device == "cpu" and name is not None:
            raise ConfigError(
                f"{name}={getattr(self, name)!r} needs a GPU and device is 'cpu': leave "
                f"{flag_name(name)} or --device out"
            )

    @property
    def needs_gpu(self) -> str | None:
        """A field that was set and has no effect on a CPU."""
        if self.kv_cache_dtype == "fp8":
            return "kv_cache_dtype"
        is_given = self.gpu_memory_utilization != GPU_MEMORY_UTILIZATION
        return "gpu_memory_utilization" if is_given else None

    def _check_tiers(self) -> None:
        space = self.swap_space
        number = isinstance(space, int | float) and not isinstance(space, bool)
        if space is not None and (not number or not 0 <= space <= MAX_SWAP_SPACE):
            raise ConfigError(
                f"swap_space must be a number of GiB from 0 to {MAX_SWAP_SPACE}, got {space!r}"
            )
        if space == 0 and self.preemption_mode == "swap":
            raise ConfigError(
                "preemption_mode='swap' needs host memory and swap_space is 0: raise --swap-space "
                "or use --preemption-mode recompute"
            )
        if self.kv_disk_dir is None and self.kv_disk_bytes != _DISK_BYTES:
            raise ConfigError(
                f"kv_disk_bytes={self.kv_disk_bytes:,} has no effect without a kv_disk_dir: set "
                "--kv-disk-dir or leave --kv-disk-bytes out"
            )
        if self.kv_disk_dir is not None and space == 0:
            raise ConfigError(
                "kv_disk_dir needs host memory to pass blocks through and swap_space is 0: raise "
                "--swap-space or leave --kv-disk-dir out"
            )
        if self.kv_disk_dir is not None and not self.enable_prefix_caching:
            raise ConfigError(
                f"kv_disk_dir={self.kv_disk_dir!r} keeps cached blocks, and enable_prefix_caching "
                "is off: leave one of the two out"
            )

    def _check_policy(self) -> None:
        """Contiguous regions stay where they are, and with whom, until the request ends."""
        if self.kv_policy == "paged":
            return
        for name, is_set in (
            ("swap_space", bool(self.swap_space)),
            ("kv_disk_dir", self.kv_disk_dir is not None),
            ("preemption_mode", self.preemption_mode == "swap"),
            ("preemption_victim", self.preemption_victim != "last-come"),
        ):
            if is_set:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} has no effect under kv_policy="
                    f"{self.kv_policy!r}, which preempts nobody, and neither moves nor keeps "
                    f"blocks: use --kv-policy paged or leave {flag_name(name)} out"
                )

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> EngineConfig:
        """Build from keywords; an unknown one is refused by name, with the nearest known."""
        import difflib

        known = [f.name for f in dataclasses.fields(cls)]
        for key in kwargs:
            if key not in known:
                if (why := why_not(flag_name(key))) is not None:
                    raise ConfigError(f"unknown engine option {key!r}: {why}")
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise ConfigError(f"unknown engine option {key!r}{hint}")
        return cls(**kwargs)

    def for_device(self, device: Literal["cpu", "cuda"]) -> EngineConfig:
        """A copy for that device, with what depends on its kind chosen: limits of a step, and
        whether steps overlap. Raises `ConfigError` for what has no effect there."""
        limits = _DEFAULT_LIMITS[device]
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is None:
            seqs = limits.max_num_seqs if tokens is None else min(limits.max_num_seqs, tokens)
        if tokens is None:
            tokens = max(limits.max_num_batched_tokens, seqs)
        overlap = self.async_scheduling
        return self.replace(
            device=device,
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            async_scheduling=device == "cuda" if overlap is None else overlap,
        )

    def limits(self) -> StepLimits:
        """Of a configuration that was made `for_device`."""
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        assert seqs is not None and tokens is not None, "not chosen yet: the device is not known"
        return StepLimits(seqs, tokens)

    def replace(self, **changes: Any) -> EngineConfig:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)


_CHOICES: dict[str, Any] = {
    "device": Device,
    "dtype": DType,
    "quantization": QuantizationName,
    "kv_cache_dtype": KVCacheDType,
    "attention_backend": AttentionName,
    "load_format": LoadFormat,
    "kv_policy": KVPolicy,
    "preemption_mode": PreemptionMode,
    "preemption_victim": PreemptionVictim,
    "scheduling_policy": SchedulingPolicy,
}
