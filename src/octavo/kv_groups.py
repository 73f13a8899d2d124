"""Which layers share a block: groups of layers whose K and V are needed for equally long.

A layer with a sliding window never reads what lies behind the window, so its blocks can be given
back while a sequence runs; a layer with full attention keeps all. Layers are divided into groups of
equally many, all of one window, so that a block has the same bytes whichever group uses it and one
pool serves them all. (vLLM's hybrid KV cache manager does the same.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.arch import ModelArch
from octavo.util import cdiv

_MOST_PADDING = 1 / 8
"""Share of the layers by which groups may be filled up, so that there are fewer of them."""
_MOST_FULL_PADDING = 1 / 16
"""The same of the layers that keep everything: in a long context that is most of the memory."""


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers whose KV lies in the same blocks."""

    layers: tuple[int, ...]
    """Their numbers in the model, in the order in which a block holds them."""
    window: int
    """Tokens that they look back, the current one included; 0: all. What lies behind is given
    back."""


@dataclass(frozen=True, slots=True)
class KVGroups:
    """All layers of a model, each in one group."""

    groups: tuple[KVGroup, ...]
    """A group of full attention comes first, where there is one."""
    layers_per_block: int
    """Layers that a block has room for; a group has so many, or fewer (padding)."""

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each group; 0: full."""
        return tuple(group.window for group in self.groups)

    @property
    def num_padding(self) -> int:
        """Layers that blocks have room for, and the model does not have."""
        used = sum(len(group.layers) for group in self.groups)
        return len(self.groups) * self.layers_per_block - used

    @property
    def gives_back(self) -> bool:
        """Whether there is a window."""
        return any(self.windows)

    def places(self) -> dict[int, tuple[int, int]]:
        """Layer -> (its group, its place in a block)."""
        return {
            layer: (number, place)
            for number, group in enumerate(self.groups)
            for place, layer in enumerate(group.layers)
        }


def one_group(arch: ModelArch) -> KVGroups:
    """All layers in one group that keeps everything."""
    return KVGroups((KVGroup(tuple(range(arch.num_layers)), 0),), arch.num_layers)


def kv_groups(arch: ModelArch, max_model_len: int) -> KVGroups:
    """The groups of a model, for sequences of at most `max_model_len` tokens."""
    return groups_of_windows([arch.window(i) for i in range(arch.num_layers)], max_model_len)


def groups_of_windows(windows: Sequence[int], max_model_len: int) -> KVGroups:
    """The groups of layers that look back so many tokens each (0: all), for sequences of at most
    `max_model_len` tokens: a window that none of them outgrows is none.

    Of the numbers of layers a block can have, the one that makes the fewest groups while padding
    takes little: fewer groups mean fewer blocks to hand out.
    """
    by_window: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window if window < max_model_len else 0, []).append(layer)
    counts = [len(layers) for layers in by_window.values()]
    full = [len(by_window.get(0, ()))]
    size = min(
        (
            size
            for size in range(1, max(counts) + 1)
            if _padding(counts, size) <= _MOST_PADDING
            and _padding(full, size) <= _MOST_FULL_PADDING
        ),
        key=lambda size: (_num_groups(counts, size), size),
    )
    groups = [
        KVGroup(tuple(layers[first : first + size]), window)
        for window, layers in sorted(by_window.items())
        for first in range(0, len(layers), size)
    ]
    return KVGroups(tuple(groups), size)


def _num_groups(counts: Iterable[int], size: int) -> int:
    return sum(cdiv(count, size) for count in counts)


def _padding(counts: list[int], size: int) -> float:
    """Share of layers by which they are filled up."""
    return _num_groups(counts, size) * size / max(1, sum(counts)) - 1
