"""Strides: the same decisions as step by step, whatever the workload."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from octavo.lab.config import SimConfig
from octavo.lab.costs import FixedCosts
from octavo.lab.replica import Replica
from octavo.lab.results import SimResult
from octavo.lab.simulator import Simulation
from octavo.lab.trace import TraceRequest

COSTS = FixedCosts(0.03, 3e-4, 2e-3)


def run(
    requests: list[TraceRequest],
    config: SimConfig,
    looks: Container[int] | None = None,
    *,
    until_s: float = math.inf,
    **options: Any,
) -> tuple[SimResult, dict[int, Any], Replica]:
    """A simulation, and by number of steps what all was like before the next one: after each of
    `looks`, by default whenever it stopped."""
    simulation = Simulation(requests, config, COSTS, **options)
    (replica,) = simulation.replicas
    states: dict[int, Any] = {}
    advance = replica.advance

    def watched(stop_s: float, arrival_s: float) -> None:
        if looks is None or replica.num_steps in looks:
            replica.kv.check_integrity()
            states.setdefault(replica.num_steps, state_of(replica))
        advance(stop_s, arrival_s)

    replica.advance = watched  # type: ignore[method-assign]
    end_s = simulation.run(until_s)
    replica.kv.check_integrity()
    states.setdefault(replica.num_steps, state_of(replica))
    return simulation.result(end_s, 0.0), states, replica


def state_of(replica: Replica) -> dict[str, Any]:
    """Everything that a decision, a report or a figure can depend on."""
    scheduler, kv = replica.scheduler, replica.kv
    roster, pool, cache = scheduler.roster, kv._pool, kv._cache
    storm = scheduler._pressure._storm
    tables = {
        i: (list(t.block_ids), t.num_committed, t.capacity, t.exclusive_from, t.num_reported,
            t.num_registered, t.next_register)
        for i, t in kv._tables.items()
    }  # fmt: skip
    return {
        "now": (replica.now_s, replica.busy_s, roster.now_s, kv._now_s, cache.now_s),
        "counts": (replica.num_steps, replica.num_seqs, replica.num_tokens),
        "ids": (scheduler.next_step_id, scheduler._next_result_id, cache.step, cache.plan),
        "running": [sequence_of(seq) for seq in roster.running],
        "waiting": [sequence_of(seq) for seq in roster.waiting],
        "backlog": len(replica._backlog),
        "tables": tables,
        "free": pool.free_block_ids(),
        "refs": (list(pool.ref_counts), pool.num_cached),
        "nodes": list(tree_of(kv)),
        "ghosts": [path_of(node) for node in cache.tree._leaf_ghosts],
        "host": [None if node is None else path_of(node) for node in cache.host.nodes],
        "host lru": list(cache.host._lru),
        "usage": {name: usage_of(account) for name, account in kv._accounts.items()},
        "stats": kv.cache_stats(),
        "ledger": kv.ledger(),
        "events": scheduler.events(),
        "totals": scheduler.pressure_totals,
        "storm": (storm._level, list(storm._left), storm._num_calm_steps),
        "watermark": scheduler.admission.watermark,
        "costs": [
            {size: tuple(window) for size, window in line._by_magnitude.items()}
            for line in (scheduler._costs._steps, scheduler._costs._copies)
        ],
    }


def usage_of(account: Any) -> tuple[Any, ...]:
    """Without settling it, which would round differently from then on."""
    return (
        account._block_seconds, account._since_s, account._peak_blocks,
        account._peak_shared_tokens, account.misses, dict(account._entries),
    )  # fmt: skip


def sequence_of(seq: Any) -> tuple[Any, ...]:
    stats = seq.group.stats
    metrics = stats.metrics
    return (
        seq.seq_id, tuple(seq.token_ids), seq.num_computed_tokens, seq.num_pending, seq.status,
        seq.num_answered, seq.has_table_there, stats.num_computed_tokens,
        metrics.num_generation_tokens, metrics.first_token_s, metrics.last_token_s,
    )  # fmt: skip


def path_of(node: Any) -> tuple[bytes, ...]:
    path = []
    while node.parent is not None:
        path.append(node.key)
        node = node.parent
    return tuple(reversed(path))


def tree_of(kv: Any) -> Iterator[tuple[Any, ...]]:
    for name, root in kv._cache.tree.roots.items():
        todo = [root]
        while todo:
            node = todo.pop()
            todo.extend(node.children.values())
            yield (
                name,
                node.key,
                node.block_id,
                node.host_id,
                node.step,
                node.num_holds,
                (node.evicted_s),
            )


def assert_same(requests: list[TraceRequest], config: SimConfig, **options: Any) -> Replica:
    """Returns the one that took strides."""
    strided, seen, replica = run(requests, config, **options)
    stepped, states, _ = run(requests, config.replace(stride=False), seen, **options)
    for num_steps, state in seen.items():
        expected = states[num_steps]
        for name, value in state.items():
            assert value == expected[name], f"{name} after {num_steps} steps"
    for name in SimResult.__slots__:
        if name != "wall_s":
            assert getattr(strided, name) == getattr(stepped, name), name
    if "until_s" not in options:
        assert len(strided.times) + strided.num_refused == len(requests)
    return replica


@st.composite
def workloads(draw: st.DrawFn) -> tuple[list[TraceRequest], SimConfig]:
    policy: Any = draw(
        st.sampled_from(
            ["paged", "paged", "paged", "orca-max", "orca-pow2", "orca-oracle", "contiguous"]
        )
    )
    is_paged = policy == "paged"
    block_size = draw(st.sampled_from([1, 2, 4, 8]))
    caching = is_paged and draw(st.booleans())
    is_contiguous = policy == "contiguous"
    max_len = 64
    budget = draw(st.sampled_from([1, 8, 16, 64]))
    config = SimConfig(
        num_blocks=draw(st.integers(64 // block_size, 200 // block_size)) + 4,
        block_size=block_size,
        kv_policy=policy,
        max_model_len=max_len,
        max_num_seqs=min(budget, draw(st.integers(2, 8))),
        max_num_batched_tokens=budget,
        max_batch=draw(st.sampled_from([None, 1, 3])) if is_contiguous else None,
        max_padded_tokens=draw(st.sampled_from([None, 64])) if is_contiguous else None,
        enable_prefix_caching=caching,
        num_host_blocks=draw(st.sampled_from([0, 0, 6, 100])) if is_paged else 0,
        preemption_mode=draw(st.sampled_from(["recompute", "swap", "auto"])),
        preemption_victim=draw(st.sampled_from(["last-come", "lowest-cost", "priority"])),
        scheduling_policy=draw(st.sampled_from(["fcfs", "priority", "fair"])),
        watermark=draw(st.sampled_from([0.0, 0.01, 0.1])),
    )
    now_s, requests = 0.0, []
    too_much = st.sampled_from([0] * 9 + [max_len])  # such a request is refused
    for _ in range(draw(st.integers(1, 14))):
        now_s += draw(st.sampled_from([0.0, 0.0, 0.05, 0.4, 2.0]))
        num_input = draw(st.integers(1, 30))
        beams = draw(st.sampled_from([0, 0, 0, 0, 2]))
        requests.append(
            TraceRequest(
                client=draw(st.sampled_from(["", "a", "b"])),
                num_input=num_input,
                num_output=draw(st.integers(1, max_len - num_input)) + draw(too_much),
                arrival_s=now_s,
                n=1 if beams else draw(st.sampled_from([1, 1, 1, 2, 3])),
                beam_width=beams,
                priority=draw(st.integers(0, 2)),
                prefix=draw(st.sampled_from(["a", "b"])),
                prefix_tokens=draw(st.sampled_from([0, 0, 5, 16])),
                hash_ids=draw(st.sampled_from([(), (), (1, 2, 3), (1, 2, 4), (5,)])),
                session=draw(st.sampled_from(["", "", "s"])),
                think_s=draw(st.sampled_from([None, 0.0, 0.3])),
            )
        )
    return requests, config


def check_all(options: st.SearchStrategy[dict[str, Any]], max_examples: int) -> None:
    """Whatever the workload; of all of them, many strides were taken."""
    num_strides = num_refused = 0

    @settings(
        max_examples=max_examples,
        deadline=None,
        phases=[Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(workloads(), options)
    def check(workload: tuple[list[TraceRequest], SimConfig], some: dict[str, Any]) -> None:
        nonlocal num_strides, num_refused
        replica = assert_same(*workload, block_tokens=4, **some)
        num_strides += replica.num_strides
        num_refused += replica.num_refused

    check()
    assert num_strides > max_examples and num_refused > 0


def test_strides_and_steps_are_the_same() -> None:
    check_all(st.fixed_dictionaries({"sample_s": st.sampled_from([0.05, 0.5, math.inf])}), 30)


def test_in_closed_loops_too() -> None:
    check_all(
        st.fixed_dictionaries({"concurrency": st.integers(1, 5), "sample_s": st.just(math.inf)}),
        12,
    )


def test_the_clock_may_stop_inside_a_stride() -> None:
    times = st.floats(0.0, 5.0)
    check_all(st.fixed_dictionaries({"until_s": times, "sample_s": st.just(math.inf)}), 12)
    lonely = [TraceRequest(num_input=4, num_output=60, arrival_s=0.0)]
    config = SimConfig(num_blocks=40, block_size=4, max_model_len=64)
    replica = assert_same(lonely, config, until_s=1.0, sample_s=math.inf)
    assert (replica.num_steps, replica.num_strides) == (33, 1), "0.0312 s, and 32 of 0.0303 s"


def test_who_is_refused_has_ended_as_he_came() -> None:
    """Behind a long stride; the next one of his session goes on at once."""
    requests = [
        TraceRequest(num_input=10, num_output=150, arrival_s=0.0),
        TraceRequest(num_input=10, num_output=100, arrival_s=0.01),
        TraceRequest(num_input=900, num_output=900, arrival_s=0.5, session="s"),
        TraceRequest(num_input=5, num_output=5, arrival_s=0.6, session="s", think_s=0.25),
    ]
    config = SimConfig(num_blocks=40, max_num_seqs=1)
    replica = assert_same(requests, config, sample_s=math.inf)
    assert replica.num_refused == 1 and replica.num_strides >= 3
    assert list(replica.times.arrival_s) == [0.0, 0.01, 0.75]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_long_run_under_pressure(caching: bool, mode: Any) -> None:
    """Storms, evictions, preemptions, a line that is always blocked: and yet mostly strides."""
    requests = [
        TraceRequest(num_input=5 + 7 * i % 40, num_output=30 + 31 * i % 170, arrival_s=0.2 * i)
        for i in range(80)
    ]
    config = SimConfig(
        num_blocks=120, block_size=8, max_model_len=256, enable_prefix_caching=caching,
        num_host_blocks=40 if mode == "swap" else 0, preemption_mode=mode,
    )  # fmt: skip
    replica = assert_same(requests, config, sample_s=1.0)
    assert replica.scheduler.num_preemptions > 10
    assert replica.scheduler.pressure_totals.num_storms > 0
    assert replica.num_strides * 4 < replica.num_steps


def test_who_finds_what_a_last_prompt_token_completes_comes_in_at_once() -> None:
    """The second request's prompt is computed but for one token; that fills a block that the third
    one shares, so that it needs one block less, and there is one."""
    requests = [
        TraceRequest(num_input=5, num_output=12, arrival_s=0.0),
        TraceRequest(num_input=8, num_output=4, arrival_s=0.01, prefix="p", prefix_tokens=8),
        TraceRequest(num_input=9, num_output=4, arrival_s=0.01, prefix="p", prefix_tokens=8),
    ]
    config = SimConfig(
        num_blocks=5, block_size=4, max_model_len=20, max_num_batched_tokens=8, max_num_seqs=8,
        watermark=0.0, enable_prefix_caching=True,
    )  # fmt: skip
    replica = assert_same(requests, config, sample_s=math.inf)
    assert replica.num_cached == 8 and replica.num_strides > 0
