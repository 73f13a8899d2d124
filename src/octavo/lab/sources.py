"""The text of a trace file as requests, line by line, in each of the formats."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from octavo.errors import TraceError
from octavo.lab.rows import BadLine, Columns
from octavo.lab.sharegpt import first_round, is_conversation, read_conversations
from octavo.lab.trace import TraceRequest

TraceFormat = Literal["auto", "csv", "azure", "burstgpt", "jsonl", "mooncake", "sharegpt"]
"""csv: lengths under usual column names. azure: TIMESTAMP, ContextTokens, GeneratedTokens.
burstgpt: Timestamp, Request tokens, Response tokens. jsonl: a request a line, after a header where
there are hash ids. mooncake: milliseconds, ids of 512 tokens where no header says otherwise, or a
CSV file under its names. sharegpt: conversations.
"""
Tokenize = Callable[[str], int]
"""The number of tokens of a text."""
Line = tuple[str, TraceRequest | BadLine | None]
"""Where, as `line 7`; the request there, what is wrong, or None for what is no request."""

_FAMILY_COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}
_ANSWER = _FAMILY_COLUMNS["burstgpt"][2]
"""0 of them: the request failed."""
_MOONCAKE = (512, 1e-3)
"""Tokens of a hash id, seconds of a time unit."""
_BAILIAN = (16, 1.0)
"""The same of Alibaba's traces, which name their fields alike and have a chat_id."""
_PARENT_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Source:
    """A file that was recognised."""

    lines: Iterator[Line]
    block_tokens: int = 0
    """Tokens that a hash id stands for."""
    has_texts: bool = False
    """Whether a tokenizer makes the lengths."""


def read_source(text: Iterable[str], format: TraceFormat, tokenize: Tokenize | None) -> Source:
    """The lines of a file, by its format. Raises `BadLine` for what spoils the whole file."""
    numbered = ((n, line) for n, line in enumerate(text, 1) if line.strip())
    first = next(numbered, None)
    if first is None:
        raise BadLine("the file is empty")
    kind = _sniff(first[1]) if format == "auto" else format
    lines = itertools.chain([first], numbered)
    if kind == "mooncake" and first[1].lstrip()[:1] != "{":
        kind = "csv"
    if kind == "sharegpt":
        return Source(_sharegpt(lines, tokenize), has_texts=True)
    if kind in ("jsonl", "mooncake"):
        return _json_lines(lines, kind)
    return _csv(lines, kind)


def _sniff(line: str) -> TraceFormat:
    """What a file is by its first line that is not blank."""
    start = line.lstrip()[:1]
    if start == "[":
        return "sharegpt"
    if start != "{":
        return "csv"
    try:
        row = json.loads(line)
    except ValueError:
        raise BadLine(
            "begins with { but its first line is no JSON object; JSON lines hold a request each, "
            "ShareGPT files a list of conversations"
        ) from None
    if is_conversation(row):
        return "sharegpt"
    return "mooncake" if "input_length" in row else "jsonl"


def _csv(lines: Iterator[tuple[int, str]], kind: str) -> Source:
    number, header = next(lines)
    comma = max(",;\t", key=header.count)
    names = [name.strip() for name in _cells(header, comma)]
    if all(_is_number(name) for name in names):
        raise BadLine(
            f"line {number} must name the columns, such as arrival_s,input_tokens,output_tokens; "
            f"it is {header.strip()!r:.80}"
        )
    missing = [name for name in _FAMILY_COLUMNS.get(kind, ()) if name not in names]
    if missing:
        raise BadLine(f"is no {kind} trace, it has no column {missing[0]!r}; leave the format out")
    try:
        columns = Columns(names, _csv_unit_s(names))
    except BadLine as error:
        raise BadLine(f"is no trace that is known here: line {number} {error}") from None
    block_tokens = _PARENT_BLOCK_TOKENS if columns.has_parents else 0
    return Source(_csv_rows(lines, names, columns, comma), block_tokens)


def _csv_unit_s(names: Sequence[str]) -> float:
    """Under Mooncake's names times are Mooncake's, unless they are those of Alibaba's traces."""
    own = ("timestamp", "input_length", "output_length")
    is_mooncake = all(name in names for name in own) and "chat_id" not in names
    return _MOONCAKE[1] if is_mooncake else 1.0


def _csv_rows(
    lines: Iterator[tuple[int, str]], names: list[str], columns: Columns, comma: str
) -> Iterator[Line]:
    family = _Family() if columns.has_parents else None
    for row, (number, line) in enumerate(lines):
        try:
            cells = [cell.strip() for cell in _cells(line, comma)]
            if len(cells) != len(names):
                raise BadLine(f"has {len(cells)} values, the header names {len(names)} columns")
            values = dict(zip(names, cells, strict=True))
            if values.get(_ANSWER) == "0":
                yield f"line {number}", None
                continue
            request = columns.request(values)
            if family is not None:
                request = family.with_ids(row, request, *columns.parent(values))
            yield f"line {number}", request
        except BadLine as error:
            yield f"line {number}", error


