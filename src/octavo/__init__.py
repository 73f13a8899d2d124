"""octavo: LLM inference and serving from memory you can see.

Names are resolved on first use, so that `import octavo` stays quick.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.llm import LLM
    from octavo.errors import OctavoError
    from octavo.events import EngineEvent, EventKind
    from octavo.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
    from octavo.request import BeamSearchParams, SamplingParams

__version__ = "0.1.0"

# torch's OpenMP threads spin after each parallel region, on the cores where octavo's own kernels
# want to run next. They read this once, when torch is imported; a user's own setting stands.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "EngineEvent",
    "EventKind",
    "OctavoError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "octavo.engine.llm",
    "BeamSearchOutput": "octavo.outputs",
    "BeamSearchParams": "octavo.request",
    "CompletionOutput": "octavo.outputs",
    "EngineConfig": "octavo.config",
    "EngineEvent": "octavo.events",
    "EventKind": "octavo.events",
    "OctavoError": "octavo.errors",
    "RequestOutput": "octavo.outputs",
    "SamplingParams": "octavo.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
