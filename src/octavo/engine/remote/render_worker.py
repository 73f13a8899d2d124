"""A process that renders chat templates of strangers: they may take little time and memory there.

    python -m octavo.engine.remote.render_worker

Jinja's sandbox keeps a template from everything but its arguments, not from using up a machine: a
line of it loops for hours, or writes more than there is memory for. So it is compiled and rendered
here, and whatever goes wrong ends this process alone. Reads a `Job` as JSON behind its length from
stdin and writes a `Rendered` to stdout, until stdin ends.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from functools import lru_cache
from typing import Any, BinaryIO, TypedDict

from octavo.errors import InvalidRequestError
from octavo.text.chat import ChatTemplate

HEAD = struct.Struct("!Q")
"""Of a message: its length."""
MAX_MEMORY_BYTES = 512 * 2**20
"""Address space of the process."""
_MAX_TOLD = 4096
"""Characters of an error: a template may raise one of any length."""


class Job(TypedDict):
    """What to render."""

    source: str
    special_tokens: dict[str, str]
    max_chars: int
    """Longest text that it may write."""
    max_cpu_s: float
    """Processor time that it may take."""
    messages: list[dict[str, Any]]
    options: dict[str, Any]
    """More arguments of `ChatTemplate.render`."""


class Rendered(TypedDict):
    """The text, or what is wrong, with the field that it is about."""

    text: str
    error: str | None
    parameter: str | None


def main() -> int:
    """Serve until stdin ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    into, out = sys.stdin.buffer, sys.stdout.buffer
    while (data := _read(into)) is not None:
        job: Job = json.loads(data)
        signal.setitimer(signal.ITIMER_PROF, job["max_cpu_s"])  # whose signal ends the process
        answer = json.dumps(_answer(job)).encode()
        signal.setitimer(signal.ITIMER_PROF, 0)
        out.write(HEAD.pack(len(answer)) + answer)
        out.flush()
    return 0


def _read(stream: BinaryIO) -> bytes | None:
    head = stream.read(HEAD.size)
    if len(head) < HEAD.size:
        return None
    (size,) = HEAD.unpack(head)
    return stream.read(size)


def _answer(job: Job) -> Rendered:
    try:
        text = _rendered(job)
    except InvalidRequestError as error:
        if isinstance(error.__cause__, MemoryError):
            return _no_memory()
        return Rendered(text="", error=str(error)[:_MAX_TOLD], parameter=error.parameter)
    except MemoryError:
        return _no_memory()
    except Exception as error:  # of the parser's, for one: it was not written for enemies
        return _refusal(f"cannot be compiled: {type(error).__name__}")
    if len(text) > job["max_chars"]:
        return _refusal(f"writes {len(text):,} characters > {job['max_chars']:,}")
    return Rendered(text=text, error=None, parameter=None)


def _rendered(job: Job) -> str:
    template = _template(job["source"], tuple(job["special_tokens"].items()))
    if job["options"].get("tools") and not template.knows_tools:
        raise InvalidRequestError(
            "the chat template knows no tools: leave them out, or describe them in a message",
            parameter="tools",
        )
    return template.render(job["messages"], **job["options"])


@lru_cache(maxsize=8)
def _template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, dict(special_tokens))


def _no_memory() -> Rendered:
    _template.cache_clear()  # which others may have filled with large constants
    return _refusal("needs too much memory")


def _refusal(reason: str) -> Rendered:
    return Rendered(text="", error=f"the chat template {reason}", parameter="chat_template")


if __name__ == "__main__":
    sys.exit(main())
