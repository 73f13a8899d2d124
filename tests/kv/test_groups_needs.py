"""Which layers share a block, and how many blocks that takes: arithmetic against brute force."""

from __future__ import annotations

import itertools
import sys

import pytest

from octavo.arch import ModelArch
from octavo.errors import CapacityError, ConfigError
from octavo.kv import (
    KVCacheManager,
    KVShape,
    PagedPolicy,
    SeqDemand,
    make_policy,
    plan_memory,
)
from octavo.kv.needs import BlockNeeds, num_behind
from octavo.kv_groups import KVGroups, kv_groups


def groups_of(windows: tuple[int, ...], max_model_len: int = 32768) -> KVGroups:
    return kv_groups(
        ModelArch("X", 1, 1, 1, len(windows), 1, 1, 1, 1, sliding_windows=windows), max_model_len
    )


def every(num_layers: int, step: int, window: int = 512) -> tuple[int, ...]:
    """Every `step`th layer looks at everything."""
    return tuple(0 if (i + 1) % step == 0 else window for i in range(num_layers))


@pytest.mark.parametrize(
    "windows, num_groups, size, num_full, num_padding",
    [
        (every(18, 6), 6, 3, 1, 0),  # Gemma 3 270M
        (every(26, 6), 7, 4, 1, 2),  # 1B: 22 local layers, 4 global ones
        (every(34, 6), 7, 5, 1, 1),  # 4B
        (every(48, 6), 6, 8, 1, 0),  # 12B
        (every(62, 6), 13, 5, 2, 3),  # 27B
        (every(26, 2), 2, 13, 1, 0),  # Gemma 2 2B
        ((4096,) * 32, 1, 32, 0, 0),  # Mistral 7B v0.1
        ((0,) * 16, 1, 16, 1, 0),
    ],
)
def test_groups_of_models(
    windows: tuple[int, ...], num_groups: int, size: int, num_full: int, num_padding: int
) -> None:
    found = groups_of(windows)
    assert (len(found.groups), found.layers_per_block) == (num_groups, size)
    assert found.num_padding == num_padding
    assert found.windows.count(0) == num_full and found.windows == tuple(sorted(found.windows))
    places = found.places()
    assert sorted(places) == list(range(len(windows)))
    assert len(set(places.values())) == len(windows)
    for layer, (group, place) in places.items():
        assert found.groups[group].window == windows[layer] and place < size


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    assert groups_of(every(18, 6), 512).windows == (0,)
    assert groups_of(every(18, 6), 513).windows == (0, *[512] * 5)
    assert not groups_of(every(18, 6), 512).gives_back


