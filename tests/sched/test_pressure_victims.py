"""Who is preempted, and how it comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import PreemptionMode, PreemptionVictim
from octavo.kv.policy import RestoreCost
from octavo.outputs import RequestMetrics
from octavo.request import Request
from octavo.sched.costs import CostModel
from octavo.sched.preemption import PreemptionPolicy, Unit, Victim
from octavo.sched.sequence import RequestStats, Sequence, SequenceGroup

RULES: tuple[PreemptionVictim, ...] = ("last-come", "lowest-cost", "priority")


class FakeMemory:
    """Answers what it was told, by sequence."""

    def __init__(self, room: int = 1000) -> None:
        self.costs: dict[int, RestoreCost] = {}
        self.room = room
        self.can_preempt = True

    def restore_cost(self, *seq_ids: int) -> RestoreCost:
        costs = [self.costs[seq_id] for seq_id in seq_ids]
        return RestoreCost(sum(c.num_tokens for c in costs), sum(c.num_blocks for c in costs))

    def host_room(self) -> int:
        return self.room


def make_unit(
    memory: FakeMemory, first_id: int, *costs: tuple[int, int], priority: int = 0
) -> Unit:
    """A request's sequences, one for each (tokens, blocks); the id is the place in line."""
    name = f"r{first_id}"
    request = Request(request_id=name, prompt_token_ids=[1], n=len(costs), priority=priority)
    group = SequenceGroup(request, 99, RequestStats(RequestMetrics()), num_unfinished=len(costs))
    unit = []
    for index, (num_tokens, num_blocks) in enumerate(costs):
        seq = Sequence(first_id + index, group, index, (0, first_id, index), [1])
        memory.costs[seq.seq_id] = RestoreCost(num_tokens, num_blocks)
        unit.append(seq)
    return tuple(unit)


def make_policy(
    memory: FakeMemory,
    victim: PreemptionVictim = "last-come",
    mode: PreemptionMode = "recompute",
) -> PreemptionPolicy:
    """A millisecond a token, and one for each block and direction."""
    return PreemptionPolicy(memory, CostModel(token_s=1e-3, block_s=1e-3), mode=mode, victim=victim)


def choice(policy: PreemptionPolicy, units: list[Unit], requester: int = 0) -> Victim:
    """All but those before the requester are candidates, itself among them."""
    victim = policy.choose(units[requester], units[requester:], is_alone=len(units) == 1)
    assert victim is not None
    return victim


@pytest.fixture
def memory() -> FakeMemory:
    return FakeMemory()


@pytest.fixture
def four(memory: FakeMemory) -> list[Unit]:
    """The third is cheapest, the second is the least important."""
    return [
        make_unit(memory, 0, (40, 10)),
        make_unit(memory, 1, (30, 8), priority=5),
        make_unit(memory, 2, (10, 3), priority=1),
        make_unit(memory, 3, (20, 5)),
    ]


@pytest.mark.parametrize(
    ("rule", "seq_id", "why"),
    [
        ("last-come", 3, "last come of 3 not served yet; recompute 20 tokens x 1 ms = 20 ms"),
        (
            "lowest-cost",
            2,
            "cheapest to bring back of 3 not served yet; recompute 10 tokens x 1 ms",
        ),
        ("priority", 1, "priority 5, the last of 3 not served yet; recompute 30 tokens x 1 ms"),
    ],
)
def test_each_rule_has_its_victim(
    memory: FakeMemory, four: list[Unit], rule: PreemptionVictim, seq_id: int, why: str
) -> None:
    victim = choice(make_policy(memory, rule), four)
    assert [seq.seq_id for seq in victim.sequences] == [seq_id]
    assert victim.mode == "recompute"
    assert victim.why.startswith(why)


def test_equal_priorities_and_equal_costs_go_by_the_last_come(memory: FakeMemory) -> None:
    units = [make_unit(memory, i, (10, 3), priority=4) for i in range(4)]
    for rule in RULES:
        assert choice(make_policy(memory, rule), units).sequences == units[3]


def test_those_before_the_requester_are_never_taken(memory: FakeMemory, four: list[Unit]) -> None:
    for rule in RULES:
        policy = make_policy(memory, rule)
        victim = policy.choose(four[2], four, is_alone=False)
        assert victim is not None and victim.sequences == four[3]


def test_the_requester_goes_last(memory: FakeMemory, four: list[Unit]) -> None:
    policy = make_policy(memory, "lowest-cost")
    victim = policy.choose(four[3], [four[3]], is_alone=False)
    assert victim is not None and victim.sequences == four[3]
    assert victim.why == ("nobody who came later is left; recompute 20 tokens x 1 ms = 20 ms")
    assert policy.choose(four[3], [], is_alone=False) == victim


def test_nobody_goes_when_that_cannot_help(memory: FakeMemory, four: list[Unit]) -> None:
    policy = make_policy(memory)
    assert policy.choose(four[0], [], is_alone=True) is None
    memory.can_preempt = False
    assert policy.choose(four[0], four, is_alone=False) is None


def test_who_would_free_nothing_stays_while_another_frees_something(memory: FakeMemory) -> None:
    units = [
        make_unit(memory, 0, (40, 10)),
        make_unit(memory, 1, (30, 2)),
        make_unit(memory, 2, (30, 2)),
        make_unit(memory, 3, (0, 0), priority=9),  # shares all that it has
    ]
    for rule in RULES:
        assert choice(make_policy(memory, rule), units).sequences == units[2]
    # Now none does: together they may.
    memory.costs[1] = memory.costs[2] = RestoreCost(30, 0)
    for rule in RULES:
        assert choice(make_policy(memory, rule), units).sequences == units[3]


