"""Every field of `SamplingParams` takes effect through the whole engine (I6).

The model's weights are zero: it finds every token equally likely, so that an answer is what the
parameters make of it, and each expectation below is exact.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from octavo import LLM, RequestOutput, SamplingParams

UNK, EOS = 256, 258
UNIFORM = -math.log(320)
"""Logprob of each of the vocabulary's 320 tokens."""
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 8, "num_threads": 1,
}  # fmt: skip

Check = Callable[[RequestOutput], object]


@pytest.fixture(scope="module")
def spaced_path(blank_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose decoder puts a space between tokens, and so before an answer's first."""
    folder = tmp_path_factory.mktemp("spaced")
    tokenizer = Tokenizer.from_file(str(blank_path / "tokenizer.json"))
    fields = json.loads(tokenizer.to_str()) | {"decoder": None}
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def llm(blank_path: Path, spaced_path: Path) -> Iterator[LLM]:
    with LLM(str(blank_path), tokenizer=str(spaced_path), **OPTIONS) as llm:
        yield llm


def tid(char: str) -> int:
    """The tiny tokenizer's id of an ASCII letter: its alphabet is sorted and starts at '!'."""
    return ord(char) - ord("!")


def bias(**biases: float) -> dict[int, float]:
    return {tid(char): value for char, value in biases.items()}


def letters(output: RequestOutput) -> str:
    """The first completion, a letter a token."""
    return "".join(chr(i + ord("!")) if i < 94 else f"<{i}>" for i in output.outputs[0].token_ids)


def text(output: RequestOutput) -> str:
    return output.outputs[0].text


def end(output: RequestOutput) -> tuple[str, Any, str]:
    completion = output.outputs[0]
    return completion.finish_reason or "", completion.stop_reason, letters(output)


def kinds(output: RequestOutput) -> int:
    """How many different tokens there are."""
    return len(set(output.outputs[0].token_ids))


def scores(output: RequestOutput) -> list[float | None]:
    """Of each completion; 0 where each of its tokens was as likely as any."""
    return [
        None if sample.score is None else round(sample.score - UNIFORM, 4)
        for sample in output.outputs
    ]


def shape_of_logprobs(output: RequestOutput) -> Any:
    logprobs = output.outputs[0].logprobs
    return (
        None
        if logprobs is None
        else [
            [round(entry.logprob - UNIFORM, 4) for entry in position.values()]
            for position in logprobs
        ]
    )


def shape_of_prompt_logprobs(output: RequestOutput) -> Any:
    return output.prompt_logprobs and [
        position and [round(entry.logprob - UNIFORM, 4) for entry in position.values()]
        for position in output.prompt_logprobs
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """What a field changes: parameters beside it, its value, what is looked at, and the results."""

    value: Any
    look: Check
    without: Any
    """With the field left at its default."""
    with_it: Any
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)


AB = {"logit_bias": bias(A=10, B=9.5)}
"""Greedy: AAAA until something costs A more than half a point."""
EOS_FIRST = {"logit_bias": {EOS: 10.0} | bias(A=5)}
ONE_IN_TWO = {"logit_bias": bias(A=6), "temperature": 1.0, "max_tokens": 30, "seed": 1}
"""A has e^6 / (e^6 + 319) = 56 % of the probability, each other token 0.14 %."""

CASES: dict[str, Case] = {
    "n": Case(3, lambda o: len(o.outputs), 1, 3),
    "best_of": Case(3, scores, [None], [0.0]),
    "presence_penalty": Case(1.0, letters, "AAAA", "ABAA", AB),
    "frequency_penalty": Case(1.0, letters, "AAAA", "ABAB", AB),
    "repetition_penalty": Case(2.0, letters, "AAAA", "BAAA", AB),
    "temperature": Case(
        5.0, lambda o: kinds(o) > 1, False, True, ONE_IN_TWO | {"temperature": 0.0}
    ),
    "top_p": Case(0.5, lambda o: kinds(o) > 1, True, False, ONE_IN_TWO),
    "top_k": Case(1, lambda o: kinds(o) > 1, True, False, ONE_IN_TWO),
    "min_p": Case(0.5, lambda o: kinds(o) > 1, True, False, ONE_IN_TWO),
    "stop": Case(
        ["B A"], lambda o: (text(o), *end(o)), (" A B A B", "length", None, "ABAB"),
        (" A ", "stop", "B A", "ABA"), AB | {"frequency_penalty": 1.0},
    ),
    "stop_token_ids": Case(
        [tid("B")], end, ("length", None, "ABAB"), ("stop", tid("B"), "AB"),
        AB | {"frequency_penalty": 1.0},
    ),
    "include_stop_str_in_output": Case(
        True, text, " A", " A B", AB | {"frequency_penalty": 1.0, "stop_token_ids": [tid("B")]}
    ),
    "ignore_eos": Case(
        True, end, ("stop", None, f"<{EOS}>"), ("length", None, f"<{EOS}>" * 4), EOS_FIRST
    ),
    "max_tokens": Case(2, end, ("length", None, "AAAA"), ("length", None, "AA"), AB),
    "min_tokens": Case(
        2, end, ("stop", None, f"<{EOS}>"), ("stop", None, f"AA<{EOS}>"), EOS_FIRST
    ),
    "logprobs": Case(
        2, shape_of_logprobs, None, [[0, 0, 0], [0, 0, 0]], AB | {"max_tokens": 2}
    ),
    "prompt_logprobs": Case(0, shape_of_prompt_logprobs, None, [None, [0]], AB | {"prompt": "AC"}),
    "logit_bias": Case(bias(C=1), letters, "!!!!", "CCCC"),
    "bad_words": Case(["A"], letters, "AAAA", "BBBB", AB),
    "allowed_token_ids": Case([tid("Z")], letters, "AAAA", "ZZZZ", AB),
    "skip_special_tokens": Case(
        False, text, "", " <unk> <unk> <unk> <unk>", {"logit_bias": {UNK: 10.0}}
    ),
    "spaces_between_special_tokens": Case(
        False, text, " <unk> <unk> <unk> <unk>", " <unk><unk><unk><unk>",
        {"logit_bias": {UNK: 10.0}, "skip_special_tokens": False},
    ),
    "detokenize": Case(False, text, " A A A A", "", AB),
}  # fmt: skip


def answer(llm: LLM, prompt: str = "A", **params: Any) -> RequestOutput:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 4, **params})
    return llm.generate([prompt], sampling, use_tqdm=False)[0]


@pytest.mark.parametrize("name", CASES)
def test_parameter(name: str, llm: LLM) -> None:
    case = CASES[name]
    assert case.look(answer(llm, **case.beside)) == case.without
    assert case.look(answer(llm, **case.beside | {name: case.value})) == case.with_it


def test_seed(llm: LLM) -> None:
    def drawn(seed: int | None) -> list[int]:
        output = answer(llm, temperature=1.0, max_tokens=8, seed=seed)
        return output.outputs[0].token_ids

    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(None) != drawn(None), "a request without a seed is given one of its own"


def test_stop_strings_may_stay_in_the_text(llm: LLM) -> None:
    params = AB | {"frequency_penalty": 1.0, "stop": ["B"]}
    assert text(answer(llm, **params)) == " A "
    assert text(answer(llm, **params, include_stop_str_in_output=True)) == " A B"


def test_every_parameter_has_its_case() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == CASES.keys() | {"seed"}
