"""A layer's experts as an engine calls them: bf16, fp8, and integers of 4 bits in groups.

    python benchmarks/kernels/gpu_experts.py [--models qwen3-30b-a3b mixtral-8x7b]
        [--rows 1 8 32 256 2048] [--kinds bf16 fp8 int4] [--groups 128 32] [--skewed]
        [--cuts] [--separate]

Everything behind the router's choice: sorting, both products, the sum over a token's experts; the
choice apart. Choices are uniformly random, or, `--skewed`, Zipf's. So many layers that no weight
stays in the L2 cache, CUDA-graph replays. Printed are microseconds a layer, TB/s of those experts'
weights that a token is sent to, and TFLOP/s. First each kind of integers is compared with float64.
--cuts: the kernel of integers cut in other ways, too. --separate: experts of 4 bits one by one, not
recorded.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from octavo.arch import MoEConfig
from octavo.bench.roofline import time_calls, time_in_turns
from octavo.layers.experts import Experts, SeparateExperts, StackedExperts, route
from octavo.layers.experts_grouped import GroupedExperts
from octavo.layers.fp8 import Fp8Weight
from octavo.layers.grouped import GroupedWeight
from octavo.ops.gpu import experts_grouped
from octavo.ops.gpu.experts_grouped import Cut

DEVICE = torch.device("cuda")
L2_BYTES = 200_000_000
"""Of weights read between two reads of the same: several times the L2 cache."""


class Model(NamedTuple):
    hidden: int
    moe: MoEConfig


MODELS = {
    "qwen3-30b-a3b": Model(2048, MoEConfig(128, 8, 768, normalize=True)),
    "mixtral-8x7b": Model(4096, MoEConfig(8, 2, 14336, normalize=True)),
}


def packed(num_rows: int, width: int, group: int, kind: str = "points") -> GroupedWeight:
    """Random words, scales and zeros of about 1 / sqrt(width); kinds: of zeros, `ordered` too."""
    bits = 8 if kind == "8 bits" else 4
    shape = num_rows, width // group
    words = torch.randint(-(2**31), 2**31, (num_rows, width * bits // 32), device=DEVICE)
    scales = (torch.rand(shape, device=DEVICE) + 0.5).mul_(width**-0.5 / 2**bits * 3).half()
    zeros = torch.randint(0, 16, shape, device=DEVICE).half()
    if kind == "offsets":
        zeros = scales * -8
    return GroupedWeight(
        words.int(), scales, None if kind in ("point", "8 bits") else zeros, bits, group,
        (num_rows, width), kind, zero_point=2 ** (bits - 1), offsets=kind == "offsets",
        order=torch.randperm(width, device=DEVICE).int() if kind == "ordered" else None,
    )  # fmt: skip


def filled(model: Model, made: Experts, kind: str, group: int = 0) -> Experts:
    """Experts with random weights; all of a layer have the same, in memory of their own."""
    hidden, size = model.hidden, model.moe.expert_size
    if kind in ("bf16", "fp8"):
        both = torch.randn((2 * size, hidden), device=DEVICE).mul_(hidden**-0.5).bfloat16()
        last = torch.randn((hidden, size), device=DEVICE).mul_(size**-0.5).bfloat16()
        if kind == "fp8":
            codes = Fp8Weight.quantized(both), Fp8Weight.quantized(last)
            for expert in range(model.moe.num_experts):
                made.set_gate_up(
                    expert, codes[0].rows(slice(size)), codes[0].rows(slice(size, None))
                )
                made.set_down(expert, codes[1])
            return made
        for expert in range(model.moe.num_experts):
            made.set_gate_up(expert, both[:size], both[size:])
            made.set_down(expert, last)
        return made
    gate_up, down = packed(2 * size, hidden, group, kind), packed(hidden, size, group, kind)
    for expert in range(model.moe.num_experts):
        made.set_gate_up(expert, gate_up.rows(slice(size)), gate_up.rows(slice(size, None)))
        made.set_down(expert, down)
    return made


def layer_of(model: Model, kind: str, group: int) -> Experts:
    hidden, moe = model.hidden, model.moe
    if kind == "int4":
        return filled(model, GroupedExperts(moe, hidden, "silu"), "points", group)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn
    return filled(model, StackedExperts(moe, hidden, "silu", dtype, DEVICE), kind)


def chosen(model: Model, num_rows: int, skewed: bool) -> tuple[Tensor, Tensor]:
    count, top_k = model.moe.num_experts, model.moe.experts_per_token
    odds = torch.ones(count, device=DEVICE)
    if skewed:
        odds /= torch.arange(1, count + 1, device=DEVICE)
    ids = torch.multinomial(odds.expand(num_rows, -1), top_k)
    return ids, torch.rand((num_rows, top_k), device=DEVICE)


def error(kind: str, group: int, num_rows: int) -> float:
    """||out - expected|| / ||expected|| of a small layer."""
    model = Model(1024, MoEConfig(6, 2, 512))
    size = model.moe.expert_size
    made = GroupedExperts(model.moe, model.hidden, "silu")
    wide = []
    for expert in range(model.moe.num_experts):
        both, last = packed(2 * size, 1024, group, kind), packed(1024, size, group, kind)
        made.set_gate_up(expert, both.rows(slice(size)), both.rows(slice(size, None)))
        made.set_down(expert, last)
        wide.append((both.dequantize(torch.float64), last.dequantize(torch.float64)))
    assert made.capturable
    x = torch.randn((num_rows, 1024), device=DEVICE).bfloat16()
    ids, weights = chosen(model, num_rows, False)
    ids[: num_rows // 2, 0] = 3
    ids[: num_rows // 2, 1] = 5  # some experts get many rows
    expected = torch.zeros((num_rows, 1024), dtype=torch.float64, device=DEVICE)
    for expert, (both, last) in enumerate(wide):
        gate, up = (x.double() @ both.t()).chunk(2, 1)
        counts = ((ids == expert) * weights).sum(1).double()[:, None]
        expected += counts * ((silu(gate) * up) @ last.t())
    out = made(x, ids, weights).double()
    return float((out - expected).norm() / expected.norm())


def measure(name: str, model: Model, layers: list[Experts], num_rows: int, skewed: bool) -> None:
    torch.manual_seed(num_rows)
    x = torch.randn((num_rows, model.hidden), device=DEVICE).bfloat16()
    picks = [chosen(model, num_rows, skewed) for _ in layers]
    share = sum(len(ids.unique()) for ids, _ in picks) / len(layers) / model.moe.num_experts
    s = time_calls(
        [partial(layer, x, *pick) for layer, pick in zip(layers, picks, strict=True)], DEVICE
    )
    flops = 6 * num_rows * model.moe.experts_per_token * model.hidden * model.moe.expert_size
    print(
        f"{name:24} {num_rows:5} rows {1e6 * s:9.2f} us a layer, "
        f"{layers[0].num_bytes * share / s / 1e12:5.2f} TB/s, {flops / s / 1e12:6.1f} TFLOP/s",
        flush=True,
    )


def measure_choice(name: str, model: Model, num_rows: int) -> None:
    """The kernel that chooses experts, beside torch's."""
    logits = torch.randn((num_rows, model.moe.num_experts), device=DEVICE).bfloat16()

    def by_torch() -> Tensor:
        scores = logits.float().softmax(-1)
        weights, _ = scores.topk(model.moe.experts_per_token, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True)

    (own, other) = time_in_turns([[partial(route, logits, model.moe)] * 8, [by_torch] * 8], DEVICE)
    print(
        f"{name} choice {num_rows:13} rows {1e6 * own:9.2f} us a layer, torch's {1e6 * other:.2f}"
    )


