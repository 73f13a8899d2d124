"""Sampling by launches: against the CPU's sampler, whatever the company, without a look back."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.errors import NumericsError
from octavo.request import SamplerParams
from octavo.sampling import SamplingState, sample
from octavo.sampling.device import DeviceSampler, device_sampling_bytes

VOCAB = 197
PROMPT = [3, 5, 5, 8, 96]
OUTPUT = [7, 8, 7, 7, 11]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def logits_of(rows: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * 2


def state_of(params, output=OUTPUT) -> SamplingState:
    state = SamplingState(VOCAB)
    for seq_id, each in enumerate(params):
        state.add(seq_id, each, PROMPT)
        for token in output:
            state.append(seq_id, token)
    return state


def collected(draw):
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return draw.collect()


def drawn(logits, params, rows=None, sampler=None):
    rows = list(range(len(params))) if rows is None else rows
    sampler = sampler or DeviceSampler(VOCAB, len(rows), DEVICE)
    return collected(sampler.launch(logits[rows].to(DEVICE), rows, state_of(params)))


CHANGES = [
    dict(), dict(repetition_penalty=1.7), dict(frequency_penalty=-1.5, presence_penalty=0.3),
    dict(logit_bias=((10, 6.0), (12, 5.0), (13, -100.0), (7, 1.5))),
    dict(allowed_token_ids=(4, 90, 11, 50, 4)), dict(bad_words=((9,), (7, 11, 20), (11, 21))),
    dict(min_tokens=6, min_tokens_masked_ids=(0, 2, 40, 41)),
    dict(min_tokens=5, min_tokens_masked_ids=tuple(range(60))),
    dict(allowed_token_ids=(9, 11), bad_words=((9,), (11,))),  # bans leave nothing: lifted
    dict(repetition_penalty=0.4, presence_penalty=-2.0, logit_bias=((7, 2.0), (8, -3.0), (50, 1.0)),
         allowed_token_ids=(*range(0, 197, 3), 7, 8), bad_words=((7,), (30,)),
         min_tokens=9, min_tokens_masked_ids=(8, 6)),
]  # fmt: skip


def test_tokens_and_logprobs_are_the_cpu_samplers() -> None:
    """Without top_k and top_p a seed's token is the same; logprobs always are."""
    params = [
        SamplerParams(**change, temperature=temperature, seed=seed, num_logprobs=num)
        for seed, change in enumerate(CHANGES)
        for temperature, num in ((0.0, None), (1.0, 3), (0.7, 0))
    ]
    logits = logits_of(len(params))
    expected = sample(logits.clone(), range(len(params)), state_of(params))
    got = drawn(logits, params)
    assert got.token_ids == expected.token_ids
    for one, other in zip(got.logprobs, expected.logprobs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.token_id, one.rank) == (other.token_id, other.rank)
            assert [i for i, _ in one.top] == [i for i, _ in other.top]
            values = [one.logprob] + [value for _, value in one.top]
            wanted = [other.logprob] + [value for _, value in other.top]
            assert np.allclose(values, wanted, atol=2e-6)


def test_top_k_and_top_p_draw_in_the_order_of_the_vocabulary(reference) -> None:
    params = [
        SamplerParams(temperature=1.0, top_k=7, seed=1),
        SamplerParams(temperature=1.5, top_p=0.6, seed=2, repetition_penalty=1.3),
        SamplerParams(temperature=1.0, min_p=0.1, seed=3),
        SamplerParams(temperature=2.0, top_k=30, top_p=0.8, seed=4, logit_bias=((3, 4.0),)),
    ]
    logits = logits_of(4, seed=1)
    for row, token in enumerate(drawn(logits, params).token_ids):
        x = reference.adjusted(logits[row].numpy(), params[row], PROMPT, OUTPUT)
        upto = np.cumsum(reference.kept_weights(x, params[row]))
        number = state_of(params).sequences([row])[0]
        keys = np.array([number.key], dtype=np.uint64)
        u = reference_number(keys, number.num_output)
        assert token == int(np.searchsorted(upto, u * upto[-1], side="right"))


def reference_number(keys, position: int) -> float:
    from octavo.sampling.random import uniforms

    return float(uniforms(keys, np.array([position], dtype=np.uint64))[0])


def test_rows_do_not_look_at_each_other() -> None:
    params = [
        SamplerParams(temperature=1.0, seed=1),
        SamplerParams(temperature=1.0, top_p=0.7, seed=2, num_logprobs=2),
        SamplerParams(temperature=0.0, frequency_penalty=0.5),
        SamplerParams(temperature=1.0, top_k=9, seed=3, bad_words=((1,),)),
    ]
    logits = logits_of(4, seed=2)
    sampler = DeviceSampler(VOCAB, 4, DEVICE)
    together = drawn(logits, params, sampler=sampler)
    backwards = drawn(logits, params, [3, 2, 1, 0], sampler)
    assert backwards.token_ids[::-1] == together.token_ids
    assert backwards.logprobs[::-1] == together.logprobs
    for row in (1, 3):
        alone = drawn(logits, params, [row], sampler)
        assert alone.token_ids == [together.token_ids[row]]
        assert alone.logprobs == [together.logprobs[row]]


