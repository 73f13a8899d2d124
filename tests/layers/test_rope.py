"""Rotary tables against transformers, and what depends on how long a prompt is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from octavo.arch import RopeConfig
from octavo.layers.rope import RotaryTable

CPU = torch.device("cpu")
SHORT, LONG = tuple(1.0 + 0.1 * i for i in range(4)), tuple(2.0 + i for i in range(4))
LONGROPE = RopeConfig(
    rotary_dim=8, scaling_type="longrope", factor=4.0, original_max_position=16,
    short_factor=SHORT, long_factor=LONG,
)  # fmt: skip


def phi3(**fields: Any) -> Phi3RotaryEmbedding:
    return Phi3RotaryEmbedding(
        Phi3Config(
            hidden_size=32, num_attention_heads=4, max_position_embeddings=64,
            original_max_position_embeddings=16, pad_token_id=0,
            rope_parameters={
                "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": list(SHORT),
                "long_factor": list(LONG), "original_max_position_embeddings": 16, **fields,
            },
        )
    )  # fmt: skip


def rows_of(table: RotaryTable, positions: Tensor, prompt_len: int) -> Tensor:
    cos_sin, rows = table.rows(positions, torch.full_like(positions, prompt_len))
    return cos_sin[rows]


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 40])
@pytest.mark.parametrize("attention_factor", [None, 1.7])
def test_longrope_of_a_prompt_is_that_of_transformers(
    num_tokens: int, attention_factor: float | None
) -> None:
    own: dict[str, Any] = {} if attention_factor is None else {"attention_factor": attention_factor}
    positions = torch.arange(num_tokens)
    cos, sin = phi3(**own)(torch.zeros(1), positions[None])
    config = RopeConfig(
        rotary_dim=8, scaling_type="longrope", factor=4.0, original_max_position=16,
        short_factor=SHORT, long_factor=LONG, attention_factor=attention_factor,
    )  # fmt: skip
    found = rows_of(RotaryTable(config, 64, CPU), positions, num_tokens)
    torch.testing.assert_close(found, torch.cat((cos[0, :, :4], sin[0, :, :4]), dim=1))


def test_a_row_depends_on_position_and_prompt_alone() -> None:
    table = RotaryTable(LONGROPE, 64, CPU)
    assert table.is_dynamic
    positions = torch.arange(40)
    whole = rows_of(table, positions, 30)
    for first, last in ((0, 7), (7, 20), (20, 40)):
        assert torch.equal(rows_of(table, positions[first:last], 30), whole[first:last])
    # A prompt within the trained context: later tokens turn as their own positions say.
    short, long = rows_of(table, positions, 10), rows_of(table, positions, 40)
    assert torch.equal(short[16:], long[16:])
    assert not torch.isclose(short[1:16], long[1:16]).all(dim=1).any()


def test_within_the_trained_context_nothing_depends_on_the_prompt() -> None:
    table = RotaryTable(LONGROPE, 16, CPU)
    assert not table.is_dynamic
    assert table.table.shape == (16, 8)
    positions = torch.arange(16)
    assert torch.equal(table.table, rows_of(RotaryTable(LONGROPE, 64, CPU), positions, 3))


def test_without_rope_there_are_no_rows() -> None:
    table = RotaryTable(None, 100, CPU)
    assert (table.table.numel(), table.max_position, table.is_dynamic) == (0, 100, False)
