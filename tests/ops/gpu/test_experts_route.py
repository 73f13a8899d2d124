"""The kernel that chooses experts, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.arch import MoEConfig
from octavo.layers import experts
from octavo.ops.gpu.experts_route import route

CASES: dict[str, dict[str, Any]] = {
    "normalized": {"normalize": True},
    "as they are": {"normalize": False, "routed_scale": 2.5},
    "sigmoid": {"normalize": True, "scoring": "sigmoid", "routed_scale": 0.5},
    "groups": {"normalize": False, "num_groups": 4, "groups_per_token": 2, "routed_scale": 16.0},
    "one group": {"normalize": True, "num_groups": 6, "groups_per_token": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_against_torch(case: str, device: torch.device) -> None:
    """12 experts, which are no power of 2; rows at a distance; 2 to 3 of them a token."""
    torch.manual_seed(0)
    moe = MoEConfig(12, 2 if case == "one group" else 3, 8, **CASES[case])
    logits = torch.randn((9, 16))[:, :12].to(device)
    ids, weights = route(logits, moe)
    wanted_ids, wanted = experts.route(logits.cpu(), moe)
    assert ids.tolist() == wanted_ids.tolist()
    torch.testing.assert_close(weights.cpu(), wanted, rtol=1e-5, atol=1e-7)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32


def test_bfloat16_and_other_counts(device: torch.device) -> None:
    torch.manual_seed(0)
    for count, top_k in ((1, 1), (8, 2), (128, 8), (160, 6)):
        moe = MoEConfig(count, top_k, 8)
        # a permutation: bfloat16 has no two alike, and the largest decide
        logits = torch.stack([torch.randperm(count) for _ in range(3)]).to(device) / 16
        ids, weights = route(logits.bfloat16(), moe)
        wanted_ids, wanted = experts.route(logits.bfloat16().cpu(), moe)
        assert ids.tolist() == wanted_ids.tolist()
        torch.testing.assert_close(weights.cpu(), wanted, rtol=1e-5, atol=1e-7)


def test_of_equal_scores_the_first(device: torch.device) -> None:
    ids, weights = route(torch.zeros((2, 7), device=device), MoEConfig(7, 3, 8, normalize=True))
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))


def test_those_of_other_groups_count_nothing(device: torch.device) -> None:
    """They are chosen where the kept groups have too few."""
    torch.manual_seed(0)
    moe = MoEConfig(6, 3, 8, num_groups=3, groups_per_token=1)
    logits = torch.randn((5, 6), device=device)
    ids, weights = route(logits, moe)
    torch.testing.assert_close(weights.cpu(), experts.route(logits.cpu(), moe)[1])
    assert all(len(set(chosen)) == 3 for chosen in ids.tolist())


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("groups", [{}, {"num_groups": 3, "groups_per_token": 2}])
@pytest.mark.parametrize("wrong", ["nan", "inf", "-inf"])
def test_experts_are_in_range_whatever_comes(
    wrong: str, groups: dict[str, int], device: torch.device
) -> None:
    """And what is wrong stays so: nothing finite is made of it."""
    logits = torch.randn((3, 6), device=device)
    logits[1] = float(wrong)
    ids, weights = route(logits, MoEConfig(6, 2, 8, normalize=True, **groups))
    assert ((ids >= 0) & (ids < 6)).all()
    assert weights[[0, 2]].isfinite().all() and not weights[1].isfinite().any()


def test_no_tokens_and_wrong_shapes(device: torch.device) -> None:
    moe = MoEConfig(6, 2, 8)
    ids, weights = route(torch.empty((0, 6), device=device), moe)
    assert ids.shape == weights.shape == (0, 2)
    for wrong in (torch.ones((3, 5)), torch.ones((6, 3)).t()):
        with pytest.raises(ValueError, match=r"logits must be dense \[num_tokens, 6\]"):
            route(wrong.to(device), moe)
