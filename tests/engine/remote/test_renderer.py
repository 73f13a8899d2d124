"""Templates of strangers: right ones are rendered, hostile ones end nobody but themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from octavo.engine.remote import render_worker
from octavo.engine.remote.renderer import Renderer, is_template_name
from octavo.errors import EngineDeadError, InvalidRequestError

HI = [{"role": "user", "content": "hi"}]
SHORT = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MAX_CHARS = 100_000


def run(test: Callable[[Renderer], Coroutine[Any, Any, None]], max_cpu_s: float = 5.0) -> None:
    async def whole() -> None:
        renderer = Renderer(MAX_CHARS, max_cpu_s)
        try:
            await test(renderer)
        finally:
            await renderer.close()

    asyncio.run(whole())


async def rendered(renderer: Renderer, source: str, /, **options: Any) -> str:
    options = {"add_generation_prompt": True} | options
    return await renderer.render(source, options.pop("messages", HI), {"bos_token": "<s>"}, options)


def pids(renderer: Renderer) -> list[int]:
    return [process.pid for process in renderer._idle]


def test_what_is_rendered_is_what_a_template_writes() -> None:
    async def test(renderer: Renderer) -> None:
        assert await rendered(renderer, SHORT) == "<s>user: hi\n"
        (first,) = pids(renderer)
        said = [*HI, {"role": "assistant", "content": "\u20ac \ud800 \U0001f600"}]
        assert await rendered(
            renderer, SHORT, messages=said, add_generation_prompt=False, continue_final_message=True
        ) == "<s>user: hi\n<s>assistant: \u20ac \ud800 \U0001f600"  # fmt: skip
        source = "{% if tools %}{{ tools | tojson }}{% endif %}{{ bos_token }}{{ mood }}"
        more: dict[str, Any] = {"tools": [{"a": 1}], "mood": "good", "bos_token": "B"}
        assert await rendered(renderer, source, **more) == '[{"a": 1}]Bgood'
        more = {"source": "s", "special_tokens": "t", "options": "o"}
        source = "{{ source }}{{ special_tokens }}{{ options }}"
        assert await rendered(renderer, source, **more) == "sto"
        assert pids(renderer) == [first], "it is kept"

    run(test)


HOSTILE = {
    "loops": "{% for i in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}",
    "a huge number": "{{ 9 ** (9 ** 9) }}",
    "a huge constant": "{{ 'a' * 9999999999 }}",
    "doubling": "{% set n = namespace(s='ab') %}{% for i in range(60) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "a huge width": "{{ '%99999999999d' % 1 }}",
    "a huge list": "{{ [[0] * 99999] * 99999999 }}",
    "too long": "{{ 'a' * 100001 }}",
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "many blocks": "{% if 1 %}" * 400 + "{% endif %}" * 400,
    "a long error": "{{ raise_exception('a' * 9999999) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


def test_hostile_templates_are_refused() -> None:
    async def test(renderer: Renderer) -> None:
        async def refusal(source: str) -> InvalidRequestError:
            with pytest.raises(InvalidRequestError, match="the chat template") as refused:
                await rendered(renderer, source)
            return refused.value

        for error in await asyncio.gather(*map(refusal, HOSTILE.values())):
            assert error.parameter in ("chat_template", "messages")
            assert len(str(error)) <= 4096
        assert await rendered(renderer, SHORT) == "<s>user: hi\n"
        assert renderer.num_asking == 0

    run(test, max_cpu_s=0.2)


def test_no_memory_is_kept_where_it_was_missing() -> None:
    """Large constants of templates that are kept."""

    def answer(source: str) -> render_worker.Rendered:
        return render_worker._answer(
            render_worker.Job(
                source=source, special_tokens={}, max_chars=10, max_cpu_s=1, messages=HI, options={}
            )
        )

    render_worker._template.cache_clear()
    assert answer("a")["text"] == "a"
    assert render_worker._template.cache_info().currsize == 1
    assert "too much memory" in str(answer("{% set n = 10**15 %}{{ 'a' * n }}")["error"])
    assert render_worker._template.cache_info().currsize == 0


WRONG = {
    "{% for %}": "cannot be compiled",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ ('{0.__class__.__mro__}'|attr('format'))(1) }}": "unsafe",
    "{% include '/etc/passwd' %}": "no loader",
    "{{ raise_exception('no') }}": "refuses the messages: no",
}


def test_what_is_wrong_is_told() -> None:
    async def test(renderer: Renderer) -> None:
        for source, told in WRONG.items():
            with pytest.raises(InvalidRequestError, match=told):
                await rendered(renderer, source)
        assert len(pids(renderer)) == 1, "these do no harm"

    run(test)


def test_tools_need_a_template_that_knows_them() -> None:
    async def test(renderer: Renderer) -> None:
        with pytest.raises(InvalidRequestError, match="knows no tools") as refused:
            await rendered(renderer, SHORT, tools=[{"a": 1}])
        assert refused.value.parameter == "tools"

    run(test)


def test_who_leaves_ends_what_was_done_for_it() -> None:
    async def test(renderer: Renderer) -> None:
        await rendered(renderer, SHORT)
        (pid,) = pids(renderer)
        asked = asyncio.create_task(rendered(renderer, HOSTILE["loops"]))
        await asyncio.sleep(0.05)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert renderer.num_asking == 0 and pids(renderer) == []
        until = time.monotonic() + 5
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
            await asyncio.sleep(0.01)
        assert not os.path.exists(f"/proc/{pid}")

    run(test, max_cpu_s=60)


def test_closing_ends_what_is_rendered_and_waits() -> None:
    async def test(renderer: Renderer) -> None:
        asked = [asyncio.create_task(rendered(renderer, HOSTILE["loops"])) for _ in range(4)]
        while len(renderer._busy) < 2:
            await asyncio.sleep(0.01)
        begin_s = time.monotonic()
        await renderer.close()
        for one in asked:
            with pytest.raises(EngineDeadError, match="shutting down"):
                await one
        assert time.monotonic() - begin_s < 5 and renderer.num_asking == 0

    run(test, max_cpu_s=60)


def test_a_process_that_was_ended_is_replaced() -> None:
    async def test(renderer: Renderer) -> None:
        await rendered(renderer, SHORT)
        (process,) = renderer._idle
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert await rendered(renderer, SHORT) == "<s>user: hi\n"
        assert pids(renderer) not in ([], [process.pid])

    run(test)


def test_others_wait_their_turn() -> None:
    async def test(renderer: Renderer) -> None:
        sources = [f"{number}{SHORT}" for number in range(5)]
        found = await asyncio.gather(*(rendered(renderer, source) for source in sources))
        assert found == [f"{number}<s>user: hi\n" for number in range(5)]
        assert len(pids(renderer)) == 2

    run(test)


def test_its_processes_are_given_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(renderer: Renderer) -> None:
        await rendered(renderer, SHORT)
        (pid,) = pids(renderer)
        with open(f"/proc/{pid}/environ", "rb") as file:
            assert b"OCTAVO_API_KEY" not in file.read()

    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    run(test)


def test_names_are_no_templates() -> None:
    assert is_template_name("tool_use") and not is_template_name("{{ x }}")
