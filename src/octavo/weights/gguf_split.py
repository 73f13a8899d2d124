"""Names of GGUF models that are split into several files; nothing is opened."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from octavo.errors import WeightsError

_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""What llama-gguf-split calls the files of a model."""


def split_files(path: Path) -> list[Path]:
    """The files of a model of which `path` is one; itself alone when it is not split.

    Raises `WeightsError` naming the ones that are missing.
    """
    name = _SPLIT_NAME.fullmatch(path.name)
    if name is None or int(name[3]) < 2:
        return [path]
    paths = [path.with_name(part) for part in parts_of(path.name)]
    missing = [p.name for p in paths if not p.is_file()]
    if missing and path.name not in missing:
        raise WeightsError(
            f"{len(missing)} of the {len(paths)} parts of {path} are missing: "
            f"{', '.join(missing[:5])}; download them, too"
        )
    return paths


def parts_of(name: str) -> list[str]:
    """The names of all files of a model, from the name of one."""
    split = _SPLIT_NAME.fullmatch(name)
    if split is None:
        return [name]
    return [f"{split[1]}-{i:05}-of-{split[3]}.gguf" for i in range(1, int(split[3]) + 1)]


def first_parts(names: Iterable[str]) -> list[str]:
    """Of file names those that stand for a model: not the further parts of split ones."""
    found = ((name, _SPLIT_NAME.fullmatch(name)) for name in names)
    return [name for name, split in found if split is None or int(split[2]) == 1]
