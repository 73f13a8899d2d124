"""Draws the pictures of docs/memory.md: from runs of the engine with the default model, and of the
lab's simulator, which schedules and allocates with the same code.

python docs/make_pictures.py            # writes docs/images/*.svg
python docs/make_pictures.py --png DIR  # and PNGs of the same into DIR, to look at
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import KVPolicy
from octavo.lab.arrivals import poisson
from octavo.lab.block_map import BlockMap, block_map, map_at
from octavo.lab.compare import compare
from octavo.lab.config import POLICIES, SimConfig
from octavo.lab.costs import FixedCosts
from octavo.lab.gpus import find_gpu, find_software
from octavo.lab.lengths import draw_lengths
from octavo.lab.plots import save
from octavo.lab.plots_blocks import block_maps, caption_of
from octavo.lab.roofline import RooflineCosts
from octavo.lab.shapes import find_shape
from octavo.lab.trace import TraceRequest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

IMAGES = Path(__file__).parent / "images"
SMALL = SimConfig(num_blocks=64, max_model_len=256, max_num_batched_tokens=512, watermark=0.0)
"""A pool that fits a picture: 1,024 slots, and sequences of at most 256 tokens."""
STEPS = FixedCosts(0.05, 1e-3)
"""50 ms a step and 1 ms for each of its tokens."""


def small_requests(n: int = 1, prefix_tokens: int = 0) -> list[TraceRequest]:
    """200 requests, five a second, of an eighth of ShareGPT's lengths; `n` samples each, behind a
    text of `prefix_tokens` that all share."""
    return [
        TraceRequest(
            num_input=max(1, num_input // 8) + prefix_tokens,
            num_output=max(1, num_output // 8),
            arrival_s=0.2 * index,
            n=n,
            prefix="system" if prefix_tokens else "",
            prefix_tokens=prefix_tokens,
        )
        for index, (num_input, num_output) in enumerate(draw_lengths("sharegpt", 200))
    ]


def small_pool(policy: KVPolicy, time_s: float) -> BlockMap:
    """The small pool under a policy at a time."""
    return map_at(small_requests(), SMALL, STEPS, time_s, policy)


def at(one: BlockMap) -> str:
    """A caption that begins with the time."""
    return f"after {one.time_s:.0f} s, {caption_of(one)}"


def pool() -> Figure:
    """One moment under each policy."""
    maps = [small_pool(policy, 20) for policy in POLICIES]
    return block_maps(maps, title="The same pool and the same requests after 20 s")


def reserved() -> Figure:
    """What is reserved becomes tokens."""
    maps = [small_pool("orca-oracle", time_s) for time_s in (22, 24)]
    title = "Reserved: set aside for tokens that will come"
    return block_maps(maps, title=title, captions=[at(one) for one in maps])


def internal() -> Figure:
    """Space for the longest possible sequence, and dead members of a batch."""
    maps = [small_pool("orca-max", 21), small_pool("contiguous", 20)]
    title = "Internal fragmentation: set aside, and never filled"
    return block_maps(maps, title=title, captions=[at(one) for one in maps])


def external() -> Figure:
    """Rounding, and free pieces that are too small."""
    maps = [small_pool("orca-oracle", 28)]
    title = "External fragmentation: rounding, and pieces that are too small"
    return block_maps(maps, title=title, captions=[at(one) for one in maps])


def sharing() -> Figure:
    """Four samples a prompt, behind a common prefix: shared blocks, and copies."""
    requests = small_requests(n=4, prefix_tokens=48)[:40]
    config = SMALL.replace(enable_prefix_caching=True)
    maps = [map_at(requests, config, STEPS, 6, "paged")]
    plain = config.replace(enable_prefix_caching=False)
    maps.append(map_at(requests, plain, STEPS, 6, "orca-oracle"))
    captions = []
    for one in maps:
        num_physical = sum(bool(block.owners) for block in one.blocks)
        captions.append(
            f"{one.policy}: {one.num_sequences} sequences run; "
            f"{num_physical} blocks for {one.num_logical} table entries: "
            f"{1 - num_physical / one.num_logical:.0%} saved"
        )
    title = "Sharing: four samples a prompt, and 48 tokens that all begin with"
    return block_maps(maps, title=title, captions=captions)


class EnoughSeen(Exception):
    """Ends a run of the engine."""


def live_pool(policy: KVPolicy, num_steps: int) -> BlockMap:
    """The pool of the engine, with the default model, after so many steps."""
    from octavo import LLM, SamplingParams

    requests = [r for r in small_requests()[:60] if r.num_tokens <= SMALL.max_model_len]
    found: list[BlockMap] = []
    with LLM(
        kv_policy=policy,
        num_gpu_blocks_override=SMALL.num_blocks,
        max_model_len=SMALL.max_model_len,
        max_num_seqs=64,
        preemption_mode="recompute",
        enable_prefix_caching=False,
        swap_space=0,
    ) as llm:
        core = llm._engine.engine.core

        def look() -> None:
            found.append(block_map(core.kv, num_waiting=core.scheduler.num_waiting))
            if len(found) == num_steps:
                raise EnoughSeen

        llm.after_step = look
        prompts = [{"prompt_token_ids": [1000 + i] * r.num_input} for i, r in enumerate(requests)]
        params = [SamplingParams(max_tokens=r.num_output, ignore_eos=True) for r in requests]
        with suppress(EnoughSeen):
            llm.generate(prompts, params, use_tqdm=False)
    return found[-1]


def live() -> Figure:
    """The engine itself, at work."""
    maps = [live_pool(policy, 40) for policy in ("paged", "orca-max")]
    return block_maps(maps, title="SmolLM2-135M serves 60 requests: its pool after 40 steps")


def compared() -> dict[str, Figure]:
    """What `octavo lab compare` draws of the paper's OPT-13B pool; see docs/memory.md."""
    from octavo.lab.plots_compare import figures

    lengths = [TraceRequest(num_input=i, num_output=o) for i, o in draw_lengths("sharegpt", 1200)]
    shape, gpu, software = find_shape("opt-13b"), find_gpu("a100-40gb"), find_software("2023")
    found = compare(
        lambda rate: poisson(lengths, rate or 1.0),
        SimConfig(num_blocks=983, max_num_batched_tokens=2560),
        lambda policy: RooflineCosts(
            shape, gpu, block_size=16 if policy == "paged" else None, software=software
        ),
        rates=(2.0,),
    )
    drawn = figures(found)
    return {"compare-memory": drawn["memory"], "compare-batch": drawn["batch"]}


PICTURES: dict[str, Callable[[], Figure]] = {
    "pool": pool,
    "reserved": reserved,
    "internal": internal,
    "external": external,
    "sharing": sharing,
    "live": live,
}


def main() -> int:
    """Draw all."""
    figures = {name: draw() for name, draw in PICTURES.items()} | compared()
    for name, figure in figures.items():
        print(*save(figure, IMAGES / name, ("svg",)), file=sys.stderr)
        if "--png" in sys.argv:
            save(figure, Path(sys.argv[-1]) / name, ("png",))
    return 0


if __name__ == "__main__":
    sys.exit(main())
