"""Replicas and routers."""

from __future__ import annotations

import pytest

from octavo.lab.config import SimConfig
from octavo.lab.costs import FixedCosts
from octavo.lab.results import SimResult
from octavo.lab.router import LeastLoaded, PrefixAware, RoundRobin
from octavo.lab.simulator import Simulation
from octavo.lab.trace import TraceRequest

CONFIG = SimConfig(
    num_blocks=60, block_size=4, max_model_len=128, num_replicas=3, enable_prefix_caching=True
)
COSTS = FixedCosts(0.03, 1e-3)
PLAIN = TraceRequest(num_input=8, num_output=4)


def of(*hash_ids: int, num_input: int = 16, num_output: int = 4, **fields: object) -> TraceRequest:
    return TraceRequest(num_input=num_input, num_output=num_output, hash_ids=hash_ids, **fields)  # type: ignore[arg-type]


def run(requests: list[TraceRequest], config: SimConfig, **options: object) -> SimResult:
    return served(requests, config, **options)[0]


def served(
    requests: list[TraceRequest], config: SimConfig, **options: object
) -> tuple[SimResult, int]:
    """What became of it, and how many strides were taken."""
    simulation = Simulation(requests, config, COSTS, block_tokens=8, **options)  # type: ignore[arg-type]
    end_s = simulation.run()
    for replica in simulation.replicas:
        replica.kv.check_integrity()
        assert not replica.num_outstanding and not replica.has_work
    num_strides = sum(replica.num_strides for replica in simulation.replicas)
    return simulation.result(end_s, 0.0), num_strides


def test_round_robin() -> None:
    router = RoundRobin()
    assert [router.pick(PLAIN, [5, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]


def test_least_loaded() -> None:
    assert LeastLoaded().pick(PLAIN, [5, 3, 3]) == 1


def test_prefix_aware_follows_the_longest_prefix() -> None:
    router = PrefixAware(3, 8, 1000, spare_tokens=10)
    assert router.pick(of(1, 2), [9, 0, 9]) == 1
    assert router.pick(of(3, 4), [0, 9, 9]) == 0
    assert router.pick(of(1, 2, 5), [0, 9, 9]) == 1
    assert router.pick(of(1, 6), [0, 9, 9]) == 1
    assert router.pick(of(9, 1), [0, 9, 9]) == 0


def test_prefix_aware_gives_up_on_the_overloaded() -> None:
    router = PrefixAware(2, 8, 1000, spare_tokens=10)
    assert router.pick(of(1), [0, 5]) == 0
    assert router.pick(of(1), [100, 60]) == 0
    assert router.pick(of(1), [101, 60]) == 1
    assert router.pick(of(1), [50, 49]) == 1, "both know it now"


def test_prefix_aware_forgets_what_the_pool_has_forgotten() -> None:
    router = PrefixAware(2, 8, 24, spare_tokens=100)
    assert router.pick(of(1, 2), [0, 1]) == 0
    assert router.pick(of(7, 8, 9), [0, 1]) == 0
    assert router.pick(of(1, 2), [1, 0]) == 1


def test_names_of_prefixes_count_too() -> None:
    router = PrefixAware(2, 8, 1000, spare_tokens=100)
    assert router.pick(of(prefix="a", prefix_tokens=8), [0, 1]) == 0
    assert router.pick(of(prefix="a", prefix_tokens=8), [1, 0]) == 0
    assert router.pick(of(prefix="b", prefix_tokens=8), [1, 0]) == 1


@pytest.mark.parametrize("router", ["round-robin", "least-loaded", "prefix-aware"])
@pytest.mark.parametrize("mode", ["open", "closed", "sessions"])
def test_strides_and_steps_are_the_same(router: str, mode: str) -> None:
    requests = []
    for i in range(60):
        session = {"session": str(i % 5), "think_s": 0.1 * (i % 4)} if mode == "sessions" else {}
        requests.append(
            of(i % 7, i % 3, num_input=3 + 5 * i % 30, num_output=1 + 11 * i % 60,
               arrival_s=0.06 * i, **session)
        )  # fmt: skip
    options = {"concurrency": 9} if mode == "closed" else {}
    config = CONFIG.replace(router=router)
    strided, num_strides = served(requests, config, sample_s=1.0, **options)
    stepped, none = served(requests, config.replace(stride=False), sample_s=1.0, **options)
    assert num_strides > 20 and none == 0
    for name in SimResult.__slots__:
        if name not in ("wall_s", "times"):
            assert getattr(strided, name) == getattr(stepped, name), name
    assert rows(strided) == rows(stepped)
    assert len(strided.times) == 60


def rows(result: SimResult) -> list[tuple[float, ...]]:
    """Replicas end requests at times of their own: the order in which they are told may differ."""
    times = result.times
    return sorted(
        zip(times.arrival_s, times.first_token_s, times.finished_s, times.num_input,
            times.num_output, times.num_cached, strict=True)
    )  # fmt: skip


def test_a_prefix_aware_router_finds_more() -> None:
    requests = [
        of(i % 7, 10 + i % 7, 20 + i % 7, num_input=28, num_output=6, arrival_s=0.3 * i)
        for i in range(90)
    ]
    rates = {}
    for router in ("round-robin", "prefix-aware"):
        result = run(requests, CONFIG.replace(router=router, num_blocks=30))
        rates[router] = result.num_cached_tokens / result.num_prompt_tokens
    assert rates["prefix-aware"] > 1.5 * rates["round-robin"]


def test_more_replicas_do_more() -> None:
    requests = [of(num_output=40, arrival_s=0.01 * i) for i in range(60)]
    one = run(requests, CONFIG.replace(num_replicas=1))
    three = run(requests, CONFIG.replace(router="least-loaded"))
    assert 2 < one.end_s / three.end_s < 3.2