def measure_separate(model: Model, group: int, num_rows: int) -> None:
    """One by one, as before there were stacks: the host waits, nothing can be recorded."""
    made = filled(model, SeparateExperts(model.moe, model.hidden, "silu"), "points", group)
    x = torch.randn((num_rows, model.hidden), device=DEVICE).bfloat16()
    pick, times = chosen(model, num_rows, False), []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        made(x, *pick)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    print(f"one by one, {group:20} {num_rows:5} rows {1e6 * sorted(times)[3]:9.2f} us a layer")


CUTS = [
    Cut(16, 64, 4, 4), Cut(16, 64, 4, 6), Cut(16, 64, 4, 8), Cut(16, 128, 8, 5),
    Cut(32, 64, 4, 4), Cut(32, 64, 4, 6), Cut(64, 64, 4, 3), Cut(64, 64, 4, 4),
    Cut(64, 128, 8, 3), Cut(64, 128, 4, 3), Cut(128, 64, 4, 2), Cut(128, 64, 4, 3),
    Cut(128, 128, 8, 2), Cut(128, 128, 8, 3),
]  # fmt: skip


def measure_cuts(model: Model, layers: list[Experts], num_rows: int, skewed: bool) -> None:
    """Other tiles than the kernel's own, of as many rows, and of half and twice as many."""
    own_tiles, own_cut = experts_grouped.tiles, experts_grouped._cut
    num_pairs = num_rows * model.moe.experts_per_token
    own = own_tiles(num_pairs, model.moe.num_experts)[0]
    for cut in CUTS:
        if cut.rows not in (own // 2, own, 2 * own):
            continue

        def sized(
            pairs: int, count: int, block_m: int | None = None, cut: Cut = cut
        ) -> tuple[int, int]:
            return own_tiles(pairs, count, block_m or cut.rows)

        experts_grouped.tiles = sized
        experts_grouped._cut = lambda block_m, cut=cut: cut  # type: ignore[misc]
        try:
            measure("  " + "/".join(map(str, cut)), model, layers, num_rows, skewed)
        except Exception as failure:
            print(f"  {cut}: {type(failure).__name__} {str(failure)[:80]}")
    experts_grouped.tiles, experts_grouped._cut = own_tiles, own_cut


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 256, 2048])
    parser.add_argument("--kinds", nargs="+", default=["bf16", "fp8", "int4"])
    parser.add_argument("--groups", type=int, nargs="+", default=[128, 32])
    parser.add_argument("--skewed", action="store_true")
    parser.add_argument("--cuts", action="store_true")
    parser.add_argument("--separate", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    for kind, group in (
        ("points", 128), ("points", 32), ("point", 64), ("ordered", 128), ("offsets", 32),
        ("8 bits", 16), ("8 bits", 128),
    ):  # fmt: skip
        errors = [error(kind, group, num_rows) for num_rows in (1, 16, 90, 250, 1000)]
        print(f"{kind}, groups of {group}: errors", *map("{:.1e}".format, errors), flush=True)
        assert max(errors) < 1e-2, "wrong results"
    for name in args.models:
        model = MODELS[name]
        for num_rows in args.rows:
            measure_choice(name, model, num_rows)
        for kind in args.kinds:
            for group in args.groups if kind == "int4" else [0]:
                layers = [layer_of(model, kind, group)]
                sent = layers[0].num_bytes * model.moe.experts_per_token / model.moe.num_experts
                layers += [layer_of(model, kind, group) for _ in range(int(L2_BYTES / sent))]
                for num_rows in args.rows:
                    what = f"{kind} in {group}" if group else kind
                    measure(f"{name} {what}", model, layers, num_rows, args.skewed)
                    if args.cuts and kind == "int4":
                        measure_cuts(model, layers, num_rows, args.skewed)
                del layers
                torch.cuda.empty_cache()
        for num_rows in args.rows if args.separate else ():
            measure_separate(model, args.groups[0], num_rows)


if __name__ == "__main__":
    main()
