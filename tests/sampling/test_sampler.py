"""Tokens: every feature against the slow reference, and rows that never look at each other."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.request import SamplerParams
from octavo.sampling import SamplingState, choose_tokens, sample

VOCAB = 97
PROMPT = [3, 5, 5, 8, 96]
OUTPUT = [7, 8, 7, 7, 11]


def logits_of(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * spread


def state_of(params, vocab=VOCAB, prompt=PROMPT, output=OUTPUT, sample_index=0) -> SamplingState:
    state = SamplingState(vocab)
    for seq_id, each in enumerate(params):
        state.add(seq_id, each, prompt, sample_index)
        for token in output:
            state.append(seq_id, token)
    return state


def tokens_of(logits, params, **kwargs) -> list[int]:
    state = state_of(params, vocab=logits.shape[1], **kwargs)
    return sample(logits.clone(), range(len(params)), state).token_ids


FEATURES = {
    "greedy": dict(temperature=0.0),
    "almost_greedy": dict(temperature=9e-6),
    "plain": dict(),
    "cold": dict(temperature=0.3),
    "hot": dict(temperature=5.0),
    "top_k": dict(top_k=7),
    "top_k_1": dict(top_k=1),
    "top_k_all": dict(top_k=VOCAB),
    "top_k_more_than_all": dict(top_k=10**9),
    "top_p": dict(top_p=0.6),
    "top_p_tiny": dict(top_p=1e-9),
    "top_p_almost_all": dict(top_p=0.9999),
    "min_p": dict(min_p=0.1),
    "min_p_1": dict(min_p=1.0),
    "allowed": dict(allowed_token_ids=(4, 90, 11, 50)),
    "bad_word_single": dict(bad_words=((9,), (1,), (88,))),
    "bad_words_long": dict(bad_words=((7, 11, 20), (11, 21), (8, 11, 22), (7, 7, 11, 23))),
    "min_tokens_open": dict(min_tokens=6, min_tokens_masked_ids=(0, 2, 40, 41, 42)),
    "min_tokens_done": dict(min_tokens=5, min_tokens_masked_ids=tuple(range(60))),
    "bias": dict(logit_bias=((10, 6.0), (12, 5.0), (13, -100.0))),
    "repetition": dict(repetition_penalty=1.7),
    "repetition_reward": dict(repetition_penalty=0.4),
    "frequency": dict(frequency_penalty=-1.5),
    "presence": dict(presence_penalty=-2.0),
}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_feature_alone(reference, name: str, temperature: float) -> None:
    rows = 40
    params = [
        SamplerParams(**({"temperature": temperature, "seed": seed} | FEATURES[name]))
        for seed in range(rows)
    ]
    logits = logits_of(rows)
    expected = [reference.token(logits[i].numpy(), params[i], PROMPT, OUTPUT) for i in range(rows)]
    assert tokens_of(logits, params) == expected


def some_params(rng: np.random.Generator, vocab: int) -> SamplerParams:
    """Random parameters: each feature is there or not."""

    def maybe(value, otherwise):
        return value if rng.random() < 0.5 else otherwise

    ids = [int(i) for i in rng.permutation(vocab)]
    return SamplerParams(
        temperature=maybe(float(rng.uniform(0.1, 2.0)), maybe(0.0, 1.0)),
        top_p=maybe(float(rng.uniform(0.05, 1.0)), 1.0),
        top_k=maybe(int(rng.integers(1, vocab + 5)), 0),
        min_p=maybe(float(rng.uniform(0, 0.3)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2)), 1.0),
        seed=int(rng.integers(-(2**63), 2**63)),
        logit_bias=maybe(tuple((i, float(rng.normal())) for i in ids[:9]), ()),
        allowed_token_ids=maybe(tuple(ids[: int(rng.integers(1, vocab))]), None),
        bad_words=maybe(((ids[0],), (7, 11, ids[1]), (11, ids[2]), (4, ids[3])), ()),
        min_tokens=maybe(int(rng.integers(0, 9)), 0),
        min_tokens_masked_ids=tuple(ids[5:10]),
        num_logprobs=maybe(int(rng.integers(0, 5)), None),
    )


def test_all_features_combined_in_one_batch(reference) -> None:
    rng = np.random.default_rng(1)
    params = [some_params(rng, VOCAB) for _ in range(400)]
    logits = logits_of(len(params), seed=1)
    got = tokens_of(logits, params)
    for i, token in enumerate(got):
        assert token == reference.token(logits[i].numpy(), params[i], PROMPT, OUTPUT), (
            i,
            params[i],
        )


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 255, 256, 257, 513, 4500])
def test_vocabularies_around_the_block_sizes(reference, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 24
    choices = [
        dict(), dict(top_k=3), dict(top_p=0.9), dict(top_p=0.999, top_k=40), dict(min_p=0.01),
        dict(temperature=30.0, top_p=0.97), dict(temperature=0.0),
        dict(top_k=70, temperature=9.0), dict(top_k=2500, temperature=9.0),
    ]  # fmt: skip
    params = [
        SamplerParams(**({"temperature": 1.0, "seed": int(rng.integers(2**40))} | choices[i % 9]))
        for i in range(rows)
    ]
    # Rounded like bfloat16 logits, so that equal ones stand at every boundary.
    logits = (logits_of(rows, vocab, seed=vocab) * 8).round() / 8
    got = tokens_of(logits, params, prompt=[0], output=[0])
    for i, token in enumerate(got):
        assert token == reference.token(logits[i].numpy(), params[i], [0], [0]), (i, params[i])


def test_penalties_over_many_distinct_tokens(reference) -> None:
    """Counts outgrow their first arrays, from the prompt and from the output."""
    vocab = 600
    output = [token % vocab for token in range(0, 5000, 13)]
    prompt = list(range(400, 500))
    penalties = dict(repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=-0.7)
    params = [
        SamplerParams(temperature=1.0, seed=0, frequency_penalty=-0.3),
        SamplerParams(temperature=1.0, seed=1, **penalties),
    ]
    logits = logits_of(2, vocab)
    expected = [reference.token(logits[i].numpy(), params[i], prompt, output) for i in range(2)]
    assert tokens_of(logits, params, prompt=prompt, output=output) == expected


def test_equal_logits_are_cut_by_token_id() -> None:
    logits = torch.zeros(200, 300)
    for cut in (dict(top_k=5), dict(top_p=5 / 300), dict(top_k=50, top_p=0.1)):
        params = [SamplerParams(temperature=1.0, seed=s, **cut) for s in range(200)]
        assert set(tokens_of(logits, params)) == {0, 1, 2, 3, 4}


def test_minus_zero_equals_zero() -> None:
    logits = torch.full((50, 200), -1.0)
    logits[:, 150] = 0.0
    logits[:, 20] = -0.0
    params = [SamplerParams(temperature=1.0, top_k=2, top_p=0.5, seed=s) for s in range(50)]
    assert set(tokens_of(logits, params)) == {20}
    assert tokens_of(logits, [SamplerParams()] * 50) == [20] * 50


DRAWS = 8_000


@pytest.mark.parametrize(
    "feature",
    ["plain", "cold", "hot", "top_k", "top_p", "min_p", "allowed", "repetition", "frequency"],
)
def test_distribution(reference, feature: str) -> None:
    """Frequencies of many draws against the reference's probabilities (chi square, 5 sigma)."""
    vocab = 30
    logits = logits_of(1, vocab, seed=5, spread=1.5)
    kwargs = FEATURES[feature]
    if feature == "allowed":
        kwargs = dict(allowed_token_ids=(4, 20, 11))
    params = SamplerParams(**({"temperature": 1.0} | kwargs))
    prompt, output = [3, 5], [7, 8, 7]
    weights = reference.kept_weights(
        reference.adjusted(logits[0].numpy(), params, prompt, output), params
    )
    probabilities = weights / weights.sum()

    all_params = [replace(params, seed=s) for s in range(DRAWS)]
    got = tokens_of(logits.expand(DRAWS, vocab), all_params, prompt=prompt, output=output)
    counts = np.bincount(got, minlength=vocab)
    assert counts[probabilities == 0].sum() == 0
    kept = probabilities > 0
    expected = probabilities[kept] * DRAWS
    rare = expected < 5
    seen = np.append(counts[kept][~rare], counts[kept][rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    chi_square = ((seen - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum()
    freedom = max(1, len(seen) - 1)
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5


def test_positions_and_samples_draw_independently() -> None:
    """The stream of one seed over positions, and of samples at one position, are uniform too."""
    vocab, steps = 8, 700
    flat = torch.zeros(1, vocab)
    state = state_of([SamplerParams(temperature=1.0, seed=1)], vocab, [0], [])
    tokens = []
    for _ in range(steps):
        tokens += sample(flat.clone(), [0], state).token_ids
        state.append(0, tokens[-1])
    by_sample = SamplingState(vocab)
    for i in range(steps):
        by_sample.add(i, SamplerParams(temperature=1.0, seed=1), [0], i)
    others = sample(flat.expand(steps, vocab).contiguous(), range(steps), by_sample).token_ids
    for series in (tokens, others):
        pairs = np.bincount([a * vocab + b for a, b in pairwise(series)], minlength=64)
        expected = (steps - 1) / 64
        assert ((pairs - expected) ** 2 / expected).sum() < 63 + 5 * np.sqrt(126)
    assert tokens != others


@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_row_alone_equals_the_row_in_any_crowd(data: st.DataObject) -> None:
    """Tokens and logprobs, bit for bit, whatever else is sampled and in whatever order."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    vocab = data.draw(st.sampled_from([50, 300, 4500]))
    rows = data.draw(st.integers(2, 9))
    params = [replace(some_params(rng, vocab), bad_words=((11, 1),)) for _ in range(rows)]
    logits = logits_of(rows, vocab, seed=int(rng.integers(1000)))
    order = data.draw(st.permutations(range(rows)))
    state = state_of(params, vocab, [1, 2], [11, 4, 11])
    crowd = sample(logits[list(order)].clone(), order, state)
    for place, seq_id in enumerate(order):
        alone = sample(logits[seq_id : seq_id + 1].clone(), [seq_id], state)
        assert alone.token_ids[0] == crowd.token_ids[place]
        assert alone.logprobs[0] == crowd.logprobs[place]


def test_the_state_is_advanced_by_append_alone() -> None:
    params = [SamplerParams(temperature=1.0, seed=9)]
    logits = logits_of(1)
    state = state_of(params, output=[])
    first = sample(logits.clone(), [0], state).token_ids
    assert sample(logits.clone(), [0], state).token_ids == first
    seen = {first[0]}
    for _ in range(20):
        state.append(0, 1)
        seen |= set(sample(logits.clone(), [0], state).token_ids)
    assert len(seen) > 5


def test_layout_follows_the_rows() -> None:
    """A batch that loses a sequence, or runs in another order, is not sampled by the old layout."""
    params = [SamplerParams(temperature=1.0, seed=s, top_k=s + 1) for s in range(6)]
    logits = logits_of(6)
    state = state_of(params)
    whole = sample(logits.clone(), range(6), state).token_ids
    state.forget(2)
    rest = [5, 0, 1, 4, 3]
    assert sample(logits[rest].clone(), rest, state).token_ids == [whole[i] for i in rest]
    assert len(state) == 5


def test_masks_that_leave_nothing_are_lifted_for_that_token() -> None:
    base = dict(allowed_token_ids=(10, 20), temperature=1.0)
    logits = logits_of(3)
    params = [
        SamplerParams(**base, bad_words=((10,), (20,))),
        SamplerParams(**base, min_tokens=9, min_tokens_masked_ids=(10, 20, 30), num_logprobs=1),
        SamplerParams(
            temperature=0.0, min_tokens=9, min_tokens_masked_ids=tuple(range(VOCAB)), num_logprobs=1
        ),
    ]
    result = sample(logits.clone(), range(3), state_of(params))
    assert result.token_ids[0] in (10, 20) and result.token_ids[1] in (10, 20)
    assert result.token_ids[2] == int(logits[2].argmax())


@pytest.mark.parametrize("cut", [dict(), dict(top_k=5), dict(top_p=0.5), dict(temperature=0.0)])
@pytest.mark.parametrize("value", [-torch.inf, torch.nan])
def test_a_row_without_finite_logits_yields_token_0(cut: dict, value: float) -> None:
    logits = logits_of(3)
    logits[1] = value
    params = [SamplerParams(**({"temperature": 1.0, "seed": s} | cut)) for s in range(3)]
    got = tokens_of(logits, params)
    assert got[1] == 0
    good = tokens_of(logits[[0, 2]], [params[0], params[2]])
    assert [got[0], got[2]] == good


def test_masked_tokens_of_the_model_are_never_drawn() -> None:
    """Logits of -inf (a padded vocabulary) have no weight, at any uniform number."""
    logits = torch.full((500, 700), -torch.inf)
    logits[:, [256, 511, 699]] = 0.0
    for cut in (dict(), dict(top_p=0.99), dict(top_k=600)):
        params = [SamplerParams(temperature=2.0, seed=s, **cut) for s in range(500)]
        assert set(tokens_of(logits, params)) == {256, 511, 699}


def test_greedy_batch_leaves_the_logits_alone() -> None:
    logits = logits_of(4)
    before = logits.clone()
    state = state_of([SamplerParams()] * 4)
    assert sample(logits, range(4), state).logprobs == [None] * 4
    assert torch.equal(logits, before)
    assert choose_tokens(logits, range(4), state).tolist() == before.argmax(-1).tolist()


def test_greedy_is_the_best_token_by_the_common_order(reference) -> None:
    logits = (logits_of(50) * 2).round()
    assert tokens_of(logits, [SamplerParams()] * 50) == [
        reference.in_order(row)[0] for row in logits.numpy()
    ]


def test_wrong_shapes_are_refused() -> None:
    state = state_of([SamplerParams()] * 2)
    with pytest.raises(AssertionError, match="expected"):
        sample(torch.zeros(3, VOCAB), [0, 1], state)
    with pytest.raises(AssertionError, match="float32"):
        sample(torch.zeros(2, VOCAB, dtype=torch.bfloat16), [0, 1], state)
    with pytest.raises(AssertionError, match="already known"):
        state.add(1, SamplerParams(), [1])
