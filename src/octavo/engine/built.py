"""An engine that was built, and what can be asked of it as a whole."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.arch import ModelArch
from octavo.config import EngineConfig
from octavo.engine.arguments import salted
from octavo.engine.core import EngineCore
from octavo.engine.engine import Engine
from octavo.engine.input import Prompt
from octavo.engine.report import MemoryReport, Pressure
from octavo.errors import CapacityError, InvalidRequestError
from octavo.kv.sizing import MemoryPlan, resized
from octavo.runner import memory
from octavo.text.chat import chat_template as find_template
from octavo.text.tokenizer import Tokenizer


@dataclass(slots=True)
class BuiltEngine:
    """An engine with everything that was decided for it."""

    config: EngineConfig
    """Resolved: nothing is left to be chosen."""
    arch: ModelArch
    engine: Engine
    tokenizer: Tokenizer | None
    plan: MemoryPlan

    @property
    def _core(self) -> EngineCore:
        return self.engine.core

    def memory_report(self) -> MemoryReport:
        """Where every byte is now."""
        scheduler, kv = self._core.scheduler, self._core.kv
        return MemoryReport(
            model=self.config.model,
            dtype=self.config.dtype,
            kv_policy=self.config.kv_policy,
            plan=self.plan,
            ledger=kv.ledger(),
            history=self._core.history.summary(),
            prefix_caching=self.config.enable_prefix_caching,
            cache=kv.cache_stats(),
            host=kv.host_ledger(),
            disk=kv.disk_ledger(),
            pressure=Pressure.of(scheduler.num_preemptions, self._core.events()),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            process_bytes=memory.process_bytes(),
        )

    def chat_prompt(
        self, messages: Sequence[Any], *, chat_template: str | None, add_generation_prompt: bool
    ) -> Prompt:
        """A conversation as token ids, through the model's template or the given one."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                "chat needs a tokenizer, and skip_tokenizer_init left it out", parameter="messages"
            )
        template = find_template(self.tokenizer, chat_template)
        text = template.render(messages, add_generation_prompt=add_generation_prompt)
        # The template writes the special tokens itself; adding them again would double them.
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prefix(self, prompt: Prompt, cache_salt: str) -> tuple[list[int], str]:
        """(Token ids of its whole blocks, salt) of a prompt that is to be pinned."""
        token_ids, _, salt = self.engine.inputs.prompt(salted(prompt, cache_salt))
        size = self.config.block_size
        if not self.config.enable_prefix_caching:
            raise InvalidRequestError(
                "pinning keeps cached blocks, and prefix caching is off: start without "
                "--no-enable-prefix-caching",
                parameter="prompt",
            )
        if len(token_ids) < size:
            raise InvalidRequestError(
                f"a prefix of {len(token_ids)} tokens does not fill a KV block of {size}, and only "
                "whole blocks are pinned: pin a longer one, or lower --block-size",
                parameter="prompt",
            )
        return token_ids[: len(token_ids) // size * size], salt

    def resize(self, num_bytes: int) -> int:
        """Make the pool larger or smaller; its new size in bytes."""
        if isinstance(num_bytes, bool) or not isinstance(num_bytes, int):
            raise InvalidRequestError(
                f"num_bytes must be a whole number of bytes, got {num_bytes!r}",
                parameter="num_bytes",
            )
        try:
            plan = resized(self.plan, num_bytes)
        except CapacityError as error:
            self._core.note_refusal(None, error)
            raise
        self._core.resize(plan.num_blocks)
        self.plan = plan
        self.config = self.config.replace(
            kv_cache_memory_bytes=plan.kv_bytes, num_gpu_blocks_override=plan.num_blocks
        )
        return plan.kv_bytes

    def close(self) -> None:
        """End every request and let go of weights and pool; memory returns to the system."""
        self._core.close()
        gc.collect()
