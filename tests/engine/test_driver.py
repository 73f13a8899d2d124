"""Who gets which output, when several wait for one engine in one thread."""

from __future__ import annotations

import pytest

from octavo.engine.driver import Driver
from octavo.errors import StepFailedError
from octavo.outputs import OutputKind, RequestOutput


class FakeEngine:
    """Ends requests as a script says: by step, the ids that end, or an error."""

    def __init__(self, *script: list[str] | Exception) -> None:
        self.script = list(script)
        self.live: set[str] = set()
        self.has_calls = 0

    def add(self, request_id, prompt, params, *, priority, client_id, kind) -> None:
        self.live.add(request_id)

    def has(self, request_id: str) -> bool:
        self.has_calls += 1
        return request_id in self.live

    def check_open(self) -> None:
        pass

    def abort(self, request_id: str) -> bool:
        self.live.discard(request_id)
        return True

    def step(self) -> list[RequestOutput]:
        ended = self.script.pop(0)
        if isinstance(ended, Exception):
            self.live -= set(ended.request_ids)
            raise ended
        self.live -= set(ended)
        return [RequestOutput(i, None, [1], None, [], True) for i in ended]


def add(driver: Driver, num: int, kind=OutputKind.FINAL_ONLY) -> list[str]:
    return [driver.add([1], None, kind) for _ in range(num)]


def test_outputs_come_in_the_order_asked_for() -> None:
    engine = FakeEngine([], ["2"], ["0", "3"], [], ["1"])
    driver = Driver(engine)
    ids = add(driver, 4)
    assert [o.request_id for o in driver.run_to_end(ids, use_tqdm=False)] == ids
    assert engine.script == []
    driver.forget(ids)
    assert len(driver) == 0


def test_a_step_looks_at_its_news_and_not_at_all_who_wait() -> None:
    engine = FakeEngine(*[[]] * 20, [str(i) for i in range(500)])
    driver = Driver(engine)
    driver.run_to_end(add(driver, 500), use_tqdm=False)
    assert engine.has_calls == 21


def test_somebody_else_steps_in_between() -> None:
    """The callback runs a request of its own, and its steps end others that wait."""
    engine = FakeEngine([], ["1", "0"], ["3"], ["2"])
    driver = Driver(engine)
    ids = add(driver, 3)
    inner: list[RequestOutput] = []

    def callback() -> None:
        driver.after_step = None
        own = add(driver, 1)
        inner.extend(driver.run_to_end(own, use_tqdm=False))
        driver.forget(own)

    driver.after_step = callback
    assert [o.request_id for o in driver.run_to_end(ids, use_tqdm=False)] == ids
    assert [o.request_id for o in inner] == ["3"]


def test_mail_that_came_before_anybody_waited() -> None:
    engine = FakeEngine(["0", "1"])
    driver = Driver(engine)
    first, second = add(driver, 2)
    assert driver.next_output(second).request_id == second
    [output] = driver.run_to_end([first], use_tqdm=False)
    assert output.request_id == first


@pytest.mark.parametrize("hit", ["0", "2"])
def test_a_failed_step_is_told_at_once_to_those_it_hit(hit) -> None:
    engine = FakeEngine(["1"], StepFailedError("broken", request_ids=[hit]))
    driver = Driver(engine)
    with pytest.raises(StepFailedError, match="broken"):
        driver.run_to_end(add(driver, 3), use_tqdm=False)


def test_a_failed_step_of_others_is_not() -> None:
    engine = FakeEngine(["1"], StepFailedError("broken", request_ids=["2"]), ["0"])
    driver = Driver(engine)
    ids = add(driver, 3)
    outputs = driver.run_to_end(ids[:2], use_tqdm=False)
    assert [output.request_id for output in outputs] == ["0", "1"]
    with pytest.raises(StepFailedError, match="broken"):
        driver.next_output("2")


def test_a_request_that_is_gone() -> None:
    engine = FakeEngine(["0"], [])
    driver = Driver(engine)
    ids = add(driver, 2)
    engine.live.discard("1")
    with pytest.raises(StepFailedError, match="request 1 was aborted"):
        driver.run_to_end(ids, use_tqdm=False)
