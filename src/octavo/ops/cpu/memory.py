"""Hints to the operating system about large tensors."""

from __future__ import annotations

import ctypes
import mmap

from torch import Tensor

_HUGE_PAGE = 2 << 20


def use_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages behind a large CPU tensor that has not been written yet.

    A paged cache is read in pieces of a few KiB all over the pool: with 4 KiB pages almost every
    piece costs a walk through the page tables. A hint: where it is not understood, nothing happens.
    """
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    start = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    end = tensor.data_ptr() + tensor.numel() * tensor.element_size()
    length = (end - start) // _HUGE_PAGE * _HUGE_PAGE
    if advice is not None and length > 0:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), ctypes.c_int(advice))
