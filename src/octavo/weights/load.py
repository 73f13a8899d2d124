"""From where the model lies to a model with weights in it.

`open_model` reads the shape, `load_weights` streams the tensors; both know every format.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from octavo.arch import ModelArch
from octavo.errors import ModelNotFoundError, WeightsError
from octavo.hf_config import read_hf_config
from octavo.layers.quantized import QuantizedWeight, Weight
from octavo.quantization import Quantization, read_quantization
from octavo.weights.dummy import DummySource
from octavo.weights.gguf import GGUFSource
from octavo.weights.gguf_arch import read_gguf_arch
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.locate import ModelFiles
from octavo.weights.names import canonical
from octavo.weights.progress import NullProgress, Progress
from octavo.weights.quantized import QuantizedDummySource, QuantizedSource
from octavo.weights.safetensors_source import SafetensorsSource
from octavo.weights.source import Keep, WeightSource

_BUFFERS = re.compile(r".*(\.inv_freq|attn\.(masked_)?bias)")
"""Constants that old checkpoints carry along; the model computes its own."""
_LISTED = 12
"""Names shown of each kind of mismatch."""


class LoadableModel(Protocol):
    """What the loader needs of a model, which is never imported here."""

    def parameters_spec(self) -> dict[str, tuple[int, ...]]:
        """Hugging Face names and shapes of the tensors the model wants."""

    def load(self, name: str, weight: Weight) -> None:
        """Take one of them, of the right shape: of any floating-point type, or kept quantized."""


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model's shape, and its weights opened but not read; `source` is None for dummy weights."""

    arch: ModelArch
    source: WeightSource | None
    quantization: Quantization | None = None
    """What config.json says about it; GGUF files need not."""

    def weight_source(
        self, model: LoadableModel, seed: int = 0, device: torch.device | None = None
    ) -> WeightSource:
        """The file's weights, or random ones in the shapes `model` wants, drawn on `device`."""
        if self.source is None and self.quantization is not None:
            return QuantizedDummySource(model.parameters_spec(), self.quantization, seed, device)
        return self.source or DummySource(model.parameters_spec(), seed, device)


def open_model(files: ModelFiles) -> OpenModel:
    """Read the headers of what `locate` found. Raises `ModelError`s that name the file."""
    if files.config.suffix == ".gguf":
        file = GGUFFile(files.config)
        arch = read_gguf_arch(file)
        return OpenModel(arch, GGUFSource(file, arch) if files.kind == "gguf" else None)
    config = read_json(files.config)
    if config is None:
        raise ModelNotFoundError(f"no config.json in {files.config.parent}; download it, too")
    generation = read_json(files.config.with_name("generation_config.json"))
    arch = read_hf_config(config, generation, str(files.config))
    quantization = _read_quantization(config, files.config)
    if files.kind != "hf":
        return OpenModel(arch, None, quantization)
    source: WeightSource
    if quantization is None:
        source = SafetensorsSource(files.path)
    else:
        source = QuantizedSource(SafetensorsSource(files.path, quantized=True), quantization)
    return OpenModel(arch, canonical(source, arch), quantization)


def _read_quantization(config: dict[str, Any], path: Path) -> Quantization | None:
    """Out of config.json, or of the file that older releases of ModelOpt write beside it."""
    if not config.get("quantization_config"):
        path_of_own = path.with_name("hf_quant_config.json")
        own = (read_json(path_of_own) or {}).get("quantization")
        if isinstance(own, dict):
            table = {"quantization_config": own | {"quant_method": "modelopt"}}
            return read_quantization(table, str(path_of_own))
    return read_quantization(config, str(path))


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None when there is no such file. Raises `WeightsError` if it is damaged."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read: {error}; download it again") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} is damaged: not a JSON object; download it again")
    return value


