"""The pieces of the GPU's runner: its two kernels, places of inputs, ladders, buffers in turn."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from octavo.attention import work
from octavo.ops import reference
from octavo.ops.gpu.decode_attention import paged_decode
from octavo.ops.gpu.inputs import prepare, take_tokens
from octavo.plan import NewSeq, SeqPlan, StepPlan
from octavo.request import SamplerParams
from octavo.runner.gpu.cutting import Cutter, Shape
from octavo.runner.gpu.graphs import RoomCalls, StepGraphs, graph_sizes, mixed_sizes
from octavo.runner.gpu.inputs import GpuInputs
from octavo.runner.gpu.layout import Layout, Room, Sizes
from octavo.runner.gpu.steps import large_steps, longest_chunks, scratch_step


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def int32(values: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 700])
def test_prepare(device: torch.device, num_tokens: int, num_groups: int) -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 1000, num_tokens)
    rows = rng.permutation(max(num_tokens, 1))
    from_device = rng.random(num_tokens) < 0.5
    last_tokens = rng.integers(1000, 2000, max(num_tokens, 1))
    positions = rng.integers(0, 99, num_tokens)
    slots = rng.integers(-1, 99, (num_groups, num_tokens))
    shapes = ((num_tokens + 3,), (num_tokens + 3,), (num_groups, num_tokens + 3))
    out = tuple(torch.full(shape, -7, dtype=torch.int64, device=device) for shape in shapes)
    tables = torch.zeros((40, 20), dtype=torch.int32, device=device)
    where = rng.permutation(800)[:300]
    where[::5] = -1
    prepare(
        int32(np.where(from_device, -1, ids).tolist(), device),
        int32(positions.tolist(), device),
        int32(slots.reshape(-1).tolist(), device),
        int32(rows.tolist(), device),
        int32(last_tokens.tolist(), device),
        (out[0][:num_tokens], out[1][:num_tokens], out[2][:, :num_tokens]),
        int32(where.tolist(), device),
        int32(list(range(1, 301)), device),
        tables,
    )
    expected = np.where(from_device, last_tokens[rows[:num_tokens]], ids)
    assert out[0].tolist() == [*expected.tolist(), -7, -7, -7]
    assert out[1].tolist() == [*positions.tolist(), -7, -7, -7]
    assert out[2].tolist() == [[*of_group, -7, -7, -7] for of_group in slots.tolist()]
    cells = np.zeros(800, dtype=np.int64)
    cells[where[where >= 0]] = np.arange(1, 301)[where >= 0]
    assert tables.view(-1).tolist() == cells.tolist()


@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_take_tokens(device: torch.device, num_rows: int) -> None:
    rng = np.random.default_rng(1)
    tokens, finite = rng.integers(0, 200_000, num_rows), rng.integers(0, 2, num_rows)
    rows = rng.permutation(num_rows + 5)[:num_rows]
    rows[::4] = -1
    last_tokens = torch.full((num_rows + 5,), -9, dtype=torch.int32, device=device)
    answer = torch.full((num_rows + 2,), -9, dtype=torch.int32, device=device)
    take_tokens(
        torch.tensor(tokens, dtype=torch.int64, device=device),
        int32(finite.tolist(), device),
        int32(rows.tolist(), device),
        last_tokens,
        answer[:num_rows],
    )
    assert answer.tolist() == [*np.where(finite == 1, tokens, -1).tolist(), -9, -9]
    expected = np.full(num_rows + 5, -9)
    expected[rows[rows >= 0]] = (tokens * finite)[rows >= 0]
    assert last_tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("most", [1, 2, 3, 5, 64, 100, 256, 1000, 1024, 4000])
def test_ladder_of_recorded_sizes(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == most
    for low, high in pairwise(sizes):
        assert high - low <= max(8, low // 4)  # filled up by little
    assert len(graph_sizes(1024)) < 50


@pytest.mark.parametrize("most", [1, 16, 17, 100, 512, 2000, 2048, 8192])
def test_ladder_of_recorded_sizes_with_prompts(most: int) -> None:
    sizes = mixed_sizes(most)
    assert sizes == tuple(sorted(set(sizes))) and sizes[-1] == min(most, 2048)
    assert len(sizes) <= 36 and all(high - low <= 64 for low, high in pairwise(sizes))


def test_the_largest_step_has_few_long_prompts() -> None:
    assert longest_chunks(8192 - 1024, 1024, 8192) == [7169]
    assert longest_chunks(100, 10, 41) == [41, 41, 21]
    assert (
        longest_chunks(100, 2, 11) == [11, 11]
        and longest_chunks(0, 5, 9) == longest_chunks(9, 5, 1) == []
    )


def test_sections_do_not_overlap_and_are_aligned() -> None:
    sizes = Sizes(5, 9, 3, 6, 2, 1, 4, 7)
    layout = Layout(sizes)
    taken = np.zeros(layout.num_words, dtype=int)
    for span in layout.spans.values():
        assert span.start % 4 == 0
        taken[span] += 1
    assert taken.max() == 1 and layout.num_words <= taken.sum() + 4 * len(layout.spans)


def test_fresh_chunks_are_in_tiles_of_their_own() -> None:
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=64, fresh_tokens=100)
    tile = work.prefill_tile_tokens(2, 64)
    for long in (1847, 1848):  # with it, the step has 2048 tokens, or 2049
        step = scratch_step(2, [99, 100, long])
        seq_lens = step.starts + step.counts
        seq_lens[4] += 16  # part of it lies in the pool already
        step.starts[4] = 16
        paged, fresh = Cutter(shape).tiles(step, seq_lens)
        if long == 1847:  # a step that could be recorded goes the way of those that are
            assert set(paged[:, 0]) == {2, 3, 4} and not len(fresh)
            continue
        assert set(paged[:, 0]) == {2, 4} and set(fresh[:, 0]) == {3}
        assert sorted(fresh[:, 1]) == list(range(0, 100, tile))
        assert len(paged) == -(-99 // tile) + -(-long // tile)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "longest"), [(32, 8, 8192), (40, 40, 8192), (32, 8, 700)]
)
def test_large_steps_have_few_and_many_tiles_of_both_kinds(
    num_heads: int, num_kv_heads: int, longest: int
) -> None:
    """Kernels of few and of many programs are compiled apart, and none while requests wait."""
    shape = Shape(num_heads, num_kv_heads, head_dim=128, num_sms=132, fresh_tokens=256)
    seen = set()
    for num_decodes, chunks in large_steps(256, longest):
        assert sum(chunks) + num_decodes == 2049 and max(chunks) <= longest
        step = scratch_step(num_decodes, chunks)
        paged, fresh = Cutter(shape).tiles(step, step.starts + step.counts)
        seen.add((num_kv_heads * len(paged) > 132, num_kv_heads * len(fresh) > 132))
    assert seen == {(True, False), (False, True)}
    assert large_steps(0, longest) == large_steps(256, 255) == ()


def test_a_step_lies_where_its_views_say(device: torch.device) -> None:
    """Decodes come first, each with the row of its table; samples keep the plan's order."""
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=16, num_sms=4)
    inputs = GpuInputs(4, 4, 32, 8, shape, device)
    new = [
        NewSeq(7, [10, 11, 12, 13, 14], SamplerParams()),
        NewSeq(9, [20], SamplerParams()),
        NewSeq(8, [30, 31, 32], SamplerParams()),
    ]
    seqs = [
        SeqPlan(7, 0, 5, (3, 8), None, True),
        SeqPlan(9, 0, 1, (2,), None, True),
        SeqPlan(8, 0, 2, (5,), None, False),
    ]
    plan = StepPlan(0, new_seqs=new, seqs=seqs)
    inputs.apply(plan)
    step = inputs.describe(plan.seqs)
    assert step.seq_ids == [7, 9] and step.sample_positions.tolist() == [5, 1]
    placed = inputs.upload(step)
    inputs.prepare(placed)
    assert placed.token_ids.tolist() == [20, 10, 11, 12, 13, 14, 30, 31]
    assert placed.positions.tolist() == [0, 0, 1, 2, 3, 4, 0, 1]
    assert placed.slot_mapping[0].tolist() == [8, 12, 13, 14, 15, 32, 20, 21]
    assert placed.query_start_loc.tolist() == [0, 1, 6, 8]
    assert placed.seq_lens.tolist() == [1, 5, 2]
    assert placed.last_rows.tolist() == [5, 0]
    rows = [inputs.seqs[i].row for i in (9, 7, 8)]
    assert placed.table_rows.tolist() == rows
    assert placed.sample_rows.tolist() == [rows[1], rows[0]]
    assert inputs.tables[rows[1], :2].tolist() == [3, 8]
    assert placed.work.num_decodes == 1
    assert placed.work.decode_items[0].tolist() == [0, 0, 1]
    assert set(placed.work.decode_items[1:, 0].tolist()) <= {-1}
    assert placed.work.prefill_tiles.tolist() == [[1, 0], [2, 0]]


