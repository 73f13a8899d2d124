"""`LLM`: the engine for programs that wait for their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.engine.arguments import (
    as_list,
    check_client,
    check_priority,
    conversations,
    one_of_each,
    params_each,
    salted,
)
from octavo.engine.driver import Driver, RequestStream
from octavo.engine.input import Params, Prompt
from octavo.engine.output import beams_of
from octavo.errors import EngineDeadError
from octavo.outputs import BeamSearchOutput, OutputKind, RequestOutput
from octavo.request import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from types import TracebackType

    from octavo.arch import ModelArch
    from octavo.engine.built import BuiltEngine
    from octavo.engine.report import MemoryReport
    from octavo.events import EngineEvent
    from octavo.kv.pins import Pin
    from octavo.kv.stats import PrefixCacheStats
    from octavo.text.tokenizer import Tokenizer
    from octavo.weights.progress import Progress

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
        built = build_engine(config, progress)
        self._built: BuiltEngine | None = built
        self._driver = Driver(built.engine)

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

    @property
    def after_step(self) -> Callable[[], None] | None:
        """Called after every step while a method of this object runs one: for those who watch
        `block_tables`. None (the default): nobody does."""
        return self._driver.after_step

    @after_step.setter
    def after_step(self, callback: Callable[[], None] | None) -> None:
        self._driver.after_step = callback

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None under `skip_tokenizer_init`."""
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] | None = None,
        client_id: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Complete prompts; outputs come in the prompts' order.

        prompts: one or a list of: text, token ids, {"prompt": text}, {"prompt_token_ids": ids};
        a dict may hold a "cache_salt" too.
        sampling_params: one for all, or one for each; defaults to `SamplingParams()`. With
        `BeamSearchParams` the completions are the beams, best first.
        priority: one number a prompt; smaller ones are admitted first under
        `scheduling_policy="priority"`, the largest preempted first under
        `preemption_victim="priority"`.
        client_id: whose prompts they are, one for all or one each: under `scheduling_policy="fair"`
        clients take turns.

        Raises before anything runs if any prompt is refused.
        """
        prompt_list = as_list(prompts)
        params_list = params_each(sampling_params, len(prompt_list))
        return self._run(prompt_list, params_list, priority, use_tqdm, client_id)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
        use_tqdm: bool = False,
        *,
        priority: int | Sequence[int] | None = None,
        client_id: str | Sequence[str] = "",
    ) -> list[BeamSearchOutput]:
        """The best continuations of prompts; all prompts run together, each step of all their beams
        is one batch. params: one for all, or one for each.

        Raises before anything runs if any prompt is refused.
        """
        prompt_list = as_list(prompts)
        params_list = one_of_each("params", params, (BeamSearchParams,), len(prompt_list))
        outputs = self._run(prompt_list, params_list, priority, use_tqdm, client_id)
        with_text = self.get_tokenizer() is not None
        return [beams_of(output, with_text=with_text) for output in outputs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        cache_salt: str = "",
        priority: int | Sequence[int] | None = None,
        client_id: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them through the model's chat template.

        chat_template: Jinja text, or the name of one of the model's. tools: JSON descriptions of
        functions for the template to show the model; calls of them are left in the answer's text.
        sampling_params, priority, client_id: as of `generate`, for each conversation.
        """
        prompts = [
            self._chat_prompt(conversation, chat_template, add_generation_prompt, cache_salt, tools)
            for conversation in conversations(messages)
        ]
        return self.generate(
            prompts, sampling_params, use_tqdm, priority=priority, client_id=client_id
        )

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        priority: int = 0,
        client_id: str = "",
        final_only: bool = False,
    ) -> RequestStream:
        """Complete one prompt, yielding the output so far after every step that added to it.

        Streams may run side by side with each other; leaving the loop, or `close()`, aborts the
        request.
        `final_only` yields the end alone: beam search and `best_of`, of which nothing is known
        before, are refused without it.
        """
        kind = OutputKind.FINAL_ONLY if final_only else OutputKind.CUMULATIVE
        params = SamplingParams() if sampling_params is None else sampling_params
        return self._driver.stream(self._add(prompt, params, kind, priority, client_id))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: Params | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        cache_salt: str = "",
        priority: int = 0,
        client_id: str = "",
        final_only: bool = False,
    ) -> RequestStream:
        """`stream` for one conversation."""
        prompt = self._chat_prompt(messages, chat_template, add_generation_prompt, cache_salt)
        return self.stream(
            prompt, sampling_params, priority=priority, client_id=client_id, final_only=final_only
        )

    def abort_sample(self, request_id: str, index: int) -> bool:
        """End one of a streamed request's `n` samples; the others go on. False if it has ended.

        Its finish reason is "abort". A whole request is aborted by leaving its stream.
        """
        return self._engine.engine.abort(request_id, index)

    # -- memory

    def memory_report(self) -> MemoryReport:
        """Where every byte is: the plan that sized the pool, the pool now, and its peaks."""
        return self._engine.memory_report()

    def block_tables(self) -> dict[str, list[list[int]]]:
        """Request id -> for each of its sequences the physical blocks it holds now."""
        return self._engine.engine.core.block_tables()

    def events(self, request_id: str | None = None) -> list[EngineEvent]:
        """What happened under memory pressure, and why, oldest first: of one request (`request_id`
        of its outputs), or of all.

        What still goes on is told always; of what is over the last 1000 are kept, and beside them
        the last 1000 refusals and failures. `memory_report().pressure.num_events_forgotten` counts
        those that are told no more.
        """
        return self._engine.engine.core.events(request_id)

    def cache_stats(self) -> PrefixCacheStats:
        """What the prefix cache was asked for and what it found, since the start."""
        return self._engine.engine.core.cache_stats()

    def reset_prefix_cache(self) -> int:
        """Forget every cached block that no running request uses, in the pool, on the host and on
        disk; pinned prefixes stay. Returns how many blocks of the pool that freed."""
        return self._engine.engine.core.reset_prefix_cache()

    def pin_prefix(
        self,
        prompt: Prompt | Sequence[Message],
        cache_salt: str = "",
        *,
        chat_template: str | None = None,
    ) -> Pin:
        """Keep the KV of a prefix in the pool until `unpin_prefix`.

        prompt: as of `generate`; or, for `chat`, the messages that conversations begin with
        (a system prompt: `[{"role": "system", "content": ...}]`). They go through the chat template
        as `chat` has it, without the generation prompt: a chat's prompt begins with what its
        template writes, so that its system message pinned as text would never be found.

        It is computed if it is not there. Only whole blocks can be shared, so the rest of the
        prompt is left out: `Pin.num_tokens` says how many of its tokens are kept.

        Raises `InvalidRequestError` for a prompt shorter than a block, or when prefix caching is
        off; `CapacityError` when pins would take more than half of the pool, or what a live request
        was promised.
        """
        token_ids, salt = self._engine.prefix(prompt, cache_salt, chat_template)
        once = SamplingParams(temperature=0, max_tokens=1, detokenize=False, seed=0)
        self._run([salted(token_ids, salt)], [once], None, use_tqdm=False)
        return self._engine.engine.core.pin(token_ids, salt)

    def unpin_prefix(self, pin_id: int) -> None:
        """Let go of a pinned prefix. It stays cached as long as there is room.

        Raises `InvalidRequestError` for an id that is not pinned.
        """
        self._engine.engine.core.unpin(pin_id)

    def resize_kv_cache(self, num_bytes: int) -> int:
        """Make the KV pool larger or smaller while requests run; returns its new size in bytes,
        whole blocks of what was asked.

        A pool that shrinks drops cached blocks first, then moves blocks that are in use, then
        preempts. Raises `CapacityError`, with the arithmetic, for a size that the machine, a
        running request or a pinned prefix does not allow.

        What was decided at the start stays: `max_model_len` (which the pool of the start caps if it
        was not given) and `max_num_seqs` (never more than that pool's blocks), the size of the host
        tier, and what `num_bytes` may be at most: what weights and activations left.
        """
        return self._engine.resize(num_bytes)

    def close(self) -> None:
        """Abort what runs, write cached blocks to the disk tier if there is one, and free weights
        and KV pool. Closing twice is fine."""
        if self._built is not None:
            self._built.close()
        self._built = None
        self._driver.close()

    def _add(
        self,
        prompt: Prompt,
        params: Params,
        kind: OutputKind,
        priority: int = 0,
        client_id: str = "",
    ) -> str:
        check_priority(priority, self.config)
        check_client(client_id, self.config)
        return self._driver.add(prompt, params, kind, priority, client_id)

    def _run(
        self,
        prompts: list[Prompt],
        params: Sequence[Params],
        priority: int | Sequence[int] | None,
        use_tqdm: bool,
        client_id: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """All of them together; nothing runs if one is refused."""
        ranks = 0 if priority is None else priority
        priorities = one_of_each("priority", ranks, (int,), len(prompts))
        clients = one_of_each("client_id", client_id, (str,), len(prompts))
        request_ids: list[str] = []
        try:
            for prompt, own, rank, client in zip(prompts, params, priorities, clients, strict=True):
                request_ids.append(self._add(prompt, own, OutputKind.FINAL_ONLY, rank, client))
            return self._driver.run_to_end(request_ids, use_tqdm)
        finally:
            self._driver.forget(request_ids)

    def _chat_prompt(
        self,
        messages: Sequence[Message],
        template: str | None,
        generate: bool,
        cache_salt: str,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Prompt:
        prompt = self._engine.chat_prompt(
            messages, chat_template=template, add_generation_prompt=generate, tools=tools
        )
        return salted(prompt, cache_salt)
