"""Plans become tensors: what the runner remembers of each sequence, and one step's flat batch.

A plan is a difference, so the runner keeps tokens and block tables between steps. Tables live in
one preallocated array with a row for each sequence that holds blocks; building a step's tensors is
numpy indexing over those rows, without a Python loop over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.plan import NewSeq, SeqFork, SeqPlan, StepPlan
from octavo.util import cdiv

Ints = NDArray[np.int64]


class SeqState:
    """A sequence as the runner knows it: its tokens, and its row of the tables."""

    __slots__ = ("_buffer", "num_blocks", "num_prompt_tokens", "num_tokens", "row")

    def __init__(self, token_ids: list[int]) -> None:
        self.num_prompt_tokens = self.num_tokens = len(token_ids)
        self._buffer = np.empty(2 * len(token_ids) + 16, dtype=np.int64)
        self._buffer[: len(token_ids)] = token_ids
        self.row = -1
        self.num_blocks = 0

    def fork(self, num_tokens: int) -> SeqState:
        """A new sequence with the first `num_tokens` tokens and the same prompt, without blocks."""
        child = SeqState.__new__(SeqState)
        child.num_prompt_tokens, child.num_tokens = self.num_prompt_tokens, num_tokens
        child._buffer = np.empty(num_tokens + num_tokens // 2 + 16, dtype=np.int64)
        child._buffer[:num_tokens] = self.tokens(0, num_tokens)
        child.row, child.num_blocks = -1, 0
        return child

    def append(self, token_id: int) -> None:
        """Add a token that was sampled, or chosen by the scheduler."""
        self.extend((token_id,))

    def extend(self, token_ids: Sequence[int] | Ints) -> None:
        """Add several."""
        end = self.num_tokens + len(token_ids)
        if end > len(self._buffer):
            self._buffer = np.concatenate((self._buffer, np.empty(end, dtype=np.int64)))
        self._buffer[self.num_tokens : end] = token_ids
        self.num_tokens = end

    def token(self, position: int) -> int:
        """Token id at one position."""
        assert position < self.num_tokens, f"token {position} of {self.num_tokens} is not known yet"
        return int(self._buffer[position])

    def tokens(self, start: int, stop: int) -> Ints:
        """Token ids at positions start .. stop - 1; a view."""
        assert stop <= self.num_tokens, f"token {stop - 1} of {self.num_tokens} is not known yet"
        return self._buffer[start:stop]


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's inputs, flat. Shapes as in `ForwardContext`; `T` tokens of `S` sequences."""

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    prompt_lens: Tensor
    """[T] int64: prompt length of each token's sequence."""
    slot_mapping: tuple[Tensor, ...]
    """By group of layers: [T] int64"""
    block_tables: tuple[Tensor, ...]
    """By group of layers: [S, max_blocks] int32"""
    seq_lens: Tensor
    """[S] int32"""
    query_start_loc: Tensor
    """[S + 1] int32"""
    last_rows: Tensor
    """[num sampled] int64: the token of each sampling sequence whose logits are needed."""


