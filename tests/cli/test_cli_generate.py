"""`octavo generate` and `octavo bench` over a tiny model with random weights, end to end."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def tiny(tiny_model_path: Path) -> list[str]:
    """Flags that serve the tiny model."""
    flags = ["--model", str(tiny_model_path), "--load-format", "dummy", "--dtype", "float32"]
    return [*flags, "--num-gpu-blocks-override", "64", "--num-threads", "1"]


def pipe(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Put a text into stdin."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def lines(capsys: Capture) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_one_prompt_is_answered_on_stdout_alone(tiny: list[str], capsys: Capture) -> None:
    flags = ["--max-tokens", "5", "--ignore-eos", *tiny]
    assert main(["generate", "hello", *flags]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n") and "Traceback" not in err
    assert main(["generate", "hello", *flags]) == 0
    assert capsys.readouterr().out == out, "the default is greedy"


def test_jsonl_out_tells_everything(tiny: list[str], capsys: Capture) -> None:
    flags = ["--jsonl", "--raw", "--max-tokens", "4", "--ignore-eos", "--logprobs", "2"]
    assert main(["generate", "abc", *flags, *tiny]) == 0
    (line,) = lines(capsys)
    assert line["id"] == 0 and line["request_id"] == "0" and line["finished"]
    assert len(line["prompt_token_ids"]) == 3, "raw: no template around it"
    (sample,) = line["outputs"]
    assert len(sample["token_ids"]) == len(sample["logprobs"]) == 4
    assert sample["finish_reason"] == "length"
    assert line["kv"]["peak_blocks"] == 1
    assert line["metrics"]["first_token_s"] > 0


def test_the_chat_template_is_applied_unless_raw(tiny: list[str], capsys: Capture) -> None:
    flags = ["--jsonl", "--max-tokens", "1", "--system", "be brief"]
    assert main(["generate", "abc", *flags, *tiny]) == 0
    (line,) = lines(capsys)
    assert line["prompt"] == "system: be brief<eos>user: abc<eos>assistant: "
    assert line["prompt_token_ids"].count(258) == 2, "special tokens, not their letters"


def test_jsonl_in_keeps_ids_order_and_parameters(
    tiny: list[str], tmp_path: Path, capsys: Capture
) -> None:
    requests = [
        {"id": "long", "prompt": "abc", "max_tokens": 9},
        {"id": "ids", "prompt_token_ids": [1, 2, 3], "max_tokens": 2, "n": 2, "temperature": 1.0},
        {"messages": [{"role": "user", "content": "x"}], "logit_bias": {"7": 100}, "max_tokens": 3},
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(json.dumps(request) for request in requests) + "\n\n")
    assert main(["generate", "--file", str(file), "--jsonl", "--ignore-eos", *tiny]) == 0
    first, second, third = lines(capsys)
    assert [line["id"] for line in (first, second, third)] == ["long", "ids", 2]
    assert first["prompt"] == "abc" and len(first["outputs"][0]["token_ids"]) == 9
    assert second["prompt_token_ids"] == [1, 2, 3] and len(second["outputs"]) == 2
    assert third["outputs"][0]["token_ids"] == [7, 7, 7]


def test_stdin_is_one_prompt_lines_or_jsonl(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    flags = ["--raw", "--max-tokens", "1", *tiny]
    pipe(monkeypatch, "one\ntwo\n")
    assert main(["generate", "--jsonl", "--input-format", "text", *flags]) == 0
    assert [line["prompt"] for line in lines(capsys)] == ["one\ntwo"]
    pipe(monkeypatch, "one\n\ntwo\n")
    assert main(["generate", "--jsonl", "--input-format", "lines", *flags]) == 0
    assert [line["prompt"] for line in lines(capsys)] == ["one", "two"]
    pipe(monkeypatch, '{"prompt": "three"}')
    assert main(["generate", "--jsonl", *flags]) == 0
    assert [line["prompt"] for line in lines(capsys)] == ["three"]


def test_a_refused_request_is_answered_and_the_others_run(
    tiny: list[str], tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "requests.jsonl"
    requests = [{"prompt": "a" * 400}, {"prompt": "b"}, {"prompt_token_ids": [9999]}]
    file.write_text("\n".join(json.dumps(request) for request in requests))
    assert main(["generate", "--file", str(file), "--jsonl", "--max-tokens", "2", *tiny]) == 1
    long, good, unknown = lines(capsys)
    assert long["error"]["type"] == "RequestCapacityError" and "256" in long["error"]["message"]
    assert good["outputs"][0]["token_ids"] and "error" not in good
    assert unknown["error"]["type"] == "InvalidRequestError"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ("9" * 5000, "line 1: not JSON"),
        ('{"prompt": "a"}\n[1]', "line 2: must be an object"),
        ('{"text": "a"}', "exactly one of prompt, prompt_token_ids, messages"),
        ('{"prompt": "a", "messages": []}', "prompt and messages"),
        ('{"prompt": 3}', "prompt must be a string"),
        ('{"prompt": "a", "temprature": 1}', "temprature"),
        ('{"prompt": "a", "top_p": 7}', "top_p"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias"),
        ('{"messages": "hi"}', "messages must be a list"),
        ('{"prompt": "a", "length_penalty": 0.5}', "length_penalty is for beam search: it needs"),
        ('{"prompt": "a", "cache_salt": 0}', "line 1: cache_salt must be a string, got 0"),
        ('{"prompt": "a", "cache_salt": false}', "cache_salt must be a string, got false"),
        ('{"prompt": "a", "cache_salt": null}', "cache_salt must be a string, got null"),
    ],
)
def test_bad_lines_are_refused_by_number_before_anything_loads(
    text: str, says: str, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    assert main(["generate", "--file", str(file), "--model", "/nowhere"]) == 2
    err = capsys.readouterr().err
    assert str(file) in err and says in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["x", "--top-p", "3"], "top_p"),
        (["x", "--block-size", "0"], "block_size"),
        (["x", "--logprobs", "3"], "--jsonl"),
        (["x", "--raw", "--system", "y"], "--raw"),
        (["x", "--input-format", "lines"], "--input-format"),
        (["x", "--tokenizer", "t", "--skip-tokenizer-init", "--jsonl"], "skip_tokenizer_init"),
        (["x", ""], "a prompt is empty"),
        (["--file", "/nowhere/file.txt"], "--file"),
        (["x", "--model", "/nowhere/model"], "/nowhere/model"),
        (["x", "--max-num-seqs", "9", "--max-num-batched-tokens", "3"], "max_num_batched_tokens"),
    ],
)
def test_errors_teach_in_one_line(words: list[str], says: str, capsys: Capture) -> None:
    assert main(["generate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1 and "Traceback" not in err


def test_no_prompt_at_all(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    pipe(monkeypatch, "\n")
    assert main(["generate"]) == 2
    assert "no prompt" in capsys.readouterr().err


def test_several_prompts_are_answered_in_order_under_titles(
    tiny: list[str], capsys: Capture
) -> None:
    flags = ["--max-tokens", "3", "--ignore-eos", "--n", "2", "--temperature", "1"]
    assert main(["generate", "first one", "second one", *flags, *tiny]) == 0
    out = capsys.readouterr().out
    places = [out.index(t) for t in ("== 1. first one", "-- 2 of 2", "== 2. second one")]
    assert places == sorted(places) and out.count("-- 2 of 2") == 2


def test_show_blocks_maps_logical_to_physical_as_they_are_taken(
    tiny: list[str], capsys: Capture
) -> None:
    flags = ["--show-blocks", "--raw", "--max-tokens", "8", "--ignore-eos", "--block-size", "4"]
    assert main(["generate", "abcde", *flags, *tiny]) == 0
    shown = capsys.readouterr().err.splitlines()
    mapped = [line for line in shown if "physical block" in line]
    assert [line.split("logical block ")[1][0] for line in mapped] == ["0", "1", "2"]
    assert len({line.rsplit(" ", 1)[1] for line in mapped}) == 3
    # the token sampled last is never computed: 5 + 7 of the 8 have KV
    assert shown[-1] == "request 0: ended with 12 tokens in 3 blocks, all released"


def test_show_blocks_tells_of_a_block_that_only_the_last_step_had(
    tiny: list[str], capsys: Capture
) -> None:
    flags = ["--show-blocks", "--raw", "--max-tokens", "9", "--ignore-eos", "--block-size", "4"]
    assert main(["generate", "abcde", *flags, *tiny]) == 0
    *_, taken, ended = capsys.readouterr().err.splitlines()
    assert taken == "request 0: logical block 3 -> taken and released in the last step"
    assert ended == "request 0: ended with 13 tokens in 4 blocks, all released"


def test_show_blocks_tells_who_shares_and_who_copies(tiny: list[str], capsys: Capture) -> None:
    flags = ["--show-blocks", "--raw", "--n", "2", "--max-tokens", "4", "--ignore-eos"]
    assert main(["generate", "abcdef", *flags, "--block-size", "4", *tiny]) == 0
    shown = capsys.readouterr().err
    for index in (0, 1):
        for block in (0, 1):
            assert f"0.{index}: logical block {block} -> physical block" in shown
        assert f"shared with 0.{1 - index}\n" in shown
    copied = [line for line in shown.splitlines() if ", a copy of " in line]
    assert len(copied) == 1 and "logical block 1 " in copied[0], "the last owner needs none"
    assert shown.count("all released") == 2


def test_show_blocks_of_beams(tiny: list[str], capsys: Capture) -> None:
    flags = ["--show-blocks", "--raw", "--beam-width", "3", "--max-tokens", "5", "--ignore-eos"]
    assert main(["generate", "abcdef", *flags, "--block-size", "4", *tiny]) == 0
    shown = capsys.readouterr().err
    assert "request 0.2: logical block 0 -> physical block" in shown
    assert "shared with 0.0, 0.1" in shown and shown.count("all released") == 3


def test_beams_and_best_of_are_printed_with_their_scores(tiny: list[str], capsys: Capture) -> None:
    flags = ["--raw", "--max-tokens", "3", "--ignore-eos", *tiny]
    for words in (["--beam-width", "2"], ["--n", "2", "--best-of", "3", "--temperature", "1"]):
        assert main(["generate", "abc", *words, *flags]) == 0
        out = capsys.readouterr().out
        assert "-- 1 of 2, score -" in out and "-- 2 of 2, score -" in out, words


def test_jsonl_lines_choose_beams_and_salts(
    tiny: list[str], tmp_path: Path, capsys: Capture
) -> None:
    requests = [
        {"prompt": "abc", "beam_width": 2, "length_penalty": 0.0, "max_tokens": 4},
        {"prompt": "abc", "max_tokens": 2, "cache_salt": "tenant"},
        {"prompt": "abc", "beam_width": 2, "top_p": 0.5},
    ]
    file = tmp_path / "requests.jsonl"
    flags = ["generate", "--file", str(file), "--jsonl", "--ignore-eos", *tiny]
    file.write_text("\n".join(json.dumps(request) for request in requests[:2]))
    assert main(flags) == 0
    beams, sampled = lines(capsys)
    assert [len(sample["token_ids"]) for sample in beams["outputs"]] == [4, 4]
    first = beams["outputs"][0]
    assert first["score"] == first["cumulative_logprob"], "length_penalty 0 divides by nothing"
    assert len(sampled["outputs"]) == 1 and sampled["outputs"][0]["score"] is None
    file.write_text(json.dumps(requests[2]))
    assert main(flags) == 2
    assert "'top_p' is no parameter of beam search" in capsys.readouterr().err


def test_a_line_with_beams_refuses_the_flags_of_sampling(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "b"}\n{"prompt": "a", "beam_width": 2}')
    for words in (["--top-p", "0.5"], ["--n", "3"], ["--logprobs", "2", "--jsonl"]):
        assert main(["generate", "--file", str(file), *words, "--model", "/nowhere"]) == 2
        err = capsys.readouterr().err
        assert f"line 2: {words[0]} does nothing to beam search (beam_width 2)" in err, words


def test_a_flag_of_beams_applies_to_lines_that_bring_the_width(
    tiny: list[str], tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"prompt": "a", "beam_width": 2, "max_tokens": 3}')
    flags = ["--jsonl", "--ignore-eos", "--length-penalty", "0", *tiny]
    assert main(["generate", "--file", str(file), *flags]) == 0
    (line,) = lines(capsys)
    for sample in line["outputs"]:
        assert sample["score"] == sample["cumulative_logprob"], "divided by nothing"


@pytest.mark.parametrize(
    ("words", "room"),
    [
        (["--max-model-len", "40"], 36),
        # 1 full block of the prompt, 15 for two beams: 7 each, and 1 that is of no use
        (["--num-gpu-blocks-override", "16", "--block-size", "4"], 28),
        (["--num-gpu-blocks-override", "5", "--block-size", "2"], 2),
    ],
)
def test_the_default_max_tokens_of_beams_gives_way_too(
    tiny: list[str], words: list[str], room: int, capsys: Capture
) -> None:
    flags = ["--raw", "--beam-width", "2", "--ignore-eos", "--jsonl", "--events", *tiny, *words]
    assert main(["generate", "abcd", *flags]) == 0
    out, err = capsys.readouterr()
    (line,) = [json.loads(text) for text in out.splitlines()]
    assert [len(sample["token_ids"]) for sample in line["outputs"]] == [room, room]
    assert err.endswith("\nno events\n") and line["request_id"] == "0"
    assert main(["generate", "abcd", *flags, "--max-tokens", str(room + 1)]) == 2, "as much as fits"
    assert f"at most {room}" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_events_come_last_on_stderr(tiny: list[str], capsys: Capture) -> None:
    flags = ["--raw", "--events", "--ignore-eos", *tiny]
    assert main(["generate", "x", "--max-tokens", "2", *flags]) == 0
    out, err = capsys.readouterr()
    assert err.endswith("\nno events\n") and "events" not in out
    narrow = ["--max-tokens", "40", "--block-size", "4", "--num-gpu-blocks-override", "16"]
    begin = time.monotonic()
    assert main(["generate", "abc", "defgh", "ijkl", *flags, *narrow]) == 0
    took = time.monotonic() - begin
    out, err = capsys.readouterr()
    _, events = err.split("events, by seconds since the engine was ready\n")
    assert "preempted request" in events
    assert all(0 <= float(line.split()[0]) < took for line in events.splitlines())
    ids = re.findall(r"^== \d\. \w+ \(request (\d)\)$", out, re.MULTILINE)
    assert ids == ["0", "1", "2"]
    assert set(re.findall(r"preempted request (\d)", events)) <= set(ids)
    assert main(["generate", "x" * 300, *flags]) == 2
    assert "refused   request 0: prompt" in capsys.readouterr().err


def test_a_default_that_gives_way_is_no_event_and_uses_no_seed(
    tiny: list[str], capsys: Capture
) -> None:
    flags = ["--max-model-len", "60", "--temperature", "1", "--jsonl", "--events", *tiny]
    answers = []
    for words in ([], ["--max-tokens", "9"]):
        assert main(["generate", "abc", "de", *words, *flags, "--ignore-eos"]) == 0
        out, err = capsys.readouterr()
        rows = [json.loads(line) for line in out.splitlines()]
        assert [row["request_id"] for row in rows] == ["0", "1"]
        assert err.endswith("\nno events\n")
        answers.append([row["outputs"][0]["token_ids"][:9] for row in rows])
    assert answers[0] == answers[1], "the seeds are the same"


def test_equal_samples_are_hinted_at(tiny: list[str], capsys: Capture) -> None:
    hint = "samples are equal at temperature 0: add --temperature 0.8\n"
    flags = ["--n", "2", "--max-tokens", "2", *tiny]
    assert main(["generate", "abc", *flags]) == 0
    assert capsys.readouterr().err.count(hint) == 1
    for words in (["--temperature", "0.8"], ["--n", "1"]):
        assert main(["generate", "abc", *flags, *words]) == 0
        assert hint not in capsys.readouterr().err


def test_memory_report_comes_last_on_stderr(tiny: list[str], capsys: Capture) -> None:
    assert main(["generate", "x", "--memory", "--max-tokens", "2", *tiny]) == 0
    out, err = capsys.readouterr()
    assert "blocks" in err and "blocks" not in out


def test_the_default_max_tokens_gives_way_to_the_context(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    flags = ["--raw", "--ignore-eos", "--max-model-len", "40", "--jsonl", *tiny]
    pipe(monkeypatch, '{"prompt": "abcd"}')
    assert main(["generate", *flags]) == 0
    assert len(lines(capsys)[0]["outputs"][0]["token_ids"]) == 36
    pipe(monkeypatch, '{"prompt": "abcd"}')
    assert main(["generate", "--max-tokens", "512", *flags]) == 2, "what was asked for is refused"
    capsys.readouterr()
    pipe(monkeypatch, '{"prompt": "abcd", "max_tokens": 512}')
    assert main(["generate", *flags]) == 2


def test_strings_in_jsonl_may_hold_odd_line_ends(
    tiny: list[str], tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "requests.jsonl"
    text = "\ufeff" + json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\r\n"
    file.write_bytes(text.encode())
    flags = ["--jsonl", "--max-tokens", "1", "--file", str(file)]
    assert main(["generate", *flags, *tiny]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == "a\u2028b\x85c"


def test_token_ids_without_a_tokenizer(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    pipe(monkeypatch, '{"prompt_token_ids": [5, 6], "max_tokens": 3, "ignore_eos": true}')
    flags = ["--jsonl", "--skip-tokenizer-init", "--no-detokenize"]
    assert main(["generate", *flags, *tiny]) == 0
    (line,) = lines(capsys)
    assert line["outputs"][0]["text"] == "" and len(line["outputs"][0]["token_ids"]) == 3


def test_chat_keeps_history_and_knows_its_commands(
    tiny: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    seen: list[list[str]] = []
    from octavo import LLM

    stream_chat = LLM.stream_chat

    def spy(self: LLM, messages: Any, params: Any = None, **kwargs: Any) -> Any:
        seen.append([message["role"] for message in messages])
        return stream_chat(self, messages, params, **kwargs)

    monkeypatch.setattr(LLM, "stream_chat", spy)
    pipe(
        monkeypatch, "hi\nagain\n/nope\n/help\n/memory\n/reset\nnew\n" + "x" * 500 + "\nok\n/exit\n"
    )
    assert main(["chat", "--max-tokens", "2", "--system", "be brief", *tiny]) == 0
    out, err = capsys.readouterr()
    first, second = ["system", "user"], ["system", "user", "assistant", "user"]
    assert seen[:3] == [first, second, first]
    assert seen[4] == second, "a refused message is taken back"
    assert "no command '/nope'" in out and "Ctrl-C" in out and "blocks" in out
    assert "256" in err and "/reset" in err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["throughput", "--num-prompts", "0"], "--num-prompts"),
        (["throughput", "--dataset", "x.csv", "--input-len", "9"], "--input-len"),
        (["latency", "--num-iters", "0"], "--num-iters"),
    ],
)
def test_bench_refuses_what_it_cannot_measure(words: list[str], says: str, capsys: Capture) -> None:
    assert main(["bench", *words, "--model", "/nowhere"]) == 2
    assert says in capsys.readouterr().err


def test_chat_needs_a_tokenizer_and_a_template(
    tiny: list[str], tiny_model_path: Path, tmp_path: Path, capsys: Capture
) -> None:
    assert main(["chat", "--skip-tokenizer-init", *tiny]) == 2
    assert "--skip-tokenizer-init" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_bytes((tiny_model_path / "tokenizer.json").read_bytes())
    assert main(["chat", "--tokenizer", str(tmp_path), *tiny]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_bench_throughput_is_exact_and_ends_with_json(tiny: list[str], capsys: Capture) -> None:
    flags = ["--num-prompts", "6", "--input-len", "20", "--output-len", "10", "--json"]
    assert main(["bench", "throughput", *flags, "--skip-tokenizer-init", *tiny]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert result["num_requests"] == 6
    assert 6 * 5 <= result["num_output_tokens"] <= 6 * 15
    assert result["output_tokens_per_s"] > 0
    assert 0 < result["slots_used_ratio"] <= 1 and result["peak_blocks"] > 0
    assert 0 < result["ttft_s"]["p50"] <= result["e2e_s"]["max"] <= result["elapsed_s"] * 1.1
    assert "output tokens/s" in out


def test_bench_throughput_reads_a_dataset(tiny: list[str], tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("input_tokens,output_tokens\n7,3\n9,5\n9000,5\n")
    flags = ["--dataset", str(file), "--json", "--disable-detokenize"]
    assert main(["bench", "throughput", *flags, *tiny]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert (result["num_input_tokens"], result["num_output_tokens"]) == (16, 8)
    assert "1 requests of the dataset exceed the context" in out


def test_bench_latency(tiny: list[str], capsys: Capture) -> None:
    flags = ["--batch-size", "2", "--input-len", "8", "--output-len", "6", "--num-iters", "2"]
    assert main(["bench", "latency", *flags, "--json", *tiny]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["batch_size"] == 2 and result["decode_tokens_per_s"] > 0
    assert 0 < result["ttft_s"]["p50"] < result["e2e_s"]["p50"]


def test_through_a_real_process_and_pipe(tiny: list[str]) -> None:
    command = [sys.executable, "-m", "octavo", "generate", "--max-tokens", "4", *tiny]
    run = subprocess.run(
        command, input="from a pipe\n", capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout


@pytest.mark.model
def test_the_default_model_answers(default_model_path: Path, capsys: Capture) -> None:
    question = "What is the capital of France? Answer with one word."
    words = ["generate", question, "--model", str(default_model_path), "--max-tokens", "12"]
    assert main(words) == 0
    assert "Paris" in capsys.readouterr().out
