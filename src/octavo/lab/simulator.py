"""The simulator: the scheduler and the memory manager that serve, under a clock made of costs."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable
from operator import attrgetter

from octavo.errors import ConfigError
from octavo.lab.config import SimConfig
from octavo.lab.costs import StepCosts
from octavo.lab.feed import Feed
from octavo.lab.null_model import NullModel, TokenOf
from octavo.lab.prompts import PromptMaker
from octavo.lab.replica import Replica
from octavo.lab.results import RequestTimes, SimResult
from octavo.lab.router import make_router
from octavo.lab.sampling import PoolSampler
from octavo.lab.trace import TraceRequest

Progress = Callable[[int, float], None]
"""Told now and then: requests that have ended, seconds simulated."""
_PROGRESS_EVERY = 1000


def simulate(
    requests: Iterable[TraceRequest],
    config: SimConfig,
    costs: StepCosts,
    *,
    block_tokens: int = 0,
    concurrency: int | None = None,
    until_s: float | None = None,
    sample_s: float | None = None,
    progress: Progress | None = None,
    tokens: TokenOf | None = None,
) -> SimResult:
    """Serve a workload in simulated time.

    `requests` come in order of `arrival_s` (None: at once); they are read as they come, and of
    those that have ended only `RequestTimes` is kept. One with `think_s` comes when the last one of
    its session has ended. `concurrency` makes a closed loop: so many are there from the start, and
    a new one comes when one has ended. `until_s` stops the clock while requests are still there.
    The pool is looked at every `sample_s` seconds (None: so that there are some 500 looks or more,
    and a bounded number). `block_tokens` are the tokens of a hash id. `tokens` says what sequences
    draw, by sequence and position; with it no steps are taken in one go.

    With several replicas a request is routed when it comes, by what each replica will be like at
    the end of the step that it is in.

    Raises `ConfigError` for limits, `TraceError` for requests that cannot be served or do not come
    in order.
    """
    if until_s is not None and not until_s >= 0:
        raise ConfigError(f"--until must be a number of seconds, 0 or more, got {until_s:g}")
    simulation = Simulation(
        requests,
        config,
        costs,
        block_tokens=block_tokens,
        concurrency=concurrency,
        sample_s=sample_s,
        tokens=tokens,
    )
    began = time.perf_counter()
    end_s = simulation.run(math.inf if until_s is None else until_s, progress)
    return simulation.result(end_s, time.perf_counter() - began)


class Simulation:
    """Replicas, each with its own clock, and the requests that come to them."""

    def __init__(
        self,
        requests: Iterable[TraceRequest],
        config: SimConfig,
        costs: StepCosts,
        *,
        block_tokens: int = 0,
        concurrency: int | None = None,
        sample_s: float | None = None,
        tokens: TokenOf | None = None,
    ) -> None:
        """As `simulate`."""
        if config.num_replicas < 1:
            raise ConfigError(f"--num-replicas must be at least 1, got {config.num_replicas}")
        if sample_s is not None and not sample_s >= 0:
            raise ConfigError(f"--sample-interval must be 0 seconds or more, got {sample_s:g}")
        self._feed = Feed(requests, concurrency)
        self._router = make_router(
            config.router,
            config.num_replicas,
            block_tokens=block_tokens,
            max_tokens=config.num_slots // len(config.pool_windows),
            spare_tokens=config.max_num_batched_tokens,
        )
        self._times = RequestTimes()
        self.replicas = [
            Replica(
                config,
                costs,
                prompts=PromptMaker(block_tokens, unique=config.enable_prefix_caching),
                model=NullModel(tokens),
                sampler=PoolSampler(sample_s),
                times=self._times,
                on_end=self._feed.ended,
            )
            for _ in range(config.num_replicas)
        ]
        self._num_requests = 0

    def run(self, until_s: float = math.inf, progress: Progress | None = None) -> float:
        """The loop: always what comes first, a request before a step. Returns when it stopped."""
        feed, replicas = self._feed, self.replicas
        is_one = len(replicas) == 1
        num_turns = 0
        while True:
            if is_one:
                replica = replicas[0]
                now_s = replica.now_s if replica.has_work else math.inf
            else:
                working = [one for one in replicas if one.has_work]
                replica = min(working, key=attrgetter("now_s"), default=replicas[0])
                now_s = replica.now_s if working else math.inf
            next_s = feed.next_s
            if min(next_s, now_s) >= until_s:
                break
            if next_s <= now_s:
                self._route()
                continue
            stop_s = until_s
            if not is_one:
                stop_s = min(until_s, next_s)
                if feed.is_reactive:  # the end of one elsewhere may bring the next one here
                    others = (one.now_s for one in working if one is not replica)
                    stop_s = min(stop_s, min(others, default=math.inf))
            replica.advance(stop_s, next_s)
            num_turns += 1
            if progress is not None and num_turns % _PROGRESS_EVERY == 0:
                progress(len(self._times), replica.now_s)
        end_s = max(one.now_s for one in replicas)
        has_work = any(one.has_work for one in replicas) or feed.next_s < math.inf
        return max(end_s, until_s) if has_work else end_s

    def _route(self) -> None:
        request, arrival_s = self._feed.pop()
        index = self._num_requests
        self._num_requests += 1
        chosen = 0
        if len(self.replicas) > 1:
            loads = [one.num_outstanding for one in self.replicas]
            chosen = self._router.pick(request, loads)
        self.replicas[chosen].add(request, arrival_s, index)

    def result(self, end_s: float, wall_s: float) -> SimResult:
        """What became of it all."""
        times, replicas = self._times, self.replicas
        samples = [one.sampler.samples(end_s) for one in replicas]
        num_steps = sum(one.num_steps for one in replicas)
        return SimResult(
            num_requests=self._num_requests,
            num_refused=sum(one.num_refused for one in replicas),
            refusals=tuple(why for one in replicas for why in one.refusals)[:5],
            times=times,
            samples=list(heapq.merge(*samples, key=attrgetter("time_s"))),
            end_s=end_s,
            num_steps=num_steps,
            busy_s=sum(one.busy_s for one in replicas),
            mean_seqs=sum(one.num_seqs for one in replicas) / max(1, num_steps),
            num_preemptions=sum(one.scheduler.num_preemptions for one in replicas),
            num_tokens_computed=sum(one.num_tokens for one in replicas),
            num_input_tokens=sum(times.num_input),
            num_output_tokens=sum(one.num_output for one in replicas),
            num_cached_tokens=sum(one.num_cached for one in replicas),
            num_prompt_tokens=sum(one.num_prompt for one in replicas),
            wall_s=wall_s,
        )
