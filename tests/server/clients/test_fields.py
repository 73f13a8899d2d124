"""What the fields of /v1/responses and /v1/messages do, and how the clients' types fit."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

MESSAGES: list[Any] = [{"role": "user", "content": "Fold a sheet"}]
ASKED: dict[str, Any] = {"temperature": 1, "seed": 7, "ignore_eos": True}
LOGPROBS = "message.output_text.logprobs"


def posted(server: Any, path: str, body: dict[str, Any]) -> Any:
    answer = server.call(path, ASKED | body)
    assert answer.status == 200, answer.body
    return answer.json


def events(server: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """The objects of a stream; each is named as its type."""
    answer = server.call(path, ASKED | body | {"stream": True})
    assert answer.status == 200, answer.body
    found = []
    for block in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        kind, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert kind == "event: " + found[-1]["type"]
    return found


def test_all_that_responses_tell_is_of_openais_types(server: Any) -> None:
    body = {
        "input": "Fold a sheet", "max_output_tokens": 6, "include": [LOGPROBS], "top_logprobs": 2,
        "metadata": {"a": "b"}, "top_p": 0.9, "store": False, "tools": [], "text": {},
    }  # fmt: skip
    whole = Response.model_validate(posted(server, "/v1/responses", body), strict=False)
    told = events(server, "/v1/responses", body)
    for event in told:
        TypeAdapter(ResponseStreamEvent).validate_python(event)
    last = Response.model_validate(told[-1]["response"])
    assert last.output_text == whole.output_text and last.top_p == 0.9
    (item,) = whole.output
    (part,) = item.content  # type: ignore[union-attr]
    assert part.logprobs is not None and len(part.logprobs) == 6  # type: ignore[union-attr]
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)  # type: ignore[union-attr]
    deltas = [event for event in told if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == whole.output_text
    tokens = [entry["token"] for event in deltas for entry in event["logprobs"]]
    assert tokens == [entry.token for entry in part.logprobs]  # type: ignore[union-attr]


def test_responses_are_chats(server: Any) -> None:
    """Instructions are a system message, developers speak as the system, answers come back."""
    chat = {"max_tokens": 8, "return_token_ids": True}
    own = {"max_output_tokens": 8}
    first = posted(server, "/v1/responses", own | {"input": "a", "instructions": "Be brief"})
    system = {"role": "system", "content": "Be brief"}
    user = {"role": "user", "content": "a"}
    same = posted(server, "/v1/chat/completions", chat | {"messages": [system, user]})
    said = same["choices"][0]["message"]["content"]
    assert first["output"][0]["content"][0]["text"] == said
    assert first["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    again = [{**system, "role": "developer"}, user, *first["output"], {**user, "type": "message"}]
    second = posted(server, "/v1/responses", own | {"input": again})
    told = [system, user, {"role": "assistant", "content": said}, user]
    same = posted(server, "/v1/chat/completions", chat | {"messages": told})
    assert second["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    said = same["choices"][0]["message"]["content"]
    assert second["output"][0]["content"][0]["text"] == said


def test_all_that_messages_tell_is_of_anthropics_types(server: Any) -> None:
    body = {"messages": MESSAGES, "max_tokens": 6, "metadata": {"user_id": "me"}, "top_k": 40}
    whole = Message.model_validate(posted(server, "/v1/messages", body))
    told = events(server, "/v1/messages", body)
    for event in told:
        if event["type"] != "ping":
            TypeAdapter(RawMessageStreamEvent).validate_python(event)
    kinds = [event["type"] for event in told]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    text = "".join(event["delta"]["text"] for event in told[3:-3])
    assert text == whole.content[0].text  # type: ignore[union-attr]
    assert told[0]["message"]["usage"]["output_tokens"] == 0
    assert told[-2]["usage"]["output_tokens"] == whole.usage.output_tokens == 6


def test_messages_are_chats(server: Any) -> None:
    """Neighbours of one role are one message, and a begun answer is gone on with."""
    own = {"max_tokens": 8}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "well"},
    ]
    message = posted(server, "/v1/messages", own | {"messages": turns, "system": "Be brief"})
    chat = [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "a\nb"},
        turns[-1],
    ]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    same = posted(server, "/v1/chat/completions", own | goes_on | {"messages": chat})
    assert message["content"][0]["text"] == same["choices"][0]["message"]["content"]
    usage = message["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert num_prompt == same["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "fields", "name"),
    [
        ("/v1/responses", {"input": []}, "input"),
        ("/v1/responses", {"input": "x", "top_logprobs": 2}, "top_logprobs"),
        ("/v1/responses", {"input": "x", "conversation": "c"}, "conversation"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 10**6}, "max_output_tokens"),
        ("/v1/responses", {"input": "x", "temprature": 1}, "temprature"),
        ("/v1/responses", {"input": [{"role": "user", "content": "x", "y": 1}]}, "input.0.y"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 10**6}, "max_tokens"),
        ("/v1/messages", {"messages": [{"role": "system", "content": "x"}]}, "messages.0.role"),
        ("/v1/messages", {"messages": MESSAGES, "thinking": {"type": "enabled"}}, "thinking"),
        ("/v1/messages", {"messages": MESSAGES, "stop_sequences": [""]}, "stop_sequences"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(
    server: Any, path: str, fields: dict[str, Any], name: str, stream: bool
) -> None:
    limit = "max_tokens" if path == "/v1/messages" else "max_output_tokens"
    answer = server.call(path, {limit: 4, **fields, "stream": stream})
    assert answer.status == 400
    assert name in answer.error["message"]
    if path == "/v1/messages":
        assert answer.json["type"] == "error" and answer.error["type"] == "invalid_request_error"
    else:
        assert answer.error["param"] == name


def test_keys_and_lenience(launch: Any) -> None:
    """Each client's own header brings the key; unknown members of messages are named."""
    key = "0123456789abcdef"
    server = launch("--api-key", key, "--compat", "lenient", "--log-requests")
    model = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key).models.list().data[0].id
    for header in ({"api_key": key}, {"auth_token": key, "api_key": None}):
        client = anthropic.Anthropic(base_url=server.url, max_retries=0, **header)
        said = client.messages.with_raw_response.create(
            model=model, max_tokens=2, metadata={"user_id": "somebody"},
            messages=[{"role": "user", "content": "x", "name": "me"}],  # type: ignore[typeddict-unknown-key]
            extra_body={"colour": "red"},
        )  # fmt: skip
        assert said.headers["x-octavo-ignored"] == "colour, messages.0.name"
        assert said.parse()._request_id
    server.until(lambda: "user=somebody" in server.log())
    wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong-wrong-wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as error:
        wrong.messages.create(model=model, max_tokens=2, messages=MESSAGES)
    body: Any = error.value.body
    assert body["error"]["type"] == "authentication_error"