def test_a_recorded_step_is_filled_up_with_nothing(device: torch.device) -> None:
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=16, num_sms=4)
    inputs = GpuInputs(4, 8, 32, 8, shape, device)
    new = [NewSeq(i, [40 + i], SamplerParams()) for i in range(3)]
    seqs = [SeqPlan(i, 0, 1, (i + 1,), None, True) for i in range(3)]
    inputs.apply(StepPlan(0, new_seqs=new, seqs=seqs))
    step = inputs.describe(seqs)
    inputs._words.fill_(12345)
    placed = inputs.upload(step, Room(6, mixed=False))
    inputs.prepare(placed)
    assert placed.token_ids.tolist() == [40, 41, 42, 0, 0, 0]
    assert placed.slot_mapping[0].tolist() == [4, 8, 12, -1, -1, -1]
    assert placed.seq_lens.tolist() == [1, 1, 1, 0, 0, 0]
    assert placed.query_start_loc.tolist() == list(range(7))
    assert placed.sample_rows.tolist()[3:] == [-1] * 3
    assert placed.table_rows.tolist()[3:] == [0] * 3
    assert all(item[0] == -1 for item in placed.work.decode_items.tolist()[3:])
    again = inputs.upload(step, Room(6, mixed=False))
    assert again.token_ids.data_ptr() == placed.token_ids.data_ptr()
    assert again.table_rows.data_ptr() == placed.table_rows.data_ptr()


