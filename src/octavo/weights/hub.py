"""Models on the Hugging Face hub: which files a model needs, from the hub's cache or the network.

Everything goes through `huggingface_hub` (its cache, tokens, endpoint and offline switch), which
is imported only here and only when a name is looked up.
"""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from octavo.errors import ModelError, ModelNotFoundError, WeightsError
from octavo.util import human_bytes
from octavo.weights.gguf_split import first_parts, parts_of
from octavo.weights.hf_folder import CONVERT, INDEX, PICKLES
from octavo.weights.hub_errors import (
    HubUnreachableError,
    endpoint,
    hub_cache,
    local_error,
    translated,
)
from octavo.weights.hub_resume import bar_for, check_sum, fetch_blob, part_name
from octavo.weights.progress import Progress

GIVE_UP_S = 5.0
"""How long the hub may take to answer the first question."""
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MAX_NAME = 96
"""Characters in a name on the hub."""
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATE = re.compile(r"additional_chat_templates/[^/]+\.jinja")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
"""One of these is what a tokenizer is built from."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A name on the hub: `repo`, and after a colon which of its GGUF files (`org/repo:Q4_K_M`)."""

    repo: str
    quant: str | None = None

    @classmethod
    def parse(cls, name: str) -> HubName | None:
        """None when it cannot be a name on the hub."""
        repo, _, quant = name.partition(":")
        valid = (
            len(repo) <= _MAX_NAME
            and _REPO.fullmatch(repo)
            and ".." not in repo
            and "--" not in repo
        )
        return cls(repo, quant or None) if valid else None


def cached_snapshot(name: HubName, revision: str | None) -> Path | None:
    """The folder in the hub's cache that holds this revision, complete or not."""
    revision = revision or "main"
    base = hub_cache() / ("models--" + name.repo.replace("/", "--"))
    ref = base / "refs" / revision
    commit = ref.read_text("utf-8").strip() if ref.is_file() else revision
    folder = base / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def fetch_snapshot(
    name: HubName, revision: str | None, load_format: str, progress: Progress
) -> Path:
    """Download what octavo needs of a model into the hub's cache; the snapshot's folder.

    Files that are there already are not fetched again, broken-off ones are resumed. Raises
    `HubUnreachableError` within `GIVE_UP_S` when the hub does not answer, `ModelNotFoundError`
    when there is no such model or revision or it is gated, `WeightsError` when a file arrives cut
    short or with another checksum than the hub states (it is deleted then), and `ModelError` when
    the cache has no room or cannot be written to.
    """
    from huggingface_hub import hf_hub_download

    info = _ask(name, revision)
    sizes = {f.rfilename: f.size or 0 for f in info.siblings or []}
    sums = {f.rfilename: f.lfs.sha256 for f in info.siblings or [] if f.lfs is not None}
    wanted = select_files(name, list(sizes), load_format)
    total = sum(sizes[f] for f in wanted)
    missing = [f for f in wanted if not _in_cache(name, f, info.sha)]
    _check_room(name, missing, sizes, sums)
    progress.start(f"downloading {name.repo}", total or None)
    folder, done = Path(), 0
    try:
        for file in wanted:
            checked = file not in sums or file not in missing
            try:
                if not checked:
                    checked = fetch_blob(
                        name.repo, file, info.sha, sums[file], sizes[file], progress, done
                    )
                path = hf_hub_download(
                    name.repo, file, revision=info.sha, **bar_for(hf_hub_download, progress, done)
                )
            except WeightsError:
                raise
            except Exception as error:
                raise translated(error, name.repo, revision, file) from error
            if not checked:
                check_sum(Path(path), sums[file], f"{name.repo}/{file}")
            folder = Path(path).parents[len(PurePosixPath(file).parts) - 1]
            done += sizes[file]
            progress.update(done)
    finally:
        progress.finish()
    _remember(name, revision, info.sha)
    return folder


def _in_cache(name: HubName, file: str, commit: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name.repo, file, revision=commit), str)


def select_files(name: HubName, files: Sequence[str], load_format: str) -> list[str]:
    """Of a repository's files those that are needed, small ones first.

    load_format: auto (safetensors, else GGUF), safetensors, gguf, dummy (no weights) or tokenizer.
    Folders inside the repository (onnx/, original/) are not needed, but for chat templates. Raises
    `ModelNotFoundError` when it has no weights that octavo loads.
    """
    top = [f for f in files if len(PurePosixPath(f).parts) == 1]
    small = [f for f in top if f in _SMALL_FILES] + [f for f in files if _TEMPLATE.fullmatch(f)]
    if load_format in ("dummy", "tokenizer") and small:
        return small
    tensors = [f for f in top if f.endswith(".safetensors") and not f.startswith("consolidated")]
    if INDEX not in top and "model.safetensors" in tensors:
        tensors = ["model.safetensors"]
    if tensors and name.quant is None and load_format in ("auto", "safetensors"):
        return small + [f for f in top if f == INDEX] + sorted(tensors)
    if load_format != "safetensors":
        gguf = gguf_choice(name, [f for f in files if f.endswith(".gguf")])
        if gguf is not None:
            return _whole(name, gguf, files)
    pickles = [f for f in top if f.endswith(PICKLES)]
    if pickles and not tensors:
        raise ModelNotFoundError(
            f"{name.repo} has only pickled weights ({pickles[0]}), which octavo never loads. Of "
            "many models the hub's own bot has offered safetensors as a pull request (listed under "
            "Community on the model's page): name it with --revision refs/pr/NUMBER; or "
            f"{CONVERT.format(name.repo)}"
        )
    kinds = {"auto": "safetensors or GGUF", "dummy": "config.json or GGUF"}
    raise ModelNotFoundError(
        f"{name.repo} has no {kinds.get(load_format, load_format)} file "
        f"(--load-format {load_format})"
    )


