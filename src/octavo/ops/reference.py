"""Slow dense versions of the kernels: what every backend is tested against, and the fallback.

The formulas are those of the kernels; arithmetic is float64, rounded to the tensors' type exactly
where the kernels round. `gather_attention` is the exception: a float32 path in vectorised torch
that serves where no kernel is available.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu


def gather_sequence(
    kv_cache: torch.Tensor,
    layer: int,
    block_table: torch.Tensor,
    start: int,
    end: int,
    kv_scales: torch.Tensor | None = None,
    value_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of positions [start, end) of one sequence.

    Args:
        kv_cache: [num_blocks, num_layers, planes, num_kv_heads, block_size, head_dim].
        layer: which layer of the cache.
        block_table: int [max_blocks], the sequence's block ids.
        kv_scales: [num_blocks, num_layers, planes, num_kv_heads, block_size], or None.
        value_dim: of the values where there is one plane; default head_dim.

    Returns: two tensors [end - start, num_kv_heads, head_dim or value_dim], in the cache's type;
        with scales float32, multiplied by them.
    """
    block_size = kv_cache.shape[4]
    positions = torch.arange(start, end, device=kv_cache.device)
    blocks = block_table.long()[positions // block_size]
    at = blocks, layer, slice(None), slice(None), positions % block_size
    kv = kv_cache[at]
    if kv_scales is not None:
        kv = kv.float() * kv_scales[at].float()[..., None]
    return kv[:, 0], _values(kv, 1, value_dim)


def _values(kv: torch.Tensor, planes_dim: int, value_dim: int | None) -> torch.Tensor:
    """Plane 1; or of one plane, which is key and value, the last value_dim numbers."""
    if kv.shape[planes_dim] == 2:
        return kv.select(planes_dim, 1)
    width = kv.shape[-1]
    return kv.select(planes_dim, 0)[..., width - (value_dim or width) :]


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    sliding_window: int = 0,
    *,
    soft_cap: float = 0.0,
    alibi: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    value_dim: int | None = None,
) -> torch.Tensor:
    """Causal attention over paged keys and values, one sequence at a time.

    For the query q of a token at position t and the positions j in (t - sliding_window, t] (or
    [0, t] if sliding_window is 0), with the keys and values of head h // (num_heads /
    num_kv_heads):

        s_j = scale q.k_j,   out = sum_j exp(s_j) v_j / sum_j exp(s_j)

    A soft cap c makes s_j = c tanh(scale q.k_j / c), ALiBi then adds slope_h (j - t).

    Args:
        query: [num_tokens, num_heads, head_dim]; sequence i owns rows query_start_loc[i] to
            query_start_loc[i + 1], its last positions.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]; or one plane for
            2, then a value is the last value_dim numbers of its key.
        layer: which layer of the cache.
        block_tables: int32 [num_seqs, max_blocks]; entries of no attended position are not read.
        seq_lens: int32 [num_seqs], context lengths including the query's tokens.
        query_start_loc: int32 [num_seqs + 1].
        scale: factor of the scores.
        sliding_window: positions a token attends to, itself included; 0 for all.
        soft_cap: c; 0 for none.
        alibi: float32 [num_heads], slopes; or None.
        kv_scales: float16 [num_blocks, num_layers, 2, num_kv_heads, block_size]: factors of the
            cache's codes; or None.
        value_dim: see kv_cache.

    Returns: float64 [num_tokens, num_heads, value_dim or head_dim]; rows of no sequence are zero.
    """
    shape = (*query.shape[:2], value_dim or query.shape[2])
    out = torch.zeros(shape, dtype=torch.float64, device=query.device)
    group = query.shape[1] // kv_cache.shape[3]
    starts = query_start_loc.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        first, end = starts[i], starts[i + 1]
        low = max(0, length - (end - first) + 1 - sliding_window) if sliding_window else 0
        keys, values = gather_sequence(
            kv_cache, layer, block_tables[i], low, length, kv_scales, value_dim
        )
        keys = keys.double().repeat_interleave(group, dim=1)
        values = values.double().repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[first:end].double(), keys) * scale
        if soft_cap:
            scores = soft_cap * (scores / soft_cap).tanh()
        if alibi is not None:
            distance = _distance(length - (end - first), low, length, query.device)
            scores = scores + alibi.double()[:, None, None] * distance
        hidden = _hidden(length - (end - first), low, length, sliding_window, query.device)
        weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, values)
    return out


def _distance(first_query: int, low: int, length: int, device: torch.device) -> torch.Tensor:
    """int [queries, keys]: position of the key less that of the query."""
    query = torch.arange(first_query, length, device=device)[:, None]
    return torch.arange(low, length, device=device) - query


