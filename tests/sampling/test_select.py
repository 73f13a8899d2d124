"""The one order of tokens, and the shortcut through block maxima that must not change it."""

from __future__ import annotations

import pytest
import torch

from octavo.sampling.select import argmax, looks_at_all, rung_of, top_candidates


@pytest.mark.parametrize("vocab", [448, 449, 511, 512, 700, 10_017])
@pytest.mark.parametrize("step", [0.001, 0.5, 4.0])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_give_the_same_tokens_in_the_same_order(reference, vocab, step, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = ((torch.randn(3, vocab, generator=generator) * 3) / step).round() * step
    logits[1, -1] = logits[1].max()  # in the part behind the last whole block
    for num in (1, 3):
        assert not looks_at_all(num, vocab)
        for row, ids in zip(logits, top_candidates(logits, num).tolist(), strict=True):
            assert ids == reference.in_order(row.numpy())[:num]


def test_fewer_candidates_are_a_prefix_of_more() -> None:
    logits = (torch.randn(4, 9000, generator=torch.Generator().manual_seed(0)) * 8).round() / 8
    most = top_candidates(logits, 9000)
    assert sorted(most[0].tolist()) == list(range(9000))
    for num in (1, 64, 70, 71, 256, 2048):
        assert torch.equal(top_candidates(logits, num), most[:, :num])
    assert torch.equal(argmax(logits), most[:, 0])


def test_infinities_have_their_place() -> None:
    logits = torch.tensor([[0.0, -torch.inf, 5.0, torch.inf, -torch.inf, -3.0]])
    assert top_candidates(logits, 6).tolist() == [[3, 2, 0, 5, 1, 4]]


def test_rungs() -> None:
    assert [rung_of(k, 50_000) for k in (1, 64, 65, 256, 2048, 2049)] == [
        64, 64, 256, 256, 2048, 50_000,
    ]  # fmt: skip
    assert rung_of(1, 64) == 64 and rung_of(5, 10) == 10