def _cells(line: str, comma: str) -> list[str]:
    """Line by line, so that a stray quote spoils one line only."""
    _check_text(line)
    try:
        return next(csv.reader([line], delimiter=comma))
    except csv.Error as error:
        raise BadLine(str(error)) from None


def _check_text(line: str) -> None:
    """Bytes that are no UTF-8 come as surrogates (PEP 383)."""
    if not line.isascii() and any("\udc80" <= character <= "\udcff" for character in line):
        raise BadLine("is no text in UTF-8")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return not text
    return True


class _Family:
    """Hash ids for lines that name the line whose prompt theirs begins with."""

    def __init__(self) -> None:
        self._ids: dict[int, tuple[int, ...]] = {}
        self._next_id = 0

    def with_ids(self, row: int, request: TraceRequest, parent: int, shared: int) -> TraceRequest:
        """The request with ids: the parent's for whole blocks of what is shared, then new ones."""
        num_blocks = request.num_input // _PARENT_BLOCK_TOKENS
        ids = self._ids.get(parent, ())[: min(num_blocks, shared // _PARENT_BLOCK_TOKENS)]
        num_new = num_blocks - len(ids)
        ids += tuple(range(self._next_id, self._next_id + num_new))
        self._next_id += num_new
        self._ids[row] = ids
        return replace(request, hash_ids=ids)


def _json_lines(lines: Iterator[tuple[int, str]], kind: str) -> Source:
    number, first = next(lines)
    try:
        row = _object(first)
    except BadLine:
        row = {}  # named when its turn comes
    block_tokens, unit_s = 0, 1.0
    if "header" in row:
        block_tokens = _header_block_tokens(row["header"], number)
        unit_s = _MOONCAKE[1] if kind == "mooncake" else 1.0
    else:
        lines = itertools.chain([(number, first)], lines)
        if kind == "mooncake":
            block_tokens, unit_s = _BAILIAN if "chat_id" in row else _MOONCAKE
    return Source(_json_rows(lines, block_tokens, unit_s), block_tokens)


def _header_block_tokens(header: Any, number: int) -> int:
    value = header.get("block_tokens", 0) if isinstance(header, dict) else None
    if type(value) is not int or value < 0:
        raise BadLine(
            f"line {number}: the header must be an object whose block_tokens says how many tokens "
            f"a hash id stands for, got {header!r:.80}"
        )
    return value


def _json_rows(
    lines: Iterator[tuple[int, str]], block_tokens: int, unit_s: float
) -> Iterator[Line]:
    known: dict[tuple[str, ...], Columns] = {}
    for number, line in lines:
        try:
            row = _object(line)
            names = tuple(row)
            if names not in known:
                known[names] = Columns(names, unit_s)
            request = known[names].request(row)
            _check_ids(request, block_tokens)
            yield f"line {number}", request
        except BadLine as error:
            yield f"line {number}", error


def _check_ids(request: TraceRequest, block_tokens: int) -> None:
    """There may be an id for what is left behind the last whole block, but no more."""
    num_ids = len(request.hash_ids)
    if num_ids and not block_tokens:
        raise BadLine(
            "has hash_ids, and no first line "
            '{"header": {"block_tokens": B}} says how many tokens an id stands for'
        )
    if num_ids and (num_ids - 1) * block_tokens >= request.num_input:
        raise BadLine(
            f"has {num_ids} hash_ids of {block_tokens} tokens for a prompt of "
            f"{request.num_input} tokens"
        )


def _object(line: str) -> dict[str, Any]:
    _check_text(line)
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine(f"is no JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadLine(f"must be a JSON object, got {line.strip():.60}")
    return row


def _sharegpt(lines: Iterator[tuple[int, str]], tokenize: Tokenize | None) -> Iterator[Line]:
    if tokenize is None:
        raise TraceError(
            "ShareGPT files hold texts: give a tokenizer (tokenize=, --tokenizer FOLDER) to count "
            "their tokens"
        )
    for where, found in read_conversations(_texts(lines)):
        try:
            texts = first_round(found) if not isinstance(found, BadLine) else found
        except BadLine as error:
            texts = error
        if isinstance(texts, tuple):
            num_input, num_output = (tokenize(text) for text in texts)
            usable = num_input > 0 and num_output > 0
            request = TraceRequest(num_input=num_input, num_output=num_output) if usable else None
            yield where, request
        else:
            yield where, texts


def _texts(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """A list of conversations is read as a whole: so is what is wrong with it."""
    for number, line in lines:
        try:
            _check_text(line)
        except BadLine as error:
            raise BadLine(f"line {number} {error}") from None
        yield number, line
