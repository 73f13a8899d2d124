"""Who may come in: never, what can never fit; now, what fits above the watermark."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from octavo.errors import ConfigError, InvalidRequestError, RequestCapacityError
from octavo.kv.manager import KVCacheManager
from octavo.kv.policy import SeqDemand
from octavo.request import Request
from octavo.sched.demand import demand_of, expected_total
from octavo.sched.events import no_room
from octavo.sched.promises import num_pinned_for
from octavo.sched.sequence import Sequence

_POOL_FLAGS = "--kv-cache-memory-bytes (or --num-gpu-blocks-override)"


class Admission:
    """Decides who may enter the context and the pool.

    `watermark` is the share of the pool's blocks that admitting leaves free for the growth of
    those who run; without it a sequence let in with the last block is preempted in the next step.
    """

    def __init__(
        self, kv: KVCacheManager, max_model_len: int, max_num_seqs: int, watermark: float
    ) -> None:
        if max_model_len < 2:
            raise ConfigError(
                f"max_model_len={max_model_len} has no room for a prompt and an output token: "
                "raise --max-model-len to at least 2"
            )
        if not 0 <= watermark < 1:
            raise ConfigError(f"watermark must be at least 0 and below 1, got {watermark}")
        self._kv = kv
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self.watermark = watermark
        """The share of the pool that admitting leaves free while others run."""

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
        num_found = num_pinned_for(self._kv, request)
        pool_tokens = self._kv.max_tokens_beside_pins(num_found)
        limits = (
            (self._max_model_len, f"max_model_len {self._max_model_len:,}", "--max-model-len"),
            (pool_tokens, self._pool_phrase(pool_tokens, num_found), _POOL_FLAGS),
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
        if request.max_tokens is None and request.beam is None:
            self._check_copies(request, smallest)
            return smallest
        max_tokens = request.max_tokens if request.beam is None else request.beam.max_tokens
        assert max_tokens is not None
        total = num_prompt + max_tokens
        for limit, phrase, flag in limits:
            if total > limit:
                raise RequestCapacityError(
                    f"prompt {num_prompt:,} + max_tokens {max_tokens:,} = {total:,} "
                    f"tokens exceed {phrase}: shorten the prompt, lower max_tokens to at most "
                    f"{smallest - num_prompt:,}, or raise {flag}",
                    parameter="max_tokens",
                )
        if request.beam is not None:
            self._check_seats(request.beam.beam_width)
            if self._kv.policy.shares_blocks:
                self._check_beams(num_prompt, total, request.beam.beam_width, num_found)
        self._check_copies(request, total)
        return total

    def _check_seats(self, width: int) -> None:
        """All beams run in one step."""
        if width > self._max_num_seqs:
            raise RequestCapacityError(
                f"beam_width {width} exceeds max_num_seqs {self._max_num_seqs}: all beams run in "
                "one step; lower beam_width, or raise --max-num-seqs",
                parameter="beam_width",
            )

    def _check_copies(self, request: Request, total: int) -> None:
        """Of a policy that reserves, an idle pool must have room for all sequences of the request
        that run at once. `total` tokens are known to fit for one of them."""
        if self._kv.policy.shares_blocks:
            return
        num_prompt = len(request.prompt_token_ids)
        demand = SeqDemand(
            num_prompt,
            total,
            expected_total(request, total),
            num_seqs=min(request.n, self._max_num_seqs),
            forks_again=request.beam is not None,
        )
        if self._kv.fits_idle(demand):
            return
        longer = range(num_prompt + 1, total)
        expected = demand.expected_total_tokens or total
        most = bisect_left(
            longer,
            True,
            key=lambda num: (
                not self._kv.fits_idle(
                    replace(demand, max_total_tokens=num, expected_total_tokens=min(num, expected))
                )
            ),
        )
        fewer = "n" if request.beam is None else "beam_width"
        raise RequestCapacityError(
            f"{self._kv.why_never(demand)}: lower {fewer}"
            + (f", or max_tokens to at most {most:,}" if most else "")
            + ("" if request.beam is not None else self._in_turns(demand))
            + f", raise {_POOL_FLAGS}, or use --kv-policy paged",
            parameter=fewer,
        )

    def _in_turns(self, demand: SeqDemand) -> str:
        """The way out for samples, as a part of a sentence: with fewer seats, fewer run at once."""
        num_fit = bisect_left(
            range(1, demand.num_seqs),
            True,
            key=lambda num: not self._kv.fits_idle(replace(demand, num_seqs=num)),
        )
        return f", set --max-num-seqs to at most {num_fit:,} (samples then take turns)"

    def _check_beams(self, num_prompt: int, num_tokens: int, width: int, num_found: int) -> None:
        """Beams share no more than the full blocks of the prompt.

        `num_tokens`, with the prompt, are known to fit for one sequence. `num_found` blocks of
        the prompt are pinned.
        """
        num_shared, num_own = self._kv.num_needed_by_forks(num_prompt, num_tokens)
        num_blocks = num_shared + width * num_own
        limit = self._kv.num_blocks - self._kv.num_pinned_blocks + num_found
        if num_blocks <= limit:
            return
        max_tokens = self._most_beam_tokens(num_prompt, num_tokens, width, limit)
        fewer = f"max_tokens to at most {max_tokens:,}, or beam_width"
        raise RequestCapacityError(
            f"{num_shared:,} full blocks of the prompt + {width} beams x {num_own:,} further "
            f"blocks = {num_blocks:,} blocks exceed the {limit:,} that the KV pool"
            f"{self._less_pinned(num_found)} has for one request: lower "
            f"{fewer if max_tokens > 0 else 'beam_width'}, or raise {_POOL_FLAGS}",
            parameter="max_tokens" if max_tokens > 0 else "beam_width",
        )

    def _most_beam_tokens(self, num_prompt: int, num_tokens: int, width: int, limit: int) -> int:
        """Most output tokens with which so many beams fit into `limit` blocks; 0 or less: none."""

        def is_too_long(num_output: int) -> bool:
            shared, own = self._kv.num_needed_by_forks(num_prompt, num_prompt + num_output)
            return shared + width * own > limit

        return bisect_left(range(num_tokens - num_prompt), True, key=is_too_long) - 1

    def _pool_phrase(self, pool_tokens: int, num_found: int) -> str:
        policy = self._kv.policy
        under = "" if policy.shares_blocks else f" under --kv-policy {policy.name}"
        return (
            f"the {pool_tokens:,} that the KV pool of {self._kv.num_blocks:,} blocks of "
            f"{self._kv.block_size:,}{self._less_pinned(num_found)} holds for one sequence{under}"
        )

    def _less_pinned(self, num_found: int) -> str:
        """What is missing from the pool, as a part of a sentence."""
        num_pinned = self._kv.num_pinned_blocks - num_found
        return f", less {num_pinned:,} pinned (unpin_prefix frees them)," if num_pinned else ""

    def fits_now(self, seq: Sequence, num_seats: int, *, pool_is_idle: bool) -> bool:
        """Whether all known tokens of a waiting sequence fit into the pool now, and a block for
        each of those that will be forked from it; or all that they need, where the policy reserves.
        It has taken `num_seats` seats for itself and them (0: it has one already).

        The watermark protects those who run: an idle pool is given whole.
        """
        keep_free = 0 if pool_is_idle else self._num_kept(num_seats)
        return self._kv.can_admit(demand_of(seq, max(1, num_seats)), keep_free)

    def why_no_room(self, seq: Sequence, num_seats: int) -> str:
        """For people: why it does not fit now."""
        why = self._kv.why_no_room(demand_of(seq, max(1, num_seats)))
        if why is not None:
            return why
        num_tokens = len(seq.token_ids)
        num_blocks = self._kv.num_needed(num_tokens)
        return no_room(num_tokens, num_blocks, self._kv.num_free_blocks, self._num_kept(num_seats))

    def _num_kept(self, num_seats: int) -> int:
        return int(self._kv.num_blocks * self.watermark) + max(0, num_seats - 1)
