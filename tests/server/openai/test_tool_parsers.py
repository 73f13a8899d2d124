"""Calls of tools in text, however it is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.server.tools.json_text import JsonText
from octavo.server.tools.parsers import PARSERS, ParserName

F: Any = ("f", {"a": "x"})
G: Any = ("g", {})
ODD: Any = ("f", {"a": '</tool_call> } "[', "b": [1, {"c": []}], "\u00e4": None})
CASES: list[tuple[ParserName, str, str, list[Any]]] = [
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>', "", [F]),
    (
        "hermes",
        'Two.\n<tool_call>{"arguments": {"a": "x"}, "name": "f"}</tool_call>\n'
        '<tool_call>{"name": "g"}</tool_call>\n',
        "Two.",
        [F, G],
    ),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {json.dumps(ODD[1])}}}', "", [ODD]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"x\\"}"}', "", [F]),
    ("hermes", " a < b <tool", " a < b <tool", []),
    ("hermes", "<tool_call>none</tool_call> x ", "<tool_call>none</tool_call> x ", []),
    ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    ("hermes", '<tool_call>{"a": NaN}</tool_call>', '<tool_call>{"a": NaN}</tool_call>', []),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}',
        '<tool_call>{"name": "f", "arguments": {"a": 1e999}}',
        [],
    ),
    ("hermes", "a \n <tool_call> none", "a \n <tool_call> none", []),
    ("hermes", 'a <tool_call> {"b": 1} c', 'a <tool_call> {"b": 1} c', []),
    ("hermes", 'a \n\n<tool_call> \n{"name": "g"}\n', "a", [G]),
    ("hermes", '<tool_call>{"name": "g"}</tool_call> and on', " and on", [G]),
    ("hermes", '{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
    ("llama3_json", '{"name": "f", "parameters": {"a": "x"}}', "", [F]),
    (
        "llama3_json",
        '<|python_tag|>{"name": "f", "parameters": {"a": "x"}}; {"name": "g", "parameters": {}}',
        "",
        [F, G],
    ),
    ("llama3_json", "<|python_tag|>f.call(x=1)", "<|python_tag|>f.call(x=1)", []),
    ("llama3_json", ' {"a": 1} and', ' {"a": 1} and', []),
    ("llama3_json", 'It is {"name": "f"}', 'It is {"name": "f"}', []),
    ("llama3_json", '{"name": "f", "parameters": {"a', '{"name": "f", "parameters": {"a', []),
    (
        "mistral",
        'Ok [TOOL_CALLS] [{"name": "f", "arguments": {"a": "x"}}, {"name": "g"}]',
        "Ok",
        [F, G],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": "x"}[TOOL_CALLS]g[ARGS]{}', "", [F, G]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123[ARGS]{"a": "x"}', "", [F]),
    ("mistral", "[TOOL_CALLS][1, 2] a [TOOL", "[TOOL_CALLS][1, 2] a [TOOL", []),
    ("mistral", "a [TOOL_CALLS]  [ ]", "a [TOOL_CALLS]  [ ]", []),
    ("mistral", f"[TOOL_CALLS]f{' ' * 400}{{}}", f"[TOOL_CALLS]f{' ' * 400}{{}}", []),
    ("mistral", "[TOOL_CALLS] what is {that}", "[TOOL_CALLS] what is {that}", []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "argu', '[TOOL_CALLS][{"name": "f", "argu', []),
]


def found(name: ParserName, pieces: list[str]) -> tuple[str, list[Any]]:
    parser = PARSERS[name]()
    told = [*map(parser.push, pieces), parser.finish()]
    calls = [(call.name, json.loads(call.arguments)) for one in told for call in one.calls]
    return "".join(one.content for one in told), calls


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_wherever_text_is_cut(name: ParserName, text: str, content: str, calls: list[Any]) -> None:
    assert found(name, [text]) == found(name, list(text)) == (content, calls)
    for at in range(1, len(text)):
        assert found(name, [text[:at], text[at:]]) == (content, calls), text[:at]


def test_text_is_told_as_soon_as_it_is_no_call() -> None:
    parser = PARSERS["hermes"]()
    assert [parser.push(piece).content for piece in ("One ", "two <", "b> <tool", "s>")] == [
        "One", " two", " <b>", " <tools>",
    ]  # fmt: skip
    whole = parser.push('<tool_call>{"name": "g"}')
    assert whole.content == "" and len(whole.calls) == 1, "a call is told at its last bracket"


def test_half_a_surrogate_pair_stays_escaped() -> None:
    parser = PARSERS["hermes"]()
    (call,) = parser.push('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}').calls
    assert call.arguments == '{"a": "\\ud800"}'


@pytest.mark.parametrize("name", list(PARSERS))
@pytest.mark.parametrize("said", ["{}", " ", "\n{{", "f[CALL_ID] ", '{{"name": "g"}}, '])
def test_a_long_answer_takes_no_longer_for_each_of_its_pieces(name: ParserName, said: str) -> None:
    text = said.replace("{}", PARSERS[name].opening)

    def longest_held(num: int) -> int:
        parser = PARSERS[name]()
        parser.push(PARSERS[name].opening)
        longest = 0
        for _ in range(num):
            parser.push(text)
            longest = max(longest, len(parser._held))
        return longest

    assert longest_held(2_000) < 500, "what is held is looked at again with every piece"


@pytest.mark.parametrize("num", [1, 50_000])
def test_nesting_without_end_is_no_call(num: int) -> None:
    text = '<tool_call>{"name": "f", "arguments": ' + "[" * num + "]" * num + "}</tool_call>"
    assert found("hermes", [text]) == (text, [])


def test_an_object_ends_at_its_own_bracket() -> None:
    text = r'{"a": "}\"]", "b": {"c": [1]}}'
    for at in range(1, len(text)):
        first = JsonText()
        assert first.feed(text[:at]) is None
        assert first.feed(text[at:] + " }") == len(text) - at and first.text == text
