"""The waiting line: order, removal, no growth from what was removed."""

from __future__ import annotations

import random

from sched_support import make_request

from octavo.outputs import RequestMetrics
from octavo.sched.queues import WaitingQueue, place_in_line
from octavo.sched.sequence import RequestStats, Sequence, SequenceGroup


def make_seq(seq_id: int, place: tuple[int, int, int]) -> Sequence:
    group = SequenceGroup(make_request(str(seq_id), 1), 2, RequestStats(RequestMetrics()))
    return Sequence(seq_id, group, 0, place, [0])


def test_places() -> None:
    request = make_request("a", 1, priority=-3)
    assert place_in_line("fcfs", request, 7, 2) == (0, 7, 2)
    assert place_in_line("priority", request, 7, 2) == (-3, 7, 2)


def test_order_is_by_place_whatever_the_order_of_pushing() -> None:
    rng = random.Random(0)
    seqs = [make_seq(i, (rng.randrange(3), i, 0)) for i in range(200)]
    queue = WaitingQueue()
    for seq in rng.sample(seqs, len(seqs)):
        queue.push(seq)
    expected = sorted(seqs, key=lambda seq: seq.place)
    assert list(queue) == expected
    assert [queue.pop() for _ in range(len(queue))] == expected
    assert queue.head() is None


def test_a_removed_sequence_never_comes_out() -> None:
    queue = WaitingQueue()
    seqs = [make_seq(i, (0, i, 0)) for i in range(4)]
    for seq in seqs:
        queue.push(seq)
    queue.discard(seqs[0])
    queue.discard(seqs[2])
    assert len(queue) == 2
    assert list(queue) == [seqs[1], seqs[3]]
    assert queue.head() is seqs[1]
    assert [queue.pop(), queue.pop()] == [seqs[1], seqs[3]]


def test_a_preempted_sequence_comes_back_to_its_place() -> None:
    queue = WaitingQueue()
    seqs = [make_seq(i, (0, i, 0)) for i in range(3)]
    for seq in seqs:
        queue.push(seq)
    first = queue.pop()
    queue.push(first)
    assert queue.pop() is first


def test_removed_entries_do_not_pile_up() -> None:
    queue = WaitingQueue()
    queue.push(make_seq(0, (0, 0, 0)))
    for i in range(1, 2000):
        seq = make_seq(i, (0, i, 0))
        queue.push(seq)
        queue.discard(seq)
    assert len(queue) == 1
    assert len(queue._heap) < 40
