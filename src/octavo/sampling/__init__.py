"""Sampling: from logits to tokens, vectorised over the rows of a step, on any device.

`SamplingState` keeps what each sequence needs between steps; `sample` turns one step's logits into
tokens and logprobs; `device.DeviceSampler` does the same on a GPU, by launches that never wait.
What a sequence draws depends on its own logits, parameters, seed and number of output tokens only:
never on the other rows, their order, or an earlier preemption.
"""

from __future__ import annotations

from octavo.sampling.batch import SamplingState
from octavo.sampling.beams import BeamRows, beam_candidates
from octavo.sampling.logprobs import prompt_logprobs
from octavo.sampling.sampler import Sampled, choose_tokens, sample, sampling_bytes

__all__ = [
    "BeamRows",
    "Sampled",
    "SamplingState",
    "beam_candidates",
    "choose_tokens",
    "prompt_logprobs",
    "sample",
    "sampling_bytes",
]
