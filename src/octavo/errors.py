"""Every error that a caller can cause, as one tree under `OctavoError`.

A message says what was refused, the limit, the value that broke it, and the way out (a flag, a
field, a command). `assert` stays for invariants: an `AssertionError` is a bug of octavo.
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors that octavo raises on purpose."""


class ConfigError(OctavoError, ValueError):
    """An `EngineConfig` field, or two of them together, cannot be used."""


class InvalidRequestError(OctavoError, ValueError):
    """A prompt or a sampling parameter is refused; the engine goes on serving.

    `parameter` names the field that was refused, so that a server can point at it.
    """

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class CapacityError(OctavoError):
    """Something can never fit: the message holds the arithmetic and the flag that changes it."""


class RequestCapacityError(CapacityError, InvalidRequestError):
    """A request that can never fit into the context or the KV pool, refused at admission."""


class ModelError(OctavoError):
    """Base of what goes wrong between a model's name and its loaded weights."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """No model of that name: not a local path, not cached, not reachable on the hub."""


class UnsupportedModelError(ModelError):
    """An architecture, a file format or a quantization that octavo cannot run."""


class WeightsError(ModelError):
    """A weight file is truncated, or tensors are missing, left over or of the wrong shape."""


class TokenizerError(ModelError):
    """There is no usable tokenizer (or chat template) beside the model."""


class TraceError(OctavoError):
    """A workload file cannot be read or recognised, or a line of it is wrong; the message names the
    line."""


class RecordError(OctavoError):
    """A record of an engine's decisions cannot be read, or only up to the line that is named."""


class IntegrityError(OctavoError):
    """`check_integrity()` found an invariant broken; the message names the offender."""


class EngineDeadError(OctavoError):
    """The engine is closed or has failed for good; no further request can be answered."""


class NumericsError(OctavoError):
    """The model computed NaN or infinity: its weights, or their type, cannot be used."""


class DeviceLostError(OctavoError):
    """The device does not compute any more in this process: no later step can succeed."""


class StepFailedError(OctavoError):
    """The runner failed in a step; the requests in `request_ids` were aborted, others go on."""

    def __init__(self, message: str, *, request_ids: list[str]) -> None:
        super().__init__(message)
        self.request_ids = request_ids
