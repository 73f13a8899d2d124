"""Datasets of texts, and results as vLLM's users know them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from fake_server import FakeServer

from octavo.bench.serve.datasets import read_texts
from octavo.bench.serve.saved import file_name
from octavo.bench.serve.times import parse_metrics, parse_shares, times_of
from octavo.cli.main import main
from octavo.errors import InvalidRequestError
from octavo.text.tokenizer import load_tokenizer

_FIELDS = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2el": "e2e_s"}


class Letters:
    """A token a letter, and one before all."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]


def write(path: Path, found: Any) -> Path:
    path.write_text(json.dumps(found))
    return path


def turns(*texts: str) -> dict[str, Any]:
    names = ("human", "gpt")
    return {
        "id": "x",
        "conversations": [{"from": names[i % 2], "value": text} for i, text in enumerate(texts)],
    }


def read(kind: Any, path: Path, num: int = 3, **more: Any) -> Any:
    settings = {"output_len": None, "max_model_len": 4096, "seed": 0} | more
    return read_texts(kind, path, num, Letters(), **settings)


def test_sharegpt_takes_the_first_two_turns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "s.json",
        [
            turns("abcde", "an answer", "more", "and more"),
            turns("fghij", "longer answer"),
            turns("alone, without an answer"),
            {"id": "nothing at all", "conversations": []},
        ],
    )
    found = {sample.text: sample for sample in read("sharegpt", path, 2).samples}
    assert {text: sample.output_len for text, sample in found.items()} == {
        "abcde": 9, "fghij": 13,
    }  # fmt: skip
    assert found["abcde"].prompt_token_ids == [1, *map(ord, "abcde")]
    again = read("sharegpt", path, 5)
    assert len(again.samples) == 5 and "3 of them repeated" in again.description
    assert [s.text for s in again.samples] == [s.text for s in read("sharegpt", path, 5).samples]
    assert {s.output_len for s in read("sharegpt", path, 2, output_len=7).samples} == {7}


@pytest.mark.parametrize(
    ("prompt", "answer", "output_len", "is_taken"),
    [
        ("abc", "abcd", None, True),
        ("ab", "abcd", None, False),
        ("abcd", "abc", None, False),
        ("abcd", "abc", 3, True),
        ("a" * 1023, "b" * 1024, None, True),
        ("a" * 1024, "b", 4, False),
        ("a" * 1023, "b" * 1025, None, False),
    ],
    ids=["least", "prompt short", "answer short", "asked", "most", "prompt long", "both long"],
)
def test_sharegpt_is_chosen_as_vllm_does(
    tmp_path: Path, prompt: str, answer: str, output_len: int | None, is_taken: bool
) -> None:
    path = write(tmp_path / "s.json", [turns(prompt, answer), turns("usual prompt", "answer")])
    texts = {s.text for s in read("sharegpt", path, 2, output_len=output_len).samples}
    assert (prompt in texts) is is_taken


