"""The clients that people use, unchanged, against a real server process."""

from __future__ import annotations

import asyncio
import http.client
import json
from typing import Any

import anthropic
import openai
import pytest

MESSAGES: list[Any] = [{"role": "user", "content": "Fold a sheet"}]
SEED = {"seed": 7}
"""The tiny model's answers are noise, but with a seed always the same."""
ASKED: dict[str, Any] = {"temperature": 1, "extra_body": SEED}
ASKED_CLAUDE: dict[str, Any] = {"extra_body": SEED | {"temperature": 1}}


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(server: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (only,) = client.models.list().data
    return only.id


def greedy(client: openai.OpenAI, model: str, num: int = 12) -> str:
    """What all of them must say."""
    answer = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=num, **ASKED)
    assert answer.usage is not None and answer.usage.completion_tokens == num
    return answer.choices[0].message.content or ""


def test_responses(client: openai.OpenAI, model: str) -> None:
    whole = client.responses.create(
        model=model, input="Fold a sheet", max_output_tokens=12, **ASKED
    )
    assert whole.output_text == greedy(client, model)
    assert whole.status == "incomplete" and whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None and whole.usage.output_tokens == 12
    parts = [{"type": "input_text", "text": "Fold a sheet"}]
    again = client.responses.create(
        model=model, input=[{"role": "user", "content": parts}],   # type: ignore[list-item, typeddict-item]
        max_output_tokens=12, **ASKED,
    )  # fmt: skip
    assert again.output_text == whole.output_text
    assert again.usage is not None and again.usage.input_tokens_details.cached_tokens > 0


def test_responses_in_a_stream(client: openai.OpenAI, model: str) -> None:
    kinds, text, numbers, last = [], "", [], None
    events = client.responses.create(
        model=model, input="Fold a sheet", max_output_tokens=12, **ASKED, stream=True,
        instructions="Be brief", metadata={"k": "v"},
    )  # fmt: skip
    for event in events:
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
        last = event
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done",
        "response.incomplete",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert numbers == list(range(len(kinds)))
    assert last is not None and last.type == "response.incomplete"
    assert last.response.output_text == text and text
    assert last.response.metadata == {"k": "v"} and last.response.instructions == "Be brief"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.type"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.type",
        ),
    ],
)
def test_what_responses_does_not_have_is_refused(
    client: openai.OpenAI, model: str, fields: dict[str, Any], name: str
) -> None:
    body = {"model": model, "input": "x"} | fields
    with pytest.raises(openai.BadRequestError) as error:
        client.post("/responses", body=body, cast_to=object)
    assert error.value.param == name


def test_messages(claude: anthropic.Anthropic, client: openai.OpenAI, model: str) -> None:
    said = claude.messages.create(model=model, messages=MESSAGES, max_tokens=12, **ASKED_CLAUDE)
    assert said.content[0].type == "text"
    assert said.content[0].text == greedy(client, model)
    assert said.stop_reason == "max_tokens" and said.stop_sequence is None
    assert said.usage.output_tokens == 12
    count = claude.messages.count_tokens(model=model, messages=MESSAGES)
    used = said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0)
    assert count.input_tokens == used
    blocks = [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}]
    more = claude.messages.count_tokens(model=model, messages=MESSAGES, system=blocks)  # type: ignore[arg-type]
    assert more.input_tokens > count.input_tokens


def test_messages_stop_at_a_sequence(claude: anthropic.Anthropic, model: str) -> None:
    whole = claude.messages.create(model=model, messages=MESSAGES, max_tokens=40, **ASKED_CLAUDE)
    text = whole.content[0].text  # type: ignore[union-attr]
    stop = text[5:8]
    cut = claude.messages.create(
        model=model, messages=MESSAGES, max_tokens=40, stop_sequences=[stop], **ASKED_CLAUDE
    )
    assert cut.stop_reason == "stop_sequence" and cut.stop_sequence == stop
    assert cut.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]