class Sequences:
    """Remembers sequences and block tables; follows the plans, which are differences.

    block_size: tokens in a block; max_num_seqs: most sequences with blocks at one time;
    max_blocks_per_seq: longest block table; num_groups: of layers, each has its own tables, of
    equal lengths (`octavo.kv_groups`).
    """

    def __init__(
        self,
        block_size: int,
        max_num_seqs: int,
        max_blocks_per_seq: int,
        num_groups: int = 1,
    ) -> None:
        self.block_size, self.num_groups = block_size, num_groups
        self.seqs: dict[int, SeqState] = {}
        self.max_num_seqs = max_num_seqs
        # Of group g, row r is row `g * num_rows + r`; each group's begin at an aligned address.
        self._num_rows = cdiv(max_num_seqs, 4) * 4 if num_groups > 1 else max_num_seqs
        self._tables = np.zeros((num_groups * self._num_rows, max_blocks_per_seq), dtype=np.int32)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def apply(self, plan: StepPlan) -> None:
        """Act on all of a plan that concerns sequences and tables, in the plan's order."""
        for new in plan.new_seqs:
            self._add(new)
        for fork in plan.forks:
            self._fork(fork)
        for seq_id, token_id in plan.appends:
            self.seqs[seq_id].append(token_id)
        # After a failed step a plan may name sequences that never got here.
        for seq_id in plan.finished:
            self._drop_table(self.seqs.pop(seq_id, None))
        for seq_id in plan.preempted:
            self._drop_table(self.seqs.get(seq_id))
        if plan.moved:
            self._rename_blocks(plan.moved)
        for seq in plan.seqs:
            if seq.new_block_ids or seq.replaced or seq.group_replaced:
                self._update_table(seq)

    def _add(self, new: NewSeq) -> None:
        assert new.seq_id not in self.seqs, f"sequence {new.seq_id} is announced twice"
        self.seqs[new.seq_id] = SeqState(new.token_ids)

    def _fork(self, fork: SeqFork) -> None:
        assert fork.child_id not in self.seqs, f"sequence {fork.child_id} is announced twice"
        self.seqs[fork.child_id] = self.seqs[fork.parent_id].fork(fork.num_tokens)

    def _rename_blocks(self, moved: list[tuple[int, int]]) -> None:
        """All at once: a block's new id may be another one's old id."""
        old, new = np.array(moved, dtype=np.int32).T
        # Cells behind the ends of the tables are renamed as well, and stay without meaning.
        names = np.arange(max(int(self._tables.max()), int(old.max())) + 2, dtype=np.int32)
        names[old], names[-1] = new, -1  # -1, no block, stays that
        self._tables = names[self._tables]

    def _drop_table(self, state: SeqState | None) -> None:
        if state is None:
            return
        if state.row >= 0:
            self._row_given_back(state)
            self._free_rows.append(state.row)
        state.row, state.num_blocks = -1, 0

    def _update_table(self, seq: SeqPlan) -> None:
        state = self.seqs[seq.seq_id]
        if state.row < 0:
            assert self._free_rows, "more sequences have blocks than the tables have rows"
            state.row = self._free_rows.pop()
            self._row_taken(state)
        if seq.replaced is not None:
            index, block_id = seq.replaced
            assert index < state.num_blocks, f"block {index} of {state.num_blocks} is replaced"
            self._set_blocks(state.row, index, (block_id,))
        for group, index, block_id in seq.group_replaced:
            assert index < state.num_blocks, f"block {index} of {state.num_blocks} is replaced"
            self._set_blocks(group * self._num_rows + state.row, index, (block_id,))
        if seq.new_block_ids:
            self._set_blocks(state.row, state.num_blocks, seq.new_block_ids)
            assert len(seq.group_block_ids) == self.num_groups - 1, f"groups of {seq}"
            for group, block_ids in enumerate(seq.group_block_ids, 1):
                assert len(block_ids) == len(seq.new_block_ids), f"tables of {seq} differ"
                self._set_blocks(group * self._num_rows + state.row, state.num_blocks, block_ids)
            state.num_blocks += len(seq.new_block_ids)

    def _row_taken(self, state: SeqState) -> None:
        """A sequence has got its row of the tables."""

    def _row_given_back(self, state: SeqState) -> None:
        """It is about to lose it."""

    def _set_blocks(self, row: int, first: int, block_ids: tuple[int, ...]) -> None:
        """Write into a row of the tables."""
        self._tables[row, first : first + len(block_ids)] = block_ids

    def block_table(self, seq_id: int, group: int = 0) -> list[int]:
        """Physical blocks of a sequence, as the runner sees them: those that are behind a window
        and were given back meanwhile, too."""
        state = self.seqs[seq_id]
        row = group * self._num_rows + state.row
        table: list[int] = self._tables[row, : state.num_blocks].tolist()
        return table


