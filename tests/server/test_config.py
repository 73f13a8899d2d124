"""Every field of `ServeConfig` has an effect: shown here, or where `CASES` says."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.server.config import ServeConfig
from octavo.server.run import _template, serve

ROOT = "/behind/a/proxy"
CASES: dict[str, str] = {
    "host": "test_config.py::test_where_it_listens",
    "port": "test_life.py::test_a_port_in_use_is_told_before_loading",
    "uds": "test_config.py::test_a_unix_socket",
    "api_key": "test_keys.py::test_from_flags_environment_and_file",
    "api_key_file": "test_keys.py::test_a_file_gives_each_its_own_limits",
    "admin_key": "test_admin.py::test_the_key_of_the_flag",
    "ssl_keyfile": "test_config.py::test_tls",
    "ssl_certfile": "test_config.py::test_tls",
    "ssl_ca_certs": "test_config.py::test_tls",
    "allowed_origins": "test_config.py::test_origins",
    "root_path": "test_config.py::test_a_proxys_path",
    "served_model_name": "test_config.py::test_names",
    "chat_template": "test_config.py::test_a_template_of_ones_own",
    "trust_request_chat_template": "test_config.py::test_a_template_of_a_requests_own",
    "enable_auto_tool_choice": "test_config.py::test_calls_of_tools_are_looked_for",
    "tool_call_parser": "test_config.py::test_calls_of_tools_are_looked_for",
    "max_body_bytes": "test_config.py::test_max_body_bytes",
    "max_prompts": "test_config.py::test_max_of_a_request",
    "max_n": "test_config.py::test_max_of_a_request",
    "max_output_tokens": "test_config.py::test_max_of_a_request",
    "max_concurrent_requests": "test_limits.py::test_of_all_together",
    "max_queued_requests": "test_limits.py::test_of_all_together",
    "requests_per_minute": "test_keys.py::test_keys_of_a_server",
    "tokens_per_minute": "test_config.py::test_defaults_of_keys",
    "max_kv_share": "test_config.py::test_defaults_of_keys",
    "request_timeout_s": "test_keys.py::test_keys_of_a_server",
    "slow_reader_timeout_s": "test_config.py::test_a_body_that_does_not_come",
    "shutdown_timeout_s": "test_life.py::test_what_does_not_finish_in_time_is_cut_off",
    "compat": "test_config.py::test_unknown_fields",
    "insecure": "test_config.py::test_where_it_listens",
    "dashboard": "test_config.py::test_the_dashboard",
    "log_format": "test_config.py::test_the_log",
    "log_requests": "test_config.py::test_the_log",
    "log_prompts": "test_config.py::test_the_log",
    "log_level": "test_config.py::test_the_logs_level",
    "otlp_traces_endpoint": "test_tracing.py::test_spans_reach_a_collector",
    "step_timeout_s": "test_faults.py::test_a_wedged_engine_is_given_up_on",
    "max_restarts": "test_faults.py::test_a_wedged_engine_is_given_up_on",
}
"""Field -> the test that fails when it has none."""


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ServeConfig)])
def test_every_field_has_a_case(name: str) -> None:
    file, _, test = CASES[name].partition("::")
    source = (Path(__file__).parent / file).read_text()
    assert f"def {test}(" in source
    flag = "--" + name.replace("_", "-")
    ways = (flag, flag.replace("--", "--no-"), f"{name}=")
    assert any(way in source for way in ways), f"{file} does not give {flag}"


def test_no_case_is_left_over() -> None:
    assert CASES.keys() == {field.name for field in dataclasses.fields(ServeConfig)}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"port": 70000}, "--port"),
        ({"max_n": 0}, "--max-n"),
        ({"request_timeout_s": float("nan")}, "--request-timeout-s"),
        ({"shutdown_timeout_s": -1}, "--shutdown-timeout-s"),
        ({"max_kv_share": 1.5}, "--max-kv-share"),
        ({"ssl_keyfile": "k"}, "--ssl-certfile"),
        ({"ssl_ca_certs": "k"}, "--ssl-certfile"),
        ({"root_path": "x/"}, "--root-path"),
        ({"tool_call_parser": "hermes"}, "--enable-auto-tool-choice"),
        ({"enable_auto_tool_choice": True}, "--tool-call-parser"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ServeConfig(**values)


def test_loopback() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        assert ServeConfig(host=host).is_loopback
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        assert not ServeConfig(host=host).is_loopback
    assert ServeConfig(host="0.0.0.0", uds="/s").is_loopback


@pytest.fixture(scope="module")
def flagged(launch: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One server with many flags."""
    template = tmp_path_factory.mktemp("template") / "t.jinja"
    template.write_text(
        "{% if tools %}{% endif %}{% for m in messages %}<{{ m.content }}>{% endfor %}"
    )
    server = launch(
        "--host", "0.0.0.0", "--insecure", "--chat-template", str(template),
        "--allowed-origins", "http://page.example", "--root-path", ROOT,
        "--served-model-name", "first", "second", "--max-body-bytes", "3000", "--max-prompts", "2",
        "--max-n", "2", "--max-output-tokens", "20", "--compat", "lenient", "--log-format", "json",
        "--log-requests", "--log-prompts", "--log-level", "info", "--slow-reader-timeout-s", "0.3",
        "--no-dashboard", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--trust-request-chat-template",
    )  # fmt: skip
    server.url = server.url.replace("0.0.0.0", "127.0.0.1").removesuffix(ROOT)
    yield server
    server.stop()


