"""From what sequences gained to what users get: text, stop strings, logprobs, `RequestOutput`s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import TYPE_CHECKING

from octavo.engine.completion import Completion, TextMaker, position_logprobs
from octavo.engine.input import Params, is_ranked
from octavo.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    PositionLogprobs,
    RequestKVUsage,
    RequestMetrics,
    RequestOutput,
)
from octavo.request import BeamSearchParams, FinishReason, Request, SamplingParams
from octavo.text.detok import TokenTexts

if TYPE_CHECKING:
    from octavo.sched import SeqUpdate
    from octavo.text.tokenizer import Tokenizer

Stats = Callable[[str], tuple[RequestMetrics, RequestKVUsage] | None]
"""Times and KV usage of a request until now, by its id; None: not known. The usage of a request
that has not ended is made for who asks."""


class OutputKind(Enum):
    """What a `RequestOutput` holds, and when there is one."""

    CUMULATIVE = auto()
    """After each step that added something: all of it so far, all `n` completions. Lists are copied
    when they are first read, so that an output that nobody looks at costs the same at any length.
    """
    DELTA = auto()
    """After each step that added something: what is new, of the completions that have news.
    Prompt logprobs come with the first. `cumulative_logprob` stays a total."""
    FINAL_ONLY = auto()
    """Once, when the request has ended."""


class OutputProcessor:
    """Keeps the text of every request in the engine and makes its outputs.

    An output belongs to whoever receives it: later steps do not change its text, lists or metrics
    (`prompt_token_ids` and the entries of `logprobs` are shared between the outputs of a request
    and are not to be changed).
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._records: dict[str, _Record] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(
        self,
        request: Request,
        prompt: str | None,
        params: Params,
        kind: OutputKind = OutputKind.CUMULATIVE,
    ) -> None:
        """Expect updates of a request that the engine has taken.

        Beams, and what `best_of` chooses from, have outputs of the kind FINAL_ONLY only.
        """
        assert kind is OutputKind.FINAL_ONLY or not is_ranked(params)
        assert request.request_id not in self._records, f"request {request.request_id} is there"
        self._records[request.request_id] = _Record(request, prompt, params, kind, self._texts)

    def has(self, request_id: str) -> bool:
        """Whether the request has not had its last output."""
        return request_id in self._records

    def is_beam_search(self, request_id: str) -> bool:
        """Whether a request that is here decodes by beam search."""
        record = self._records.get(request_id)
        return record is not None and record.request.beam is not None

    def keep_only(self, request_ids: set[str]) -> None:
        """Forget all other requests."""
        self._records = {i: record for i, record in self._records.items() if i in request_ids}

    def drop(self, request_id: str) -> None:
        """Forget a request without an output; one that is not here is fine."""
        self._records.pop(request_id, None)

    def abort_sample(
        self, request_id: str, index: int, now_s: float, stats: Stats | None = None
    ) -> RequestOutput | None:
        """End one completion. The request's last output, if it was the last one that ran."""
        record = self._records.get(request_id)
        if record is None:
            return None
        record.abort(index)
        if not record.finished:
            return None
        del self._records[request_id]
        return record.output(now_s, stats)

    def catch_up(self, request_id: str, index: int, token_ids: Sequence[int]) -> None:
        """A completion that has not ended will be aborted: of a request whose tokens are told at
        the end, these are what it has so far."""
        record = self._records[request_id]
        if record.request.told_at_end:
            record.completions[index].take_plain(token_ids)

    def has_sample(self, request_id: str, index: int) -> bool:
        """Whether a completion is there and has not ended."""
        record = self._records.get(request_id)
        if record is None or not 0 <= index < len(record.completions):
            return False
        return record.completions[index].finish_reason is None

    def process(
        self, updates: Iterable[SeqUpdate], now_s: float, stats: Stats | None = None
    ) -> tuple[list[RequestOutput], list[tuple[int, str]]]:
        """Take in one step: (outputs, sequences to stop as (seq_id, stop string)).

        stats: asked for every output's times and KV usage. Without it an output has the times at
        which its tokens came here, and no KV usage.

        Updates of requests that are not here, and of sequences that have ended here (a stop string
        was found while a further step was under way), are ignored.
        """
        records = self._records
        touched: dict[str, _Record] = {}
        to_stop: list[tuple[int, str]] = []
        for update in updates:
            request_id, index, seq_id, token_ids, _, of_prompt, reason, *_ = update
            record = records.get(request_id)
            if record is None:
                continue
            if reason is None and not of_prompt and record.take_plain(index, token_ids, now_s):
                if record.is_streamed:
                    touched[request_id] = record
                continue
            stop = record.take(update, now_s)
            if stop is not None:
                to_stop.append((seq_id, stop))
            if record.is_streamed or record.finished:
                touched[request_id] = record
        outputs = []
        for request_id, record in touched.items():
            if record.finished:
                del records[request_id]
            elif not record.news:
                continue
            outputs.append(record.output(now_s, stats))
        return outputs, to_stop


def needs_end_only(params: Params) -> bool:
    """Whether a request's tokens need not be looked at before it has ended, if only its last output
    is wanted: no stop string ends it, and no logprobs come with them."""
    return (
        isinstance(params, SamplingParams)
        and not params.stop
        and params.logprobs is params.prompt_logprobs is None
        and not is_ranked(params)
    )


class _Record:
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
        if known is None:
            metrics, kv = self._metrics.copy(), RequestKVUsage()
        else:
            metrics, kv = known[0].copy(), known[1]
        if finished:
            kv = replace(kv)  # until then it is made for who asks
            if metrics.finished_s is None:
                metrics.finished_s = now_s
        prompt_logprobs = self._prompt_logprobs
        if self._kind is OutputKind.DELTA:
            outputs = [self.completions[i].delta() for i in sorted(self.news)]
            if prompt_logprobs is not None:
                all_there = len(prompt_logprobs) == len(request.prompt_token_ids)
                if self._prompt_logprobs_given or not all_there:
                    prompt_logprobs = None
                self._prompt_logprobs_given |= all_there
        elif self._best_of is not None:
            outputs = self._best(self._best_of)
        else:
            outputs = [completion.snapshot() for completion in self.completions]
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


def beams_of(output: RequestOutput, *, with_text: bool) -> BeamSearchOutput:
    """The end of a beam search as its own kind of output."""
    beams = []
    for beam in output.outputs:
        assert beam.cumulative_logprob is not None and beam.score is not None
        beams.append(
            BeamSearchSequence(
                tokens=output.prompt_token_ids + beam.token_ids,
                text=beam.text if with_text else None,
                cum_logprob=beam.cumulative_logprob,
                score=beam.score,
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
            )
        )
    return BeamSearchOutput(beams, output.request_id, output.metrics, output.kv)