def test_beams_go_together_and_their_costs_add_up(memory: FakeMemory) -> None:
    units = [
        make_unit(memory, 0, (9, 3)),
        make_unit(memory, 1, (10, 2), (12, 3), (11, 2)),
        make_unit(memory, 4, (34, 8)),
    ]
    policy = make_policy(memory, "lowest-cost", "auto")
    victim = choice(policy, units)
    assert victim.sequences == units[1]
    assert victim.restore_s == pytest.approx(14e-3)
    assert victim.why.endswith(
        "swap 7 blocks out and in = 14 x 1 ms = 14 ms < recompute 33 tokens x 1 ms = 33 ms"
    )
    # Beams that ask for room are their own last resort, as a whole.
    victim = policy.choose(units[1], units[1:2], is_alone=False)
    assert victim is not None and victim.sequences == units[1]


@pytest.mark.parametrize(
    ("mode", "cost", "room", "chosen", "why"),
    [
        ("recompute", (20, 1), 99, "recompute", "recompute 20 tokens x 1 ms = 20 ms"),
        ("swap", (20, 50), 50, "swap", "swap 50 blocks out and in = 100 x 1 ms = 100 ms"),
        (
            "swap", (20, 50), 49, "recompute",
            "host memory has room for 49 of its 50 blocks: recompute 20 tokens x 1 ms = 20 ms",
        ),
        (
            "auto", (20, 9), 9, "swap",
            "swap 9 blocks out and in = 18 x 1 ms = 18 ms < recompute 20 tokens x 1 ms = 20 ms",
        ),
        (
            "auto", (20, 9), 0, "recompute",
            "host memory has room for 0 of its 9 blocks: recompute 20 tokens x 1 ms = 20 ms",
        ),
        (
            "auto", (20, 10), 0, "recompute",
            "recompute 20 tokens x 1 ms = 20 ms <= swap 10 blocks out and in = 20 x 1 ms = 20 ms",
        ),
    ],
)  # fmt: skip
def test_the_way_back(
    mode: PreemptionMode, cost: tuple[int, int], room: int, chosen: str, why: str
) -> None:
    memory = FakeMemory(room)
    units = [make_unit(memory, 0, (1, 1)), make_unit(memory, 1, cost)]
    victim = choice(make_policy(memory, mode=mode), units)
    assert victim.mode == chosen
    assert victim.why == f"last come of 1 not served yet; {why}"
    seconds = cost[0] * 1e-3 if chosen == "recompute" else 2 * cost[1] * 1e-3
    assert victim.restore_s == pytest.approx(seconds)


def test_lowest_cost_counts_what_the_mode_and_the_room_make_of_it(memory: FakeMemory) -> None:
    many_tokens, many_blocks = (100, 2), (30, 10)
    units = [
        make_unit(memory, 0, (1, 1)),
        make_unit(memory, 1, many_tokens),
        make_unit(memory, 2, many_blocks),
    ]

    def cheapest(mode: PreemptionMode) -> Unit:
        return choice(make_policy(memory, "lowest-cost", mode), units).sequences

    assert cheapest("recompute") == units[2]
    assert cheapest("swap") == cheapest("auto") == units[1]
    memory.room = 1  # neither can be swapped
    assert cheapest("swap") == cheapest("auto") == units[2]


def test_lowest_cost_looks_at_the_last_few_only(memory: FakeMemory) -> None:
    asked: list[int] = []
    told = memory.restore_cost
    memory.restore_cost = lambda *ids: (asked.extend(ids), told(*ids))[1]  # type: ignore
    units = [make_unit(memory, i, (1000 + i, 5)) for i in range(100)]
    units.append(make_unit(memory, 100, (1, 0)))  # would free nothing
    victim = choice(make_policy(memory, "lowest-cost"), units)
    assert victim.sequences == units[84] and set(asked) == set(range(84, 101))
    assert victim.why.startswith(
        "cheapest to bring back of the last 16 that free any of 100 not served yet; recompute 1084"
    )


@given(
    costs=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), min_size=2, max_size=8),
    priorities=st.lists(st.integers(-3, 3), min_size=8, max_size=8),
    rule=st.sampled_from(["last-come", "lowest-cost", "priority"]),
    mode=st.sampled_from(["recompute", "swap", "auto"]),
    room=st.integers(0, 12),
    data=st.data(),
)
def test_room_is_only_taken_from_those_who_come_later(
    costs: list[tuple[int, int]],
    priorities: list[int],
    rule: PreemptionVictim,
    mode: PreemptionMode,
    room: int,
    data: st.DataObject,
) -> None:
    """So the first in line always advances (I5). A requester gets its room or goes itself."""
    memory = FakeMemory(room)
    units = [make_unit(memory, i, cost, priority=priorities[i]) for i, cost in enumerate(costs)]
    requester = data.draw(st.integers(0, len(units) - 1))
    policy = make_policy(memory, rule, mode)
    running = list(units)
    gone: list[Unit] = []
    while units[requester] not in gone and len(running) > 1:
        victim = policy.choose(units[requester], running, is_alone=False)
        assert victim is not None
        assert (
            victim.mode == "recompute"
            or sum(memory.costs[seq.seq_id].num_blocks for seq in victim.sequences) <= room
        )
        running.remove(victim.sequences)
        gone.append(victim.sequences)
    assert running[: requester + 1] == units[: requester + 1] or (
        running == units[:requester] and gone[-1] == units[requester]
    )
    if requester == 0:
        assert running == units[:1]
