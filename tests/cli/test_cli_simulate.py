"""`octavo lab simulate`: flags reach the simulation, and what it tells can be read by both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from octavo import __version__
from octavo.cli.main import main
from octavo.lab.lengths import draw_lengths

POOL = ("--num-blocks", "200")


def run(*argv: str) -> int:
    return main(["lab", "simulate", *argv])


def told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """The JSON that a run ends with."""
    assert run(*argv, "--json") == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(found, dict)
    return found


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert run(*argv) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("octavo: ") and err.count("\n") == 1
    return err


def test_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, *POOL, "--num-requests", "40", "--rate", "0.5")
    lengths = draw_lengths("sharegpt", 40)
    num_output = sum(output for _, output in lengths)
    assert (found["num_requests"], found["num_finished"], found["num_refused"]) == (40, 40, 0)
    assert found["output_tokens_per_s"] * found["simulated_s"] == pytest.approx(num_output)
    assert found["requests_per_s"] * found["simulated_s"] == pytest.approx(40)
    assert sum(found["memory"].values()) == pytest.approx(1.0)
    assert 0 < found["memory"]["tokens"] < 1 and found["memory"]["external"] == 0
    for name in ("ttft_s", "tpot_s", "e2e_s", "normalized_s"):
        values = found[name]
        assert 0 < values["p50"] <= values["p95"] <= values["p99"] <= values["max"]
    assert found["config"]["num_blocks"] == 200
    assert found["costs"] == "fixed: 40 ms a step and 0.2 ms a token"
    assert (found["arrival"], found["rate"], found["seed"]) == ("poisson", 0.5, 0)
    assert found["version"] == __version__ and found["trace"] == "sharegpt"
    assert found["draining_s"] < found["simulated_s"]
    assert found["workload"] == "sharegpt (synthetic): 40 requests by Poisson, 0.5 a second"


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*POOL, "--trace", "alpaca", "--num-requests", "20") == 0
    out = capsys.readouterr().out
    assert "alpaca (synthetic): 20 requests all at once" in out
    assert "200 blocks x 16 = 3,200 tokens, paged" in out
    for name in ("time to first token", "normalised (s/token)", "preemptions", "token states"):
        assert f"\n{name} " in out
    assert all(len(line) <= 120 for line in out.splitlines())


def test_the_same_every_time(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (*POOL, "--num-requests", "20", "--arrival", "gamma", "--rate", "2", "--cv", "3")
    first, second = told(capsys, *argv), told(capsys, *argv)
    assert first | {"wall_s": 0} == second | {"wall_s": 0}
    other = told(capsys, *argv, "--seed", "1")
    assert other["e2e_s"] != first["e2e_s"]


def test_a_closed_loop_has_so_many_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    one = told(capsys, *POOL, "--num-requests", "12", "--concurrency", "1")
    four = told(capsys, *POOL, "--num-requests", "12", "--concurrency", "4")
    assert one["mean_batch"] == pytest.approx(1.0)
    assert 1.5 < four["mean_batch"] <= 4.0
    assert four["simulated_s"] < one["simulated_s"]


def test_a_file_at_its_own_times(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,16,4\n100,32,2\nx,1,1\n")
    assert "line 4: arrival_s must be seconds" in refused(capsys, *POOL, "--trace", str(path))
    argv = (*POOL, "--trace", str(path), "--skip-bad-lines")
    found = told(capsys, *argv)
    assert (found["num_requests"], found["num_skipped"]) == (2, 1)
    assert 100 < found["simulated_s"] < 101
    assert 200 < told(capsys, *argv, "--time-scale", "2")["simulated_s"] < 201
    assert told(capsys, *argv, "--until", "50")["num_requests"] == 1
    assert told(capsys, *argv, "--warm-up", "50")["num_measured"] == 1


def test_texts_are_counted_by_a_tokenizer(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    turns = [{"from": "human", "value": "a b c"}, {"from": "gpt", "value": "b a b a b"}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": turns}]))
    argv = (*POOL, "--trace", str(path))
    found = told(capsys, *argv, "--tokenizer", str(tmp_path))
    assert found["total_tokens_per_s"] * found["simulated_s"] == pytest.approx(8)
    assert found["output_tokens_per_s"] * found["simulated_s"] == pytest.approx(5)
    assert "--tokenizer" in refused(capsys, *argv)


def test_the_pool_by_model_and_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    machine = ("--model", "opt-13b", "--gpu", "a100-40gb", "--num-requests", "5")
    found = told(capsys, *machine)
    assert 600 < found["config"]["num_blocks"] < 1000  # the paper's Table 1: 15.7K slots, or 983
    assert found["config"]["max_model_len"] == 2048
    assert "a100-40gb" in found["costs"]
    more = told(capsys, *machine, "--gpu-memory", "80GiB")
    assert more["config"]["num_blocks"] > 3 * found["config"]["num_blocks"]
    alone = told(capsys, "--model", "opt-13b", "--gpu-memory", "40GiB", "--num-requests", "5")
    assert alone["costs"].startswith("fixed")
    assert alone["config"]["num_blocks"] == pytest.approx(found["config"]["num_blocks"], rel=0.05)


def test_policies_hold_different_batches(capsys: pytest.CaptureFixture[str]) -> None:
    def batch(policy: str) -> float:
        argv = ("--num-blocks", "400", "--num-requests", "60", "--kv-policy", policy)
        return float(told(capsys, *argv)["mean_batch"])

    assert batch("orca-max") < batch("orca-pow2") < batch("paged")


def test_replicas_share_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (*POOL, "--num-requests", "40", "--rate", "2")
    one = told(capsys, *argv)
    three = told(capsys, *argv, "--num-replicas", "3", "--router", "least-loaded")
    assert three["e2e_s"]["mean"] < one["e2e_s"]["mean"]
    assert three["num_finished"] == 40 and 0 < three["busy"] <= 1
    assert sum(three["memory"].values()) == pytest.approx(1.0)


def test_shared_prefixes_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (*POOL, "--trace", "alpaca", "--num-requests", "30", "--rate", "1",
            "--shared-prefix-tokens", "160")  # fmt: skip
    assert told(capsys, *argv)["hit_rate"] == 0
    found = told(capsys, *argv, "--enable-prefix-caching")
    assert 0.75 < found["hit_rate"] < 0.95


def test_hash_ids_are_found(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 1024, "output_length": 2, "hash_ids": [1, 2]}
    rows = [row, row | {"timestamp": 9000, "hash_ids": [1, 3]}]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = told(capsys, *POOL, "--trace", str(path), "--enable-prefix-caching")
    assert found["hit_rate"] == pytest.approx(512 / 2048)


def test_samples_share_their_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--num-blocks", "2000", "--num-requests", "8")
    assert told(capsys, *argv, "--n", "4")["shared_saved"] > 0.05
    assert told(capsys, *argv, "--beam-width", "4")["shared_saved"] > 0.2


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ((), "how large is the pool? Say --num-blocks, or --model and --gpu"),
        (("--num-blocks", "0"), "--num-blocks must be at least 1"),
        ((*POOL, "--trace", "alpcaa"), "did you mean alpaca"),
        ((*POOL, "--arrival", "trace"), "has no times"),
        ((*POOL, "--rate", "-1"), "--rate must be a number above 0"),
        ((*POOL, "--max-batch", "4"), "--max-batch is for --kv-policy contiguous"),
        ((*POOL, "--router", "least-loaded"), "--router needs --num-replicas"),
        ((*POOL, "--gpu-memory", "1GB"), "--gpu-memory has no effect here"),
        ((*POOL, "--software", "2023"), "--software 2023 has no effect here"),
        ((*POOL, "--costs", "h2000"), "unknown GPU 'h2000'"),
        ((*POOL, "--gpu", "foo"), "unknown GPU 'foo'"),
        ((*POOL, "--costs", "h200"), "--model is missing"),
        ((*POOL, "--costs", "fixed:1"), "write fixed:STEP,TOKEN"),
        ((*POOL, "--costs", "fixed:0,0"), "not both 0"),
        ((*POOL, "--max-watermark", "3"), "--max-watermark must be at least 0 and below 1"),
        ((*POOL, "--max-watermark", "nan"), "--max-watermark must be at least 0 and below 1"),
        ((*POOL, "--seed", "-1"), "--seed must be from 0"),
        ((*POOL, "--length-scale", "1e9"), "--length-scale 1e+09 makes"),
        (("--num-blocks", "99999999999"), "--num-blocks must be at most 10,000,000"),
        ((*POOL, "--trace", ""), "--trace is empty"),
        ((*POOL, "--trace-format", "csv"), "--trace sharegpt is no file"),
        ((*POOL, "--tensor-parallel-size", "2"), "--tensor-parallel-size has no effect without"),
        ((*POOL, "--costs", "nothing.json"), "nothing.json"),
        ((*POOL, "--model", "opt-13c"), "did you mean opt-13b"),
        (("--model", "opt-13b", "--gpu", "h20"), "unknown GPU 'h20'"),
        (("--model", "opt-175b", "--gpu", "a100-40gb"), "leaves no room for KV"),
        ((*POOL, "--until", "0"), "--until must be a number of seconds above 0"),
        ((*POOL, "--sample-interval", "nan"), "--sample-interval must be"),
        ((*POOL, "--warm-up", "-1"), "--warm-up must be at least 0"),
        ((*POOL, "--priorities", "0", "1"), "--priorities needs --scheduling-policy priority"),
        ((*POOL, "--preemption-mode", "swap"), "needs --num-host-blocks"),
        (
            (*POOL, "--kv-policy", "orca-max", "--num-host-blocks", "5"),
            "is for the policy paged, not orca-max",
        ),
        ((*POOL, "--tensor-parallel-size", "0"), "--tensor-parallel-size must be at least 1"),
        ((*POOL, "--tokenizer", "/nowhere"), "no tokenizer.json there"),
    ],
)
def test_what_cannot_be_simulated_is_refused(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], problem: str
) -> None:
    assert problem in refused(capsys, *argv)


def test_requests_that_never_fit_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("input_tokens,output_tokens\n16,4\n5000,2\n")
    assert run(*POOL, "--trace", str(path)) == 0
    out = capsys.readouterr().out
    assert "1 of 2 requests ended" in out and "\nrefused " in out
    assert run(*POOL, "--trace", str(path), "--max-model-len", "9000") == 0
    out = capsys.readouterr().out
    assert "or raise --num-blocks (or --gpu-memory)" in out, "a flag that is here"


def test_the_watermark_may_not_rise_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (*POOL, "--num-requests", "60", "--rate", "5")
    free = told(capsys, *argv, "--max-watermark", "0", "--watermark", "0")
    kept = told(capsys, *argv, "--max-watermark", "0.5", "--watermark", "0")
    assert free["num_preemptions"] > kept["num_preemptions"] > 0


def test_fixed_costs_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    argv = (*POOL, "--num-requests", "4", "--concurrency", "1")
    slow = told(capsys, *argv, "--costs", "fixed:0.1,0")
    assert slow["costs"] == "fixed: 100 ms a step and 0 ms a token"
    assert slow["simulated_s"] == pytest.approx(0.1 * slow["num_steps"])


def test_the_rest_after_the_last_arrival_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*POOL, "--num-requests", "20", "--rate", "5") == 0
    assert "\nof it draining " in capsys.readouterr().out
    assert run(*POOL, "--num-requests", "20") == 0
    assert "draining" not in capsys.readouterr().out, "where all come at once"


def test_every_flag_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--trace-format", "--arrival", "--kv-policy", "--num-replicas", "--costs",
                 "--sample-interval", "--gpu-memory", "--priorities"):  # fmt: skip
        assert flag in text
