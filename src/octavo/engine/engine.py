"""The engine in one process: text in, `RequestOutput`s out, one step at a time.

`LLM` drives it synchronously; a server drives the same object from its own loop.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.engine.core import EngineCore
from octavo.engine.input import InputProcessor, Params, Prompt, check_streamable
from octavo.engine.output import OutputProcessor, needs_end_only
from octavo.errors import CapacityError, InvalidRequestError
from octavo.outputs import OutputKind, RequestOutput


class Engine:
    """Input processor, core and output processor joined.

    Every request that `add` accepted gets an end: a finished `RequestOutput` from `step`, or its id
    in a `StepFailedError`.
    """

    def __init__(self, core: EngineCore, inputs: InputProcessor, outputs: OutputProcessor) -> None:
        self.core, self.inputs, self.outputs = core, inputs, outputs
        self._ended: list[RequestOutput] = []
        """Last outputs that came about between two steps."""

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params,
        *,
        priority: int = 0,
        client_id: str = "",
        kind: OutputKind = OutputKind.CUMULATIVE,
    ) -> None:
        """Validate, tokenize and queue one request.

        Raises `InvalidRequestError` (naming the parameter) or `RequestCapacityError` (with the
        arithmetic, which becomes an event too); the engine is unchanged then.
        """
        try:
            request, text = self.inputs.process(
                request_id,
                prompt,
                params,
                arrival_s=self.core.clock(),
                priority=priority,
                client_id=client_id,
            )
        except CapacityError as error:
            self.core.note_refusal(request_id, error)
            raise
        if kind is not OutputKind.FINAL_ONLY:
            check_streamable(params)
        elif needs_end_only(params):
            request = replace(request, told_at_end=True)
        if self._has_end_to_tell(request_id):
            raise InvalidRequestError(
                f"request_id {request_id!r} belongs to a request whose end was not told yet: choose"
                " another id, or wait for its end",
                parameter="request_id",
            )
        self.core.add_request(request)
        self.inputs.accepted(params)
        try:
            self.outputs.add(request, text, params, kind)
        except BaseException:
            self.core.abort(request_id)
            raise

    def abort(self, request_id: str, index: int | None = None) -> bool:
        """Drop a request without an output, or end one of its samples; False if it is not (or no
        longer) here.

        The sample's end is told with the request's next output, which comes with the next step if
        it was the last that ran. Raises `InvalidRequestError` for one beam of a beam search.
        """
        if index is None:
            self.outputs.drop(request_id)
            self._ended = [o for o in self._ended if o.request_id != request_id]
            return self.core.abort(request_id)
        if not self.outputs.has_sample(request_id, index) or self.core.has_ended(request_id, index):
            return False
        if self.outputs.is_beam_search(request_id):
            raise InvalidRequestError(
                f"request {request_id} is a beam search, whose beams end together: abort all of it",
                parameter="index",
            )
        self.outputs.catch_up(request_id, index, self.core.scheduler.untold_ids(request_id, index))
        self.core.abort(request_id, index)
        last = self.outputs.abort_sample(request_id, index, self.core.clock(), self.core.stats)
        if last is not None:
            self._ended.append(last)
            self.core.forget(request_id)
        return True

    def check_open(self) -> None:
        """Raise `EngineDeadError` once the engine is closed or dead."""
        self.core.check_open()

    def has(self, request_id: str) -> bool:
        """Whether a request still waits, runs, or has news to be told."""
        return self._has_end_to_tell(request_id) or self.outputs.has(request_id)

    def _has_end_to_tell(self, request_id: str) -> bool:
        ended = any(output.request_id == request_id for output in self._ended)
        return ended or self.core.has_failed(request_id)

    def has_unfinished(self) -> bool:
        """Whether any request still waits or runs, or has an end to be told."""
        return bool(self._ended) or self.core.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """One iteration: what changed, per request."""
        outputs = self._step()
        outputs[:0], self._ended = self._ended, []
        return outputs

    def _step(self) -> list[RequestOutput]:
        try:
            updates = self.core.step()
        except BaseException:
            self.outputs.keep_only(self.core.live_request_ids)
            raise
        outputs, stopped = self.outputs.process(updates, self.core.clock(), self.core.stats)
        for seq_id, stop_string in stopped:
            self.core.finish(seq_id, stop_string)
        for output in outputs:
            if output.finished:
                self.core.forget(output.request_id)
        return outputs
