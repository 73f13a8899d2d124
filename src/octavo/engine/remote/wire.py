"""What crosses the border between the two processes: plain data, as msgpack."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.outputs import RequestKVUsage, RequestMetrics
from octavo.request import Request
from octavo.sched import SeqUpdate
from octavo.stats import EngineStats


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A tagged array: small, and quick to read."""


# -- to the engine's process


class Start(_Message, frozen=True):
    """Build the engine; the first message."""

    config: dict[str, Any]
    """Fields of an `EngineConfig`."""
    build: str
    """`module:function` that makes a `BuiltEngine` of a configuration and a progress."""


class Add(_Message, frozen=True):
    """A request has come."""

    request: Request


class Abort(_Message, frozen=True):
    """Requests that nobody waits for any more. Answered by `News.aborted`."""

    request_ids: list[str]
    is_leak: bool = False
    """The parent does not know them although the engine does: an earlier message must have been
    lost."""


class Finish(_Message, frozen=True):
    """A stop string was found in the text of a sequence."""

    request_id: str
    seq_id: int
    stop_reason: str


class Call(_Message, frozen=True):
    """Something to do or to ask, besides requests."""

    call_id: int
    name: str
    args: list[Any]


class Watch(_Message, frozen=True):
    """How many frames a second are wanted; 0: none. The next one is a full one."""

    hz: float


class Stop(_Message, frozen=True):
    """End the engine and the process."""


ToEngine = Start | Add | Abort | Finish | Call | Watch | Stop

# -- from the engine's process


class Ready(_Message, frozen=True):
    """The engine is built."""

    about: dict[str, Any]
    """See `remote.about`."""


class Loading(_Message, frozen=True):
    """One call of a `Progress`."""

    what: str
    """start, update or finish."""
    text: str
    num_bytes: int | None


class Failed(_Message, frozen=True):
    """The engine could not be built, or has ended; the process ends."""

    kind: str
    """Name of the error's class."""
    text: str


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A request's whole record, told with its end."""

    request_id: str
    metrics: RequestMetrics
    kv: RequestKVUsage


class Hit(msgspec.Struct, frozen=True, array_like=True):
    """A step failed, and these requests were aborted."""

    request_ids: list[str]
    text: str


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """A request that was not taken."""

    request_id: str
    kind: str
    text: str
    parameter: str | None


class News(_Message, frozen=True):
    """What a step brought, or what came about between two; with `stats` also a sign of life."""

    updates: list[SeqUpdate] = []
    ended: list[Ended] = []
    hit: list[Hit] = []
    refused: list[Refused] = []
    aborted: list[str] = []
    """Requests of which nothing more will be told."""
    stats: EngineStats | None = None
    live: list[str] | None = None
    """All requests that the engine has; told now and then."""


class Answer(_Message, frozen=True):
    """What a `Call` yielded: a value, or the class and text of an error."""

    call_id: int
    value: Any = None
    kind: str | None = None
    text: str = ""
    parameter: str | None = None


class Frame(_Message, frozen=True):
    """A picture of the pool, as JSON."""

    is_full: bool
    json: bytes


FromEngine = Ready | Loading | Failed | News | Answer | Frame


def encoder() -> msgspec.msgpack.Encoder:
    """For either direction."""
    return msgspec.msgpack.Encoder()


def decoder_of_engine() -> msgspec.msgpack.Decoder[ToEngine]:
    """Reads what is sent to the engine's process."""
    return msgspec.msgpack.Decoder(ToEngine)


def decoder_of_front() -> msgspec.msgpack.Decoder[FromEngine]:
    """Reads what the engine's process sends."""
    return msgspec.msgpack.Decoder(FromEngine)
