"""Typed access to the fields of a parsed `config.json`; every error names file, field and value."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.errors import UnsupportedModelError

_DTYPES = ("float32", "float16", "bfloat16")
_MAX_SIZE = 2**31 - 1
"""A number above it is a mistake in the file, and would be one in what follows from it."""
MAX_LAYERS = 10_000
_STEM = re.compile(r"(For[A-Z]\w+|LMHeadModel|Model)$")


class Fields:
    """The fields of one configuration.

    config: the object that holds the model's shape; generation: the parsed
    `generation_config.json`; where: what errors call the file; architecture: name in the registry;
    names: what a family calls a field that others call differently (`hidden_size`: `n_embd`).
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        generation: Mapping[str, Any],
        where: str,
        architecture: str,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.config, self.generation, self.where = config, generation, where
        self.architecture, self._names = architecture, names or {}

    def refuse(self, what: str) -> UnsupportedModelError:
        """The error that says what of the file cannot be run."""
        return UnsupportedModelError(f"{self.where}: {what}")

    def name(self, field: str) -> str:
        """What this file calls a field."""
        own = self._names.get(field, field)
        return own if own in self.config or field not in self.config else field

    def has(self, field: str) -> bool:
        """Whether the file states a field, null being no statement."""
        return self.raw(field) is not None

    def raw(self, field: str, default: Any = None) -> Any:
        """A field as it is."""
        return self.config.get(self.name(field), default)

    def size(
        self,
        field: str,
        default: int,
        null: int | None = None,
        most: int = _MAX_SIZE,
        least: int = 1,
    ) -> int:
        """A whole number; `null` is what null means, if not what leaving it out means."""
        value = self.raw(field, default)
        if value is None:
            value = default if null is None else null
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refuse(
                f"{self.name(field)} must be a whole number in {least}..{most:,}, got {value!r:.80}"
            )
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        """A flag; null means false."""
        value = self.raw(field, default)
        if value is None:
            return False
        if value not in (True, False):
            raise self.refuse(f"{self.name(field)} must be true or false, got {value!r:.80}")
        return bool(value)

    def positive(self, field: str, default: float) -> float:
        """A number above 0; null means the default."""
        return self.number(self.config, self.name(field), default)

    def cap(self, field: str, default: float | None) -> float:
        """A soft cap or clip: a number above 0, and 0 where null turns it off."""
        value = self.raw(field, default)
        return 0.0 if value is None else self.positive(field, float(default or 1.0))

    def number(self, table: Mapping[str, Any], name: str, default: float) -> float:
        """A number above 0 of an object in the file."""
        value = table.get(name)
        if value is None:
            return default
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise self.refuse(f"{name} must be a number above 0, got {value!r:.80}")
        return float(value)

    def table(self, field: str) -> Mapping[str, Any]:
        """An object inside the file; empty where it is missing or null."""
        value = self.raw(field) or {}
        if not isinstance(value, Mapping):
            raise self.refuse(f"{self.name(field)} must be an object, got {value!r:.80}")
        return value

    def layers(self, field: str, num_layers: int) -> list[Any] | None:
        """A list with an entry for each layer; None where it is missing or null."""
        value = self.raw(field)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers:
            count = f"{len(value)} entries" if isinstance(value, list) else repr(value)[:80]
            raise self.refuse(f"{self.name(field)} has {count} for {num_layers} layers")
        return value

    def only(self, field: str, *allowed: Any) -> None:
        """Refuse a field that states anything else; leaving it out and null are allowed."""
        value = self.raw(field)
        if value is None or value in allowed:
            return
        known = ", ".join(str(a).lower() if isinstance(a, bool) else str(a) for a in allowed)
        raise self.refuse(
            f"{self.name(field)}={value!r:.80} is not supported; known: {known or 'null'}"
        )

    def dtype(self) -> str:
        """The checkpoint's own type."""
        value = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        name = str(value).removeprefix("torch.")
        name = "float32" if name == "auto" else name
        if name not in _DTYPES:
            raise self.refuse(f"dtype {name!r} is not supported; known: {', '.join(_DTYPES)}")
        return name

    def bos(self, default: int | None) -> int | None:
        """The token that begins a text."""
        value = self.config.get("bos_token_id", default)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def eos(self, default: int | None) -> tuple[int, ...]:
        """The tokens that end a text; those of `generation_config.json` win."""
        value = self.generation.get("eos_token_id")
        if value is None:
            value = self.config.get("eos_token_id", default)
        return token_ids(value, self.where)


def token_ids(value: Any, where: str = "config.json") -> tuple[int, ...]:
    """An `eos_token_id` field, which is null, one id or a list of ids.

    Raises `UnsupportedModelError`, naming the file `where` it stands, for anything else.
    """
    if value is None or isinstance(value, bool):
        return ()
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UnsupportedModelError(
            f"{where}: eos_token_id must be a token id or a list of them, got {value!r:.80}"
        )
    return tuple(dict.fromkeys(ids))


def unknown_architecture(name: str, known: Iterable[str], where: str) -> UnsupportedModelError:
    """The error for an architecture octavo does not have: what is known and what is nearest."""
    known = tuple(known)
    # without what most names end in, which would count for most of the likeness
    by_stem = {_STEM.sub("", k).lower(): k for k in reversed(known)}
    near = difflib.get_close_matches(_STEM.sub("", name).lower(), by_stem, n=1, cutoff=0.0)
    hint = f"; nearest: {by_stem[near[0]]}" if near else ""
    return UnsupportedModelError(
        f"{where}: architecture {name!r} is not supported; known: {', '.join(known)}{hint}"
    )
