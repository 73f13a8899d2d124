"""`octavo demo memory`: two policies over one load, in a process of its own and on a stage."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from octavo.cli.main import main
from octavo.lab.config import SimConfig
from octavo.lab.costs import FixedCosts
from octavo.lab.demo import Stage, table
from octavo.lab.simulator import simulate
from octavo.lab.trace import Trace, TraceRequest
from octavo.lab.workload import Workload, make_workload


def load() -> Workload:
    requests = [TraceRequest(num_input=50, num_output=150) for _ in range(40)]
    return make_workload(Trace(name="made up", requests=requests), rate=4.0, seed=1)


def test_a_stage_plays_what_a_simulation_does() -> None:
    config = SimConfig(num_blocks=64, kv_policy="orca-max", max_model_len=256)
    stage = Stage(config, FixedCosts(), load(), "a-model")
    num_frames = 0
    for tick in range(1, 10_000):
        stage.advance(tick * 0.5)
        frame = stage.frame()
        num_frames += 1
        assert frame["num_waiting"] + frame["num_running"] <= 40
        if tick > 40 and stage.is_over:
            break
    expected = simulate(load().requests, config, FixedCosts())
    reached = stage.reached()
    assert reached.num_ended == len(expected.times) == 40
    assert reached.ttft_p99_s == pytest.approx(float(np.percentile(expected.times.ttft_s(), 99)))
    assert reached.most_running == 4  # of 64 blocks, 16 for each
    assert num_frames > 40


def test_paged_is_ahead_of_orca_and_the_table_says_so() -> None:
    found = []
    for policy in ("paged", "orca-max"):
        config = SimConfig(num_blocks=64, kv_policy=policy, max_model_len=256)  # type: ignore[arg-type]
        stage = Stage(config, FixedCosts(), load(), "a-model")
        stage.advance(20.0)
        found.append(stage.reached())
    paged, orca = found
    assert paged.num_ended > orca.num_ended
    assert paged.shares["tokens"] > orca.shares["tokens"]
    assert orca.shares["reserved"] + orca.shares["internal"] > 0.2
    lines = table(found, 20.0).splitlines()
    row = next(line.split() for line in lines if line.startswith("requests answered"))
    assert row[-2:] == [str(paged.num_ended), str(orca.num_ended)]


def test_the_page_is_served_and_ctrl_c_ends_with_the_table(tmp_path: Path) -> None:
    source = str(Path(__file__).parents[2] / "src")
    words = ["demo", "memory", "--port", "0", "--no-browser", "--speed", "50"]
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", *words],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": source},
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first.startswith("octavo plays paged and orca-max at http://127.0.0.1:")
        url = first.split()[-1]
        with urllib.request.urlopen(f"{url}/sources", timeout=60) as answer:
            rows = json.load(answer)
        assert [row["name"] for row in rows] == ["paged", "orca-max"]
        policies = []
        streams = [urllib.request.urlopen(f"{url}/{row['frames']}", timeout=60) for row in rows]
        for stream in streams:
            line = next(line for line in stream if line.startswith(b"data: {"))
            policies.append(json.loads(line[6:])["about"]["kv_policy"])
        assert policies == ["paged", "orca-max"]
        process.send_signal(signal.SIGINT)  # with people watching
        rest, _ = process.communicate(timeout=60)
        for stream in streams:
            stream.close()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "requests answered" in rest and "pool: tokens" in rest


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--policies", "paged", "paged"], "--policies"),
        (["--speed", "0"], "--speed"),
        (["--speed", "1000"], "--speed"),
        (["--port", "70000"], "--port"),
        (["--workload", "nowhere.csv"], "nowhere.csv"),
        (["--rate", "-1"], "--rate"),
    ],
)
def test_flags_that_cannot_be(
    flags: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "memory", "--no-browser", *flags]) == 2
    assert word in capsys.readouterr().err


def test_a_port_in_use_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        assert main(["demo", "memory", "--no-browser", "--port", port]) == 2
    assert f"--port {port}" in capsys.readouterr().err