class InputBatch(Sequences):
    """Turns a plan into a `Batch`.

    max_num_tokens: most tokens in a step; the others as in `Sequences`.

    A batch's tensors are the first rows of buffers made here once, and last until the next batch;
    their addresses never change.
    """

    def __init__(
        self,
        block_size: int,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks_per_seq: int,
        num_groups: int = 1,
    ) -> None:
        super().__init__(block_size, max_num_seqs, max_blocks_per_seq, num_groups)
        tables = (max_num_seqs, max_blocks_per_seq)
        self._buffers = Batch(
            token_ids=torch.zeros(max_num_tokens, dtype=torch.int64),
            positions=torch.zeros(max_num_tokens, dtype=torch.int64),
            prompt_lens=torch.zeros(max_num_tokens, dtype=torch.int64),
            slot_mapping=tuple(
                torch.zeros(max_num_tokens, dtype=torch.int64) for _ in range(num_groups)
            ),
            block_tables=tuple(torch.zeros(tables, dtype=torch.int32) for _ in range(num_groups)),
            seq_lens=torch.zeros(max_num_seqs, dtype=torch.int32),
            query_start_loc=torch.zeros(max_num_seqs + 1, dtype=torch.int32),
            last_rows=torch.zeros(max_num_seqs, dtype=torch.int64),
        )

    def build(self, seqs: list[SeqPlan]) -> Batch:
        """The tensors of a step that computes `seqs`."""
        states = [self.seqs[seq.seq_id] for seq in seqs]
        rows = np.fromiter((s.row for s in states), np.int64, len(seqs))
        starts = np.fromiter((seq.start for seq in seqs), np.int64, len(seqs))
        counts = np.fromiter((seq.num_tokens for seq in seqs), np.int64, len(seqs))
        query_start_loc = np.zeros(len(seqs) + 1, dtype=np.int64)
        np.cumsum(counts, out=query_start_loc[1:])
        token_ids = np.concatenate(
            [s.tokens(q.start, q.start + q.num_tokens) for s, q in zip(states, seqs, strict=True)]
        )
        # Position of a token = its index in the batch, shifted by where its sequence starts.
        shift = np.repeat(starts - query_start_loc[:-1], counts)
        positions = np.arange(len(token_ids), dtype=np.int64) + shift
        seq_lens = starts + counts
        assert (rows >= 0).all(), "a sequence without blocks is in the plan"
        token_rows, columns = np.repeat(rows, counts), positions // self.block_size
        offsets, width = positions % self.block_size, max(s.num_blocks for s in states)
        prompt_lens = np.fromiter((s.num_prompt_tokens for s in states), np.int64, len(seqs))
        sampled = np.fromiter((seq.sample for seq in seqs), np.bool_, len(seqs))
        into = self._buffers
        return Batch(
            token_ids=_put(into.token_ids, token_ids),
            positions=_put(into.positions, positions),
            prompt_lens=_put(into.prompt_lens, np.repeat(prompt_lens, counts)),
            slot_mapping=tuple(
                _put(buffer, self._blocks(group, token_rows, columns) * self.block_size + offsets)
                for group, buffer in enumerate(into.slot_mapping)
            ),
            block_tables=tuple(
                self._put_tables(group, rows, width) for group in range(self.num_groups)
            ),
            seq_lens=_put(into.seq_lens, seq_lens),
            query_start_loc=_put(into.query_start_loc, query_start_loc),
            last_rows=_put(into.last_rows, query_start_loc[1:][sampled] - 1),
        )

    def _blocks(self, group: int, rows: Ints, columns: Ints) -> Ints:
        """[num_tokens] the block that each token goes into."""
        block_ids = self._tables[group * self._num_rows + rows, columns].astype(np.int64)
        assert block_ids.min() >= 0, "a token goes where no block is"
        return block_ids

    def _put_tables(self, group: int, rows: Ints, width: int) -> Tensor:
        """The block tables of `rows`: columns from `width` on are left as they are, unread."""
        tables = self._buffers.block_tables[group][: len(rows)]
        tables.numpy()[:, :width] = self._tables[group * self._num_rows + rows, :width]
        return tables


def _put(buffer: Tensor, values: NDArray[np.integer[Any]]) -> Tensor:
    """The first rows of `buffer`, holding `values`."""
    rows = buffer[: len(values)]
    rows.numpy()[:] = values
    return rows
