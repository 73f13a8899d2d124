"""The leak check: real leaks are made by hand, named with the right numbers, and mended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.input import InputProcessor
from octavo.engine.remote.leaks import LeakCheck
from octavo.events import EventKind
from octavo.kv.leaks import find_leaks
from octavo.request import SamplingParams

ROOT = Path(__file__).parents[3]
NUM_BLOCKS = 64


class Bench:
    """An engine core over a device that takes no time, and its leak check."""

    def __init__(self, path: Path, **options: object) -> None:
        from null_engine import build

        config = EngineConfig(
            model=str(path),
            load_format="dummy",
            num_gpu_blocks_override=NUM_BLOCKS,
            swap_space=0,
            **options,  # type: ignore[arg-type]
        )
        built = build(config)
        self.core: EngineCore = built.engine.core
        self.inputs: InputProcessor = built.engine.inputs
        self.check = LeakCheck(self.core)

    def add(self, request_id: str, num_prompt: int = 40, max_tokens: int = 9, n: int = 1) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, n=n)
        prompt = [(7 * i + len(request_id)) % 250 for i in range(num_prompt)]
        request, _ = self.inputs.process(request_id, prompt, params)
        self.core.add_request(request)

    def run(self) -> None:
        """Until nothing runs, and nobody waits."""
        while self.core.scheduler.num_running or self.core.scheduler.num_waiting:
            for update in self.core.step():
                request_id = update.request_id
                if not self.core.scheduler.seq_ids(request_id):
                    self.core.forget(request_id)

    def told(self) -> list[tuple[str | None, str]]:
        """What one check told."""
        num = len(self.core.events())
        self.check.expect_quiet()
        self.check._not_before_s = 0.0  # as if enough time had gone by
        self.check.look()
        events = self.core.events()[num:]
        assert all(event.kind is EventKind.LEAK for event in events)
        return [(event.request_id, event.why) for event in events]

    def assert_whole(self) -> None:
        """Everything is there again, and the engine serves."""
        assert find_leaks(self.core.kv) == []
        assert self.core.kv.ledger().num_physical_blocks == 0
        assert self.core.kv.num_free_blocks == NUM_BLOCKS
        self.core.kv.check_integrity()
        self.add("after", num_prompt=NUM_BLOCKS * 16 - 20)  # it needs every block
        self.run()
        assert self.told() == []


@pytest.fixture
def bench(tiny_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield Bench(tiny_model_path)
    sys.modules.pop("null_engine", None)


@pytest.mark.parametrize("policy", ["paged", "contiguous", "orca-max", "orca-pow2"])
def test_nothing_is_said_when_nothing_leaks(
    bench: Bench, tiny_model_path: Path, policy: str
) -> None:
    other = Bench(tiny_model_path, kv_policy=policy, max_model_len=200)
    for i in range(5):
        other.add(f"r{i}", n=1 + i % 2)
    other.run()
    assert other.told() == []


def test_a_sequence_that_the_roster_lost(bench: Bench) -> None:
    bench.add("lost", num_prompt=40, max_tokens=30)
    bench.add("other", max_tokens=20)
    for _ in range(9):
        bench.core.step()
    roster = bench.core.scheduler.roster
    lost = next(s for s in roster.running if s.group.request.request_id == "lost")
    roster.running.remove(lost)  # nobody plans it any more, and nobody gives its blocks back
    bench.run()
    assert len(bench.core.kv.block_table(lost.seq_id)) == 3  # 40 prompt tokens and 8 of its own
    told = bench.told()
    assert told[0] == ("lost", "request lost neither runs nor waits, and never ended; given back")
    assert told[1:] == [
        (
            "lost",
            f"sequence {lost.seq_id} of request lost still holds 3 blocks; given back",
        )
    ]
    bench.assert_whole()
    bench.add("lost")  # its id may come again
    bench.run()


def test_a_count_that_is_too_high(bench: Bench) -> None:
    bench.add("a")
    bench.run()
    kv = bench.core.kv
    block_id = next(i for i in range(NUM_BLOCKS) if kv.pool.is_free(i))
    kv.pool.take((block_id,))
    assert bench.told() == [
        (None, f"block {block_id} counts 1 owners, and tables and pins name 0; given back")
    ]
    bench.assert_whole()


def test_an_account_and_a_record_that_were_kept(bench: Bench) -> None:
    bench.add("kept")
    while bench.core.has_unfinished():
        bench.core.step()  # and nobody forgets it
    assert bench.told() == [
        ("kept", "request kept neither runs nor waits, and never ended; given back")
    ]
    bench.assert_whole()


def test_pins_are_no_leak(bench: Bench) -> None:
    bench.add("a", num_prompt=64)
    bench.run()
    pin = bench.core.pin([(7 * i + 1) % 250 for i in range(64)])
    assert pin.num_tokens == 64
    assert bench.told() == []
    bench.core.unpin(pin.pin_id)
    bench.assert_whole()


def test_once_for_each_idle_time(bench: Bench) -> None:
    bench.check.expect_quiet()
    bench.check.look()
    bench.core.kv.pool.take((5,))
    bench.check.look()
    assert bench.core.events() == [], "it was looked at already, and nothing has run since"
    assert len(bench.told()) == 1
