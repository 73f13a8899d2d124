"""Calls and their values as JSON, and back: what comes out equals what went in, type by type.

Only what differs from its default is written. The shares of a plan are columns: a list for each
field, or one value where all are equal; blocks and replaced entries only of those who have some.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args, get_origin, get_type_hints

from octavo.plan import (
    BeamCandidate,
    BeamDraw,
    BlockCopy,
    BlockLabel,
    CopyKind,
    NewSeq,
    SeqFork,
    SeqPlan,
    SeqResult,
    StepPlan,
    StepResult,
)
from octavo.record import calls
from octavo.record.calls import Call, EngineLimits, RecordHeader
from octavo.request import BeamSearchParams, FinishReason, Request, SamplerParams

Json = Any
"""What `json.loads` makes: dicts, lists, strings, numbers, None."""

_dumps = json.JSONEncoder(separators=(",", ":"), default=operator.index).encode
"""Of other numbers, numpy's say, only integers."""
_NAMES: dict[type[Call], str] = {
    calls.Added: "add",
    calls.Aborted: "abort",
    calls.Finished: "finish",
    calls.Pinned: "pin",
    calls.Unpinned: "unpin",
    calls.Resized: "resize",
    calls.PrefixCacheReset: "reset_prefix_cache",
    calls.CacheReset: "reset_cache",
    calls.Retold: "retell",
    calls.Flushed: "flush",
    calls.Scheduled: "schedule",
    calls.Updated: "update",
    calls.Ended: "end",
}
_KINDS = {name: kind for kind, name in _NAMES.items()}
_COPY_KINDS = {kind.name.lower(): kind for kind in CopyKind}


# -- lines


def encode_header(header: RecordHeader) -> str:
    """The first line, without its end."""
    values: Json = {"octavo_record": header.version, **_changed(header, "version", "disk")}
    values["limits"] = dataclasses.asdict(header.limits)
    if header.limits.windows == (0,):  # as readers know it that know no groups
        del values["limits"]["windows"]
    if header.disk:
        values["disk"] = [(disk_id, _from_label(label)) for disk_id, label in header.disk]
    return _dumps(values)


def decode_header(line: str) -> RecordHeader:
    """Raises `ValueError`, `KeyError` or `TypeError` for what is no header."""
    values = json.loads(line)
    disk = tuple((disk_id, _to_label(label)) for disk_id, label in values.pop("disk", ()))
    of_limits = values.pop("limits")
    of_limits["windows"] = tuple(of_limits.get("windows", (0,)))
    limits = EngineLimits(**of_limits)
    header = RecordHeader(version=values.pop("octavo_record"), limits=limits, disk=disk, **values)
    _check_types(limits, "windows")
    if not limits.windows or not all(type(w) is int and w >= 0 for w in limits.windows):
        raise ValueError(f"windows is {limits.windows}")
    _check_types(header, "limits", "disk")
    for name in ("num_blocks", "block_size", "bytes_per_block", "max_model_len"):
        if getattr(limits, name) < 1:
            raise ValueError(f"{name} is {getattr(limits, name)}")
    return header


def encode_call(call: Call) -> str:
    """One line, without its end."""
    values: Json = {"call": _NAMES[type(call)]}
    for name, value in _changed(call).items():
        encode = _ENCODE.get(name)
        values[name] = value if encode is None or value is None else encode(value)
    return _dumps(values)


def decode_call(line: str) -> Call:
    """Raises `ValueError`, `KeyError` or `TypeError` for what is no call."""
    values = json.loads(line)
    kind = _KINDS[values.pop("call")]
    for name, decode in _DECODE.items():
        if values.get(name) is not None:
            values[name] = decode(values[name])
    return kind(**values)


# -- plans


def plan_to_json(plan: StepPlan) -> Json:
    """A plan, whole."""
    values = _changed(plan)
    for name, encode in _ENCODE_PLAN.items():
        if name in values:
            values[name] = encode(values[name])
    return values


def plan_from_json(values: Json) -> StepPlan:
    """The plan again."""
    for name, decode in _DECODE_PLAN.items():
        if name in values:
            values[name] = decode(values[name])
    return StepPlan(**values)


