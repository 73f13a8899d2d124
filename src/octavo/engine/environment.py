"""What a bug report needs to know of the machine: versions, CPU, memory, compiler, settings."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from octavo import __version__
from octavo.util import human_bytes

_PACKAGES = (
    "numpy", "safetensors", "gguf", "tokenizers", "transformers", "huggingface_hub", "jinja2",
    "numba", "triton", "tyro", "rich",
)  # fmt: skip
_SETTINGS = ("CC", "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "XDG_CACHE_HOME")
_PREFIXES = ("OCTAVO_", "OMP_", "KMP_", "MKL_", "TORCH_")
_SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def environment() -> dict[str, str]:
    """Facts by name, in the order in which they should be read. Imports torch."""
    return {
        "octavo": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        **_torch(),
        **_cpu(),
        **_memory(),
        "packages": ", ".join(f"{name} {_version(name)}" for name in _PACKAGES),
        "settings": " ".join(_settings()) or "none",
    }


def _torch() -> dict[str, str]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "torch": f"{torch.__version__}, {torch.get_num_threads()} threads",
        "gpus": ", ".join(gpus) or "none",
    }


def _cpu() -> dict[str, str]:
    from octavo.ops.cpu import native

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    compiler = native.find_compiler()
    return {
        "cpu": f"{cpu_name()}, {usable} of {os.cpu_count()} cores usable",
        "cpu kernels": f"instruction set {native.isa()}",
        "compiler": "none" if compiler is None else f"{compiler}, {_first_line(compiler)}",
    }


def cpu_name() -> str:
    """As the machine calls it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _first_line(compiler: str) -> str:
    try:
        run = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return (run.stdout or run.stderr).partition("\n")[0]


def _memory() -> dict[str, str]:
    import psutil

    from octavo.runner.memory import available_bytes

    total = human_bytes(psutil.virtual_memory().total)
    return {"memory": f"{total} in all, {human_bytes(available_bytes())} available to octavo"}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "missing"


def _settings() -> list[str]:
    names = [n for n in sorted(os.environ) if n in _SETTINGS or n.startswith(_PREFIXES)]
    shown = [n for n in names if not any(word in n for word in _SECRETS)]
    return [f"{name}={os.environ[name]}" for name in shown]
