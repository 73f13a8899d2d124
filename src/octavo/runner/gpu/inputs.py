"""Plans become device tensors: one upload and one small kernel a step.

The device keeps the block tables and each sequence's last token; a plan's differences travel with
the step's other inputs. A token that is still being sampled when its step is planned never comes to
the host: the kernel takes it from `last_tokens`.
"""

from __future__ import annotations

from itertools import compress
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octavo.attention.base import AttentionWork
from octavo.ops.gpu import inputs as kernels
from octavo.ops.gpu.memory import PinnedRing
from octavo.plan import SeqFork, SeqPlan
from octavo.runner.gpu.cutting import NO_TILES, Cutter, Shape, Words
from octavo.runner.gpu.layout import Layout, Room, Sizes, Writer
from octavo.runner.gpu.steps import NO_STEP, NONE, NUM_BUFFERS, DeviceStep, HostStep
from octavo.runner.gpu.tokens import RecentTokens, Sampled
from octavo.runner.input_batch import Ints, SeqState, Sequences
from octavo.util import cdiv

_MIN_CHANGES = 16


class GpuInputs(Sequences):
    """Sequences, tables and last tokens on host and device.

    max_num_tokens: most tokens in a step; with_prompt_lens: see `HostStep`; others as in
    `Sequences`.
    """

    def __init__(
        self,
        block_size: int,
        max_num_seqs: int,
        max_num_tokens: int,
        max_blocks_per_seq: int,
        shape: Shape,
        device: torch.device,
        *,
        with_prompt_lens: bool = False,
        num_groups: int = 1,
    ) -> None:
        super().__init__(block_size, max_num_seqs, max_blocks_per_seq, num_groups)
        assert self._tables.size < 2**31, "block tables beyond 32-bit places"
        self.device, self.cutter = device, Cutter(shape)
        self._with_prompt_lens = with_prompt_lens
        self.recent = RecentTokens(max_num_seqs)
        self._known_on_device = np.full(max_num_seqs, -1, dtype=np.int64)
        # [max_num_seqs] position of the token in `last_tokens`, by row; -1: none.
        self._changed_cells: list[int] = []
        self._new_blocks: list[int] = []
        # Places in the flat tables that the device does not know of yet, and what is there now.
        self._tables_stale = False
        self._padded: dict[Room, _Places] = {}
        self._max_changes = _MIN_CHANGES + num_groups * (
            max_num_tokens // block_size + 2 * max_num_seqs
        )
        most = self._most(max_num_seqs, max_num_tokens)
        self._staging = PinnedRing(device, NUM_BUFFERS, 4 * most.num_words)
        self._staged = [words.numpy() for words in self._staging.words(most.num_words)]

        def words(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._words = words(most.num_words)
        self.tables = words(num_groups * self._num_rows, max_blocks_per_seq)
        """The block tables, of one group of layers after the other; what a row holds behind its
        sequence's blocks is never read."""
        self.last_tokens = words(max_num_seqs)
        """The token that was last sampled, by row."""
        self._tokens = tuple(words(max_num_tokens, dtype=torch.int64) for _ in range(2))
        # Of every group at an address that kernels may take for aligned.
        self._slots_of_groups = words(num_groups, cdiv(max_num_tokens, 16) * 16, dtype=torch.int64)

    def _most(self, max_num_seqs: int, max_num_tokens: int) -> Layout:
        num_items = self.cutter.max_items(max_num_seqs)
        num_tiles = max_num_tokens // self.cutter.tile_tokens + max_num_seqs
        return Layout(
            Sizes(
                max_num_seqs, max_num_tokens, max_num_seqs, num_items, num_tiles, num_tiles,
                max_num_seqs, self._max_changes, mixed=True, num_groups=self.num_groups,
            )
        )  # fmt: skip

    # -- tables by difference

    def _set_blocks(self, row: int, first: int, block_ids: tuple[int, ...]) -> None:
        super()._set_blocks(row, first, block_ids)
        place = row * self._tables.shape[1] + first
        self._changed_cells.extend(range(place, place + len(block_ids)))
        self._new_blocks.extend(block_ids)

    def _row_taken(self, state: SeqState) -> None:
        self._known_on_device[state.row] = -1
        self.recent.begin(state)

    def _row_given_back(self, state: SeqState) -> None:
        self.recent.end(state)

    def _fork(self, fork: SeqFork) -> None:
        self._with_all_tokens(fork.parent_id)
        super()._fork(fork)

    def _with_all_tokens(self, seq_id: int) -> SeqState:
        state = self.seqs[seq_id]
        if state.row >= 0:
            self.recent.move(state)
        return state

    def _rename_blocks(self, moved: list[tuple[int, int]]) -> None:
        super()._rename_blocks(moved)
        self._tables_stale = True

    def step_failed(self) -> None:
        """Nobody knows what of a step has reached the device's tables."""
        self._tables_stale = True

    def _upload_tables(self) -> None:
        self.tables.copy_(torch.from_numpy(self._tables))
        self._changed_cells, self._new_blocks = [], []
        self._tables_stale = False

    def _upload_changes(self) -> None:
        """Changes of the tables that a step has no room for, in steps of their own."""
        cells, blocks = self._changed_cells, self._new_blocks
        for i in range(0, len(cells), self._max_changes):
            self._changed_cells = cells[i : i + self._max_changes]
            self._new_blocks = blocks[i : i + self._max_changes]
            self.prepare(self.upload(NO_STEP))

    # -- from plan to arrays

    def describe(self, seqs: list[SeqPlan]) -> HostStep:
        """The arrays of a step that computes `seqs`."""
        ids, start_of, count_of, _, _, samples, _, _ = zip(*seqs, strict=True)
        known, num_seqs = self.seqs, len(ids)
        rows = np.fromiter([known[seq_id].row for seq_id in ids], np.int64, num_seqs)
        starts = np.fromiter(start_of, np.int64, num_seqs)
        assert int(rows.min()) >= 0, "a sequence without blocks is in the plan"
        prompt_lens = NONE
        if self._with_prompt_lens:
            lens = [known[seq_id].num_prompt_tokens for seq_id in ids]
            prompt_lens = np.fromiter(lens, np.int64, num_seqs)
        num_decodes = count_of.count(1)
        if num_decodes == num_seqs:
            counts, order = np.ones(num_seqs, dtype=np.int64), None
            ends = np.arange(num_seqs)
        else:
            counts = np.fromiter(count_of, np.int64, num_seqs)
            order = np.argsort(counts != 1, kind="stable")
            ends = np.empty(num_seqs, dtype=np.int64)
            ends[order] = counts[order].cumsum() - 1
        seq_ids = list(ids)
        last_rows, sample_rows, sample_positions = ends, rows, starts + counts
        if not all(samples):
            chosen = np.fromiter(samples, np.bool_, num_seqs)
            seq_ids = list(compress(ids, samples))
            last_rows, sample_rows = ends[chosen], rows[chosen]
            sample_positions = sample_positions[chosen]
        if order is not None:
            rows, starts, counts = rows[order], starts[order], counts[order]
            ids = tuple([ids[i] for i in order.tolist()])
            prompt_lens = prompt_lens[order] if self._with_prompt_lens else prompt_lens
        return HostStep(
            rows=rows,
            starts=starts,
            counts=counts,
            token_ids=self._token_ids(ids, rows, starts, counts, num_decodes),
            num_decodes=num_decodes,
            last_rows=last_rows,
            sample_rows=sample_rows,
            sample_positions=sample_positions,
            seq_ids=seq_ids,
            prompt_lens=prompt_lens,
        )

    def _token_ids(
        self, seq_ids: tuple[int, ...], rows: Ints, starts: Ints, counts: Ints, num_decodes: int
    ) -> Ints:
        on_device = self._known_on_device[rows[:num_decodes]] == starts[:num_decodes]
        token_ids = np.full(num_decodes, -1, dtype=np.int64)
        for i in (~on_device).nonzero()[0].tolist():
            token_ids[i] = self._with_all_tokens(seq_ids[i]).token(int(starts[i]))
        if num_decodes == len(seq_ids):
            return token_ids
        chunks = [
            self._with_all_tokens(seq_id).tokens(start, start + count)
            for seq_id, start, count in zip(
                seq_ids[num_decodes:], starts[num_decodes:].tolist(), counts[num_decodes:].tolist(),
                strict=True,
            )
        ]  # fmt: skip
        return np.concatenate([token_ids, *chunks])

    def sampled_on_device(self, rows: Ints, positions: Ints) -> None:
        """`last_tokens` of these rows will hold the tokens at these positions."""
        self._known_on_device[rows] = positions

    def learn(self, sampled: Sampled, token_ids: list[int]) -> None:
        """The tokens of a step are known. Who was forgotten meanwhile learns in vain."""
        gone = self.recent.take(sampled, np.array(token_ids, dtype=np.int64))
        for place in gone.tolist():
            state = self.seqs.get(sampled.seq_ids[place])
            if state is not None:
                state.append(token_ids[place])

    def clear_tables(self) -> None:
        """All blocks are block 0, for steps of no sequence's. Only while there are none."""
        assert not self.seqs, "scratch steps write into blocks"
        self._tables[:], self._tables_stale = 0, True

    @property
    def max_seq_tokens(self) -> int:
        """Tokens that fit into the longest table."""
        return self._tables.shape[1] * self.block_size

    # -- from arrays to the device

    def fits(self, step: HostStep, room: Room) -> bool:
        """Whether the chunks of a step, whose tokens fit, are not cut into too many tiles."""
        num_tiles = self._padded_places(room).layout.sizes.num_tiles
        return self.cutter.num_tiles(step) <= num_tiles

    def upload(self, step: HostStep, room: Room | None = None) -> DeviceStep:
        """Queue the copy of a step.

        room: of the recorded step that will compute it, which `fits`. Without chunks of prompts
        padding has a row each; with them the rows behind the step's tokens are nobody's.
        """
        if self._tables_stale:
            self._upload_tables()
        most = self._max_changes
        if room is not None:
            most = self._padded_places(room).layout.sizes.num_changes
        if len(self._changed_cells) > most:
            self._upload_changes()
        seq_lens, positions = step.starts + step.counts, step.positions()
        places, items, tiles, fresh = self._cut(step, seq_lens, room)
        num_seqs, decode_lens = places.layout.sizes.num_seqs, seq_lens[: step.num_decodes]
        turn = self._staging.next()
        put = Writer(self._staged[turn], places.layout)
        put("rows", step.rows, 0)
        put("seq_lens", seq_lens, 0)
        put("query_start", _starts(step.counts, num_seqs, room is not None and not room.mixed), 0)
        put("decode_lens", decode_lens if places.layout.sizes.mixed else NONE, 0)
        put("items", items[0].reshape(-1), -1)
        put("item_start", items[1], len(items[0]))
        put("tiles", tiles.reshape(-1), -1)
        put("fresh", fresh.reshape(-1), -1)
        put("last_rows", step.last_rows, 0)
        put("sample_rows", step.sample_rows, -1)
        put("token_ids", step.token_ids, 0)
        put("positions", positions, 0)
        num_tokens = places.layout.sizes.num_tokens
        put("slots", self._slots(np.repeat(step.rows, step.counts), positions, num_tokens), -1)
        put("where", self._changed_cells, -1)
        put("what", self._new_blocks, 0)
        self._changed_cells, self._new_blocks = [], []
        places.words.copy_(places.staged[turn], non_blocking=True)
        self._staging.sent()
        return places.step

    def _cut(
        self, step: HostStep, seq_lens: Ints, room: Room | None
    ) -> tuple[_Places, tuple[Words, Words], Words, Words]:
        """(Where the step lies, items and their starts, tiles, fresh tiles)."""
        num_decodes = step.num_decodes
        num_padding = 0 if room is None or room.mixed else room.num_tokens - num_decodes
        items = self.cutter.items(seq_lens[:num_decodes], num_padding)
        if room is not None:
            tiles = self.cutter.paged_tiles(step, seq_lens) if room.mixed else NO_TILES
            return self._padded_places(room), items, tiles, NO_TILES
        tiles, fresh = self.cutter.tiles(step, seq_lens)
        sizes = Sizes(
            len(step.rows), len(step.token_ids), num_decodes, self.cutter.max_items(num_decodes),
            len(tiles), len(fresh), len(step.last_rows), len(self._changed_cells),
            num_groups=self.num_groups,
        )  # fmt: skip
        return self._places(Layout(sizes)), items, tiles, fresh

    def prepare(self, step: DeviceStep) -> None:
        """Queue the kernel that makes the uploaded words what the model reads."""
        kernels.prepare(
            *step.token_words, step.table_rows, self.last_tokens,
            (step.token_ids, step.positions, step.slot_mapping), *step.changes, self.tables,
        )  # fmt: skip

    def _padded_places(self, room: Room) -> _Places:
        """Of a recorded step; it names them."""
        places = self._padded.get(room)
        if places is None:
            places = self._padded[room] = self._places(Layout(self._sizes(room)))
        return places

    def _sizes(self, room: Room) -> Sizes:
        """What a recorded step has of everything."""
        num_tokens, cutter = room.num_tokens, self.cutter
        if not room.mixed:  # most decodes need no new block
            num_items = cutter.max_items(num_tokens)
            num_changes = max(_MIN_CHANGES, self.num_groups * num_tokens)
            return Sizes(
                num_tokens, num_tokens, num_tokens, num_items, 0, 0, num_tokens, num_changes,
                num_groups=self.num_groups,
            )  # fmt: skip
        num_seqs = min(self.max_num_seqs, num_tokens)
        return Sizes(
            num_seqs, num_tokens, num_seqs, cutter.max_items(num_seqs),
            cutter.max_tiles(num_tokens, num_seqs), 0, num_seqs,
            self.num_groups * (num_tokens // self.block_size + num_seqs) + _MIN_CHANGES,
            mixed=True, num_groups=self.num_groups,
        )  # fmt: skip

    def _places(self, layout: Layout) -> _Places:
        part = {name: self._words[span] for name, span in layout.spans.items()}
        num_tokens = layout.sizes.num_tokens
        token_ids, positions = (tokens[:num_tokens] for tokens in self._tokens)
        step = DeviceStep(
            token_ids,
            positions,
            self._slots_of_groups[:, :num_tokens],
            part["rows"],
            part["seq_lens"],
            part["query_start"],
            part["last_rows"],
            part["sample_rows"],
            AttentionWork(
                layout.sizes.num_decodes,
                part["items"].view(-1, 3),
                part["item_start"],
                part["tiles"].view(-1, 2),
                part["fresh"].view(-1, 2) if layout.sizes.num_fresh else None,
                part["decode_lens"] if layout.sizes.mixed else None,
            ),
            (part["where"], part["what"]),
            (part["token_ids"], part["positions"], part["slots"]),
        )
        used = layout.num_words
        return _Places(layout, step, self._words[:used], self._staging.words(used))

    def _slots(self, rows: Ints, positions: Ints, num_tokens: int) -> Ints:
        """[num_groups * num_tokens] of one group after the other, each filled up with -1. (Of the
        last one, whoever writes them does that.)"""
        blocks, offsets = np.divmod(positions, self.block_size)
        if self.num_groups == 1:
            slots: Ints = self._tables[rows, blocks].astype(np.int64) * self.block_size + offsets
            return slots
        of_groups = np.full((self.num_groups, num_tokens), -1, dtype=np.int64)
        for group, of_group in enumerate(of_groups):
            block_ids = self._tables[group * self._num_rows + rows, blocks].astype(np.int64)
            of_group[: len(rows)] = block_ids * self.block_size + offsets
        return of_groups.reshape(-1)

    def tables_of(self, group: int) -> Tensor:
        """[max_num_seqs, max_blocks_per_seq] int32: the block tables of a group of layers."""
        return self.tables[group * self._num_rows : (group + 1) * self._num_rows]


class _Places(NamedTuple):
    """Where a step lies."""

    layout: Layout
    step: DeviceStep
    words: Tensor
    """All of it, on the device."""
    staged: list[Tensor]
    """The same in each of the host's buffers."""


def _starts(counts: Ints, num_seqs: int, one_each: bool) -> Ints:
    """[num_seqs + 1] first token of each sequence, and the end; one_each: of padding, too."""
    if one_each:
        return np.arange(num_seqs + 1)
    starts, num = np.zeros(num_seqs + 1, dtype=np.int64), len(counts)
    counts.cumsum(out=starts[1 : num + 1])
    starts[num + 1 :] = starts[num]
    return starts
