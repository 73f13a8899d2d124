"""What a replica can do, by arithmetic: the steady state of a batch, without simulating anything.

A batch of B sequences makes B tokens a step. For it to stay that large, the prompts of as many
requests must be computed beside it as end in it, B / output of them. So a mean step of t(B)
seconds serves B / (output x t(B)) requests a second; and of `rate` requests a second, each in the
batch for output x t(B) seconds, rate x output x t(B) are in flight (Little's law).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.attended import attended, attended_pairs
from octavo.lab.costs import StepCosts, StepShape
from octavo.lab.slices import Slice
from octavo.util import cdiv, human_bytes

MAX_BATCH = 4096
"""Sequences; what no engine runs at a time."""
_LEAST_IDLE = 0.02
WATERMARK = 0.01
"""Of the pool, kept free when admitting (`SimConfig.watermark`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One replica: a model on some GPUs, and what that leaves."""

    num_gpus: int
    """Tensor parallel degree."""
    costs: StepCosts
    pool_bytes: int
    """For KV, over all its GPUs."""
    token_bytes: int
    """KV of a token in all layers, over all its GPUs."""
    windows: tuple[int, ...] = (0,)
    """See `SimConfig.windows`: a block is of one such group of layers."""
    layer_windows: tuple[int, ...] = (0,)
    """See `SimConfig.layer_windows`."""
    arithmetic: tuple[str, ...] = ()
    """How the pool came to its size, line by line."""

    def num_blocks(self, block_size: int) -> int:
        """Blocks of that many tokens in the pool."""
        return self.pool_bytes // self.block_bytes(block_size)

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block of that many tokens, over all its GPUs."""
        return self.token_bytes * block_size // len(self.windows)

    @property
    def num_slots(self) -> int:
        """Tokens that the pool holds, each in all layers."""
        return self.pool_bytes // self.token_bytes


@dataclass(frozen=True, slots=True)
class Load:
    """A workload's means, in tokens."""

    input: float
    """Prompt of a request."""
    output: float
    """Output of a sequence."""
    seqs: float
    """Sequences of a request."""
    context: float
    """Length of a sequence that is found in the batch at a random time: long outputs stay longer,
    so this is the mean of prompt + output / 2, weighted by output."""

    computed: float
    """Of the prompt, what is computed: what is left if all that prompts share is kept."""
    read: float
    """Of the context, what attention reads, mean over layers: some look back a window only."""
    layer_windows: tuple[int, ...] = (0,)
    """See `SimConfig.layer_windows`."""

    @classmethod
    def of(cls, part: Slice, prefixes: bool = False, layer_windows: tuple[int, ...] = (0,)) -> Load:
        """The means of a slice. prefixes: whether prompts are found again."""
        computed = sum(part.new_tokens()) / len(part.requests) if prefixes else part.mean_input
        requests = part.requests
        outputs = sum(r.num_output * r.num_seqs for r in requests)
        seqs = sum(r.num_seqs for r in requests)
        held = sum(r.num_seqs * r.num_output * (r.num_input + r.num_output / 2) for r in requests)
        context = read = held / outputs
        if any(layer_windows):
            read = sum(
                r.num_seqs * attended_pairs(r.num_input, r.num_output, layer_windows)
                for r in requests
            ) / outputs  # fmt: skip
        return cls(
            part.mean_input, outputs / seqs, seqs / len(requests), context, computed, read,
            layer_windows,
        )  # fmt: skip

    def decodes(self, batch: float) -> StepShape:
        """A step in which a batch decodes, and nothing else."""
        return StepShape(0, 0, round(batch), round(batch * self.read), round(batch))

    def mixed(self, batch: float, prompts: float) -> StepShape:
        """The same with so many prompts beside it."""
        return self.decodes(batch)._replace(
            num_prefill_tokens=round(prompts * self.computed),
            prefill_context=round(prompts * self.pairs(self.computed)),
            num_samples=round(batch + prompts),
            num_prompts=max(1, round(prompts)),
        )

    def step_s(self, costs: StepCosts, batch: float) -> float:
        """A mean step of the steady state: with the prompts of as many requests as end in it; of
        less than one, a share of the steps has one."""
        prompts = batch / (self.output * self.seqs)
        full = costs.step_s(self.mixed(batch, max(1.0, prompts)))
        if prompts >= 1:
            return full
        return prompts * full + (1 - prompts) * costs.step_s(self.decodes(batch))

    def pairs(self, num_tokens: float) -> float:
        """Pairs of one of the last so many tokens of a mean prompt and a token that it looks at."""
        return attended_pairs(self.input - num_tokens, num_tokens, self.layer_windows)

    def slots(self, block_size: int, windows: tuple[int, ...] = (0,)) -> float:
        """Slots that a sequence of the batch takes: half of its last block is empty, and where a
        window ends half of the first. windows: of the groups of layers, each of which takes some.
        """
        num_ends = sum(1 + (0 < window < self.context) for window in windows)
        return len(windows) * attended(self.context, windows) + num_ends * block_size / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What one replica can do under an SLO."""

    placement: Placement
    load: Load
    block_size: int
    by_memory: int
    """Sequences that the pool holds."""
    by_tpot: int
    """Largest batch whose step is not longer than the TPOT allows; 0: not even one sequence."""
    batch: int
    """The smaller of the two."""
    step_s: float
    """Of that batch."""
    rate: float
    """Requests a second that it serves."""
    likely_rate: float
    """A guess: less of it, the more of the TTFT a long prompt takes by itself, for nobody may be in
    its way then."""
    alone_tpot_s: float
    """A step of one sequence: no TPOT is shorter."""
    alone_ttft_s: float
    """A step of the prompt at the SLO's percentile alone: no TTFT is shorter."""
    prefixes: bool = False
    """Whether prompts are found again: then more sequences fit than the means say."""

    def least(self, rate: float) -> int:
        """Replicas without which `rate` requests a second cannot be served."""
        return 1 if self.prefixes else cdiv_up(rate, self.rate)

    def in_flight(self, rate: float) -> float:
        """Sequences in flight at a rate below what it serves: B = rate x output x t(B)."""
        tokens = rate * self.load.output * self.load.seqs
        costs, load = self.placement.costs, self.load
        return _largest(self.batch, lambda b: b <= tokens * load.step_s(costs, b))


def capacity_of(
    placement: Placement,
    part: Slice,
    *,
    ttft_s: float,
    tpot_s: float,
    percentile: float,
    block_size: int,
    prefixes: bool = False,
) -> Capacity:
    """By the means of a slice. Where prompts are found again they are computed as if all that they
    share were kept, and held as if nothing were."""
    load, costs = Load.of(part, prefixes, placement.layer_windows), placement.costs
    slots = placement.num_slots * len(placement.windows)
    by_memory = int(slots * (1 - WATERMARK) / load.slots(block_size, placement.windows))
    by_tpot = _largest(MAX_BATCH, lambda b: load.step_s(costs, b) <= tpot_s)
    batch = min(by_memory, by_tpot)
    step_s = load.step_s(costs, max(1, batch))
    tokens = part.new_tokens() if prefixes else [r.num_input for r in part.requests]
    pairs = sorted(
        (num, round(attended_pairs(r.num_input - num, num, placement.layer_windows)))
        for num, r in zip(tokens, part.requests, strict=True)
    )
    prompt, pairs_at = pairs[min(len(pairs) - 1, cdiv(len(pairs) * int(percentile * 10), 1000))]
    context = round(load.read)
    alone_ttft_s = costs.step_s(StepShape(prompt, pairs_at, 0, 0, 1, num_prompts=1))
    rate = batch / (load.output * load.seqs * step_s)
    return Capacity(
        placement=placement,
        load=load,
        block_size=block_size,
        by_memory=by_memory,
        by_tpot=by_tpot,
        batch=batch,
        step_s=step_s,
        rate=rate,
        likely_rate=rate * max(_LEAST_IDLE, 1 - alone_ttft_s / ttft_s),
        alone_tpot_s=costs.step_s(StepShape(0, 0, 1, context, 1)),
        alone_ttft_s=alone_ttft_s,
        prefixes=prefixes,
    )


def _largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number of 1..limit that fits, where what fits is a beginning of it; 0: none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def arithmetic(found: Capacity, rate: float, num_replicas: int, tpot_s: float) -> list[str]:
    """The reckoning, line by line, for `num_replicas` that share `rate` requests a second."""
    placement, load, size = found.placement, found.load, found.block_size
    share = rate / num_replicas
    flight = found.in_flight(share)
    step_s = load.step_s(placement.costs, max(1, flight))
    slots, of_it = load.slots(size, placement.windows), f"+ {size} / 2"
    groups, groups_phrase = len(placement.windows), ""
    if any(placement.windows):
        of_it = f"in {groups} groups of layers, less behind windows"
        groups_phrase = f"{groups} x "
    shared = "; what prompts share is held once in the simulations, but not here"
    computed = f" ({load.computed:,.0f} of it new)" * found.prefixes
    return [
        *placement.arithmetic,
        f"pool: {human_bytes(placement.pool_bytes)} / {placement.token_bytes:,} B a token = "
        f"{placement.num_slots:,} tokens = {placement.num_blocks(size):,} blocks of {size}",
        f"workload, means: prompt {load.input:,.0f}{computed}, output {load.output:,.0f} tokens"
        + (f", {load.seqs:.3g} sequences a request" if load.seqs > 1 else "")
        + f"; a sequence in the batch holds {load.context:,.0f} tokens "
        f"{of_it} = {slots:,.0f} slots",
        f"memory: {groups_phrase}{placement.num_slots:,} x {1 - WATERMARK:.0%} / {slots:,.0f} = "
        f"{found.by_memory:,} sequences in flight at most",
        f"compute: a step of {max(1, found.by_tpot):,} sequences takes "
        f"{1e3 * load.step_s(placement.costs, max(1, found.by_tpot)):.1f} ms, "
        f"the largest within {1e3 * tpot_s:g} ms a token",
        f"so a replica serves {found.batch:,} / ({load.output * load.seqs:,.0f} tokens x "
        f"{1e3 * found.step_s:.1f} ms) = {found.rate:.3g} requests a second at most, and "
        f"{rate:.4g} of them need at least {cdiv_up(rate, found.rate)} "
        f"replica{'s' * (cdiv_up(rate, found.rate) > 1)}{shared * found.prefixes}",
        f"Little's law, with {num_replicas}: {share:.3g} requests a second x "
        f"{load.output * load.seqs:,.0f} tokens x {1e3 * step_s:.1f} ms = "
        f"{share * load.output * load.seqs * step_s:,.0f} sequences in flight in each",
    ]


def cdiv_up(amount: float, each: float) -> int:
    """How many of `each` it takes, at least 1."""
    return max(1, -int(-amount // each)) if each > 0 else 0
