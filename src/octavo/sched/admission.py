"""Who may come in: never, what can never fit; now, what fits above the watermark."""

from __future__ import annotations

from octavo.errors import ConfigError, InvalidRequestError, RequestCapacityError
from octavo.kv.manager import KVCacheManager
from octavo.request import Request
from octavo.sched.roster import demand_of
from octavo.sched.sequence import Sequence

_POOL_FLAGS = "--kv-cache-memory-bytes (or --num-gpu-blocks-override)"


class Admission:
    """Decides who may enter the context and the pool.

    `watermark` is the share of the pool's blocks that admitting leaves free for the growth of
    those who run; without it a sequence let in with the last block is preempted in the next step.
    """

    def __init__(self, kv: KVCacheManager, max_model_len: int, watermark: float) -> None:
        if max_model_len < 2:
            raise ConfigError(
                f"max_model_len={max_model_len} has no room for a prompt and an output token: "
                "raise --max-model-len to at least 2"
            )
        if not 0 <= watermark < 1:
            raise ConfigError(f"watermark must be at least 0 and below 1, got {watermark}")
        self._kv = kv
        self._max_model_len = max_model_len
        self._watermark_blocks = int(kv.num_blocks * watermark)

    def max_total_tokens(self, request: Request) -> int:
        """Most tokens, prompt and output, that each sequence of the request will have.

        Raises `RequestCapacityError` with the arithmetic if it can never fit into the context or
        an empty pool, naming the parameter to change.
        """
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise InvalidRequestError(
                "the prompt has no tokens: give at least one", parameter="prompt"
            )
        pool_tokens = self._kv.max_tokens_of_one_sequence
        limits = (
            (self._max_model_len, f"max_model_len {self._max_model_len:,}", "--max-model-len"),
            (pool_tokens, self._pool_phrase(pool_tokens), _POOL_FLAGS),
        )
        smallest = min(self._max_model_len, pool_tokens)
        for limit, phrase, flag in limits:
            if num_prompt >= limit:
                raise RequestCapacityError(
                    f"prompt {num_prompt:,} + 1 output token = {num_prompt + 1:,} tokens exceed "
                    f"{phrase}: shorten the prompt to at most {max(smallest - 1, 0):,} tokens, "
                    f"or raise {flag}",
                    parameter="prompt",
                )
        if request.max_tokens is None:
            return smallest
        total = num_prompt + request.max_tokens
        for limit, phrase, flag in limits:
            if total > limit:
                raise RequestCapacityError(
                    f"prompt {num_prompt:,} + max_tokens {request.max_tokens:,} = {total:,} "
                    f"tokens exceed {phrase}: shorten the prompt, lower max_tokens to at most "
                    f"{smallest - num_prompt:,}, or raise {flag}",
                    parameter="max_tokens",
                )
        return total

    def _pool_phrase(self, pool_tokens: int) -> str:
        return (
            f"the {pool_tokens:,} that the KV pool of {self._kv.num_blocks:,} blocks of "
            f"{self._kv.block_size:,} holds for one sequence"
        )

    def fits_now(self, seq: Sequence, *, pool_is_idle: bool) -> bool:
        """Whether all known tokens of a waiting sequence fit into the pool now.

        The watermark protects those who run: an idle pool is given whole.
        """
        keep_free = 0 if pool_is_idle else self._watermark_blocks
        return self._kv.can_admit(demand_of(seq), keep_free)
