"""What everyone may ask, and how errors look."""

from __future__ import annotations

import http.client
import threading
from typing import Any

import octavo


def test_alive_ready_and_its_version(server: Any) -> None:
    assert server.call("/health").status == 200
    for path in ("/ready", "/ping"):
        assert server.call(path).json == {"status": "ok"}
    assert server.call("/ping", b"").status == 200, "SageMaker's has no body"
    assert server.call("/version").json == {"version": octavo.__version__}


def test_it_answers(server: Any) -> None:
    answer = server.complete(max_tokens=5)
    assert answer.status == 200, answer.body
    assert answer.json["usage"]["completion_tokens"] == 5


def test_request_ids_are_honoured_when_sane(server: Any) -> None:
    assert server.call("/health", x_request_id="a-1").headers["x-request-id"] == "a-1"
    for bad in ("x" * 129, "a b", 'a"b'):
        assert server.call("/health", x_request_id=bad).headers["x-request-id"] != bad


def test_what_is_wrong_is_named(server: Any) -> None:
    assert server.call("/nothing").error["message"] == "there is no GET /nothing"
    root = server.call("/")
    assert root.status == 404 and "/docs describes it" in root.error["message"]
    assert server.call("/v1/completions").status == 405
    answer = server.call("/v1/completions", b"{")
    assert answer.status == 400 and "JSON" in answer.error["message"]
    answer = server.call("/v1/completions", {"prompt": 3})
    assert answer.status == 400 and answer.error["param"].startswith("prompt")


def test_a_prompt_that_can_never_fit(server: Any) -> None:
    answer = server.complete(prompt="x" * 1000)
    assert answer.status == 400 and "1000" in answer.error["message"].replace(",", "")


def test_bodies_without_a_length_are_counted(server: Any) -> None:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    chunk = b"x" * 2**20
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("transfer-encoding", "chunked")
    connection.putheader("content-type", "application/json")
    connection.endheaders()
    try:
        for _ in range(34):
            connection.send(b"%x\r\n" % len(chunk) + chunk + b"\r\n")
    except OSError:
        pass  # refused before the end
    assert connection.getresponse().status == 413


def test_two_requests_of_one_id_are_both_answered(server: Any) -> None:
    statuses: list[int] = []
    body = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True}

    def ask() -> None:
        statuses.append(server.call("/v1/completions", body, x_request_id="same").status)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == [200] * 4


def test_the_description_tells_what_is_answered(server: Any) -> None:
    described = server.call("/openapi.json").json
    for path, methods in described["paths"].items():
        for operation in methods.values():
            assert "422" not in operation["responses"], path
    assert "400" in described["paths"]["/admin/abort"]["post"]["responses"]
