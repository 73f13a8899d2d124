"""Slow dense versions of the kernels: what every backend is tested against, and the fallback.

The formulas are those of the kernels; arithmetic is float64, rounded to the tensors' type exactly
where the kernels round. `gather_attention` is the exception: a float32 path in vectorised torch
that serves where no kernel is available.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import scaled_dot_product_attention, silu


def gather_sequence(
    kv_cache: torch.Tensor, layer: int, block_table: torch.Tensor, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions [start, end) of one sequence.

    Args:
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        layer: which layer of the cache.
        block_table: int [max_blocks], the sequence's block ids.

    Returns: two tensors [end - start, num_kv_heads, head_dim] in the cache's type.
    """
    block_size = kv_cache.shape[4]
    positions = torch.arange(start, end, device=kv_cache.device)
    blocks = block_table.long()[positions // block_size]
    kv = kv_cache[blocks, layer, :, :, positions % block_size]
    return kv[:, 0], kv[:, 1]


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    sliding_window: int = 0,
) -> torch.Tensor:
    """Causal attention over paged keys and values, one sequence at a time.

    For the query q of a token at position t and the positions j in (t - sliding_window, t] (or
    [0, t] if sliding_window is 0), with the keys and values of head h // (num_heads /
    num_kv_heads):

        s_j = scale q.k_j,   out = sum_j exp(s_j) v_j / sum_j exp(s_j)

    Args:
        query: [num_tokens, num_heads, head_dim]; sequence i owns rows query_start_loc[i] to
            query_start_loc[i + 1], its last positions.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        layer: which layer of the cache.
        block_tables: int32 [num_seqs, max_blocks].
        seq_lens: int32 [num_seqs], context lengths including the query's tokens.
        query_start_loc: int32 [num_seqs + 1].
        scale: factor of the scores.
        sliding_window: positions a token attends to, itself included; 0 for all.

    Returns: float64 tensor of query's shape; rows of no sequence are zero.
    """
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    group = query.shape[1] // kv_cache.shape[3]
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        first, end = starts[i], starts[i + 1]
        low = max(0, length - (end - first) + 1 - sliding_window) if sliding_window else 0
        keys, values = gather_sequence(kv_cache, layer, block_tables[i], low, length)
        keys = keys.double().repeat_interleave(group, dim=1)
        values = values.double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[first:end].double(), keys) * scale
        hidden = _hidden(length - (end - first), low, length, sliding_window, query.device)
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def _hidden(
    first_query: int, low: int, length: int, window: int, device: torch.device
) -> torch.Tensor:
    """bool [queries, keys], true where a query may not look: the future, and before its window."""
    query = torch.arange(first_query, length, device=device)[:, None]
    key = torch.arange(low, length, device=device)
    hidden = key > query
    return hidden | (key <= query - window) if window else hidden


def gather_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    sliding_window: int = 0,
) -> torch.Tensor:
    """`paged_attention` in float32 and with all decodes of the batch at once.

    Prefill chunks go one by one. Takes any floating type. Keys and values are copied out of the
    cache, so this moves three times the memory that a kernel does.

    Returns: tensor like query; rows of no sequence are zero.
    """
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    starts = query_start_loc.long()
    counts = starts.diff()
    decodes = (counts == 1).nonzero().flatten()
    if len(decodes):
        rows = starts[decodes]
        out[rows] = _gather_decode(
            query[rows], kv_cache, layer, block_tables[decodes], seq_lens[decodes], scale,
            sliding_window,
        ).to(out.dtype)  # fmt: skip
    for i in (counts > 1).nonzero().flatten().tolist():
        first, end, length = int(starts[i]), int(starts[i + 1]), int(seq_lens[i])
        low = max(0, length - (end - first) + 1 - sliding_window) if sliding_window else 0
        keys, values = gather_sequence(kv_cache, layer, block_tables[i], low, length)
        hidden = _hidden(length - (end - first), low, length, sliding_window, query.device)
        result = scaled_dot_product_attention(
            query[first:end].float().transpose(0, 1)[None],
            keys.float().transpose(0, 1)[None],
            values.float().transpose(0, 1)[None],
            attn_mask=~hidden,
            scale=scale,
            enable_gqa=True,
        )
        out[first:end] = result[0].transpose(0, 1).to(out.dtype)
    return out


def _gather_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """float32 [num_seqs, num_heads, head_dim]; query has one row a sequence."""
    num_blocks, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_seqs, num_heads, _ = query.shape
    longest = int(seq_lens.max())
    # Entries past a sequence's end may hold anything.
    tables = block_tables[:, : -(-longest // block_size)].long().clamp(0, num_blocks - 1)
    kv = kv_cache[tables, layer].float()  # [seqs, blocks, 2, kv_heads, block_size, head_dim]
    kv = kv.permute(2, 0, 3, 1, 4, 5).reshape(2, num_seqs, num_kv_heads, -1, head_dim)
    position = torch.arange(kv.shape[3], device=query.device)
    length = seq_lens.long()[:, None]
    hidden = position >= length
    if window:
        hidden |= position < length - window
    hidden = hidden[:, None, :, None]
    keys, values = kv.masked_fill(hidden, 0.0)
    grouped = query.float().view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = grouped @ keys.transpose(-1, -2) * scale
    weights = scores.masked_fill(hidden.transpose(-1, -2), -math.inf).softmax(dim=-1)
    return (weights @ values).reshape(query.shape)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, rounded to x's type, times weight."""
    wide = x.double()
    normalised = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (normalised.to(x.dtype).double() * weight.double()).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += x in place, then `rms_norm(residual)`, which is returned."""
    residual.copy_(x.double() + residual.double())
    return rms_norm(residual, weight, eps)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for [..., 2 n] = (gate, up); returns [..., n], rounded once."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)


def rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding by halves (NeoX) of the first rotary_dim elements of each head.

    With h = rotary_dim / 2, c and s the two halves of cos_sin[position]: x_i and x_{h+i} become
    x_i c_i - x_{h+i} s_i and x_{h+i} c_i + x_i s_i.

    Args:
        x: [num_tokens, num_heads, head_dim].
        positions: int [num_tokens].
        cos_sin: float32 [max_positions, rotary_dim].

    Returns: tensor like x.
    """
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin.double()[positions.long()][:, None].split(half, dim=-1)
    first, second, rest = x.double().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin, rest)
    return torch.cat(parts, dim=-1).to(x.dtype)


def rope_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Norms (where a weight is given) and rotates query and key in place, then writes key and
    value to their slots: slot s is slot s % block_size of block s // block_size; s < 0 is skipped.

    Shapes as in `octavo.ops.cpu.elementwise.rope_and_cache`.
    """
    for x, weight in ((query, q_norm_weight), (key, k_norm_weight)):
        normed = x if weight is None else rms_norm(x, weight, eps)
        x.copy_(rope(normed, positions, cos_sin))
    kept = slot_mapping >= 0
    blocks, slots = slot_mapping[kept] // kv_cache.shape[4], slot_mapping[kept] % kv_cache.shape[4]
    for part, x in enumerate((key, value)):
        kv_cache[blocks, layer, part, :, slots] = x[kept]
