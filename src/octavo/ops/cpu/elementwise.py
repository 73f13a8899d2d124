"""Norms, activation, rotary embedding and cache writes on CPU: launcher of csrc/elementwise.c.

All take float32 or bfloat16 rows with any stride between tokens, compute in float32, use several
threads only where there is work for them, and fall back to `octavo.ops.reference`.
"""

from __future__ import annotations

import struct
from typing import NoReturn

import torch

from octavo.ops import reference
from octavo.ops.cpu import native

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
# struct norm_args, silu_args and rope_args of csrc/elementwise.c
_pack_norm = struct.Struct("@4P5q2if").pack
_pack_silu = struct.Struct("@2P4q2i").pack
_pack_rope = struct.Struct("@9P9q8if").pack


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps), rounded to x's type, times weight.

    Args:
        x: [num_tokens, width].
        weight: [width], contiguous, x's type.
        eps: added to the mean square.
        out: like x; may be x itself.

    Returns: out, or a new tensor.
    Raises: TypeError for dtypes; ValueError for shapes and strides.
    """
    return _norm(x, None, weight, eps, out)


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual += x in place (rounded), then `rms_norm(residual)`.

    Args:
        x: [num_tokens, width].
        residual: like x, updated.
        weight: [width], contiguous, x's type.
        eps: added to the mean square.
        out: like x; may be x itself.

    Returns: out, or a new tensor.
    Raises: TypeError for dtypes; ValueError for shapes and strides.
    """
    return _norm(x, residual, weight, eps, out)


def _norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    num_tokens, width = shape = x.shape
    dtype = x.dtype
    x_stride, x_element_stride = x.stride()
    out_stride, out_element_stride = out.stride()
    good = (
        dtype in _DTYPES
        and weight.dtype == out.dtype == dtype
        and out.shape == shape
        and weight.shape == (width,)
        and x_element_stride == out_element_stride == weight.stride(0) == 1
    )
    residual_ptr = residual_stride = 0
    if residual is not None:
        residual_ptr = residual.data_ptr()
        residual_stride, residual_element_stride = residual.stride()
        good = (
            good
            and residual.dtype == dtype
            and residual.shape == shape
            and residual_element_stride == 1
        )
    if not good:
        _explain(x, {"out": out, "residual": residual}, {"weight": weight})
    call = native.function("octavo_rms_norm")
    if call is None:
        return out.copy_(
            reference.rms_norm(x, weight, eps)
            if residual is None
            else reference.fused_add_rms_norm(x, residual, weight, eps)
        )
    call(
        _pack_norm(
            out.data_ptr(), x.data_ptr(), residual_ptr, weight.data_ptr(),
            out_stride, x_stride, residual_stride, num_tokens, width,
            _DTYPES[dtype], torch.get_num_threads(), eps,
        )
    )  # fmt: skip
    return out


