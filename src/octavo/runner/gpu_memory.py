"""What is free on a GPU, and who holds the rest."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class GPUMemory:
    """A GPU's memory at one moment, in bytes: total = free + others + this process's own."""

    total_bytes: int
    """What the driver hands out to anybody."""
    free_bytes: int
    others_bytes: int
    """Held by other processes. Where the driver does not tell processes apart, all that this
    process has not taken through torch: its own context, some hundred MiB, is then among it, so
    look before anything else is taken."""
    torch_bytes: int
    """Taken by torch's allocator, in use or kept."""

    @property
    def own_bytes(self) -> int:
        """Held by this process: torch's, the context, kernels, graphs, the KV pool."""
        return self.total_bytes - self.free_bytes - self.others_bytes


def gpu_memory(device: torch.device) -> GPUMemory:
    """The memory of a GPU now. Makes this process's context there if there is none."""
    torch.zeros(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    own = own_bytes_by_driver(device)
    taken = total - free
    others = taken - (reserved if own is None else own)
    return GPUMemory(total, free, max(0, others), reserved)


def own_bytes_by_driver(device: torch.device) -> int | None:
    """This process's bytes as the driver's management library (pynvml, optional) has them.

    None where it is not there, or does not see this process under its own number: in a container
    it may know it by the host's.
    """
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid == os.getpid() and process.usedGpuMemory is not None:
                    return int(process.usedGpuMemory)
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, AttributeError):
        return None
    return None
