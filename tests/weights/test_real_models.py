"""Two real models as a user gets them, and Gemma's greedy tokens against transformers'.

SmolLM2's are in tests/engine/test_default_model.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import TokenizerError
from octavo.weights.manage import pull

pytestmark = pytest.mark.model

PROMPTS = ("1, 2, 3, 4, 5, 6,", "Die Hauptstadt von Österreich 😀 heißt")
GEMMA, SMOLLM2 = "gemma-3-270m", "smollm2-135m-instruct"
GEMMA_TOKENS = (
    [
        236743, 236832, 236764, 236743, 236828, 236764, 236743, 236819, 236764, 236743, 236770,
        236771, 236764, 236743, 236770, 236770, 236764, 236743, 236770, 236778, 236764, 236743,
        236770, 236800, 236764, 236743, 236770, 236812, 236764, 236743, 236770, 236810,
    ],
    [
        67318, 236761, 5915, 30820, 3526, 57329, 4591, 26370, 55208, 197097, 225259, 32284, 236764,
        1778, 880, 5679, 5732, 1175, 116328, 38637, 10492, 236761, 108, 185, 236824, 1843, 197097,
        225259, 32284, 192, 108, 236829,
    ],
)  # fmt: skip
"""What transformers 5.24 picks from the same file in float32 (reading that takes it a minute): of
its logits the best is at least 0.06 ahead of the next, far above what rounding makes of it."""


@pytest.fixture(scope="module", params=[SMOLLM2, GEMMA])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """A model as a user would get it, computed in float32."""
    files = pull(request.param)
    assert files.kind == "gguf"
    engine = LLM(request.param, dtype="float32", max_model_len=256, quantization="none")
    yield engine
    engine.close()


def test_greedy_tokens(llm: LLM) -> None:
    num_new = len(GEMMA_TOKENS[0])
    params = SamplingParams(max_tokens=num_new, temperature=0, ignore_eos=True)
    results = [output.outputs[0] for output in llm.generate(list(PROMPTS), params, use_tqdm=False)]
    assert results[0].text.startswith(" 7, 8, 9, 10")
    if llm.config.model == GEMMA:
        assert "Wien" in results[1].text
        assert tuple(list(result.token_ids) for result in results) == GEMMA_TOKENS


def test_chat(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    greedy = SamplingParams(max_tokens=12, temperature=0)
    if llm.config.model == GEMMA:  # a base model, whose file has no chat template
        with pytest.raises(TokenizerError, match="no chat template"):
            llm.chat(question, greedy, use_tqdm=False)
        return
    (answer,) = llm.chat(question, greedy, use_tqdm=False)
    assert "Paris" in answer.outputs[0].text
