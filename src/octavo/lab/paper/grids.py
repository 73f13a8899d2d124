"""The rates at which the paper measured: between them its curves are straight lines, and a rate at
which one crosses a threshold is where that line does.

They are those of the paper's points where these are known, else of the artifact's scripts, which
measure for 10 minutes what the paper measured for an hour.
"""

from __future__ import annotations

from collections.abc import Mapping

from octavo.config import KVPolicy

Grid = tuple[float, ...]
_POLICIES: tuple[KVPolicy, ...] = ("contiguous", "orca-max", "orca-pow2", "orca-oracle", "paged")


def _of(*grids: Grid) -> Mapping[KVPolicy, Grid]:
    return dict(zip(_POLICIES[-len(grids) :], grids, strict=True))


FIG12_GRIDS: Mapping[tuple[str, str], Mapping[KVPolicy, Grid]] = {
    ("13b", "sharegpt"): _of(
        (0.01, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35),
        (0.2, 0.3, 0.4, 0.5, 0.75),
        (0.25, 0.5, 0.6, 0.75, 0.9),
        (0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5),
        (1.0, 1.25, 1.5, 1.75, 1.8, 1.9, 2.0),
    ),
    ("66b", "sharegpt"): _of(
        (0.01, 0.05, 0.08, 0.1, 0.12, 0.15, 0.2),
        (0.1, 0.2, 0.3),
        (0.1, 0.2, 0.25, 0.35),
        (0.2, 0.3, 0.4, 0.5),
        (0.4, 0.6, 0.8, 0.9, 1.0),
    ),
    ("175b", "sharegpt"): _of(
        (0.01, 0.05, 0.1, 0.15, 0.2, 0.3),
        (0.25, 0.5, 0.75, 1.0, 1.25),
        (0.5, 0.75, 1.0, 1.25, 1.5),
        (0.8, 1.0, 1.2, 1.4, 1.6, 1.8),
        (1.5, 1.75, 2.0, 2.25, 2.5, 3.0),
    ),
    ("13b", "alpaca"): _of(
        (0.1, 0.5, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0),
        (2.0, 3.0, 4.0, 5.0),
        (7.5, 10.0, 12.5, 15.0, 16.0, 17.0, 18.0),
        (15.0, 17.5, 20.0, 21.0, 22.5, 24.0),
        (20.0, 22.5, 25.0, 27.5, 28.0, 29.0, 31.5),
    ),
    ("66b", "alpaca"): _of(
        (0.1, 0.5, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5),
        (0.25, 0.5, 1.0, 1.25, 1.5, 2.0),
        (3.0, 5.0, 6.0, 7.0),
        (6.0, 8.0, 10.0, 11.0, 12.0),
        (11.0, 13.0, 15.0, 17.5, 18.5, 19.0, 20.0),
    ),
    ("175b", "alpaca"): _of(
        (0.1, 0.5, 1.0, 1.5, 2.0, 5.0),
        (1.25, 2.5, 4.0, 5.0, 7.0),
        (10.0, 15.0, 16.0, 17.0, 19.0),
        (15.0, 17.5, 19.0, 20.0, 22.0),
        (15.0, 17.5, 19.0, 20.0, 22.0),
    ),
}
"""By model and data set. Orca (Max) with 66B and Alpaca: not from the script, whose rates end far
below the paper's 1.252."""

_LOW = (0.1, 0.25, 0.5, 0.75, 1.0)
FIG14_GRIDS: Mapping[tuple[str, int], Mapping[KVPolicy, Grid]] = {
    ("parallel", 2): _of(
        (1.0, 1.5, 2.0, 2.5),
        (6.0, 7.0, 8.0, 9.0, 10.0, 12.0),
        (10.0, 11.0, 12.0, 13.0, 14.0),
        (12.5, 15.0, 18.0, 19.0, 20.0),
    ),
    ("parallel", 4): _of(
        _LOW,
        (2.0, 3.0, 4.0, 5.0, 6.0),
        (4.0, 5.0, 6.0, 7.0, 8.0, 9.0),
        (6.0, 8.0, 10.0, 11.0, 12.0),
    ),
    ("parallel", 6): _of(
        _LOW,
        (1.0, 2.0, 2.5, 3.0, 4.0, 4.5),
        (2.0, 3.0, 4.0, 5.0, 6.0),
        (4.0, 5.0, 6.0, 7.0, 8.0, 9.0),
    ),
    ("beam", 2): _of(
        (0.5, 1.0, 1.25, 1.5, 2.0),
        (3.0, 5.0, 6.0, 7.0, 8.0, 9.0),
        (6.0, 8.0, 9.0, 10.0, 11.0),
        (10.0, 12.5, 15.0, 16.0, 17.5, 19.0),
    ),
    ("beam", 4): _of(
        _LOW,
        (1.0, 2.0, 3.0, 3.5, 4.0, 4.5),
        (3.0, 4.0, 4.5, 5.0, 6.0),
        (6.0, 8.0, 9.0, 10.0, 11.0),
    ),
    ("beam", 6): _of(
        _LOW,
        (0.5, 1.5, 2.0, 2.5, 3.0),
        (1.0, 2.0, 3.0, 3.5, 4.0, 4.5),
        (4.0, 6.0, 6.5, 7.0, 8.0, 8.5),
    ),
}

_CHAT = (0.10, 0.20, 0.30, 0.40, 0.50, 0.55, 0.60, 0.70, 0.80, 0.85, 0.90, 0.95, 1.00, 1.10)
FIG17_GRIDS: Mapping[KVPolicy, Grid] = _of(_CHAT, _CHAT, _CHAT, _CHAT)

FIG16_GRIDS: Mapping[int, Mapping[KVPolicy, Grid]] = {
    80: _of((24.0, 26.0, 28.0, 29.0, 30.0, 31.0, 32.0), (44.0, 48.0, 50.0, 52.0)),
    341: _of((4.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0), (36.0, 40.0, 44.0, 48.0)),
}
"""By tokens of the prefix. Of paged only the ends, 1-52 and 1-48, are known."""