def test_a_recorded_step_with_prompts_is_filled_up_with_nothing(device: torch.device) -> None:
    """One decode, and chunks of 5 and 2 tokens, in a room for 16 tokens of 4 sequences."""
    shape = Shape(num_heads=4, num_kv_heads=2, head_dim=16, num_sms=4)
    inputs = GpuInputs(4, 4, 32, 8, shape, device)
    new = [NewSeq(i, [10 * i + k for k in range(8)], SamplerParams()) for i in range(3)]
    tables = [(3, 6), (7, 1), (2,)]
    seqs = [
        SeqPlan(0, 0, 5, tables[0], None, True),
        SeqPlan(1, 4, 1, tables[1], None, False),
        SeqPlan(2, 0, 2, tables[2], None, True),
    ]
    inputs.apply(StepPlan(0, new_seqs=new, seqs=seqs))
    step, room = inputs.describe(seqs), Room(16, mixed=True)
    inputs._words.fill_(12345)
    assert inputs.fits(step, room)
    placed = inputs.upload(step, room)
    inputs.prepare(placed)
    assert placed.token_ids.tolist() == [14, 0, 1, 2, 3, 4, 20, 21] + [0] * 8
    assert placed.positions.tolist() == [4, 0, 1, 2, 3, 4, 0, 1] + [0] * 8
    assert placed.slot_mapping[0].tolist() == [4, 12, 13, 14, 15, 24, 8, 9] + [-1] * 8
    assert placed.seq_lens.tolist() == [5, 5, 2, 0]
    assert placed.query_start_loc.tolist() == [0, 1, 6, 8, 8]
    rows = [inputs.seqs[i].row for i in (1, 0, 2)]
    assert placed.table_rows.tolist() == [*rows, 0]
    assert placed.last_rows.tolist()[:2] == [5, 7]
    assert placed.sample_rows.tolist() == [*rows[1:], -1, -1]
    of = placed.work
    assert of.num_decodes == 4 and of.fresh_tiles is None and of.decode_lens is not None
    assert of.decode_lens.tolist() == [5, 0, 0, 0]
    num_items = len(of.decode_items)
    assert num_items == work.max_decode_items(4, 2, 4)
    assert of.decode_items.tolist() == [[0, 0, 5]] + [[-1] * 3] * (num_items - 1)
    assert of.item_start.tolist() == [0, 1, 1, 1, 1]
    assert of.prefill_tiles.tolist()[:2] == [[1, 0], [2, 0]]
    assert set(of.prefill_tiles[2:, 0].tolist()) == {-1}


