"""Bodies, headers and ids meant to do harm: an answer that says why, at once, and no harm."""

from __future__ import annotations

import json
import socket
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from octavo.server.errors import _MAX_TOLD, InvalidRequestError, anthropic_error_shape, error_shape

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HALF = "\ud800"
"""Half of a surrogate pair: JSON can spell it, UTF-8 cannot."""
SAID = [{"role": "user", "content": "a"}]


def _nested(depth: int) -> Any:
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


def _part(**more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "a", **more}]}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a", "z": _nested(900)}]}, "messages"),
        (CHAT, {"messages": SAID, "chat_template_kwargs": {"z": _nested(900)}}, "messages"),
        (CHAT, {"messages": _part(text=HALF)}, "messages"),
        (CHAT, {"messages": _part(zz=1)}, "messages.0.content.0.zz"),
        (CHAT, {"messages": SAID, "user": HALF}, "user"),
        (CHAT, {"messages": SAID, "metadata": {str(i): "" for i in range(65)}}, "metadata"),
        (
            CHAT,
            {"messages": [SAID[0] | {"content": _part()[0]["content"] * 16385}]},
            "messages.0.content",
        ),
        ("/tokenize", {"messages": _part(text=HALF)}, "messages"),
        ("/v1/responses", {"input": SAID * 1000}, "input"),
        ("/v1/responses", {"input": "a", "metadata": {"a": HALF}}, "metadata.a"),
        ("/v1/responses", {"input": [SAID[0] | {HALF: 1}]}, "input.0.\\ud800"),
        (COMPLETIONS, {"prompt": "a", "use_beam_search": True, "logprobs": 0}, "logprobs"),
        (COMPLETIONS, {"prompt": [5, -1, -2]}, "prompt.1"),
        (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt.1"),
        (COMPLETIONS, {"prompt": [[1], [2, True]]}, "prompt.1.1"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [5], "add_special_tokens": True}, "add_special_tokens"),
        (COMPLETIONS, {"prompt": "a", "stop": ["a", 5]}, "stop.1"),
        (COMPLETIONS, {"prompt": "a", "stop": "a" * 1025}, "stop"),
        (COMPLETIONS, {"prompt": "a", "bad_words": ["a" * 1025]}, "bad_words.0"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        (
            COMPLETIONS,
            {"prompt": "a", "logit_bias": {str(i): 1 for i in range(262145)}},
            "logit_bias",
        ),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        (
            COMPLETIONS,
            {"prompt": "a", "return_tokens_as_token_ids": True},
            "return_tokens_as_token_ids",
        ),
    ],
)
def test_a_refusal_names_the_field(server: Any, path: str, body: Any, param: str) -> None:
    answer = server.call(path, body)
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_a_list_that_is_too_long_is_called_so(server: Any) -> None:
    content = _part()[0]["content"] * 16385
    refused = server.call(CHAT, {"messages": [SAID[0] | {"content": content}]})
    assert "at most 16384 items" in refused.error["message"]
    refused = server.call(COMPLETIONS, {"prompt": "a", "stop": ["a"] * 1025})
    assert "at most 1024 items" in refused.error["message"]


def test_anthropics_errors_are_whole_too(server: Any) -> None:
    answer = server.call("/v1/messages", {"max_tokens": 1, "messages": [SAID[0] | {HALF: 1}]})
    assert answer.status == 400
    assert answer.error["message"] == "messages.0.\\ud800 is an unknown field"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": [-1] * 200_000}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(50_000)}}),
        (CHAT, {"messages": [1] * 200_000}),
        ("/detokenize", {"tokens": [-1] * 200_000}),
    ],
)
def test_one_error_is_told_of_a_body_full_of_them(server: Any, path: str, body: Any) -> None:
    answer = server.call(path, body)
    assert answer.status == 400 and len(answer.body) < 400
    assert "more)" not in answer.error["message"]  # the others were not looked for


def test_more_messages_than_tokens_are_refused_unrendered(server: Any) -> None:
    answer = server.call(CHAT, {"messages": SAID * 257, "max_tokens": 1})
    assert answer.error["message"] == "257 messages exceed max_model_len 256 tokens: send fewer"


