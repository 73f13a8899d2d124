"""Trace files are recognised by what is in them; what is wrong with one is named by its line."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import TraceError
from octavo.lab.readers import read_trace
from octavo.lab.trace import Trace, TraceRequest


def read(folder: Path, text: str, name: str = "trace.txt", **options: object) -> Trace:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return read_trace(path, **options)  # type: ignore[arg-type]


def lengths(trace: Trace) -> list[tuple[float | None, int, int]]:
    return [(r.arrival_s, r.num_input, r.num_output) for r in trace.requests]


def json_lines(*rows: object) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def count_words(text: str) -> int:
    return len(text.split())


def test_csv_of_lengths_with_and_without_times(tmp_path: Path) -> None:
    trace = read(tmp_path, "input_tokens,output_tokens\n21,518\n8,66\n", "list.csv")
    assert lengths(trace) == [(None, 21, 518), (None, 8, 66)]
    assert (trace.name, trace.has_arrivals, trace.block_tokens) == ("list.csv", False, 0)
    assert (trace.mean_input, trace.mean_output) == (14.5, 292.0)
    timed = read(tmp_path, "arrival_s,input_tokens,output_tokens\n0.5,3,4\n2,5,6\n")
    assert lengths(timed) == [(0.5, 3, 4), (2.0, 5, 6)]


def test_packed_files_are_known_by_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"  # without .gz
    path.write_bytes(gzip.compress(b"input_tokens,output_tokens\n1,2\n", mtime=0))
    assert lengths(read_trace(path)) == [(None, 1, 2)]


def test_optional_columns_arrive(tmp_path: Path) -> None:
    header = "arrival_s,input_tokens,output_tokens,session,think_s,client,priority,n,beam_width,"
    header += "prefix,prefix_tokens,whatever\n"
    trace = read(tmp_path, header + "1,30,4,s1,2.5,c7,-3,2,0,sys,16,x\n2,3,4,,,,,,,,,\n")
    assert trace.requests[0] == TraceRequest(
        num_input=30, num_output=4, arrival_s=1.0, session="s1", think_s=2.5, client="c7",
        priority=-3, n=2, prefix="sys", prefix_tokens=16,
    )  # fmt: skip
    assert trace.requests[1] == TraceRequest(num_input=3, num_output=4, arrival_s=2.0)


@pytest.mark.parametrize(
    "header",
    ["prompt_len,output_len", "num_prefill_tokens,num_decode_tokens", "Input Length;OUTPUT-LENGTH",
     "prompt_tokens\tcompletion_tokens"],
)  # fmt: skip
def test_usual_names_and_separators(tmp_path: Path, header: str) -> None:
    comma = next(c for c in ",;\t" if c in header)
    assert lengths(read(tmp_path, f"{header}\n7{comma}9.0\n")) == [(None, 7, 9)]


def test_azure(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n"
    text += "2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:18:03.9799600,110,27\n"
    for kind in ("auto", "azure"):
        trace = read(tmp_path, text, format=kind)
        assert [n for _, *n in lengths(trace)] == [[4808, 10], [3180, 8], [110, 27]]
        assert [r.arrival_s for r in trace.requests] == pytest.approx([0.0, 0.052, 60.0], abs=1e-5)


def test_burstgpt(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    text += "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,0,1087,Conversation log\n"
    text += "118,ChatGPT,417,276,693,API log\n"
    for trace in (read(tmp_path, text), read(tmp_path, text, format="burstgpt")):
        assert lengths(trace) == [(5.0, 472, 18), (118.0, 417, 276)]
        assert trace.num_skipped == 1, "no answer, no request"
    with pytest.raises(TraceError, match=r"line 3: Response tokens must be a whole number"):
        read(tmp_path, text.replace(",0,", ",x,"))


def test_units_of_time(tmp_path: Path) -> None:
    row = {"timestamp": 3000, "input_length": 600, "output_length": 9, "hash_ids": [1, 2]}
    header = {"header": {"block_tokens": 512}}
    both = json_lines(header, row)
    assert read(tmp_path, both).requests[0].arrival_s == 3000.0, "a file of its own"
    mooncake = read(tmp_path, both, format="mooncake")
    assert (mooncake.requests[0].arrival_s, mooncake.block_tokens) == (3.0, 512)
    said = json_lines(header, {"arrival_s": 3.0, "input_length": 600, "output_length": 9})
    assert read(tmp_path, said, format="mooncake").requests[0].arrival_s == 3.0
    csv = "timestamp,input_length,output_length\n0,7,9\n3000,7,9\n"
    for format in ("auto", "csv", "mooncake"):
        assert [r.arrival_s for r in read(tmp_path, csv, format=format).requests] == [0.0, 3.0]
    own = csv.replace("timestamp", "time")
    assert [r.arrival_s for r in read(tmp_path, own).requests] == [0.0, 3000.0]
    for scale in (1, 10**3, 10**6, 10**9):  # seconds to nanoseconds since 1970
        begin = 1_700_000_000 * scale
        text = f"timestamp,input_tokens,output_tokens\n{begin + 3 * scale},7,9\n{begin},7,9\n"
        times = [r.arrival_s for r in read(tmp_path, text).requests]
        assert times == pytest.approx([0.0, 3.0], abs=1e-5), scale


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"input_tokens,output_tokens,who\n1,2,\xc3\xa9\n3,4,\xe9\n5,6,x\n")
    with pytest.raises(TraceError, match=r"line 3: is no text in UTF-8; .*--skip-bad-lines"):
        read_trace(path)
    trace = read_trace(path, skip_bad_lines=True)
    assert [r.num_input for r in trace.requests] == [1, 5] and trace.num_skipped == 1
    rows = [b'{"input_tokens": 1, "output_tokens": 2, "client": "%s"}' % name for name in
            (b"\xe9", b"x")]  # fmt: skip
    path.write_bytes(b"\n".join(rows))
    with pytest.raises(TraceError, match="line 1: is no text in UTF-8"):
        read_trace(path)
    assert len(read_trace(path, skip_bad_lines=True).requests) == 1
    path.write_bytes(b'[{"conversations":\n[{"from": "\xe9"}]}]')
    with pytest.raises(TraceError, match="line 2 is no text in UTF-8"):
        read_trace(path, tokenize=count_words)


def test_a_tokenizer_for_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has lengths and no texts: --tokenizer does nothing"):
        read(tmp_path, "input_tokens,output_tokens\n1,2\n", tokenize=count_words)


def test_mooncake_as_published(tmp_path: Path) -> None:
    row = {"timestamp": 27482, "input_length": 1030, "output_length": 52, "hash_ids": [46, 47, 99]}
    trace = read(tmp_path, json_lines(row, row | {"timestamp": 30535, "hash_ids": [46, 47]}))
    assert trace.block_tokens == 512
    assert lengths(trace) == [(27.482, 1030, 52), (30.535, 1030, 52)]
    assert [r.hash_ids for r in trace.requests] == [(46, 47, 99), (46, 47)]


def test_traces_with_chat_ids_have_ids_of_16_tokens_and_seconds(tmp_path: Path) -> None:
    row = {"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 20,
           "output_length": 3, "type": "text", "turn": 1, "hash_ids": [1, 2]}  # fmt: skip
    trace = read(tmp_path, json_lines(row))
    assert (trace.block_tokens, lengths(trace)) == (16, [(61.114, 20, 3)])
    assert trace.requests[0].session == "159"


def test_hash_ids_behind_a_header(tmp_path: Path) -> None:
    row = {"arrival_s": 1, "input_tokens": 40, "output_tokens": 5, "session": 0, "hash_ids": [7, 8]}
    trace = read(tmp_path, json_lines({"header": {"source": "x", "block_tokens": 16}}, row))
    assert (trace.block_tokens, trace.requests[0].hash_ids) == (16, (7, 8))
    assert trace.requests[0].session == "0"
    with pytest.raises(TraceError, match=r"line 1: has hash_ids, and no first line"):
        read(tmp_path, json_lines(row))
    with pytest.raises(TraceError, match=r"line 2: has 2 hash_ids of 40 tokens for a prompt of 40"):
        read(tmp_path, json_lines({"header": {"block_tokens": 40}}, row))
    with pytest.raises(TraceError, match="block_tokens"):
        read(tmp_path, json_lines({"header": {"block_tokens": "16"}}, row))


def test_parents_become_hash_ids(tmp_path: Path) -> None:
    header = "input_tokens,output_tokens,parent_row,shared_tokens\n"
    trace = read(tmp_path, header + "130,1,-1,0\n200,1,0,130\n300,1,1,70\n64,1,-1,0\n")
    assert trace.block_tokens == 64
    assert [r.hash_ids for r in trace.requests] == [(0, 1), (0, 1, 2), (0, 3, 4, 5), (6,)]


def test_sharegpt_takes_the_first_round(tmp_path: Path) -> None:
    def said(*turns: tuple[str, str]) -> dict[str, object]:
        return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}

    conversations = [
        said(("human", "a b c"), ("gpt", "d e"), ("human", "f")),
        said(("gpt", "an answer without a question")),
        said(("system", "s"), ("user", "one"), ("assistant", "two three four")),
        said(("human", "asked"), ("gpt", "")),
        said(),
    ]
    for text in (json.dumps(conversations), json.dumps(conversations, indent=1),
                 json_lines(*conversations)):  # fmt: skip
        trace = read(tmp_path, text, tokenize=count_words)
        assert lengths(trace) == [(None, 3, 2), (None, 1, 3)]
        assert trace.num_skipped == 3
    with pytest.raises(TraceError, match="--tokenizer"):
        read(tmp_path, json.dumps(conversations))
    with pytest.raises(TraceError, match=r"conversation 2: must be an object"):
        read(tmp_path, json.dumps([conversations[0], 5]), tokenize=count_words)
    with pytest.raises(TraceError, match=r"conversation 1: a message must have .* from and value"):
        read(tmp_path, '[{"conversations": [{"from": 3}]}]', tokenize=count_words)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("1,x,3", "input_tokens must be a whole number, got 'x'"),
        ("1,2.5,3", "input_tokens must be a whole number, got '2.5'"),
        ("1,0,3", "input_tokens must be at least 1, got 0"),
        ("1,2,-3", "output_tokens must be at least 1, got -3"),
        ("1,2,9999999999", "output_tokens must be at most 1,000,000,000"),
        ("1,2,", "output_tokens is missing"),
        (",2,3", "arrival_s is missing"),
        ("soon,2,3", "arrival_s must be seconds or a date"),
        ("-1,2,3", "arrival_s must be a time of at least 0"),
        ("nan,2,3", "arrival_s must be a time of at least 0"),
        ("1,2", "has 2 values, the header names 3 columns"),
        ('"1,2,3', "has 1 values, the header names 3 columns"),
    ],
)
def test_bad_lines_are_named_or_skipped(tmp_path: Path, line: str, problem: str) -> None:
    text = f"arrival_s,input_tokens,output_tokens\n1,2,3\n\n{line}\n4,5,6\n"
    with pytest.raises(TraceError) as caught:
        read(tmp_path, text)
    assert f"trace.txt: line 4: {problem}" in str(caught.value)
    assert "--skip-bad-lines" in str(caught.value)
    trace = read(tmp_path, text, skip_bad_lines=True)
    assert (lengths(trace), trace.num_skipped) == ([(1.0, 2, 3), (4.0, 5, 6)], 1)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is no JSON"),
        ("[1]", "must be a JSON object"),
        ('{"input_tokens": 3}', "has no output_tokens"),
        ('{"input_tokens": true, "output_tokens": 1}', "input_tokens must be a whole number"),
        ('{"input_tokens": 3, "output_tokens": 1, "hash_ids": [1.5]}', "hash_ids must be a list"),
        ('{"input_tokens": 3, "output_tokens": 1, "hash_ids": [-1]}', "hash_ids must be a list"),
    ],
)
def test_bad_json_lines_are_named_or_skipped(tmp_path: Path, line: str, problem: str) -> None:
    text = f'{{"header": {{"block_tokens": 16}}}}\n{line}\n{{"input_tokens":1,"output_tokens":2}}\n'
    with pytest.raises(TraceError) as caught:
        read(tmp_path, text)
    assert f"trace.txt: line 2: {problem}" in str(caught.value)
    trace = read(tmp_path, text, skip_bad_lines=True)
    assert (lengths(trace), trace.num_skipped) == ([(None, 1, 2)], 1)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "the file is empty"),
        (b"\n \n", "the file is empty"),
        (b"input_tokens,output_tokens\n", "has no requests"),
        (b"input_tokens,output_tokens\nx,1\n", "has no requests (1 were left out; line 2: input"),
        (b"one,two\n1,2\n", "is no trace that is known here: line 1 has no input_tokens and no"),
        (b"input_tokens,foo\n1,2\n", "line 1 has no output_tokens"),
        (b"12,30\n1,2\n", "line 1 must name the columns"),
        (b"{\n 1}", "its first line is no JSON object"),
        (b"[1, 2", "is no JSON"),
        (b"\xff\xfe\x00\x01", "is no text in UTF-8"),
        (
            gzip.compress(b"input_tokens,output_tokens\n1,2\n" * 99, mtime=0)[:40],
            "damaged .gz file",
        ),
        (b"\x1f\x8bnonsense", "cannot read"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path, skip_bad_lines=True, tokenize=count_words)
    assert problem in str(caught.value) and str(path) in str(caught.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"cannot read .*nothing\.csv: No such file"):
        read_trace(tmp_path / "nothing.csv")
    with pytest.raises(TraceError, match="directory"):
        read_trace(tmp_path)


def test_a_format_that_the_file_is_not(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="is no azure trace, it has no column 'TIMESTAMP'"):
        read(tmp_path, "input_tokens,output_tokens\n1,2\n", format="azure")


def test_order_limit_and_filter(tmp_path: Path) -> None:
    text = "arrival_s,input_tokens,output_tokens\n5,1,1\n2,2,2\n2,3,3\n9,40,4\n1,5,5\n"
    assert [r.num_input for r in read(tmp_path, text).requests] == [5, 2, 3, 1, 40]
    assert [r.num_input for r in read(tmp_path, text, limit=2).requests] == [2, 1]
    kept = read(tmp_path, text, max_tokens=9)
    assert ([r.num_input for r in kept.requests], kept.num_skipped) == ([2, 3, 1], 2)


def test_seconds_since_1970_begin_with_the_trace(tmp_path: Path) -> None:
    text = "arrival_time,input_tokens,output_tokens\n1700000000.5,1,1\n1700000002,2,2\n"
    assert [r.arrival_s for r in read(tmp_path, text).requests] == [0.0, 1.5]


PIECES = (
    "arrival_s,input_tokens,output_tokens\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n",
    "input_tokens,output_tokens,parent_row,shared_tokens\n", "1,2,3\n", "2023-11-16 18:17,5,6\n",
    "7,8,0,900\n", '{"header": {"block_tokens": 4}}\n', '{"input_length": 9, "hash_ids": [1]',
    '{"input_tokens": 5, "output_tokens": 1, "hash_ids": [3, 4]}\n', ', "output_length": 1}\n',
    '[{"conversations": [', '{"from": "human", "value": "a b"}', ", ", "]}]", "\n", '"', "[" * 2000,
    "nan", "1e999,", "9" * 5000, "\ufeff", "\x00", "{", "null\n",
)  # fmt: skip


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=8), st.booleans())
def test_whatever_is_in_a_file_it_reads_or_says_why(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[str], skip: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz"
    path.write_text("".join(pieces), encoding="utf-8", errors="surrogatepass")
    try:
        trace = read_trace(path, skip_bad_lines=skip, tokenize=count_words)
    except TraceError as error:
        assert str(path) in str(error)
    else:
        assert all(min(r.num_input, r.num_output) >= 1 for r in trace.requests)
        assert trace.requests


PUBLISHED = {  # rows, mean input, mean output
    "azure_2023_code.csv.gz": (8_819, 2047.9, 27.9),
    "azure_2023_conv.csv.gz": (19_366, 1154.7, 211.1),
    "mooncake_conversation.csv.gz": (12_031, 12_035, 342.6),
    "mooncake_conversation.jsonl.gz": (12_031, 12_035, 342.6),
    "mooncake_synthetic.csv.gz": (3_993, 15_325, 149.1),
    "mooncake_synthetic.jsonl.gz": (3_993, 15_325, 149.1),
    "claude_code_weka_64k.jsonl.gz": (813, 34_732, 464.4),
    "swebench_agent_exgentic.csv.gz": (2_146, 29_441, 261.3),
    "lmsys_arena_vtc.csv.gz": (1_500, 136.3, 256.2),
    "sharegpt_opt_lengths.csv.gz": (84_226, 295.6, 358.0),
    "sharegpt_opt_poisson_2rps_1h.csv.gz": (7_280, 159.5, 336.0),
    "alpaca_sample_opt_lengths.csv.gz": (2_000, 18.6, 58.6),
    "alpaca_fig11_synthetic_lengths.csv.gz": (52_000, 19.26, 58.36),
    "alpaca_fig11_poisson_20rps_15min.csv.gz": (18_126, 19.37, 58.45),
    "sharegpt8k_llama2_lengths.csv.gz": (30_731, 2340, 438.7),
    "arxiv_summ_llama2_lengths.csv.gz": (28_257, 2588, 291.4),
    "sharegpt_gpt4_llama31.jsonl.gz": (300, 857, 652.5),
    "servegen_deepseek_r1_1h_1rps.csv.gz": (3_736, 2231, 1119),
}


@pytest.mark.skipif("OCTAVO_TRACES" not in os.environ, reason="OCTAVO_TRACES names no folder")
def test_all_real_traces_read() -> None:
    folder = Path(os.environ["OCTAVO_TRACES"])
    assert {path.name for path in folder.glob("*.gz")} == PUBLISHED.keys()
    for name, (num_rows, mean_input, mean_output) in PUBLISHED.items():
        trace = read_trace(folder / name)
        assert (len(trace.requests), trace.num_skipped) == (num_rows, 0), name
        assert trace.mean_input == pytest.approx(mean_input, rel=3e-3), name
        assert trace.mean_output == pytest.approx(mean_output, rel=3e-3), name
        assert trace.has_arrivals == ("lengths" not in name), name
