"""The load generator against a scripted server: counts exact, times within what the script says."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from fake_server import FIRST_S, NEXT_S, FakeServer

from octavo.bench.serve.arrivals import random_arrivals, trace_arrivals
from octavo.bench.serve.client import Timeline, _wait_s
from octavo.bench.serve.load import Target, wait_ready
from octavo.bench.serve.plots import plot
from octavo.bench.serve.prompts import in_words, make_jobs, word_ids
from octavo.bench.serve.result import compare, parse_slo, summarize
from octavo.bench.workload import Sample
from octavo.cli.main import main
from octavo.errors import ConfigError, InvalidRequestError


def test_counts_and_times_are_what_the_script_says(bench: Any, fake: FakeServer) -> None:
    result = bench(
        "--num-prompts", "6", "--random-input-len", "9", "--random-output-len", "5",
        "--random-range-ratio", "0", "--num-warmups", "1", "--goodput", "ttft:5000", "tpot:0.001",
        "--ignore-eos", "--api-key", "secret",
    )  # fmt: skip
    assert len(fake.bodies) == 7, "one to warm up"
    assert result["num_requests"] == result["num_completed"] == 6
    assert result["num_output_tokens"] == 30 and result["num_input_tokens"] == 42
    assert result["is_counted"] and result["num_wrong_length"] == 0 and result["errors"] == {}
    assert result["num_good"] == 0, "no token comes within a microsecond"
    assert FIRST_S <= result["ttft_s"]["p50"] < FIRST_S + 5
    assert NEXT_S * 0.9 <= result["tpot_s"]["p50"] < NEXT_S + 5
    assert result["e2e_s"]["max"] <= result["elapsed_s"]
    assert result["tokens_per_chunk"] == 1.0
    for body in fake.bodies:
        assert len(body["prompt"]) == 9 and body["max_tokens"] == 5
        assert body["ignore_eos"] is True and body["stream_options"] == {"include_usage": True}
    assert {headers["Authorization"] for headers in fake.headers} == {"Bearer secret"}
    assert "output tokens/s" in bench.printed and "ttft 5000 ms" in bench.printed


def test_a_closed_loop_has_so_many_at_once(bench: Any, fake: FakeServer) -> None:
    result = bench("--num-prompts", "7", "--random-output-len", "2", "--max-concurrency", "3")
    assert fake.most_at_once == 3
    assert result["num_completed"] == 7 and result["num_late"] == 0
    assert 1 < result["mean_concurrency"] <= 3.01


def test_errors_and_short_answers_are_told(bench: Any, fake: FakeServer) -> None:
    fake.fails = lambda number: number in (3, 5)
    fake.stops_early = True
    result = bench("--num-prompts", "6", "--random-output-len", "4", "--max-concurrency", "1")
    assert result["errors"] == {"HTTP 503": 2}
    assert result["num_completed"] == 4 and result["num_wrong_length"] == 4
    assert "HTTP 503 x 2" in bench.printed and "length that was asked for" in bench.printed
    fake.fails = lambda number: number > 8
    bench("--num-prompts", "4", "--max-errors", "0", status=1)


def test_who_is_refused_comes_again_when_it_was_told_to(bench: Any, fake: FakeServer) -> None:
    flags = ("--num-prompts", "1", "--random-output-len", "2", "--num-warmups", "0")
    fake.fails, fake.when = lambda number: number in (1, 2), {"retry-after": "0.1"}
    result = bench(*flags, "--max-retries", "2")
    assert len(fake.bodies) == 3 and fake.bodies[0] == fake.bodies[2]
    assert result["errors"] == {} and result["num_retried"] == result["num_completed"] == 1
    assert result["ttft_s"]["p50"] >= 0.2 + FIRST_S, "waiting is part of it"
    assert "refused at first" in bench.printed
    fake.fails = lambda number: number != 5
    assert bench(*flags, "--max-retries", "1", status=0)["num_completed"] == 1
    assert bench(*flags, "--max-retries", "1", status=1)["errors"] == {"HTTP 503": 1}
    assert len(fake.bodies) == 7


def test_when_to_come_again() -> None:
    assert [_wait_s(told, 1) for told in ("3", "0", None, "soon", "nan", "-1", "9e9")] == [
        3.0, 0.0, 2.0, 2.0, 2.0, 2.0, 60.0,
    ]  # fmt: skip
    assert [_wait_s(None, number) for number in (0, 3, 10_000)] == [1.0, 8.0, 60.0]


def test_an_answer_that_is_cut_off_is_an_error(bench: Any, fake: FakeServer) -> None:
    flags = ("--num-prompts", "2", "--random-output-len", "2", "--num-warmups", "0")
    fake.ends_with = b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    assert bench(*flags)["num_completed"] == 2, "some servers send no end mark"
    fake.ends_with = b""
    assert bench(*flags, status=1)["errors"] == {"cut off": 2}
    fake.ends_with = b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n'
    assert bench(*flags, status=1)["errors"] == {"error in stream": 2}


def test_chat_sends_text(bench: Any, fake: FakeServer, tiny_model_path: Path, capsys: Any) -> None:
    flags = ("--endpoint", "/v1/chat/completions", "--num-prompts", "2", "--random-input-len", "6")
    lengths = ("--random-output-len", "2", "--random-range-ratio", "0")
    bench(*flags, *lengths, "--extra-body", '{"k": 1}')
    (message,) = fake.bodies[-1]["messages"]
    assert message["role"] == "user" and len(message["content"]) == 6
    assert fake.bodies[-1]["k"] == 1
    kind = ("--prompt-kind", "ids", "--tokenizer", str(tiny_model_path))
    assert main(["bench", "serve", "--base-url", fake.url, *flags, *kind]) == 2
    assert "chat takes text" in capsys.readouterr().err


def test_a_trace_is_sent_as_recorded(bench: Any, fake: FakeServer, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n10,5,1\n10.2,6,1\n10.6,7,1\n")
    begun_s = time.monotonic()
    result = bench(
        "--dataset-name", "lengths", "--dataset-path", str(trace), "--request-rate", "trace",
        "--trace-speed", "2",
    )  # fmt: skip
    assert time.monotonic() - begun_s >= 0.3
    assert [len(body["prompt"]) for body in fake.bodies[1:]] == [5, 6, 7]
    assert result["elapsed_s"] >= 0.3
    with pytest.raises(InvalidRequestError, match="arrival_s"):
        trace_arrivals([0.0, None], 1.0)
    with pytest.raises(InvalidRequestError, match="back in time"):
        trace_arrivals([1.0, 0.0], 1.0)


def test_arrivals_have_the_rate_and_the_spread() -> None:
    for burstiness in (1.0, 0.25, 4.0):
        times = random_arrivals(4000, 8.0, burstiness, seed=1)
        gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
        assert times[-1] == pytest.approx(500.0)
        spread = statistics.pstdev(gaps) / statistics.mean(gaps)
        assert spread == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)
    assert random_arrivals(5, math.inf, 1.0, 0) == [0.0] * 5
    assert random_arrivals(50, 3.0, 1.0, 7) == random_arrivals(50, 3.0, 1.0, 7)
    for rate, burstiness in ((0, 1), (-1, 1), (1, 0), (1, math.inf), (math.nan, 1)):
        with pytest.raises(InvalidRequestError, match=r"--request-rate|--burstiness"):
            random_arrivals(3, rate, burstiness, 0)


def line_of(sent: float, chunks: list[float], num: int, error: str | None = None) -> Timeline:
    """A request that was answered as it should be."""
    line = Timeline(sent, sent_s=sent, chunk_s=chunks, ended_s=chunks[-1] if chunks else sent)
    line.num_output = line.num_asked = num
    line.is_counted, line.error = True, error
    return line


def test_figures_by_hand() -> None:
    lines = [
        line_of(0.0, [0.1, 0.2, 0.4], 3),  # ttft 100 ms, tpot 150 ms
        line_of(0.0, [0.3, 0.5], 5),  # two chunks, five tokens: tpot 50 ms
        line_of(1.0, [1.2], 1),  # one token: no time per token
        line_of(1.0, [], 0, "timeout"),
    ]
    about = {"label": "", "base_url": "u", "model": "m", "workload": "w", "load": "l"}
    result = summarize(lines, slo=parse_slo(["ttft:250", "tpot:100"]), **about)
    assert result.elapsed_s == pytest.approx(1.2)
    assert result.num_output_tokens == 9
    assert result.rates["output_tokens_per_s"] == pytest.approx(9 / 1.2)
    assert result.ttft_s is not None and result.ttft_s["p50"] == pytest.approx(0.2)
    assert result.tpot_s is not None and result.tpot_s["max"] == pytest.approx(0.15)
    assert result.itl_s is not None and result.itl_s["max"] == pytest.approx(0.2)
    assert result.num_good == 1, "the first is too slow a token, the second starts too late"
    assert result.mean_concurrency == pytest.approx((0.4 + 0.5 + 0.2) / 1.2)
    assert result.tokens_per_chunk == pytest.approx(9 / 6)
    late = Timeline(0.0, sent_s=0.2, chunk_s=[0.3], ended_s=0.3)
    assert summarize([late], slo={}, **about).num_late == 1
    for wrong in ("ttft", "ttft:x", "ttft:-1", "p99:3"):
        with pytest.raises(InvalidRequestError, match="--goodput"):
            parse_slo([wrong])


def test_compare_puts_ratios_beside_the_first(tmp_path: Path, capsys: Any) -> None:
    about = {"base_url": "u", "model": "m", "workload": "w", "load": "l", "slo": {}}
    paths = []
    for label, num in (("one", 10), ("two", 20)):
        lines = [line_of(0.0, [0.1, 1.0], num)]
        path = tmp_path / f"{label}.json"
        path.write_text(json.dumps(summarize(lines, label=label, **about).as_dict()))  # type: ignore[arg-type]
        paths.append(path)
    table = compare(paths)
    row = next(line for line in table.splitlines() if line.startswith("output tokens/s"))
    assert row.split() == ["output", "tokens/s", "10.0", "20.0", "2.00", "x"]
    assert main(["bench", "serve", "--compare", *map(str, paths)]) == 0
    assert "one" in capsys.readouterr().out
    other = json.loads(paths[1].read_text()) | {"settings": {"ignore_eos": True}}
    paths[1].write_text(json.dumps(other | {"workload": "v"}))
    assert "not the same workload: w, v" in compare(paths)
    paths[1].write_text("{}")
    with pytest.raises(InvalidRequestError, match="no result"):
        compare(paths)


def test_prompts_keep_lengths_and_what_they_share() -> None:
    samples = [Sample([1, 2, 3], 4), Sample([1, 2, 9], 5, 0.5)]
    words = in_words(samples, list(range(100, 200)), seed=3)
    assert [len(s.prompt_token_ids) for s in words] == [3, 3]
    assert words[0].prompt_token_ids[:2] == words[1].prompt_token_ids[:2]
    assert words[1].arrival_s == 0.5 and words[1].output_len == 5
    with pytest.raises(ConfigError, match="chat takes text"):
        make_jobs(
            samples, [0.0, 0.0], endpoint="/v1/chat/completions", model="m", ignore_eos=True,
            temperature=0.0, tokenizer=None, extra_body={},
        )  # fmt: skip


@pytest.mark.model
def test_words_are_cut_into_themselves(default_model_path: Path) -> None:
    from octavo.text.tokenizer import load_tokenizer
    from octavo.weights.locate import locate

    tokenizer = load_tokenizer(locate(str(default_model_path)).tokenizer)
    words = word_ids(tokenizer)
    assert len(words) > 5000
    ids = words[:: len(words) // 300]
    assert tokenizer.encode(tokenizer.decode(ids)) == ids


def test_a_server_that_is_not_there(tiny_model_path: Path, capsys: Any) -> None:
    flags = ["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "0"]
    assert main(["bench", "serve", *flags]) == 2
    assert "was not ready" in capsys.readouterr().err
    told: list[str] = []
    target = Target(base_url="http://127.0.0.1:9", headers={})
    with pytest.raises(ConfigError, match="was not ready"):
        asyncio.run(wait_ready(target, 0.6, told.append))
    assert len(told) == 1 and told[0].startswith("waiting up to 0.6 s for http://127.0.0.1:9/v1")


def test_plots_are_written(bench: Any, tmp_path: Path) -> None:
    picture = tmp_path / "times.svg"
    bench("--num-prompts", "3", "--random-output-len", "2", "--plot", str(picture))
    assert picture.stat().st_size > 2000 and b"time to first token" in picture.read_bytes()


def test_a_plot_that_cannot_be_written(tmp_path: Path) -> None:
    nothing = summarize([], label="a", base_url="", model="", workload="", load="", slo={})
    with pytest.raises(ConfigError, match=r"--plot .*none/x\.svg: No such file"):
        plot([nothing], tmp_path / "none" / "x.svg")