def _from_shares(seqs: list[SeqPlan]) -> Json:
    seq_ids, starts, nums, blocks, replaced, samples, of_groups, others = zip(*seqs, strict=True)
    values: Json = {"ids": seq_ids, "starts": starts, "nums": _one(nums), "sample": _one(samples)}
    if any(blocks):
        values["blocks"] = [(i, new) for i, new in enumerate(blocks) if new]
    if any(replaced):
        values["replaced"] = [(i, entry) for i, entry in enumerate(replaced) if entry]
    if any(of_groups):
        values["group_blocks"] = [(i, new) for i, new in enumerate(of_groups) if new]
    if any(others):
        values["group_replaced"] = [(i, entries) for i, entries in enumerate(others) if entries]
    return values


def _to_shares(values: Json) -> list[SeqPlan]:
    num = len(values["ids"])
    blocks: list[tuple[int, ...]] = [()] * num
    for i, new in values.get("blocks", ()):
        blocks[i] = tuple(new)
    replaced: list[tuple[int, int] | None] = [None] * num
    for i, (index, block_id) in values.get("replaced", ()):
        replaced[i] = (index, block_id)
    of_groups: list[tuple[tuple[int, ...], ...]] = [()] * num
    for i, new in values.get("group_blocks", ()):
        of_groups[i] = tuple(map(tuple, new))
    others: list[tuple[tuple[int, int, int], ...]] = [()] * num
    for i, entries in values.get("group_replaced", ()):
        others[i] = tuple((group, index, block_id) for group, index, block_id in entries)
    columns = (
        values["ids"], values["starts"], _each(values["nums"], num), blocks, replaced,
        _each(values["sample"], num), of_groups, others,
    )  # fmt: skip
    return [SeqPlan(*share) for share in zip(*columns, strict=True)]


def _one(values: tuple[Any, ...]) -> Json:
    """The value that all are equal to, or all values."""
    return values[0] if values.count(values[0]) == len(values) else values


def _each(values: Json, num: int) -> list[Any]:
    return values if isinstance(values, list) else [values] * num


def _from_copy(copy: BlockCopy) -> Json:
    entry: list[Json] = [copy.src, copy.dst, copy.kind.name.lower()]
    return entry if copy.label is None else [*entry, _from_label(copy.label)]


def _to_copy(entry: Json) -> BlockCopy:
    src, dst, kind, *label = entry
    return BlockCopy(src, dst, _COPY_KINDS[kind], _to_label(label[0]) if label else None)


def _from_label(label: BlockLabel) -> Json:
    return [label.digest.hex(), label.parent.hex(), label.token_ids]


def _to_label(entry: Json) -> BlockLabel:
    digest, parent, token_ids = entry
    return BlockLabel(bytes.fromhex(digest), bytes.fromhex(parent), tuple(token_ids))


def _from_new_seq(new: NewSeq) -> Json:
    return [new.seq_id, new.token_ids, _changed(new.sampler), new.sample_index]


def _to_new_seq(entry: Json) -> NewSeq:
    seq_id, token_ids, sampler, sample_index = entry
    return NewSeq(seq_id, token_ids, _to_sampler(sampler), sample_index)


def _from_fork(fork: SeqFork) -> Json:
    return [*fork[:3], _changed(fork.sampler), fork.sample_index]


def _to_fork(entry: Json) -> SeqFork:
    parent_id, child_id, num_tokens, sampler, sample_index = entry
    return SeqFork(parent_id, child_id, num_tokens, _to_sampler(sampler), sample_index)


def _to_draw(entry: Json) -> BeamDraw:
    seq_ids, scores, num_candidates = entry
    return BeamDraw(tuple(seq_ids), tuple(scores), num_candidates)


def _list_of(convert: Callable[[Any], Any]) -> Callable[[Iterable[Any]], list[Any]]:
    return lambda values: [convert(value) for value in values]


