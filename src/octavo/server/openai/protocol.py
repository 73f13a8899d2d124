"""What clients send: OpenAI's fields, and vLLM's where the thing exists.

Unknown fields are let through here and refused, or ignored, by `octavo.server.openai.extras`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WithJsonSchema,
)

from octavo.request import MAX_LOGPROBS, MAX_N

_INT64 = 2**63 - 1
MAX_LABELS = 64
MAX_TOOLS = 1024
MAX_MESSAGES = 2**16
"""Some 0.2 s of checking, while all others wait."""
MAX_PARTS = 2**14
"""Of a message."""
MAX_BIASES = 2**18
"""More than there are tokens in a vocabulary."""
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
# fail_fast, for an error of each of a million items would take gigabytes, and minutes.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
Text = Annotated[str, Field(min_length=1)]
Label = Annotated[str, Field(min_length=0)]
"""Any text but half a surrogate pair, which plain `str` lets through and no answer can hold."""
# The template refuses other parts, and says which.
_Parts = Annotated[
    list[Any],
    Field(max_length=MAX_PARTS),
    WithJsonSchema(
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "type": {"enum": ["text", "input_text", "output_text"]},
                    "text": {"type": "string"},
                },
                "required": ["type", "text"],
                "additionalProperties": False,
            },
        }
    ),
]
MAX_WORD = 1024
"""Characters: each word is looked for in every answer, or tokenized while all others wait."""
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD)]
Words = Annotated[list[Word], Field(fail_fast=True, max_length=1024)]


def _first_wrong_bias(given: object) -> object:
    """Stops at the first key that is no token id, of a million of them."""
    if isinstance(given, dict):
        if len(given) > MAX_BIASES:
            raise ValueError(f"{len(given):,} entries > {MAX_BIASES:,}")
        for key in given:
            if not (isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10):
                raise ValueError(f"the key {key!r:.40} is no token id")
            if len(key) > 1 and key[0] == "0":
                raise ValueError(f"the key {key!r:.40} begins with a 0")
    return given


LogitBias = Annotated[
    dict[
        Annotated[str, Field(pattern="^(0|[1-9][0-9]{0,9})$")],
        Annotated[float, Field(ge=-100, le=100)],
    ],
    BeforeValidator(_first_wrong_bias),
]


def _few_labels(given: object) -> object:
    if isinstance(given, dict) and len(given) > MAX_LABELS:
        raise ValueError(f"{len(given):,} entries > {MAX_LABELS}")
    return given


Labels = Annotated[dict[Label, Label], BeforeValidator(_few_labels), Field(max_length=MAX_LABELS)]


def _prompt_kind(given: object) -> str:
    """What a prompt is meant to be, so that errors are of that kind alone."""
    if not isinstance(given, list):
        return "text"
    first = given[0] if given else None
    if isinstance(first, list):
        return "prompts of ids"
    return "prompts" if isinstance(first, str) else "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1), Tag("prompts")]
    | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1), Tag("prompts of ids")],
    Discriminator(_prompt_kind),
]


class RequestBody(BaseModel):
    """A JSON object whose unknown members are kept for whoever refuses them."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        allow_inf_nan=False,
        json_schema_extra={"additionalProperties": False},
    )


class StreamOptions(RequestBody):
    """What a stream tells besides the text."""

    include_usage: bool | None = Field(None, description="End with a chunk that has the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="With include_usage: the usage so far in every chunk."
    )
    include_obfuscation: Literal[False] | None = Field(
        None, description="Padding against eavesdroppers; there is none."
    )


class GenerationFields(RequestBody):
    """What completions and chat have in common."""

    model: str | None = Field(None, description="The served model's name; any other is a 404.")
    n: int | None = Field(None, ge=1, le=MAX_N, description="Completions of a prompt; 1.")
    best_of: int | None = Field(
        None,
        ge=1,
        le=MAX_N,
        description="Generate so many and return the n best by mean logprob; not streamed. With "
        "use_beam_search: the beam width.",
    )
    stream: bool | None = Field(None, description="Answer by server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="Needs stream.")
    max_tokens: int | None = Field(None, ge=1, le=_INT64, description="Most tokens to generate.")
    temperature: float | None = Field(None, ge=0, description="1; 0 is greedy.")
    top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling; 1 is all.")
    top_k: int | None = Field(
        None, ge=-1, le=_INT64, description="The most probable tokens only; 0 and -1 are all."
    )
    min_p: float | None = Field(
        None, ge=0, le=1, description="Least probability, as a share of the most probable token's."
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=1e-6, le=1e6)
    seed: int | None = Field(None, ge=-(2**63), le=_INT64, description="Fixes the random stream.")
    stop: Word | Words | None = Field(None, description="Strings that end the text.")
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] | None = Field(
        None, description="Tokens that end the output."
    )
    include_stop_str_in_output: bool | None = Field(None, description="Keep what ended it.")
    ignore_eos: bool | None = Field(None, description="Go on after end-of-sequence.")
    min_tokens: int | None = Field(
        None, ge=0, le=_INT64, description="No end-of-sequence or stop token before so many."
    )
    logit_bias: LogitBias | None = Field(None, description="By token id: added to its logit.")
    allowed_token_ids: TokenIds | None = Field(None, description="Only these can be sampled.")
    bad_words: Words | None = Field(None, description="Words that cannot be generated.")
    skip_special_tokens: bool | None = Field(None, description="Leave them out of the text; true.")
    spaces_between_special_tokens: bool | None = Field(None, description="true.")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Top logprobs of the prompt's tokens; no stream."
    )
    use_beam_search: bool | None = Field(
        None, description="Beams (best_of, or n, of them) instead of samples; not streamed."
    )
    length_penalty: float | None = Field(
        None, ge=-1e300, le=1e300, description="Of beams: scores are divided by length to this."
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="When a beam search ends: at once, by a heuristic, or when proven."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=_INT64, description="Keep the prompt's last tokens; -1: what fits."
    )
    priority: int | None = Field(
        None, ge=-(2**31), le=2**31 - 1, description="Smaller runs earlier; needs such a policy."
    )
    cache_salt: Text | None = Field(None, description="Share prefixes only with equal salts.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="In logprobs: 'token_id:5' instead of the token's text."
    )
    return_token_ids: bool | None = Field(None, description="Token ids beside the text.")
    return_kv_usage: bool | None = Field(
        None, description="What the request cost the KV pool, as usage.kv."
    )
    user: Label | None = Field(
        None, description="Noted in the server's request log (--log-requests); decides nothing."
    )


