"""`--record` and `octavo lab replay`, from the command line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from octavo import __version__
from octavo.cli.main import main
from octavo.lab.calibrated import CalibratedCosts
from octavo.lab.costs import FixedCosts

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def record(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `octavo bench throughput --record` wrote: 12 requests, and 2 to warm up, in a pool that
    is too small."""
    file = tmp_path_factory.mktemp("record") / "run.jsonl.gz"
    engine = ["--model", str(tiny_model_path), "--load-format", "dummy", "--dtype", "float32"]
    pool = ["--num-gpu-blocks-override", "24", "--block-size", "4", "--max-model-len", "64"]
    work = ["--num-prompts", "12", "--input-len", "16", "--output-len", "16", "--num-threads", "1"]
    argv = ["bench", "throughput", *engine, *pool, *work, "--swap-space", "0"]
    assert main([*argv, "--record", str(file)]) == 0
    return file


def run(capsys: Capture, *argv: str) -> tuple[int, str, str]:
    status = main(["lab", "replay", *argv])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_record_is_replayed(record: Path, capsys: Capture) -> None:
    status, out, err = run(capsys, str(record))
    assert (status, err) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in out.splitlines()[1:-1])
    assert "24 blocks of 4, paged" in out.splitlines()[0]
    assert lines["requests"] == "14" and int(lines["preemptions"]) > 0
    assert out.splitlines()[-1] == f"identical: all {lines['steps'].split()[0]} plans"


def test_json_is_the_last_line(record: Path, capsys: Capture) -> None:
    status, out, _ = run(capsys, str(record), "--json")
    values = json.loads(out.splitlines()[-1])
    assert status == 0 and values["identical"] is True and values["difference"] is None
    assert values["num_requests"] == 14 and values["limits"]["num_blocks"] == 24
    assert values["ended"] == "closed" and "what_if" not in values


def test_what_if_tells_both_sides(record: Path, capsys: Capture) -> None:
    status, out, _ = run(capsys, str(record), "--num-blocks", "200", "--json")
    *table, last = out.splitlines()
    found = json.loads(last)["what_if"]
    assert status == 0 and found["changes"] == {"num_blocks": [24, 200]}
    assert found["after"]["num_preemptions"] == 0 < found["before"]["num_preemptions"]
    assert found["recorded"]["num_preemptions"] > 0
    assert found["after"]["output_tokens"] == found["recorded"]["output_tokens"]
    row = next(line for line in table if line.startswith("preemptions  ") and "x" in line)
    nums = [str(found[name]["num_preemptions"]) for name in ("recorded", "before")]
    assert row.split() == ["preemptions", *nums, "0", "0.00x"]
    assert any("What if: num_blocks 24 -> 200" in line for line in table)
    assert max(map(len, table)) < 200


@pytest.mark.parametrize(
    ("flags", "limit", "pair"),
    [
        (["--block-size", "8"], "num_blocks", [24, 12]),
        (["--kv-policy", "orca-max"], "kv_policy", ["paged", "orca-max"]),
        (["--max-num-seqs", "2"], "max_num_seqs", [24, 2]),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", [True, False]),
        (
            ["--preemption-mode", "swap", "--num-host-blocks", "50"],
            "preemption_mode",
            ["auto", "swap"],
        ),
    ],
)
def test_each_limit_can_be_changed(
    record: Path, capsys: Capture, flags: list[str], limit: str, pair: list[Any]
) -> None:
    status, out, _ = run(capsys, str(record), *flags, "--json")
    found = json.loads(out.splitlines()[-1])["what_if"]
    assert status == 0 and found["changes"][limit] == pair
    assert found["after"]["output_tokens"] == found["before"]["output_tokens"] > 0


