"""Pinned memory between host and device, a few buffers in turn, so that nobody waits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_BUFFERS = 3
"""Two steps may be under way while a third is made."""


class Staging:
    """A ring of int32 host buffers, pinned where the device is a GPU.

    `next` hands out the oldest one, once the copy that was last told to `sent` is over.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self._buffers = [
            torch.zeros(num_words, dtype=torch.int32, pin_memory=self.on_gpu)
            for _ in range(NUM_BUFFERS)
        ]
        self._arrays: list[NDArray[np.int32]] = [buffer.numpy() for buffer in self._buffers]
        self._events = [torch.cuda.Event() if self.on_gpu else None for _ in range(NUM_BUFFERS)]
        self._turn = 0

    def views(self, num_words: int) -> list[Tensor]:
        """The first words of each buffer, by turn."""
        return [buffer[:num_words] for buffer in self._buffers]

    def next(self) -> tuple[int, NDArray[np.int32]]:
        """(Turn, the buffer as an array) of one that is free."""
        self._turn = (self._turn + 1) % NUM_BUFFERS
        event = self._events[self._turn]
        if event is not None:
            event.synchronize()  # an event that was never recorded is over
        return self._turn, self._arrays[self._turn]

    def sent(self) -> None:
        """The copy out of the buffer that `next` gave last is queued."""
        event = self._events[self._turn]
        if event is not None:
            event.record()
