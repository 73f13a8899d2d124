"""One request on its way out: its completions so far, and the outputs that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.engine.completion import Completion, TextMaker, position_logprobs
from octavo.engine.input import Params, is_ranked
from octavo.outputs import (
    CompletionOutput,
    OutputKind,
    PositionLogprobs,
    RequestKVUsage,
    RequestMetrics,
    RequestOutput,
)
from octavo.request import BeamSearchParams, FinishReason, Request, SamplingParams
from octavo.text.detok import TokenTexts

if TYPE_CHECKING:
    from octavo.sched import SeqUpdate

Stats = Callable[[str], tuple[RequestMetrics, RequestKVUsage] | None]
"""Times and KV usage of a request until now, by its id; None: not known. The usage of a request
that has not ended is made for who asks."""


class OutputRecord:
    """One request: its completions so far and what of them is news."""

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        params: Params,
        kind: OutputKind,
        texts: TokenTexts | None,
    ) -> None:
        self._kind = kind
        self.is_streamed = kind is not OutputKind.FINAL_ONLY
        self.news: dict[int, None] = {}
        """Completions that have changed since the last output, in the order of their changes."""
        self.request, self._prompt, self._texts = request, prompt, texts
        self._prompt_text: Callable[[], str] | None = None
        if prompt is None and texts is not None:
            self._prompt_text = _PromptText(texts, request.prompt_token_ids)
        self._metrics = RequestMetrics(arrival_s=request.arrival_s)
        """Times as they were noticed here."""
        self._num_unfinished = request.n
        self._prompt_logprobs: list[PositionLogprobs | None] | None = None
        self._prompt_logprobs_of = 0
        """The sample that brings them: the first that has not ended."""
        self._prompt_logprobs_given = False
        is_beam = isinstance(params, BeamSearchParams)
        if isinstance(params, BeamSearchParams):
            params = SamplingParams(include_stop_str_in_output=params.include_stop_str_in_output)
        elif params.prompt_logprobs is not None:
            self._prompt_logprobs = [None]
        self._is_plain_delta = kind is OutputKind.DELTA and self._prompt_logprobs is None
        best_of = is_ranked(params)
        self._best_of = params.n if best_of else None
        """Of how many completions the best are returned; None: all are."""
        shown = texts if params.detokenize else None
        self.completions = [
            Completion(
                index,
                None
                if shown is None
                else TextMaker(
                    shown, params, request.prompt_token_ids, stop_token_verbatim=is_beam
                ),
                texts,
                with_logprobs=best_of or params.logprobs is not None,
                shows_logprobs=is_beam or params.logprobs is not None,
            )
            for index in range(request.n)
        ]

    @property
    def finished(self) -> bool:
        return not self._num_unfinished

    def take_plain(self, index: int, token_ids: Sequence[int], now_s: float) -> bool:
        """Take in tokens of a sequence that goes on, as `take` would; False if that has to."""
        completion = self.completions[index]
        if completion.finish_reason is not None or not completion.take_plain(token_ids):
            return False
        if token_ids:
            self._note_tokens(len(token_ids), now_s)
            if self.is_streamed:
                self.news[index] = None
        return True

    def take(self, update: SeqUpdate, now_s: float) -> str | None:
        """Take in one sequence's update; a stop string for which the sequence must be stopped."""
        if update.prompt_logprobs and self._prompt_logprobs is not None:
            self._take_prompt_logprobs(update, self._prompt_logprobs)
        completion = self.completions[update.sample_index]
        if completion.finish_reason is not None:
            return None
        if not update.token_ids and update.finish_reason is None:
            return None
        self.news[update.sample_index] = None
        num_before = len(completion.token_ids)
        stop = completion.take(update)
        num_new = len(completion.token_ids) - num_before
        if num_new:
            self._note_tokens(num_new, now_s)
        if completion.finish_reason is not None:
            self._num_unfinished -= 1
        return stop if update.finish_reason is None else None

    def _note_tokens(self, num: int, now_s: float) -> None:
        metrics = self._metrics
        metrics.last_token_s = now_s
        if metrics.first_token_s is None:
            metrics.first_token_s = now_s
        metrics.num_generation_tokens += num

    def _take_prompt_logprobs(
        self, update: SeqUpdate, found: list[PositionLogprobs | None]
    ) -> None:
        first = next((c.index for c in self.completions if c.finish_reason is None), 0)
        if update.sample_index != first or len(found) == len(self.request.prompt_token_ids):
            return
        if first != self._prompt_logprobs_of:  # the sample that brought them was aborted
            del found[1:]
            self._prompt_logprobs_of = first
        found += [position_logprobs(entry, self._texts) for entry in update.prompt_logprobs]

    def abort(self, index: int) -> None:
        """End a completion that has not ended."""
        completion = self.completions[index]
        if completion.finish_reason is None:
            completion.end(FinishReason.ABORT, None)
            self.news[index] = None
            self._num_unfinished -= 1

    def _best(self, num_best: int) -> list[CompletionOutput]:
        """The completions with the best mean logprob a token, renumbered."""
        for completion in self.completions:
            completion.score = completion.mean_logprob
        ranked = sorted(
            self.completions,
            key=lambda c: (c.finish_reason is FinishReason.ABORT, -c.mean_logprob, c.index),
        )
        best = [completion.snapshot() for completion in ranked[:num_best]]
        for i, output in enumerate(best):
            output.index = i
        return best

    def output(self, now_s: float, stats: Stats | None) -> RequestOutput:
        """The output for now; what was news is none afterwards."""
        request, finished = self.request, self.finished
        known = None if stats is None else stats(request.request_id)
        if known is None and self._is_plain_delta and not finished:
            news = self.news
            told = [self.completions[i].delta() for i in (sorted(news) if len(news) > 1 else news)]
            news.clear()
            return RequestOutput.of_news(
                request.request_id, self._prompt, self._prompt_text, request.prompt_token_ids,
                told, self._metrics.copy(),
            )  # fmt: skip
        metrics, kv = self._cost(known, now_s)
        prompt_logprobs = self._prompt_logprobs_now()
        outputs = self._told()
        self.news.clear()
        output = RequestOutput(
            request.request_id,
            self._prompt,
            request.prompt_token_ids,
            None if prompt_logprobs is None else list(prompt_logprobs),
            outputs,
            finished,
            metrics,
            kv.cached_tokens,
            kv,
        )
        if self._prompt_text is not None:
            output.prompt_when_read(self._prompt_text)
        return output

    def _cost(
        self, known: tuple[RequestMetrics, RequestKVUsage] | None, now_s: float
    ) -> tuple[RequestMetrics, RequestKVUsage]:
        """Times and KV usage, which are the output's own."""
        metrics, kv = (self._metrics, RequestKVUsage()) if known is None else known
        metrics = metrics.copy()
        if self.finished:
            kv = replace(kv)  # until then it is made for who asks
            if metrics.finished_s is None:
                metrics.finished_s = now_s
        return metrics, kv

    def _told(self) -> list[CompletionOutput]:
        """The completions that an output of this kind holds now."""
        if self._kind is OutputKind.DELTA:
            return [self.completions[i].delta() for i in sorted(self.news)]
        if self._best_of is not None:
            return self._best(self._best_of)
        return [completion.snapshot() for completion in self.completions]

    def _prompt_logprobs_now(self) -> list[PositionLogprobs | None] | None:
        """Those that an output holds now: of deltas the first one for which all are there."""
        found = self._prompt_logprobs
        if found is None or self._kind is not OutputKind.DELTA:
            return found
        all_there = len(found) == len(self.request.prompt_token_ids)
        is_due = all_there and not self._prompt_logprobs_given
        self._prompt_logprobs_given |= all_there
        return found if is_due else None


class _PromptText:
    """Makes the text of a prompt that came as token ids, once."""

    __slots__ = ("_text", "_texts", "_token_ids")

    def __init__(self, texts: TokenTexts, token_ids: list[int]) -> None:
        self._texts, self._token_ids = texts, token_ids
        self._text: str | None = None

    def __call__(self) -> str:
        if self._text is None:
            self._text = self._texts.decoder.decode(self._token_ids, skip_special_tokens=False)
        return self._text
