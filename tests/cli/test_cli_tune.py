"""`octavo tune block-size`: tables, a recommendation, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.block_size import measure_decode
from octavo.cli.main import main
from octavo.config import EngineConfig
from octavo.errors import InvalidRequestError

QUICK = ("--num-requests", "200", "--simulated-requests", "60", "--no-measure-host")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["tune", "block-size", *argv]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("octavo: ") and err.count("\n") == 1
    return err


def tuned(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, dict[str, Any]]:
    assert main(["tune", "block-size", *argv, "--json"]) == 0, capsys.readouterr().err
    lines = capsys.readouterr().out.splitlines()
    values = json.loads(lines[-1])
    assert isinstance(values, dict)
    return "\n".join(lines[:-1]), values


def test_the_paper_s_pool_and_software(capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels of 2023 pay for every block, and large ones are left half empty (paper, Fig. 18b)."""
    text, values = tuned(
        capsys, *QUICK, "--model", "opt-13b", "--gpu", "a100-40gb", "--software", "2023",
        "--block-sizes", "1", "16", "256",
    )  # fmt: skip
    assert values["saturated"] and "throughput" in text
    one, usual, large = (row["score"] for row in values["rows"])
    assert usual == 1.0 and one < 0.8 and large > one
    assert values["rows"][0]["unfilled"] == 0 and values["rows"][2]["unfilled"] > 0.15
    assert values["matters"] and values["recommended"] in (16, 256)
    assert values["num_slots"] == values["rows"][1]["num_blocks"] * 16


def test_a_pool_in_blocks_and_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """A pool of tokens needs no model; with a rate, latency counts."""
    text, values = tuned(
        capsys, *QUICK, "--num-blocks", "4000", "--rate", "1", "--block-sizes", "16", "32"
    )
    assert not values["saturated"] and values["num_slots"] == 64_000
    assert [row["num_blocks"] for row in values["rows"]] == [4000, 2000]
    assert not values["matters"] and values["recommended"] == 16
    assert "it does not matter here" in text and "host" not in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--num-blocks", "100", "--block-sizes", "0"), "--block-sizes must be at least 1 each"),
        (("--num-blocks", "100", "--concurrency", "3"), "--concurrency is not compared here"),
        (("--num-blocks", "100", "--simulated-requests", "1"), "must be at least 2, got 1"),
        (("--num-blocks", "100", "--measure", "m"), "add --costs FILE"),
        ((), "how large is the pool?"),
    ],
)
def test_refused_with_the_way_out(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str
) -> None:
    assert words in refused(capsys, *argv)


def test_decoding_is_measured_by_block_size(tiny_weights_path: Path) -> None:
    from octavo.cli.start import start_engine

    found = measure_decode(
        EngineConfig(model=str(tiny_weights_path)),
        start_engine,
        block_sizes=(4, 16),
        batch_size=4,
        context=16,
        num_steps=4,
        num_iters=2,
    )
    assert sorted(found) == [4, 16]
    assert all(0 < seconds < 5 for seconds in found.values())
    with pytest.raises(InvalidRequestError, match="must be at least 1 each"):
        measure_decode(EngineConfig(model=str(tiny_weights_path)), start_engine, block_sizes=())
