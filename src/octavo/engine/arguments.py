"""What callers of `LLM` may write in several ways: one prompt or many, one value or one each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from octavo.config import EngineConfig
from octavo.engine.input import Params, Prompt
from octavo.errors import InvalidRequestError
from octavo.request import BeamSearchParams, SamplingParams

T = TypeVar("T")


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a string, a mapping and a list of token ids are one prompt."""
    if not isinstance(prompts, list | tuple):
        return [prompts]  # type: ignore[list-item]
    if prompts and all(isinstance(p, int) and not isinstance(p, bool) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)


def salted(prompt: Prompt, cache_salt: str) -> Prompt:
    """A prompt with a salt; one that brings its own keeps it, unless the two contradict."""
    if cache_salt == "":
        return prompt
    if not isinstance(prompt, dict):
        name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
        prompt = {name: prompt}
    if prompt.get("cache_salt", cache_salt) != cache_salt:
        raise InvalidRequestError(
            f"cache_salt {cache_salt!r:.80} contradicts the prompt's own, "
            f"{prompt['cache_salt']!r:.80}: give one of the two",
            parameter="cache_salt",
        )
    return prompt | {"cache_salt": cache_salt}


def params_each(params: Params | Sequence[Params] | None, count: int) -> list[Params]:
    """The parameters of each prompt; by default all have `SamplingParams()`."""
    kinds = (SamplingParams, BeamSearchParams)
    values = SamplingParams() if params is None else params
    return one_of_each("sampling_params", values, kinds, count)


def one_of_each(name: str, values: Any, kinds: tuple[type[T], ...], count: int) -> list[T]:
    """One value for all prompts, or one for each."""
    if isinstance(values, kinds):
        return [values] * count
    if not isinstance(values, list | tuple) or not all(isinstance(v, kinds) for v in values):
        raise InvalidRequestError(
            f"{name} must be one {' or '.join(kind.__name__ for kind in kinds)}, or a list with "
            f"one for each prompt, got {values!r:.80}",
            parameter=name,
        )
    if len(values) != count:
        raise InvalidRequestError(
            f"{len(values)} {name} for {count} prompts: give one, or one for each",
            parameter=name,
        )
    return list(values)


def is_conversation(prompt: Any) -> bool:
    """Whether it is a list of messages, and not a prompt."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], dict)


def conversations(messages: Any) -> list[Any]:
    """One conversation (a list of messages) or a list of them."""
    if not isinstance(messages, list | tuple) or not messages:
        raise InvalidRequestError(
            "messages must be a conversation or a list of them, and not empty, got "
            f"{messages!r:.80}",
            parameter="messages",
        )
    return [messages] if is_conversation(messages) else list(messages)


def check_priority(priority: int, config: EngineConfig) -> None:
    """Raise `InvalidRequestError` for a priority that nothing looks at."""
    if priority and "priority" not in (config.scheduling_policy, config.preemption_victim):
        raise InvalidRequestError(
            f"priority {priority!r} has no effect under scheduling_policy "
            f"{config.scheduling_policy!r} and preemption_victim {config.preemption_victim!r}: "
            "start with --scheduling-policy priority or --preemption-victim priority",
            parameter="priority",
        )


def check_client(client_id: str, config: EngineConfig) -> None:
    """Raise `InvalidRequestError` for a client that nothing looks at."""
    if client_id and config.scheduling_policy != "fair":
        raise InvalidRequestError(
            f"client_id {client_id!r:.80} has no effect under scheduling_policy "
            f"{config.scheduling_policy!r}: start with --scheduling-policy fair",
            parameter="client_id",
        )
