"""One row at a time, in float64, written from the definitions: what sampling must do."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from octavo.request import SamplerParams
from octavo.sampling.random import stream_key, uniforms


def adjusted(logits, params: SamplerParams, prompt, output) -> np.ndarray:
    """float64 logits after masks, bias and penalties."""
    x = np.array(logits, dtype=np.float64)
    vocab = len(x)
    allowed = set(range(vocab))
    if params.allowed_token_ids is not None:
        allowed = set(params.allowed_token_ids)
    banned = set()
    for word in params.bad_words:
        prefix = list(word[:-1])
        if len(output) >= len(prefix) and list(output[len(output) - len(prefix) :]) == prefix:
            banned.add(word[-1])
    if len(output) < params.min_tokens:
        banned |= set(params.min_tokens_masked_ids)
    choices = allowed - banned or allowed
    for token in range(vocab):
        if token not in choices:
            x[token] = -np.inf
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in range(vocab):
        count = list(output).count(token)
        if count or token in prompt:
            x[token] = (
                x[token] / params.repetition_penalty
                if x[token] > 0
                else x[token] * params.repetition_penalty
            )
        x[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return x


def in_order(x) -> list[int]:
    """Token ids, best first, equal ones by id."""
    return sorted(range(len(x)), key=lambda token: (-x[token], token))


def is_greedy(params: SamplerParams) -> bool:
    return params.temperature < 1e-5 or params.top_k == 1


def kept_weights(x, params: SamplerParams) -> np.ndarray:
    """float64 unnormalised probabilities after temperature, min_p, top_k, top_p."""
    w = np.exp((x - x.max()) / params.temperature)
    w[w < params.min_p] = 0
    order = in_order(x)
    if params.top_k > 0:
        w[order[params.top_k :]] = 0
    if params.top_p < 1:
        total, reached = w.sum(), 0.0
        for token in order:
            if reached >= params.top_p * total:
                w[token] = 0
            reached += w[token]
    return w


def reference_token(logits, params: SamplerParams, prompt, output, sample_index=0) -> int:
    x = adjusted(logits, params, prompt, output)
    if is_greedy(params):
        return in_order(x)[0]
    w = kept_weights(x, params)
    key = np.array([stream_key(params.seed, sample_index)], dtype=np.uint64)
    u = uniforms(key, np.array([len(output)], dtype=np.uint64))[0]
    cut = 0 < params.top_k < len(x) or params.top_p < 1
    order = in_order(x) if cut else range(len(x))
    cumulative = np.cumsum([w[token] for token in order])
    return list(order)[int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))]


def reference_logprobs(logits) -> np.ndarray:
    x = np.array(logits, dtype=np.float64)
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


@pytest.fixture(scope="session")
def reference() -> SimpleNamespace:
    """The functions of this file, for tests."""
    return SimpleNamespace(
        adjusted=adjusted,
        in_order=in_order,
        kept_weights=kept_weights,
        token=reference_token,
        logprobs=reference_logprobs,
    )