def load_weights(
    model: LoadableModel,
    source: WeightSource,
    arch: ModelArch,
    *,
    dtype: torch.dtype | None = None,
    keep: Keep | None = None,
    progress: Progress | None = None,
) -> None:
    """Hand every tensor of `source` to `model`, one at a time.

    dtype: what the model computes in; matrices arrive in it, so that a quantized file is never
    expanded to float32 as a whole. keep: names of the model for which a weight that is quantized
    in the file arrives so. A tied head may be absent or present twice; buffers of old
    checkpoints are skipped, and so are biases that the model has not, if they are zeros: GPTQ's
    tools write one for every linear. Raises one `WeightsError` that lists everything missing, left
    over or of the wrong shape, before anything is read.
    """
    spec = model.parameters_spec()
    _check(spec, source, arch)
    borrowed = _borrowed(spec, source.shapes(), arch)
    progress = progress or NullProgress()
    progress.start("loading weights", source.num_bytes)
    kept = keep or _keeps_nothing

    def wanted_packed(name: str) -> bool:
        return kept(name) or (name in borrowed and kept(borrowed[name]))

    try:
        done = 0
        for name, weight, num_bytes in source.tensors(dtype, wanted_packed):
            if _is_spare_bias(name, spec):
                _check_zeros(name, weight, source, arch)
            for target in (name, borrowed.get(name)):
                if target is None or target not in spec:
                    continue
                if isinstance(weight, QuantizedWeight) and not kept(target):
                    model.load(target, weight.dequantize(dtype or torch.float32))
                else:
                    model.load(target, weight)
            done += num_bytes
            progress.update(done)
    finally:
        progress.finish()
        _give_back()


def _give_back() -> None:
    """Hand freed memory to the system: glibc keeps a quarter of what was loaded, in pieces."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # other C libraries have none
        ctypes.CDLL(None).malloc_trim(0)


def _keeps_nothing(name: str) -> bool:
    return False


_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def _borrowed(
    spec: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]], arch: ModelArch
) -> dict[str, str]:
    """Tensors that serve a second name: a tied head, in whichever direction the file has it."""
    if not arch.tie_word_embeddings:
        return {}
    if _HEAD in spec and _HEAD not in shapes:
        return {_EMBEDDING: _HEAD}
    if _EMBEDDING in spec and _EMBEDDING not in shapes:
        return {_HEAD: _EMBEDDING}
    return {}


def _is_spare_bias(name: str, spec: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether it is a bias that the model has not of a linear that it has."""
    weight = f"{name.removesuffix('bias')}weight"
    return name.endswith(".bias") and name not in spec and len(spec.get(weight, ())) == 2


def _check_zeros(name: str, bias: Weight, source: WeightSource, arch: ModelArch) -> None:
    if isinstance(bias, torch.Tensor) and bool(bias.any()):
        raise WeightsError(
            f"{source.name}: {arch.architecture} as configured has no {name}, and it is not zero; "
            "weights and configuration must be of one model: download both again"
        )


def _check(spec: Mapping[str, tuple[int, ...]], source: WeightSource, arch: ModelArch) -> None:
    shapes = source.shapes()
    served = set(shapes) | set(_borrowed(spec, shapes, arch).values())
    missing = [name for name in spec if name not in served]
    left_over = [
        name
        for name in shapes
        if name not in spec
        and not _BUFFERS.fullmatch(name)
        and not _is_spare_bias(name, spec)
        and not (name == _HEAD and arch.tie_word_embeddings)
    ]
    wrong = [
        f"{name} is {list(shapes[name])}, expected {list(spec[name])}"
        for name in spec
        if name in shapes and tuple(shapes[name]) != tuple(spec[name])
    ]
    problems = [
        f"{len(names)} {what}: {_list(names)}"
        for what, names in (
            ("missing", missing), ("left over", left_over), ("of the wrong shape", wrong)
        )
        if names
    ]  # fmt: skip
    if problems:
        raise WeightsError(
            f"{source.name} does not hold the tensors of {arch.architecture}: "
            + "; ".join(problems)
            + "; weights and configuration must be of one model: download both again"
        )


def _list(names: list[str]) -> str:
    more = len(names) - _LISTED
    return ", ".join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
