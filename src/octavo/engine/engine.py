"""The engine in one process: text in, `RequestOutput`s out, one step at a time.

`LLM` drives it synchronously; a server drives the same object from its own loop.
"""

from __future__ import annotations

from octavo.engine.core import EngineCore
from octavo.engine.input import InputProcessor, Prompt
from octavo.engine.output import OutputKind, OutputProcessor
from octavo.outputs import RequestOutput
from octavo.request import SamplingParams


class Engine:
    """Input processor, core and output processor joined.

    Every request that `add` accepted gets an end: a finished `RequestOutput` from `step`, or its id
    in a `StepFailedError`.
    """

    def __init__(self, core: EngineCore, inputs: InputProcessor, outputs: OutputProcessor) -> None:
        self.core, self.inputs, self.outputs = core, inputs, outputs

    def add(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        priority: int = 0,
        kind: OutputKind = OutputKind.CUMULATIVE,
    ) -> None:
        """Validate, tokenize and queue one request.

        Raises `InvalidRequestError` (naming the parameter) or `RequestCapacityError` (with the
        arithmetic); the engine is unchanged then.
        """
        request, text = self.inputs.process(
            request_id, prompt, params, arrival_s=self.core.clock(), priority=priority
        )
        self.core.add_request(request)
        try:
            self.outputs.add(request, text, params, kind)
        except BaseException:
            self.core.abort(request_id)
            raise

    def abort(self, request_id: str) -> bool:
        """Drop a request; False if it is not (or no longer) here."""
        self.outputs.drop(request_id)
        return self.core.abort(request_id)

    def has(self, request_id: str) -> bool:
        """Whether a request still waits, runs, or has news to be told."""
        return self.outputs.has(request_id)

    def has_unfinished(self) -> bool:
        """Whether any request still waits or runs."""
        return self.core.has_unfinished()

    def step(self) -> list[RequestOutput]:
        """One iteration: what changed, per request."""
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
