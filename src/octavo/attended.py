"""What attention reads where some layers look back a window only: means over layers.

Costs count pairs of tokens as if all layers did the same (`StepShape`), and what a pair takes does
not depend on the layer. So the mean over layers of what each looks at, times the layers, is exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from octavo.plan import StepCounts, StepPlan


def attended(num_tokens: float, windows: Sequence[int]) -> float:
    """Tokens that the last one of so many looks at, itself included, mean over layers. windows: of
    each layer (or group of layers), 0: all."""
    if len(windows) == 1 and not windows[0]:
        return num_tokens
    total = sum(
        count * (min(num_tokens, window) if window else num_tokens)
        for window, count in Counter(windows).items()
    )
    return total / len(windows)


def attended_pairs(start: float, num_tokens: float, windows: Sequence[int]) -> float:
    """Pairs of one of `num_tokens` tokens behind `start` others and a token that it looks at: the
    sum of `attended` over them, mean over layers."""
    total = 0.0
    for window, count in Counter(windows).items():
        inside = num_tokens
        if window:
            inside = max(0.0, min(num_tokens, window - start))
        pairs = inside * start + inside * (inside + 1) / 2 + (num_tokens - inside) * window
        total += count * pairs
    return total / len(windows)


def counts_within(plan: StepPlan, windows: Sequence[int]) -> StepCounts:
    """`StepPlan.counts` without pairs of tokens that are further apart than a window."""
    counts = plan.counts()
    if not any(windows):
        return counts
    pairs = context = 0.0
    for _, start, num_tokens, _, _, sample, _, _ in plan.seqs:
        if num_tokens == 1 and sample:
            context += attended(start + 1, windows)
        else:
            pairs += attended_pairs(start, num_tokens, windows)
    return counts._replace(prefill_context=round(pairs), decode_context=round(context))
