"""Feeds the output processor by hand."""

from __future__ import annotations

from octavo.engine.input import InputProcessor
from octavo.engine.output import OutputProcessor
from octavo.outputs import OutputKind
from octavo.request import BeamSearchParams, FinishReason, SamplingParams
from octavo.sched import SeqUpdate

EOS = 257
STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


class OutputFeed:
    """Feeds an `OutputProcessor` as an engine would, one clock second a step."""

    def __init__(self, tokenizer, kind=OutputKind.CUMULATIVE) -> None:
        self.inputs = InputProcessor(tokenizer, vocab_size=260, max_model_len=1000)
        self.outputs = OutputProcessor(tokenizer)
        self.kind = kind
        self.now_s = 0.0
        self.stats = None
        self.to_stop: list[tuple[int, str]] = []

    def add(self, request_id="r", prompt=(97,), **params) -> None:
        kind = BeamSearchParams if "beam_width" in params else SamplingParams
        sampling = kind(**params)
        request, text = self.inputs.process(request_id, list(prompt), sampling, arrival_s=-1.0)
        self.outputs.add(request, text, sampling, self.kind)

    def step(self, *updates):
        self.now_s += 1
        outputs, self.to_stop = self.outputs.process(updates, self.now_s, self.stats)
        return outputs

    def push(self, text, **kwargs):
        """One step a byte; the outputs of the steps that had one."""
        found = []
        for byte in text.encode():
            found += self.step(update([byte], **kwargs))
        return found


def update(
    ids=(), *, request_id="r", sample=0, logprobs=(), prompt=(), reason=None, stop_reason=None,
    cum_logprob=None, score=None,
) -> SeqUpdate:  # fmt: skip
    return SeqUpdate(
        request_id=request_id,
        sample_index=sample,
        seq_id=100 + sample,
        token_ids=tuple(ids),
        logprobs=tuple(logprobs),
        prompt_logprobs=tuple(prompt),
        finish_reason=reason,
        stop_reason=stop_reason,
        cum_logprob=cum_logprob,
        score=score,
    )
