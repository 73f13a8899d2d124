"""Watching the pool: frames for a dashboard, a whole one first and then what has changed.

Nothing is done while nobody watches but one check in the pool. While somebody does, blocks that
change are written down (`kv.pool.Journal`), and a frame costs what has changed and a little for
each request.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from octavo.kv.manager import KVCacheManager
from octavo.kv.needs import is_plain
from octavo.kv.node import tokens_of_key
from octavo.kv.tiers import TierLedger
from octavo.sched.scheduler import Scheduler
from octavo.sched.watch_picture import Picture
from octavo.sched.watch_requests import Latencies, Numbers, RequestRows, first

VERSION = 1
_MAX_EVENTS = 200
"""Events in a frame: the last ones."""
_MAX_KEPT = 4096


class PoolWatch:
    """Makes frames of one pool and its scheduler, between two steps.

    Watching begins with the first frame and ends with `close`; it may begin again. One at a time.
    """

    def __init__(self, kv: KVCacheManager, scheduler: Scheduler) -> None:
        """`scheduler` is the one that uses `kv`."""
        self._kv, self._scheduler = kv, scheduler
        self._num_frames = 0
        self._picture: Picture | None = None
        self._numbers = Numbers()
        self._rows = RequestRows(kv, scheduler.roster, self._numbers)
        self._latencies = Latencies()

    def close(self) -> None:
        """Nobody watches any more. Twice is fine."""
        if self._picture is None:
            return
        self._picture.close()
        self._picture = None
        self._scheduler.roster.ended = self._scheduler.roster.log.news = None

    def frame(self, now_s: float, full: bool = False) -> dict[str, Any]:
        """What is to be seen now, as plain data. The first frame is full whatever is asked for, and
        so is the first one after the pool was resized: its blocks have other ids."""
        roster = self._scheduler.roster
        picture = self._picture
        if picture is None:
            full = True
            picture = self._picture = Picture(self._kv)
            roster.ended, roster.log.news = deque(maxlen=_MAX_KEPT), deque(maxlen=_MAX_KEPT)
        ended, news = roster.ended, roster.log.news
        assert ended is not None and news is not None, "the watch was closed by somebody else"
        different, was_resized, is_new = picture.update(self._numbers.of)
        full = full or was_resized
        rows, num_requests = self._rows.rows(now_s, picture.shared, is_new=is_new or was_resized)
        self._latencies.add(ended)
        ended.clear()
        self._numbers.end_round(now_s)
        frame: dict[str, Any] = {
            "v": VERSION,
            "kind": "full" if full else "diff",
            "n": self._num_frames,
            "time_s": now_s,
        }
        self._num_frames += 1
        if full:
            frame["about"] = self._about()
        if not is_plain(self._kv.windows):
            frame["groups"] = picture.groups()
        frame["blocks"] = self._blocks(picture, None if full else different)
        return frame | {
            "requests": rows,
            "num_requests": num_requests,
            "ledger": self._ledger(),
            "totals": self._totals(),
            "tiers": {
                "host": _tier(self._kv.host_ledger()),
                "disk": _tier(self._kv.disk_ledger()),
            },
            "num_running": self._scheduler.num_running,
            "num_waiting": self._scheduler.num_waiting,
            "latency": self._latencies.percentiles(now_s),
            "events": [
                event.as_dict() | {"serial": serial} for serial, event in first(news, _MAX_EVENTS)
            ],
        }

    def block(self, block_id: int) -> dict[str, Any]:
        """All about one block: what it is, who has it, in the table of which group of layers, at
        which positions (`start` to `end`, exclusive, of those computed), and the tokens in it as
        far as they are known. Raises `IntegrityError` for a block that does not exist."""
        pool = self._kv.pool
        refs, node = pool.ref_count(block_id), pool.nodes[block_id]
        owners, tokens = [], () if node is None else tokens_of_key(node.key)
        for table in self._kv.tables():
            if block_id not in table.block_ids:
                continue
            index = table.block_ids.index(block_id)
            start = index * pool.block_size
            end = min(start + pool.block_size, table.num_committed)
            owner = {"id": table.account.request_id, "seq": table.seq_id, "index": index}
            owner |= {"group": table.group, "start": start, "end": max(start, end)}
            owners.append(owner)
            own = tuple(table.token_ids[start:end])
            if len(own) > len(tokens):
                tokens = own
        return {
            "id": block_id,
            "refs": refs,
            "pins": pool.pins.get(block_id, 0),
            "is_cached": not refs and node is not None,
            "owners": owners,
            "token_ids": list(tokens),
            "text": None,
        }

    def _about(self) -> dict[str, Any]:
        kv = self._kv
        return {
            "kv_policy": kv.policy.name,
            "num_blocks": kv.num_blocks,
            "block_size": kv.block_size,
            "bytes_per_block": kv.bytes_per_block,
            "host_blocks": kv.host_ledger().num_blocks,
            "disk_blocks": kv.disk_ledger().num_blocks,
            "windows": list(kv.windows),
        }

    def _blocks(self, picture: Picture, ids: list[int] | None) -> dict[str, list[int]]:
        columns = {
            "state": picture.state,
            "owner": picture.owner,
            "refs": picture.refs,
            "fill": picture.fill,
        }
        if ids is None:
            return {name: column.copy() for name, column in columns.items()}
        changes = {name: [column[i] for i in ids] for name, column in columns.items()}
        return {"id": ids} | changes

    def _ledger(self) -> dict[str, int]:
        ledger = self._kv.ledger()
        more = {"pinned": ledger.pinned, "shared_saved": ledger.shared_saved}
        return ledger.terms() | more

    def _totals(self) -> dict[str, Any]:
        cache, roster = self._kv.cache_stats(), self._scheduler.roster
        return {
            "steps": self._scheduler.next_step_id,
            "prompt_tokens": roster.num_prompt_tokens,
            "output_tokens": roster.num_output_tokens,
            "preemptions": roster.num_preemptions,
            "query_tokens": cache.query_tokens,
            "hit_tokens": cache.hit_tokens,
            "evictions": cache.evictions,
            "misses": cache.miss_blocks,
        }


def _tier(ledger: TierLedger) -> dict[str, int]:
    return {"held": ledger.held, "cached": ledger.cached, "free": ledger.free}