class CompletionRequest(GenerationFields):
    """The body of /v1/completions."""

    prompt: Prompt = Field(description="Text, token ids, or a list of either.")
    max_tokens: int | None = Field(
        None, ge=0, le=_INT64, description="Most tokens to generate; 16. 0 is for echo alone."
    )
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Top logprobs a token, besides its own."
    )
    add_special_tokens: bool | None = Field(None, description="Begin-of-sequence before a text.")


class ChatMessage(BaseModel):
    """A message; the model's template may read other members too."""

    model_config = ConfigDict(extra="allow", strict=True)
    role: Text
    content: str | _Parts | None = None


Messages = Annotated[
    list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)
]


class ResponseFormat(RequestBody):
    """Only free text."""

    type: Literal["text"]


class TemplateFields(RequestBody):
    """How messages become a prompt."""

    messages: Messages = Field(description="The conversation so far.")
    add_generation_prompt: bool | None = Field(
        None, description="End with the head of an assistant's message; true."
    )
    continue_final_message: bool | None = Field(
        None, description="Go on with the last message; add_generation_prompt must be false."
    )
    chat_template: Text | None = Field(
        None, description="Jinja to use instead; needs --trust-request-chat-template."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Variables for the template."
    )
    add_special_tokens: bool | None = Field(
        None, description="Special tokens around what the template wrote; false."
    )


def _free_choice(given: object) -> object:
    if given == "required" or isinstance(given, dict):
        raise ValueError(
            "the model cannot be made to call a tool, as structured output is not supported: use "
            "'auto', and say in a message what is to be called"
        )
    return given


ToolChoice = Annotated[Literal["none", "auto"], BeforeValidator(_free_choice)]


def _no_tools(given: object) -> object:
    if isinstance(given, list) and given:
        raise ValueError("tools are for /v1/chat/completions alone: leave them out")
    return given


NoTools = Annotated[list[Any], Field(max_length=0), BeforeValidator(_no_tools)]
"""Of the other APIs."""


class ToolFunction(RequestBody):
    """What the model is told of a function."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=256)]
    description: Label | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of the arguments.")
    strict: Literal[False] | None = Field(None, description="Calls are not held to the schema.")


class Tool(RequestBody):
    """Something that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class ChatRequest(GenerationFields, TemplateFields):
    """The body of /v1/chat/completions."""

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = Field(
        None, description="Given to the model's chat template, which must know tools."
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="auto, which is the default with tools: calls are found in the answer, if the "
        "server was started with --enable-auto-tool-choice. none: the answer is text.",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: of several calls the first alone is answered with."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=_INT64, description="Most tokens to generate; else what fits."
    )
    logprobs: bool | None = Field(None, description="The logprob of every token.")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="And of the most probable ones; needs logprobs."
    )
    echo: bool | None = Field(
        None, description="Begin with the last message, if it is the assistant's."
    )
    response_format: ResponseFormat | None = Field(None, description="Free text only.")
    metadata: Labels | None = Field(
        None, description="Noted in the server's request log; decides nothing."
    )
    safety_identifier: Label | None = Field(None, description="As user.")
    store: Literal[False] | None = Field(None, description="Nothing is stored.")
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = Field(
        None, description="Text only."
    )
    service_tier: Literal["auto", "default"] | None = Field(None, description="There is one.")


class TokenizeRequest(RequestBody):
    """The body of /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = Field(None, description="Text; or else give messages.")
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None, description="true for a prompt, false for messages."
    )
    return_token_strs: bool | None = Field(None, description="The tokens' spelling as well.")
    add_generation_prompt: bool | None = Field(None, description="Of messages; true.")
    continue_final_message: bool | None = Field(None, description="Of messages; false.")
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(RequestBody):
    """The body of /detokenize."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)] = Field(description="Token ids.")
