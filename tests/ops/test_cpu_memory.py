"""Where packed weights lie."""

from __future__ import annotations

import gc

import pytest
import torch

from octavo.ops.cpu import memory

KIB = 1 << 10


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> memory._WeightMemory:
    """Of its own, with mappings of 1 MiB (and the rest of a huge page)."""
    monkeypatch.setattr(memory, "_MAPPING_BYTES", 1 << 20)
    return memory._WeightMemory()


def test_tensors_lie_side_by_side_and_keep_their_values(weights: memory._WeightMemory) -> None:
    made = [
        torch.arange(150 * 1001, dtype=torch.float32).view(150, 1001).bfloat16(),
        torch.arange(300 * KIB, dtype=torch.int32).to(torch.uint8),
        torch.full((3, 5), 7.5),
    ]
    copies = [weights.copy(tensor) for tensor in made]
    for tensor, copy in zip(made, copies, strict=True):
        assert copy.dtype is tensor.dtype and torch.equal(copy, tensor)
    starts = [copy.data_ptr() for copy in copies]
    assert starts[0] % (2 << 20) == 0
    assert [start - starts[0] for start in starts] == [0, 296 * KIB, 596 * KIB]


def test_a_full_mapping_is_followed_by_another(weights: memory._WeightMemory) -> None:
    first = weights.copy(torch.full((900 * KIB,), 1, dtype=torch.uint8))
    before = weights._mapping
    second = weights.copy(torch.full((5000 * KIB,), 2, dtype=torch.uint8))
    assert (first == 1).all() and (second == 2).all()
    assert before is not None and weights._mapping is not None
    assert before() is not None and before() is not weights._mapping()


def test_a_mapping_goes_with_its_last_tensor(weights: memory._WeightMemory) -> None:
    tensors = [weights.copy(torch.zeros(300 * KIB, dtype=torch.uint8)) for _ in range(2)]
    mapping = weights._mapping
    assert mapping is not None
    del tensors[0]
    gc.collect()
    assert mapping() is not None
    del tensors[0]
    gc.collect()
    assert mapping() is None
    assert (weights.copy(torch.ones(4)) == 1).all()


def test_a_small_weight_stays_where_it_is() -> None:
    small, large = torch.ones(100), torch.ones(100 * KIB)
    assert memory.in_huge_pages(small) is small
    assert memory.in_huge_pages(large).data_ptr() != large.data_ptr()
