"""The picture of a pool, made the slow way from all tables; and a follower of frames."""

from __future__ import annotations

from typing import Any

from octavo.kv import KVCacheManager
from octavo.kv.table import BlockTable

Block = tuple[int, str | None, int, int]
"""State, owner's request, references, fill."""


def slow_picture(kv: KVCacheManager) -> list[Block]:
    """What every block is, from the tables, the pool's counts and the policy's runs alone."""
    holders: dict[int, list[tuple[BlockTable, int]]] = {}
    for table in kv.tables():
        for index, block_id in enumerate(table.block_ids):
            holders.setdefault(block_id, []).append((table, index))
    promised = {i: seq_id for seq_id, run in kv.policy.promised_runs for i in run}
    requests = {table.seq_id: table.account.request_id for table in kv.tables()}
    external = {i for run in kv.policy.external_runs for i in run}
    picture: list[Block] = []
    for block_id in range(kv.num_blocks):
        refs, node = kv.ref_count(block_id), kv.pool.nodes[block_id]
        size = kv.block_size
        if block_id in holders:
            filled = [
                max(0, min(table.num_committed - index * size, size))
                for table, index in holders[block_id]
            ]
            owner = holders[block_id][0][0].account.request_id
            picture.append((2, owner, refs, max(filled)))
        elif node is not None or refs:
            picture.append((1, None, refs, size if node is None else node.num_tokens))
        elif block_id in promised:
            picture.append((2, requests[promised[block_id]], 0, 0))
        else:
            picture.append((3 if block_id in external else 0, None, 0, 0))
    return picture


class Follower:
    """Somebody who has seen one full frame and every one since."""

    def __init__(self) -> None:
        self.columns: dict[str, list[int]] = {}
        self.last_n: int | None = None
        self.num_diffs = 0

    def take(self, frame: dict[str, Any]) -> None:
        """One more frame."""
        assert self.last_n is None or frame["n"] == self.last_n + 1
        self.last_n = frame["n"]
        blocks = frame["blocks"]
        if frame["kind"] == "full":
            self.columns = {name: list(blocks[name]) for name in ("state", "owner", "refs", "fill")}
            assert "id" not in blocks
            assert {len(c) for c in self.columns.values()} == {frame["about"]["num_blocks"]}
            return
        self.num_diffs += 1
        assert len(blocks["id"]) == len(set(blocks["id"]))
        for name, column in self.columns.items():
            for block_id, value in zip(blocks["id"], blocks[name], strict=True):
                column[block_id] = value

    def picture(self, frame: dict[str, Any]) -> list[Block]:
        """As `slow_picture`: owners by name."""
        names = {row["no"]: row["id"] for row in frame["requests"]}
        assert len(names) == len(frame["requests"]), "two requests have one number"
        rows = zip(
            *(self.columns[name] for name in ("state", "owner", "refs", "fill")), strict=True
        )
        return [
            (state, None if owner < 0 else names[owner], refs, fill)
            for state, owner, refs, fill in rows
        ]


def check_frame(frame: dict[str, Any], follower: Follower, kv: KVCacheManager) -> None:
    """The picture is the slow one, and its counts are the ledger's."""
    follower.take(frame)
    picture = follower.picture(frame)
    assert picture == slow_picture(kv)
    ledger, size = kv.ledger(), kv.block_size
    assert {k: v for k, v in frame["ledger"].items() if k in ledger.terms()} == ledger.terms()
    states = [sum(block[0] == state for block in picture) * size for state in range(4)]
    assert states[0] == ledger.free
    assert states[1] == ledger.cached
    assert states[3] == ledger.external - ledger.rounding
    assert states[2] == ledger.tokens + ledger.reserved + ledger.internal + ledger.rounding
    assert sum(block[3] for block in picture if block[0] == 2) == ledger.tokens
    for row in frame["requests"]:
        if row["state"] == "ended":
            continue
        tables = [t for t in kv.tables() if t.account is kv.account(row["id"])]
        block_ids = {i for table in tables for i in table.block_ids}
        assert row["blocks"] == len(block_ids)
        pins = kv.pool.pins
        assert row["shared_blocks"] == sum(kv.ref_count(i) - pins[i] > 1 for i in block_ids)
