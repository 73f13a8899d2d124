"""Copies of many blocks in one launch: within the pool, and between it and pinned host memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
_PROGRAM_BYTES = 16 << 10


@triton.jit
def _copy_rows(into, out_of, pairs, ROW_WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """into[to, w] = out_of[row, w] for (row, to) = pairs[i], all words w; grid: (pairs, pieces).

    into, out_of: rows of ROW_WORDS words; pairs: [num_copies, 2] int64. The rows of a launch are
    copied at the same time, in no order.
    """
    pair = pairs + tl.program_id(0) * 2
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = words < ROW_WORDS
    row = tl.load(pair)
    to = tl.load(pair + 1)
    values = tl.load(out_of + row * ROW_WORDS + words, mask=inside)
    tl.store(into + to * ROW_WORDS + words, values, mask=inside)


def copy_blocks(into: Tensor, out_of: Tensor, pairs: Tensor) -> None:
    """Rows of `out_of` to rows of `into`, all at the same time.

    into, out_of: [num_blocks, block_bytes] uint8, contiguous, the same or not; each on the device,
    or in pinned memory of the host, which the device then reads and writes by itself. pairs:
    [num_copies, 2] int64 on the device, the row to read and the row to write. No row may be written
    that another copy reads or writes.
    """
    block_bytes = into.shape[1]
    assert into.dtype == out_of.dtype == torch.uint8 and into.dim() == out_of.dim() == 2
    assert out_of.shape[1] == block_bytes and into.is_contiguous() and out_of.is_contiguous()
    assert pairs.dtype == torch.int64 and pairs.dim() == 2 and pairs.shape[1] == 2
    assert pairs.is_contiguous()
    assert all(t.device == pairs.device or t.is_pinned() for t in (into, out_of))
    if not len(pairs) or not block_bytes:
        return
    layout = (block_bytes, into.data_ptr(), out_of.data_ptr())
    size, dtype = next(
        (size, dtype) for size, dtype in _WORDS if all(number % size == 0 for number in layout)
    )
    row_words = block_bytes // size
    block = min(_PROGRAM_BYTES // size, triton.next_power_of_2(row_words))
    _copy_rows[(len(pairs), triton.cdiv(row_words, block))](
        into.view(dtype), out_of.view(dtype), pairs, ROW_WORDS=row_words, BLOCK=block
    )
