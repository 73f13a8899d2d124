"""Attention kernels by themselves, on random keys and values: what `octavo bench attention` times.

The kernels are those of the backend that the engine would choose, called as the runner calls them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.arch import ModelArch
from octavo.attention.base import AttentionBackend, AttentionWork, ForwardContext
from octavo.attention.select import select_attention
from octavo.config import AttentionName, KVCacheDType
from octavo.engine.kernels import AttentionCase, HeadShape, KernelCalls, num_multiprocessors
from octavo.layers.workspace import Workspace
from octavo.ops.gpu.launch import ALIGNMENT
from octavo.util import cdiv

_ROTATED_BYTES = {"cuda": 4e8, "cpu": 1.5e8}
"""What the layers of a pool come to together: a kernel that goes from one to the next finds none of
it in a cache."""
_MAX_LAYERS = 16
"""As other kernels were measured: a single short context may stay in a GPU's L2 cache then."""
_FILLED_AT_ONCE = 2**26
"""Elements of random data made at one time."""
_CHECKED_SEQS = 2
_CHECKED_ROWS = 64
"""So many sequences, and last tokens of them, are compared with the dense reference."""


class AttentionKernels:
    """A backend's kernels for one shape of heads and one type.

    kv_cache_dtype: "auto" (as dtype), "fp8" or "int8"; backend: as in
    `EngineConfig.attention_backend`. Raises `ConfigError` for a backend that cannot run here.
    """

    def __init__(
        self,
        shape: HeadShape,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kv_cache_dtype: KVCacheDType = "auto",
        backend: AttentionName = "auto",
        seed: int = 0,
    ) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self.coded = kv_cache_dtype != "auto"
        self.kv_dtype = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}.get(kv_cache_dtype, dtype)
        self._backend: AttentionBackend = select_attention(
            backend, device, head_dim=shape.head_dim, fp8=kv_cache_dtype == "fp8"
        )
        self.name = self._backend.name
        self._scale = shape.head_dim**-0.5
        self._random = torch.Generator(device).manual_seed(seed)

    @property
    def contiguous_how(self) -> str:
        """How K and V lie for the kernels that `contiguous` makes."""
        if self.name == "triton":
            return (
                "decodes by the same kernel without block tables, K and V of a sequence in one "
                "piece; fresh prompts over the projection's own output"
            )
        return "the same kernel with one block a sequence, as long as its context"

    def pool_bytes(self, case: AttentionCase, block_size: int) -> int:
        """Memory of the K and V that `paged` makes."""
        blocks = case.batch * cdiv(case.context, block_size)
        slot = 2 * self.shape.num_kv_heads * self.shape.head_dim * self.kv_dtype.itemsize
        return blocks * block_size * slot * self._num_layers(blocks * block_size * slot)

    def paged(self, case: AttentionCase, block_size: int) -> KernelCalls:
        """Over blocks that lie anywhere in a pool."""
        each = cdiv(case.context, block_size)
        tables = torch.randperm(case.batch * each, device=self.device, generator=self._random)
        return self._made(case, block_size, tables.int().view(case.batch, each))

    def contiguous(self, case: AttentionCase) -> KernelCalls | None:
        """With each sequence's K and V in one piece; None where the backend has no such kernel."""
        if self.name != "triton":
            tables = torch.arange(case.batch, device=self.device, dtype=torch.int32)
            return self._made(case, case.context, tables.view(-1, 1))
        if self.coded or case.query not in (1, case.context):
            return None
        return self._contiguous_decode(case) if case.query == 1 else self._fresh_prefill(case)

    def release(self) -> None:
        """Give memory of dropped calls back."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # -- making them

    def _num_layers(self, layer_bytes: int) -> int:
        rotated = _ROTATED_BYTES[self.device.type]
        return max(2, min(_MAX_LAYERS, int(rotated / layer_bytes) + 1))

    def _made(self, case: AttentionCase, block_size: int, tables: Tensor) -> KernelCalls:
        num_blocks = tables.numel()
        shape = self.shape
        slot = 2 * shape.num_kv_heads * shape.head_dim * self.kv_dtype.itemsize
        layers = self._num_layers(num_blocks * block_size * slot)
        kv_cache, kv_scales = self._pool(num_blocks, layers, block_size)
        workspace, work = self._work(case)
        query = self._query(workspace, case)
        out = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
        ints: dict[str, Any] = {"dtype": torch.int32, "device": self.device}
        ctx = ForwardContext(
            kv_cache=kv_cache,
            block_tables=tables,
            seq_lens=torch.full((case.batch,), case.context, **ints),
            query_start_loc=torch.arange(0, case.batch * case.query + 1, case.query, **ints),
            slot_mapping=torch.full((len(query),), -1, dtype=torch.int64, device=self.device),
            rope_rows=torch.zeros(len(query), dtype=torch.int64, device=self.device),
            cos_sin=torch.zeros((1, shape.head_dim), device=self.device),
            workspace=workspace,
            kv_scales=kv_scales,
            work=work,
        )

        def call(layer: int) -> Callable[[], object]:
            return lambda: self._backend.attend(query, layer, self._scale, 0, ctx, out)

        calls = [call(layer) for layer in range(layers)]
        calls[-1]()
        error = self._error(out, query, ctx, layers - 1, case)
        return KernelCalls(
            calls,
            case.num_bytes(shape, self.kv_dtype.itemsize, self.coded),
            case.num_flops(shape),
            error,
        )

    def _pool(self, num_blocks: int, layers: int, block_size: int) -> tuple[Tensor, Tensor | None]:
        """Random K and V in the engine's layout, and their scales behind each block's codes."""
        heads, dim = self.shape.num_kv_heads, self.shape.head_dim
        block = (layers, 2, heads, block_size, dim)
        if not self.coded:
            pool = torch.empty((num_blocks, *block), dtype=self.dtype, device=self.device)
            self._fill(pool)
            return pool, None
        num_codes = layers * 2 * heads * block_size * dim
        num_scales = num_codes // dim
        width = cdiv(num_codes + 2 * num_scales, ALIGNMENT) * ALIGNMENT
        raw: Any = torch.empty((num_blocks, width), dtype=torch.uint8, device=self.device)
        codes = raw[:, :num_codes].view(self.kv_dtype).unflatten(1, block)
        scales = raw[:, num_codes : num_codes + 2 * num_scales].view(torch.float16)
        scales = scales.unflatten(1, block[:-1])
        # Times the scales near 1; int8 has room for less.
        self._fill(codes, factor=128.0 if self.kv_dtype == torch.float8_e4m3fn else 40.0)
        scales.uniform_(0.005, 0.01, generator=self._random)
        return codes, scales

    def _fill(self, pool: Tensor, factor: float = 1.0) -> None:
        """Normal values."""
        limit = 127.0 if pool.dtype == torch.int8 else 448.0
        at_once = max(1, _FILLED_AT_ONCE // pool[0].numel())
        for first in range(0, len(pool), at_once):
            some = pool[first : first + at_once]
            drawn = torch.randn(some.shape, device=self.device, generator=self._random)
            some.copy_(drawn.mul_(factor).clamp_(-limit, limit))

    def _work(self, case: AttentionCase) -> tuple[Workspace, AttentionWork | None]:
        """Buffers as the engine has them, and the work cut up where the backend wants it."""
        shape, num_tokens, num_items, work = self.shape, case.batch * case.query, 0, None
        if self.name == "triton":
            work, num_items = self._cut(case)
        arch = ModelArch(
            architecture="", vocab_size=1, hidden_size=1, intermediate_size=1, num_layers=1,
            num_heads=shape.num_heads, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
            max_position_embeddings=case.context,
        )  # fmt: skip
        workspace = Workspace(
            arch, num_tokens, 1, self.dtype, self.device, num_decode_items=num_items
        )
        return workspace, work

    def _cut(self, case: AttentionCase) -> tuple[AttentionWork, int]:
        """The pieces of a step, and room for those of its decodes."""
        import numpy as np

        from octavo.attention import work as cutting

        shape, device = self.shape, self.device
        lens = np.full(case.batch, case.context)
        items = np.zeros((0, 3), dtype=np.int32)
        starts = np.zeros(1, dtype=np.int32)
        tiles = np.zeros((0, 2), dtype=np.int32)
        num_items = 0
        if case.query == 1:
            num_items = cutting.max_decode_items(
                case.batch, shape.num_kv_heads, num_multiprocessors(device)
            )
            found, starts = cutting.plan_decode(lens, num_items)
            items = np.full((num_items, 3), -1, dtype=np.int32)
            items[: len(found)] = found
        else:
            tokens = cutting.prefill_tile_tokens(
                shape.num_heads // shape.num_kv_heads, shape.head_dim
            )
            queries = np.full(case.batch, case.query)
            tiles = cutting.plan_prefill(queries, lens, 0, tokens)
        work = AttentionWork(
            num_decodes=case.batch if case.query == 1 else 0,
            decode_items=torch.from_numpy(items).to(device),
            item_start=torch.from_numpy(starts).to(device),
            prefill_tiles=torch.from_numpy(tiles).to(device),
        )
        return work, num_items

    def _query(self, workspace: Workspace, case: AttentionCase) -> Tensor:
        """Random queries where the engine has them: among the step's keys and values."""
        num_tokens = case.batch * case.query
        self._fill(workspace.qkv, factor=1.0)
        size = self.shape.num_heads * self.shape.head_dim
        query = workspace.qkv[:num_tokens, :size]
        return query.view(num_tokens, self.shape.num_heads, self.shape.head_dim)

    def _contiguous_decode(self, case: AttentionCase) -> KernelCalls:
        from octavo.ops.gpu import decode_attention

        shape = self.shape
        num_bytes = case.num_bytes(shape, self.kv_dtype.itemsize, scaled=False)
        layers = self._num_layers(num_bytes)
        kv = torch.empty(
            (layers, 2, case.batch, shape.num_kv_heads, case.context, shape.head_dim),
            dtype=self.dtype, device=self.device,
        )  # fmt: skip
        self._fill(kv.view(-1, *kv.shape[3:]))
        workspace, work = self._work(case)
        assert work is not None
        query = self._query(workspace, case)
        out = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
        lens = torch.full((case.batch,), case.context, dtype=torch.int32, device=self.device)

        def call(layer: int) -> Callable[[], object]:
            return lambda: decode_attention.contiguous_decode(
                out, query, kv[layer, 0], kv[layer, 1], lens, work.decode_items, work.item_start,
                workspace.partial, workspace.partial_lse, self._scale,
            )  # fmt: skip

        calls = [call(layer) for layer in range(layers)]
        calls[-1]()
        some = _checked(case.batch)
        keys, values = (kv[-1, i, some].transpose(1, 2).float() for i in range(2))
        error = self._distance(out[some].unsqueeze(1), query[some].unsqueeze(1), keys, values)
        return KernelCalls(calls, num_bytes, case.num_flops(shape), error)

    def _fresh_prefill(self, case: AttentionCase) -> KernelCalls:
        from octavo.ops.gpu import fresh_attention

        shape = self.shape
        workspace, work = self._work(case)
        assert work is not None
        layers = self._num_layers(workspace.qkv.nbytes)
        sizes = [n * shape.head_dim for n in (shape.num_heads, *[shape.num_kv_heads] * 2)]
        parts = []
        for _ in range(layers):
            qkv: Any = torch.empty_like(workspace.qkv)
            self._fill(qkv)
            parts.append([p.unflatten(1, (-1, shape.head_dim)) for p in qkv.split(sizes, dim=1)])
        out: Any = torch.full_like(parts[0][0], torch.nan, memory_format=torch.contiguous_format)
        starts = torch.arange(0, len(out) + 1, case.query, dtype=torch.int32, device=self.device)

        def call(layer: int) -> Callable[[], object]:
            query, key, value = parts[layer]
            return lambda: fresh_attention.fresh_prefill(
                out, query, key, value, starts, work.prefill_tiles, self._scale
            )

        calls = [call(layer) for layer in range(layers)]
        calls[-1]()
        last: list[Any] = parts[-1]
        query, key, value = (p.unflatten(0, (case.batch, -1)) for p in last)
        some, tail = _checked(case.batch), min(case.query, _CHECKED_ROWS)
        error = self._distance(
            out.unflatten(0, (case.batch, -1))[some, -tail:],
            query[some, -tail:],
            key[some].float(),
            value[some].float(),
        )
        num_bytes = case.num_bytes(shape, self.dtype.itemsize, scaled=False)
        return KernelCalls(calls, num_bytes, case.num_flops(shape), error)

    # -- checking them

    def _error(
        self, out: Tensor, query: Tensor, ctx: ForwardContext, layer: int, case: AttentionCase
    ) -> float:
        """Of the first and the last sequence; of a long prompt, of its last tokens."""
        block_size = ctx.kv_cache.shape[4]
        some = _checked(case.batch)
        tail = min(case.query, _CHECKED_ROWS)
        rows = [slice((i + 1) * case.query - tail, (i + 1) * case.query) for i in some]
        pairs = []
        for i in some:
            table = ctx.block_tables[i].long()
            positions = torch.arange(case.context, device=self.device)
            at = table[positions // block_size], positions % block_size
            cache = ctx.kv_cache.view(torch.uint8) if self.coded else ctx.kv_cache
            kv = cache[at[0], layer, :, :, at[1]].view(self.kv_dtype).float()
            if ctx.kv_scales is not None:
                kv *= ctx.kv_scales[at[0], layer, :, :, at[1]].float().unsqueeze(-1)
            pairs.append(kv)
        keys, values = (torch.stack([kv[:, j] for kv in pairs]) for j in range(2))
        outs, queries = (torch.stack([x[row] for row in rows]) for x in (out, query))
        return self._distance(outs, queries, keys, values)

    def _distance(self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor) -> float:
        """||out - dense|| / ||dense||, where all are [sequences, tokens, heads, head_dim]."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        keys, values = (kv.repeat_interleave(group, dim=2) for kv in (keys, values))
        scores = torch.einsum("sqhd,skhd->shqk", query.float(), keys) * self._scale
        num_query, num_keys = scores.shape[2:]
        rows = torch.arange(num_keys - num_query, num_keys, device=self.device)
        hidden = torch.arange(num_keys, device=self.device)[None] > rows[:, None]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        wanted = torch.einsum("shqk,skhd->sqhd", weights, values)
        return float((out.float() - wanted).norm() / wanted.norm())


def _checked(batch: int) -> list[int]:
    return [0, batch - 1][: min(batch, _CHECKED_SEQS)]
