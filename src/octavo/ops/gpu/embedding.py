"""Rows of the embedding table."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.gpu import pdl

_BLOCK = 1024


@triton.jit
def _embedding_kernel(
    table, token_ids, out, vocab_size, width, out_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[t] = table[token_ids[t]]; program (t, b) copies elements b * BLOCK + [0, BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token_id = tl.load(token_ids + token).to(tl.int64)
    token_id = tl.minimum(tl.maximum(token_id, 0), vocab_size - 1)
    row = tl.load(table + token_id * width + k, mask=k < width, other=0.0)
    tl.store(out + token * out_stride + k, row, mask=k < width)


def embed(table: Tensor, token_ids: Tensor, out: Tensor) -> Tensor:
    """Row `token_ids[t]` of the table, for each token; ids outside it give its first or last row.

    Args:
        table: [vocab_size, width], contiguous.
        token_ids: int32 or int64 [num_tokens], contiguous.
        out: [num_tokens, width], table's type, any stride between rows.

    Returns: out.
    Raises: TypeError for dtypes; ValueError for shapes and strides.
    """
    (num_tokens,) = token_ids.shape
    vocab_size, width = table.shape
    if out.shape != (num_tokens, width) or out.stride(1) != 1 or not table.is_contiguous():
        raise ValueError(
            f"out must be dense {(num_tokens, width)} and the table contiguous:"
            f" {tuple(out.shape)}, strides {out.stride()} and {table.stride()}"
        )
    if token_ids.dtype not in (torch.int32, torch.int64) or not token_ids.is_contiguous():
        raise TypeError(f"token_ids must be contiguous int32 or int64: {token_ids.dtype}")
    if out.dtype != table.dtype:
        raise TypeError(f"out must have the table's type {table.dtype}: {out.dtype}")
    if num_tokens == 0:
        return out
    _embedding_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
        table, token_ids, out, vocab_size, width, out.stride(0),
        BLOCK=_BLOCK, num_warps=4, **pdl.launch_options(table.device),
    )  # fmt: skip
    return out