def test_a_part_may_have_what_asks_for_nothing(server: Any) -> None:
    messages = _part(annotations=[], cache_control={"type": "ephemeral"})
    assert server.call(CHAT, {"messages": messages, "max_tokens": 1}).status == 200


def test_another_content_type_is_told(server: Any) -> None:
    answer = server.call(COMPLETIONS, b'{"prompt": "a"}', content_type="text/plain")
    told = "send a JSON object with content-type: application/json"
    assert (answer.status, answer.error["message"]) == (400, told)


def test_errors_are_short_and_of_unicode() -> None:
    error = InvalidRequestError(HALF + "x" * 9999, parameter="y" * 9999)
    told = error_shape(error)["error"]
    assert told["message"] == "\\ud800" + "x" * (_MAX_TOLD - 1) and told["param"] == "y" * 200
    assert anthropic_error_shape(error)["error"]["message"] == told["message"]


def test_prompt_logprobs_are_as_many_as_asked_for_beside_an_echo(server: Any) -> None:
    asked: dict[str, Any] = {"prompt": "abcd", "prompt_logprobs": 1}
    alone = server.complete(**asked).json["choices"][0]["prompt_logprobs"]
    echoed = server.complete(**asked, echo=True, logprobs=5).json["choices"][0]
    assert echoed["prompt_logprobs"] == alone
    assert max(len(top) for top in echoed["logprobs"]["top_logprobs"][1:]) == 5


def test_nobody_takes_anothers_id(server: Any) -> None:
    """The second of two prompts would be called as a request that is there."""
    url = urlsplit(server.url)
    body = json.dumps({"prompt": "x", "max_tokens": 250, "ignore_eos": True, "stream": True})
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\nx-request-id: twin-1\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((url.hostname, url.port)) as other:
        other.sendall((head + body).encode())
        assert other.recv(15) == b"HTTP/1.1 200 OK"
        pair = {"prompt": ["x", "y"], "max_tokens": 1}
        answer = server.call(COMPLETIONS, pair, X_Request_Id="twin")
    assert answer.status == 200 and answer.headers["x-request-id"] == "twin"
    server.until(lambda: server.call("/admin/requests").json == {"requests": []})


@pytest.mark.parametrize("header", ["Forwarded", "X-Forwarded-For", "X-Real-IP", "Via"])
def test_behind_a_proxy_nobody_is_local(server: Any, header: str) -> None:
    for path in ("/admin/requests", "/dashboard/sources"):
        assert server.call(path, **{header: "10.0.0.9"}).status == 403
    assert server.call("/admin/requests").status == 200


def test_tokens_without_a_limit_are_counted_when_they_have_come(start_server: Any) -> None:
    server = start_server("--tokens-per-minute", "60", "--max-model-len", "120")
    body = {"messages": SAID, "ignore_eos": True}
    begin_s = time.monotonic()
    usage = server.call(CHAT, body).json["usage"]
    assert usage["total_tokens"] == 120  # 60 more than there were
    refused = server.call(CHAT, body)
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    most_s = 60 + usage["prompt_tokens"]  # until there are enough for the prompt again
    passed_s = time.monotonic() - begin_s
    assert most_s - passed_s - 1 <= int(refused.headers["retry-after"]) <= most_s


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": "a" * 400_000}, "prompt"),
        (CHAT, {"messages": [SAID[0] | {"content": "a" * 400_000}]}, "messages"),
        ("/v1/responses", {"input": "a" * 400_000}, "input"),
        ("/v1/messages", {"messages": [SAID[0] | {"content": "a" * 400_000}]}, None),
    ],
    ids=["completions", "chat", "responses", "messages"],
)
def test_a_text_that_can_never_fit(server: Any, path: str, body: Any, param: str | None) -> None:
    """Its beginning tells; who wants its end alone, or to count, has all of it cut."""
    refused = server.call(path, {"max_tokens": 1, **body} if path != "/v1/responses" else body)
    assert refused.status == 400 and "characters alone are" in refused.error["message"]
    assert refused.error.get("param") == param
    if path in (COMPLETIONS, CHAT):
        short = {"max_tokens": 1, "truncate_prompt_tokens": 5}
        assert server.call(path, body | short).json["usage"]["prompt_tokens"] == 5
    if path == "/v1/messages":
        counted = server.call("/v1/messages/count_tokens", body).json
        assert counted["input_tokens"] >= 400_000
