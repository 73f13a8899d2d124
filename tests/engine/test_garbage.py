"""What is there before an engine is built is left out of garbage collections; the engine is not."""

from __future__ import annotations

import gc
import weakref

import pytest

from octavo.config import EngineConfig
from octavo.engine import gpu
from octavo.engine.build import build_engine
from octavo.engine.garbage import leave_out_what_is_there, look_at_all_again
from octavo.errors import ModelNotFoundError


class Ring:
    """Refers to itself: only the collector finds it."""

    def __init__(self) -> None:
        self.me = self


def test_older_objects_wait_and_newer_ones_do_not() -> None:
    gc.collect()
    before = gc.get_freeze_count()  # Python 3.12 keeps objects of its own there
    old = Ring()
    leave_out_what_is_there()
    try:
        assert gc.get_freeze_count() > 10_000
        new = Ring()
        seen_old, seen_new = weakref.ref(old), weakref.ref(new)
        del old, new
        gc.collect()
        assert seen_old() is not None and seen_new() is None
    finally:
        look_at_all_again()
    gc.collect()
    assert seen_old() is None and gc.get_freeze_count() < before + 1_000


@pytest.mark.parametrize("young", [0, 700, 10_000])
def test_young_objects_are_looked_at_more_rarely_and_then_as_before(young: int) -> None:
    usual, before = gc.get_threshold(), (young, *gc.get_threshold()[1:])
    try:
        gc.set_threshold(*before)
        for _ in range(2):  # a start that has failed, and one that has not
            leave_out_what_is_there()
        assert gc.get_threshold() == (young and young + 50_000, *before[1:])
        for _ in range(2):  # closed twice
            look_at_all_again()
        assert gc.get_threshold() == before
    finally:
        look_at_all_again()
        gc.set_threshold(*usual)


@pytest.mark.parametrize("young", [10_001, 50_000, 70_000, 100_000])
def test_a_threshold_of_somebodys_own_stays(young: int) -> None:
    usual, before = gc.get_threshold(), (young, *gc.get_threshold()[1:])
    try:
        gc.set_threshold(*before)
        leave_out_what_is_there()
        assert gc.get_threshold() == before
        look_at_all_again()
        assert gc.get_threshold() == before
    finally:
        look_at_all_again()
        gc.set_threshold(*usual)


def test_a_start_that_fails_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def before_loading(device: object) -> None:
        leave_out_what_is_there()

    monkeypatch.setattr(gpu, "for_this_machine", lambda config: config)
    monkeypatch.setattr(gpu, "before_loading", before_loading)
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    with pytest.raises(ModelNotFoundError):
        build_engine(EngineConfig(model="./is-not-there", device="cuda"))
    assert gc.get_threshold() == usual and gc.get_freeze_count() < frozen + 1_000
