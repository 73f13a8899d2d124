"""One completion of a request as it grows: token ids, text, logprobs, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from octavo.outputs import CompletionOutput, Logprob, PositionLogprobs
from octavo.plan import TokenLogprobs
from octavo.request import FinishReason, SamplingParams
from octavo.text.detok import IncrementalDetokenizer, StopChecker, StopFound, TokenTexts

if TYPE_CHECKING:
    from octavo.sched import SeqUpdate


class TextMaker:
    """Tokens to text that may be shown, up to a stop string.

    stop_token_verbatim: show a stop token that is to be shown even if it is a special one.
    """

    def __init__(
        self,
        texts: TokenTexts,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        stop_token_verbatim: bool = False,
    ) -> None:
        self._detok = IncrementalDetokenizer(
            texts,
            prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        stops: Sequence[str] = params.stop or ()  # a lone string is a list since its validation
        self._stops = StopChecker(
            [stops] if isinstance(stops, str) else stops,
            include_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self.push_text: Callable[[int], str] | None = None if stops else self._detok.push_one
        """Without stop strings: the text that may be shown once an output token came."""
        self._shows_stop_token = params.include_stop_str_in_output
        self._verbatim = texts if stop_token_verbatim else None

    def push(self, token_id: int, num_tokens: int) -> StopFound:
        """Output token number `num_tokens` (from 1)."""
        return self._stops.push(self._detok.push((token_id,)), num_tokens)

    def push_stop_token(self, token_id: int, num_tokens: int) -> StopFound:
        """The token that ended it, the last."""
        if not self._shows_stop_token:
            return StopFound("", None)
        if self._verbatim is None:
            return self.push(token_id, num_tokens)
        text = self._detok.flush() + self._verbatim.text(token_id)
        return self._stops.push(text, num_tokens)

    def flush(self, num_tokens: int) -> StopFound:
        """The end after `num_tokens` tokens: what was held back, which may end in a stop string."""
        found = self._stops.push(self._detok.flush(), num_tokens)
        if found.stop is not None:
            return found
        return StopFound(found.text + self._stops.flush(), None)


class Completion:
    """The state of one of a request's `n` completions."""

    __slots__ = ("_cumulative", "_logprobs", "_num_given", "_parts", "_shows", "_text", "_texts",
                 "finish_reason", "index", "score", "stop_reason", "token_ids")  # fmt: skip

    def __init__(
        self,
        index: int,
        text: TextMaker | None,
        texts: TokenTexts | None,
        *,
        with_logprobs: bool,
        shows_logprobs: bool = True,
    ) -> None:
        """`with_logprobs`: keep them; `shows_logprobs`: and put them into outputs."""
        self.index = index
        self.score: float | None = None
        self._shows = shows_logprobs
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._text, self._texts = text, texts
        self._parts: list[str] = []
        self._logprobs: list[PositionLogprobs] | None = [] if with_logprobs else None
        self._cumulative: float | None = 0.0 if with_logprobs else None
        self._num_given = 0

    @property
    def mean_logprob(self) -> float:
        """Mean logprob a token; less than any number for a completion without one."""
        if not self.token_ids or self._cumulative is None:
            return -math.inf
        return self._cumulative / len(self.token_ids)

    def take_plain(self, token_ids: Sequence[int]) -> bool:
        """Take in new tokens of which none is the last; False if there is more to it than that:
        logprobs, or stop strings."""
        if self._logprobs is not None:
            return False
        if self._text is not None:
            push = self._text.push_text
            if push is None:
                return False
            for token_id in token_ids:
                if piece := push(token_id):
                    self._parts.append(piece)
        self.token_ids += token_ids
        return True

    def take(self, update: SeqUpdate) -> str | None:
        """Take in new tokens; the stop string that they completed, if they did."""
        if update.score is not None:
            self.score, self._cumulative = update.score, update.cum_logprob
        by_token = update.finish_reason is FinishReason.STOP
        first, last = 0, len(update.token_ids) - 1
        if last > 0 and self.take_plain(update.token_ids[:last]):
            first = last
        for i, token_id in enumerate(update.token_ids[first:], first):
            self.token_ids.append(token_id)
            if self._logprobs is not None and update.logprobs:
                self._add_logprobs(update.logprobs[i])
            text = self._text
            if text is None:
                continue
            push = text.push_stop_token if by_token and i == last else text.push
            found = push(token_id, len(self.token_ids))
            self._parts.append(found.text)
            if found.stop is not None:
                self._text = None
                self.finish_reason, self.stop_reason = FinishReason.STOP, found.stop
                return found.stop
        if update.finish_reason is not None:
            self.end(update.finish_reason, update.stop_reason)
        return None

    def end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        """It ended by itself or was aborted: nothing is held back any more."""
        if self._text is not None:
            found = self._text.flush(len(self.token_ids))
            self._parts.append(found.text)
            if found.stop is not None:
                reason, stop_reason = FinishReason.STOP, found.stop
        self._text = None
        self.finish_reason, self.stop_reason = reason, stop_reason

    def snapshot(self) -> CompletionOutput:
        """All of it so far."""
        parts = self._parts
        if len(parts) > 1:
            parts[:] = ("".join(parts),)
        shows = self._shows
        return CompletionOutput.so_far(
            self.index,
            parts[0] if parts else "",
            self.token_ids,
            self._cumulative if shows else None,
            self._logprobs if shows else None,
            self.finish_reason,
            self.stop_reason,
            self.score,
        )

    def delta(self) -> CompletionOutput:
        """What came since the last call."""
        parts = self._parts
        first, self._num_given = self._num_given, len(self.token_ids)
        # by hand, as every token of a stream has one: __init__ takes twice as long
        output = CompletionOutput.__new__(CompletionOutput)
        output.index = self.index
        output.text = parts[0] if len(parts) == 1 else "".join(parts)
        output.token_ids = self.token_ids[first:]
        output.cumulative_logprob = self._cumulative
        output.logprobs = None if self._logprobs is None else self._logprobs[first:]
        output.finish_reason = self.finish_reason
        output.stop_reason = self.stop_reason
        output.score = self.score
        parts.clear()
        return output

    def _add_logprobs(self, entry: TokenLogprobs) -> None:
        assert self._logprobs is not None and self._cumulative is not None
        self._logprobs.append(position_logprobs(entry, self._texts))
        self._cumulative += entry.logprob


def position_logprobs(entry: TokenLogprobs, texts: TokenTexts | None) -> PositionLogprobs:
    """By token id, the position's own token first, then the most probable ones, best first."""
    found = {entry.token_id: _logprob(entry.token_id, entry.logprob, entry.rank, texts)}
    for rank, (token_id, logprob) in enumerate(entry.top, start=1):
        if token_id != entry.token_id:
            found[token_id] = _logprob(token_id, logprob, rank, texts)
    return found


def _logprob(token_id: int, logprob: float, rank: int, texts: TokenTexts | None) -> Logprob:
    return Logprob(logprob, rank, None if texts is None else texts.text(token_id))
