"""Pools that never were: frames for the page, made without an engine, the same in every run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

FREE, CACHED, USED, EXTERNAL = range(4)
Frame = dict[str, Any]


@dataclass(slots=True)
class Job:
    no: int
    prompt: int
    cached: int
    goal: int
    born_s: float
    client: str
    output: int = 0
    started_s: float | None = None
    blocks: list[int] = field(default_factory=list)
    block_seconds: float = 0.0
    preemptions: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.output


class World:
    """A pool, requests in it, and the frames that an engine would send of them."""

    def __init__(
        self,
        num_blocks: int,
        *,
        policy: str = "paged",
        seed: int = 1,
        rate: float = 4.0,
        windows: tuple[int, ...] = (0,),
    ) -> None:
        self.num_blocks, self.policy, self.rate = num_blocks, policy, rate
        self.windows = windows
        self.block_size = 16
        self.random = random.Random(seed)
        self.now_s = 100.0
        self.n = 0
        self.state = [FREE] * num_blocks
        self.owner = [-1] * num_blocks
        self.refs = [0] * num_blocks
        self.fill = [0] * num_blocks
        self.changed: set[int] = set()
        self.running: list[Job] = []
        self.waiting: list[Job] = []
        self.next_no = 0
        self.prefixes: list[list[int]] = []
        self.cache: list[int] = []
        self.events: list[dict[str, Any]] = []
        counts = ["steps", "prompt_tokens", "output_tokens", "preemptions"]
        counts += ["query_tokens", "hit_tokens", "evictions"]
        self.totals: dict[str, Any] = dict.fromkeys(counts, 0)
        self.totals["misses"] = {"never seen": 0, "evicted": 0, "shorter than a block": 0}
        self.latency: dict[str, list[float] | None] = {"ttft_s": None, "tpot_s": None}

    def put(self, block: int, state: int, owner: int = -1, refs: int = 0, fill: int = 0) -> None:
        """Set all of a block by hand."""
        self.state[block], self.owner[block] = state, owner
        self.refs[block], self.fill[block] = refs, fill
        self.changed.add(block)

    def _take(self) -> int | None:
        """A free block, or the one that has been cached longest."""
        for _ in range(64):
            block = self.random.randrange(self.num_blocks)
            if self.state[block] == FREE:
                return block
        free = [block for block, state in enumerate(self.state) if state == FREE]
        if free:
            return free[0]
        if self.cache:
            self.totals["evictions"] += 1
            return self.cache.pop(0)
        return None

    def _room(self, job: Job) -> bool:
        if self.policy == "paged":
            num_left = self.state.count(FREE) + len(self.cache)
            return num_left > job.prompt // 16 + 4
        return self._region(job) is not None

    def _region(self, job: Job) -> int | None:
        """The start of the first gap that the longest sequence fits into."""
        need, run = self._longest(job), 0
        for block, state in enumerate(self.state):
            run = run + 1 if state in (FREE, EXTERNAL) else 0
            if run == need:
                return block - need + 1
        return None

    def _longest(self, job: Job) -> int:
        need = -(-(job.prompt + job.goal) // 16)
        return need if self.policy == "orca-oracle" else 1 << max(0, need * 2 - 1).bit_length()

    def _admit(self, job: Job) -> None:
        job.started_s = self.now_s
        self.running.append(job)
        self.totals["query_tokens"] += job.prompt
        self.totals["prompt_tokens"] += job.prompt
        if self.policy != "paged":
            start = self._region(job)
            assert start is not None
            job.blocks = list(range(start, start + self._longest(job)))
            for i, block in enumerate(job.blocks):
                self.put(block, USED, job.no, 1, min(16, max(0, job.prompt - 16 * i)))
            self._mark_gaps()
            return
        prefix = self.random.choice(self.prefixes or [[]]) if self.random.random() < 0.6 else []
        prefix = [b for b in prefix if self.state[b] in (USED, CACHED)][: job.prompt // 16]
        for block in prefix:
            if self.state[block] == CACHED:
                self.cache.remove(block)
                self.put(block, USED, job.no, 1, 16)
            else:
                self.put(block, USED, self.owner[block], self.refs[block] + 1, 16)
        job.blocks = list(prefix)
        job.cached = 16 * len(prefix)
        self.totals["hit_tokens"] += job.cached
        missed = job.prompt // 16 - len(prefix)
        reason = "never seen" if self.random.random() < 0.7 else "evicted"
        self.totals["misses"][reason] += missed
        self.totals["misses"]["shorter than a block"] += job.prompt % 16 > 0
        self._grow(job)
        if len(self.prefixes) < 3 and len(job.blocks) > 8:
            self.prefixes.append(job.blocks[: self.random.randint(4, 8)])

    def _grow(self, job: Job) -> bool:
        """Room for all of a job's tokens; False when there is none."""
        while len(job.blocks) * 16 < job.tokens:
            block = self._take()
            if block is None:
                return False
            self.put(block, USED, job.no, 1, 0)
            job.blocks.append(block)
        for i in range(len(job.blocks) - 1, -1, -1):
            block, filled = job.blocks[i], min(16, max(0, job.tokens - 16 * i))
            if self.fill[block] == 16:
                break
            if self.fill[block] != filled:
                self.put(block, USED, self.owner[block], self.refs[block], filled)
        return True

    def _release(self, job: Job) -> None:
        for block in job.blocks:
            others = [one.no for one in self.running if one is not job and block in one.blocks]
            if others:
                self.put(block, USED, others[0], self.refs[block] - 1, self.fill[block])
            elif self.policy == "paged" and self.fill[block] == 16:
                self.put(block, CACHED, fill=16)
                self.cache.append(block)
            else:
                self.put(block, FREE)
        job.blocks = []
        if self.policy != "paged":
            self._mark_gaps()

    def _mark_gaps(self) -> None:
        """Free runs shorter than a region of eight blocks are of no use to anybody."""
        run: list[int] = []
        for block in range(self.num_blocks + 1):
            if block < self.num_blocks and self.state[block] in (FREE, EXTERNAL):
                run.append(block)
                continue
            state = EXTERNAL if len(run) < 8 else FREE
            for one in run:
                if self.state[one] != state:
                    self.put(one, state)
            run = []

    def step(self, seconds: float = 0.25) -> None:
        """Let time pass: requests come, grow, end, and are preempted when the pool is full."""
        self.now_s += seconds
        self.totals["steps"] += 5
        if self.random.random() < self.rate * seconds:
            prompt, goal = self.random.randint(20, 400), self.random.choice([40, 90, 160, 320])
            client = self.random.choice(["", "search", "mail"])
            self.waiting.append(Job(self.next_no, prompt, 0, goal, self.now_s, client))
            self.next_no += 1
        while self.waiting and self._room(self.waiting[0]):
            self._admit(self.waiting.pop(0))
        for job in list(self.running):
            if job not in self.running:
                continue
            job.block_seconds += seconds * len(job.blocks)
            new = min(self.random.randint(3, 6), job.goal - job.output)
            job.output += new
            self.totals["output_tokens"] += new
            if self.policy != "paged":
                for i, block in enumerate(job.blocks):
                    filled = min(16, max(0, job.tokens - 16 * i))
                    if filled != self.fill[block]:
                        self.put(block, USED, job.no, 1, filled)
            else:
                while job in self.running and not self._grow(job):
                    self._preempt()
            if job in self.running and job.output >= job.goal:
                self.running.remove(job)
                self._release(job)
                tpot = self.random.uniform(0.045, 0.06)
                self.latency = {
                    "ttft_s": [0.18 + 0.02 * len(self.waiting), 0.9 + 0.1 * len(self.waiting)],
                    "tpot_s": [tpot, 1.6 * tpot],
                }

    def _preempt(self) -> None:
        victim = self.running.pop()
        num = len(victim.blocks)
        self._release(victim)
        victim.preemptions += 1
        self.waiting.insert(0, victim)
        self.totals["preemptions"] += 1
        self.events.append(
            {
                "kind": "preempted",
                "time_s": self.now_s,
                "request_id": f"req-{victim.no}",
                "why": f"needs 1 block, 0 free and 0 cached; it came last, and holds {num}",
                "by": f"req-{self.running[0].no}",
                "mode": "recompute",
                "num_blocks": num,
            }
        )

    def request(self, job: Job, state: str) -> dict[str, Any]:
        return {
            "no": job.no, "id": f"req-{job.no}", "client": job.client, "state": state,
            "why": None if state == "running" else
            f"needs {job.prompt // 16 + 1} blocks, {self.state.count(FREE)} are free",
            "prompt_tokens": job.prompt, "output_tokens": job.output, "max_tokens": job.goal,
            "cached_tokens": job.cached, "blocks": len(job.blocks),
            "shared_blocks": sum(self.refs[block] > 1 for block in job.blocks),
            "block_seconds": job.block_seconds, "age_s": self.now_s - job.born_s,
            "queue_s": (job.started_s or self.now_s) - job.born_s, "num_seqs": 1,
            "preemptions": job.preemptions,
        }  # fmt: skip

    def preempted_rows(self) -> int:
        return sum(job.preemptions > 0 for job in self.waiting[:200])

    def ledger(self) -> dict[str, int]:
        size = self.block_size
        slots = [size * self.state.count(state) for state in range(4)]
        tokens = sum(f for s, f in zip(self.state, self.fill, strict=True) if s == USED)
        hopes = sum(min(job.goal - job.output, size * len(job.blocks)) for job in self.running)
        reserved = min(slots[USED] - tokens, hopes)
        shared = sum(refs - 1 for refs in self.refs if refs > 1) * size
        return {
            "tokens": tokens, "reserved": reserved, "internal": slots[USED] - tokens - reserved,
            "external": slots[EXTERNAL], "cached": slots[CACHED], "free": slots[FREE],
            "pinned": 0, "shared_saved": shared,
        }  # fmt: skip

    def group_of(self, block: int) -> int:
        """Groups have blocks in turn."""
        return block % len(self.windows)

    def groups(self) -> list[list[int]]:
        used = [b for b in range(self.num_blocks) if self.state[b] == USED]
        return [
            [sum(self.group_of(b) == group for b in used), 7 * self.n * (window > 0)]
            for group, window in enumerate(self.windows)
        ]

    def frame(self, full: bool = False) -> Frame:
        """What an engine would send now."""
        ids = range(self.num_blocks) if full else sorted(self.changed)
        blocks: dict[str, list[int]] = {
            name: [getattr(self, name)[block] for block in ids]
            for name in ("state", "owner", "refs", "fill")
        }
        frame: Frame = {
            "v": 1, "kind": "full" if full else "diff", "n": self.n, "time_s": self.now_s,
            "blocks": blocks if full else {"id": list(ids), **blocks},
            "requests": [self.request(job, "running") for job in self.running]
            + [self.request(job, "preempted" if job.preemptions else "waiting")
               for job in self.waiting[:200]],
            "num_requests": len(self.running) + len(self.waiting),
            "ledger": self.ledger(), "totals": {**self.totals, "misses": {**self.totals["misses"]}},
            "tiers": {"host": {"held": 12, "cached": 96, "free": 148},
                      "disk": {"held": 0, "cached": 0, "free": 0}},
            "num_running": len(self.running), "num_waiting": len(self.waiting),
            "latency": self.latency, "events": [] if full else self.events,
        }  # fmt: skip
        if any(self.windows):
            frame["groups"] = self.groups()
        if full:
            frame["about"] = {
                "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "kv_policy": self.policy,
                "scheduling_policy": "fcfs", "num_blocks": self.num_blocks,
                "block_size": self.block_size, "bytes_per_block": 368640, "max_model_len": 2048,
                "host_blocks": 256, "disk_blocks": 0, "windows": list(self.windows),
            }  # fmt: skip
            if any(self.windows):  # every sixth layer looks at all, as Gemma 3's do
                local = [layer for layer in range(18) if layer % 6 != 5]
                layers = [[5, 11, 17], *(local[i : i + 3] for i in range(0, 15, 3))]
                frame["about"] |= {"layers": layers, "bytes_per_block": 16 * 3 * 1024}
        return frame

    def next_frame(self) -> Frame:
        """The change since the last frame."""
        self.n += 1
        frame = self.frame()
        self.changed, self.events = set(), []
        return frame
