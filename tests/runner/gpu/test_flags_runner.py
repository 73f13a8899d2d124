"""Models of several families behind the GPU's runner, by the GPU's kernels, against the CPU's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.arch import ModelArch, RopeConfig
from octavo.attention.base import AttentionBackend
from octavo.attention.gather import GatherAttention
from octavo.attention.triton import TritonAttention
from octavo.layers import gpu
from octavo.layers.norm import Norm
from octavo.layers.workspace import Workspace
from octavo.models import layer
from octavo.models.decoder import Decoder
from octavo.plan import NewSeq, SeqPlan, StepPlan
from octavo.request import SamplerParams
from octavo.runner.gpu.runner import GpuRunner
from octavo.runner.kv_store import KVStore
from octavo.runner.runner import Runner

ARCH = ModelArch(
    architecture="LlamaForCausalLM", vocab_size=96, hidden_size=64, intermediate_size=96,
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position_embeddings=64,
    rope=RopeConfig(rotary_dim=16), tie_word_embeddings=True,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma 2 and 3": {
        "norm_placement": "sandwich", "norm_offset": 1.0, "activation": "gelu_tanh",
        "embedding_scale": 8.0, "sliding_windows": (6, 0), "qk_norm": "head",
        "local_rope": RopeConfig(theta=100.0, rotary_dim=16), "attention_soft_cap": 5.0,
        "attention_scale": 0.3, "logits_soft_cap": 3.0,
    },
    "GPT-NeoX": {
        "norm": "layer", "norm_bias": True, "parallel_residual": True, "activation": "gelu",
        "gated_mlp": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True,
        "rope": RopeConfig(rotary_dim=4), "num_kv_heads": 4, "tie_word_embeddings": False,
    },
    "OPT": {
        "norm": "layer", "norm_bias": True, "activation": "relu", "gated_mlp": False,
        "positions": "learned", "position_offset": 2, "num_kv_heads": 4,
    },
    "Falcon": {
        "norm": "layer", "norm_bias": True, "parallel_residual": True, "shared_norm": True,
        "positions": "alibi", "alibi_scale": 0.25, "num_kv_heads": 1, "gated_mlp": False,
        "activation": "gelu",
    },
    "StableLM, OLMo 2, Granite": {
        "norm_placement": "post", "qk_norm": "all", "residual_scale": 0.5, "logits_scale": 0.25,
        "rope": RopeConfig(rotary_dim=8, interleaved=True), "no_rope_layers": (1,), "qkv_clip": 2.0,
    },
}  # fmt: skip
BLOCK, NUM_BLOCKS = 4, 24


def parts(
    arch: ModelArch, device: torch.device, attention: AttentionBackend
) -> tuple[Decoder, KVStore, Workspace]:
    model = Decoder(arch, attention, torch.float32, 64, device)
    generator = torch.Generator().manual_seed(0)
    for name, shape in model.parameters_spec().items():
        model.load(name, torch.randn(shape, generator=generator) * 0.2)
    heads = (arch.num_layers, arch.num_kv_heads, BLOCK, arch.head_dim)
    store = KVStore(NUM_BLOCKS, *heads, torch.float32, device)
    store.data[:NUM_BLOCKS].fill_(float("nan"))  # what no step wrote is never read
    return model, store, Workspace(arch, 32, 16, torch.float32, device, num_decode_items=1024)


def gpu_norm(
    weight: torch.Tensor, eps: float, kind: str = "rms", bias: torch.Tensor | None = None
) -> Norm:
    """What `make_norm` makes on a GPU."""
    if kind == "layer":
        return gpu.GpuLayerNorm(weight, bias, eps)
    return gpu.GpuRMSNorm(weight, eps)


def plans() -> list[StepPlan]:
    """Two prompts, one in chunks; decodes beside them; then decodes alone."""
    greedy = SamplerParams()
    new = [NewSeq(0, list(range(5, 16)), greedy), NewSeq(1, [7, 3, 60], greedy)]
    return [
        StepPlan(0, new_seqs=new, seqs=[
            SeqPlan(0, 0, 6, (3, 8), None, False), SeqPlan(1, 0, 3, (5,), None, True),
        ]),
        StepPlan(1, appends=[(1, 11)], seqs=[
            SeqPlan(1, 3, 1, (), None, True), SeqPlan(0, 6, 5, (1,), None, True),
        ]),
        StepPlan(2, appends=[(1, 12), (0, 13)], seqs=[
            SeqPlan(1, 4, 1, (9,), None, True), SeqPlan(0, 11, 1, (), None, True),
        ]),
    ]  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_cpu(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    arch = replace(ARCH, **FAMILIES[name])
    limits = {"max_num_seqs": 4, "max_num_tokens": 32, "max_blocks_per_seq": 16}
    cpu = Runner(*parts(arch, torch.device("cpu"), GatherAttention()), **limits)
    monkeypatch.setattr(layer, "make_norm", gpu_norm)
    runner = GpuRunner(*parts(arch, device, TritonAttention()), graphs=False, **limits)
    for plan in plans():
        expected, found = (_logits(r, plan) for r in (cpu, runner))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def _logits(runner: Runner | GpuRunner, plan: StepPlan) -> torch.Tensor:
    """Of all tokens of the plan, which must be fewer than the workspace's rows."""
    with torch.inference_mode():
        logits = runner.model.logits(runner.forward(plan), runner.workspace)
    assert logits.isfinite().all()
    return logits.cpu().clone()
