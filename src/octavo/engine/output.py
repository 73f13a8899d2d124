"""From what sequences gained to what users get: text, stop strings, logprobs, `RequestOutput`s."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from octavo.engine.input import Params, is_ranked
from octavo.engine.output_record import OutputRecord, Stats
from octavo.outputs import BeamSearchOutput, BeamSearchSequence, OutputKind, RequestOutput
from octavo.request import Request, SamplingParams
from octavo.text.detok import TokenTexts

if TYPE_CHECKING:
    from octavo.sched import SeqUpdate
    from octavo.text.tokenizer import Tokenizer


class OutputProcessor:
    """Keeps the text of every request in the engine and makes its outputs.

    An output belongs to whoever receives it: later steps do not change its text, lists or metrics
    (`prompt_token_ids` and the entries of `logprobs` are shared between the outputs of a request
    and are not to be changed).
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
        self._records: dict[str, OutputRecord] = {}

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
        self._records[request.request_id] = OutputRecord(request, prompt, params, kind, self._texts)

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
        touched: dict[str, OutputRecord] = {}
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
