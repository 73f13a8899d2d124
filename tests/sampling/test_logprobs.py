"""Logprobs: of the raw distribution, with ranks, whatever was done to the logits to sample."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from octavo.request import SamplerParams
from octavo.sampling import (
    BeamRows,
    SamplingState,
    beam_candidates,
    prompt_logprobs,
    sample,
    sampling_bytes,
)
from octavo.sampling import draw as draw_module


def check(reference, found, logits, token_id: int, num_top: int) -> None:
    logits = logits.numpy()
    expected = reference.logprobs(logits)
    order = reference.in_order(logits)[:num_top]
    assert found.token_id == token_id
    assert found.logprob == pytest.approx(expected[token_id], abs=2e-6)
    assert found.rank == 1 + int((logits > logits[token_id]).sum())
    assert [token for token, _ in found.top] == order
    assert [lp for _, lp in found.top] == pytest.approx([expected[t] for t in order], abs=2e-6)


@pytest.mark.parametrize("vocab", [1, 5, 64, 300, 4500])
def test_mixed_batch(reference, vocab: int) -> None:
    """Rows with no, own-only and several logprobs, changed by masks or not, in one step."""
    torch.manual_seed(vocab)
    logits = (torch.randn(12, vocab) * 16).round() / 8
    state = SamplingState(vocab)
    wanted = [None, 0, 3, 50]
    for i in range(12):
        state.add(
            i,
            SamplerParams(
                temperature=[0.0, 1.0, 0.7][i % 3],
                top_p=0.9,
                seed=i,
                num_logprobs=wanted[i % 4],
                logit_bias=((0, 8.0),) if i % 2 else (),
                allowed_token_ids=(0,) if i > 9 else None,
                repetition_penalty=1.5 if i > 6 else 1.0,
            ),
            [0],
        )
    result = sample(logits.clone(), range(12), state)
    for i in range(12):
        num_top = wanted[i % 4]
        found = result.logprobs[i]
        if num_top is None:
            assert found is None
        else:
            check(reference, found, logits[i], result.token_ids[i], min(num_top, vocab))


def test_asking_for_logprobs_changes_no_token() -> None:
    torch.manual_seed(3)
    logits = torch.randn(30, 400)
    tokens = []
    for num_logprobs in (None, 4):
        state = SamplingState(400)
        for i in range(30):
            state.add(
                i,
                SamplerParams(
                    temperature=1.0, seed=i, presence_penalty=1.0, num_logprobs=num_logprobs
                ),
                [1],
            )
            state.append(i, 5)
        tokens.append(sample(logits.clone(), range(30), state).token_ids)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_prompt_logprobs(reference, as_tensor: bool) -> None:
    torch.manual_seed(0)
    logits = torch.randn(37, 200)
    targets = torch.randint(0, 200, (37,))
    found = prompt_logprobs(logits, targets if as_tensor else targets.tolist(), 4)
    assert len(found) == 37
    for row, target, each in zip(logits, targets.tolist(), found, strict=True):
        check(reference, each, row, target, 4)


def test_pieces_do_not_change_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(11, 700)
    whole = prompt_logprobs(logits, list(range(11)), 3)
    monkeypatch.setattr(draw_module, "CHUNK_ELEMENTS", 1500)
    assert prompt_logprobs(logits, list(range(11)), 3) == whole


@pytest.mark.parametrize("threads", [1, 2])
def test_one_long_row_equals_the_row_among_others(threads: int) -> None:
    """A row longer than the library's threshold for splitting a sum between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        logits = torch.randn(3, 150_000)
        together = prompt_logprobs(logits, [5, 6, 7], 2)
        for i in range(3):
            assert prompt_logprobs(logits[i : i + 1], [5 + i], 2) == [together[i]]
    finally:
        torch.set_num_threads(before)


def test_finite_for_extreme_logits() -> None:
    logits = torch.tensor([[1e30, -1e30, 0.0], [-torch.inf, 0.0, -torch.inf]])
    sure, masked = prompt_logprobs(logits, [0, 1], 1)
    assert sure.logprob == 0.0 and masked.logprob == 0.0
    assert sure.rank == masked.rank == 1


def peak_bytes(work) -> int:
    """Most bytes that are held at one time while `work` runs, beyond what was there."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        work()
    # numpy's arrays are seen by tracemalloc; its peak may come at another time, so the sum bounds.
    tracemalloc.start()
    work()
    numpy_peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    now = peak = 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak + numpy_peak


@pytest.mark.parametrize(
    "params",
    [
        dict(),
        dict(top_k=50),
        dict(top_p=0.999, temperature=50.0),
        dict(temperature=0.0, logit_bias=((1, 1.0),)),
        dict(repetition_penalty=1.1, min_p=0.01, top_k=700),
    ],
    ids=str,
)
def test_stated_bytes_bound_what_is_held(params: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_module, "CHUNK_ELEMENTS", 1 << 17)
    vocab, rows = 12_000, 32
    logits = torch.randn(rows, vocab)
    state = SamplingState(vocab)
    for i in range(rows):
        each = SamplerParams(**({"temperature": 1.0, "seed": i, "num_logprobs": 5} | params))
        state.add(i, each, list(range(50)))
    held = peak_bytes(lambda: sample(logits, range(rows), state))
    bound = sampling_bytes(rows, vocab)
    assert 0 < held <= bound
    assert bound < 4 * logits.numel() * 4  # pieces of 10 rows, far from 32


@pytest.mark.parametrize("vocab", [320, 12_000])
def test_stated_bytes_bound_beams(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_module, "CHUNK_ELEMENTS", 1 << 17)
    logits = torch.randn(64, vocab)
    for width, num_candidates in ((4, 8), (64, 128), (64, 512), (2, 4)):
        groups = [
            BeamRows(tuple(range(i, i + width)), (-1.0,) * width, num_candidates, 0.5)
            for i in range(0, 64, width)
        ]
        held = peak_bytes(lambda groups=groups: beam_candidates(logits, groups))
        assert 0 < held <= sampling_bytes(64, vocab), (width, num_candidates)
