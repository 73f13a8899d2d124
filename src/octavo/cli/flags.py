"""Flags made from `EngineConfig` and `SamplingParams`: names, defaults and help text are theirs.

Only what a person at a terminal needs differently is said again here.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import tyro

from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequestError
from octavo.foreign import refusal
from octavo.request import BeamSearchParams, SamplingParams
from octavo.server.config import ServeConfig
from octavo.util import flag_name

T = TypeVar("T")

Hidden = tyro.conf.SuppressFixed[tyro.conf.Fixed[T]]
"""A field that is no flag; it keeps its default."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """`4096`, `512M`, `1.5GB` (powers of 1000) or `2GiB` (powers of 1024) as a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", text, re.IGNORECASE)
    unit = match.group(2).lower() if match else "?"
    scale = (_UNITS | _BINARY_UNITS).get(unit)
    if match is None or scale is None:
        raise ValueError(f"not a size: {text!r}; write bytes, or a size such as 512M or 2GiB")
    return int(float(match.group(1)) * scale)


def bytes_text(num_bytes: int) -> str:
    """What `parse_bytes` reads back: `4GiB` where that is exact, else the number."""
    for unit, scale in reversed(_BINARY_UNITS.items()):
        if num_bytes and num_bytes % scale == 0:
            return f"{num_bytes // scale}{unit[0].upper()}iB"
    return str(num_bytes)


class AtMost(int):
    """A default that gives way where there is less room; a number that was asked for is refused."""


def _int_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


Bytes = Annotated[
    int | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="BYTES",
        instance_from_str=lambda args: parse_bytes(args[0]),
        is_instance=lambda value: value is None or isinstance(value, int),
        str_from_instance=lambda value: ["none" if value is None else bytes_text(value)],
    ),
]
"""A number of bytes, with or without a unit."""

IntOrNone = Annotated[
    int | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT|none",
        instance_from_str=lambda args: _int_or_none(args[0]),
        is_instance=lambda value: value is None or isinstance(value, int),
        str_from_instance=lambda value: ["none" if value is None else str(value)],
    ),
]
"""A whole number, or the word `none`."""


_METAVARS: dict[Any, str] = {
    tuple[str, ...]: "TEXT [TEXT ...]",
    list[str] | None: "TEXT [TEXT ...]",
    list[int] | None: "ID [ID ...]",
    dict[int, float] | None: "ID BIAS [ID BIAS ...]",
}


_ALIASES = {"model": ("-m",)}
"""Short names, of engine flags alone."""