def test_messages_in_a_stream(claude: anthropic.Anthropic, model: str) -> None:
    whole = claude.messages.create(model=model, messages=MESSAGES, max_tokens=12, **ASKED_CLAUDE)
    with claude.messages.stream(
        model=model, messages=MESSAGES, max_tokens=12, **ASKED_CLAUDE
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 12


def test_errors_of_anthropics(claude: anthropic.Anthropic, model: str, server: Any) -> None:
    image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    with pytest.raises(anthropic.BadRequestError) as error:
        claude.messages.create(model=model, messages=image, max_tokens=4)
    body: Any = error.value.body
    assert body["error"]["type"] == "invalid_request_error"
    assert "messages.0.content" in body["error"]["message"]
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="nobody", messages=MESSAGES, max_tokens=4)
    answer = server.call("/v1/messages", {"model": model, "messages": MESSAGES})
    assert answer.status == 400 and answer.json["type"] == "error"
    assert "max_tokens" in answer.json["error"]["message"]
    tools = server.call(
        "/v1/messages", {"messages": MESSAGES, "max_tokens": 4, "tools": [{"name": "x"}]}
    )
    assert tools.status == 400 and "/v1/chat/completions" in tools.json["error"]["message"]


def test_async_clients(server: Any, client: openai.OpenAI, model: str) -> None:
    expected = greedy(client, model)

    async def ask() -> None:
        async with (
            openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as one,
            anthropic.AsyncAnthropic(base_url=server.url, api_key="none") as other,
        ):
            response, message = await asyncio.gather(
                one.responses.create(
                    model=model, input="Fold a sheet", max_output_tokens=12, **ASKED
                ),
                other.messages.create(
                    model=model, messages=MESSAGES, max_tokens=12, **ASKED_CLAUDE
                ),
            )
            assert response.output_text == expected
            assert message.content[0].text == expected  # type: ignore[union-attr]
            chunks = await one.chat.completions.create(
                model=model, messages=MESSAGES, max_tokens=12, stream=True, **ASKED
            )
            text = ""
            async for chunk in chunks:
                text += chunk.choices[0].delta.content or ""
            assert text == expected

    asyncio.run(ask())


def test_langchain(server: Any, client: openai.OpenAI, model: str) -> None:
    from langchain_openai import ChatOpenAI, OpenAI

    common: dict[str, Any] = {
        "base_url": f"{server.url}/v1", "api_key": "none", "model": model, "temperature": 1,
        "seed": 7,
        "max_retries": 0,
    }  # fmt: skip
    chat = ChatOpenAI(max_tokens=12, **common)
    expected = greedy(client, model)
    answer = chat.invoke("Fold a sheet")
    assert answer.content == expected
    assert answer.usage_metadata is not None and answer.usage_metadata["output_tokens"] == 12
    assert "".join(str(chunk.content) for chunk in chat.stream("Fold a sheet")) == expected
    both = chat.batch(["Fold a sheet", "Cut a page"])
    assert both[0].content == expected and both[1].content != expected
    plain = client.completions.create(model=model, prompt="Once", max_tokens=8, **ASKED)
    assert OpenAI(max_tokens=8, **common).invoke("Once") == plain.choices[0].text


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 200}, "error"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 200}, "response.failed"),
    ],
)
def test_a_stream_ends_with_one_error_when_aborted(
    server: Any, path: str, body: dict[str, Any], kind: str, number: int
) -> None:
    """By the administrator, in the middle."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    request_id = f"to-end{path.replace('/', '-')}-{number}"
    headers = {"content-type": "application/json", "x-request-id": request_id}
    told = body | {"stream": True, "seed": number, "ignore_eos": True}
    connection.request("POST", path, json.dumps(told), headers)
    response = connection.getresponse()
    assert response.status == 200 and response.readline()
    ended = server.call("/admin/abort", {"request_id": request_id})
    rest = response.read().decode()
    connection.close()
    assert ended.status == 200
    events = [line for line in rest.splitlines() if line.startswith("event: ")]
    assert events[-1] == f"event: {kind}" and events.count(f"event: {kind}") == 1
