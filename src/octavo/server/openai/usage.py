"""What an answer says it took."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from octavo.outputs import RequestKVUsage, RequestOutput


class Usage:
    """Adds up over the engine requests of one HTTP request, and over the chunks of a stream."""

    def __init__(self, *, with_kv: bool = False) -> None:
        self._with_kv = with_kv
        self._prompts: dict[int, int] = {}
        self._cached: dict[int, int] = {}
        self.completion_tokens = 0
        self._kv: dict[int, RequestKVUsage] = {}

    def add(self, index: int, output: RequestOutput, num_tokens: int | None = None) -> None:
        """What is new of request number `index`; num_tokens: of its outputs, if not all count."""
        self._prompts[index] = len(output.prompt_token_ids)
        self._cached[index] = output.num_cached_tokens
        if num_tokens is None:
            for completion in output.outputs:
                self.completion_tokens += len(completion.token_ids)
        else:
            self.completion_tokens += num_tokens
        if output.finished and self._with_kv:
            self._kv[index] = output.kv

    def shape(self) -> dict[str, Any]:
        """OpenAI's object, and `kv` if that was asked for and the end has come."""
        prompt_tokens = sum(self._prompts.values())
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
        if self._kv:
            usage["kv"] = kv_shape(self._kv.values())
        return usage


def kv_shape(usages: Collection[RequestKVUsage]) -> dict[str, Any]:
    """The cost of requests that ran together: peaks and integrals are added up."""
    return {
        "peak_blocks": sum(kv.peak_blocks for kv in usages),
        "block_seconds": sum(kv.block_seconds for kv in usages),
        "shared_tokens": sum(kv.shared_tokens for kv in usages),
        "cached_tokens": sum(kv.cached_tokens for kv in usages),
        "resumed_tokens": sum(kv.resumed_tokens for kv in usages),
        "forked_tokens": sum(kv.forked_tokens for kv in usages),
        "misses": [
            {
                "prompt": number,
                "first_block": miss.first_block,
                "num_blocks": miss.num_blocks,
                "reason": str(miss.reason),
                "evicted_s_ago": miss.evicted_s_ago,
                "diverged_at": miss.diverged_at,
            }
            for number, kv in enumerate(usages)
            for miss in kv.misses
        ],
    }
