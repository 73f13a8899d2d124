"""The dashboard of a real server: who may see it, what it shows, and that it ends with the server.

Needs the page's routes only; the page in a browser is tested elsewhere.
"""

from __future__ import annotations

import http.client
import json
import signal
import urllib.parse
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from conftest import Server, StartServer

ADMIN = "an-admin-key"


@pytest.fixture(scope="module")
def guarded(launch: StartServer) -> Server:
    return launch("--admin-key", ADMIN, "--enable-prefix-caching")


def log_in(server: Server, key: str) -> tuple[int, str]:
    form = urllib.parse.urlencode({"key": key}).encode()
    kind = "application/x-www-form-urlencoded"
    answer = server.call("/dashboard/login", form, content_type=kind)
    return answer.status, str(answer.headers.get("set-cookie", ""))


def frames(server: Server, num: int, **headers: str) -> Iterator[dict[str, Any]]:
    where = urlsplit(server.url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=20)
    try:
        connection.request("GET", "/dashboard/frames?hz=10", headers=headers)
        response = connection.getresponse()
        assert response.status == 200
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
                num -= 1
                if not num:
                    return
    finally:
        connection.close()


def test_the_page_needs_no_key_and_data_does(guarded: Server) -> None:
    assert guarded.call("/dashboard").status == 200
    assert guarded.call("/dashboard/main.js").status == 200
    for path in ("sources", "frames", "block/0", "block/0/0"):
        assert guarded.call(f"/dashboard/{path}").status == 401
        assert guarded.call(f"/dashboard/{path}", cookie="octavo-dashboard=0").status == 401
    key = f"Bearer {ADMIN}"
    assert guarded.call("/dashboard/sources", authorization=key).status == 200


def test_a_cookie_opens_the_dashboard_and_nothing_else(guarded: Server) -> None:
    assert log_in(guarded, "wrong-admin-key") == (401, "")
    status, set_cookie = log_in(guarded, ADMIN)
    assert status == 204
    cookie = set_cookie.partition(";")[0]
    assert ADMIN not in set_cookie
    assert guarded.call("/dashboard/sources", cookie=f"a=b; {cookie}").status == 200
    assert guarded.call("/admin/memory", cookie=cookie).status == 401


def test_frames_show_what_a_request_leaves_behind(guarded: Server) -> None:
    key = f"Bearer {ADMIN}"
    assert guarded.complete(max_tokens=30, prompt="one two three four five").status == 200
    stream = frames(guarded, 3, authorization=key)
    first = next(stream)
    about = first["about"]
    assert first["kind"] == "full" and about["kv_policy"] == "paged"
    assert about["model"] and about["max_model_len"] > 0
    assert len(first["blocks"]["state"]) == about["num_blocks"]
    assert guarded.complete(max_tokens=30, prompt="six seven eight").status == 200
    later = list(stream)
    assert [frame["kind"] for frame in later] == ["diff", "diff"]
    assert [frame["n"] for frame in later] == [first["n"] + 1, first["n"] + 2]
    (full,) = frames(guarded, 1, authorization=key)
    assert full["totals"]["output_tokens"] >= 60
    cached = [i for i, state in enumerate(full["blocks"]["state"]) if state == 1]
    assert cached
    block = guarded.call(f"/dashboard/block/{cached[0]}", authorization=key).json
    assert block["id"] == cached[0] and block["is_cached"] and not block["owners"]
    assert len(block["token_ids"]) == full["blocks"]["fill"][cached[0]]
    assert isinstance(block["text"], str)
    assert guarded.call("/dashboard/block/99999999", authorization=key).status == 400


def test_a_server_with_watchers_ends_at_once(launch: StartServer) -> None:
    server = launch("--admin-key", ADMIN)
    _, set_cookie = log_in(server, ADMIN)
    stream = frames(server, 1000, cookie=set_cookie.partition(";")[0])
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(15) == 0, server.log()
    for _ in stream:
        pass
    assert "Traceback" not in server.log()