def silu_and_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(gate) * up, rounded once.

    Args:
        gate_up: [num_tokens, 2 * width], gate first.
        out: [num_tokens, width], gate_up's type; not overlapping gate_up.

    Returns: out, or a new tensor.
    Raises: TypeError for dtypes; ValueError for shapes and strides.
    """
    num_tokens, double_width = gate_up.shape
    dtype, width = gate_up.dtype, double_width // 2
    if out is None:
        out = torch.empty((num_tokens, width), dtype=dtype)
    stride, element_stride = gate_up.stride()
    out_stride, out_element_stride = out.stride()
    if not (
        dtype in _DTYPES
        and out.dtype == dtype
        and double_width % 2 == 0
        and out.shape == (num_tokens, width)
        and element_stride == out_element_stride == 1
    ):
        if double_width % 2:
            raise ValueError(f"gate_up's width must be even: {double_width}")
        _explain(gate_up[:, :width], {"out": out}, {})
    call = native.function("octavo_silu_and_mul")
    if call is None:
        return out.copy_(reference.silu_and_mul(gate_up))
    call(
        _pack_silu(
            out.data_ptr(), gate_up.data_ptr(), out_stride, stride, num_tokens, width,
            _DTYPES[dtype], torch.get_num_threads(),
        )
    )  # fmt: skip
    return out


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
    """Rotates query and key in place (NeoX halves) and writes key and value to their slots.

    Formulas: `octavo.ops.reference.rope` and `rms_norm`; the norm comes first, per head.

    Args:
        query: [num_tokens, num_heads, head_dim], rotated in place.
        key: [num_tokens, num_kv_heads, head_dim], rotated in place.
        value: like key. The three may have any stride between tokens, the last two dense.
        positions: int64 or int32 [num_tokens].
        cos_sin: float32 [max_positions, rotary_dim], contiguous, cosines first; rotary_dim even
            and at most head_dim, of which the first rotary_dim elements are rotated.
        slot_mapping: int64 [num_tokens]: block id * block_size + offset; negative: not written.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.
        layer: which layer of the cache.
        q_norm_weight: [head_dim] RMS norm of each query head before the rotation, or None.
        k_norm_weight: the same for keys.
        eps: of the norms.

    Raises: TypeError for dtypes; ValueError for shapes, strides, positions and slots. Nothing is
        written then.
    """
    num_blocks, num_layers, two, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_tokens, num_heads, query_dim = query.shape
    max_positions, rotary_dim = cos_sin.shape
    query_strides, key_strides, value_strides = query.stride(), key.stride(), value.stride()
    dtype = kv_cache.dtype
    if not (
        dtype in _DTYPES
        and query.dtype == key.dtype == value.dtype == dtype
        and cos_sin.dtype == torch.float32
        and slot_mapping.dtype == torch.int64
        and (positions.dtype == torch.int64 or positions.dtype == torch.int32)
        and query_dim == head_dim
        and key.shape == value.shape == (num_tokens, num_kv_heads, head_dim)
        and query_strides[1:] == key_strides[1:] == value_strides[1:] == (head_dim, 1)
        and positions.shape == slot_mapping.shape == (num_tokens,)
        and two == 2
        and 0 <= layer < num_layers
        and rotary_dim % 2 == 0
        and rotary_dim <= head_dim
        and kv_cache.is_contiguous()
        and cos_sin.is_contiguous()
        and positions.is_contiguous()
        and slot_mapping.is_contiguous()
        and _is_norm_weight(q_norm_weight, head_dim, dtype)
        and _is_norm_weight(k_norm_weight, head_dim, dtype)
    ):
        _explain_rope(query, key, value, positions, cos_sin, slot_mapping, kv_cache, layer,
                      q_norm_weight, k_norm_weight)  # fmt: skip
    call = native.function("octavo_rope_and_cache")
    if call is None:
        reference.rope_and_cache(query, key, value, positions, cos_sin, slot_mapping, kv_cache,
                                 layer, q_norm_weight, k_norm_weight, eps)  # fmt: skip
        return
    layer_size = num_kv_heads * block_size * head_dim
    status = call(
        _pack_rope(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), positions.data_ptr(),
            cos_sin.data_ptr(), slot_mapping.data_ptr(), kv_cache.data_ptr(),
            0 if q_norm_weight is None else q_norm_weight.data_ptr(),
            0 if k_norm_weight is None else k_norm_weight.data_ptr(),
            query_strides[0], key_strides[0], value_strides[0], num_tokens, max_positions,
            num_blocks, 2 * num_layers * layer_size,
            2 * layer * layer_size, (2 * layer + 1) * layer_size,
            num_heads, num_kv_heads, head_dim, rotary_dim, block_size,
            _DTYPES[dtype], positions.dtype == torch.int64, torch.get_num_threads(), eps,
        )
    )  # fmt: skip
    if status:
        token = status // 8
        if status % 8 == 1:
            raise ValueError(
                f"positions[{token}] must be in [0, {max_positions}), the rows of cos_sin:"
                f" {int(positions[token])}"
            )
        raise ValueError(
            f"slot_mapping[{token}] must be below {num_blocks * block_size}"
            f" (num_blocks x block_size): {int(slot_mapping[token])}"
        )


def _is_norm_weight(weight: torch.Tensor | None, head_dim: int, dtype: torch.dtype) -> bool:
    return weight is None or (
        weight.dtype == dtype and weight.shape == (head_dim,) and weight.stride(0) == 1
    )


def _explain(
    x: torch.Tensor, like: dict[str, torch.Tensor | None], vectors: dict[str, torch.Tensor | None]
) -> NoReturn:
    """Raises the error that says which of the tensors does not go with x; `like` have its shape,
    `vectors` that of its last dimension."""
    if x.dtype not in _DTYPES:
        raise TypeError(f"the input must be float32 or bfloat16, not {x.dtype}")
    shapes = {name: (tensor, x.shape) for name, tensor in {"input": x, **like}.items()}
    shapes |= {name: (tensor, x.shape[-1:]) for name, tensor in vectors.items()}
    for name, (tensor, shape) in shapes.items():
        if tensor is None:
            continue
        if tensor.dtype != x.dtype:
            raise TypeError(f"{name} must have the input's type {x.dtype}, not {tensor.dtype}")
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)} here: {tuple(tensor.shape)}")
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name}'s last dimension must be dense: strides {tensor.stride()}")
    raise AssertionError("arguments refused that _explain finds no fault with")


def _explain_rope(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache: torch.Tensor,
    layer: int,
    q_norm_weight: torch.Tensor | None,
    k_norm_weight: torch.Tensor | None,
) -> NoReturn:
    """Raises the error that says which argument of rope_and_cache is wrong."""
    dtype = kv_cache.dtype
    _, num_layers, two, num_kv_heads, _, head_dim = kv_cache.shape
    num_tokens = query.shape[0]
    if dtype not in _DTYPES:
        raise TypeError(f"kv_cache must be float32 or bfloat16, not {dtype}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        heads = query.shape[1] if name == "query" else num_kv_heads
        if x.dtype != dtype:
            raise TypeError(f"{name} must have kv_cache's type {dtype}, not {x.dtype}")
        if x.shape != (num_tokens, heads, head_dim) or x.stride()[1:] != (head_dim, 1):
            raise ValueError(
                f"{name} must be {(num_tokens, heads, head_dim)} with dense heads here:"
                f" {tuple(x.shape)}, strides {x.stride()}"
            )
    if cos_sin.dtype != torch.float32:
        raise TypeError(f"cos_sin must be float32, not {cos_sin.dtype}")
    if positions.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"positions must be int64 or int32, not {positions.dtype}")
    if slot_mapping.dtype != torch.int64:
        raise TypeError(f"slot_mapping must be int64, not {slot_mapping.dtype}")
    for name, x in (("positions", positions), ("slot_mapping", slot_mapping)):
        if x.shape != (num_tokens,) or not x.is_contiguous():
            raise ValueError(f"{name} must be contiguous [{num_tokens}] here: {tuple(x.shape)}")
    if not cos_sin.is_contiguous() or cos_sin.shape[1] % 2 or cos_sin.shape[1] > head_dim:
        raise ValueError(
            f"cos_sin must be contiguous with an even rotary_dim of at most {head_dim}:"
            f" {tuple(cos_sin.shape)}, strides {cos_sin.stride()}"
        )
    if two != 2 or not kv_cache.is_contiguous():
        raise ValueError(
            "kv_cache must be contiguous [num_blocks, num_layers, 2, num_kv_heads, block_size,"
            f" head_dim], not {tuple(kv_cache.shape)} with strides {kv_cache.stride()}"
        )
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer must be in [0, {num_layers}): {layer}")
    _explain(query, {}, {"q_norm_weight": q_norm_weight, "k_norm_weight": k_norm_weight})