def test_step_times_come_from_a_calibration(
    record: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def load(path: Path) -> FixedCosts:
        asked.append(path)
        return FixedCosts(step_s=1.0, token_s=0.0, block_s=0.0)

    monkeypatch.setattr(CalibratedCosts, "load", load)
    _, out, _ = run(capsys, str(record), "--num-blocks", "200", "--costs", "c.json", "--json")
    found = json.loads(out.splitlines()[-1])["what_if"]
    assert asked == [Path("c.json")] and found["costs"].startswith("fixed")
    assert found["before"]["seconds"] >= found["before"]["num_steps"]


def tampered(record: Path, tmp_path: Path) -> Path:
    lines = gzip.decompress(record.read_bytes()).decode().splitlines()
    number, line = next((i, json.loads(x)) for i, x in enumerate(lines) if '"step_id":5,' in x)
    line["plan"]["seqs"]["starts"][0] += 1
    lines[number] = json.dumps(line)
    file = tmp_path / "tampered.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


def test_a_difference_is_exit_status_1(record: Path, tmp_path: Path, capsys: Capture) -> None:
    status, out, _ = run(capsys, str(tampered(record, tmp_path)), "--num-blocks", "200", "--json")
    values = json.loads(out.splitlines()[-1])
    assert status == 1 and values["identical"] is False and "what_if" not in values
    assert values["difference"]["step_id"] == 5
    assert values["difference"]["field"] == "seqs[0].start"
    assert "different: step 5, seqs[0].start" in out and "  recorded " in out
    assert f"recorded by octavo {__version__}, replayed by {__version__}" in out
    assert values["octavo"] == values["replayed_by"] == __version__


def test_a_damaged_record_is_exit_status_1(record: Path, tmp_path: Path, capsys: Capture) -> None:
    short = tmp_path / "short.gz"
    short.write_bytes(record.read_bytes()[:-400])
    status, out, _ = run(capsys, str(short), "--json")
    values = json.loads(out.splitlines()[-1])
    assert status == 1 and "identical as far as it was replayed: " in out
    assert "identical: all" not in out and "not the whole record: " in out
    assert values["identical"] is values["complete"] is False and values["difference"] is None


def test_a_header_alone_decides_nothing(record: Path, tmp_path: Path, capsys: Capture) -> None:
    header = tmp_path / "header.jsonl"
    header.write_bytes(gzip.decompress(record.read_bytes()).split(b"\n")[0] + b"\n")
    status, out, _ = run(capsys, str(header), "--json")
    assert status == 0 and "nothing was decided" in out and "identical:" not in out
    assert json.loads(out.splitlines()[-1])["complete"] is False


def test_a_header_of_no_engine_is_named(record: Path, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "header.jsonl"
    header = json.loads(gzip.decompress(record.read_bytes()).split(b"\n")[0])
    for limits, says in (({"max_num_seqs": "x"}, "no int"), ({"max_num_seqs": 0}, "no engine")):
        file.write_text(json.dumps(header | {"limits": header["limits"] | limits}) + "\n")
        status, _, err = run(capsys, str(file))
        assert status == 2 and "line 1" in err and says in err and "bug" not in err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num-blocks", "24"], "--num-blocks 24 is what was recorded"),
        (["--costs", "x"], "--costs has no effect"),
        (["--num-blocks", "9", "--costs", "x"], "cannot read the calibration x"),
        (["--enable-prefix-caching", "--no-enable-prefix-caching"], "drop one"),
        (["--preemption-mode", "swap"], "needs host memory"),
        (["--kv-policy", "orca-max", "--watermark", "0.1"], "--watermark has no effect under"),
    ],
)
def test_what_makes_no_sense_is_refused(
    record: Path, capsys: Capture, flags: list[str], says: str
) -> None:
    status, out, err = run(capsys, str(record), *flags)
    assert status == 2 and says in err and not out.count("What if")


def test_what_is_no_record_is_refused(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "x.txt"
    file.write_text("hello\n")
    status, _, err = run(capsys, str(file))
    assert status == 2 and "line 1 is no header of a record" in err


def test_bench_preemption_refuses_a_record(tmp_path: Path, capsys: Capture) -> None:
    """It starts several engines."""
    assert main(["bench", "preemption", "--record", str(tmp_path / "x")]) == 2
    assert "--record has no effect here" in capsys.readouterr().err
