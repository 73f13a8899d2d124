"""Errors of a GPU, told apart: those that a later step survives, and those that none does."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from octavo.errors import DeviceLostError


@contextmanager
def device_errors(device: torch.device, owner: object) -> Iterator[None]:
    """Raise `DeviceLostError` in place of an error after which the device does nothing any more.

    Which errors those are the driver knows: it repeats them at the next call. Running out of memory
    is none of them, and passes as it is. owner: holds what there is on the device.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if device.type == "cuda" and not _answers(device):
            _keep_for_ever(owner)
            _keep_for_ever(error)  # its traceback has what a step was making
            raise DeviceLostError(
                f"{device} ({torch.cuda.get_device_name(device)}) failed for good: {error}; "
                "restart the process"
            ) from error
        raise


def _answers(device: torch.device) -> bool:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


def _keep_for_ever(thing: object) -> None:
    """Never let go of an object and all that it holds.

    On a lost device the destructors of graphs, events and pinned memory meet its error again, and
    an exception in a destructor ends the process: with it every request that would still have been
    told why it failed. The process has to be restarted anyway, and takes the memory along.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