def _hidden(
    first_query: int, low: int, length: int, window: int, device: torch.device
) -> torch.Tensor:
    """bool [queries, keys], true where a query may not look: the future, and before its window."""
    distance = _distance(first_query, low, length, device)
    hidden = distance > 0
    return hidden | (distance <= -window) if window else hidden


def gather_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float,
    sliding_window: int = 0,
    *,
    soft_cap: float = 0.0,
    alibi: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    value_dim: int | None = None,
) -> torch.Tensor:
    """`paged_attention` in float32 and with all decodes of the batch at once.

    Prefill chunks go one by one. Takes any floating type. Keys and values are copied out of the
    cache, so this moves three times the memory that a kernel does.

    Returns: [num_tokens, num_heads, value_dim or head_dim] in query's type; rows of no sequence are
        zero.
    """
    out = query.new_zeros((*query.shape[:2], value_dim or query.shape[2]))
    starts = query_start_loc.long()
    counts = starts.diff()
    decodes = (counts == 1).nonzero().flatten()
    if len(decodes):
        rows = starts[decodes]
        out[rows] = _gather_decode(
            query[rows], kv_cache, layer, block_tables[decodes], seq_lens[decodes], scale,
            sliding_window, soft_cap, alibi, kv_scales, value_dim,
        ).to(out.dtype)  # fmt: skip
    for i in (counts > 1).nonzero().flatten().tolist():
        first, end, length = int(starts[i]), int(starts[i + 1]), int(seq_lens[i])
        low = max(0, length - (end - first) + 1 - sliding_window) if sliding_window else 0
        keys, values = (
            x.float().transpose(0, 1)
            for x in gather_sequence(
                kv_cache, layer, block_tables[i], low, length, kv_scales, value_dim
            )
        )
        hidden = _hidden(length - (end - first), low, length, sliding_window, query.device)
        queries = query[first:end].float().transpose(0, 1)
        if soft_cap or alibi is not None:
            distance = _distance(length - (end - first), low, length, query.device)
            grouped = queries.unflatten(0, (len(keys), -1))
            scores = (grouped @ keys.transpose(-1, -2)[:, None]).flatten(0, 1) * scale
            weights = _adjusted(scores, distance, soft_cap, alibi).masked_fill(hidden, -math.inf)
            weights = weights.softmax(dim=-1).unflatten(0, (len(keys), -1))
            result = (weights @ values[:, None]).flatten(0, 1)
        else:
            result = scaled_dot_product_attention(
                queries[None], keys[None], values[None], attn_mask=~hidden, scale=scale,
                enable_gqa=True,
            )[0]  # fmt: skip
        out[first:end] = result.transpose(0, 1).to(out.dtype)
    return out


def _adjusted(
    scores: torch.Tensor, distance: torch.Tensor, soft_cap: float, alibi: torch.Tensor | None
) -> torch.Tensor:
    """Scores [num_heads, queries, keys] after soft cap and ALiBi."""
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    return scores if alibi is None else scores + alibi[:, None, None] * distance


