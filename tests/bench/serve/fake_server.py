"""A server with OpenAI's API that does what a test tells it, at times that it can rely on."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from aiohttp import web

FIRST_S, NEXT_S = 0.05, 0.01


class FakeServer:
    """OpenAI's API with exact delays. `bodies`: what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self._num_now = 0
        self.fails = lambda number: False
        self.when: dict[str, str] = {}
        self.stops_early = False
        self.ends_with = b"data: [DONE]\n\n"
        self.url = ""
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._complete),
            ]
        )
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.fails(len(self.bodies)):
            return web.json_response({"error": {}}, status=503, headers=self.when)
        self._num_now += 1
        self.most_at_once = max(self.most_at_once, self._num_now)
        try:
            return await self._stream(request, body)
        finally:
            self._num_now -= 1

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        num = body["max_tokens"] - self.stops_early
        is_chat = "messages" in body
        for i in range(num):
            await asyncio.sleep(FIRST_S if i == 0 else NEXT_S)
            choice = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
            await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        usage = {"prompt_tokens": 7, "completion_tokens": num}
        await response.write(
            b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
        )
        await response.write(self.ends_with)
        return response
