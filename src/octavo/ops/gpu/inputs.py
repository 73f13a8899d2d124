"""A step's inputs become tensors on the device, and its tokens the next step's inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


@triton.jit(do_not_specialize=["num_tokens", "num_changes"])
def _prepare(
    ids_ptr,
    positions_ptr,
    slots_ptr,
    rows_ptr,
    last_tokens_ptr,
    ids_out_ptr,
    positions_out_ptr,
    slots_out_ptr,
    num_tokens,
    where_ptr,
    what_ptr,
    tables_ptr,
    num_changes,
    slots_stride,
    NUM_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Per token i: id (that of `last_tokens[rows[i]]` where it is -1), position and slot, widened
    to 64 bits. Per change: `tables[where] = what`; where < 0 is none.

    A sequence's last token is fed from the device only where it computes that token alone, and
    those come first: token i is then sequence i's.

    Never to be launched as PDL (`ops.gpu.pdl`): kernels of the step read what it and the upload
    before it write without waiting for more than their own predecessor.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = at < num_tokens
    ids = tl.load(ids_ptr + at, mask=is_token, other=0)
    sampled = is_token & (ids < 0)
    rows = tl.load(rows_ptr + at, mask=sampled, other=0)
    ids = tl.where(sampled, tl.load(last_tokens_ptr + rows, mask=sampled, other=0), ids)
    tl.store(ids_out_ptr + at, ids.to(tl.int64), mask=is_token)
    positions = tl.load(positions_ptr + at, mask=is_token, other=0)
    tl.store(positions_out_ptr + at, positions.to(tl.int64), mask=is_token)
    for group in tl.static_range(NUM_GROUPS):
        slots = tl.load(slots_ptr + group * num_tokens + at, mask=is_token, other=-1)
        tl.store(slots_out_ptr + group * slots_stride + at, slots.to(tl.int64), mask=is_token)

    where = tl.load(where_ptr + at, mask=at < num_changes, other=-1)
    is_change = where >= 0
    what = tl.load(what_ptr + at, mask=is_change, other=0)
    tl.store(tables_ptr + where, what, mask=is_change)


@triton.jit(do_not_specialize=["num_rows"])
def _take_tokens(
    tokens_ptr, finite_ptr, rows_ptr, last_tokens_ptr, answer_ptr, num_rows, BLOCK: tl.constexpr
):
    """answer[i] = tokens[i], or -1 where finite[i] is 0; and `last_tokens[rows[i]] = tokens[i]`, or
    0, where rows[i] >= 0: the next step may be under way, and must find a token."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num_rows
    tokens = tl.load(tokens_ptr + at, mask=mask, other=0).to(tl.int32)
    finite = tl.load(finite_ptr + at, mask=mask, other=0) != 0
    tl.store(answer_ptr + at, tl.where(finite, tokens, -1), mask=mask)
    rows = tl.load(rows_ptr + at, mask=mask, other=-1)
    tl.store(last_tokens_ptr + rows, tl.where(finite, tokens, 0), mask=mask & (rows >= 0))


def prepare(
    token_ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    rows: Tensor,
    last_tokens: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
    where: Tensor,
    what: Tensor,
    tables: Tensor,
) -> None:
    """Widen a step's tokens into `out` and bring the block tables up to date; one launch.

    token_ids, positions: int32 [num_tokens]; an id of -1 stands for `last_tokens[rows[i]]`.
    slots: int32 [num_groups * num_tokens], one group of layers after the other.
    rows: int32 [num_seqs], the row of each sequence; last_tokens: int32 [max_rows].
    out: int64: ids and positions [num_tokens], slots [num_groups, num_tokens], whose groups may lie
    further apart.
    where, what: int32 [num_changes]: flat places in tables (-1: none), and what goes there.
    tables: int32 [max_rows, max_blocks], contiguous.
    """
    num_tokens, num_changes = len(token_ids), len(where)
    for tensor in (token_ids, positions, slots, rows, last_tokens, where, what, tables):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    num_groups = len(out[2])
    for tensor, num in zip(out, (num_tokens, num_tokens, len(slots)), strict=True):
        assert tensor.dtype == torch.int64 and tensor.stride(-1) == 1 and tensor.numel() == num
    assert len(positions) == num_tokens and len(slots) == num_groups * num_tokens
    assert len(what) == num_changes
    most = max(num_tokens, num_changes)
    if not most:
        return
    _prepare[(triton.cdiv(most, _BLOCK),)](
        token_ids, positions, slots, rows, last_tokens, *out, num_tokens, where, what, tables,
        num_changes, out[2].stride(0), NUM_GROUPS=num_groups, BLOCK=_BLOCK,
    )  # fmt: skip


def take_tokens(
    tokens: Tensor, finite: Tensor, rows: Tensor, last_tokens: Tensor, answer: Tensor
) -> None:
    """Sampled tokens to where the next step and the host look for them; one launch.

    tokens: int64 [num_rows]; finite: int32 [num_rows], 0 where the logits are not; rows: int32
    [num_rows], places in last_tokens (int32 [max_rows]), -1 for a row of padding; answer: int32
    [num_rows], the tokens, -1 where the logits are not finite (0 in last_tokens).
    """
    num_rows = len(tokens)
    assert len(finite) == len(rows) == len(answer) == num_rows
    assert finite.dtype == rows.dtype == answer.dtype == last_tokens.dtype == torch.int32
    if num_rows:
        _take_tokens[(triton.cdiv(num_rows, _BLOCK),)](
            tokens, finite, rows, last_tokens, answer, num_rows, BLOCK=_BLOCK
        )
