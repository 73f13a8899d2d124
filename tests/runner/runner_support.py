"""What tests of runners share: the shape of a tiny model, and parts of hand-written plans."""

from __future__ import annotations

from octavo.arch import ModelArch, RopeConfig
from octavo.plan import SeqPlan

ARCH = ModelArch(
    architecture="LlamaForCausalLM",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    rope=RopeConfig(rotary_dim=16),
    tie_word_embeddings=True,
)


def seq(
    seq_id: int,
    start: int,
    count: int,
    blocks: tuple[int, ...] = (),
    replaced: tuple[int, int] | None = None,
    sample: bool = True,
) -> SeqPlan:
    """A sequence's share in a plan: `count` tokens from `start` on, with its new blocks."""
    return SeqPlan(seq_id, start, count, blocks, replaced, sample)
