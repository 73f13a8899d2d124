"""How many blocks: from a model's shape and the memory at hand to the pool and the host tier."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from octavo.errors import CapacityError
from octavo.kv.needs import BlockNeeds, is_plain
from octavo.kv.no_room import left_for_kv, less, no_block, no_max_model_len, or_larger_share
from octavo.util import cdiv, human_bytes

DEFAULT_HOST_SHARE = 0.25
"""Of what is left beside the pool, where `--swap-space` does not say."""
MAX_DEFAULT_HOST_BYTES = 4 * 2**30
MAX_DEFAULT_HOST_POOLS = 4
"""The default host tier is at most this many times as large as the pool."""
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class KVShape:
    """What of a model decides the bytes of a token's KV."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    """Bytes of one number in the KV cache: 2 for bfloat16, 4 for float32, 1 for fp8 and int8."""
    scale_bytes: int = 0
    """Bytes of the scale that each head of a token has in each plane: 2 under fp8 and int8."""
    planes: int = 2
    """2: K and V. 1: what is kept of a token serves as both (a latent, MLA)."""
    windows: tuple[int, ...] = (0,)
    """By group of layers the attention window in tokens, 0: all before. Groups have equally many
    layers; a block holds tokens for the layers of one group."""
    num_padding: int = 0
    """Of `num_layers` those that the model does not have: groups are filled up."""

    @property
    def layers_per_block(self) -> int:
        """Layers whose KV a block holds: those of a group."""
        return self.num_layers // len(self.windows)

    @property
    def bytes_per_token(self) -> int:
        """layers x kv_heads x head_dim x 2 (K and V) x bytes per element (paper section 3), and
        the scales; of one token that no layer has given up."""
        per_head = self.head_dim * self.element_bytes + self.scale_bytes
        return self.num_layers * self.num_kv_heads * self.planes * per_head

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token in one block."""
        return self.bytes_per_token // len(self.windows)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens, over all layers of a group; with scales behind
        its codes it is filled up to whole 16 bytes."""
        num_bytes = block_size * self.bytes_per_slot
        return num_bytes if not self.scale_bytes else cdiv(num_bytes, 16) * 16

    def block_terms(self, block_size: int) -> str:
        """The arithmetic of `bytes_per_block`, without its result."""
        text = f"{block_size} tokens x {self.bytes_per_slot:,} B"
        padding = self.bytes_per_block(block_size) - block_size * self.bytes_per_slot
        return f"{text} + {padding} B of padding" if padding else text

    def __str__(self) -> str:
        kind = "2 (K, V)" if self.planes == 2 else "1 (latent)"
        element = f"{self.head_dim} x {kind} x {self.element_bytes} B"
        if self.scale_bytes:
            element = f"{kind} x ({self.head_dim} x {self.element_bytes} + {self.scale_bytes}) B"
        of_them = f" ({self.num_padding} of padding)" if self.num_padding else ""
        text = (
            f"{self.num_layers} layers{of_them} x {self.num_kv_heads} kv heads x {element} = "
            f"{self.bytes_per_token:,} B a token"
        )
        return f"{text}, {self.groups_phrase}" if any(self.windows) else text

    @property
    def groups_phrase(self) -> str:
        """`1 group of 3 layers that keeps all, 5 that keep 512 tokens`."""
        parts: list[str] = []
        for window in dict.fromkeys(self.windows):
            num = self.windows.count(window)
            what = f"{window:,} tokens" if window else "all"
            noun = "" if parts else f" group{'s' * (num > 1)} of {self.layers_per_block} layers"
            parts.append(f"{num}{noun} that keep{'s' * (num == 1)} {what}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUTerms:
    """What a plan for a GPU has besides; fields as in `MemoryPlan`."""

    graph_bytes: int
    runtime_bytes: int
    total_bytes: int
    others_bytes: int
    host_available_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory goes, in bytes: what its terms add up to is the budget."""

    available_bytes: int
    """What the engine may take: on a CPU what was free on the machine (and under its cgroup
    limits) before it took anything; on a GPU its share of the whole, less what other processes
    hold."""
    weights_bytes: int
    activation_bytes: int
    """Largest working set of a step, without the logits."""
    logits_bytes: int
    """Logits, logprobs and sampling of a step."""
    graph_bytes: int = 0
    """Recorded steps (CUDA graphs)."""
    runtime_bytes: int = 0
    """What else the process holds on the GPU: the driver's context, kernels and libraries'
    workspaces; inputs, block tables and answers of steps; what torch keeps. Where the driver does
    not tell processes apart the context is in `others_bytes`, and what others took while this
    engine started is in here."""
    total_bytes: int | None = None
    """The GPU's whole memory; None on a CPU."""
    others_bytes: int = 0
    """Of it, what other processes hold."""
    host_available_bytes: int | None = None
    """Host memory for the host tier; None: it comes out of `available_bytes` like the rest."""
    shape: KVShape
    block_size: int
    num_blocks: int
    """Blocks in the pool, >= 1."""
    max_model_len: int
    """Longest sequence that is wanted, in tokens; the pool may hold less (`max_seq_len`)."""
    max_chunk_tokens: int = 1
    """Most tokens that a sequence computes in a step; of no matter without a window."""
    chosen_by: str
    """What decided the size of the pool, in words or as a flag."""
    num_host_blocks: int = 0
    """Blocks in the host tier: preempted sequences and cached blocks that left the pool."""
    host_chosen_by: str = "none"
    """What decided the size of the host tier."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers."""
        return self.shape.bytes_per_block(self.block_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV pool."""
        return self.num_blocks * self.bytes_per_block

    @property
    def num_slots(self) -> int:
        """Tokens the pool can hold, each for the layers of one group."""
        return self.num_blocks * self.block_size

    @property
    def needs(self) -> BlockNeeds:
        """What sequences need of the paged pool."""
        return BlockNeeds(self.block_size, self.shape.windows, self.max_chunk_tokens)

    @property
    def budget_bytes(self) -> int:
        """Everything the engine takes of `available_bytes`."""
        return sum(self.terms().values())

    @property
    def host_left_bytes(self) -> int:
        """What stays free where the host tier is."""
        if self.host_available_bytes is None:
            return self.left_bytes
        return self.host_available_bytes - self.host_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host tier."""
        return self.num_host_blocks * self.bytes_per_block

    @property
    def left_bytes(self) -> int:
        """What stays free."""
        return self.available_bytes - self.budget_bytes

    @property
    def max_seq_len(self) -> int:
        """Longest sequence that fits, alone, into the paged pool: at most `max_model_len`."""
        return min(self.max_model_len, self.needs.most_tokens(self.num_blocks))

    @property
    def max_concurrency(self) -> int:
        """Sequences of `max_seq_len` tokens that the paged pool has room for at one time."""
        return self.needs.most_seqs(self.num_blocks, self.max_seq_len)

    @property
    def max_num_seqs(self) -> int:
        """Sequences that can hold anything in the paged pool: a block for each group of layers."""
        return self.num_blocks // len(self.shape.windows)

    def terms(self) -> dict[str, int]:
        """The terms that add up to `budget_bytes`."""
        terms = {
            "weights": self.weights_bytes,
            "activations": self.activation_bytes,
            "logits": self.logits_bytes,
        }
        if self.total_bytes is not None:
            terms |= {"graphs": self.graph_bytes, "runtime": self.runtime_bytes}
        terms["KV cache"] = self.kv_bytes
        if self.host_available_bytes is None:
            terms["host tier"] = self.host_bytes
        return terms

    def __str__(self) -> str:
        block = self.shape.block_terms(self.block_size)
        kv = (
            f"{self.num_blocks:,} blocks x {f'({block})' if '+' in block else block}, "
            f"{self.chosen_by}"
        )
        host = f"{self.num_host_blocks:,} blocks, {self.host_chosen_by}"
        notes = {"KV cache": kv, "host tier": host}
        if self.total_bytes is None:
            of = f"{human_bytes(self.available_bytes)} free"
        else:
            of = (
                f"{human_bytes(self.available_bytes)} of the GPU's {human_bytes(self.total_bytes)}"
                f" ({human_bytes(self.others_bytes)} held by others)"
            )
        lines = [
            f"{'+' if i else ' '} {name:<12} {human_bytes(size):>12}  {notes.get(name, '')}"
            for i, (name, size) in enumerate(self.terms().items())
            if size or name != "host tier"
        ]
        lines += [
            f"= {'budget':<12} {human_bytes(self.budget_bytes):>12}  of {of}, "
            f"{human_bytes(self.left_bytes)} left",
        ]
        if self.host_available_bytes is not None and self.num_host_blocks:
            lines.append(f"  {'host tier':<12} {human_bytes(self.host_bytes):>12}  {host}")
        room = f"room for {self.num_slots:,} tokens"
        if not is_plain(self.shape.windows):
            room = (
                f"a sequence may have up to {self.max_seq_len:,} tokens, and of such "
                f"{self.max_concurrency:,} fit at one time"
            )
        lines += [f"  {self.shape}; {room}"]
        return "\n".join(line.rstrip() for line in lines)


def plan_memory(
    *,
    available_bytes: int,
    weights_bytes: int,
    activation_bytes: int,
    logits_bytes: int,
    shape: KVShape,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    max_chunk_tokens: int = 1,
    gpu: GPUTerms | None = None,
    kv_cache_memory_bytes: int | None = None,
    num_blocks: int | None = None,
    kv_share: float = 0.5,
    require_max_model_len: bool = True,
    swap_space: float | None = 0,
    need_host: str | None = None,
) -> MemoryPlan:
    """Size the pool and the host tier. Raises `CapacityError`, with the arithmetic, when it cannot.

    `num_blocks` and `kv_cache_memory_bytes` are taken as they are, the first before the second, and
    must fit into what the other terms leave. Without either the pool gets, on a GPU, all of that;
    on a CPU `kv_share` of it, but never more than `max_num_seqs` sequences of `max_model_len`
    tokens can use.
    `require_max_model_len` refuses a pool in which one such sequence does not fit: for a length
    that was asked for, not for one that is only the model's limit. `max_chunk_tokens` are the most
    that are computed in a step.
    `swap_space` is the host tier in GiB; None: a quarter of what is left beside the pool (on a GPU:
    of free host memory), at most 4 GiB and four times the pool. `need_host` names the flag that
    cannot do without a host tier.
    """
    base = MemoryPlan(
        available_bytes=available_bytes,
        weights_bytes=weights_bytes,
        activation_bytes=activation_bytes,
        logits_bytes=logits_bytes,
        shape=shape,
        block_size=block_size,
        num_blocks=0,
        max_model_len=max_model_len,
        max_chunk_tokens=max_chunk_tokens,
        chosen_by="",
    )
    if gpu is not None:
        base, kv_share = replace(base, **asdict(gpu)), 1.0
    left, asked = base.left_bytes, num_blocks
    if left < 0:
        raise CapacityError(f"nothing is left for the KV pool: {left_for_kv(base)}; {less(base)}")
    if num_blocks is not None or kv_cache_memory_bytes is not None:
        num_blocks, chosen_by = _as_asked(base, num_blocks, kv_cache_memory_bytes)
    elif gpu is not None:
        chosen_by = "all that --gpu-memory-utilization leaves"
        num_blocks = left // base.bytes_per_block
    else:
        chosen_by = f"{kv_share:.0%} of what the rest leaves"
        most = base.needs.of_all(max_num_seqs, max_model_len)
        num_blocks = int(left * kv_share) // base.bytes_per_block
        if num_blocks > most:
            num_blocks = most
            chosen_by = f"all that {max_num_seqs} sequences of {max_model_len:,} tokens can use"
    if num_blocks < len(shape.windows):
        raise CapacityError(no_block(base, asked, kv_cache_memory_bytes, kv_share))
    if require_max_model_len and base.needs.most_tokens(num_blocks) < max_model_len:
        raise CapacityError(no_max_model_len(base, num_blocks, chosen_by))
    sized = replace(base, num_blocks=num_blocks, chosen_by=chosen_by)
    return _with_host_tier(sized, swap_space, need_host)


def _as_asked(base: MemoryPlan, num_blocks: int | None, num_bytes: int | None) -> tuple[int, str]:
    """(Blocks of a pool whose size was given, the flag that gave it)."""
    left, block = base.left_bytes, base.bytes_per_block
    if num_blocks is not None:
        wanted, flag = num_blocks * block, "--num-gpu-blocks-override"
        text = f"{flag} {num_blocks:,} x {block:,} B = {human_bytes(wanted)}"
        most = left // block
    else:
        assert num_bytes is not None
        wanted, flag = num_bytes, "--kv-cache-memory-bytes"
        text, most = f"{flag} {num_bytes:,} ({human_bytes(num_bytes)})", left
    if wanted > left:
        raise CapacityError(
            f"{text} is more than is left for the KV pool: {left_for_kv(base)}; lower it to at "
            f"most {most:,}{or_larger_share(base, wanted)}"
        )
    return wanted // block, flag


def _with_host_tier(plan: MemoryPlan, swap_space: float | None, need: str | None) -> MemoryPlan:
    left, block = plan.host_left_bytes, plan.bytes_per_block
    if swap_space is None:
        most = min(MAX_DEFAULT_HOST_BYTES, MAX_DEFAULT_HOST_POOLS * plan.kv_bytes)
        share = int(left * DEFAULT_HOST_SHARE)
        wanted = min(share, most)
        of = "what the pool leaves" if plan.host_available_bytes is None else "free host memory"
        chosen_by = f"{DEFAULT_HOST_SHARE:.0%} of {of}"
        if share > most == MAX_DEFAULT_HOST_BYTES:
            chosen_by = "the most that is taken by default"
        elif share > most:
            chosen_by = f"{MAX_DEFAULT_HOST_POOLS} x the pool"
    else:
        wanted, chosen_by = int(swap_space * _GIB), "--swap-space"
        if wanted > left:
            limit = int(left / _GIB * 100) / 100
            if plan.host_available_bytes is not None:
                raise CapacityError(
                    f"--swap-space {swap_space:g} GiB is more than the host has free, "
                    f"{human_bytes(left)}; lower it to at most {limit:g}"
                )
            raise CapacityError(
                f"--swap-space {swap_space:g} GiB is more than is left beside the KV pool: "
                f"{left_for_kv(replace(plan, num_blocks=0))} - {human_bytes(plan.kv_bytes)} KV "
                f"pool = {human_bytes(left)}; lower it to at most {limit:g}, "
                "or lower --kv-cache-memory-bytes"
            )
    num_blocks = wanted // block
    if num_blocks == 0 and (swap_space or need is not None):
        what = "--swap-space" if swap_space else f"{need} needs a host tier, which"
        raise CapacityError(
            f"{what} has no room for one KV block: it is {human_bytes(wanted)} and a block "
            f"{human_bytes(block)}; raise --swap-space to at least {block / _GIB:.6g}"
        )
    return replace(plan, num_host_blocks=num_blocks, host_chosen_by=chosen_by)


def resized(plan: MemoryPlan, num_bytes: int) -> MemoryPlan:
    """The plan with a pool of `num_bytes`, whole blocks of it.

    Raises `CapacityError` for more than the rest leaves, or less than a block.
    """
    block, most = plan.bytes_per_block, plan.kv_bytes + plan.left_bytes
    if num_bytes < block:
        raise CapacityError(
            f"{num_bytes:,} B is less than one KV block of {block:,} B: "
            f"{plan.shape.block_terms(plan.block_size)}"
        )
    if num_bytes > most:
        raise CapacityError(
            f"{num_bytes:,} B ({human_bytes(num_bytes)}) is more than is left for the KV pool: "
            f"{left_for_kv(replace(plan, num_blocks=0, num_host_blocks=0))}{_less_host(plan)}; "
            f"ask for at most {most:,}"
        )
    return replace(plan, num_blocks=num_bytes // block, chosen_by="resized while running")


def _less_host(plan: MemoryPlan) -> str:
    if plan.host_available_bytes is not None:
        return ""
    most = plan.kv_bytes + plan.left_bytes
    return f" - {human_bytes(plan.host_bytes)} host tier = {human_bytes(most)}"
