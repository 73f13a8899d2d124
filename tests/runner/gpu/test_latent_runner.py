"""A model with latent attention and experts behind the GPU's runner, by the GPU's kernels, against
the CPU's runner and its own paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from octavo.arch import MLAConfig, ModelArch, MoEConfig, RopeConfig
from octavo.attention.base import AttentionBackend
from octavo.attention.gather import GatherAttention
from octavo.attention.latent import LatentKernels
from octavo.layers.experts import StackedExperts
from octavo.layers.workspace import Workspace
from octavo.models import moe
from octavo.models.decoder import Decoder
from octavo.plan import NewSeq, SeqPlan, StepPlan
from octavo.request import SamplerParams
from octavo.runner.gpu.runner import GpuRunner
from octavo.runner.kv_store import KVStore
from octavo.runner.runner import Runner

ARCH = ModelArch(
    architecture="DeepseekV2ForCausalLM", vocab_size=96, hidden_size=32, intermediate_size=48,
    num_layers=2, num_heads=4, num_kv_heads=4, head_dim=24, max_position_embeddings=64,
    rope=RopeConfig(rotary_dim=8, interleaved=True), tie_word_embeddings=True,
    moe=MoEConfig(
        num_experts=5, experts_per_token=2, expert_size=24, normalize=False, routed_scale=1.5,
        router_float32=True, shared_size=40, dense_layers=(0,),
    ),
    mla=MLAConfig(
        kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, q_lora_rank=20
    ),
)  # fmt: skip
GREEDY, BLOCK = SamplerParams(), 4


def parts(device: torch.device, attention: AttentionBackend) -> tuple[Decoder, KVStore, Workspace]:
    model = Decoder(ARCH, attention, torch.float32, 64, device)
    generator = torch.Generator().manual_seed(0)
    for name, shape in model.parameters_spec().items():
        model.load(name, torch.randn(shape, generator=generator) * 0.3)
    store = KVStore(
        24, ARCH.num_layers, ARCH.kv_num_heads, BLOCK, ARCH.kv_head_dim, torch.float32, device,
        planes=ARCH.kv_planes,
    )  # fmt: skip
    store.data[:24].fill_(float("nan"))
    return model, store, Workspace(ARCH, 32, 16, torch.float32, device, num_decode_items=1024)


def stacked(config: MoEConfig, hidden: int, activation: str, first: Any, quantize: Any) -> Any:
    """What `make_experts` makes on a GPU."""
    return StackedExperts(config, hidden, activation, first.dtype, first.device)


def plans() -> list[StepPlan]:
    """Prompts whole and in chunks, steps of both kinds, and decodes of three and of one."""
    rng = torch.Generator().manual_seed(4)
    prompts = [torch.randint(96, (n,), generator=rng).tolist() for n in (11, 3, 21)]
    done, blocks, free = [0, 0, 0], [0, 0, 0], iter(torch.randperm(24, generator=rng).tolist())

    def compute(seq: int, count: int, sample: bool) -> SeqPlan:
        need = -(-(done[seq] + count) // BLOCK) - blocks[seq]
        new, start = tuple(next(free) for _ in range(need)), done[seq]
        blocks[seq] += need
        done[seq] += count
        return SeqPlan(seq, start, count, new, None, sample)

    def step(*seqs: tuple[int, int, bool], new: tuple[int, ...] = ()) -> StepPlan:
        made = [NewSeq(i, prompts[i], GREEDY) for i in new]
        return StepPlan(len(found), new_seqs=made, seqs=[compute(*s) for s in seqs])

    found: list[StepPlan] = []
    found.append(step((0, 11, True), (1, 3, True), new=(0, 1)))
    found.append(step((0, 1, True), (1, 1, True), (2, 10, False), new=(2,)))
    found.append(step((2, 11, True), (0, 1, True)))
    found.append(step((0, 1, True), (1, 1, True), (2, 1, True)))
    found.append(step((2, 1, True)))
    return found


@pytest.mark.parametrize(("graphs", "num_steps"), [(False, 2), (True, 5)])
def test_the_kernels_against_the_cpu_runner(
    graphs: bool, num_steps: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"max_num_seqs": 4, "max_num_tokens": 16, "max_blocks_per_seq": 16}
    oracle = Runner(*parts(torch.device("cpu"), GatherAttention()), **sizes)
    expected = [
        [(r.seq_id, r.token_id) for r in oracle.execute(plan).sampled]
        for plan in plans()[:num_steps]
    ]
    monkeypatch.setattr(moe, "make_experts", stacked)
    model, store, work = parts(device, LatentKernels())
    assert model.capturable and not model.replayable
    runner = GpuRunner(model, store, work, graphs=graphs, **sizes)
    if graphs:
        runner.capture()
        store.data[:24].fill_(float("nan"))
    got = [
        [(r.seq_id, r.token_id) for r in runner.execute(plan).sampled]
        for plan in plans()[:num_steps]
    ]
    assert got == expected
    assert len({token for step in expected for _, token in step}) > num_steps - 1