def test_where_it_listens(flagged: Any) -> None:
    assert "at http://0.0.0.0:" in flagged.banner()
    assert flagged.call("/health").status == 200
    assert flagged.call("/admin/memory").status == 403, "--insecure opens no admin endpoint"


def test_origins(flagged: Any, server: Any) -> None:
    ask = {"access-control-request-method": "POST", "method": "OPTIONS"}
    allow = "access-control-allow-origin"
    page = flagged.call("/v1/completions", origin="http://page.example", **ask)
    assert page.status == 200 and page.headers[allow] == "http://page.example"
    assert flagged.call("/v1/completions", origin="http://evil.example", **ask).status == 400
    assert server.call("/health", origin="http://page.example").headers[allow] is None


def test_a_proxys_path(flagged: Any) -> None:
    assert f"{ROOT}\n" in flagged.banner()
    assert flagged.call("/openapi.json").json["servers"] == [{"url": ROOT}]
    for path in ("/health", ROOT + "/health"):
        assert flagged.call(path).status == 200


def test_names(flagged: Any) -> None:
    assert [m["id"] for m in flagged.call("/v1/models").json["data"]] == ["first", "second"]
    assert flagged.complete(model="second").status == 200
    refused = flagged.complete(model="third")
    assert refused.status == 404 and refused.error["code"] == "model_not_found"


def test_a_template_of_ones_own(flagged: Any) -> None:
    body = {"messages": [{"role": "user", "content": "abc"}]}
    assert flagged.call("/tokenize", body).json["count"] == len("<abc>")


def test_a_template_of_a_requests_own(flagged: Any, server: Any) -> None:
    def told(template: str, where: Any = flagged, **more: Any) -> Any:
        body = {"messages": [{"role": "user", "content": "abc"}], "chat_template": template}
        return where.call("/tokenize", body | more)

    assert told("{{ messages[0].content }}!").json["count"] == len("abc!")
    twice = {"chat_template_kwargs": {"times": 2, "source": "a", "special_tokens": 1}}
    assert told("{{ messages[0].content * times }}", **twice).json["count"] == len("abcabc")
    for template, why in {
        "{% for %}": "cannot be compiled",
        "{{ raise_exception('no') }}": "refuses the messages: no",
        "{{ 'x' * 3001 }}": "3,001 characters > 3,000",
        "none_of_the_models": "no chat template called",
    }.items():
        refused = told(template)
        assert refused.status == 400 and why in refused.error["message"]
    client = openai.OpenAI(base_url=f"{flagged.url}/v1", api_key="none", max_retries=0)
    answer = client.chat.completions.create(
        model="first", messages=[{"role": "user", "content": "abc"}], max_tokens=2,
        extra_body={"chat_template": "{{ messages[0].content }}?"},
    )  # fmt: skip
    assert answer.usage is not None and answer.usage.prompt_tokens == len("abc?")
    refused = told("{{ messages[0].content }}", server)
    assert refused.status == 400 and "--trust-request-chat-template" in refused.error["message"]


@pytest.mark.parametrize("name", ["chat_template", "trust_request_chat_template"])
def test_templates_need_a_tokenizer(name: str) -> None:
    values: dict[str, Any] = {name: True if name.startswith("trust") else "t"}
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} has no effect"):
        serve(EngineConfig(skip_tokenizer_init=True), ServeConfig(port=0, **values), environ={})


def test_a_template_by_name_is_left_to_the_model_and_a_missing_file_is_not(tmp_path: Path) -> None:
    assert _template(ServeConfig(chat_template="tool_use")) == "tool_use"
    with pytest.raises(ConfigError, match=r"none\.jinja cannot be read"):
        _template(ServeConfig(chat_template=str(tmp_path / "none.jinja")))