def test_draws_follow_the_distribution() -> None:
    """Chi-square of one distribution, drawn from with different seeds."""
    num = 80
    logits = torch.tensor([0.0, 1.0, 0.5, 0.2, 2.0, -20.0]).repeat(num, 1)
    state = SamplingState(6)
    for seq_id in range(num):
        state.add(seq_id, SamplerParams(temperature=0.8, seed=seq_id), [1])
    sampler = DeviceSampler(6, num, DEVICE)
    tokens = collected(sampler.launch(logits.to(DEVICE), range(num), state)).token_ids
    counts = np.bincount(tokens, minlength=6)
    weights = np.exp(logits[0, :5].double().numpy() / 0.8)
    expected = num * weights / weights.sum()
    assert counts[5] == 0
    assert ((counts[:5] - expected) ** 2 / expected).sum() < 20  # 4 degrees of freedom: 1 in 2,000


def test_a_launch_needs_advance_only() -> None:
    """Launched before the last tokens are known; two launches are under way at once."""
    params = [
        SamplerParams(temperature=1.0, seed=5),
        SamplerParams(temperature=1.0, top_k=5, seed=6, min_tokens=6,
                      min_tokens_masked_ids=tuple(range(100))),
        SamplerParams(temperature=0.0),
    ]  # fmt: skip
    assert not any(each.needs_past for each in params)
    logits = [logits_of(3, seed=seed) for seed in (3, 4)]
    expected = []
    state = state_of(params)
    sampler = DeviceSampler(VOCAB, 3, DEVICE)
    for step in logits:
        expected.append(collected(sampler.launch(step.to(DEVICE), range(3), state)).token_ids)
        for seq_id, token in enumerate(expected[-1]):
            state.append(seq_id, token)
    state = state_of(params)
    draws = []
    for step in logits:
        draws.append(sampler.launch(step.to(DEVICE), range(3), state))
        for seq_id in range(3):
            state.advance(seq_id)
    assert [collected(draw).token_ids for draw in draws] == expected
    assert expected[0][1] >= 100


def test_learn_is_what_penalties_look_at() -> None:
    params = [SamplerParams(temperature=0.0, presence_penalty=2.0, bad_words=((1, 2, 3),))]
    state, other = state_of(params, []), state_of(params, [])
    for token in (1, 2):
        state.append(0, token)
        other.advance(0)
        other.learn(0, token)
    one, two = state.sequences([0])[0], other.sequences([0])[0]
    assert one.banned_ids() == two.banned_ids() == [3]
    assert one.counts.ids.tolist() == two.counts.ids.tolist() == [1, 2]
    assert one.num_output == two.num_output == 2
    other.learn(77, 1)  # it ended meanwhile


@pytest.mark.parametrize("params", [SamplerParams(), SamplerParams(temperature=1.0)])
def test_rows_that_are_not_finite_are_named(params: SamplerParams) -> None:
    logits = logits_of(3)
    logits[1, 5] = math.nan
    logits[2] = -math.inf
    with pytest.raises(NumericsError, match=r"sequences \[1, 2\]"):
        drawn(logits, [replace(params, seed=seed) for seed in range(3)])


def test_all_plain_rows_and_changing_company() -> None:
    """What is kept between launches is that of the sequences at hand."""
    params = [SamplerParams(), SamplerParams(temperature=1.0, seed=1), SamplerParams()]
    logits = logits_of(3, seed=7)
    sampler = DeviceSampler(VOCAB, 3, DEVICE)
    plain = drawn(logits, params, [0, 2], sampler)
    assert plain.token_ids == logits[[0, 2]].argmax(1).tolist()
    assert plain.logprobs == [None, None]
    mixed = drawn(logits, params, sampler=sampler)
    assert [mixed.token_ids[0], mixed.token_ids[2]] == plain.token_ids
    assert drawn(logits, params, [0, 2], sampler).token_ids == plain.token_ids


def test_bytes_are_what_it_holds() -> None:
    sampler = DeviceSampler(5000, 300, DEVICE)
    held = sum(
        tensor.untyped_storage().nbytes()
        for value in vars(sampler).values()
        for tensor in (value if isinstance(value, tuple) else (value,))
        if isinstance(tensor, torch.Tensor)
    )
    assert held == device_sampling_bytes(300, 5000)
