"""How many blocks a sequence can come to need, where some layers look back a window only."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.util import cdiv


@dataclass(frozen=True, slots=True)
class BlockNeeds:
    """The arithmetic of one model's layer groups (`octavo.kv_groups`)."""

    block_size: int
    windows: tuple[int, ...] = (0,)
    """By group; 0: its blocks are kept."""
    max_chunk_tokens: int = 1
    """Most tokens that a sequence computes in a step: while it does, a window group holds these and
    the window before the first of them."""

    def of_window(self, window: int, num_tokens: int) -> int:
        """Most blocks that a group of this window holds of a sequence at any time, until it has
        `num_tokens` tokens."""
        num_blocks = cdiv(num_tokens, self.block_size)
        if not window:
            return num_blocks
        # So many positions in a row touch at most this many blocks, wherever they begin.
        span = window - 1 + self.max_chunk_tokens
        return min(num_blocks, cdiv(span - 1, self.block_size) + 1)

    def blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds, over all groups, until it has `num_tokens` tokens."""
        if self.windows == (0,):
            return cdiv(num_tokens, self.block_size)
        return sum(self.of_window(window, num_tokens) for window in self.windows)

    def forks(self, num_shared: int, num_tokens: int) -> tuple[int, int]:
        """See `AllocationPolicy.num_needed_by_forks`. What one of them computes again in a chunk is
        counted for all, where there is a window: it may be any of them."""
        num_full = num_shared // self.block_size
        num_own = cdiv(num_tokens, self.block_size) - num_full
        if self.windows == (0,):
            return num_full, num_own
        kept = [self.of_window(window, num_tokens) for window in self.windows]
        return sum(min(num_full, num) for num in kept), sum(min(num_own, num) for num in kept)

    def of_all(self, num_seqs: int, num_tokens: int) -> int:
        """Blocks that so many sequences of so many tokens can use at one time: of a step's tokens,
        which they share, each window group holds one chunk besides the windows."""
        if not any(self.windows):
            return num_seqs * self.blocks(num_tokens)
        one_token = BlockNeeds(self.block_size, self.windows)
        num_chunks = len(self.windows) - self.windows.count(0)
        extra = num_chunks * (cdiv(self.max_chunk_tokens, self.block_size) + num_seqs)
        return min(
            num_seqs * self.blocks(num_tokens), num_seqs * one_token.blocks(num_tokens) + extra
        )

    def most_seqs(self, num_blocks: int, num_tokens: int) -> int:
        """How many sequences of so many tokens such a pool has room for at one time."""
        sizes = range(1, num_blocks + 1)
        return bisect_left(sizes, True, key=lambda num: self.of_all(num, num_tokens) > num_blocks)

    def most_tokens(self, num_blocks: int) -> int:
        """Longest sequence that never needs more than so many blocks; `sys.maxsize` where any
        length will do."""
        size = self.block_size
        if not any(self.windows):
            return num_blocks // len(self.windows) * size
        most_kept = max(self.of_window(window, sys.maxsize) for window in self.windows if window)
        if self.blocks(most_kept * size) <= num_blocks:
            if all(self.windows):
                return sys.maxsize
            num_full = self.windows.count(0)
            return (num_blocks - self._of_windows(most_kept * size)) // num_full * size
        low, high = 0, most_kept  # in blocks of tokens: fits, does not fit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self.blocks(middle * size) <= num_blocks else (low, middle)
            )
        return low * size

    def _of_windows(self, num_tokens: int) -> int:
        return sum(self.of_window(window, num_tokens) for window in self.windows if window)


def num_behind(num_tokens: int, window: int, block_size: int) -> int:
    """The first blocks of a sequence that nobody needs who computes from position `num_tokens` on:
    all their positions are before the window of that token. window 0: none."""
    return max(0, num_tokens - window + 1) // block_size if window else 0


def is_plain(windows: Sequence[int]) -> bool:
    """Whether there is one group, which keeps everything."""
    return len(windows) == 1 and not windows[0]
