"""The side of an engine that knows text: what is long does not hold up the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.engine.remote.text import TextSide, _is_short
from octavo.errors import InvalidRequestError, RequestCapacityError
from octavo.text.chat import ChatTemplate
from octavo.text.tokenizer import LONG_TEXT

FEW = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def side(tiny_model_path: Path) -> TextSide:
    path = str(tiny_model_path)
    return TextSide.load(EngineConfig(model=path, tokenizer=path))


def rounds(work: Awaitable[Any]) -> int:
    """How many rounds the event loop makes meanwhile."""

    async def main() -> int:
        task = asyncio.ensure_future(work)
        num = 0
        while not task.done():
            await asyncio.sleep(0)
            num += 1
        await task
        return num

    return asyncio.run(main())


def test_a_long_text_is_cut_as_short_ones_are(side: TextSide) -> None:
    text = "ab \u20ac\n" * 4000
    assert len(text) > LONG_TEXT
    pieces = [asyncio.run(side.encode(text[i : i + 50], False)) for i in range(0, len(text), 50)]
    ids = asyncio.run(side.encode(text, False))
    assert ids == [token_id for piece in pieces for token_id in piece]
    assert side.decode(ids, True) == text
    with pytest.raises(InvalidRequestError, match="valid Unicode"):
        asyncio.run(side.encode(text + "\ud800"))


def test_others_go_on_while_a_long_text_is_cut(side: TextSide) -> None:
    """They do not if the tokenizer keeps the interpreter's lock: another thread is not enough. (A
    busy machine may keep the loop from running, but not every time.)"""
    assert any(rounds(side.encode("abc \n" * 20_000)) > 20 for _ in range(5))


def test_what_is_sure_to_be_too_long_is_not_cut_as_a_whole(
    side: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert side.tokenizer is not None
    encode, cut = side.tokenizer.encode, []

    def counted(text: str, add_special_tokens: bool) -> list[int]:
        cut.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(side.tokenizer, "encode", counted)
    with pytest.raises(RequestCapacityError, match=r"16,000 .*exceed max_model_len 1,000") as told:
        asyncio.run(side.encode("a" * 1_000_000, max_tokens=1000))
    assert cut == [16_000] and told.value.parameter == "prompt"
    for most in (None, 40_000):  # nobody asked; not sure enough
        assert len(asyncio.run(side.encode("a" * 100_000, False, max_tokens=most))) == 100_000
    assert cut == [16_000, 100_000, 100_000]


def test_many_characters_in_few_tokens_are_cut_as_a_whole(
    side: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_hundreds(text: str, add_special_tokens: bool) -> list[int]:
        return [1] * (len(text) // 100)

    monkeypatch.setattr(side.tokenizer, "encode", in_hundreds)
    assert len(asyncio.run(side.encode("a" * 90_000, max_tokens=1000))) == 900


def test_a_large_conversation_is_rendered_in_another_thread(
    side: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []

    def render(self: ChatTemplate, messages: Any, **_: Any) -> str:
        threads.append(threading.get_ident())
        return "a"

    def prompt(messages: list[Any], **variables: Any) -> Any:
        return side.chat_prompt(
            messages, chat_template="{{ x }}", add_generation_prompt=True,
            continue_final_message=False, max_tokens=None, **variables,
        )  # fmt: skip

    monkeypatch.setattr(ChatTemplate, "render", render)
    for work in (prompt(FEW), prompt(FEW, mood=1), prompt([FEW[0] | {"z": 1}]), prompt(FEW * 99)):
        asyncio.run(work)
    assert [ident == threading.get_ident() for ident in threads] == [True, False, False, False]


@pytest.mark.parametrize(
    ("messages", "is_short"),
    [
        (FEW, True),
        (FEW * 63, True),
        (FEW * 64, False),
        ([{"role": "user", "content": None}], True),
        ([{"role": "user", "content": ["a"]}], False),
        ([{"role": "user", "content": "a", "name": "b"}], False),
        ([5], False),
    ],
    ids=range(7),
)
def test_what_is_short(messages: list[Any], is_short: bool) -> None:
    assert _is_short(messages) is is_short