def field_docs(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass and its bases, as one line of text; other
    fields of it are called by their flags there, but for those in quotes."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                name, doc = field.target, below.value
                if isinstance(name, ast.Name) and isinstance(doc, ast.Constant):
                    docs[name.id] = " ".join(str(doc.value).replace("`", "").split())
    names = "|".join(field.name for field in dataclasses.fields(kind) if "_" in field.name)
    if not names:
        return docs
    called = re.compile(rf"(?<![-\"\w])({names})(?![\"\w])")
    return {name: called.sub(lambda m: flag_name(m[0]), doc) for name, doc in docs.items()}


def _aliases(kind: type, name: str) -> tuple[str, ...]:
    return _ALIASES.get(name, ()) if issubclass(kind, EngineConfig) else ()


def flags(kind: type[T]) -> type[T]:
    """Decorates a dataclass of flags: help from the fields' docstrings, on one line, and no
    `(default: ...)` where the default is to leave the thing alone (None, False, empty)."""
    docs, hints = field_docs(kind), get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            continue
        silent = (None, False, (), dataclasses.MISSING)
        quiet = any(field.default is value for value in silent)
        argument = tyro.conf.arg(
            help=docs.get(field.name),
            help_behavior_hint="" if quiet else "(default: on)" if field.default is True else None,
            metavar=_METAVARS.get(hint),
            aliases=_aliases(kind, field.name) or None,
        )
        one_way = (tyro.conf.FlagCreatePairsOff,) if field.default is False else ()
        kind.__annotations__[field.name] = Annotated[(hint, argument, *one_way)]
    return kind


@flags
@dataclass(frozen=True, kw_only=True)
class EngineFlags(EngineConfig):
    """The model, and the memory and steps it is served with."""

    kv_cache_memory_bytes: Bytes = None
    """Size of the KV pool, such as 512M or 2GiB. By default, on a GPU what gpu_memory_utilization
    leaves; on a CPU half of what is free after the weights, and never more than max_num_seqs
    sequences of max_model_len can use."""

    kv_disk_bytes: Bytes = 4 * 2**30  # type: ignore[assignment]
    """Most bytes kept in kv_disk_dir."""

    def __post_init__(self) -> None:
        """Nothing: values are checked by `config()`, where an error reads as everywhere else."""

    def config(self) -> EngineConfig:
        """The checked configuration. Raises `ConfigError`."""
        return EngineConfig.from_kwargs(**_as_dict(self, EngineConfig))


@flags
@dataclass(frozen=True, kw_only=True)
class ServeFlags(ServeConfig):
    """Where the server listens, whom it serves, and how much of it."""

    max_body_bytes: Bytes = 32 * 2**20  # type: ignore[assignment]
    """Largest request body."""

    def __post_init__(self) -> None:
        """Nothing: values are checked by `config()`, where an error reads as everywhere else."""

    def config(self) -> ServeConfig:
        """The checked configuration. Raises `ConfigError`."""
        return ServeConfig(**_as_dict(self, ServeConfig))


@flags
@dataclass(frozen=True, kw_only=True)
class SamplingFlags(SamplingParams):
    """How tokens are chosen, and when to stop. By default the most probable token, always."""

    seed: Hidden[int | None] = None
    stop: list[str] | None = None
    """Strings that end the output; not part of it unless --include-stop-str-in-output."""
    temperature: float = 0.0
    """Logits are divided by it; 0 is greedy: the same answer every time."""
    detokenize: bool = True
    """Make text of the tokens; --no-detokenize leaves the text empty."""
    max_tokens: IntOrNone = AtMost(512)  # noqa: RUF009  (as frozen as an int)
    """Most tokens to generate; none: up to the context length. The default gives way where context
    or pool have less room."""

    def __post_init__(self) -> None:
        """Nothing: values are checked by `params()`, where an error reads as everywhere else."""

    def params(self, **changes: Any) -> SamplingParams:
        """The checked parameters, some changed. Raises `InvalidRequestError`."""
        return SamplingParams.from_dict(_as_dict(self, SamplingParams) | changes)


@flags
@dataclass(frozen=True, kw_only=True)
class ChatSamplingFlags(SamplingFlags):
    """How tokens are chosen, and when to stop. By default with a little chance."""

    n: Hidden[int] = 1
    best_of: Hidden[int | None] = None
    logprobs: Hidden[int | None] = None
    prompt_logprobs: Hidden[int | None] = None
    detokenize: Hidden[bool] = True
    temperature: float = 0.2
    """Logits are divided by it; 0 is greedy: the same answer every time."""
    top_p: float = 0.9
    """Sample from the smallest set of tokens whose probability reaches this; above 0, at most 1."""


@flags
@dataclass(frozen=True, kw_only=True)
class BeamFlags:
    """Beam search instead of sampling: the most probable answers, found side by side."""

    beam_width: int | None = None
    """Decode by beam search with this many beams; all are printed, best first. Of the sampling
    flags --max-tokens, --temperature, --ignore-eos and --include-stop-str-in-output apply."""
    length_penalty: float = 1.0
    """A beam's score is its sum of logprobs divided by its length to this power."""
    early_stopping: Literal["false", "true", "never"] = "false"
    """true: stop once as many beams as --beam-width have finished; false: when no better one is
    likely; never: when no better one is possible."""

    def values(self) -> dict[str, Any]:
        """The fields of `BeamSearchParams` that are said here."""
        stop = {"false": False, "true": True}.get(self.early_stopping, self.early_stopping)
        values = {"length_penalty": self.length_penalty, "early_stopping": stop}
        return values if self.beam_width is None else values | {"beam_width": self.beam_width}


_OF_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
_OF_BEAMS = {field.name for field in dataclasses.fields(BeamSearchParams)}
_OF_BOTH = _OF_SAMPLING & _OF_BEAMS


def make_params(
    sampling: SamplingFlags, beams: BeamFlags, **changes: Any
) -> SamplingParams | BeamSearchParams:
    """The checked parameters, some changed: of beam search where there is a width.

    Raises `InvalidRequestError` for values, and for flags and changes of the one that do nothing to
    the other; `check_beams` looks at the flags of beam search.
    """
    if beams.beam_width is None and "beam_width" not in changes:
        for name in sorted((_OF_BEAMS - _OF_SAMPLING) & changes.keys()):
            raise InvalidRequestError(
                f"{name} is for beam search: it needs beam_width", parameter=name
            )
        return sampling.params(**changes)
    for name in changes:
        if name not in _OF_BEAMS:
            known = ", ".join(sorted(_OF_BEAMS))
            raise InvalidRequestError(
                f"{name!r} is no parameter of beam search; known are: {known}", parameter=name
            )
    for field in dataclasses.fields(SamplingFlags):
        if field.name not in _OF_BOTH and getattr(sampling, field.name) != field.default:
            raise InvalidRequestError(
                f"{flag_name(field.name)} does nothing to beam search (beam_width "
                f"{changes.get('beam_width', beams.beam_width)}): drop one of the two",
                parameter=field.name,
            )
    values = {name: getattr(sampling, name) for name in _OF_BOTH} | beams.values() | changes
    if values["max_tokens"] is None:
        raise InvalidRequestError(
            "beam search needs a limit: set --max-tokens to a number", parameter="max_tokens"
        )
    return BeamSearchParams(**values)


def check_beams(beams: BeamFlags, made: Iterable[SamplingParams | BeamSearchParams]) -> None:
    """Refuse flags of beam search where none of the parameters that were made is of it."""
    if any(isinstance(params, BeamSearchParams) for params in made):
        return
    for field in dataclasses.fields(beams):
        if getattr(beams, field.name) != field.default:
            raise ConfigError(f"{flag_name(field.name)} is for beam search: add --beam-width")


def refuse_without_effect(config: EngineConfig, reasons: dict[str, str]) -> None:
    """Raise `ConfigError` if one of these fields was set: it would change nothing, and why."""
    default = EngineConfig()
    for name, why in reasons.items():
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(f"{flag_name(name)} has no effect here, {why}: drop it")


def _as_dict(flags: Any, kind: type) -> dict[str, Any]:
    return {field.name: getattr(flags, field.name) for field in dataclasses.fields(kind)}


def _flag_names(kind: type) -> Iterator[str]:
    """Every flag of a command, short names among them."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            yield from _flag_names(hints[field.name])
        else:
            yield from (flag_name(field.name), *_aliases(kind, field.name))


def parse(kind: type[T], prog: str, argv: Sequence[str]) -> T:
    """Read a command's arguments into its dataclass.

    Prints help and exits 0 for `--help`; prints what is wrong, with the nearest flags, to stderr
    and exits 2 for arguments that cannot be read. Raises `ConfigError` for another engine's flag.
    """
    if (why := refusal(argv, set(_flag_names(kind)))) is not None:
        raise ConfigError(f"'{prog}' has {why}")
    return tyro.cli(
        kind,
        prog=prog,
        args=list(argv),
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone),
    )
