"""What `octavo models pull | list | rm` do: the models on this machine's disk."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from octavo.config import LoadFormat
from octavo.errors import ModelNotFoundError
from octavo.weights import hub, locate, wheel
from octavo.weights.hub_errors import HubUnreachableError
from octavo.weights.progress import NullProgress, Progress


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model in one of the two caches."""

    name: str
    where: str
    """octavo: octavo's own cache; hub: the Hugging Face hub's, shared with other programs."""
    path: Path
    num_bytes: int
    formats: tuple[str, ...]
    """Of safetensors, gguf; empty: nothing octavo loads (other files of a hub model, a download
    that was broken off)."""


def pull(
    name: str,
    revision: str | None = None,
    load_format: LoadFormat = "auto",
    progress: Progress | None = None,
) -> locate.ModelFiles:
    """Download a model, or bring a hub model that is there up to date. Raises as `locate` does."""
    parsed = None if locate.local_path(name) is not None else hub.HubName.parse(_full_name(name))
    stored = {m.name for m in list_models() if m.where == "hub"}
    if parsed is not None and parsed.repo in stored:
        # out of reach: `locate` takes what is there, or says why it cannot
        with contextlib.suppress(HubUnreachableError):
            hub.fetch_snapshot(parsed, revision, load_format, progress or NullProgress())
    return locate.locate(name, revision, load_format, progress)


def list_models() -> list[StoredModel]:
    """Every model in octavo's cache and in the hub's, by name."""
    return sorted([*_own(), *_hub()], key=lambda m: (m.name, m.where))


def remove(name: str) -> list[StoredModel]:
    """Delete a model from both caches; what was deleted.

    Raises `ModelNotFoundError` naming what there is when there is no such model.
    """
    models = list_models()
    doomed = [m for m in models if m.name == _full_name(name)]
    if not doomed:
        known = ", ".join(dict.fromkeys(m.name for m in models)) or "none"
        raise ModelNotFoundError(f"no stored model {name!r}; stored: {known}")
    for model in doomed:
        shutil.rmtree(model.path)
    return doomed


def _full_name(name: str) -> str:
    """The hub's name for one of the models that have a short one."""
    in_wheels = wheel.find(name)
    return name if in_wheels is None else in_wheels.repo


def _own() -> list[StoredModel]:
    root = locate.cache_home() / "models"
    folders = [p for p in root.iterdir() if p.is_dir()] if root.is_dir() else []
    stored = [_stored(p.name.replace("--", "/", 1), "octavo", p) for p in folders]
    return [m for m in stored if m.num_bytes]  # not those of which only a lock is there


def _hub() -> list[StoredModel]:
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE)
    folders = sorted(root.glob("models--*")) if root.is_dir() else []
    return [
        _stored(p.name.removeprefix("models--").replace("--", "/", 1), "hub", p) for p in folders
    ]


def _stored(name: str, where: str, folder: Path) -> StoredModel:
    names, num_bytes = set(), 0
    for path in folder.rglob("*"):
        names.add(path.suffix)
        if path.is_file() and not path.is_symlink():
            num_bytes += path.stat().st_size
    formats = tuple(kind for kind in ("safetensors", "gguf") if f".{kind}" in names)
    return StoredModel(name, where, folder, num_bytes, formats)
