"""Tools in /v1/chat/completions: the openai client, and an engine that says what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import openai
import pytest

from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine, EngineInfo, EngineState
from octavo.engine.remote.streams import OutputStream
from octavo.engine.remote.text import TextSide
from octavo.outputs import CompletionOutput, OutputKind, RequestOutput
from octavo.request import FinishReason
from octavo.server.app import create_app
from octavo.server.config import ServeConfig
from octavo.server.keys import load_keys
from octavo.server.metrics import Metrics
from octavo.server.openai import chat
from octavo.server.state import ServerState
from octavo.stats import EngineStats
from octavo.text.tokenizer import load_tokenizer

TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}<{{ m.role }}:"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}="
    "{{ c.function.arguments.city }}{% endfor %}>{% endfor %}"
)
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
USER: Any = {"role": "user", "content": "Rain?"}
ASKED: dict[str, Any] = {"model": "m", "messages": [USER], "tools": TOOLS}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
TWO = CALL + "\n" + CALL.replace("Ulm", "Bonn")


class Scripted(AsyncEngine):
    """Says `said` to everybody, in pieces of three characters where it streams."""

    def __init__(self, folder: Path, said: str, reason: FinishReason) -> None:
        config = EngineConfig(model="m", max_num_seqs=8)
        super().__init__(config)
        self.state, self.why_not_ready = EngineState.READY, None
        info = SimpleNamespace(config=config, max_model_len=4096)
        self._info = cast("EngineInfo", info)
        self._text = TextSide(load_tokenizer(folder))
        self.tokenizer = self._text.tokenizer
        self.said, self.reason = said, reason
        self.prompt, self.params = "", cast("Any", None)
        self._speaking: asyncio.Task[None] | None = None

    def submit(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        *,
        kind: OutputKind = OutputKind.DELTA,
        **_: Any,
    ) -> OutputStream:
        self.prompt, self.params = self.decode(prompt["prompt_token_ids"]), params
        stream = OutputStream(request_id, lambda _: None, merges=kind is OutputKind.DELTA)
        size = 3 if kind is OutputKind.DELTA else len(self.said)
        self._speaking = asyncio.get_running_loop().create_task(self._speak(stream, size))
        return stream

    async def _speak(self, stream: OutputStream, size: int) -> None:
        for start in range(0, len(self.said), size):
            await asyncio.sleep(0)
            is_last = start + size >= len(self.said)
            piece = CompletionOutput(0, self.said[start : start + size], [1])
            piece.finish_reason = self.reason if is_last else None
            output = RequestOutput(stream.request_id, None, [1], None, [piece], is_last)
            stream.put(output, is_latest=True)


Ask = Callable[[openai.AsyncOpenAI, Scripted], Awaitable[None]]


@pytest.fixture
def talk(tiny_model_path: Path) -> Callable[..., None]:
    """Runs a conversation with a server whose engine says one thing."""

    def run(
        ask: Ask,
        said: str,
        *,
        parser: Any = "hermes",
        template: str = TEMPLATE,
        reason: FinishReason = FinishReason.STOP,
    ) -> None:
        async def main() -> None:
            engine = Scripted(tiny_model_path, said, reason)
            config = ServeConfig(
                enable_auto_tool_choice=parser is not None, tool_call_parser=parser
            )
            state = ServerState(
                config, engine, load_keys(config, {}), model_names=["m"], chat_template=template,
                metrics=Metrics("m", EngineStats),
            )  # fmt: skip
            state.life.serve()
            transport = httpx.ASGITransport(create_app(state, [chat.router]))
            async with openai.AsyncOpenAI(
                base_url="http://octavo/v1", api_key="none", max_retries=0,
                http_client=httpx.AsyncClient(transport=transport),
            ) as client:  # fmt: skip
                await ask(client, engine)

        asyncio.run(main())

    return run


async def streamed(client: openai.AsyncOpenAI, **more: Any) -> tuple[str, list[Any], Any]:
    """(Content, calls, finish reason); each call comes whole, in one chunk."""
    content, calls, reason = "", [], None
    async for chunk in await client.chat.completions.create(**(ASKED | more), stream=True):
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        calls += choice.delta.tool_calls or []
        reason = choice.finish_reason
    assert [call.index for call in calls] == list(range(len(calls)))
    return content, calls, reason


def told(calls: Any) -> list[tuple[str, Any]]:
    assert len({call.id for call in calls}) == len(calls)
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or []]


@pytest.mark.parametrize(
    ("said", "more", "content", "cities"),
    [
        (CALL, {}, "", ["Ulm"]),
        ("Let me see.\n" + TWO, {}, "Let me see.", ["Ulm", "Bonn"]),
        (TWO, {"parallel_tool_calls": False}, "", ["Ulm"]),
        (TWO, {"parallel_tool_calls": True, "tool_choice": "auto"}, "", ["Ulm", "Bonn"]),
        ("No <tool> is needed.", {}, "No <tool> is needed.", []),
    ],
)
def test_calls_come_apart_from_content(
    talk: Any, said: str, more: dict[str, Any], content: str, cities: list[str]
) -> None:
    async def ask(client: openai.AsyncOpenAI, engine: Scripted) -> None:
        expected = [("weather", {"city": city}) for city in cities]
        (choice,) = (await client.chat.completions.create(**(ASKED | more))).choices
        assert told(choice.message.tool_calls or []) == expected
        assert choice.message.content == (content or None)
        assert choice.finish_reason == ("tool_calls" if cities else "stop")
        found, calls, reason = await streamed(client, **more)
        assert (found, told(calls), reason) == (content, expected, choice.finish_reason)

    talk(ask, said)


def test_the_template_is_given_tools_and_what_they_said(talk: Any) -> None:
    async def ask(client: openai.AsyncOpenAI, engine: Scripted) -> None:
        first = (await client.chat.completions.create(**ASKED)).choices[0].message
        assert engine.prompt == f"[{json.dumps(TOOLS)}]<user:Rain?>"
        assert first.tool_calls is not None
        result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "Sun"}
        again = [USER, first.model_dump(exclude_none=True), result]
        await client.chat.completions.create(**(ASKED | {"messages": again}))
        assert engine.prompt.endswith("<user:Rain?><assistant:weather=Ulm><tool:Sun>")

    talk(ask, CALL)


def test_with_none_the_answer_is_text(talk: Any) -> None:
    async def ask(client: openai.AsyncOpenAI, engine: Scripted) -> None:
        choice = (await client.chat.completions.create(**ASKED, tool_choice="none")).choices[0]
        assert choice.message.content == CALL and not choice.message.tool_calls
        assert choice.finish_reason == "stop" and "weather" in engine.prompt

    talk(ask, CALL, parser=None)


def test_a_call_that_is_cut_is_text(talk: Any) -> None:
    async def ask(client: openai.AsyncOpenAI, engine: Scripted) -> None:
        assert await streamed(client) == (CALL[:40], [], "length")
        whole = (await client.chat.completions.create(**ASKED)).choices[0]
        assert (whole.message.content, whole.finish_reason) == (CALL[:40], "length")

    talk(ask, CALL[:40], reason=FinishReason.LENGTH)


def test_mistrals_marks_are_special_tokens(talk: Any) -> None:
    async def ask(client: openai.AsyncOpenAI, engine: Scripted) -> None:
        _, calls, _ = await streamed(client)
        assert told(calls) == [("weather", {"city": "Ulm"})] and len(calls[0].id) == 9
        assert engine.params.skip_special_tokens is False
        with pytest.raises(openai.BadRequestError, match="skip_special_tokens"):
            await streamed(client, extra_body={"skip_special_tokens": True})

    talk(ask, '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Ulm"}}]', parser="mistral")


def assistant(arguments: str) -> Any:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "1", "type": "function", "function": function}
    return [USER, {"role": "assistant", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"tool_choice": "required"}, "tool_choice: the model cannot be made to call"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "cannot be made"),
        ({"tools": None, "tool_choice": "auto"}, "tool_choice is about tools"),
        ({"tools": [], "parallel_tool_calls": False}, "parallel_tool_calls is about tools"),
        ({"tool_choice": "none", "parallel_tool_calls": False}, "no effect with tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name: "),
        ({"messages": assistant("{")}, "messages.1.tool_calls.0.function.arguments is no JSON"),
        ({"messages": assistant("[]")}, "must be an object"),
        ({"functions": [{"name": "f"}]}, "use tools and tool_choice"),
        ({"skip_special_tokens": True}, "the parser hermes finds calls by them"),
    ],
)
def test_what_is_refused(talk: Any, more: dict[str, Any], match: str) -> None:
    async def ask(client: openai.AsyncOpenAI, engine: Scripted) -> None:
        body = ASKED | more
        with pytest.raises(openai.BadRequestError, match=match):
            await client.post("/chat/completions", body=body, cast_to=object)

    talk(ask, CALL)


def test_a_server_that_cannot_find_calls_says_so(talk: Any) -> None:
    async def ask(client: openai.AsyncOpenAI, engine: Scripted) -> None:
        with pytest.raises(openai.BadRequestError, match="--enable-auto-tool-choice"):
            await streamed(client)

    talk(ask, CALL, parser=None)


def test_a_template_that_knows_no_tools_says_so(talk: Any) -> None:
    async def ask(client: openai.AsyncOpenAI, engine: Scripted) -> None:
        with pytest.raises(openai.BadRequestError, match="chat template knows no tools"):
            await streamed(client)

    talk(ask, CALL, template="{# tools #}{% for m in messages %}{{ m.content }}{% endfor %}tools")
