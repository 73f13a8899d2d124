"""`octavo serve`: its flags come from `ServeConfig`; it refuses before it loads."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.cli.flags import ServeFlags, field_docs, parse
from octavo.cli.main import main
from octavo.cli.serve import Serve, _banner
from octavo.server.config import ServeConfig
from octavo.server.openai.protocol import ChatRequest, CompletionRequest

ARRIVING: dict[str, tuple[list[str], object]] = {
    "host": (["h"], "h"), "port": (["1"], 1), "uds": (["/s"], "/s"),
    "api_key": (["a", "b"], ("a", "b")), "api_key_file": (["f"], "f"), "admin_key": (["k"], "k"),
    "ssl_keyfile": (["k", "--ssl-certfile", "c"], "k"),
    "ssl_certfile": (["c", "--ssl-keyfile", "k"], "c"),
    "ssl_ca_certs": (["a", "--ssl-keyfile", "k", "--ssl-certfile", "c"], "a"),
    "allowed_origins": (["*"], ("*",)), "root_path": (["/x"], "/x"),
    "served_model_name": (["a", "b"], ("a", "b")), "chat_template": (["t"], "t"),
    "trust_request_chat_template": ([], True),
    "enable_auto_tool_choice": (["--tool-call-parser", "hermes"], True),
    "tool_call_parser": (["mistral", "--enable-auto-tool-choice"], "mistral"),
    "max_body_bytes": (["1MiB"], 2**20), "max_prompts": (["2"], 2), "max_n": (["3"], 3),
    "max_output_tokens": (["4"], 4), "max_concurrent_requests": (["5"], 5),
    "max_queued_requests": (["6"], 6), "requests_per_minute": (["7.5"], 7.5),
    "tokens_per_minute": (["8"], 8.0), "max_kv_share": (["0.5"], 0.5),
    "request_timeout_s": (["9"], 9.0), "slow_reader_timeout_s": (["10"], 10.0),
    "shutdown_timeout_s": (["11"], 11.0), "compat": (["lenient"], "lenient"),
    "insecure": ([], True), "log_format": (["json"], "json"), "log_requests": ([], True),
    "log_prompts": ([], True), "log_level": (["error"], "error"),
    "step_timeout_s": (["12"], 12.0), "max_restarts": (["13"], 13),
    "dashboard": ([], False), "otlp_traces_endpoint": (["http://c"], "http://c"),
}  # fmt: skip
"""Field -> the words behind its flag, and what becomes of them."""


def parsed(*argv: str) -> Serve:
    return parse(Serve, "octavo serve", list(argv))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ServeConfig)])
def test_every_flag_arrives(name: str) -> None:
    words, expected = ARRIVING[name]
    off = "no-" if expected is False else ""
    config = parsed(f"--{off}" + name.replace("_", "-"), *words).serve.config()
    assert getattr(config, name) == expected != getattr(ServeConfig(), name)


def test_defaults_are_the_dataclasses_own() -> None:
    assert parsed().serve.config() == ServeConfig()
    assert parsed().served is None and parsed("m").served == "m"
    names = {field.name for field in dataclasses.fields(ServeConfig)}
    assert field_docs(ServeConfig).keys() == names == set(ARRIVING)


def test_help_tells_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, doc in field_docs(ServeFlags).items():
        assert doc in text, name
    assert "[STR" not in text


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["serve", *argv]) == 2
    told = capsys.readouterr().err
    assert told.startswith("octavo: ") and len(told.splitlines()) == 1
    return told


def test_refusals_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    gone = str(tmp_path / "gone")
    for argv, told in (
        (["m", "--model", "n"], "given twice"),
        (["m", "--port", "-1"], "--port"),
        (["m", "--host", "0.0.0.0", "--port", "0"], "--insecure"),
        (["m", "--host", "no.such.host.invalid"], "--host"),
        (["m", "--api-key-file", gone], "cannot be read"),
        (["m", "--chat-template", gone], "cannot be read"),
        (["m", "--uds", gone + "/s"], "--uds"),
        (["m", "--api-key", "short"], "at least 8"),
        (["m", "--ssl-keyfile", "k"], "--ssl-certfile"),
        (["m", "--block-size", "0"], "block_size"),
    ):
        assert told in refused(capsys, *argv), argv
    monkeypatch.setenv("OCTAVO_API_KEY", "short")
    assert "short" not in refused(capsys, "m")


def test_no_key_is_an_argument_of_messages() -> None:
    source = inspect.getsource(__import__("octavo.server.keys", fromlist=["x"]))
    assert "{key}" not in source and "{key!r}" not in source and "{row}" not in source


@pytest.mark.parametrize(
    ("tokenizer", "template", "path"),
    [
        (SimpleNamespace(chat_template="t"), None, "/v1/chat/completions"),
        (SimpleNamespace(chat_template=None), "t", "/v1/chat/completions"),
        (SimpleNamespace(chat_template=None), None, "/v1/completions"),
        (None, None, "/v1/completions"),
    ],
    ids=["own", "flag", "base model", "no tokenizer"],
)
def test_the_banners_example_can_be_answered(
    tokenizer: Any, template: str | None, path: str, capsys: Any
) -> None:
    info = SimpleNamespace(num_blocks=4, bytes_per_block=1024, block_size=16, max_model_len=64)
    state: Any = SimpleNamespace(
        engine=SimpleNamespace(info=info, tokenizer=tokenizer), model_names=("m",),
        chat_template=template, keys=SimpleNamespace(has_keys=False), config=ServeConfig(),
    )  # fmt: skip
    _banner(state, "http://127.0.0.1:1")
    told = capsys.readouterr().out
    assert f"try: curl http://127.0.0.1:1{path} " in told
    assert "dashboard: http://127.0.0.1:1/dashboard" in told
    body = CompletionRequest if path == "/v1/completions" else ChatRequest
    body.model_validate_json(told.split("-d '")[1].removesuffix("'\n"))
    state.config = ServeConfig(dashboard=False)
    _banner(state, "unix:/s")
    told = capsys.readouterr().out
    assert "dashboard:" not in told and f"curl --unix-socket /s http://localhost{path} " in told
