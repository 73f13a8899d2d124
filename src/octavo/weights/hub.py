"""Models on the Hugging Face hub: which files a model needs, from the hub's cache or the network.

Everything goes through `huggingface_hub` (its cache, tokens, endpoint and offline switch), which
is imported only here and only when a name is looked up.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from octavo.errors import ModelError, ModelNotFoundError, WeightsError
from octavo.weights.gguf_split import first_parts, parts_of
from octavo.weights.hf_folder import INDEX, PICKLES
from octavo.weights.hub_resume import bar_for, check_sum, fetch_blob
from octavo.weights.progress import Progress

GIVE_UP_S = 5.0
"""How long the hub may take to answer the first question."""
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MAX_NAME = 96
"""Characters in a name on the hub."""
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
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


class HubUnreachableError(ModelNotFoundError):
    """The hub did not answer, or must not be asked (offline mode)."""


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
    from huggingface_hub import constants

    revision = revision or "main"
    base = Path(constants.HF_HUB_CACHE) / ("models--" + name.repo.replace("/", "--"))
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
    short or with another checksum than the hub states (it is deleted then).
    """
    from huggingface_hub import hf_hub_download

    info = _ask(name, revision)
    sizes = {f.rfilename: f.size or 0 for f in info.siblings or []}
    sums = {f.rfilename: f.lfs.sha256 for f in info.siblings or [] if f.lfs is not None}
    wanted = select_files(name, list(sizes), load_format)
    total = sum(sizes[f] for f in wanted)
    progress.start(f"downloading {name.repo}", total or None)
    folder, done = Path(), 0
    try:
        for file in wanted:
            checked = file not in sums or _in_cache(name, file, info.sha)
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
                raise _translate(error, name, revision, file) from error
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
        gguf = gguf_choice(name, [f for f in top if f.endswith(".gguf")])
        if gguf is not None:
            return parts_of(gguf)
    pickles = [f for f in top if f.endswith(PICKLES)]
    if pickles and not tensors:
        raise ModelNotFoundError(
            f"{name.repo} has only pickled weights ({pickles[0]}), which octavo never loads; look "
            "for a copy with safetensors or GGUF files"
        )
    kinds = {"auto": "safetensors or GGUF", "dummy": "config.json or GGUF"}
    raise ModelNotFoundError(
        f"{name.repo} has no {kinds.get(load_format, load_format)} file "
        f"(--load-format {load_format})"
    )


def gguf_choice(name: HubName, files: Sequence[str]) -> str | None:
    """The one GGUF file meant by the name; None when there is none at all."""
    models = sorted(first_parts(f for f in files if not is_projector(f)))
    if name.quant is not None:
        part = r"(-\d{5}-of-\d{5})?"
        ending = re.compile(rf"(^|.*[-.]){re.escape(name.quant)}{part}\.gguf", re.IGNORECASE)
        named = [f for f in models if f == name.quant or ending.fullmatch(f)]
        if len(named) == 1:
            return named[0]
        listing = ", ".join(models) or "none"
        raise ModelNotFoundError(
            f"{name.repo} has {len(named)} GGUF files called {name.quant!r}; its files: {listing}"
        )
    if len(models) > 1:
        raise ModelNotFoundError(
            f"{name.repo} has {len(models)} GGUF files; choose one as {name.repo}:FILE: "
            f"{', '.join(models)}"
        )
    return models[0] if models else None


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
        raise HubUnreachableError(f"{_endpoint()} did not answer within {GIVE_UP_S:.0f} s")
    if isinstance(answer[0], Exception):
        raise _translate(answer[0], name, revision, None) from answer[0]
    return answer[0]


def _translate(
    error: Exception, name: HubName, revision: str | None, file: str | None
) -> ModelError:
    """What went wrong between here and the hub, in octavo's words."""
    from huggingface_hub import errors

    what = f"{name.repo}/{file}" if file else name.repo
    cause = error.__cause__  # "not in the cache" is raised from what kept it from being fetched
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(cause, Exception):
        error = cause
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return HubUnreachableError(
            f"{what} is not in the cache and offline mode is on (HF_HUB_OFFLINE); unset it, or "
            "give a local folder or .gguf file"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(f"{name.repo} has no revision {revision!r} (--revision)")
    if isinstance(error, errors.GatedRepoError) or status == 403:
        return ModelNotFoundError(
            f"access to {what} is restricted (HTTP {status}): ask for access on its page at "
            f"{_endpoint()}/{name.repo}, then set HF_TOKEN or run `hf auth login`"
        )
    if status == 401:
        return ModelNotFoundError(
            f"{what} does not exist on {_endpoint()}, or is private and needs a token (HTTP 401): "
            "check the name, or set HF_TOKEN or run `hf auth login`"
        )
    if status == 404:
        return ModelNotFoundError(f"{what} does not exist on {_endpoint()} (HTTP 404)")
    if status is not None:
        return HubUnreachableError(f"{_endpoint()} answered HTTP {status} for {what}")
    if "onsistency check" in str(error):
        return WeightsError(f"{what} arrived cut short: {str(error).splitlines()[0]}; run it again")
    if isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(f"{name.repo!r} is not a valid name: {error}")
    detail = str(error).splitlines()[0] if str(error) else type(error).__name__
    if file:
        return HubUnreachableError(
            f"{_endpoint()} broke off while sending {what}: {detail}; run it again to go on"
        )
    return HubUnreachableError(
        f"{_endpoint()} cannot be reached for {what}: {detail}; check the network, or give a local "
        "folder or .gguf file"
    )


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _remember(name: HubName, revision: str | None, commit: str | None) -> None:
    """Let a branch point at the commit just fetched, as `hf_hub_download(revision=branch)` does."""
    from huggingface_hub import constants

    revision = revision or "main"
    if commit is None or revision == commit:
        return
    base = Path(constants.HF_HUB_CACHE) / ("models--" + name.repo.replace("/", "--"))
    ref = base / "refs" / revision
    if ref.is_file() and ref.read_text("utf-8") == commit:
        return
    ref.parent.mkdir(parents=True, exist_ok=True)
    part = ref.with_name(f"{ref.name}.{threading.get_ident()}.part")
    part.write_text(commit, "utf-8")
    part.replace(ref)