def _gather_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    soft_cap: float,
    alibi: torch.Tensor | None,
    kv_scales: torch.Tensor | None,
    value_dim: int | None,
) -> torch.Tensor:
    """float32 [num_seqs, num_heads, value_dim]; query has one row a sequence."""
    num_blocks, _, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_seqs, num_heads, _ = query.shape
    length = seq_lens.long()[:, None]
    first_block = (length - window).clamp(min=0) // block_size if window else length * 0
    # At least one: a sequence of length 0 is padding.
    most = max(1, int((-(-length // block_size) - first_block).max()))
    columns = first_block + torch.arange(most, device=query.device)
    # Entries past a sequence's end, or before its window, may hold anything.
    tables = block_tables.long().gather(1, columns.clamp(max=block_tables.shape[1] - 1))
    tables = tables.clamp(0, num_blocks - 1)
    kv = kv_cache[tables, layer].float()  # [seqs, blocks, planes, kv_heads, block_size, head_dim]
    if kv_scales is not None:
        kv *= kv_scales[tables, layer].float()[..., None]
    kv = kv.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
    position = first_block * block_size + torch.arange(most * block_size, device=query.device)
    hidden = position >= length
    if window:
        hidden |= position < length - window
    hidden = hidden[:, None, :, None]
    kv = kv.masked_fill(hidden, 0.0)
    keys, values = kv[0], _values(kv, 0, value_dim)
    grouped = query.float().view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = grouped @ keys.transpose(-1, -2) * scale
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    if alibi is not None:
        distance = (position - length + 1)[:, None, None, :]
        scores = scores + alibi.view(1, num_kv_heads, -1, 1) * distance
    weights = scores.masked_fill(hidden.transpose(-1, -2), -math.inf).softmax(dim=-1)
    return (weights @ values).reshape(num_seqs, num_heads, -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension, rounded to x's type, times weight; a
    float32 weight of other rows is multiplied without rounding before."""
    wide = x.double()
    normalised = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight.dtype == x.dtype:
        normalised = normalised.to(x.dtype).double()
    return (normalised * weight.double()).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """residual += x in place, then `rms_norm(residual)`, which is returned."""
    residual.copy_(x.double() + residual.double())
    return rms_norm(residual, weight, eps)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, rounded once."""
    wide = x.double()
    centred = wide - wide.mean(dim=-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps) * weight
    return (scaled if bias is None else scaled + bias).to(x.dtype)


def activation(x: torch.Tensor, name: str) -> torch.Tensor:
    """One of `octavo.arch.ACTIVATIONS` of every element, in x's type."""
    if name == "silu":
        return silu(x)
    if name == "relu":
        return relu(x)
    if name == "relu2":
        return relu(x).square()
    return gelu(x, approximate={"gelu": "none", "gelu_tanh": "tanh"}[name])


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for [..., 2 n] = (gate, up); returns [..., n], rounded once."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)


def rope(
    x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotary embedding of the first rotary_dim elements of each head, by halves (NeoX) or, if
    `interleaved`, by pairs (GPT-J).

    With h = rotary_dim / 2, c and s the two halves of cos_sin[position]: x_i and x_{h+i} become
    x_i c_i - x_{h+i} s_i and x_{h+i} c_i + x_i s_i; interleaved x_{2i} and x_{2i+1} likewise.

    Args:
        x: [num_tokens, num_heads, head_dim].
        positions: int [num_tokens].
        cos_sin: float32 [max_positions, rotary_dim].

    Returns: tensor like x.
    """
    half = cos_sin.shape[1] // 2
    cos, sin = cos_sin.double()[positions.long()][:, None].split(half, dim=-1)
    turned, rest = x.double().split([2 * half, x.shape[-1] - 2 * half], dim=-1)
    if interleaved:
        first, second = turned.unflatten(-1, (half, 2)).unbind(-1)
    else:
        first, second = turned.split(half, dim=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    both = torch.stack(parts, dim=-1).flatten(-2) if interleaved else torch.cat(parts, dim=-1)
    return torch.cat((both, rest), dim=-1).to(x.dtype)


def int8_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., head_dim] as int8 codes and float16 scales [...]: x is about code scale.

    The scale is amax / 127 rounded up to a normal float16 (1 for zeros; NaN or inf where x is not
    finite or amax / 127 no float16, so that what is computed from it is none either).
    """
    wide = x.float()
    amax = wide.abs().amax(dim=-1)
    exact = (amax / 127.0).clamp(min=2.0**-14)
    nearest = exact.half()
    bits = nearest.view(torch.int16)
    up = torch.where(nearest.float() < exact, bits + 1, bits).view(torch.float16)
    scale = torch.where(amax == 0.0, torch.ones_like(up), up)
    divisor = torch.where(scale.isfinite(), scale.float(), 1.0)
    codes = (wide / divisor[..., None]).nan_to_num(0.0).round().clamp(-127.0, 127.0)
    return codes.to(torch.int8), scale


def rope_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor | None,
    positions: torch.Tensor,
    cos_sin: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    q_norm_weight: torch.Tensor | None = None,
    k_norm_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    interleaved: bool = False,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Norms (where a weight is given) and rotates (where there is a table) query and key in place,
    then writes key and value to their slots: slot s is slot s % block_size of block s //
    block_size; s < 0 is skipped. With scales the cache holds `int8_codes`.

    Shapes as in `octavo.ops.cpu.rope_cache.rope_and_cache`.
    """
    for x, weight in ((query, q_norm_weight), (key, k_norm_weight)):
        normed = x if weight is None else rms_norm(x, weight, eps)
        x.copy_(normed if cos_sin is None else rope(normed, positions, cos_sin, interleaved))
    kept = slot_mapping >= 0
    blocks, slots = slot_mapping[kept] // kv_cache.shape[4], slot_mapping[kept] % kv_cache.shape[4]
    for plane, x in enumerate((key,) if value is None else (key, value)):
        written = x[kept]
        if kv_scales is not None:
            written, scales = int8_codes(written)
            kv_scales[blocks, layer, plane, :, slots] = scales
        kv_cache[blocks, layer, plane, :, slots] = written
