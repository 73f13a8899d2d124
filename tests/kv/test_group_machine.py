"""Groups of layers with windows: random lives of sequences over memories that check them."""

from __future__ import annotations

import pytest
from group_sim import Player


@pytest.mark.parametrize("first_seed", range(0, 60, 15))
def test_groups_read_what_is_theirs_whatever_happens(first_seed: int) -> None:
    given_back = 0
    for seed in range(first_seed, first_seed + 15):
        try:
            given_back += Player(seed).play(40).num_given_back
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert given_back > 100, "nothing was given back: this test shows nothing"


@pytest.mark.parametrize("first_seed", range(0, 24, 12))
def test_groups_and_a_disk_that_loses_blocks(first_seed: int) -> None:
    """Processes end and begin over one disk, which damages and drops blocks: what is read from it
    is what was looked for, or nothing."""
    num_read = 0
    for seed in range(first_seed, first_seed + 12):
        player = Player(seed, has_disk=True)
        try:
            num_read += player.play(40).disk.num_found
        except BaseException as error:
            error.add_note(f"seed {seed}, with a disk")
            raise
    assert num_read > 20, "nothing was read: this test shows nothing"


def test_what_admission_counts_on_is_found_without_the_partial_block() -> None:
    """Seed 5533: the block behind the whole ones cannot be copied for lack of room, and the window
    before it is shorter than that before the whole ones' end, whose blocks are there."""
    Player(5533).play(60)
