"""The dashboard's routes: frames, sources, blocks, login; and that nothing is made unasked."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request

from octavo.dashboard.app import COOKIE, make_app, make_router
from octavo.dashboard.feed import END, FrameStream
from octavo.errors import IntegrityError


class Source:
    """Counts who listens; has as many frames as it is told."""

    def __init__(self, name: str = "one", num_frames: int | None = 2) -> None:
        self.name, self.num_frames = name, num_frames
        self.num_listening = self.num_asked = 0
        self.hz: list[float] = []

    async def frames(self, hz: float) -> AsyncIterator[bytes]:
        self.num_listening += 1
        self.num_asked += 1
        self.hz.append(hz)
        try:
            n = 0
            while self.num_frames is None or n < self.num_frames:
                yield json.dumps({"n": n, "of": self.name}).encode()
                n += 1
                await asyncio.sleep(0.001)
        finally:
            self.num_listening -= 1

    async def block(self, block_id: int) -> dict[str, Any]:
        if block_id > 9:
            raise IntegrityError(f"block {block_id} does not exist")
        return {"id": block_id, "of": self.name}


def ask(app: FastAPI, method: str, path: str, **more: Any) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.request(method, path, **more)

    return asyncio.run(main())


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(part[6:]) for part in text.split("\n\n") if part.startswith("data: {")]


def test_a_source_that_ends_says_so_and_only_who_looks_costs() -> None:
    sources = [Source("a"), Source("b", 3)]
    app = make_app(sources)
    assert ask(app, "GET", "/dashboard").status_code == 200
    rows = ask(app, "GET", "/dashboard/sources").json()
    assert [row["name"] for row in rows] == ["a", "b"]
    assert [source.num_asked for source in sources] == [0, 0]
    answer = ask(app, "GET", "/dashboard/" + rows[1]["frames"])
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [event["n"] for event in events(answer.text)] == [0, 1, 2]
    assert answer.text.encode().endswith(END)
    assert [source.num_asked for source in sources] == [0, 1]
    assert sources[1].num_listening == 0 and sources[1].hz == [4.0]
    assert ask(app, "GET", f"/dashboard/{rows[1]['block']}7").json() == {"id": 7, "of": "b"}
    assert ask(app, "GET", f"/dashboard/{rows[1]['block']}12").status_code == 404


def test_one_source_has_short_paths() -> None:
    app = make_app([Source()])
    assert ask(app, "GET", "/dashboard/sources").json() == [
        {"name": "one", "frames": "frames", "block": "block/"}
    ]
    assert ask(app, "GET", "/dashboard/block/3").json()["id"] == 3
    assert ask(app, "GET", "/", follow_redirects=False).headers["location"] == "dashboard"


@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        ("frames?hz=0.01", "hz"), ("frames?hz=11", "hz"), ("frames?hz=nan", "hz"),
        ("frames?hz=x", "hz"), ("frames?source=1", "source"), ("frames?source=-1", "source"),
        ("block/x", "block"), ("block/1/2", "source"), ("block/" + "9" * 30, "block"),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_refused(path: str, parameter: str) -> None:
    source = Source()
    answer = ask(make_app([source]), "GET", f"/dashboard/{path}")
    assert answer.status_code == 400
    assert parameter in answer.json()["error"]["message"]
    assert not source.num_asked


def test_hz_is_handed_on() -> None:
    source = Source()
    ask(make_app([source]), "GET", "/dashboard/frames?hz=0.5")
    assert source.hz == [0.5]


def test_the_page_is_closed_to_the_world_outside() -> None:
    app = make_app([Source()])
    page = ask(app, "GET", "/dashboard")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    script = ask(app, "GET", "/dashboard/main.js")
    assert script.headers["content-type"].startswith("text/javascript")
    for path in ("nothing.js", "main.py", "..%2F__init__.py", "%2Fetc%2Fpasswd.js", "x.html%00"):
        assert ask(app, "GET", f"/dashboard/{path}").status_code == 404


def test_login_sets_a_cookie_that_is_not_the_key() -> None:
    app = FastAPI()

    def login(_: Request, key: str) -> str | None:
        return "c00kie" if key == "a key & more" else None

    app.include_router(make_router(lambda _: (), login=login))
    good = ask(app, "POST", "/dashboard/login", data={"key": "a key & more"})
    assert good.status_code == 204
    cookie = good.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}=c00kie;")
    for part in ("HttpOnly", "SameSite=strict", "Path=/dashboard"):
        assert part in cookie
    wrong = ask(app, "POST", "/dashboard/login", data={"key": "wrong"})
    assert wrong.status_code == 401 and "set-cookie" not in wrong.headers


def run_stream(source: Source, num_wanted: float, leaving: list[bool]) -> list[bytes]:
    """What is written to a client that leaves when it has so many frames."""
    bodies: list[bytes] = []

    async def main() -> None:
        async def receive() -> dict[str, Any]:
            while sum(body.startswith(b"data: ") for body in bodies) < num_wanted:
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            bodies.append(message.get("body", b""))

        stream = FrameStream(source, 4.0, lambda: bool(leaving))
        await asyncio.wait_for(stream({"type": "http"}, receive, send), 60)

    asyncio.run(main())
    return bodies


def test_who_leaves_is_not_served_any_more() -> None:
    source = Source(num_frames=None)
    bodies = run_stream(source, 2, [])
    assert sum(body.startswith(b"data: ") for body in bodies) >= 2
    assert source.num_listening == 0


def test_a_server_that_leaves_ends_the_stream_without_saying_it_is_over() -> None:
    source = Source(num_frames=None)
    bodies = run_stream(source, math.inf, [True])
    assert bodies[-1] == b""
    assert END not in bodies
    assert source.num_listening == 0
