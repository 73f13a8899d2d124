"""Large bodies: parsed as small ones are, and nobody waits for one for long."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import time
from typing import Any

import pytest

from octavo.server.bodies import _LARGE_BYTES, _SLICE_BYTES, parse_json

LONG = 'x\u20ac\\"[{,}] ' * 40_000
IDS = [random.Random(0).randrange(50_000) for _ in range(120_000)]
LARGE: dict[str, Any] = {
    "a text": {"prompt": LONG, "n": 1},
    "ids": {"n": 2, "prompt": IDS, "stop": None},
    "prompts of ids": {"prompt": [IDS[:50_000], [], [1], IDS[50_000:]]},
    "texts": {"prompt": ["a,b"] * 100_000 + [LONG]},
    "messages": {"messages": [{"role": "user", "content": "a"}] * 20_000},
    "one message of parts": {"messages": [{"content": [{"type": "text", "text": "a"}] * 20_000}]},
    "many members": {"logit_bias": {str(i): i / 3 for i in range(30_000)}, "x": {}},
    "members of members": {str(i): {"a": [i]} for i in range(30_000)},
    "deep": {"z": [[[[[[[IDS, LONG]]]]]]]},
    "literals": {"z": [True, None, -1.5e-7, 2**70, ""] * 30_000},
    "a list": IDS,
    "only a text": LONG,
}


@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE.keys())
@pytest.mark.parametrize("indent", [None, 2], ids=["", "indented"])
def test_a_large_body_is_what_it_says(body: Any, indent: int | None) -> None:
    data = b" \n" + json.dumps(body, indent=indent).encode()
    assert len(data) > _LARGE_BYTES
    assert asyncio.run(parse_json(data)) == body


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32-be"])
def test_encodings_of_large_bodies(encoding: str) -> None:
    data = json.dumps(LARGE["one message of parts"] | {"x": "\u20ac"}, ensure_ascii=False)
    parsed = asyncio.run(parse_json(data.encode(encoding)))
    assert parsed == json.loads(data.encode(encoding)) == json.loads(data)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a": "' + b"x" * _LARGE_BYTES,
        b'{"a": [' + b"1," * _SLICE_BYTES * 3 + b"]}",
        b'{"a": [' + b"1," * _SLICE_BYTES * 3 + b",1]}",
        b'{"a": [' + b"[1]," * _SLICE_BYTES * 3 + b"x]}",
        b'{"a": [' + b"01," * _SLICE_BYTES * 3 + b"1]}",
        b'{"a": [' + b"1," * _SLICE_BYTES * 3 + b"1]} x",
        b'{"a": "\xff' + b"x" * _LARGE_BYTES + b'"}',
        b'{"a": NaN, "b": "' + b"x" * _LARGE_BYTES + b'"}',
        b"[" * _LARGE_BYTES * 2,
        b" " * _LARGE_BYTES * 2,
        b"\v{}" + b" " * _LARGE_BYTES,
        b"[" + b"1," * _LARGE_BYTES + b"]]",
        b'{"a": "' + b"x" * _LARGE_BYTES + b'\\ud800"}',
    ],
    ids=range(13),
)
def test_what_is_no_json(data: bytes) -> None:
    with pytest.raises((json.JSONDecodeError, RecursionError)):
        asyncio.run(parse_json(data))


def test_others_get_their_turn() -> None:
    async def longest_pause(data: bytes) -> float:
        parsing = asyncio.create_task(parse_json(data))
        pauses, last_s = [], time.thread_time()
        while not parsing.done():
            await asyncio.sleep(0)
            now_s = time.thread_time()
            pauses.append(now_s - last_s)
            last_s = now_s
        return max(pauses)

    data = json.dumps({"prompt": IDS * 20}).encode()
    begin_s = time.thread_time()
    json.loads(data)
    assert asyncio.run(longest_pause(data)) < (time.thread_time() - begin_s) / 3


def test_slices_of_slices_are_not_cut_for_ever() -> None:
    """As each level looks at all of it."""
    data = b'{"a":' + b"[" * 400 + b'"' + b"x" * 2_000_000 + b'"' + b"]" * 400 + b"}"
    begin_s = time.thread_time()
    asyncio.run(parse_json(data))
    assert time.thread_time() - begin_s < 0.5


def test_the_collector_does_not_look_at_it_again_and_again() -> None:
    """What is nested too deeply to be cut."""
    seen: list[str] = []

    def see(phase: str, _: dict[str, int]) -> None:
        seen.append(phase)

    lists: list[Any] = [[]] * 100_000
    gc.callbacks.append(see)
    try:
        parsed = asyncio.run(parse_json(json.dumps({"a": [[[[lists]]]]}).encode()))
    finally:
        gc.callbacks.remove(see)
    assert parsed == {"a": [[[[lists]]]]} and gc.isenabled()
    assert len(seen) < 50, "hundreds, if it was on"


def test_through_the_server(server: Any) -> None:
    ids = [5, 6] * 100_000
    refused = server.call("/v1/completions", {"prompt": ids, "max_tokens": 1})
    assert refused.status == 400 and "200,000" in refused.error["message"]
    answer = server.call("/tokenize", {"prompt": "a" * 300_000})
    assert answer.json["count"] == 300_000
    broken = server.call("/v1/completions", b'{"prompt": "' + b"a" * 300_000)
    assert broken.status == 400 and broken.error["message"] == "the body is no valid JSON"
    many = [{"role": "user", "content": "a"}] * (2**16 + 1)
    refused = server.call("/v1/chat/completions", {"messages": many})
    assert refused.status == 400 and refused.error["param"] == "messages"
    assert "65536" in refused.error["message"]
