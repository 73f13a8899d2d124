"""The map of the pool agrees with the ledger, block by block, under every policy."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from octavo.config import KVPolicy
from octavo.kv import KVCacheManager, SeqDemand, make_policy
from octavo.lab.block_map import block_map, map_at
from octavo.lab.config import POLICIES, SimConfig
from octavo.lab.costs import FixedCosts
from octavo.lab.lengths import draw_lengths
from octavo.lab.prompts import PromptMaker
from octavo.lab.replica import Replica
from octavo.lab.trace import TraceRequest

DOCS = Path(__file__).parents[2] / "docs"
CONFIG = SimConfig(
    num_blocks=64, max_model_len=256, max_num_batched_tokens=512, watermark=0.0, stride=False
)
COSTS = FixedCosts(0.05, 1e-3)


def requests(num: int, **values: Any) -> list[TraceRequest]:
    return [
        TraceRequest(
            num_input=max(8, i // 8), num_output=max(1, o // 8), arrival_s=0.2 * k, **values
        )
        for k, (i, o) in enumerate(draw_lengths("sharegpt", num))
    ]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [1, 3])
def test_sums_are_the_ledgers_after_every_step(policy: KVPolicy, n: int) -> None:
    config = CONFIG.replace(kv_policy=policy, enable_prefix_caching=policy == "paged")
    replica = Replica(config, COSTS, prompts=PromptMaker())
    for index, request in enumerate(requests(30, n=n, prefix="p", prefix_tokens=5)):
        replica.add(request, 0.0, index)
    num_seen = 0
    while replica.has_work:
        replica.advance(float("inf"), float("inf"))
        found, ledger = block_map(replica.kv), replica.kv.ledger()
        assert all(sum(block.parts().values()) == found.block_size for block in found.blocks)
        if not replica.kv.policy.promises:
            assert found.sums() == ledger.terms()
            num_seen += 1
        assert found.num_logical == ledger.num_logical_blocks
        assert sum(bool(block.owners) for block in found.blocks) == ledger.num_physical_blocks
    assert num_seen > 50


def test_a_sequence_lies_where_its_table_says() -> None:
    kv = KVCacheManager(32, 4, make_policy("orca-pow2", max_seq_tokens=64))
    kv.start(7, SeqDemand(num_tokens=5, max_total_tokens=14, expected_total_tokens=10))
    kv.grow(7, 5, 0)
    kv.commit(7, 5)
    found = block_map(kv)
    own = [(i, block.parts()) for i, block in enumerate(found.blocks) if block.owners == [7]]
    # 5 tokens and an output of 5, taken for 8: 13 slots, 4 blocks, all of a chunk of 4
    assert [i for i, _ in own] == list(kv.block_table(7)) and len(own) == 4
    assert [tuple(parts.values())[:4] for _, parts in own] == [
        (4, 0, 0, 0), (1, 3, 0, 0), (0, 4, 0, 0), (0, 1, 0, 3),
    ]  # fmt: skip


def test_free_pieces_that_are_too_small_are_external() -> None:
    kv = KVCacheManager(16, 4, make_policy("orca-oracle", max_seq_tokens=64))
    for seq_id in range(4):  # four chunks of four blocks
        kv.start(seq_id, SeqDemand(num_tokens=12, max_total_tokens=16))
    for seq_id in (0, 2):
        kv.release(seq_id)
    assert block_map(kv).sums()["free"] == 32
    assert not kv.can_admit(SeqDemand(num_tokens=28, max_total_tokens=32))
    found = block_map(kv)
    pieces = [index for index, block in enumerate(found.blocks) if block.external]
    assert pieces == [0, 1, 2, 3, 8, 9, 10, 11]
    assert found.sums()["external"] == 32 == kv.ledger().external


def test_ended_members_of_a_batch_are_marked() -> None:
    found = map_at(requests(60), CONFIG, COSTS, 8, "contiguous")
    ended = [block for block in found.blocks if block.is_ended]
    assert ended and all(block.internal == found.block_size for block in ended)
    assert found.num_sequences + len({block.owners[0] for block in ended}) == 4


def test_shared_blocks_have_several_owners() -> None:
    config = CONFIG.replace(enable_prefix_caching=True)
    found = map_at(requests(10, n=4), config, COSTS, 2, "paged")
    shared = [block for block in found.blocks if len(block.owners) > 1]
    assert shared and all(block.tokens for block in shared)
    assert found.num_logical > sum(bool(block.owners) for block in found.blocks)


def test_looks_when_the_time_has_come_or_all_have_ended() -> None:
    few = requests(5)
    found = map_at(few, CONFIG, COSTS, 0.5)
    assert 0.5 <= found.time_s < 1 and found.num_sequences > 0
    ended = map_at(few, CONFIG, COSTS, 1e6)
    assert ended.num_sequences == 0 and ended.sums()["free"] == ended.num_slots


def test_the_picture_shows_what_the_map_says() -> None:
    pytest.importorskip("matplotlib")
    from octavo.lab.plots_blocks import block_maps, caption_of
    from octavo.lab.plots_style import look_of

    maps = [map_at(requests(60), CONFIG, COSTS, 8, policy) for policy in ("orca-max", "paged")]
    figure = block_maps(maps, title="t")
    for axes, one in zip(figure.axes, maps, strict=True):
        assert axes.get_title(loc="left") == caption_of(one)
        drawn = dict.fromkeys(one.sums(), 0.0)
        for patch in axes.patches:
            (kind,) = [
                kind for kind in drawn
                if look_of(kind).hatch == (patch.get_hatch() or "")
                and patch.get_facecolor()[:3] == pytest.approx(rgb(look_of(kind).colour))
            ]  # fmt: skip
            drawn[kind] += patch.get_width() * one.block_size
        assert drawn == pytest.approx(one.sums())
        assert len(axes.texts) == sum(bool(block.owners) for block in one.blocks)
    assert caption_of(maps[0]).startswith("orca-max: 4 sequences run, ")


def make_pictures() -> Any:
    """docs/make_pictures.py as a module."""
    spec = importlib.util.spec_from_file_location("make_pictures", DOCS / "make_pictures.py")
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    return pictures


def test_what_docs_memory_says_of_its_pictures() -> None:
    pictures = make_pictures()
    page = " ".join((DOCS / "memory.md").read_text("utf-8").split())

    pieces = pictures.small_pool("orca-oracle", 28)
    free = [i for i, block in enumerate(pieces.blocks) if block.external and not block.owners]
    assert f"{len(free)} of the 64 blocks are free here" in page
    assert f"so do the {pieces.num_waiting - 1} behind it" in page
    held = [block for block in pieces.blocks if block.owners == [72]]
    wanted = sum(block.external < pieces.block_size for block in held)
    assert f"sequence 72 asked for {wanted} blocks and got {len(held)}" in page

    batch = pictures.small_pool("contiguous", 20)
    ended = sorted({block.owners[0] for block in batch.blocks if block.is_ended})
    assert f"sequences {ended[0]}, {ended[1]} and {ended[2]} have ended" in page
    assert f"while {batch.num_waiting} requests wait" in page


def test_what_is_lost_looks_as_it_is_lost() -> None:
    pytest.importorskip("matplotlib")
    pictures = make_pictures()

    def legend(figure: Any) -> set[str]:
        return {text.get_text() for text in figure.legends[0].get_texts()}

    assert "internal: of ended members of a batch" in legend(pictures.internal())
    lost = {"external: more than was asked for", "external: free, in pieces too small"}
    assert legend(pictures.external()) > lost
    assert legend(pictures.reserved()) & lost == {"external: more than was asked for"}


def rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