def _whole(name: HubName, gguf: str, files: Sequence[str]) -> list[str]:
    """All parts of a GGUF file."""
    parts = parts_of(gguf)
    missing = [part for part in parts if part not in files]
    if missing:
        raise ModelNotFoundError(
            f"{name.repo} lacks {len(missing)} of the {len(parts)} parts of {gguf}: "
            f"{', '.join(missing[:5])}; choose another of its files"
        )
    return parts


def gguf_choice(name: HubName, files: Sequence[str]) -> str | None:
    """The one GGUF file meant by the name; None when there is none at all. Those in folders of the
    repository (large ones, in parts) are meant only by what stands after a colon, and where no
    other is called so."""
    models = sorted(first_parts(f for f in files if not is_projector(f)))
    if name.quant is not None:
        part = r"(-\d{5}-of-\d{5})?"
        ending = re.compile(rf"(^|.*[-.]){re.escape(name.quant)}{part}\.gguf", re.IGNORECASE)
        named = [f for f in models if f == name.quant or ending.fullmatch(f)]
        named = [f for f in named if "/" not in f] or named
        if len(named) == 1:
            return named[0]
        listing = ", ".join(models) or "none"
        raise ModelNotFoundError(
            f"{name.repo} has {len(named)} GGUF files called {name.quant!r}; its files: {listing}"
        )
    top = [f for f in models if "/" not in f]
    if len(top) != 1 and models:
        raise ModelNotFoundError(
            f"{name.repo} has {len(models)} GGUF files; choose one as {name.repo}:FILE: "
            f"{', '.join(models)}"
        )
    return top[0] if top else None


def is_projector(file: str) -> bool:
    """GGUF files that hold a vision encoder beside the model proper."""
    return "mmproj" in file.lower()


def _ask(name: HubName, revision: str | None) -> Any:
    """The repository's commit, files and sizes, or an error within `GIVE_UP_S`.

    A thread, because looking up a host name cannot be given a time limit.
    """
    from huggingface_hub import HfApi

    answer: list[Any] = []

    def ask() -> None:
        try:
            api = HfApi()
            answer.append(
                api.model_info(name.repo, revision=revision, timeout=GIVE_UP_S, files_metadata=True)
            )
        except Exception as error:
            answer.append(error)

    thread = threading.Thread(target=ask, name="octavo-hub", daemon=True)
    thread.start()
    thread.join(GIVE_UP_S)
    if not answer:
        raise HubUnreachableError(f"{endpoint()} did not answer within {GIVE_UP_S:.0f} s")
    if isinstance(answer[0], Exception):
        raise translated(answer[0], name.repo, revision, None) from answer[0]
    return answer[0]


def _check_room(
    name: HubName, missing: Sequence[str], sizes: Mapping[str, int], sums: Mapping[str, str]
) -> None:
    """Before hours are spent on what will not fit."""
    blobs = hub_cache() / ("models--" + name.repo.replace("/", "--")) / "blobs"
    parts = [blobs / part_name(sums[f]) for f in missing if f in sums]
    try:
        there = sum(p.stat().st_size for p in parts if p.is_file())
        folder = next(p for p in (blobs, *blobs.parents) if p.is_dir())
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise local_error(error, name.repo) from error
    needed = sum(sizes[f] for f in missing) - there
    if needed > free:
        raise ModelError(
            f"{name.repo} takes {human_bytes(needed)} more, and the disk of {hub_cache()} has "
            f"{human_bytes(free)}: delete models there ('octavo models rm'), or set HF_HOME to a "
            "folder on a larger disk"
        )


def _remember(name: HubName, revision: str | None, commit: str | None) -> None:
    """Let a branch point at the commit just fetched, as `hf_hub_download(revision=branch)` does."""
    revision = revision or "main"
    if commit is None or revision == commit:
        return
    base = hub_cache() / ("models--" + name.repo.replace("/", "--"))
    ref = base / "refs" / revision
    if ref.is_file() and ref.read_text("utf-8") == commit:
        return
    ref.parent.mkdir(parents=True, exist_ok=True)
    part = ref.with_name(f"{ref.name}.{threading.get_ident()}.part")
    part.write_text(commit, "utf-8")
    part.replace(ref)
