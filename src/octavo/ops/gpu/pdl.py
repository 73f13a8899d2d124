"""Programmatic dependent launch (PDL): a kernel may start while its predecessor still runs.

A kernel launched that way calls `gdc_wait` to wait until its predecessor is done, before it reads
anything but weights and what a step's upload and its first kernel (`inputs.prepare`, launched
without) wrote, and before it writes; then `gdc_launch_dependents` lets its successor start. (In the
other order, kernels of a decode step crowded each other out.) NVIDIA GPUs of compute capability 9
and later have it; kernels launched without it wait for all before them.
"""

from __future__ import annotations

from functools import cache

import torch


@cache
def _supports(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(device: torch.device) -> dict[str, bool]:
    """Keyword arguments of a launch: the constexpr PDL, and the option that goes with it."""
    if device.type == "cuda" and _supports(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; a few for CPUs, where kernels are interpreted."""
    if device.type != "cuda":
        return 3
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
