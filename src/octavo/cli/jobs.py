"""What `generate` is asked: prompts from arguments, files and stdin, as jobs for the engine."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo.cli.flags import AtMost
from octavo.errors import InvalidRequestError, OctavoError
from octavo.outputs import RequestOutput
from octavo.request import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.engine.driver import RequestStream

InputFormat = Literal["auto", "text", "lines", "jsonl"]
Prompt = str | list[int]
Messages = list[dict[str, Any]]
Params = SamplingParams | BeamSearchParams
MakeParams = Callable[..., Params]
"""Parameters from the flags, with some changed by keyword."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True)
class Job:
    """One request to make."""

    index: int
    """Place in the input, from 0."""
    params: Params
    prompt: Prompt | None = None
    """Text or token ids to continue; None where there are messages."""
    messages: Messages | None = None
    """A conversation to answer through the chat template."""
    label: str | int | None = None
    """The `id` of its JSONL line."""
    priority: int = 0
    """The `priority` of its JSONL line: smaller runs first under --scheduling-policy priority."""
    cache_salt: str = ""
    """The `cache_salt` of its JSONL line."""
    verbatim: bool = False
    """Whether the prompt is continued as it stands even where there is a chat template."""

    @property
    def title(self) -> str:
        """The prompt in a few words."""
        asked = self.messages[-1].get("content") if self.messages else self.prompt
        text = " ".join(str(asked).split())
        return text if len(text) <= 60 else text[:59] + "…"


def read_stdin() -> str | None:
    """All of stdin when something is piped into it, else None."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"stdin is not UTF-8 text: {error}") from None


def read_file(path: Path) -> str:
    """A text file. Raises `InvalidRequestError` for one that cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidRequestError(
            f"cannot read --file {path}: {error.strerror}", parameter="file"
        ) from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"--file {path} is not UTF-8 text: {error}", parameter="file"
        ) from None


def prompts_in(text: str, kind: Literal["text", "lines"]) -> list[str]:
    """The prompts in a text: all of it, or one a line; blank ones are left out."""
    parts = _lines(text) if kind == "lines" else [text.rstrip("\r\n")]
    return [part for part in parts if part.strip()]


def jsonl_jobs(text: str, source: str, make_params: MakeParams, first: int = 0) -> list[Job]:
    """Jobs from JSONL: `{"prompt"|"prompt_token_ids"|"messages": ..., "id": ..., "priority":
    ..., "cache_salt": ..., and parameters}` a line, which override the flags.

    Raises `InvalidRequestError` that names the line for anything that is not that.
    """
    jobs: list[Job] = []
    for number, line in enumerate(_lines(text), 1):
        if not line.strip():
            continue
        try:
            jobs.append(_jsonl_job(line, first + len(jobs), make_params))
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"{source}, line {number}: {error}", parameter=error.parameter
            ) from None
    return jobs


def _lines(text: str) -> list[str]:
    """Lines as files have them: `str.splitlines` also breaks at characters that JSON strings may
    hold, such as U+2028."""
    return text.replace("\r\n", "\n").split("\n")


def _jsonl_job(line: str, index: int, make_params: MakeParams) -> Job:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise InvalidRequestError(f"must be an object with one of {', '.join(_PROMPT_KEYS)}")
    given = [key for key in _PROMPT_KEYS if key in values]
    if len(given) != 1:
        raise InvalidRequestError(
            f"needs exactly one of {', '.join(_PROMPT_KEYS)}; it has "
            f"{' and '.join(given) or 'none of them'}"
        )
    asked = values.pop(given[0])
    label = values.pop("id", None)
    rest = {"priority": values.pop("priority", 0), "cache_salt": values.pop("cache_salt", "")}
    if not isinstance(rest["cache_salt"], str):
        raise InvalidRequestError(
            f"cache_salt must be a string, got {json.dumps(rest['cache_salt']):.60}",
            parameter="cache_salt",
        )
    biases = values.get("logit_bias")
    if isinstance(biases, dict):
        values["logit_bias"] = {_token_id(key): bias for key, bias in biases.items()}
    params = make_params(**values)
    if given[0] == "messages":
        messages = _checked_messages(asked)
        return Job(index, params, messages=messages, label=label, **rest)
    prompt = _checked_prompt(given[0], asked)
    return Job(index, params, prompt=prompt, label=label, verbatim=True, **rest)


