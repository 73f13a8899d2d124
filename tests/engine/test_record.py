"""`--record`: what a live engine writes, and that a replay decides all of it again."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llm_support import GREEDY, OPTIONS, tokens

import octavo
from octavo import LLM, SamplingParams, __version__
from octavo.config import EngineConfig
from octavo.engine.recorder import Recorder, RecordingManager, RecordingScheduler
from octavo.errors import ConfigError, RecordError, StepFailedError
from octavo.lab.replay import replay
from octavo.lab.replay_report import ReplayReport
from octavo.plan import SeqResult, StepPlan, StepResult
from octavo.record import Added, CacheReset, Call, Ended, RecordReader, Retold, Scheduled, Updated
from octavo.request import Request

PROMPT = [(3 * i) % 200 for i in range(21)]


def calls_of(file: Path) -> list[Call]:
    return list(RecordReader(file).calls())


def replayed(file: Path) -> ReplayReport:
    report = replay(RecordReader(file))
    assert report.is_identical and report.damage is None, str(report.difference)
    return report


def test_the_header_has_what_was_decided(tiny_model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    options = OPTIONS | {"swap_space": 0.001, "preemption_mode": "swap", "max_num_seqs": 5}
    with LLM(str(tiny_model_path), record=file, **options) as llm:
        core = llm._engine.engine.core
        costs = core.scheduler._costs
        priors = costs.token_s, costs.block_s
        assert llm.config.record == str(file)
        assert tokens(llm, "hello")
    header = RecordReader(file).header
    limits = header.limits
    assert (header.octavo, header.model) == (__version__, str(tiny_model_path))
    assert (limits.num_blocks, limits.block_size, limits.max_model_len) == (64, 4, 64)
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (5, 2048)
    assert (limits.preemption_mode, limits.preemption_victim) == ("swap", "last-come")
    assert (limits.kv_policy, limits.scheduling_policy) == ("paged", "fcfs")
    assert limits.enable_prefix_caching
    assert (limits.watermark, limits.max_watermark) == (0.01, 0.125)
    assert limits.num_host_blocks == core.kv.host_ledger().num_blocks > 0
    assert (limits.token_s, limits.block_s) == priors
    assert replayed(file).ended == "closed"


def test_the_calls_are_those_that_were_made(tiny_model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl.gz"
    with LLM(str(tiny_model_path), record=str(file), **OPTIONS) as llm:
        answer = tokens(llm, {"prompt_token_ids": PROMPT})
    added, *steps, ended = calls_of(file)
    assert isinstance(added, Added) and added.request.prompt_token_ids == PROMPT
    assert isinstance(ended, Ended) and ended.totals["queries"] == 1
    plans = [call.plan for call in steps if isinstance(call, Scheduled) and call.plan]
    results = [call.result for call in steps if isinstance(call, Updated)]
    assert [one.token_id for result in results for one in result.sampled] == answer
    assert [plan.step_id for plan in plans] == [result.step_id for result in results]
    assert plans[0].num_tokens == len(PROMPT) and plans[0].new_seqs[0].token_ids == PROMPT
    times = [call.now_s for call in steps if isinstance(call, Scheduled | Updated)]
    assert times == sorted(times) and all(result.compute_s > 0 for result in results)


def test_recording_changes_nothing(tiny_model_path: Path, tmp_path: Path) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True)
    answers = []
    for record in (None, str(tmp_path / "run.jsonl")):
        with LLM(str(tiny_model_path), record=record, **OPTIONS) as llm:
            (output,) = llm.generate("hello", params, use_tqdm=False)
            answers.append([one.token_ids for one in output.outputs])
            kinds = type(llm._engine.engine.core.scheduler), type(llm._engine.engine.core.kv)
            is_recorded = kinds == (RecordingScheduler, RecordingManager)
            assert is_recorded == (record is not None)
    assert answers[0] == answers[1]


# -- when things go wrong


def test_a_failed_step_is_replayed(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.jsonl"
    with LLM(str(tiny_model_path), record=str(file), **OPTIONS) as llm:
        core = llm._engine.engine.core
        tokens(llm, "before")
        execute = core._launch

        def fail(plan: Any) -> Any:
            raise RuntimeError("a device was lost")

        monkeypatch.setattr(core, "_launch", fail)
        with pytest.raises(StepFailedError):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
        monkeypatch.setattr(core, "_launch", execute)
        tokens(llm, "before")
    kinds = [type(call) for call in calls_of(file)]
    assert kinds.count(CacheReset) == kinds.count(Retold) == 1
    assert replayed(file).num_requests == 4


def test_an_engine_that_dies_says_so(
    tiny_model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.jsonl"
    with LLM(str(tiny_model_path), record=str(file), **OPTIONS) as llm:
        tokens(llm, "before")

        def interrupted(*_: Any) -> Any:
            raise KeyboardInterrupt

        monkeypatch.setattr(llm._engine.engine.core.scheduler._planner, "fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", GREEDY, use_tqdm=False)
    last, ended = calls_of(file)[-2:]
    assert isinstance(last, Scheduled) and last.error == "KeyboardInterrupt"
    assert isinstance(ended, Ended) and ended.why == "died of KeyboardInterrupt"
    assert replayed(file).ended == "interrupted by KeyboardInterrupt"


def test_a_refused_request_is_in_it(tiny_model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    with LLM(str(tiny_model_path), record=str(file), **OPTIONS) as llm:
        core = llm._engine.engine.core
        with pytest.raises(Exception, match="exceed"):
            core.add_request(Request(request_id="x", prompt_token_ids=[1] * 80))
    (added, _) = calls_of(file)
    assert added.error == "RequestCapacityError"
    assert replayed(file).num_refused == 1


@pytest.mark.parametrize("name", ["no/such/folder.jsonl", "."])
def test_a_file_that_cannot_be_written_is_refused_before_loading(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"record=.*cannot be written"):
        LLM(str(tmp_path / "no model"), record=str(tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_loaded_leaves_the_old_record(tmp_path: Path) -> None:
    file = tmp_path / "old.jsonl"
    file.write_text("precious\n")
    with pytest.raises(Exception, match="no model"):
        LLM(str(tmp_path / "no model"), record=str(file))
    assert file.read_text() == "precious\n"


def test_a_value_that_is_no_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="record must be a string"):
        EngineConfig(record=3)  # type: ignore[arg-type]


def test_an_engine_that_nobody_closes_loses_nothing(tiny_model_path: Path, tmp_path: Path) -> None:
    """Not even at the end of the process."""
    script = (
        "import sys\nfrom octavo import LLM, SamplingParams\n"
        "params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)\n"
        f"llms = [LLM({str(tiny_model_path)!r}, record=f, **{OPTIONS!r}) for f in sys.argv[1:]]\n"
        "for llm in llms:\n"
        "    llm.generate('hello', params, use_tqdm=False)\n"
    )
    files = [tmp_path / name for name in ("run.jsonl", "run.jsonl.gz")]
    env = os.environ | {"PYTHONPATH": str(Path(octavo.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script, *map(str, files)], check=True, env=env)
    for file in files:
        updates = [call for call in calls_of(file) if isinstance(call, Updated)]
        assert len(updates) == 3
        assert replayed(file).ended is None


# -- the disk tier


def test_what_was_found_on_disk_is_replayed_without_the_disk(
    tiny_weights_path: Path, tmp_path: Path
) -> None:
    options = OPTIONS | {"load_format": "auto", "kv_disk_dir": str(tmp_path / "kv")}
    files = [tmp_path / f"run{i}.jsonl" for i in range(2)]
    for i, file in enumerate(files):
        if i:
            damaged = max((tmp_path / "kv").rglob("*.kv"), key=os.path.getmtime)
            content = damaged.read_bytes()
            damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with LLM(str(tiny_weights_path), record=str(file), **options) as llm:
            for start in (0, 40, 80):
                tokens(llm, {"prompt_token_ids": [start + x % 40 for x in PROMPT]})
    gc.collect()
    first, second = map(replayed, files)
    assert not first.header.disk and second.header.disk
    assert first.num_copies["to_disk"] and second.num_copies["from_disk"]
    fetched = [one for call in calls_of(files[1]) for one in call.fetched]
    assert {True, False} == {is_whole for _, is_whole in fetched}


# -- what it costs


def test_a_decode_step_of_256_sequences_costs_little(tmp_path: Path) -> None:
    """Beside what deciding takes; an upper bound far above what is usual (0.2 ms)."""
    import time

    recorder = Recorder(str(tmp_path / "run.jsonl"))
    kv = RecordingManager(20_000, 16)
    scheduler = RecordingScheduler(
        kv, max_num_seqs=256, max_num_batched_tokens=4096, max_model_len=1024
    )
    recorder.attach(kv, scheduler)
    for i in range(256):
        request = Request(request_id=str(i), prompt_token_ids=[i] * 16, max_tokens=900)
        scheduler.add(request)
    seconds = []
    spent = 0.0
    write = recorder.write

    def timed(call: Call) -> None:
        nonlocal spent
        began = time.thread_time()  # what others do on a busy machine does not count
        write(call)
        spent += time.thread_time() - began

    recorder.write = timed  # type: ignore[method-assign]
    for step in range(60):
        spent = 0.0
        plan: StepPlan | None = scheduler.schedule(step / 100)
        assert plan is not None
        drawn = [SeqResult(share.seq_id, step, None) for share in plan.seqs]
        scheduler.update(StepResult(plan.step_id, drawn), step / 100)
        seconds.append(spent)
    assert plan.num_tokens == 256
    assert sorted(seconds)[len(seconds) // 2] < 2e-3


def test_damage_is_an_error_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("{}\n")
    with pytest.raises(RecordError, match="line 1"):
        RecordReader(tmp_path / "x")
