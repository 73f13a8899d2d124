"""`octavo plan`: from flags to an answer, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main

QUICK = ("--rate", "5", "--num-requests", "300", "--simulated-requests", "120", "--time-limit", "0")
MODEL = ("--model", "llama-3.1-8b", "--gpu", "h200")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("octavo: ") and err.count("\n") == 1
    return err


def planned(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, dict[str, Any]]:
    assert main(["plan", *argv, "--json"]) == 0, capsys.readouterr().err
    lines = capsys.readouterr().out.splitlines()
    values = json.loads(lines[-1])
    assert isinstance(values, dict)
    return "\n".join(lines[:-1]), values


def test_an_answer_for_both(capsys: pytest.CaptureFixture[str]) -> None:
    text, values = planned(capsys, *MODEL, *QUICK)
    assert values["num_gpus"] == values["num_replicas"] == values["tensor_parallel_size"] == 1
    assert values["rate"] == pytest.approx(5.0)
    assert values["slo"] == {"ttft_s": 0.5, "tpot_s": 0.05, "percentile": 95.0}
    assert values["service"]["ok"] and values["service"]["tpot_at"] < 0.05
    assert sum(values["memory"].values()) == pytest.approx(1.0)
    assert text.splitlines()[0].startswith("llama-3.1-8b on h200: sharegpt (synthetic)")
    for words in ("answer: 1 GPU", "131,072 B a token", "Little's law", "limit: ", "p95"):
        assert words in text
    assert any("131,072 B a token" in line for line in values["arithmetic"])


def test_a_config_and_a_trace_from_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace with times needs no --rate."""
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 512,
        "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 2, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = "".join(f"{i / 4},{50 + i % 7},{20 + i % 5}\n" for i in range(120))
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    text, values = planned(
        capsys, "--model", str(tmp_path), "--gpu", "a10g", "--trace", str(trace),
        "--time-limit", "0", "--percentile", "90", "--block-size", "32", "--max-model-len", "512",
    )  # fmt: skip
    assert values["rate"] == pytest.approx(4.0) and values["block_size"] == 32
    assert values["num_requests_simulated"] == 120
    # 4 layers x 2 heads x 64 x 2 x 2 B
    assert "2,048 B a token" in text and "all 120 requests at 4 a second" in text
    assert values["slo"]["percentile"] == 90.0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((*MODEL, "--num-requests", "50"), "no rate is known: say --rate (requests a second)"),
        ((*MODEL, *QUICK, "--slo-tpot", "0.0001"), "no number of GPUs up to 512 keeps"),
        ((*MODEL, *QUICK, "--slo-ttft", "0"), "--slo-ttft must be a number of seconds above 0"),
        ((*MODEL, *QUICK, "--percentile", "100"), "--percentile must be above 0 and below 100"),
        ((*MODEL, *QUICK, "--max-gpus", "0"), "--max-gpus must be at least 1"),
        ((*MODEL, *QUICK, "--host-gpus", "0"), "--host-gpus must be at least 1"),
        (("--model", "llama-3.1-8b", *QUICK), "--gpu is missing: one of h200"),
        (("--gpu", "h200", *QUICK), "--model is missing: a shape ("),
        (("--model", "llama-3.1-8b", "--gpu", "h2000", *QUICK), "did you mean h200?"),
        (
            ("--model", "llama-3.1-70b", "--gpu", "a10g", "--host-gpus", "4", *QUICK),
            "llama-3.1-70b leaves no room for KV on 4 x a10g",
        ),
        ((*MODEL, "--concurrency", "8"), "--concurrency has no rate to plan for"),
    ],
)
def test_refused_with_the_way_out(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str
) -> None:
    assert words in refused(capsys, *argv)
