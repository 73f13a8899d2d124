"""Mixtures of experts whose weights are packed integers behind the GPU's runner, by the GPU's
kernels, against the CPU's runner with the same weights expanded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.arch import ModelArch, MoEConfig, RopeConfig
from octavo.attention.base import AttentionBackend
from octavo.attention.gather import GatherAttention
from octavo.layers.experts_grouped import GroupedExperts
from octavo.layers.grouped import GroupedWeight
from octavo.layers.workspace import Workspace
from octavo.models import moe
from octavo.models.decoder import Decoder
from octavo.ops.gpu.grouped import pack
from octavo.plan import NewSeq, SeqPlan, StepPlan
from octavo.request import SamplerParams
from octavo.runner.gpu.runner import GpuRunner
from octavo.runner.kv_store import KVStore
from octavo.runner.runner import Runner

MIXTRAL = ModelArch(
    architecture="MixtralForCausalLM", vocab_size=96, hidden_size=32, intermediate_size=48,
    num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, max_position_embeddings=64,
    rope=RopeConfig(rotary_dim=16), tie_word_embeddings=True, moe=MoEConfig(3, 2, 48),
)  # fmt: skip
QWEN3_MOE = replace(
    MIXTRAL, architecture="Qwen3MoeForCausalLM", qk_norm="head", moe=MoEConfig(5, 3, 32)
)
CASES = {"Mixtral, AWQ": (MIXTRAL, False), "Qwen 3 MoE, GPTQ in act-order": (QWEN3_MOE, True)}
SIZES = {"max_num_seqs": 4, "max_num_tokens": 16, "max_blocks_per_seq": 16}
GREEDY, BLOCK = SamplerParams(), 4


class Capturable(GatherAttention):
    """Which on a CPU is not recorded."""

    capturable = True


def attention(device: torch.device) -> AttentionBackend:
    if device.type == "cpu":
        return Capturable()
    from octavo.attention.triton import TritonAttention

    return TritonAttention()


def packed(
    num_rows: int, width: int, ordered: bool, generator: torch.Generator, orders: dict[int, Any]
) -> GroupedWeight:
    """A row is a group; gate and up of an expert are in the same order."""
    codes = torch.randint(0, 16, (num_rows, width), generator=generator)
    scales = (torch.rand((num_rows, 1), generator=generator) + 0.5) / 16
    zeros = torch.randint(4, 12, scales.shape, generator=generator).half()
    order = None
    if ordered:
        order = orders.setdefault(width, torch.randperm(width, generator=generator).int())
    return GroupedWeight(
        pack(codes, 4), scales.half(), zeros, 4, 128, (num_rows, width), "gptq", order=order
    )


def parts(
    case: str, device: torch.device, backend: AttentionBackend, expanded: bool
) -> tuple[Decoder, KVStore, Workspace]:
    arch, ordered = CASES[case]
    model = Decoder(arch, backend, torch.float32, 64, device)
    generator, orders = torch.Generator().manual_seed(0), dict[int, Any]()
    for name, shape in model.parameters_spec().items():
        if ".experts." in name:
            weight = packed(*shape, ordered, generator, orders)  # type: ignore[arg-type]
            model.load(name, weight.dequantize(torch.float32) if expanded else weight)
        else:
            model.load(name, torch.randn(shape, generator=generator) * 0.3)
    store = KVStore(
        24, arch.num_layers, arch.kv_num_heads, BLOCK, arch.kv_head_dim, torch.float32, device
    )
    store.data[:24].fill_(float("nan"))
    return model, store, Workspace(arch, 32, 16, torch.float32, device, num_decode_items=1024)


def plans() -> list[StepPlan]:
    """Two prompts at once, then decodes of both, and of one."""
    prompts = [[5, 17, 88, 3, 41, 9, 60], [7, 70, 23]]
    tables = [(3, 11), (20, 4)]
    return [
        StepPlan(
            0,
            new_seqs=[NewSeq(i, prompt, GREEDY) for i, prompt in enumerate(prompts)],
            seqs=[
                SeqPlan(i, 0, len(prompt), tables[i], None, True)
                for i, prompt in enumerate(prompts)
            ],
        ),
        StepPlan(1, seqs=[SeqPlan(i, n, 1, (), None, True) for i, n in enumerate((7, 3))]),
        StepPlan(2, seqs=[SeqPlan(1, 4, 1, (), None, True)]),
    ]


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_against_the_cpu_runner(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = Runner(*parts(case, torch.device("cpu"), GatherAttention(), True), **SIZES)
    expected = [[(r.seq_id, r.token_id) for r in oracle.execute(plan).sampled] for plan in plans()]

    def stacked(config: MoEConfig, hidden: int, activation: str, *args: object) -> GroupedExperts:
        """What `make_experts` makes on a GPU."""
        return GroupedExperts(config, hidden, activation)

    monkeypatch.setattr(moe, "make_experts", stacked)
    model, store, work = parts(case, device, attention(device), False)
    assert model.capturable
    graphs = device.type == "cuda"
    runner = GpuRunner(model, store, work, graphs=graphs, **SIZES)
    if graphs:
        runner.capture()
        store.data[:24].fill_(float("nan"))
    got = [[(r.seq_id, r.token_id) for r in runner.execute(plan).sampled] for plan in plans()]
    assert got == expected
    assert len({token for step in expected for _, token in step}) > 2
