"""Keeps Python's garbage collector out of the steps.

A full collection looks at every object there is, and torch, triton and transformers bring 200,000:
140 ms each time, every few dozen steps when a thousand sequences run, while the GPU runs dry. So
what is there before an engine is built is left out of collections while one is open on a GPU; what
the engine makes, and what is made later, is collected as always.
"""

from __future__ import annotations

import gc


def leave_out_what_is_there() -> None:
    """Collect once more, then look at newer objects only. To be called before weights are loaded:
    an engine that nobody closes must be found."""
    gc.collect()
    gc.freeze()


def look_at_all_again() -> None:
    """Undo it, when an engine is closed; others that are open lose nothing but time."""
    gc.unfreeze()
