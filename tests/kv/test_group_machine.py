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
