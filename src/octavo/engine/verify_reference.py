"""A model as transformers computes it: the reference that octavo is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import ConfigError, UnsupportedModelError
from octavo.quantization import Quantization
from octavo.weights.load import open_model
from octavo.weights.locate import ModelFiles
from octavo.weights.quantized import QuantizedSource
from octavo.weights.safetensors_source import SafetensorsSource

_LOAD_ERRORS = (
    OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, AttributeError
)  # fmt: skip
"""What transformers raises for files that it cannot load."""
_READ = ("fp8", True)
"""Method and blocks of the quantized weights that transformers reads by itself on a CPU."""
_NO_CODE: dict[str, Any] = {"trust_remote_code": False}
"""Else transformers asks at the terminal whether to run code that lies beside the weights."""


@dataclass(frozen=True, slots=True)
class Reference:
    """transformers' model, in float32 with its eager attention."""

    model: Any
    expanded: str | None
    """How its weights are quantized in the file, if octavo expanded them for it."""


def load_reference(files: ModelFiles) -> Reference:
    """From the same files. Raises `ConfigError` without transformers and `UnsupportedModelError`
    for what it cannot load.

    Of weights quantized by other means than blocks of fp8, transformers needs further packages or
    a GPU, or reads other names: it is given them as octavo expands them, so that the model is
    compared, and not the reading of the format.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "comparing with transformers needs the package: pip install 'octavo[transformers]'"
        ) from error
    opened = open_model(files)
    # eager adds Falcon's ALiBi to the mask, and to the scores once more
    attention = "sdpa" if opened.arch.positions == "alibi" else "eager"
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention} | _NO_CODE
    quantization = opened.quantization
    expands = quantization is not None and (quantization.method, quantization.blocks) != _READ
    logs: Any = transformers.logging
    level = logs.get_verbosity()
    logs.set_verbosity_error()
    try:
        if quantization is not None and expands:
            model = _expanded(files, quantization, options)
        else:
            model = _from_files(files, options)
    except _LOAD_ERRORS as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise UnsupportedModelError(f"transformers cannot load {files.path}: {why}") from error
    finally:
        logs.set_verbosity(level)
    return Reference(model.eval(), quantization.text if expands and quantization else None)


def _from_files(files: ModelFiles, options: dict[str, Any]) -> Any:
    import transformers

    if files.kind == "gguf":
        found: Any = transformers.AutoModelForCausalLM
        folder, options = files.path.parent, options | {"gguf_file": files.path.name}
    else:
        folder, found = files.path, _class_of(_config_of(files))
        options = options | {"use_safetensors": True}  # never what is pickled beside them
    return found.from_pretrained(folder, local_files_only=True, **options)


def _class_of(config: Any) -> Any:
    """By its own name: models with images are none of those that the class for texts finds."""
    import transformers

    names = config.architectures or [""]
    return getattr(transformers, names[0], transformers.AutoModelForCausalLM)


def _config_of(files: ModelFiles) -> Any:
    import transformers

    return transformers.AutoConfig.from_pretrained(files.path, local_files_only=True, **_NO_CODE)


def _expanded(files: ModelFiles, quantization: Quantization, options: dict[str, Any]) -> Any:
    """The file's tensors under its own names, as a checkpoint of plain weights."""
    config = _config_of(files)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    source = QuantizedSource(SafetensorsSource(files.path, quantized=True), quantization)
    state = {name: tensor for name, tensor, _ in source.tensors(torch.float32)}
    return _class_of(config).from_pretrained(None, config=config, state_dict=state, **options)


@torch.inference_mode()
def their_logits(model: Any, num_layers: int, ids: list[int]) -> tuple[list[Tensor], Tensor]:
    """(The residual stream behind each layer, logits), each [num_tokens, ...] float32.

    By hooks, since what transformers calls the last hidden state is normed.
    """
    seen: list[Tensor] = []
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    # the last, since what sees images comes before the text model
    layers = next((m for m in reversed(lists) if len(m) == num_layers), ())

    def keep(_module: Any, _inputs: Any, output: Any) -> None:
        found = output[0] if isinstance(output, tuple) else output
        seen.append(found.reshape(-1, found.shape[-1]).float().clone())

    hooks = [layer.register_forward_hook(keep) for layer in layers]
    try:
        logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    return seen, logits.float()


def other_tokens(files: ModelFiles) -> Callable[[str], list[int]] | None:
    """transformers' tokenizer; None where it has none for this model, or for GGUF files, whose
    tokenizers it rebuilds with known differences."""
    import transformers

    if files.kind == "gguf":
        return None
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            files.path, local_files_only=True, **_NO_CODE
        )
    except (OSError, ValueError, KeyError, ImportError):
        return None
    return lambda text: list(tokenizer(text)["input_ids"])