def test_custom_rows(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "abc"}\n\n{"prompt": "x\u2028y", "output_tokens": 5}\n')
    assert {s.text: s.output_len for s in read("custom", path, 2).samples} == {
        "abc": 256, "x\u2028y": 5,
    }  # fmt: skip
    assert {s.output_len for s in read("custom", path, 2, output_len=9).samples} == {9}
    found = read("custom", path, 2, max_model_len=20)
    assert [s.text for s in found.samples] == ["x\u2028y"] * 2 and found.num_too_long == 1
    with pytest.raises(InvalidRequestError, match="2 are longer than --max-model-len 3"):
        read("custom", path, 2, max_model_len=3)


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("sharegpt", "{}", "no JSON list"),
        ("sharegpt", "[", "s.json: "),
        ("sharegpt", "[3]", "conversation 0: needs conversations"),
        ("sharegpt", '[{"conversations": "ab"}]', "conversation 0: needs conversations"),
        ("sharegpt", '[{"conversations": [{"from": "gpt"}]}]', "needs a value"),
        ("sharegpt", "[" * 100_000, "recursion"),
        ("custom", "{}", "line 1: needs prompt"),
        ("custom", '{"prompt": ""}', "line 1: needs prompt"),
        ("custom", '{"prompt": "a"}\n{"prompt": "b", "output_tokens": 0}', "line 2: output_tokens"),
        ("custom", "x", "line 1: "),
        ("custom", "", "no prompt that can be used"),
    ],
    ids=range(11),
)
def test_what_is_no_dataset(tmp_path: Path, kind: str, text: str, told: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text)
    with pytest.raises(InvalidRequestError, match=told):
        read(kind, path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(b"\xff")
    with pytest.raises(InvalidRequestError, match="not UTF-8"):
        read("custom", tmp_path / "b")
    with pytest.raises(InvalidRequestError, match="No such file"):
        read("sharegpt", tmp_path / "no")
    with pytest.raises(InvalidRequestError, match="--custom-output-len must be at least 1"):
        read("custom", tmp_path / "b", output_len=0)
    with pytest.raises(InvalidRequestError, match="--num-prompts must be at least 1"):
        read("custom", tmp_path / "b", 0)


def test_texts_are_sent_as_they_are(
    bench: Any, fake: FakeServer, tiny_model_path: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "s.json", [turns("What is up?", "Not much.")])
    of_set = ("--dataset-name", "sharegpt", "--dataset-path", str(path), "--num-prompts", "1")
    flags = (*of_set, "--sharegpt-output-len", "2", "--num-warmups", "0")
    bench(*flags)
    bench(*flags, "--endpoint", "/v1/chat/completions")
    bench(*flags, "--prompt-kind", "ids")
    text, chat, ids = fake.bodies
    assert text["prompt"] == "What is up?" and text["max_tokens"] == 2
    assert chat["messages"] == [{"role": "user", "content": "What is up?"}]
    assert load_tokenizer(tiny_model_path).decode(ids["prompt"]) == "What is up?"
    rows = tmp_path / "c.jsonl"
    rows.write_text('{"prompt": "Hm", "output_tokens": 3}')
    bench("--dataset-name", "custom", "--dataset-path", str(rows), "--num-prompts", "2")
    assert [(body["prompt"], body["max_tokens"]) for body in fake.bodies[3:]] == [("Hm", 3)] * 3


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--dataset-path", "x"], "needs --dataset-name"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path"),
        (["--sharegpt-output-len", "3"], "--sharegpt-output-len is for --dataset-name sharegpt"),
        (
            ["--dataset-name", "custom", "--dataset-path", "x", "--random-input-len", "3"],
            "--random-input-len is for --dataset-name random",
        ),
        (["--result-dir", "x"], "--result-dir needs --save-result"),
        (["--result-filename", "x"], "--result-filename needs --save-result"),
        (["--max-retries", "-1"], "--max-retries must be at least 0"),
        (["--metric-percentiles", "50,x"], "--metric-percentiles '50,x'"),
        (["--metric-percentiles", "0"], "--metric-percentiles '0'"),
        (["--metric-percentiles", "nan"], "--metric-percentiles 'nan'"),
        (["--percentile-metrics", "ttft,p50"], "'p50' is none of ttft, tpot, itl, e2el"),
    ],
    ids=range(11),
)
def test_flags_without_effect_and_wrong_ones(flags: list[str], told: str, capsys: Any) -> None:
    assert main(["bench", "serve", "--base-url", "http://127.0.0.1:9", *flags]) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_results_have_the_names_of_vllms(bench: Any) -> None:
    result = bench(
        "--num-prompts", "3", "--random-output-len", "4", "--random-range-ratio", "0",
        "--request-rate", "50", "--max-concurrency", "2", "--metric-percentiles", "25,99.9",
        "--percentile-metrics", "ttft,e2el", "--goodput", "ttft:9000",
    )  # fmt: skip
    assert result["backend"] == "openai" and result["model_id"] == "fake"
    assert result["request_rate"] == 50 and result["max_concurrency"] == 2
    assert result["completed"] == result["num_prompts"] == 3 and result["failed"] == 0
    assert result["total_output_tokens"] == 12
    assert result["output_throughput"] == pytest.approx(12 / result["duration"])
    assert result["request_throughput"] == result["request_goodput"]
    for key, value in times_of(result["ttfts_s"], (25, 99.9)).items():  # type: ignore[union-attr]
        assert result["ttft_s"][key] == pytest.approx(value)
        if key != "max":
            assert result[f"{key}_ttft_ms"] == pytest.approx(1e3 * value)
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert result[f"median_{name}_ms"] == pytest.approx(1e3 * result[_FIELDS[name]]["median"])
    assert result["median_tpot_ms"] == pytest.approx(1e3 * statistics.median(result["tpots_s"]))
    head = next(line for line in bench.printed.splitlines() if line.startswith("ms "))
    assert head.split() == ["ms", "mean", "p25", "p99.9", "max"]
    assert "first token" in bench.printed and "whole request" in bench.printed
    assert "between chunks" not in bench.printed and "per output token" not in bench.printed


def test_times_by_hand() -> None:
    found = times_of([0.3, 0.1, 0.2], (50, 75))
    assert found is not None and list(found) == ["mean", "std", "median", "p50", "p75", "max"]
    assert found == pytest.approx(
        {"mean": 0.2, "std": (2 / 300) ** 0.5, "median": 0.2, "p50": 0.2, "p75": 0.25, "max": 0.3}
    )
    assert times_of([], (50,)) is None
    assert list(times_of([1.0], (99.9, 99.99999)) or ())[3:5] == ["p99.9", "p99.99999"]
    assert parse_shares("99, 50,50") == (50.0, 99.0)
    assert parse_metrics("itl, ttft,itl") == ("itl", "ttft")


def test_a_file_is_named_by_how_it_was_made() -> None:
    name = file_name("", "inf", 8, "org/Model-1B")
    assert name.startswith("openai-infqps-concurrency8-Model-1B-") and name.endswith(".json")
    assert file_name("a b/c", "4", None, "/m/x/").startswith("a_b_c-4qps-x-")