@pytest.mark.parametrize(("free", "expected"), [([900, 300], 600), ([300, 900], 0)])
def test_memory_of_recorded_steps_is_what_is_free_no_more(
    free: list[int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = StepGraphs(torch.device("cpu"), lambda _: RoomCalls(lambda: None, lambda: None))
    seen: list[bool] = []
    monkeypatch.setattr(
        graphs, "_free_bytes", lambda: (seen.append(bool(graphs._replays)), free.pop(0))[1]
    )
    assert graphs.capture((1, 2), (16,)).num_bytes == expected
    assert seen == [False, True]


@pytest.mark.parametrize("num_decodes", [0, 64, 200])
@pytest.mark.parametrize("num_chunks", [8, 24, 48, 64])
def test_chunks_behind_cached_prefixes_fit_recorded_steps(
    num_chunks: int, num_decodes: int
) -> None:
    """Of 2 to 16 tokens, and of 4 each, which may be filled up to twice the step at most."""
    cutter = Cutter(Shape(32, 8, 128, fresh_tokens=256))
    graphs = StepGraphs(torch.device("cpu"), lambda _: RoomCalls(lambda: None, lambda: None))
    graphs.capture((1,), mixed_sizes(8192))
    rng = np.random.default_rng(num_chunks)
    draws = [rng.integers(2, 17, num_chunks).tolist() for _ in range(50)] + [[4] * num_chunks]
    for chunks in draws:
        step = scratch_step(num_decodes, chunks)
        num_tokens = len(step.token_ids)
        sizes = [room.num_tokens for room in graphs.rooms_for(num_tokens, mixed=True)]
        fits = [
            size
            for size in sizes
            if cutter.num_tiles(step) <= cutter.max_tiles(size, min(1024, size))
        ]
        assert fits, (num_decodes, chunks)
        assert num_tokens <= fits[0] <= sizes[-1] < max(256, 2 * num_tokens) + 64


def test_padding_has_an_item_to_write_zeros_with(
    device: torch.device, generator: torch.Generator
) -> None:
    """Five decodes whose contexts would be cut into all items of a recorded step of eight."""
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=32, num_sms=6)
    inputs = GpuInputs(16, 8, 32, 20, shape, device)
    length, num_items = 261, work.max_decode_items(8, 1, 6)
    assert len(work.plan_decode([length] * 5, num_items)[0]) > num_items - 3
    new = [NewSeq(i, [i + 1] * length, SamplerParams()) for i in range(5)]
    blocks = [tuple(range(17 * i, 17 * i + 17)) for i in range(5)]
    seqs = [SeqPlan(i, length - 1, 1, blocks[i], None, True) for i in range(5)]
    inputs.apply(StepPlan(0, new_seqs=new, seqs=seqs))
    placed = inputs.upload(inputs.describe(seqs), Room(8, mixed=False))
    inputs.prepare(placed)
    pool = torch.randn((85, 1, 2, 1, 16, 32), generator=generator, device=device)
    query = torch.randn((8, 2, 32), generator=generator, device=device)
    query[5:] = torch.nan
    out, partial = torch.full_like(query, torch.nan), torch.zeros(num_items, 2, 32, device=device)
    paged_decode(
        out, query, pool, None, 0, inputs.tables, placed.table_rows, placed.seq_lens,
        placed.work.decode_items, placed.work.item_start, partial, partial[..., 0].contiguous(),
        0.2,
    )  # fmt: skip
    tables = torch.tensor(blocks, dtype=torch.int32, device=device)
    lens, starts = placed.seq_lens[:5], torch.arange(6)
    exact = reference.paged_attention(
        query[:5].double(), pool.double(), 0, tables, lens, starts, 0.2
    )
    assert (out[5:] == 0).all() and torch.allclose(out[:5].double(), exact, atol=1e-5)


def test_no_step_is_larger_than_the_buffers(device: torch.device) -> None:
    for max_num_seqs, max_num_tokens, block_size in ((1, 1, 1), (40, 100, 1), (7, 2500, 16)):
        for heads, head_dim in ((4, 64), (2, 16)):
            shape = Shape(num_heads=heads, num_kv_heads=2, head_dim=head_dim, num_sms=4)
            inputs = GpuInputs(block_size, max_num_seqs, max_num_tokens, 8, shape, device)
            rooms = [Room(size, False) for size in graph_sizes(max_num_seqs)]
            rooms += [Room(size, True) for size in mixed_sizes(max_num_tokens)]
            for room in rooms:
                layout = inputs._padded_places(room).layout
                assert layout.num_words <= len(inputs._words)
                assert layout.sizes.num_changes <= inputs._max_changes
                if room.mixed:  # prompts of 32 tokens, and one long one
                    for chunks in ([32] * (room.num_tokens // 32), [room.num_tokens]):
                        chunks = chunks[:max_num_seqs]
                        assert min(chunks, default=1) == 1 or inputs.fits(
                            scratch_step(0, chunks), room
                        )


def test_tables_and_slots_of_each_group(device: torch.device) -> None:
    inputs = GpuInputs(4, 3, 32, 16, Shape(4, 2, 16), device, num_groups=3)
    seqs = [
        SeqPlan(3, 0, 5, (7, 8), None, True, ((1, 2), (11, 12))),
        SeqPlan(4, 4, 1, (9, 10), None, True, ((-1, 4), (-1, 5))),
    ]
    new = [NewSeq(3, [1, 2, 3, 4, 5], SamplerParams()), NewSeq(4, [5, 6, 7, 8, 9], SamplerParams())]
    inputs.apply(StepPlan(0, new_seqs=new, seqs=seqs))
    placed = inputs.upload(inputs.describe(seqs))
    inputs.prepare(placed)
    # The decode comes first.
    assert placed.slot_mapping.tolist() == [
        [40, 28, 29, 30, 31, 32], [16, 4, 5, 6, 7, 8], [20, 44, 45, 46, 47, 48]
    ]  # fmt: skip
    for group, (first, second) in enumerate((([7, 8], [9, 10]), ([1, 2], [-1, 4]))):
        tables = inputs.tables_of(group)
        rows = placed.table_rows.tolist()
        assert tables[rows[1], :2].tolist() == inputs.block_table(3, group) == first
        assert tables[rows[0], :2].tolist() == inputs.block_table(4, group) == second
    changed = [SeqPlan(3, 5, 1, (), (1, 20), True, (), ((2, 1, 21),))]
    inputs.seqs[3].append(6)
    inputs.apply(StepPlan(1, seqs=changed, moved=[(2, 22), (20, 23)]))
    placed = inputs.upload(inputs.describe(changed))
    inputs.prepare(placed)
    assert [inputs.block_table(3, g) for g in range(3)] == [[7, 20], [1, 22], [11, 21]]
    assert inputs.block_table(4, 1) == [-1, 4], "no block stays no block when others move"
    assert placed.slot_mapping.tolist() == [[81], [89], [85]]
