"""Each family as a tiny random checkpoint: octavo against transformers, float32.

A case is a row of the table: the config, and prompts that reach what it exercises (a window shorter
than the prompt, positions beyond the trained context).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, SamplingParams
from octavo.engine.build import load_model
from octavo.layers.workspace import Workspace
from octavo.plan import NewSeq, SeqPlan, StepPlan
from octavo.request import SamplerParams
from octavo.runner.kv_store import KVStore
from octavo.runner.runner import Runner

COMMON: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-mha-biased": (
        "LlamaConfig",
        {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-wide-heads": ("LlamaConfig", {"head_dim": 32}),
    "llama-linear": ("LlamaConfig", rope("linear", factor=2.0)),
    "llama-llama3": (
        "LlamaConfig",
        rope("llama3", original_max_position_embeddings=64, **LLAMA3),
    ),
    "llama-yarn": (
        "LlamaConfig",
        rope("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    "llama-dynamic": (
        "LlamaConfig",
        {"max_position_embeddings": 24, **rope("dynamic", factor=4.0)},
    ),
    "mistral-window": ("MistralConfig", {"sliding_window": 13}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-tied": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
}
PROMPT_LENS = (1, 7, 41)
NUM_NEW = 20


pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module", params=list(FAMILIES))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, transformers.PreTrainedModel]:
    config_class, fields = FAMILIES[request.param]
    config = getattr(transformers, config_class)(**{**COMMON, **fields})
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # initialised to 0 and 1: would hide mistakes
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return folder, model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 199, (n,), generator=generator).tolist() for n in PROMPT_LENS]


@torch.inference_mode()
def transformers_logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


@torch.inference_mode()
def transformers_greedy(model: transformers.PreTrainedModel, ids: list[int]) -> list[int]:
    """A plain loop with transformers' cache: `generate` would stop at end-of-sequence."""
    cache, step, out = None, torch.tensor([ids]), []
    for _ in range(NUM_NEW):
        result = model(step, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        out.append(int(result.logits[0, -1].argmax()))
        step = torch.tensor([[out[-1]]])
    return out


def octavo_logits(folder: Path, ids: list[int], chunk: int) -> torch.Tensor:
    """Logits at every position, the prompt computed `chunk` tokens a step over shuffled blocks."""
    model = load_model(str(folder), dtype="float32", max_model_len=64)
    arch, block_size = model.arch, 4
    num_blocks = -(-len(ids) // block_size)
    store = KVStore(
        num_blocks + 3, arch.num_layers, arch.num_kv_heads, block_size, arch.head_dim,
        torch.float32, torch.device("cpu"),
    )  # fmt: skip
    store.data.fill_(float("nan"))
    work = Workspace(arch, 64, 64, torch.float32, torch.device("cpu"))
    runner = Runner(
        model, store, work, max_num_seqs=1, max_num_tokens=64, max_blocks_per_seq=num_blocks
    )
    blocks = list(range(num_blocks + 2, 2, -1))
    rows = []
    for step, start in enumerate(range(0, len(ids), chunk)):
        count = min(chunk, len(ids) - start)
        have, need = -(-start // block_size), -(-(start + count) // block_size)
        new = [NewSeq(0, ids, SamplerParams())] if step == 0 else []
        seq = SeqPlan(0, start, count, tuple(blocks[have:need]), None, False)
        plan = StepPlan(step, new_seqs=new, seqs=[seq])
        with torch.inference_mode():
            rows.append(model.logits(runner.forward(plan), work).clone())
    return torch.cat(rows)


@pytest.mark.parametrize("chunk", [64, 5])
def test_logits(checkpoint: tuple[Path, transformers.PreTrainedModel], chunk: int) -> None:
    folder, model = checkpoint
    for ids in prompts():
        expected = transformers_logits(model, ids)
        got = octavo_logits(folder, ids, chunk)
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 16},
        {"block_size": 3, "max_num_batched_tokens": 8, "max_num_seqs": 8},
        # A pool that holds little more than the longest sequence: preemption all the time.
        {"block_size": 4, "num_gpu_blocks_override": 17, "max_num_seqs": 8},
    ],
    ids=["plain", "chunked", "preempted"],
)
def test_greedy_tokens(
    checkpoint: tuple[Path, transformers.PreTrainedModel], options: dict[str, Any]
) -> None:
    folder, model = checkpoint
    ids = prompts()
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(
        str(folder), dtype="float32", max_model_len=64, skip_tokenizer_init=True, **options
    ) as llm:
        outputs = llm.generate(ids, params, use_tqdm=False)
        num_preemptions = llm.memory_report().num_preemptions
    expected = [transformers_greedy(model, prompt) for prompt in ids]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert bool(num_preemptions) == ("num_gpu_blocks_override" in options)
