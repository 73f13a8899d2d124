"""Fields, parameters and logprobs of the OpenAI endpoints, without a server."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from octavo.errors import InvalidRequestError
from octavo.outputs import Logprob
from octavo.request import BeamSearchParams, SamplingParams
from octavo.server.anthropic.protocol import CountTokensRequest
from octavo.server.errors import ClientGoneError
from octavo.server.openai.collect import while_there
from octavo.server.openai.extras import IGNORED_HEADER, ignored_fields
from octavo.server.openai.logprobs import (
    CompletionLogprobs,
    TokenWriter,
    bytes_of,
    chat_logprobs,
    prompt_logprobs,
)
from octavo.server.openai.params import max_tokens_of, params_of
from octavo.server.openai.prompts import chat_ids
from octavo.server.openai.protocol import ChatRequest, CompletionRequest
from octavo.server.responses.protocol import ResponsesRequest

HI = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "a", **fields})


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": HI, **fields})


def test_every_decoding_field_reaches_the_sampling_params() -> None:
    given: dict[str, Any] = {
        "n": 2, "best_of": 3, "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125,
        "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5, "seed": 11,
        "stop": ["x", "yz"], "stop_token_ids": [5], "include_stop_str_in_output": True,
        "ignore_eos": True, "min_tokens": 2, "allowed_token_ids": [5, 6], "bad_words": ["bad"],
        "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "prompt_logprobs": 4, "logprobs": 3,
    }  # fmt: skip
    body = completion(**given, logit_bias={"5": 1.5}, max_tokens=9)
    params = params_of(body, max_tokens=max_tokens_of(body))
    assert params == SamplingParams(**given, logit_bias={5: 1.5}, max_tokens=9)


def test_defaults_are_those_of_openai_and_vllm() -> None:
    assert params_of(completion(), max_tokens=max_tokens_of(completion())) == SamplingParams()
    body = chat()
    assert params_of(body, max_tokens=max_tokens_of(body)) == SamplingParams(max_tokens=None)
    assert max_tokens_of(chat(max_completion_tokens=5)) == max_tokens_of(chat(max_tokens=5)) == 5


def test_chat_logprobs_have_their_own_form() -> None:
    body = chat(logprobs=True, top_logprobs=3)
    assert params_of(body, max_tokens=1) == SamplingParams(max_tokens=1, logprobs=3)
    body = chat(logprobs=True)
    assert params_of(body, max_tokens=1) == SamplingParams(max_tokens=1, logprobs=0)


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    params = params_of(completion(echo=True, logprobs=2), max_tokens=1)
    assert params == SamplingParams(max_tokens=1, logprobs=2, prompt_logprobs=2)


def test_beam_search() -> None:
    body = completion(
        use_beam_search=True, n=2, best_of=4, length_penalty=0.5, early_stopping="never",
        ignore_eos=True, top_p=1, max_tokens=8,
    )  # fmt: skip
    assert params_of(body, max_tokens=8) == BeamSearchParams(
        beam_width=4, max_tokens=8, length_penalty=0.5, early_stopping="never", ignore_eos=True
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"use_beam_search": True, "top_p": 0.5}, "top_p"),
        ({"use_beam_search": True, "seed": 1}, "seed"),
        ({"use_beam_search": True, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "logprobs": 1}, "logprobs"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "stream": True}, "use_beam_search"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"n": 2, "best_of": 1}, "best_of"),
    ],
)
def test_what_would_have_no_effect_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        params_of(completion(**fields), max_tokens=4)
    assert refused.value.parameter == named


def test_contradicting_limits_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="contradicts"):
        max_tokens_of(chat(max_tokens=1, max_completion_tokens=2))
    with pytest.raises(InvalidRequestError, match="at least 1"):
        max_tokens_of(completion(max_tokens=0))
    assert max_tokens_of(completion(max_tokens=0, echo=True)) == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1}, {"top_p": 0}, {"n": 0}, {"n": "2"}, {"logprobs": True},
        {"logprobs": 51}, {"stop": ""}, {"logit_bias": {"x": 1}}, {"logit_bias": {"1": 101}},
        {"prompt": []}, {"prompt": [[]]}, {"prompt": [1, "a"]}, {"stream": 1}, {"seed": 2**63},
        {"allowed_token_ids": []},
    ],
)  # fmt: skip
def test_values_out_of_range_do_not_parse(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        completion(**fields)


def test_unknown_fields_are_named_with_the_nearest_known_one() -> None:
    body = completion(temprature=1, stream_options={"includ_usage": True}, suffix="x")
    with pytest.raises(InvalidRequestError) as refused:
        ignored_fields(body, is_lenient=False)
    text = str(refused.value)
    assert "'temprature', did you mean temperature?" in text
    assert "'stream_options.includ_usage', did you mean include_usage?" in text
    assert "suffix: inserting is not supported" in text
    assert refused.value.parameter == "temprature"
    ignored = ignored_fields(body, is_lenient=True)
    assert ignored == {IGNORED_HEADER: "temprature, suffix, stream_options.includ_usage"}


def test_null_for_what_is_not_supported_asks_for_nothing() -> None:
    assert (
        ignored_fields(chat(tools=None, tool_choice="none", functions=[]), is_lenient=False) == {}
    )
    with pytest.raises(InvalidRequestError, match="use tools and tool_choice") as refused:
        ignored_fields(chat(functions=[{"name": "f"}]), is_lenient=False)
    assert refused.value.parameter == "functions"
    with pytest.raises(InvalidRequestError, match="nonsense"):
        ignored_fields(chat(nonsense=None), is_lenient=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True}, {"response_format": {"type": "json_object"}}, {"modalities": ["audio"]},
        {"service_tier": "flex"}, {"messages": []}, {"messages": [{"content": "x"}]},
        {"max_completion_tokens": 0},
    ],
)  # fmt: skip
def test_chat_values_that_ask_for_what_is_not_there(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        chat(**fields)


class Encoder:
    """Puts 1 before a text and 2 behind it."""

    info: ClassVar = SimpleNamespace(max_model_len=8)
    tokenizer: ClassVar = SimpleNamespace(chat_template=None, chat_templates={})

    async def encode(self, text: str, add_special_tokens: bool, **_: Any) -> list[int]:
        ids = [ord(c) for c in text]
        return [1, *ids, 2] if add_special_tokens else ids

    async def chat_prompt(self, messages: Any, **variables: Any) -> list[int]:
        assert messages == HI and variables.pop("enable_thinking", None) in (None, True)
        assert variables == {
            "chat_template": "own", "add_generation_prompt": True, "continue_final_message": False,
            "max_tokens": 8,
        }  # fmt: skip
        return [7, 8]


async def stays() -> Any:
    await asyncio.Future()


async def leaves() -> Any:
    await asyncio.sleep(0.01)
    return {"type": "http.disconnect"}


def test_work_is_cancelled_when_its_client_leaves() -> None:
    ended = []

    async def work(seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            ended.append(seconds)
            raise
        return "done"

    async def fails() -> str:
        raise InvalidRequestError("no")

    async def main() -> None:
        assert await while_there(stays, work(0.001)) == "done"
        with pytest.raises(InvalidRequestError):
            await while_there(stays, fails())
        with pytest.raises(ClientGoneError):
            await while_there(leaves, work(60))
        asked = asyncio.create_task(while_there(stays, work(61)))
        await asyncio.sleep(0.001)
        asked.cancel()
        await asyncio.wait([asked])
        await asyncio.sleep(0)
        assert asked.cancelled() and len(asyncio.all_tasks()) == 1

    asyncio.run(main())
    assert ended == [60, 61]


class State:
    engine, renderer = Encoder(), None

    def __init__(self, chat_template: str | None = "own") -> None:
        self.chat_template = chat_template


def test_special_tokens_go_around_what_the_template_wrote() -> None:
    def ids(**fields: Any) -> list[int]:
        body = chat(**fields)
        state: Any = State()
        return asyncio.run(chat_ids(state, body, body.messages, receive=stays))

    assert ids() == [7, 8]
    assert ids(add_special_tokens=True) == [1, 7, 8, 2]
    assert ids(chat_template_kwargs={"enable_thinking": True}) == [7, 8]
    with pytest.raises(InvalidRequestError, match="field of its own"):
        ids(chat_template_kwargs={"messages": []})
    with pytest.raises(InvalidRequestError, match="templates"):
        ids(chat_template="{{ 1 }}")


def test_a_model_without_a_template_is_sent_plain_prompts() -> None:
    body, state = chat(), State(chat_template=None)
    with pytest.raises(InvalidRequestError, match=r"/v1/completions.*--chat-template"):
        asyncio.run(chat_ids(state, body, body.messages, receive=stays))  # type: ignore[arg-type]


class Vocabulary:
    spelled: ClassVar = {1: "Ġa", 2: "â", 3: "<0xE2>", 4: "ĉ"}

    def id_to_token(self, token_id: int) -> str | None:
        return self.spelled.get(token_id)


def test_bytes_of_tokens_that_are_parts_of_characters() -> None:
    assert bytes_of("Ġa") == b" a"
    assert bytes_of("â") == b"\xe2"
    assert bytes_of("<0xE2>") == b"\xe2"
    assert bytes_of("ĉ") == b"\t"
    assert bytes_of("…") is None
    writer = TokenWriter(Vocabulary())
    assert writer.bytes(2, Logprob(-1.0, 1, "\ufffd")) == [0xE2]
    assert writer.bytes(3, Logprob(-1.0, 1, "\ufffd")) == [0xE2]
    assert writer.bytes(1, Logprob(-1.0, 1, " a")) == [32, 97]
    assert writer.bytes(9, Logprob(-1.0, 1, None)) is None


def test_completion_logprobs_are_parallel_lists() -> None:
    first = {7: Logprob(-2.0, 3, "ab"), 8: Logprob(-0.5, 1, "c"), 9: Logprob(-1.0, 2, "d")}
    lists = CompletionLogprobs(TokenWriter(None), 1, lambda _: "<s>")
    assert lists.shape([1, 7], [None, first]) == {
        "tokens": ["<s>", "ab"],
        "token_logprobs": [None, -2.0],
        "top_logprobs": [None, {"ab": -2.0, "c": -0.5}],
        "text_offset": [0, 3],
    }
    later = lists.shape([8], [{8: Logprob(float("-inf"), 1, "c")}])
    assert later["text_offset"] == [5] and later["token_logprobs"] == [-9999.0]
    by_id = CompletionLogprobs(TokenWriter(None, as_ids=True), 0).shape([7], [first])
    assert by_id["tokens"] == ["token_id:7"] and by_id["top_logprobs"] == [{"token_id:7": -2.0}]


def test_chat_logprobs_rank_the_most_probable_ones() -> None:
    position = {7: Logprob(-2.0, 3, "ab"), 8: Logprob(-0.5, 1, "c"), 9: Logprob(-1.0, 2, "d")}
    shape = chat_logprobs(TokenWriter(None), 2, [7], [position])
    (entry,) = shape["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("ab", -2.0, [97, 98])
    assert [top["token"] for top in entry["top_logprobs"]] == ["c", "d"]


def test_prompt_logprobs_are_by_token_id() -> None:
    second = {7: Logprob(-2.0, 3, "ab"), 8: Logprob(-0.5, 1, "c"), 9: Logprob(-1.0, 2, "d")}
    own = {"logprob": -2.0, "rank": 3, "decoded_token": "ab"}
    best = {"logprob": -0.5, "rank": 1, "decoded_token": "c"}
    assert prompt_logprobs(1, [5, 7], [None, second]) == [None, {"7": own, "8": best}]
    assert prompt_logprobs(0, [5, 7], [None, second]) == [None, {"7": own}]
    assert prompt_logprobs(1, [5, 7], None) is None


@pytest.mark.parametrize(
    ("kind", "content"),
    [(ResponsesRequest, {"input": "x"}), (CountTokensRequest, {"messages": []})],
)
def test_tools_of_other_apis_are_refused_with_the_way_out(kind: Any, content: Any) -> None:
    assert kind(**content, tools=[]).tools == []
    with pytest.raises(ValidationError, match="tools are for /v1/chat/completions"):
        kind(**content, tools=[{"type": "function", "name": "f"}])
