"""Keeps Python's garbage collector out of the steps.

A full collection looks at every object there is, and torch, triton and transformers bring 200,000:
140 ms each time, every few dozen steps when a thousand sequences run, while the GPU runs dry. So
what is there before an engine is built is left out of collections while one is open on a GPU; what
the engine makes, and what is made later, is collected as always, but more rarely: a step of a
thousand sequences makes thousands of small objects, nearly all of which are gone with the next one,
and looking for cycles among every 700 of them took a fifth of the host's time.
"""

from __future__ import annotations

import gc

_MORE = 50_000
"""So many more new objects than before have to be there until they are looked at."""
_USUAL = 10_000
"""A larger threshold is somebody's own choice, and stays."""


def leave_out_what_is_there() -> None:
    """Collect once more, then look at newer objects only, and more rarely. To be called before
    weights are loaded: an engine that nobody closes must be found. Twice is once."""
    gc.collect()
    gc.freeze()
    young, *old = gc.get_threshold()
    if 0 < young <= _USUAL:  # 0: somebody has turned the collector off
        gc.set_threshold(young + _MORE, *old)


def look_at_all_again() -> None:
    """Undo it, when an engine is closed or cannot start; others that are open lose nothing but
    time."""
    gc.unfreeze()
    young, *old = gc.get_threshold()
    if _MORE < young <= _MORE + _USUAL:
        gc.set_threshold(young - _MORE, *old)
