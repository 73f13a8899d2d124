"""An engine that was built, and what can be asked of it as a whole."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from octavo.arch import ModelArch
from octavo.config import EngineConfig
from octavo.engine.arguments import is_conversation, salted
from octavo.engine.core import EngineCore
from octavo.engine.engine import Engine
from octavo.engine.garbage import look_at_all_again
from octavo.engine.input import Prompt
from octavo.engine.report import MemoryReport, Pressure
from octavo.errors import CapacityError, InvalidRequestError
from octavo.kv.memory_plan import MemoryPlan
from octavo.kv.sizing import resized
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
    no_prefix_caching: str | None = None
    """Why prefixes are not kept, and what to do about it; None: they are."""

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
            groups=kv.held_by_group(),
            pressure=Pressure.of(
                scheduler.num_preemptions,
                scheduler.pressure_totals,
                self._core.num_events_forgotten,
                scheduler.events(),
            ),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            process_bytes=memory.process_bytes(),
        )

    def chat_prompt(
        self,
        messages: Sequence[Any],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
    ) -> Prompt:
        """A conversation as token ids, through the model's template or the given one."""
        if self.tokenizer is None:
            raise InvalidRequestError(
                "chat needs a tokenizer, and skip_tokenizer_init left it out", parameter="messages"
            )
        template = find_template(self.tokenizer, chat_template, tools=bool(tools))
        text = template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        # The template writes the special tokens itself; adding them again would double them.
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prefix(
        self, prompt: Prompt | Sequence[Any], cache_salt: str, chat_template: str | None
    ) -> tuple[list[int], str]:
        """(Token ids of its whole blocks, salt) of a prompt, or of the messages that conversations
        begin with, that is to be pinned."""
        if self.no_prefix_caching is not None:
            raise InvalidRequestError(
                f"pinning keeps cached blocks, and {self.no_prefix_caching}", parameter="prompt"
            )
        if is_conversation(prompt):
            prompt = self.chat_prompt(
                cast("Sequence[Any]", prompt),
                chat_template=chat_template,
                add_generation_prompt=False,
            )
        elif chat_template is not None:
            raise InvalidRequestError(
                "chat_template has no effect on a prompt that is not a list of messages: leave it "
                "out, or give messages",
                parameter="chat_template",
            )
        token_ids, _, salt = self.engine.inputs.prompt(salted(cast("Prompt", prompt), cache_salt))
        size = self.config.block_size
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
        self._core.check_open()
        try:
            plan = resized(self.plan, num_bytes)
            self._core.resize(plan.num_blocks)
        except CapacityError as error:
            refusal = CapacityError(f"resize_kv_cache({num_bytes:,}): {error}; {self._sizes()}")
            self._core.note_refusal(None, refusal)
            raise refusal from error
        self.plan = plan
        self.config = self.config.replace(
            kv_cache_memory_bytes=plan.kv_bytes, num_gpu_blocks_override=plan.num_blocks
        )
        return plan.kv_bytes

    def _sizes(self) -> str:
        """What can be asked of `resize` now."""
        block, kv = self.plan.bytes_per_block, self._core.kv
        most = (self.plan.kv_bytes + self.plan.left_bytes) // block
        pinned = kv.num_pinned_blocks
        least = max(1, 2 * pinned)
        text = (
            f"the pool can have {least:,} to {most:,} blocks of {block:,} B, {least * block:,} to "
            f"{most * block:,} B"
        )
        if pinned:
            text += f" ({pinned:,} pinned, and pins may take half)"
        if self._core.scheduler.has_unfinished():
            text += "; to the least come the blocks that a live request may need"
        return text

    def close(self) -> None:
        """End every request and let go of weights and pool; memory returns to the system."""
        self._core.close()
        if self.config.device != "cpu":
            look_at_all_again()
        gc.collect()
