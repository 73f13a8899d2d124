"""The systems that the paper compares, on the machines that it had."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from octavo.config import KVPolicy
from octavo.lab import roofline
from octavo.lab.config import SimConfig
from octavo.lab.costs import StepCosts
from octavo.lab.gpus import PAPER_SOFTWARE, find_software, paper_gpus, paper_slots
from octavo.lab.shapes import find_shape

Model = Literal["13b", "66b", "175b"]
MODELS: tuple[Model, ...] = ("13b", "66b", "175b")
SYSTEMS: tuple[KVPolicy, ...] = (
    "contiguous",
    "orca-max",
    "orca-pow2",
    "orca-oracle",
    "paged",
)
"""From the oldest to the newest."""
ORCAS: tuple[KVPolicy, ...] = ("orca-max", "orca-pow2", "orca-oracle")
ITERATION_LEVEL: tuple[KVPolicy, ...] = (*ORCAS, "paged")
"""Those that make a new batch at every step."""
TITLES: dict[str, str] = {
    "contiguous": "FasterTransformer",
    "orca-max": "Orca (Max)",
    "orca-pow2": "Orca (Pow2)",
    "orca-oracle": "Orca (Oracle)",
    "paged": "vLLM (paged)",
}
MAX_SEQ = 2048
"""OPT's context."""
SWAP_BYTES = 20 * 2**30
"""Of host memory, in the artifact."""


MAX_BATCH: dict[tuple[str, str], int] = {
    ("13b", "sharegpt"): 5,
    ("13b", "alpaca"): 14,
    ("66b", "sharegpt"): 2,
    ("66b", "alpaca"): 8,
    ("175b", "sharegpt"): 24,
    ("175b", "alpaca"): 80,
}
"""Of FasterTransformer, by model and data set: what the artifact found to fit."""
MAX_PADDED = 2040
"""Of FasterTransformer: the longest prompt and the longest output of a batch together."""


def num_slots(model: Model) -> int:
    """Tokens whose KV fits (Table 1)."""
    return paper_slots(f"opt-{model}")


def trace_s(model: Model) -> float:
    """Length of the paper's traces: an hour, and 15 minutes for 175B."""
    return 900.0 if model == "175b" else 3600.0


def system_config(
    policy: KVPolicy,
    model: Model = "13b",
    dataset: str = "sharegpt",
    block_size: int = 16,
    **changes: Any,
) -> SimConfig:
    """A system as the artifact sets it up: 2,560 tokens and 2,048 sequences a step, a watermark of
    1 % that stays (octavo's own moves), recomputation, no prefix cache. `changes` are fields of
    `SimConfig`."""
    config = SimConfig(
        num_blocks=num_slots(model) // block_size,
        block_size=block_size,
        kv_policy=policy,
        max_model_len=MAX_SEQ,
        max_num_seqs=2048,
        max_num_batched_tokens=2560,
        watermark=0.01,
        max_watermark=0.01,
    )
    if policy == "contiguous":
        batch = MAX_BATCH[model, dataset]
        config = config.replace(
            max_batch=batch,
            region_tokens=min(MAX_SEQ, num_slots(model) // batch),
            max_padded_tokens=MAX_PADDED,
        )
    return config.replace(**changes) if changes else config


def paper_costs(
    policy: KVPolicy = "paged",
    model: Model = "13b",
    block_size: int = 16,
    shape: str | None = None,
) -> StepCosts:
    """What steps take on the paper's machine for OPT, or for another `shape` on the same one.

    The Orcas of the paper are its own engine with another block manager, and run its kernels. For
    FasterTransformer keys and values lie in one piece, and its loop is C++ over MPI: no workers to
    tell, nothing for each sequence, and 0.6 ms a step instead of 3.1, which makes the 24 ms a token
    that Fig. 12 has for a request alone.
    """
    if policy != "contiguous":
        return roofline.paper_costs(shape or f"opt-{model}", block_size=block_size)
    gpu, num_gpus = paper_gpus(f"opt-{model}")
    software = dataclasses.replace(
        find_software(PAPER_SOFTWARE), step_s=0.0006, seq_s=0.0, parallel_step_s=0.0
    )
    return roofline.RooflineCosts(
        find_shape(shape or f"opt-{model}"),
        gpu,
        num_gpus=num_gpus,
        block_size=None,
        software=software,
    )


def kv_bytes(model: Model = "13b") -> int:
    """Bytes of a token's keys and values."""
    return find_shape(f"opt-{model}").kv_bytes_per_token