def test_calls_of_tools_are_looked_for(flagged: Any, server: Any) -> None:
    """What the answers then are is shown by scripted engines."""
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "tools": [tool]}
    assert flagged.call("/v1/chat/completions", body).status == 200
    refused = server.call("/v1/chat/completions", body)
    assert refused.status == 400 and "--enable-auto-tool-choice" in refused.error["message"]


def test_the_dashboard(flagged: Any, server: Any) -> None:
    assert server.call("/dashboard").status == 200
    assert flagged.call("/dashboard").status == 404


def test_max_body_bytes(flagged: Any) -> None:
    refused = flagged.complete(prompt="x" * 3000)
    assert refused.status == 413 and "--max-body-bytes" in refused.error["message"]
    assert refused.headers["connection"] == "close"


def test_max_of_a_request(flagged: Any) -> None:
    for fields, told in (
        ({"prompt": ["a"] * 3}, "3"),
        ({"n": 3}, "--max-n"),
        ({"n": 1, "best_of": 3}, "--max-n"),
        ({"max_tokens": 21}, "--max-output-tokens"),
    ):
        refused = flagged.complete(**fields)
        assert refused.status == 400 and told in refused.error["message"], fields
    assert flagged.complete(prompt=["a"] * 2, max_tokens=20).status == 200


def test_unknown_fields(flagged: Any, server: Any) -> None:
    lenient = flagged.complete(colour="red")
    assert lenient.status == 200 and lenient.headers["x-octavo-ignored"] == "colour"
    strict = server.complete(colour="red")
    assert strict.status == 400 and "--compat lenient" in strict.error["message"]


def test_a_body_that_does_not_come(flagged: Any) -> None:
    port = int(flagged.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{"
        )
        told = b"".join(iter(lambda: client.recv(4096), b""))
    assert told.startswith(b"HTTP/1.1 408") and b"--slow-reader-timeout-s" in told


def test_a_head_without_end(flagged: Any) -> None:
    port = int(flagged.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=30) as client:
        client.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000)
        assert client.recv(100).startswith(b"HTTP/1.1 431")


def test_the_log(flagged: Any, server: Any) -> None:
    flagged.call("/v1/completions", {"prompt": "wxyz", "max_tokens": 1}, x_request_id="mine")

    def lines() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in flagged.log().splitlines() if line.startswith("{")]
        return [line for line in found if line.get("request_id") == "mine"]

    flagged.until(lambda: len(lines()) == 2)
    mine = lines()
    assert [line["message"] for line in mine] == ["prompt", "request"]
    assert mine[0]["prompt"] == "wxyz" and mine[1]["status"] == 200
    assert mine[1]["level"] == "info" and mine[1]["method"] == "POST"
    every = [json.loads(line) for line in flagged.log().splitlines()]
    (told,) = [line for line in every if "attention backend" in line["message"]]
    assert told["process"] == "engine" and told["level"] == "info"
    assert {line["process"] for line in every} == {"server", "engine"}
    server.complete(prompt="never logged")
    assert "never logged" not in server.log() and "/v1/completions" not in server.log()


def test_the_logs_level(start_server: Any) -> None:
    server = start_server("--log-level", "error", "--log-requests")
    server.complete()
    server.stop()
    assert server.log() == "", "a request's line is of level info"


def test_defaults_of_keys() -> None:
    from octavo.server.keys import load_keys

    config = ServeConfig(tokens_per_minute=7, max_kv_share=0.5)
    (anyone,) = load_keys(config, {}).clients
    assert (anyone.tokens_per_minute, anyone.kv_share) == (7, 0.5)


def _certificate(folder: Path, name: str) -> tuple[str, str]:
    key, cert = str(folder / f"{name}.key"), str(folder / f"{name}.crt")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key,
         "-out", cert, "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, cert


def test_tls(start_server: Any, tmp_path: Path) -> None:
    key, cert = _certificate(tmp_path, "server")
    client_key, client_cert = _certificate(tmp_path, "client")
    bad = start_server("--ssl-keyfile", cert, "--ssl-certfile", cert, waits=False)
    server = start_server(
        "--ssl-keyfile", key, "--ssl-certfile", cert, "--ssl-ca-certs", client_cert
    )
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=cert)
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{server.url}/health", context=context, timeout=30).read()
    context.load_cert_chain(client_cert, client_key)
    with urllib.request.urlopen(f"{server.url}/health", context=context, timeout=30) as answer:
        assert answer.status == 200
    assert bad.wait() == 2 and "--ssl-certfile" in bad.log()


def test_a_unix_socket(start_server: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(path)
    server = start_server("--uds", path)
    assert f"--unix-socket {path}" in server.banner()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        client.sendall(b"GET /admin/memory HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    second = start_server("--uds", path, waits=False)
    assert second.wait() == 2 and "listens there already" in second.log()
    server.stop()
    assert not os.path.exists(path)
