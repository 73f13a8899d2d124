"""What is kept beyond a request: whether prefixes can be shared, and the disk tier's folder."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from octavo import __version__
from octavo.arch import ModelArch
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv.memory_plan import MemoryPlan
from octavo.kv.shape import KVShape
from octavo.models.decoder import Decoder
from octavo.ops.cpu import native
from octavo.runner.disk_store import DiskStore, open_disk_store
from octavo.weights.hf_folder import safetensors_files
from octavo.weights.locate import ModelFiles

logger = logging.getLogger("octavo")

_LAYOUT = "layers, K and V, kv heads, tokens, head_dim"
"""Of a block's bytes (`runner.kv_store`)."""
_SAMPLES, _SAMPLE_BYTES = 64, 4096


def why_prefixes_are_not_shared(config: EngineConfig, model: Decoder) -> str | None:
    """None if KV depends on nothing but the tokens before it and may be kept for other requests.

    Where the model forbids what the configuration allows, the reason is logged.
    """
    if not config.enable_prefix_caching:
        return "prefix caching is off: start without --no-enable-prefix-caching"
    if config.kv_policy != "paged":
        return (
            f"prefix caching is off: --kv-policy {config.kv_policy} shares no blocks; start with "
            "--kv-policy paged"
        )
    if not model.rotary.is_dynamic:
        return None
    why = (
        f"prefix caching is off: {config.model} has {model.arch.rope.scaling_type} rope scaling: "
        "in prompts of more than "
        f"{model.arch.rope.original_max_position} tokens the KV of the first depends on how many "
        "there are; lower --max-model-len to that many"
    )
    logger.warning(why)
    return why


def check_disk_folder(config: EngineConfig) -> None:
    """Make the folder of the disk tier. Raises `ConfigError` if blocks cannot be kept there."""
    if config.kv_disk_dir is None:
        return
    folder = Path(config.kv_disk_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"kv_disk_dir={config.kv_disk_dir!r} cannot be written: {error.strerror or error}; "
            "choose another --kv-disk-dir"
        ) from error


def open_disk(
    config: EngineConfig, files: ModelFiles, arch: ModelArch, plan: MemoryPlan
) -> DiskStore | None:
    """The disk tier for the blocks of this model; None if none is wanted. config: resolved.

    Raises `ConfigError` for a folder that another engine uses, and for a limit below one block.
    """
    if config.kv_disk_dir is None:
        return None
    if config.kv_disk_bytes < plan.bytes_per_block:
        raise ConfigError(
            f"kv_disk_bytes={config.kv_disk_bytes:,} has no room for one KV block of "
            f"{plan.bytes_per_block:,} B: raise --kv-disk-bytes"
        )
    text = fingerprint(files, arch, config, plan.shape)
    store = open_disk_store(config.kv_disk_dir, text, plan.bytes_per_block)
    if store is None:
        raise ConfigError(
            f"kv_disk_dir={config.kv_disk_dir!r} is in use by another engine of the same model: "
            "give each its own --kv-disk-dir"
        )
    return store


def fingerprint(files: ModelFiles, arch: ModelArch, config: EngineConfig, shape: KVShape) -> str:
    """All on which the bytes of a block's KV depend, besides its tokens and those before it.
    config: resolved."""
    parts = [
        f"octavo {__version__}, {native.isa()} kernels, {config.device}",
        f"weights {_weights_identity(files, config.seed)}, quantization {config.quantization}",
        f"arch {arch!r}",
        f"dtype {config.dtype}, KV {config.kv_cache_dtype}",
        f"block_size {config.block_size}",
        f"layout {_LAYOUT}, {shape!r}",
    ]
    return "\n".join(parts)


def _weights_identity(files: ModelFiles, seed: int) -> str:
    if files.kind == "dummy":
        return f"dummy, seed {seed}"
    paths = [files.path] if files.kind == "gguf" else safetensors_files(files.path)
    return ", ".join(_file_identity(paths))


def _file_identity(paths: Iterable[Path]) -> Iterable[str]:
    """Size, time and pieces of the content: no copy of the model is told from itself by its place,
    and weights that were changed where they lie are other weights."""
    for path in paths:
        digest = hashlib.blake2b(digest_size=16)
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            last = max(0, status.st_size - _SAMPLE_BYTES)
            for i in range(_SAMPLES):
                file.seek(i * last // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
        yield f"{path.name} {status.st_size} B {status.st_mtime_ns} {digest.hexdigest()}"
