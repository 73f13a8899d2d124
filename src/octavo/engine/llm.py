"""`LLM`: the engine for programs that wait for their answers."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.config import EngineConfig
from octavo.engine.input import Prompt
from octavo.engine.output import OutputKind
from octavo.errors import EngineDeadError, InvalidRequestError, StepFailedError
from octavo.outputs import RequestOutput
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from types import TracebackType

    from octavo.arch import ModelArch
    from octavo.engine.build import BuiltEngine
    from octavo.engine.report import MemoryReport
    from octavo.text.tokenizer import Tokenizer
    from octavo.weights.progress import Progress

T = TypeVar("T")
Message = dict[str, Any]
"""`{"role": ..., "content": ...}`, as OpenAI's chat API has it."""


class LLM:
    """A model served from paged memory in this process.

    Args: `model`, and any field of `EngineConfig` as keyword; or one `config`. `progress` is told
    of downloading and loading (`weights.progress`); by default nobody is.
    Use it as a context manager, or call `close()`: both free weights and KV pool.

    Raises `ConfigError`, `ModelError` or `CapacityError` when the engine cannot be built.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        from octavo.engine.build import build_engine

        if model is not None:
            options["model"] = model
        if config is None:
            config = EngineConfig.from_kwargs(**options)
        elif options:
            config = config.replace(**options)
        self._ids = itertools.count()
        self._mail: dict[str, deque[RequestOutput]] = {}
        self._built: BuiltEngine | None = build_engine(config, progress)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _engine(self) -> BuiltEngine:
        if self._built is None:
            raise EngineDeadError("this LLM is closed; make a new one")
        return self._built

    @property
    def config(self) -> EngineConfig:
        """The configuration with every default filled in for this model and machine."""
        return self._engine.config

    @property
    def arch(self) -> ModelArch:
        """The model's shape."""
        return self._engine.arch

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None under `skip_tokenizer_init`."""
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the prompts' order.

        prompts: one or a list of: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}.
        sampling_params: one for all, or one for each; defaults to `SamplingParams()`.
        priority: one number a prompt, smaller first, under `scheduling_policy="priority"`.

        Raises before anything runs if any prompt is refused.
        """
        prompt_list = _as_list(prompts)
        params_list = _one_each(sampling_params, len(prompt_list))
        ranks = 0 if priority is None else priority
        priorities = _one_of_each("priority", ranks, int, len(prompt_list))
        request_ids: list[str] = []
        try:
            for prompt, params, rank in zip(prompt_list, params_list, priorities, strict=True):
                request_ids.append(self._add(prompt, params, OutputKind.FINAL_ONLY, rank))
            return self._run_to_end(request_ids, use_tqdm)
        finally:
            self._forget(request_ids)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them through the model's chat template."""
        prompts = [
            self._chat_prompt(conversation, chat_template, add_generation_prompt)
            for conversation in _conversations(messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding the output so far after every step that added to it.

        Streams may run side by side with each other; leaving the loop aborts the request.
        """
        params = sampling_params or SamplingParams()
        request_id = self._add(prompt, params, OutputKind.CUMULATIVE, priority)
        stream = self._stream(request_id)
        # A generator that is dropped before its first value never reaches its `finally`.
        weakref.finalize(stream, self._forget, [request_id])
        return stream

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        priority: int = 0,
    ) -> Iterator[RequestOutput]:
        """`stream` for one conversation."""
        prompt = self._chat_prompt(messages, chat_template, add_generation_prompt)
        return self.stream(prompt, sampling_params, priority=priority)

    def memory_report(self) -> MemoryReport:
        """Where every byte is: the plan that sized the pool, the pool now, and its peaks."""
        return self._engine.memory_report()

    def block_tables(self) -> dict[str, list[list[int]]]:
        """Request id -> for each of its sequences the physical blocks it holds now."""
        return self._engine.engine.core.block_tables()

    def close(self) -> None:
        """Abort what runs and free weights and KV pool. Closing twice is fine."""
        if self._built is not None:
            self._built.close()
        self._built = None
        self._mail.clear()

    def _add(
        self, prompt: Prompt, params: SamplingParams, kind: OutputKind, priority: int = 0
    ) -> str:
        if priority and self.config.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"priority {priority!r} has no effect under scheduling_policy "
                f"{self.config.scheduling_policy!r}: start with --scheduling-policy priority",
                parameter="priority",
            )
        request_id = str(next(self._ids))
        self._mail[request_id] = deque()
        try:
            self._engine.engine.add(request_id, prompt, params, priority=priority, kind=kind)
        except BaseException:
            del self._mail[request_id]
            raise
        return request_id

    def _step(self) -> None:
        """One step of everything that runs; outputs go to whoever waits for them."""
        for output in self._engine.engine.step():
            if output.request_id in self._mail:
                self._mail[output.request_id].append(output)

    def _stream(self, request_id: str) -> Iterator[RequestOutput]:
        mail = self._mail[request_id]
        try:
            while True:
                while not mail:
                    self._check_alive(request_id)
                    self._step()
                output = mail.popleft()
                yield output
                if output.finished:
                    return
        finally:
            self._forget([request_id])

    def _run_to_end(self, request_ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        ends: dict[str, RequestOutput] = {}
        with tqdm(total=len(request_ids), unit="request", disable=not use_tqdm) as bar:
            waiting = set(request_ids)
            while waiting:
                self._check_alive(next(iter(waiting)))
                self._step()
                for request_id in [r for r in waiting if self._mail[r]]:
                    ends[request_id] = self._mail[request_id].pop()
                    waiting.discard(request_id)
                    bar.update()
        return [ends[request_id] for request_id in request_ids]

    def _check_alive(self, request_id: str) -> None:
        if not self._engine.engine.has(request_id):
            raise StepFailedError(
                f"request {request_id} was aborted when the step that it shared with others failed",
                request_ids=[request_id],
            )

    def _forget(self, request_ids: list[str]) -> None:
        """Abort those that still run and stop keeping mail for them."""
        for request_id in request_ids:
            if self._mail.pop(request_id, None) is not None and self._built is not None:
                self._built.engine.abort(request_id)

    def _chat_prompt(
        self, messages: Sequence[Message], template: str | None, add_generation_prompt: bool
    ) -> Prompt:
        return self._engine.chat_prompt(
            messages, chat_template=template, add_generation_prompt=add_generation_prompt
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a string, a mapping and a list of token ids are one prompt."""
    if not isinstance(prompts, list | tuple):
        return [prompts]  # type: ignore[list-item]
    if prompts and all(isinstance(p, int) and not isinstance(p, bool) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    return _one_of_each("sampling_params", params or SamplingParams(), SamplingParams, count)


def _one_of_each(name: str, values: Any, kind: type[T], count: int) -> list[T]:
    """One value for all prompts, or one for each."""
    if isinstance(values, kind):
        return [values] * count
    if not isinstance(values, list | tuple) or not all(isinstance(v, kind) for v in values):
        raise InvalidRequestError(
            f"{name} must be one {kind.__name__}, or a list with one for each prompt, got "
            f"{values!r:.80}",
            parameter=name,
        )
    if len(values) != count:
        raise InvalidRequestError(
            f"{len(values)} {name} for {count} prompts: give one, or one for each",
            parameter=name,
        )
    return list(values)


def _conversations(messages: Any) -> list[Any]:
    """One conversation (a list of messages) or a list of them."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError(
            "messages must be a conversation or a list of them, and not empty, got "
            f"{messages!r:.80}",
            parameter="messages",
        )
    return [messages] if isinstance(messages[0], dict) else list(messages)