def most_held(window: int, size: int, chunk: int, num_tokens: int) -> int:
    """Blocks of a group, over all ways to cut a sequence into steps."""
    most = 0
    for start in range(num_tokens):
        end = min(num_tokens, start + chunk)
        most = max(most, -(-end // size) - num_behind(start, window, size))
    return most


@pytest.mark.parametrize("size, chunk", list(itertools.product((1, 3, 4), (1, 2, 7, 16))))
def test_needs_are_what_is_held_at_most(size: int, chunk: int) -> None:
    for window in (0, 1, 2, 5, 8, 9):
        needs = BlockNeeds(size, (window,), chunk)
        for num_tokens in range(1, 60):
            held = most_held(window, size, chunk, num_tokens)
            assert held <= needs.blocks(num_tokens)
        # Exact for a long one, but for windows and chunks that end with a block.
        assert needs.blocks(59) - held <= 1


@pytest.mark.parametrize("windows", [(0,), (5,), (0, 5), (0, 0, 9, 9), (3, 8)])
def test_the_longest_sequence_of_a_pool(windows: tuple[int, ...]) -> None:
    needs = BlockNeeds(4, windows, 6)
    for num_blocks in range(60):
        most = needs.most_tokens(num_blocks)
        assert most == sys.maxsize or most % 4 == 0
        if most == sys.maxsize:
            assert all(windows) and needs.blocks(10**6) <= num_blocks
        else:
            assert needs.blocks(most) <= num_blocks < needs.blocks(most + 1)


def test_the_plan_of_a_model_with_windows() -> None:
    shape = KVShape(18, 1, 256, 2, windows=(0, *[512] * 5))
    assert shape.bytes_per_token == 18 * 2 * 256 * 2 and shape.layers_per_block == 3
    assert shape.bytes_per_block(16) == 16 * 3 * 2 * 256 * 2
    assert KVShape(18, 1, 288, 2, planes=1).bytes_per_token == 18 * 288 * 2
    options = {
        "available_bytes": 10**9, "weights_bytes": 0, "activation_bytes": 0, "logits_bytes": 0,
        "block_size": 16, "max_num_seqs": 4, "max_model_len": 8192, "max_chunk_tokens": 512,
    }  # fmt: skip
    # 512 blocks of all tokens, and five times the window and a chunk.
    needed = 512 + 5 * 65
    plan = plan_memory(shape=shape, num_blocks=needed, **options)  # type: ignore[arg-type]
    assert plan.max_seq_len == 8192
    assert "a sequence may have up to 8,192 tokens" in str(plan)
    with pytest.raises(CapacityError, match=f"needs {needed} KV blocks .* at most 8,176"):
        plan_memory(shape=shape, num_blocks=needed - 1, **options)  # type: ignore[arg-type]
    # Of four sequences in one step, all together have 512 tokens more than one each.
    plan = plan_memory(shape=shape, **options | {"available_bytes": 10**11})  # type: ignore[arg-type]
    assert plan.num_blocks == 4 * (512 + 5 * 33) + 5 * (32 + 4)


def test_a_pool_without_a_block_for_each_group_is_refused() -> None:
    options = {
        "available_bytes": 10**9, "weights_bytes": 0, "activation_bytes": 0, "logits_bytes": 0,
        "shape": KVShape(18, 1, 256, 2, windows=(0, *[512] * 5)), "block_size": 16,
        "max_num_seqs": 4, "max_model_len": 8192, "require_max_model_len": False,
    }  # fmt: skip
    block = options["shape"].bytes_per_block(16)  # type: ignore[attr-defined]
    with pytest.raises(
        CapacityError, match=r"each of 6 groups of layers .* raise it to at least 6"
    ):
        plan_memory(num_blocks=5, **options)  # type: ignore[arg-type]
    says = rf"--kv-cache-memory-bytes is {6 * block - 1:,}; raise it to at least {6 * block:,}"
    with pytest.raises(CapacityError, match=says):
        plan_memory(kv_cache_memory_bytes=6 * block - 1, **options)  # type: ignore[arg-type]
    plan = plan_memory(num_blocks=6, **options)  # type: ignore[arg-type]
    assert (plan.max_seq_len, plan.max_concurrency, plan.max_num_seqs) == (16, 1, 1)


@pytest.mark.parametrize("windows", [(0,), (5,), (0, 5), (0, 0, 9, 9)])
def test_how_many_sequences_a_pool_has_room_for(windows: tuple[int, ...]) -> None:
    needs = BlockNeeds(4, windows, 6)
    for num_tokens in (1, 7, 40):
        for num_blocks in range(0, 90, 7):
            num = needs.most_seqs(num_blocks, num_tokens)
            assert num == 0 or needs.of_all(num, num_tokens) <= num_blocks
            assert needs.of_all(num + 1, num_tokens) > num_blocks


def test_what_does_not_go_together() -> None:
    with pytest.raises(ConfigError, match="orca-max keeps all layers in one group"):
        make_policy("orca-max", max_seq_tokens=8, windows=(0, 4))


def test_a_block_in_use_is_the_one_that_is_found() -> None:
    """What is computed again, as only the window's blocks are gone, is not cached twice: the equal
    blocks that nobody owns are free, and are not what others look for."""
    kv = KVCacheManager(40, 2, PagedPolicy((0, 4), 12), 4, enable_prefix_caching=True)
    tokens = list(range(12))

    def run(seq_id: int) -> None:
        kv.begin_step()
        assert kv.start(seq_id, SeqDemand(12, 20, token_ids=tokens)) == 0
        assert kv.grow(seq_id, 12, 0) is not None
        kv.commit(seq_id, 12)
        kv.take_copies()

    run(0)
    in_window = list(kv._tables[0].parts()[1].held)
    kv.release(0)
    assert kv.ledger().cached == 2 * 6 * 2
    for block_id in in_window:
        kv._cache.evict(block_id)
        kv.pool.make_free(block_id)
    run(1)
    assert kv.ledger().cached == 0
    kv.check_integrity()
    own = set(kv.block_table(1)) | set(kv.block_table(1, 1))
    assert {node.block_id for node in kv._cache.tree.walk()} == own
    kv.begin_step()
    assert kv.start(2, SeqDemand(13, 20, token_ids=[*tokens, 0])) == 12
    assert list(kv.block_table(2)) == list(kv.block_table(1))
