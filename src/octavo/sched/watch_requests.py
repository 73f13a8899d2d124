"""Requests as rows for people: who runs, who waits and why, what each holds, how long it took."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Any

from octavo.kv.manager import KVCacheManager
from octavo.kv.table import BlockTable
from octavo.kv.usage import RequestAccount
from octavo.outputs import RequestMetrics
from octavo.sched.roster import Roster
from octavo.sched.sequence import RequestStats, SequenceGroup, SequenceStatus

MAX_WAITING = 200
"""Rows of requests that wait."""
_REST_S = 30.0
"""After which a number that was given back may be given again."""
_WINDOW_S = 30.0
_MAX_ENDED = 4096

Row = dict[str, Any]


class Numbers:
    """Small numbers for requests, so that a picture of many blocks is small; the smallest that is
    free, and has been for a while."""

    def __init__(self) -> None:
        self._by_id: dict[str, int] = {}
        self._used: set[str] = set()
        self._resting: deque[tuple[float, int]] = deque()
        self._free: list[int] = []
        self._num = 0

    def of(self, request_id: str) -> int:
        """The number of a request, which has it as long as it is asked for in every round."""
        self._used.add(request_id)
        number = self._by_id.get(request_id)
        if number is None:
            if self._free:
                number = heapq.heappop(self._free)
            else:
                number = self._num
                self._num += 1
            self._by_id[request_id] = number
        return number

    def end_round(self, now_s: float) -> None:
        """Who was not asked for since the last round gives its number back."""
        for request_id in self._by_id.keys() - self._used:
            self._resting.append((now_s, self._by_id.pop(request_id)))
        self._used.clear()
        while self._resting and self._resting[0][0] + _REST_S <= now_s:
            heapq.heappush(self._free, self._resting.popleft()[1])


class RequestRows:
    """The rows of a frame."""

    def __init__(self, kv: KVCacheManager, roster: Roster, numbers: Numbers) -> None:
        self._kv, self._roster, self._numbers = kv, roster, numbers
        self._bases: dict[SequenceGroup, Row] = {}
        """By request: its row, with what never changes."""
        self._bases_now: dict[SequenceGroup, Row] = {}
        self._num_shared: dict[str, tuple[BlockTable, int]] = {}
        """By request of one table: how many of its blocks are shared."""

    def rows(self, now_s: float, shared: set[int], *, is_new: bool) -> tuple[list[Row], int]:
        """All that run, the first of those that wait, and those that have ended and whose batch
        holds their blocks back; and how many there are in all. `is_new`: other blocks are shared
        than the last time."""
        if is_new:
            self._num_shared.clear()
        roster = self._roster
        running = dict.fromkeys(seq.group for seq in roster.running)
        rows = [self._row(group, "running", None, now_s, shared) for group in running]
        listed = {row["id"] for row in rows}
        waiting = (seq.group for seq in roster.waiting if seq.group not in running)
        head = roster.waiting.head()
        seen: dict[SequenceGroup, None] = {}
        for group in waiting:
            if group in seen:
                continue
            if len(seen) == MAX_WAITING:
                break
            seen[group] = None
            has_run = any(seq.has_run for seq in _waiting_of(group))
            why = self._why(group, None if head is None else head.group)
            state = "preempted" if has_run else "waiting"
            rows.append(self._row(group, state, why, now_s, shared))
            listed.add(group.request.request_id)
        num = max(len(rows), len(roster.groups))
        for table in self._kv.tables():
            account = table.account
            if account.request_id not in listed and account.request_id not in roster.groups:
                listed.add(account.request_id)
                rows.append(self._ended_row(account.request_id, len(table.block_ids)))
                num += 1
        self._bases, self._bases_now = self._bases_now, {}
        if self._num_shared:
            self._num_shared = {i: self._num_shared[i] for i in listed if i in self._num_shared}
        return rows, num

    def _why(self, group: SequenceGroup, head: SequenceGroup | None) -> str:
        passed = self._roster.waiting.passed.get(group.request.request_id)
        if passed is not None:
            return passed
        if head is None or group is not head:
            return f"behind {'others' if head is None else head.request.request_id}"
        blocked_id, why = self._roster.log.blocked
        if blocked_id == group.request.request_id:
            return why
        return "it comes with the next step, or is told why not"

    def _row(
        self, group: SequenceGroup, state: str, why: str | None, now_s: float, shared: set[int]
    ) -> Row:
        request, metrics = group.request, group.stats.metrics
        request_id = request.request_id
        base = self._bases.get(group)
        if base is None:
            base = _base(group)
        self._bases_now[group] = base
        account = self._kv.account(request_id)
        row = base.copy()
        row["no"] = self._numbers.of(request_id)
        row["state"], row["why"] = state, why
        if account is not None:
            row["blocks"] = account.num_blocks
            row["cached_tokens"] = account.cached_tokens
            row["block_seconds"] = round(account.block_seconds(now_s), 3)
            if shared:
                row["shared_blocks"] = self._shared_of(account, shared)
        num_output, num_seqs = metrics.num_generation_tokens, group.num_unfinished
        if group.search is not None and group.search.beams:
            num_seqs = len(group.search.beams)
            longest = max(len(beam.token_ids) for beam in group.search.beams)
            num_output = max(0, longest - len(request.prompt_token_ids))
        row["output_tokens"], row["num_seqs"] = num_output, num_seqs
        row["age_s"] = age_s = round(now_s - request.arrival_s, 3)
        started_s = metrics.first_scheduled_s
        row["queue_s"] = age_s if started_s is None else round(started_s - request.arrival_s, 3)
        row["preemptions"] = metrics.num_preemptions
        return row

    def _ended_row(self, request_id: str, num_blocks: int) -> Row:
        """Of a member of a batch that has ended, and keeps its region until all have."""
        return {
            "no": self._numbers.of(request_id), "id": request_id, "client": "", "state": "ended",
            "why": "it keeps its blocks until its batch has ended", "prompt_tokens": 0,
            "output_tokens": 0, "max_tokens": 0, "cached_tokens": 0, "blocks": num_blocks,
            "shared_blocks": 0, "block_seconds": 0.0, "age_s": 0.0, "queue_s": 0.0, "num_seqs": 0,
            "preemptions": 0,
        }  # fmt: skip

    def _shared_of(self, account: RequestAccount, shared: set[int]) -> int:
        """How many of its blocks several tables have."""
        tables = account.tables
        known = self._num_shared.get(account.request_id)
        if len(tables) == 1:
            if known is not None and known[0] is tables[0]:
                return known[1]  # what it has taken since is its own, or `shared` is another
            num = len(shared.intersection(tables[0].block_ids))
            self._num_shared[account.request_id] = tables[0], num
            return num
        found: set[int] = set()
        for table in tables:
            found |= shared.intersection(table.block_ids)
        return len(found)


def _base(group: SequenceGroup) -> Row:
    """A row with what never changes, and zeros."""
    request = group.request
    num_prompt = len(request.prompt_token_ids)
    return {
        "no": 0, "id": request.request_id, "client": request.client_id, "state": "", "why": None,
        "prompt_tokens": num_prompt, "output_tokens": 0,
        "max_tokens": group.max_total_tokens - num_prompt, "cached_tokens": 0, "blocks": 0,
        "shared_blocks": 0, "block_seconds": 0.0, "age_s": 0.0, "queue_s": 0.0, "num_seqs": 1,
        "preemptions": 0,
    }  # fmt: skip


def _waiting_of(group: SequenceGroup) -> list[Any]:
    members = group.sequences if group.search is None else group.search.beams
    return [seq for seq in members if seq.status is SequenceStatus.WAITING]


class Latencies:
    """Times to the first token and between tokens, of requests that ended lately."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, RequestMetrics, int]] = deque(maxlen=_MAX_ENDED)
        self._last: dict[str, list[float] | None] = {"ttft_s": None, "tpot_s": None}
        self._due_s = -1.0

    def add(self, ended: Iterable[RequestStats]) -> None:
        """Requests have ended."""
        for stats in ended:
            metrics = stats.metrics
            if metrics.first_token_s is not None and metrics.finished_s is not None:
                self._ended.append((metrics.finished_s, metrics, stats.num_seqs))

    def percentiles(self, now_s: float) -> dict[str, list[float] | None]:
        """Of each kind the median and the 99th percentile; None without a request."""
        while self._ended and self._ended[0][0] < now_s - _WINDOW_S:
            self._ended.popleft()
        if now_s >= self._due_s:
            self._due_s = now_s + 1.0
            ttft, tpot = [], []
            for _, metrics, num_seqs in self._ended:
                if metrics.first_token_s is None or metrics.last_token_s is None:
                    continue
                ttft.append(metrics.first_token_s - metrics.arrival_s)
                num_gaps = metrics.num_generation_tokens / num_seqs - 1
                if num_gaps > 0:
                    tpot.append((metrics.last_token_s - metrics.first_token_s) / num_gaps)
            self._last = {"ttft_s": _two(ttft), "tpot_s": _two(tpot)}
        return self._last


def _two(values: list[float]) -> list[float] | None:
    if not values:
        return None
    values.sort()
    last = len(values) - 1
    return [round(values[round(share * last)], 6) for share in (0.5, 0.99)]


def first(news: deque[Any], num: int) -> list[Any]:
    """Take all out, and give the last `num` of them."""
    taken = list(islice(news, max(0, len(news) - num), None))
    news.clear()
    return taken
