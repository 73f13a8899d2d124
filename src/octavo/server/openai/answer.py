"""What the OpenAI endpoints share around the engine's outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request, Response

from octavo.engine.remote.streams import OutputStream
from octavo.errors import InvalidRequestError
from octavo.outputs import RequestOutput
from octavo.server.calls import LABELS
from octavo.server.errors import NotFoundError
from octavo.server.openai.chunks import Shown
from octavo.server.openai.collect import CLIENT_GONE, collect
from octavo.server.openai.protocol import GenerationFields
from octavo.server.sse import EventSource, EventStreamResponse
from octavo.server.state import ServerState, state_of

if TYPE_CHECKING:
    from octavo.server.calls import Call


_MAX_LABEL = 512
"""Characters."""


class ModelNotServedError(NotFoundError):
    """No model goes by that name here."""

    code = "model_not_found"


def check_model(state: ServerState, name: str | None) -> str:
    """The name to answer with. Raises `ModelNotServedError` for a model that is not here."""
    names = state.model_names
    if name is None:
        return names[0]
    if name not in names:
        raise ModelNotServedError(
            f"the model {name!r:.200} is not served here; served: {', '.join(names)}",
            parameter="model",
        )
    return name


def note(request: Request, **labels: object) -> None:
    """Put what a client says of its request into the request log, at most so much of it."""
    found = {name: str(value)[:_MAX_LABEL] for name, value in labels.items() if value is not None}
    if found:
        request.scope[LABELS] = found


def fingerprint(state: ServerState) -> str:
    """Changes with what could change the tokens of a seed: version and model type."""
    import octavo

    config = state.engine.info.config
    return f"octavo-{octavo.__version__}-{config.dtype}"


def shown_of(body: GenerationFields, num_logprobs: int | None) -> Shown:
    """What a stream shows."""
    options = body.stream_options
    return Shown(
        num_logprobs=num_logprobs,
        token_ids=body.return_token_ids is True,
        usage=options is not None and options.include_usage is True,
        running_usage=options is not None and options.continuous_usage_stats is True,
    )


def stream_response(
    request: Request,
    call: Call,
    streams: Sequence[OutputStream],
    source: EventSource,
    headers: Mapping[str, str],
) -> Response:
    """The streams as events; the call ends with them."""
    config = state_of(request).config
    return EventStreamResponse(
        streams,
        source,
        close=call.close,
        slow_reader_timeout_s=config.slow_reader_timeout_s,
        headers=headers,
    )


async def whole_response(
    request: Request,
    call: Call,
    streams: Sequence[OutputStream],
    shape: Callable[[list[RequestOutput]], Any],
    headers: Mapping[str, str],
) -> Response:
    """All of it as JSON, once it is there: `shape` makes it of the last outputs. The call ends with
    it, or with the client's leaving."""
    try:
        outputs = await collect(request.receive, streams)
    finally:
        call.close()
    if outputs is None:
        return Response(status_code=CLIENT_GONE)
    content = msgspec.json.encode(shape(outputs))
    return Response(content, media_type="application/json", headers=headers)


@contextlib.contextmanager
def naming(parameter: str, **others: str) -> Iterator[None]:
    """Errors point at the client's field instead of the engine's.

    parameter: the prompt's field. others: the client's names of other fields.
    """
    names = {"prompt_token_ids": parameter, **others}
    try:
        yield
    except InvalidRequestError as error:
        if error.parameter is not None:
            error.parameter = names.get(error.parameter, error.parameter)
        raise
