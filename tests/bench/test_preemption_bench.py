"""`octavo bench preemption`: workloads that do not fit, verdicts, and the command end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench.preemption import (
    MODES,
    Mix,
    MixResult,
    ModeRun,
    PreemptionResult,
    Shape,
    _requests,
    three_mixes,
)
from octavo.bench.restore import RestoreCosts
from octavo.cli.main import main
from octavo.errors import InvalidRequestError

Capture = pytest.CaptureFixture[str]


def mode_run(mode: str, *seconds: float) -> ModeRun:
    assert mode in MODES
    counts = (3,) * len(seconds)
    return ModeRun(mode, seconds, 100, counts, counts, counts)  # type: ignore[arg-type]


def result(auto_s: float) -> MixResult:
    return MixResult(
        "some requests",
        (mode_run("recompute", 4.0, 2.0, 9.0), mode_run("swap", 5.0), mode_run("auto", auto_s)),
    )


@pytest.mark.parametrize("pool_tokens", [64, 1000, 2048])
def test_mixes_overfill_the_pool_with_requests_that_fit_it(pool_tokens: int) -> None:
    mixes = three_mixes(pool_tokens)
    assert len({mix.name for mix in mixes}) == 3
    for mix in mixes:
        each = [s.input_len + s.n * s.output_len for s in mix.shapes]
        total = sum(s.num_requests * size for s, size in zip(mix.shapes, each, strict=True))
        assert max(each) <= pool_tokens / 2
        assert total >= 1.5 * pool_tokens


def test_a_pool_too_small_for_them_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="--pool-tokens must be at least 64, got 63"):
        three_mixes(63)


def test_whose_moves_auto_made() -> None:
    """Where they are the same, a difference in time is not `auto`'s."""
    runs = {mode: mode_run(mode, 1.0, 2.0) for mode in MODES}
    assert MixResult("w", tuple(runs.values())).auto_did_as == "swap"
    runs["swap"] = ModeRun("swap", (1.0, 2.0), 100, (3, 3), (3, 4), (3, 3))
    assert MixResult("w", tuple(runs.values())).auto_did_as == "recompute"
    runs["recompute"] = ModeRun("recompute", (1.0, 2.0), 100, (3, 2), (3, 3), (3, 3))
    assert MixResult("w", tuple(runs.values())).auto_did_as is None


def test_verdict_is_against_the_better_mode_by_medians() -> None:
    assert result(4.4).auto_ratio == pytest.approx(1.1)
    assert result(4.4).auto_is_near_the_better
    assert not result(4.5).auto_is_near_the_better


def test_the_table_names_the_cheaper_way_and_the_failure() -> None:
    def costs(block_size: int, swap_s: float) -> RestoreCosts:
        return RestoreCosts(block_size, 256 // block_size, 1, 0.01, swap_s / 2, swap_s / 2, 0.001)

    found = PreemptionResult(256, 2048, 16, [costs(1, 0.02), costs(16, 0.004)], [result(4.5)])
    lines = str(found).splitlines()
    assert [line.split()[-1] for line in lines if line.split()[:1] in (["1"], ["16"])] == [
        "recompute", "swap",
    ]  # fmt: skip
    verdict = "auto took 1.12 x the better mode: NOT within 10 %; it did what swap did"
    assert verdict in lines[-1]
    values = json.loads(json.dumps(found.as_dict()))
    assert values["costs"][1]["swap_s"] == pytest.approx(0.004)
    assert values["mixes"][0]["auto_ratio"] == pytest.approx(1.125)


def test_a_mix_says_what_is_in_it() -> None:
    mix = Mix("both", (Shape(2, 3, 4), Shape(1, 5, 6, n=4)))
    assert str(mix) == "both: 2 x (3 in, 4 out) and 1 x (5 in, 6 out, n=4)"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num-tokens", "0"], "--num-tokens must be at least 1"),
        (["--block-sizes", "16", "0"], "--block-sizes must be at least 1"),
        (["--num-iters", "0"], "--num-iters must be at least 1"),
        (["--num-rounds", "-1"], "--num-rounds must be at least 0"),
        (["--pool-tokens", "9"], "--pool-tokens must be at least 64"),
        (["--preemption-mode", "swap"], "--preemption-mode has no effect here"),
        (["--kv-cache-memory-bytes", "1M"], "--pool-tokens sizes the pool"),
        (["--swap-space", "0"], "--swap-space 0"),
        (["--tokenizer", "/nowhere"], "--tokenizer has no effect here"),
        (["--skip-tokenizer-init"], "--skip-tokenizer-init has no effect here"),
        (["--scheduling-policy", "priority"], "--scheduling-policy has no effect here"),
    ],
)
def test_refuses_before_a_model_is_loaded(flags: list[str], says: str, capsys: Capture) -> None:
    assert main(["bench", "preemption", *flags, "--model", "/nowhere"]) == 2
    assert says in capsys.readouterr().err


def test_a_seed_decides_prompts_and_samples() -> None:
    mix = Mix("few", (Shape(2, 5, 4),))
    first, params = _requests(mix, 100, "0 1 few")
    assert _requests(mix, 100, "0 1 few") == (first, params)
    others = _requests(mix, 100, "1 1 few")
    assert others[0] != first and others[1] != params


@pytest.mark.usefixtures("one_torch_thread")
def test_end_to_end(tiny_model_path: Path, capsys: Capture) -> None:
    words = [
        "--num-tokens", "40", "--block-sizes", "4", "64", "--num-iters", "2",
        "--pool-tokens", "192", "--num-rounds", "1", "--json", "--block-size", "4",
        "--model", str(tiny_model_path), "--load-format", "dummy", "--dtype", "float32",
        "--max-num-seqs", "32", "--max-num-batched-tokens", "32", "--swap-space", "0.1",
    ]  # fmt: skip
    assert main(["bench", "preemption", *words]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(c["block_size"], c["num_blocks"]) for c in found["costs"]] == [(4, 10), (64, 1)]
    for cost in found["costs"]:
        assert min(cost["recompute_s"], cost["swap_out_s"], cost["swap_in_s"]) > 0
    assert len(found["mixes"]) == 3
    for mix in found["mixes"]:
        runs = {run["mode"]: run for run in mix["runs"]}
        assert runs["recompute"]["num_output_tokens"] == runs["swap"]["num_output_tokens"] > 0
        assert min(sum(run["num_preemptions"]) for run in runs.values()) > 0, mix["workload"]
        assert sum(runs["recompute"]["tokens_moved"]) == 0
        assert sum(runs["swap"]["tokens_moved"]) > 0
