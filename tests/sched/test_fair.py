"""Fair turns between clients (VTC), and shares of the pool: exact on small examples."""

from __future__ import annotations

import random

import pytest

from octavo.events import EventKind
from octavo.kv import KVCacheManager
from octavo.plan import SeqResult, StepPlan, StepResult
from octavo.request import Request
from octavo.sched import Scheduler
from octavo.sched.clients import INPUT_WEIGHT, OUTPUT_WEIGHT

BLOCK = 4


class Driver:
    """A scheduler whose steps take a second; sequences end by length."""

    def __init__(self, num_blocks: int = 64, *, seats: int = 2, policy: str = "fair") -> None:
        self.kv = KVCacheManager(num_blocks, BLOCK, enable_prefix_caching=True)
        self.scheduler = Scheduler(
            self.kv, max_num_seqs=seats, max_num_batched_tokens=64, max_model_len=64,
            policy=policy, watermark=0.0,  # type: ignore[arg-type]
        )  # fmt: skip
        self.now_s, self.order, self._num = 0.0, [], 0
        self.ended: list[str] = []

    def add(self, client: str, num_input: int = 4, num_output: int = 4, **fields: object) -> str:
        self._num += 1
        name = f"{client}{self._num}"
        ids = [self._num * 1000 + i for i in range(num_input)]
        request = Request(
            request_id=name, prompt_token_ids=ids, max_tokens=num_output, client_id=client,
            arrival_s=self.now_s, **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        self.scheduler.add(request)
        return name

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now_s)
        self.now_s += 1.0
        if plan is None:
            return None
        live = self.scheduler.roster.sequences
        self.order += [live[new.seq_id].group.request.request_id for new in plan.new_seqs]
        drawing = [s.seq_id for s in plan.seqs if s.sample]
        drawing += [seq_id for others in plan.extra_draws.values() for seq_id in others]
        sampled = [SeqResult(seq_id, -1 - seq_id, None) for seq_id in drawing]
        for update in self.scheduler.update(StepResult(plan.step_id, sampled), self.now_s):
            if update.finish_reason is not None:
                self.ended.append(update.request_id)
        self.kv.check_integrity()
        return plan

    def drain(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.has_unfinished():
                return
            self.step()
        raise AssertionError("no end in sight")

    def service(self) -> dict[str, float]:
        return self.scheduler.roster.clients.service()


def test_clients_take_turns_however_many_requests_one_sends() -> None:
    one = Driver(seats=1)
    for _ in range(6):
        one.add("a")
    for _ in range(3):
        one.add("b")
    one.drain()
    # each costs 4 + 2 x 4 = 12: whoever has got less is next, and on a tie who came first
    assert [name[0] for name in one.order] == ["a", "b", "a", "b", "a", "b", "a", "a", "a"]
    assert one.service() == {"a": 6 * 12.0, "b": 3 * 12.0}
    fcfs = Driver(seats=1, policy="fcfs")
    for client in "aaaaaabbb":
        fcfs.add(client)
    fcfs.drain()
    assert "".join(name[0] for name in fcfs.order) == "aaaaaabbb"


def test_who_comes_back_is_lifted_and_does_not_catch_up() -> None:
    one = Driver(seats=1)
    for _ in range(4):
        one.add("a")
    while len(one.ended) < 2:
        one.step()
    for _ in range(4):
        one.add("b")  # a has got 24 or more by now: b counts as having got as much
    one.drain()
    later = "".join(name[0] for name in one.order[2:])
    assert sorted(later[:4]) == ["a", "a", "b", "b"], f"they take turns from then on: {later}"
    assert one.service()["b"] == 4 * 12.0, "lifting is no service"


def test_cached_prompt_tokens_are_free_and_output_counts_twice() -> None:
    one = Driver()
    one.add("a", num_input=9, num_output=3)
    one.drain()
    assert one.service()["a"] == INPUT_WEIGHT * 9 + OUTPUT_WEIGHT * 3
    again = [1000 + i for i in range(9)]
    one.scheduler.add(
        Request(request_id="again", prompt_token_ids=again, max_tokens=3, client_id="b")
    )
    one.drain()
    assert one.service()["b"] == INPUT_WEIGHT * 1 + OUTPUT_WEIGHT * 3, "two blocks were found"


def test_recomputing_after_a_preemption_is_not_charged_again() -> None:
    one = Driver(num_blocks=9, seats=4)
    one.kv.reset_prefix_cache()
    for client in "abc":
        one.add(client, num_input=8, num_output=8)
    one.drain()
    assert one.scheduler.num_preemptions > 0
    assert one.service() == dict.fromkeys("abc", 8 + 2 * 8.0)


def test_the_difference_stays_within_the_papers_bound() -> None:
    """Two backlogged clients, one of which sends ten times as much in requests of other sizes:
    accumulated service differs by at most 2 max(w_p L_input, w_q M) (theorem 4.4), where M is what
    fits the pool."""
    rng = random.Random(5)

    def run(policy: str) -> float:
        one = Driver(num_blocks=32, seats=8, policy=policy)
        for number in range(330):
            client = "b" if number % 11 == 10 else "a"
            one.add(client, rng.randint(2, 12), rng.randint(2, 20))
        worst = 0.0
        waiting = {"a", "b"}
        while len(waiting) == 2:
            one.step()
            service = one.service()
            worst = max(worst, abs(service.get("a", 0.0) - service.get("b", 0.0)))
            waiting = {seq.group.request.client_id for seq in one.scheduler.roster.waiting}
        one.drain()
        return worst

    bound = 2 * max(INPUT_WEIGHT * 12, OUTPUT_WEIGHT * 32 * BLOCK)
    assert run("fair") <= bound
    assert run("fcfs") > bound, "first come first served keeps no bound"


def test_nobody_starves_and_preempted_ones_come_back_first() -> None:
    one = Driver(num_blocks=12, seats=6)
    rng = random.Random(1)
    for _ in range(300):
        if rng.random() < 0.4:
            one.add(rng.choice("abcde"), rng.randint(1, 12), rng.randint(1, 16))
        one.step()
    one.drain()
    assert one.scheduler.num_preemptions > 0
    assert len(one.ended) == len(set(one.order)) == one._num
    assert one.kv.num_free_blocks == 12


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_a_client_over_its_share_is_passed(policy: str) -> None:
    one = Driver(num_blocks=16, seats=8, policy=policy)
    for _ in range(3):
        one.add("a", num_input=8, num_output=4, max_kv_share=0.2)
    other = one.add("b", num_input=8, num_output=4, max_kv_share=0.5)
    one.step()
    assert set(one.order) == {"a1", other}
    assert one.scheduler.roster.clients.blocks()["a"] >= 2
    (event,) = one.scheduler.events("a2")
    assert event.kind is EventKind.WAITED and event.until_s is None
    assert "client a holds 2 blocks, it needs 2 more, and 20% of the 16 are 3" in event.why
    one.drain()
    assert one.order[2:] == ["a2", "a3"]
    assert one.scheduler.events("a2")[0].until_s is not None


def test_who_holds_nothing_may_come_in_whatever_it_needs() -> None:
    one = Driver(num_blocks=16)
    one.add("a", num_input=40, num_output=4, max_kv_share=0.1)
    one.add("a", num_input=4, num_output=4, max_kv_share=0.1)
    one.drain()
    assert one.ended == ["a1", "a2"]


def test_samples_of_one_request_do_not_wait_for_each_other() -> None:
    one = Driver(num_blocks=16, seats=2)
    one.add("a", num_input=8, num_output=6, n=4, max_kv_share=0.2)
    one.add("a", num_input=4, num_output=4, max_kv_share=0.2)
    one.drain()
    assert one.ended.count("a1") == 4 and "a2" in one.ended


def test_many_samples_of_one_request_do_not_pass_others() -> None:
    one = Driver(num_blocks=64, seats=2)
    one.add("a", num_input=4, num_output=8, n=30)
    one.step()
    one.add("b", num_input=4, num_output=4)
    while "b2" not in one.ended:
        one.step()
    assert one.service()["a"] < 8 * 2 * 8, "b was served after a few of a's samples, not all"
    one.drain()
    assert one.ended.count("a1") == 30


def test_the_reason_of_waiting_is_the_one_of_now() -> None:
    one = Driver(num_blocks=16, seats=2)
    one.add("a", num_input=8, num_output=4, max_kv_share=0.2)
    one.add("a", num_input=8, num_output=4, max_kv_share=0.2)
    one.step()
    assert "client a holds" in one.scheduler.events("a2")[0].why
    for _ in range(2):
        one.add("b", num_input=4, num_output=12)
    while "a1" not in one.ended:
        one.step()
    one.step()
    (event,) = one.scheduler.events("a2")
    assert event.until_s is not None or "client a holds" not in event.why
    one.drain()


def test_thousands_of_idle_clients_are_forgotten() -> None:
    one = Driver(num_blocks=64, seats=8)
    for number in range(5000):
        one.add(f"c{number}-", num_input=1, num_output=1)
        if number % 8 == 7:
            one.step()
    one.drain()
    assert len(one.service()) <= 2 * 1024 + 256


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_queue_by_clients_keeps_the_order_of_the_policy(policy: str) -> None:
    rng = random.Random(3)
    plain, shared = (Driver(num_blocks=24, seats=3, policy=policy) for _ in range(2))
    for _ in range(60):
        client, num_input, num_output = rng.choice("abc"), rng.randint(1, 9), rng.randint(1, 9)
        rank = rng.randrange(3)
        plain.add(client, num_input, num_output, priority=rank)
        shared.add(client, num_input, num_output, priority=rank, max_kv_share=1.0)
        if rng.random() < 0.5:
            plain.step()
            shared.step()
    plain.drain()
    shared.drain()
    assert plain.order == shared.order
    assert plain.ended == shared.ended
