"""Large files of the hub, fetched so that a later process goes on where an earlier one was ended.

`huggingface_hub` gets over a broken connection, but starts a file anew when the process that
fetched it is gone. What is fetched here lies beside the library's own blobs until it is whole; then
it is one of them, and the library finds it there.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from octavo.errors import WeightsError
from octavo.weights.progress import Progress

_SHA256 = re.compile("[0-9a-f]{64}")


def fetch_blob(
    repo: str, file: str, commit: str, sha256: str, size: int, progress: Progress, before: int
) -> bool:
    """Bring `file` into the cache's blobs; False where that is left to the library, which then may
    do better.

    before: bytes that `progress` has counted already. Raises what the library raises, and
    `WeightsError` when the file has another checksum than the hub states (it is deleted then).
    """
    from filelock import FileLock
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(repo, file, revision=commit)
    metadata = get_hf_file_metadata(url)
    if _has_xet() or metadata.etag != sha256 or metadata.size != size:
        return False
    if not _SHA256.fullmatch(sha256):  # it becomes a file's name
        return False
    blobs = Path(constants.HF_HUB_CACHE) / ("models--" + repo.replace("/", "--")) / "blobs"
    blob, part = blobs / sha256, blobs / part_name(sha256)
    blobs.mkdir(parents=True, exist_ok=True)
    headers: dict[str, str] = build_hf_headers()
    location = metadata.location or url
    if urlparse(location).netloc != urlparse(url).netloc:  # a CDN must not see the token
        headers.pop("authorization", None)
    with FileLock(f"{part}.lock"):
        if blob.exists():
            return True
        with part.open("ab") as out:
            done = out.tell()
            if done > size:
                out.truncate(done := 0)
            bar = bar_for(http_get, progress, before)
            http_get(location, out, resume_size=done, headers=headers, expected_size=size, **bar)
        check_sum(part, sha256, f"{repo}/{file}")
        os.replace(part, blob)
    return True


def part_name(sha256: str) -> str:
    """What a file is called among the blobs until it is whole."""
    return f"{sha256}.octavo.part"


def check_sum(path: Path, expected: str, what: str) -> None:
    """The library compares sizes only. A file that is not what the hub says is deleted."""
    with path.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != expected:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise WeightsError(
            f"{what} arrived damaged: its SHA-256 is {found}, the hub states {expected}; it is not "
            "used: run it again"
        )


def _has_xet() -> bool:
    """Whether the library fetches by its own protocol, which keeps what arrived."""
    from huggingface_hub import utils

    available = getattr(utils, "is_xet_available", None)
    return available is not None and bool(available())


def bar_for(download: Callable[..., Any], progress: Progress, before: int) -> dict[str, Any]:
    """How to have a download's bytes reported, where this version of the library can."""
    if "tqdm_class" not in inspect.signature(download).parameters:
        return {}
    # a callable in place of the class: calling it is all that is done with it
    return {"tqdm_class": functools.partial(_FileBar, progress, before)}


class _FileBar:
    """The part of tqdm that `huggingface_hub` uses, reporting one file's bytes."""

    def __init__(
        self, progress: Progress, before: int, *_: Any, initial: int = 0, **__: Any
    ) -> None:
        self._progress, self._done = progress, before + int(initial or 0)
        self.total = None

    def update(self, n: float | None = 1) -> None:
        self._done += int(n or 0)
        self._progress.update(self._done)

    def close(self) -> None:
        pass

    def refresh(self) -> None:
        pass

    def set_description_str(self, *_: Any, **__: Any) -> None:
        pass

    set_description = set_postfix_str = set_transfer_postfix_str = set_description_str

    def __enter__(self) -> _FileBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
