"""What is there before an engine is built is left out of garbage collections; the engine is not."""

from __future__ import annotations

import gc
import weakref

from octavo.engine.garbage import leave_out_what_is_there, look_at_all_again


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
