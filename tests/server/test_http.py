"""HTTP as old and careful clients speak it: heads alone, 1.0, offers to change the protocol."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

BODY = {"prompt": "hi", "max_tokens": 3, "temperature": 0, "ignore_eos": True}


def connection(server: Any) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)


def said(server: Any, *lines: str, body: bytes = b"") -> tuple[bytes, bytes]:
    """(Head, rest) of what comes until the server closes."""
    address = urlsplit(server.url)
    with socket.create_connection((str(address.hostname), int(address.port or 0)), 30) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + body)
        found = b""
        while more := client.recv(65536):
            found += more
    head, _, rest = found.partition(b"\r\n\r\n")
    return head.lower(), rest


def test_a_head_is_that_of_the_whole_answer(server: Any) -> None:
    client = connection(server)  # one for all: nothing of a body may come behind a head
    model = server.call("/v1/models").json["data"][0]["id"]
    paths = (
        "/health", "/ping", "/ready", "/version", "/v1/models", f"/v1/models/{model}", "/metrics",
        "/dashboard", "/openapi.json", "/nothing",
    )  # fmt: skip
    for path in paths:
        heads = []
        for method in ("GET", "HEAD"):
            client.request(method, path)
            answer = client.getresponse()
            body = answer.read()
            assert bool(body) is (method == "GET")
            named = ("content-length", "content-type")
            heads.append((answer.status, {name: answer.getheader(name) for name in named}))
        if path == "/metrics":  # grows while it is looked at
            heads = [(status, head["content-type"]) for status, head in heads]
        assert heads[0] == heads[1], path
    client.request("HEAD", "/v1/completions")
    answer = client.getresponse()
    assert answer.status == 405 and answer.read() == b""
    client.close()


def test_a_head_of_an_endless_stream_ends(server: Any) -> None:
    client = connection(server)
    for _ in range(2):
        client.request("HEAD", "/dashboard/frames")
        answer = client.getresponse()
        assert answer.status == 200 and answer.read() == b""
        assert str(answer.getheader("content-type")).startswith("text/event-stream")
    client.close()


@pytest.mark.parametrize("keep", [[], ["connection: keep-alive"]], ids=["", "keep-alive"])
def test_http_1_0(server: Any, keep: list[str]) -> None:
    data = json.dumps(BODY | {"stream": True}).encode()
    head, rest = said(
        server, "POST /v1/completions HTTP/1.0", "content-type: application/json",
        f"content-length: {len(data)}", *keep, body=data,
    )  # fmt: skip
    assert b" 200 " in head and b"transfer-encoding" not in head and b"connection: close" in head
    events = rest.decode().split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1]) and events[-1] == ""
    assert events[-2] == "data: [DONE]"
    whole = server.call("/v1/completions", BODY).json["choices"][0]["text"]
    told = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in told) == whole
    head, rest = said(server, "GET /health HTTP/1.0", *keep)
    assert b"content-length: 15" in head and json.loads(rest) == {"status": "ok"}
    assert said(server, "HEAD /v1/models HTTP/1.0")[1] == b""


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.0"])
def test_an_offer_to_change_the_protocol_is_not_taken(server: Any, protocol: str) -> None:
    """Some clients make one with each request: Java's, curl --http2."""
    data = json.dumps(BODY).encode()
    head, rest = said(
        server, "POST /v1/completions HTTP/1.1", "host: x", f"upgrade: {protocol}",
        "connection: upgrade, HTTP2-Settings, close", "content-type: application/json",
        f"content-length: {len(data)}", body=data,
    )  # fmt: skip
    assert b" 200 " in head.split(b"\r\n")[0], head
    assert json.loads(rest)["usage"]["completion_tokens"] == 3


def test_a_compressed_body_is_refused(server: Any) -> None:
    """Not read as if it was none, nor called no JSON."""
    for path, data in (("/v1/completions", gzip.compress(b"{}")), ("/v1/messages", b"{}")):
        refused = server.call(path, data, content_encoding="gzip")
        assert refused.status == 415 and refused.headers["connection"] == "close"
        assert "content-encoding 'gzip'" in refused.error["message"]
    assert server.call("/v1/completions", BODY, content_encoding="Identity").status == 200


def test_behind_an_offer_requests_go_on(server: Any) -> None:
    offer = "upgrade: h2c\r\nconnection: Upgrade, HTTP2-Settings\r\nhttp2-settings: AAMAAABkAAQAoA"
    post = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{offer}\r\ntransfer-encoding: chunked\r\n"
        "content-type: application/json\r\n\r\n"
    )
    data = json.dumps(BODY).encode()
    chunks = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    get = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    _, rest = said(server, post.removesuffix("\r\n\r\n"), body=chunks + get)
    assert b'"completion_tokens":3' in rest and rest.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize(
    "line", ["CONNECT x:1 HTTP/1.1", "GET / HTTP/9.9", "\x00", "GET /\u20ac HTTP/1.1", "GET"]
)
def test_what_is_no_http_is_told_as_all_else(server: Any, line: str) -> None:
    head, rest = said(server, line, "host: x", "connection: close")
    assert b" 400 " in head.split(b"\r\n")[0] and b"connection: close" in head
    assert json.loads(rest)["error"]["type"] == "invalid_request_error"