_ENCODE_PLAN: dict[str, Callable[[Any], Json]] = {
    "new_seqs": _list_of(_from_new_seq),
    "forks": _list_of(_from_fork),
    "copies": _list_of(_from_copy),
    "seqs": _from_shares,
    "extra_draws": lambda draws: list(draws.items()),
}
_DECODE_PLAN: dict[str, Callable[[Json], Any]] = {
    "new_seqs": _list_of(_to_new_seq),
    "forks": _list_of(_to_fork),
    "appends": _list_of(tuple),
    "moved": _list_of(tuple),
    "copies": _list_of(_to_copy),
    "seqs": _to_shares,
    "extra_draws": lambda draws: {seq_id: tuple(others) for seq_id, others in draws},
    "beams": _list_of(_to_draw),
}


# -- requests and results


def _from_request(request: Request) -> Json:
    values = _changed(request, "told_at_end")  # decides nothing, and a replay looks at all
    if "sampler" in values:
        values["sampler"] = _changed(request.sampler)
    if request.beam is not None:
        values["beam"] = dataclasses.asdict(request.beam)
    for name in ("eos_token_ids", "stop_token_ids"):
        if name in values:
            values[name] = sorted(values[name])
    return values


def _to_request(values: Json) -> Request:
    values["sampler"] = _to_sampler(values.get("sampler", {}))
    if "beam" in values:
        values["beam"] = BeamSearchParams(**values["beam"])
    for name in ("eos_token_ids", "stop_token_ids"):
        values[name] = frozenset(values.get(name, ()))
    return Request(**values)


def _to_sampler(values: Json) -> SamplerParams:
    return SamplerParams(**{name: _frozen(value) for name, value in values.items()})


def _frozen(value: Json) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _from_result(result: StepResult) -> Json:
    values = _changed(result, "sampled", "prompt_logprobs")
    if result.sampled:
        seq_ids, token_ids, _ = zip(*result.sampled, strict=True)
        values["sampled"] = [seq_ids, token_ids]
    return values


def _to_result(values: Json) -> StepResult:
    drawn = zip(*values.pop("sampled", ((), ())), strict=True)
    sampled = [SeqResult(seq_id, token_id, None) for seq_id, token_id in drawn]
    beams = [[BeamCandidate(*one) for one in found] for found in values.pop("beams", ())]
    return StepResult(sampled=sampled, beams=beams, **values)


_ENCODE: dict[str, Callable[[Any], Json]] = {
    "plan": plan_to_json,
    "result": _from_result,
    "request": _from_request,
    "copies": _list_of(_from_copy),
}
_DECODE: dict[str, Callable[[Json], Any]] = {
    "plan": plan_from_json,
    "result": _to_result,
    "request": _to_request,
    "copies": lambda copies: tuple(map(_to_copy, copies)),
    "fetched": lambda fetched: tuple((disk_id, ok) for disk_id, ok in fetched),
    "reason": FinishReason,
}


# -- fields


def _check_types(value: Any, *but: str) -> None:
    """Raise `TypeError` or `ValueError` for a field that is not what the dataclass says."""
    for name, kind in get_type_hints(type(value)).items():
        found = getattr(value, name)
        if name in but:
            continue
        if get_origin(kind) is Literal:
            if found not in get_args(kind):
                raise ValueError(f"{name} is {found!r}, none of {', '.join(get_args(kind))}")
        elif type(found) is not kind and not (kind is float and type(found) is int):
            raise TypeError(f"{name} is {found!r}, no {kind.__name__}")


class _Fields:
    """A dataclass's fields, all read in one go, and the values that need not be written."""

    def __init__(self, kind: type) -> None:
        fields = dataclasses.fields(kind)
        self.names = [field.name for field in fields]
        self.get = operator.attrgetter(*self.names)
        self.defaults = [
            field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
            for field in fields
        ]


_FIELDS = {
    kind: _Fields(kind)
    for kind in (*_NAMES, RecordHeader, StepPlan, StepResult, Request, SamplerParams)
}


def _changed(value: Any, *but: str) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    fields = _FIELDS[type(value)]
    found = zip(fields.names, fields.get(value), fields.defaults, strict=True)
    return {name: x for name, x, default in found if x != default and name not in but}
