"""Each family as a tiny random checkpoint: octavo against transformers, float32.

The table is in `family_cases`. A row is loaded three times: layer by layer for the logits at every
position, in an engine for the tokens, and without its weights.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from family_cases import CASES, MAX_MODEL_LEN, NUM_NEW, Case, make_model, prompts

from octavo import LLM, SamplingParams
from octavo.engine.build import load_model
from octavo.hf_config.families import FAMILIES
from octavo.layers.workspace import Workspace
from octavo.models.decoder import Decoder
from octavo.models.registry import ARCHITECTURES
from octavo.plan import NewSeq, SeqPlan, StepPlan
from octavo.request import SamplerParams
from octavo.runner.kv_store import KVStore
from octavo.runner.runner import Runner
from octavo.weights.gguf_arch import FAMILIES as GGUF_FAMILIES
from octavo.weights.naming import NAMINGS

CHUNKS = (64, 5, 7)
"""Tokens a step, for each prompt."""
BLOCK_SIZE = 4

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Checkpoint = tuple[Case, Path, transformers.PreTrainedModel]


@pytest.fixture(scope="module", params=list(CASES))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    case = CASES[request.param]
    model = make_model(case)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    if case.saved is not None:
        case.saved(folder)
    return case, folder, model


@torch.inference_mode()
def transformers_logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    logits = model(torch.tensor([ids])).logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits


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


def octavo_logits(model: Decoder, ids: list[int], chunk: int) -> torch.Tensor:
    """Logits at every position, the prompt computed `chunk` tokens a step over shuffled blocks."""
    arch, cpu = model.arch, torch.device("cpu")
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    store = KVStore(
        num_blocks + 3, arch.num_layers, arch.kv_num_heads, BLOCK_SIZE, arch.kv_head_dim,
        torch.float32, cpu, planes=arch.kv_planes,
    )  # fmt: skip
    store.data.fill_(float("nan"))
    work = Workspace(arch, 64, 64, torch.float32, cpu)
    runner = Runner(
        model, store, work, max_num_seqs=1, max_num_tokens=64, max_blocks_per_seq=num_blocks
    )
    blocks = list(range(num_blocks + 2, 2, -1))
    rows = []
    for step, start in enumerate(range(0, len(ids), chunk)):
        count = min(chunk, len(ids) - start)
        have, need = -(-start // BLOCK_SIZE), -(-(start + count) // BLOCK_SIZE)
        new = [NewSeq(0, ids, SamplerParams())] if step == 0 else []
        seq = SeqPlan(0, start, count, tuple(blocks[have:need]), None, False)
        plan = StepPlan(step, new_seqs=new, seqs=[seq])
        with torch.inference_mode():
            rows.append(model.logits(runner.forward(plan), work).clone())
    return torch.cat(rows)


def test_logits(checkpoint: Checkpoint) -> None:
    _, folder, reference = checkpoint
    model = load_model(str(folder), dtype="float32", max_model_len=MAX_MODEL_LEN)
    for ids, chunk in zip(prompts(), CHUNKS, strict=True):
        expected = transformers_logits(reference, ids)
        got = octavo_logits(model, ids, chunk)
        assert got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_greedy_tokens(checkpoint: Checkpoint) -> None:
    """Prompts in chunks, a pool that holds little more than the longest sequence, so that others
    are preempted all the time; then, once more, prompts whose beginnings are in the cache."""
    case, folder, model = checkpoint
    ids = prompts()
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(
        str(folder), dtype="float32", max_model_len=MAX_MODEL_LEN, skip_tokenizer_init=True,
        block_size=BLOCK_SIZE, num_gpu_blocks_override=case.num_blocks, max_num_seqs=8,
        max_num_batched_tokens=8,
    ) as llm:  # fmt: skip
        first = [o.outputs[0].token_ids for o in llm.generate(ids, params, use_tqdm=False)]
        num_preemptions = llm.memory_report().num_preemptions
        again = llm.generate(ids[2], params, use_tqdm=False)[0]
    assert num_preemptions > 0
    # where rope depends on the prompt's length, so do the keys: they are not shared
    assert bool(again.num_cached_tokens) != case.steps
    assert list(again.outputs[0].token_ids) == list(first[2])
    for prompt, tokens in zip(ids, first, strict=True):
        assert len(tokens) == NUM_NEW
        if case.steps:
            assert list(tokens) == transformers_greedy(model, prompt)
        else:  # the same, in one pass: each token follows from those before it
            logits = transformers_logits(model, prompt + list(tokens))
            assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == list(tokens)


def test_dummy_weights_need_config_json_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    _, folder, _ = checkpoint
    shutil.copy(folder / "config.json", tmp_path)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM(
        str(tmp_path), dtype="float32", max_model_len=MAX_MODEL_LEN, skip_tokenizer_init=True,
        block_size=BLOCK_SIZE, kv_cache_memory_bytes=1 << 18, load_format="dummy",
    ) as llm:  # fmt: skip
        (output,) = llm.generate(prompts()[1], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_rows_are_of_the_architecture_that_names_them(checkpoint: Checkpoint) -> None:
    case, folder, _ = checkpoint
    row = next(name for name, known in CASES.items() if known is case)
    saved = json.loads((folder / "config.json").read_text())["architectures"][0]
    owner = next(name for name, family in ARCHITECTURES.items() if row in family.rows)
    if row != "internlm3":  # transformers runs, and saves, it as Llama
        assert FAMILIES[saved].architecture == owner


def test_the_tables_agree() -> None:
    rows = [row for family in ARCHITECTURES.values() for row in family.rows]
    assert sorted(rows) == sorted(CASES)
    assert all(family.rows for family in ARCHITECTURES.values())
    assert {family.architecture for family in FAMILIES.values()} == set(ARCHITECTURES)
    assert {family.architecture for family in GGUF_FAMILIES.values()} <= set(ARCHITECTURES)
    assert set(NAMINGS) <= set(ARCHITECTURES)
