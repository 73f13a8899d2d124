"""The record's lines: what is read equals what was written, and what is damaged is named."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import ConfigError, RecordError
from octavo.plan import (
    BeamCandidate,
    BeamDraw,
    BlockCopy,
    BlockLabel,
    CopyKind,
    NewSeq,
    SeqFork,
    SeqPlan,
    SeqResult,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from octavo.record import (
    Aborted,
    Added,
    CacheReset,
    Call,
    Ended,
    EngineLimits,
    Finished,
    Flushed,
    Pinned,
    PrefixCacheReset,
    RecordHeader,
    RecordReader,
    RecordWriter,
    Resized,
    Retold,
    Scheduled,
    Unpinned,
    Updated,
    decode_call,
    encode_call,
)
from octavo.record.codec import decode_header, encode_header
from octavo.request import BeamSearchParams, FinishReason, Request, SamplerParams

LIMITS = EngineLimits(
    num_blocks=40, block_size=4, bytes_per_block=2048, kv_policy="paged", max_model_len=64,
    max_num_seqs=8, max_num_batched_tokens=32, enable_prefix_caching=True, num_host_blocks=3,
    max_disk_blocks=2, preemption_mode="auto", preemption_victim="last-come",
    scheduling_policy="fcfs", watermark=0.01, max_watermark=0.125, token_s=1e-3,
    block_s=0.1 + 0.2, plan_ahead=True,
)  # fmt: skip
LABEL = BlockLabel(b"\x00\xff", b"ab", (1, 2, 3, 4))
HEADER = RecordHeader(
    octavo="0.0.1", model="a \ud800 model", began_s=1 / 3, limits=LIMITS, disk=((7, LABEL),)
)
SAMPLER = SamplerParams(
    temperature=0.7, seed=2**63, logit_bias=((3, -1.5),), allowed_token_ids=(), min_tokens=2,
    bad_words=((1, 2), (3,)), min_tokens_masked_ids=(9,), num_logprobs=0,
)  # fmt: skip
REQUEST = Request(
    request_id="x", prompt_token_ids=[1, 2], sampler=SAMPLER, n=3, cache_salt="\udfff",
    max_tokens=5, expected_output_tokens=4, eos_token_ids=frozenset({9, 8}), priority=-1,
    stop_token_ids=frozenset({3}), arrival_s=math.pi,
    beam=BeamSearchParams(beam_width=3, max_tokens=5, early_stopping="never"),
)  # fmt: skip
PLAN = StepPlan(
    step_id=0,
    new_seqs=[NewSeq(4, [1, 2], SAMPLER, 1)],
    forks=[SeqFork(4, 5, 2, SAMPLER, 2)],
    appends=[(5, 11)],
    finished=[1],
    preempted=[2],
    moved=[(9, 3)],
    copies=[BlockCopy(1, 2, kind) for kind in CopyKind]
    + [BlockCopy(1, 2, CopyKind.TO_DISK, LABEL)],
    seqs=[
        SeqPlan(4, 0, 2, (1, 2), None, True),
        SeqPlan(5, 7, 1, (), (1, 3), True),
        SeqPlan(6, 8, 1, (), None, False),
    ],
    extra_draws={4: (7, 8)},
    beams=[BeamDraw((5, 6), (-0.1, -math.inf), 4)],
)
PLAIN = StepPlan(1, seqs=[SeqPlan(i, i + 9, 1, (), None, True) for i in range(3)])
RESULT = StepResult(
    0,
    sampled=[SeqResult(4, 17, None), SeqResult(7, -3, None)],
    beams=[[BeamCandidate(0, 5, -1.25), BeamCandidate(1, 6, -math.inf)], []],
    copy_s=1e-7,
    num_host_copies=2,
    compute_s=0.1,
)
CALLS: list[Call] = [
    Added(request=REQUEST),
    Added(request=Request(request_id="", prompt_token_ids=[0]), error="RequestCapacityError"),
    Aborted(request_id="x"),
    Finished(seq_id=3, reason=FinishReason.STOP, stop_reason="end"),
    Finished(seq_id=3, reason=FinishReason.ABORT),
    Pinned(token_ids=[1, 2, 3, 4], salt="s", pin_id=0),
    Pinned(token_ids=[1], error="CapacityError"),
    Unpinned(pin_id=0),
    Resized(num_blocks=7, now_s=0.3),
    PrefixCacheReset(num_freed=2),
    CacheReset(),
    Retold(),
    Retold(step_id=0),
    Flushed(copies=(BlockCopy(1, 2, CopyKind.TO_DISK, LABEL),)),
    Scheduled(now_s=0.1, plan=PLAN, num_free=3, num_evicted=1, fetched=((4, True), (5, False))),
    Scheduled(now_s=0.2, plan=PLAIN),
    Scheduled(now_s=0.2, plan=StepPlan(2, moved=[(1, 0)])),
    Scheduled(now_s=0.3, plan=None),
    Updated(now_s=0.4, result=RESULT),
    Updated(now_s=0.5, result=StepResult(1, [])),
    Ended(why="closed", totals={"num_preemptions": 3}),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: type(call).__name__)
def test_a_call_is_read_as_it_was_written(call: Call) -> None:
    line = encode_call(call)
    assert "\n" not in line and line.isascii()
    read = decode_call(line)
    # repr, too: a list that should be a tuple, or a True that should be 1, is not the same
    assert read == call and repr(read) == repr(call)


def test_logprobs_are_left_out() -> None:
    logprobs = TokenLogprobs(17, -0.5, 1, ())
    result = StepResult(0, [SeqResult(4, 17, logprobs)], prompt_logprobs={4: [logprobs]})
    assert decode_call(encode_call(Updated(now_s=0.0, result=result))) == Updated(
        now_s=0.0, result=StepResult(0, [SeqResult(4, 17, None)])
    )


def test_whole_numbers_of_any_kind_are_written() -> None:
    request = Request(request_id="x", prompt_token_ids=[np.int64(3), np.uint8(4)])  # type: ignore[list-item]
    read = decode_call(encode_call(Added(request=request)))
    assert read == Added(request=request) and "[3, 4]" in repr(read)
    with pytest.raises(TypeError):
        encode_call(Added(request=Request(request_id="x", prompt_token_ids=[object()])))  # type: ignore[list-item]


def test_a_decode_step_is_short() -> None:
    """Ids and starts of all; what is the same for all, once; what nobody has, not at all."""
    seqs = [SeqPlan(i, 1000 + i, 1, (), None, True) for i in range(256)]
    line = encode_call(Scheduled(now_s=0.0, plan=StepPlan(5, seqs=seqs)))
    assert len(line) < 256 * 10
    assert decode_call(line) == Scheduled(now_s=0.0, plan=StepPlan(5, seqs=seqs))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_file_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name)
    assert (file.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    reader = RecordReader(file)
    assert reader.header == HEADER and list(reader.calls()) == CALLS
    assert reader.num_lines == 1 + len(CALLS)


def test_what_it_is_called_does_not_matter_to_the_reader(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gz").rename(tmp_path / "a.jsonl")
    assert list(RecordReader(file).calls()) == CALLS


def write(file: Path) -> Path:
    writer = RecordWriter(str(file))
    writer.write_header(HEADER)
    for call in CALLS:
        writer.write(call)
    writer.close()
    writer.close()
    writer.write(CALLS[0])  # of no effect
    return file


# -- what goes wrong


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_lines_arrive_within_a_second_of_the_clock(tmp_path: Path, name: str) -> None:
    """A crash loses what came since."""
    now_s = 0.0
    writer = RecordWriter(str(tmp_path / name), clock=lambda: now_s)
    writer.write_header(HEADER)
    writer.write(CALLS[0])
    assert what_is_there(tmp_path / name) == []
    now_s = 1.01
    writer.write(CALLS[2])
    assert what_is_there(tmp_path / name) == [CALLS[0], CALLS[2]]


def what_is_there(file: Path) -> list[Call]:
    calls: list[Call] = []
    with contextlib.suppress(RecordError):
        for call in RecordReader(file).calls():
            calls.append(call)
    return calls


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_record_that_breaks_off_is_read_up_to_there(tmp_path: Path, name: str) -> None:
    file = write(tmp_path / name)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) * 2 // 3])
    reader = RecordReader(file)
    calls: list[Call] = []
    with pytest.raises(RecordError, match=r"line \d+.*breaks off") as caught:
        for call in reader.calls():
            calls.append(call)
    assert calls == CALLS[: len(calls)] and 0 < len(calls) < len(CALLS)
    assert f"line {len(calls) + 2}" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"call":"dance"}', "KeyError"),
        ('{"call":"abort"}', "request_id"),
        ('{"call":"abort","request_id":"x","more":1}', "more"),
        ('{"call":"schedule","now_s":0,"plan":{"step_id":1,"seqs":{"ids":[1],"starts":[]}}}', ""),
        ("[]", "TypeError"),
        ("", "JSONDecodeError"),
        ("\x00", "JSONDecodeError"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    file = write(tmp_path / "a.jsonl")
    lines = file.read_text().splitlines()
    lines[4] = line
    file.write_text("\n".join(lines))
    reader = RecordReader(file)
    with pytest.raises(RecordError, match=f"line 5 cannot be read.*{says}"):
        list(reader.calls())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"hello\n", "line 1 is no header"),
        (b'{"model": 1}\n', "line 1 is no header"),
        (b"[1]\n", "line 1 is no header"),
        (b"\xff\xfe\n", "line 1 cannot be read"),
        (b'{"octavo_record": 2, "octavo": "9.9"}\n', "version 2.*octavo 9.9"),
        (b'{"octavo_record": 1, "limits": {}}\n', "line 1 cannot be read"),
        (b"\x1f\x8b\x08\x00", "line 1 cannot be read"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "a"
    file.write_bytes(content)
    with pytest.raises(RecordError, match=says):
        RecordReader(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read: No such file"):
        RecordReader(tmp_path / "nothing")


def test_a_file_that_cannot_be_written_is_refused_and_others_stay(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "a.jsonl"):
        with pytest.raises(ConfigError, match=r"cannot be written.*--record"):
            RecordWriter(str(path))


def test_a_full_disk_ends_the_record_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    writer = RecordWriter("/dev/full")
    writer.write_header(HEADER)
    assert not writer.is_open and "No space left" in caplog.text
    writer.write(CALLS[0])
    writer.close()


def test_a_call_that_has_no_line_ends_the_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What came before is there, at once, and the files are closed."""
    for name in ("a.jsonl", "a.jsonl.gz"):
        writer = RecordWriter(str(tmp_path / name))
        writer.write_header(HEADER)
        writer.write(CALLS[2])
        raw = writer._raw
        writer.write(Pinned(token_ids=[object()]))  # type: ignore[list-item]
        assert not writer.is_open and raw is not None and raw.closed and writer._file.closed
        assert "record ends here" in caplog.text and "TypeError" in caplog.text
        writer.write(CALLS[0])
        assert list(RecordReader(tmp_path / name).calls()) == [CALLS[2]]
        caplog.clear()


def test_an_interrupt_while_writing_goes_on_and_ends_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(call: Call) -> str:
        raise KeyboardInterrupt

    writer = RecordWriter(str(tmp_path / "a.jsonl"))
    writer.write_header(HEADER)
    monkeypatch.setattr("octavo.record.file.encode_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.write(CALLS[0])
    assert not writer.is_open and list(RecordReader(tmp_path / "a.jsonl").calls()) == []


def test_lines_are_json_by_themselves(tmp_path: Path) -> None:
    """Others may read them with what they have."""
    with gzip.open(write(tmp_path / "a.gz"), "rt") as file:
        lines = [json.loads(line) for line in file]
    assert lines[0]["limits"]["num_blocks"] == 40 and lines[1]["request"]["prompt_token_ids"] == [
        1,
        2,
    ]


def test_a_header_from_before_plans_were_made_ahead() -> None:
    values = json.loads(encode_header(HEADER))
    del values["limits"]["plan_ahead"]
    limits = decode_header(json.dumps(values)).limits
    assert limits == replace(LIMITS, plan_ahead=False)
