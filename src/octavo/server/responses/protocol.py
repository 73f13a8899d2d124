"""What clients send to /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from octavo.server.openai.protocol import Label, Labels, NoTools, RequestBody, ResponseFormat
from octavo.server.openai.protocol import Text as NotEmpty

_INT64 = 2**63 - 1
LOGPROBS = "message.output_text.logprobs"
_TEXT = {"type": "string"}


def _part(kind: str, **more: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"type": {"enum": [kind]}, "text": _TEXT, **more},
        "required": ["type", "text"],
        "additionalProperties": False,
    }


_NOTHING = {"type": "array", "maxItems": 0}
_PARTS = [
    _part("input_text"),
    _part("output_text", annotations=_NOTHING, logprobs={"type": "array"}),
]
_CONTENT = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": {"anyOf": _PARTS}}]}
_ITEM = {
    "type": "object",
    "properties": {
        "type": {"enum": ["message"]},
        "role": {"enum": ["user", "assistant", "system", "developer"]},
        "content": _CONTENT,
        "id": _TEXT,
        "status": {"enum": ["completed", "incomplete", "in_progress"]},
    },
    "required": ["role", "content"],
    "additionalProperties": False,
}
_INPUT = {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": _ITEM}]}


class StreamOptions(RequestBody):
    """What a stream tells besides the text."""

    include_obfuscation: Literal[False] | None = Field(
        None, description="Padding against eavesdroppers; there is none."
    )


class TextOptions(RequestBody):
    """How the text is to be."""

    format: ResponseFormat | None = Field(None, description="Free text only.")


class ResponsesRequest(RequestBody):
    """The body of /v1/responses."""

    model: str | None = Field(None, description="The served model's name; any other is a 404.")
    input: Annotated[Any, WithJsonSchema(_INPUT)] = Field(
        description="Text, or a list of messages whose content is text or a list of input_text "
        "and output_text parts."
    )
    instructions: Label | None = Field(None, description="A system message before the input.")
    max_output_tokens: int | None = Field(
        None, ge=1, le=_INT64, description="Most tokens to generate; else what fits."
    )
    temperature: float | None = Field(None, ge=0, description="1; 0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling; 1 is all.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description=f"Most probable tokens; needs include: ['{LOGPROBS}']."
    )
    include: (
        Annotated[list[Literal["message.output_text.logprobs"]], Field(fail_fast=True)] | None
    ) = Field(None, description="The logprob of every token.")
    stream: bool | None = Field(None, description="Answer by server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Needs stream.")
    metadata: Labels | None = Field(
        None, description="Repeated in the answer and noted in the server's request log."
    )
    user: Label | None = Field(
        None, description="Noted in the server's request log (--log-requests); decides nothing."
    )
    safety_identifier: Label | None = Field(None, description="As user.")
    store: Literal[False] | None = Field(None, description="Nothing is stored.")
    background: Literal[False] | None = Field(None, description="Answers are waited for.")
    text: TextOptions | None = Field(None, description="Free text only.")
    truncation: Literal["disabled"] | None = Field(
        None, description="What does not fit is refused."
    )
    tools: NoTools | None = Field(None, description="There are none.")
    tool_choice: Literal["none", "auto"] | None = Field(None, description="As there are no tools.")
    parallel_tool_calls: bool | None = Field(None, description="As there are no tools.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="There is one.")
    top_k: int | None = Field(
        None, ge=-1, le=_INT64, description="The most probable tokens only; 0 and -1 are all."
    )
    seed: int | None = Field(None, ge=-(2**63), le=_INT64, description="Fixes the random stream.")
    ignore_eos: bool | None = Field(None, description="Go on after end-of-sequence.")
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Smaller runs earlier; needs such a policy."
    )
    cache_salt: NotEmpty | None = Field(None, description="Share prefixes only with equal salts.")
    return_kv_usage: bool | None = Field(
        None, description="What the request cost the KV pool, as usage.kv."
    )