def _token_id(key: str) -> int | str:
    """JSON has only text as keys; what is no number is left for `SamplingParams` to refuse."""
    return int(key) if key.isdecimal() else key


def _checked_prompt(key: str, value: Any) -> Prompt:
    if key == "prompt" and isinstance(value, str):
        return value
    if key == "prompt_token_ids" and isinstance(value, list):
        return value
    kind = "a string" if key == "prompt" else "a list of token ids"
    raise InvalidRequestError(f"{key} must be {kind}, got {value!r:.60}", parameter=key)


def _checked_messages(value: Any) -> Messages:
    is_list = isinstance(value, list) and bool(value)
    if not is_list or not all(isinstance(m, dict) and "role" in m for m in value):
        raise InvalidRequestError(
            'messages must be a list of {"role": ..., "content": ...}', parameter="messages"
        )
    return list(value)


def run_jobs(llm: LLM, jobs: Iterable[Job]) -> Iterator[tuple[Job, RequestOutput | OctavoError]]:
    """Run jobs side by side; yields the state of each as it grows, and each one's end.

    As many are in the engine as it runs at once, so that memory does not grow with the input. A
    job that the engine refuses ends with the error; the others go on.
    """
    waiting = iter(jobs)
    running: deque[tuple[Job, Iterator[RequestOutput]]] = deque()
    more = True
    while more or running:
        while more and len(running) < llm.config.limits().max_num_seqs:
            job = next(waiting, None)
            more = job is not None
            if job is None:
                break
            try:
                running.append((job, start(llm, job)))
            except OctavoError as error:
                yield job, error
        for _ in range(len(running)):
            job, stream = running.popleft()
            try:
                output = next(stream)
            except OctavoError as error:
                yield job, error
                continue
            if not output.finished:
                running.append((job, stream))
            yield job, output


def start(llm: LLM, job: Job) -> RequestStream:
    """The job's stream; a default `max_tokens` gives way to what context and pool have room for.

    That is settled before the engine is asked: a first try would be an event, and use up an id and
    a seed.
    """
    from octavo.engine.arguments import salted
    from octavo.engine.input import is_ranked

    params = job.params
    if isinstance(params.max_tokens, AtMost):
        params = _with_room(llm, job, params)
    how: dict[str, Any] = {"priority": job.priority, "final_only": is_ranked(params)}
    if job.messages is not None:
        return llm.stream_chat(job.messages, params, cache_salt=job.cache_salt, **how)
    assert job.prompt is not None
    return llm.stream(salted(job.prompt, job.cache_salt), params, **how)


def _with_room(llm: LLM, job: Job, params: Params) -> Params:
    """The parameters, with less `max_tokens` where there is less room; as they are where there is
    none at all: that the engine refuses."""
    num_prompt = _num_prompt_tokens(llm, job)
    config = llm.config
    assert config.max_model_len is not None, "resolved with the model"
    assert config.num_gpu_blocks_override is not None, "resolved with the machine"
    assert params.max_tokens is not None
    size, num_blocks = config.block_size, config.num_gpu_blocks_override
    room = min(config.max_model_len, num_blocks * size) - num_prompt
    if isinstance(params, BeamSearchParams):
        # as admission counts: beams share the full blocks of the prompt for certain, and no more
        num_shared = num_prompt // size
        num_own = (num_blocks - num_shared) // params.beam_width
        room = min(room, (num_shared + num_own) * size - num_prompt)
    if not 0 < room < params.max_tokens:
        return params
    if isinstance(params, BeamSearchParams):
        return dataclasses.replace(params, max_tokens=room)
    return dataclasses.replace(
        params, max_tokens=None
    )  # no limit of its own, so no min_tokens > it


def _num_prompt_tokens(llm: LLM, job: Job) -> int:
    if job.messages is not None:
        return len(llm._chat_prompt(job.messages, None, True, ""))  # no public way tells it
    tokenizer = llm.get_tokenizer()
    if isinstance(job.prompt, str) and tokenizer is not None:
        return len(tokenizer.encode(job.prompt))
    return len(job.prompt or "")
