"""The real openai client against a real server process: sync, async, streaming."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import openai
import pytest

HI: Any = [{"role": "user", "content": "hi"}]
TEXT = "the quick brown fox"


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    (card,) = client.models.list().data
    assert client.models.retrieve(card.id).id == card.id
    assert card.model_dump()["max_model_len"] > 0
    return card.id


def post(server: Any, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def events(server: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """The objects of a stream, which must end with [DONE]."""
    answer = post(server, path, body | {"stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.content.decode("utf-8").split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {
        "model": model, "prompt": TEXT, "max_tokens": 24, "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.completions.create(**asked)
    chunks = list(
        client.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_chat_stream_has_role_content_finish_and_usage(server: Any, model: str) -> None:
    asked = {
        "messages": HI, "max_tokens": 12, "temperature": 0, "n": 2, "seed": 1, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    found = events(server, "/v1/chat/completions", asked)
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == 24
    for number in (0, 1):
        own = [c["choices"][0] for c in found[:-1] if c["choices"][0]["index"] == number]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert own[-1]["delta"] == {} and own[-1]["finish_reason"] == "length"
        assert all(c["finish_reason"] is None for c in own[:-1])
    del asked["stream_options"]
    whole = post(server, "/v1/chat/completions", asked).json()
    for choice in whole["choices"]:
        parts = [
            c["choices"][0]["delta"].get("content", "")
            for c in found[:-1]
            if c["choices"][0]["index"] == choice["index"]
        ]
        assert "".join(parts) == choice["message"]["content"]


def test_many_at_once_with_the_async_client(server: Any, model: str) -> None:
    async def main() -> list[str]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        async def one(seed: int) -> str:
            stream = await client.chat.completions.create(
                model=model, messages=HI, max_tokens=10, seed=seed, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        async with client:
            return await asyncio.gather(*(one(seed % 2) for seed in range(8)))

    answers = asyncio.run(main())
    assert answers[0::2] == [answers[0]] * 4 and answers[1::2] == [answers[1]] * 4
    assert answers[0] != answers[1]


def test_a_stop_string_is_never_seen(server: Any, model: str) -> None:
    asked = {"prompt": TEXT, "max_tokens": 40, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    text = post(server, "/v1/completions", asked).json()["choices"][0]["text"]
    stop = text[12:15]
    found = events(server, "/v1/completions", asked | {"stop": stop})
    assert "".join(c["choices"][0]["text"] for c in found) == text[: text.index(stop)]
    assert found[-1]["choices"][0]["finish_reason"] == "stop"
    assert found[-1]["choices"][0]["stop_reason"] == stop


def test_characters_are_never_split(server: Any, model: str) -> None:
    """Tokens are bytes here, and the model is made to say the last one of a character."""
    *before, last = post(server, "/tokenize", {"prompt": "é€"}).json()["tokens"]
    assert len(before) == len("é€".encode()) - 1
    asked = {"prompt": before, "allowed_token_ids": [last], "max_tokens": 1, "logprobs": 0}
    found = events(server, "/v1/completions", asked)
    assert "".join(c["choices"][0]["text"] for c in found) == "€"
    asked = {"prompt": "a", "allowed_token_ids": [last], "max_tokens": 3}
    (choice,) = post(server, "/v1/completions", asked).json()["choices"]
    assert choice["text"] == "\ufffd" * 3  # bytes that never become one


def test_echo_with_logprobs_of_the_prompt(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=["abc", "de"], max_tokens=2, echo=True, logprobs=2, temperature=0
    )
    for prompt, choice in zip(("abc", "de"), answer.choices, strict=True):
        lists = choice.logprobs
        assert choice.text.startswith(prompt) and lists is not None
        assert lists.tokens[: len(prompt)] == list(prompt)
        assert lists.token_logprobs[0] is None and lists.token_logprobs[1] < 0
        assert lists.text_offset[: len(prompt)] == list(range(len(prompt)))
        assert len(lists.tokens) == len(prompt) + 2
    assert answer.usage is not None and answer.usage.completion_tokens == 4


def test_echo_of_the_prompt_alone(server: Any, model: str) -> None:
    asked = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = post(server, "/v1/completions", asked).json()
    (choice,) = answer["choices"]
    assert choice["text"] == "abc" and choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert answer["usage"]["completion_tokens"] == 0
    found = events(server, "/v1/completions", asked)
    assert "".join(c["choices"][0]["text"] for c in found) == "abc"
    assert found[0]["choices"][0]["logprobs"] == choice["logprobs"]


def test_chat_logprobs(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=HI, max_tokens=3, logprobs=True, top_logprobs=2, temperature=0,
        logit_bias={"65": 50}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None and len(content) == 3
    for entry in content:
        assert entry.bytes == list(entry.token.encode())
        first, second = entry.top_logprobs
        assert first.logprob >= max(second.logprob, entry.logprob)  # all before the bias
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content


def test_token_ids_lists_and_indices(server: Any, model: str) -> None:
    ids = post(server, "/tokenize", {"prompt": "abc"}).json()["tokens"]
    asked = {"prompt": [ids, ids], "n": 2, "max_tokens": 2, "temperature": 0, "logprobs": 0}
    answer = post(
        server, "/v1/completions", asked | {"return_token_ids": True, "logit_bias": {"65": 100}}
    ).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["token_ids"] == [65, 65] for choice in answer["choices"])
    assert all(choice["prompt_token_ids"] == ids for choice in answer["choices"])
    assert post(server, "/detokenize", {"tokens": ids}).json() == {"prompt": "abc"}


def test_tokenize_messages_is_the_prompt_of_chat(server: Any, model: str) -> None:
    tokens = post(server, "/tokenize", {"messages": HI}).json()
    asked = {"messages": HI, "max_tokens": 1, "return_token_ids": True}
    answer = post(server, "/v1/chat/completions", asked).json()
    assert answer["prompt_token_ids"] == tokens["tokens"]
    assert answer["usage"]["prompt_tokens"] == tokens["count"]


def test_beams_and_best_of(server: Any, model: str) -> None:
    asked = {"prompt": TEXT, "n": 2, "best_of": 3, "max_tokens": 4}
    beams = post(server, "/v1/completions", asked | {"use_beam_search": True})
    assert len({choice["text"] for choice in beams.json()["choices"]}) == 2
    best = post(server, "/v1/completions", asked | {"seed": 0})
    assert [choice["index"] for choice in best.json()["choices"]] == [0, 1]


def test_what_it_cost_the_pool(server: Any, model: str) -> None:
    asked = {"prompt": "x" * 70, "max_tokens": 2, "return_kv_usage": True, "cache_salt": "mine"}
    first = post(server, "/v1/completions", asked).json()["usage"]
    again = post(server, "/v1/completions", asked).json()["usage"]
    assert first["kv"]["peak_blocks"] > 0 and first["kv"]["misses"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == again["kv"]["cached_tokens"] >= 64


def test_a_prompt_is_cut_on_demand(server: Any, model: str) -> None:
    asked = {"prompt": "abcdef", "max_tokens": 1, "return_token_ids": True}
    whole = post(server, "/v1/completions", asked).json()["choices"][0]["prompt_token_ids"]
    cut = post(server, "/v1/completions", asked | {"truncate_prompt_tokens": 2, "echo": True})
    (choice,) = cut.json()["choices"]
    assert choice["prompt_token_ids"] == whole[-2:] and choice["text"].startswith("ef")
    long = asked | {"prompt": "x" * 1000, "max_tokens": 5, "truncate_prompt_tokens": -1}
    usage = post(server, "/v1/completions", long).json()["usage"]
    (card,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    assert usage["prompt_tokens"] == card["max_model_len"] - 5


def test_a_message_is_gone_on_with(server: Any, model: str) -> None:
    begun = [*HI, {"role": "assistant", "content": "well, "}]
    asked = {
        "messages": begun, "max_tokens": 3, "temperature": 0, "logit_bias": {"65": 100},
        "continue_final_message": True, "add_generation_prompt": False, "echo": True,
        "return_token_ids": True,
    }  # fmt: skip
    answer = post(server, "/v1/chat/completions", asked).json()
    said = post(server, "/detokenize", {"tokens": [65]}).json()["prompt"] * 3
    assert answer["choices"][0]["message"]["content"] == "well, " + said
    prompt = post(server, "/detokenize", {"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert prompt.rstrip().endswith("assistant: well,")
    found = events(server, "/v1/chat/completions", asked)
    parts = [c["choices"][0]["delta"].get("content", "") for c in found]
    assert "".join(parts) == "well, " + said
    assert found[0]["prompt_token_ids"] == answer["prompt_token_ids"]


def test_usage_in_every_chunk(server: Any, model: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {"prompt": "abc", "max_tokens": 9, "ignore_eos": True, "stream_options": options}
    found = events(server, "/v1/completions", asked)
    counts = [c["usage"]["completion_tokens"] for c in found]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == 9
    assert all(c["usage"]["prompt_tokens"] == 3 for c in found)


def test_logprobs_of_a_stream_are_those_of_the_whole(server: Any, model: str) -> None:
    asked = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": 3, "prompt": TEXT}
    (whole,) = post(server, "/v1/completions", asked).json()["choices"]
    lists = [c["choices"][0]["logprobs"] for c in events(server, "/v1/completions", asked)]
    for name, values in whole["logprobs"].items():
        assert [v for part in lists if part for v in part[name]] == values, name
    asked = {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "logprobs": True}
    asked |= {"messages": HI, "top_logprobs": 2}
    (told,) = post(server, "/v1/chat/completions", asked).json()["choices"]
    parts = [c["choices"][0]["logprobs"] for c in events(server, "/v1/chat/completions", asked)]
    assert [e for part in parts if part for e in part["content"]] == told["logprobs"]["content"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", {"prompt": "a", "temprature": 1}, 400, "temprature"),
        ("/v1/completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
        ("/v1/completions", {"prompt": "a", "priority": 3}, 400, "priority"),
        ("/v1/completions", {"prompt": [100000]}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a" * 5000}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 10**6}, 400, "max_tokens"),
        ("/v1/completions", {"prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/v1/chat/completions", {"messages": HI, "chat_template": "x"}, 400, "chat_template"),
        ("/v1/chat/completions", {"messages": HI, "tools": [{}]}, 400, "tools.0.type"),
        ("/detokenize", {"tokens": [100000]}, 400, "tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(
    server: Any, model: str, path: str, body: dict[str, Any], status: int, param: str, stream: bool
) -> None:
    if stream and path.startswith("/v1"):
        body = body | {"stream": True}
    answer = post(server, path, body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == param


def stopped(server: Any) -> float:
    """Requests whose client has left."""
    total = 0.0
    for line in httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines():
        if line.startswith("octavo:requests_aborted_total") and "client_gone" in line:
            total += float(line.split()[-1])
    return total


def running(server: Any) -> float:
    """Sequences that hold blocks."""
    for line in httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines():
        if line.startswith("vllm:num_requests_running"):
            return float(line.split()[-1])
    raise AssertionError("no such metric")


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_ends_the_request(server: Any, model: str, stream: bool) -> None:
    """A client that closes its connection while long samples run."""
    asked = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "n": 32, "stream": stream}
    before = stopped(server)
    with httpx.Client(base_url=server.url) as client:
        request = client.build_request("POST", "/v1/completions", json=asked, timeout=60)
        if stream:
            answer = client.send(request, stream=True)
            next(answer.iter_raw())
            answer.close()
        else:
            with socket.create_connection((client.base_url.host, client.base_url.port)) as sock:
                content = request.read()
                head = "\r\n".join(f"{name}: {value}" for name, value in request.headers.items())
                sock.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode() + content)
                server.until(lambda: running(server) > 0)
    server.until(lambda: stopped(server) == before + 1)
    server.until(lambda: running(server) == 0)


def test_the_client_raises_its_own_errors(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=model, prompt="a", temperature=-1)


def test_the_description_fits_what_is_taken(server: Any, model: str) -> None:
    described = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    fields = described["components"]["schemas"]["CompletionRequest"]
    assert fields["additionalProperties"] is False and fields["required"] == ["prompt"]
    number = fields["properties"]["temperature"]["anyOf"][0]
    assert number == {"type": "number", "minimum": 0.0}
    for path in ("/v1/completions", "/v1/chat/completions"):
        answers = described["paths"][path]["post"]["responses"]
        assert {"200", "400", "401", "404", "413", "429", "503"} <= set(answers)
        assert "text/event-stream" in answers["200"]["content"]


def test_lenient_labels_and_a_client_that_does_not_read(launch: Any) -> None:
    server = launch("--compat", "lenient", "--log-requests", "--slow-reader-timeout-s", "0.3")
    asked = {"prompt": "a", "max_tokens": 1, "temprature": 2, "user": "somebody"}
    answer = post(server, "/v1/completions", asked)
    assert answer.status_code == 200
    assert answer.headers["x-octavo-ignored"] == "temprature"
    server.until(lambda: "user=somebody" in server.log())
    asked = {
        "prompt": "a", "max_tokens": 240, "ignore_eos": True, "n": 48, "stream": True,
        "logprobs": 50,
    }  # fmt: skip
    body = json.dumps(asked).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        server.until(lambda: "a client read nothing for 0.3 s" in server.log())
        server.until(lambda: running(server) == 0)
        client.settimeout(20)
        end = b""
        while part := client.recv(1 << 20):
            end = (end + part)[-16:]
        assert not end.endswith(b"\r\n0\r\n\r\n")  # no regular end
