"""Two real models: what octavo says greedily is what transformers says from the same file."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import TokenizerError
from octavo.weights.locate import locate
from octavo.weights.manage import pull

pytestmark = pytest.mark.model

NUM_NEW = 32
PROMPTS = ("1, 2, 3, 4, 5, 6,", "Die Hauptstadt von Österreich 😀 heißt")
GEMMA, SMOLLM2 = "gemma-3-270m", "smollm2-135m-instruct"


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A model as a user would get it, computed in float32."""
    files = pull(request.param)
    assert files.kind == "gguf"
    engine = LLM(request.param, dtype="float32", max_model_len=256, quantization="none")
    yield engine
    engine.close()


@pytest.fixture
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads a GGUF file's metadata twice, and lists the names of all tensors for each
    tensor, which takes most of its time."""
    import gguf

    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, functools.cache(getattr(gguf, name)))


@pytest.mark.usefixtures("read_once")
def test_greedy_tokens_are_transformers_and_make_sense(llm: LLM) -> None:
    """Each token is the likeliest after those before it, which is what greedy means: one pass over
    the finished texts shows it, where generating again would take 32."""
    transformers = pytest.importorskip("transformers")
    greedy = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
    results = llm.generate(list(PROMPTS), greedy, use_tqdm=False)
    assert results[0].outputs[0].text.startswith(" 7, 8, 9, 10")
    if llm.config.model == GEMMA:
        assert "Wien" in results[1].outputs[0].text
    path = locate(llm.config.model).path
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    ).eval()
    for result in results:
        ours = list(result.outputs[0].token_ids)
        assert len(ours) == NUM_NEW
        ids = torch.tensor([[*result.prompt_token_ids, *ours]])
        with torch.inference_mode():
            logits = model(ids, logits_to_keep=NUM_NEW + 1, use_cache=False).logits[0, :-1]
        assert logits.argmax(-1).tolist() == ours, result.prompt


def test_chat(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    greedy = SamplingParams(max_tokens=12, temperature=0)
    if llm.config.model == GEMMA:  # a base model, whose file has no chat template
        with pytest.raises(TokenizerError, match="no chat template"):
            llm.chat(question, greedy, use_tqdm=False)
        return
    (answer,) = llm.chat(question, greedy, use_tqdm=False)
    assert "Paris" in answer.outputs[0].text
