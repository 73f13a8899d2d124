"""Sampling kernels against float64: argmax, edits, draws, logprobs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.ops.gpu import sampling as ops
from octavo.ops.gpu.logprobs import token_logprobs
from octavo.ops.gpu.sampling_top import PAIRS, draw_top

NAN, INF = math.nan, math.inf


def argmax_of(logits: Tensor) -> tuple[list[int], list[int]]:
    n, device = len(logits), logits.device
    token_ids = torch.full((n,), -7, dtype=torch.int64, device=device)
    finite = torch.full((n,), -7, dtype=torch.int32, device=device)
    ops.argmax_into(logits, token_ids, finite, ops.argmax_scratch(n + 1, device))
    return token_ids.tolist(), finite.tolist()


@pytest.mark.parametrize("vocab", [1, 2, 97, 2048, 2049, 9001])
def test_argmax_takes_the_smallest_of_equals(
    device: torch.device, generator: torch.Generator, vocab: int
) -> None:
    logits = torch.randn(3, vocab, generator=generator, device=device).mul_(2).round_()
    token_ids, finite = argmax_of(logits)
    assert token_ids == np.argmax(logits.cpu().numpy(), axis=1).tolist()
    assert finite == [1, 1, 1]


def test_argmax_of_rows_apart(device: torch.device, generator: torch.Generator) -> None:
    logits = torch.randn(2, 3, 50, generator=generator, device=device)[:, 1]
    assert argmax_of(logits)[0] == logits.argmax(1).tolist()


def test_argmax_tells_what_is_not_finite(device: torch.device) -> None:
    logits = torch.zeros(6, 5000, device=device)
    logits[0, 4999] = NAN
    logits[1, 17] = INF
    logits[2] = -INF
    logits[3] = NAN
    logits[4] = -INF
    logits[4, 4998] = -1e30
    token_ids, finite = argmax_of(logits)
    assert finite == [0, 0, 0, 0, 1, 1]
    assert token_ids[2] == 0 and token_ids[4:] == [4998, 0]
    assert all(0 <= token_id < 5000 for token_id in token_ids)


def test_edits_and_their_undoing(device: torch.device, generator: torch.Generator) -> None:
    logits = torch.randn(3, 301, generator=generator, device=device)
    before = logits.clone()
    rows = torch.tensor([0, 0, 1, 2, 2, 2], dtype=torch.int32, device=device)
    ids = torch.tensor([0, 300, 5, 7, 8, 9], dtype=torch.int32, device=device)
    counts = torch.tensor([-1.0, 3, 0, 1, -1, 2], device=device)
    biases = torch.tensor([2.5, 0, 0, -1, -INF, -INF], device=device)
    penalties = torch.tensor([[2.0, 1.5, 0.5], [0.3, 0, -1], [0.7, 0.25, 0.0]], device=device)
    olds = ops.edit_logits(logits, rows, ids, counts, biases, *penalties)
    expected = before.clone()
    for row, token, count, bias in zip(
        rows.tolist(), ids.tolist(), counts.tolist(), biases.tolist(), strict=True
    ):
        x = before[row, token] + bias
        if count >= 0:
            x = x / penalties[0, row] if x > 0 else x * penalties[0, row]
            x = x - penalties[1, row] * count - (penalties[2, row] if count > 0 else 0.0)
        expected[row, token] = x
    torch.testing.assert_close(logits, expected)
    assert torch.equal(olds, before[rows.long(), ids.long()])
    ops.restore_logits(logits, rows, ids, olds)
    assert torch.equal(logits, before)


def poisoned_runs(num_rows: int, vocab: int, device: torch.device) -> ops.Runs:
    runs = ops.Runs.of(num_rows, vocab, device)
    for part in runs:
        part.fill_(-7)
    return runs


class Draws:
    """Rows of logits, drawn from once by the kernels."""

    def __init__(self, logits: Tensor, temperature, top_k, top_p, min_p, numbers, capacity=8192):
        n, device = len(logits), logits.device

        def full(value, dtype):
            return torch.full((n,), value, dtype=dtype, device=device)

        def of(values, dtype):
            return torch.tensor(values, dtype=dtype, device=device)

        runs = poisoned_runs(n, logits.shape[1], device)
        self.token_ids, finite = full(-7, torch.int64), full(-7, torch.int32)
        bests, leasts = full(NAN, torch.float32), full(NAN, torch.float32)
        totals, self.cuts = full(NAN, torch.float64), full(NAN, torch.float32)
        self.ties = full(-7, torch.int32)
        tops = [k > 0 or p < 1 or m > 0 for k, p, m in zip(top_k, top_p, min_p, strict=True)]
        modes = of([ops.TOP if top else ops.DRAW for top in tops], torch.int32)
        rates = of([math.log2(math.e) / t for t in temperature], torch.float32)
        numbers = of(numbers, torch.float64)
        ops.draw_all(
            logits, modes, rates, numbers, runs, self.token_ids, finite, bests, leasts, totals
        )
        scratch = (
            torch.full((n, capacity + PAIRS), NAN, device=device),
            torch.full((n, capacity + PAIRS), -7, dtype=torch.int32, device=device),
        )
        rows = of([row for row, top in enumerate(tops) if top], torch.int32)
        draw_top(
            logits, rows, rates, of(min_p, torch.float32), of(top_k, torch.int32),
            of(top_p, torch.float64), numbers, bests, leasts, totals, scratch, self.token_ids,
            self.cuts, self.ties,
        )  # fmt: skip
        self.finite = finite.tolist()
        self.tokens = self.token_ids.tolist()


def kept_weights(x: np.ndarray, temperature, top_k, top_p, min_p) -> np.ndarray:
    """float64 weights of a row; 0 of what is not kept. By definition, with a sort."""
    weights = np.exp((x - x.max()) / temperature)
    weights[weights < min_p] = 0
    order = np.argsort(-x, kind="stable")
    if top_k:
        weights[order[top_k:]] = 0
    if top_p < 1:
        upto = np.cumsum(weights[order])
        weights[order[1:][upto[:-1] >= top_p * upto[-1]]] = 0
    return weights


def check(draws: Draws, logits: Tensor, temperature, top_k, top_p, min_p, numbers) -> None:
    vocab = logits.shape[1]
    for row, args in enumerate(zip(temperature, top_k, top_p, min_p, strict=True)):
        x = logits[row].double().cpu().numpy()
        weights = kept_weights(x, *args)
        if args[1] or args[2] < 1 or args[3]:
            cut, tie = float(draws.cuts[row]), int(draws.ties[row])
            kept = (x > cut) | ((x == cut) & (np.arange(vocab) <= tie))
            kept &= np.exp((x - x.max()) / args[0]) >= args[3]
            assert np.array_equal(kept, weights > 0), (row, args, kept.sum(), (weights > 0).sum())
        upto = np.cumsum(weights)
        expected = int(np.searchsorted(upto, numbers[row] * upto[-1], side="right"))
        assert draws.tokens[row] == expected, (row, args)


WAYS = [
    (1.0, 0, 1.0, 0.0), (0.3, 0, 1.0, 0.0), (1.0, 50, 1.0, 0.0), (1.0, 0, 0.9, 0.0),
    (2.0, 40, 0.8, 0.0), (1.0, 0, 1.0, 0.1), (5.0, 300, 0.97, 0.02),
]  # fmt: skip


@pytest.mark.parametrize("capacity", [8192, 64, 8], ids=["fits", "bracket", "never"])
def test_draws(device: torch.device, generator: torch.Generator, capacity: int) -> None:
    """Whether what may be kept can be copied out, or only the bracket, or not even that."""
    ways = WAYS if capacity > 8 else WAYS[2:5]
    vocab = 4501 if capacity > 8 else 2101
    logits = torch.randn(len(ways), vocab, generator=generator, device=device) * 2
    logits = (logits * 8).round() / 8  # equal ones at every boundary
    columns = [list(column) for column in zip(*ways, strict=True)]
    numbers = np.random.default_rng(capacity).random(len(ways)).tolist()
    check(Draws(logits, *columns, numbers, capacity), logits, *columns, numbers)


def test_draws_at_the_edges(device: torch.device, generator: torch.Generator) -> None:
    """Ties at the cut, fewer finite logits than top_k, tiny top_p, min_p of 1, tiny weights."""
    logits = torch.randn(9, 70, generator=generator, device=device)
    logits[0] = 1.5
    logits[1, :68] = -INF
    logits[2, 33:35] = 9.0
    logits[3, 5:60] = 4.0
    logits[4] = -INF
    logits[4, 69] = -3.0
    logits[5] *= 1e-30
    logits[6] *= 1e30
    logits[7] = 0.0
    logits[7, ::2] = -0.0
    top_k = [7, 50, 0, 20, 5, 3, 0, 5, 69]
    top_p = [1.0, 0.9, 1e-9, 0.5, 0.5, 1.0, 0.9, 1.0, 0.9999]
    min_p = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    temperature = [1.0] * 9
    numbers = np.random.default_rng(0).random(9).tolist()
    draws = Draws(logits, temperature, top_k, top_p, min_p, numbers, capacity=16)
    check(draws, logits, temperature, top_k, top_p, min_p, numbers)
    assert draws.finite == [1] * 9


def test_damaged_rows_end_and_are_told(device: torch.device) -> None:
    logits = torch.zeros(4, 70, device=device)
    logits[0] = NAN
    logits[1, 3] = INF
    logits[2] = -INF
    logits[3, 5] = NAN
    draws = Draws(logits, [1.0] * 4, [5, 0, 5, 0], [0.5, 0.5, 1.0, 1.0], [0.0, 0.1, 0.0, 0.0],
                  [0.5] * 4)  # fmt: skip
    assert draws.finite == [0] * 4
    assert all(0 <= token_id < 70 for token_id in draws.tokens)


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
def test_extreme_numbers_draw_kept_tokens(device: torch.device, number: float) -> None:
    logits = torch.full((3, 5000), -INF, device=device)
    logits[:, 100:4900] = -20.0
    logits[:, 4000] = 1.0
    draws = Draws(logits, [1.0] * 3, [0, 60, 0], [1.0, 1.0, 0.5], [0.0] * 3, [number] * 3)
    assert draws.tokens == ([100, 100, 4000] if number == 0 else [4899, 4000, 4000])


def test_logprobs(device: torch.device, generator: torch.Generator) -> None:
    logits = torch.randn(5, 4600, generator=generator, device=device) * 3
    logits[1, :4000] = -INF
    rows = torch.tensor([4, 1, 2], dtype=torch.int32, device=device)
    token_rows = torch.tensor([0, 2, 1], dtype=torch.int32, device=device)
    token_ids = torch.tensor([17, 4599, 4100], device=device)
    floats = [torch.full((3,), NAN, device=device) for _ in range(3)]
    ranks = torch.full((3,), -7, dtype=torch.int32, device=device)
    runs = poisoned_runs(3, 4600, device)
    token_logprobs(logits, rows, token_rows, token_ids, runs, floats[0], ranks, *floats[1:])
    chosen = token_ids[token_rows.long()][:, None]
    picked = logits[rows.long()]
    expected = torch.log_softmax(picked.double(), dim=-1).gather(1, chosen)[:, 0]
    torch.testing.assert_close(floats[0].double(), expected, atol=2e-6, rtol=1e-6)
    assert torch.equal(ranks, 1 + (picked > picked.gather(1, chosen)).sum(1, dtype=torch.int32))
