"""The record of an engine's decisions: what is in it, and how it is written and read."""

from __future__ import annotations

from octavo.record.calls import (
    RECORD_VERSION,
    Aborted,
    Added,
    CacheReset,
    Call,
    Ended,
    EngineLimits,
    Finished,
    Flushed,
    Pinned,
    PrefixCacheReset,
    RecordHeader,
    Resized,
    Retold,
    Scheduled,
    Unpinned,
    Updated,
    totals_of,
)
from octavo.record.codec import decode_call, decode_header, encode_call, encode_header
from octavo.record.file import RecordReader, RecordWriter

__all__ = [
    "RECORD_VERSION",
    "Aborted",
    "Added",
    "CacheReset",
    "Call",
    "Ended",
    "EngineLimits",
    "Finished",
    "Flushed",
    "Pinned",
    "PrefixCacheReset",
    "RecordHeader",
    "RecordReader",
    "RecordWriter",
    "Resized",
    "Retold",
    "Scheduled",
    "Unpinned",
    "Updated",
    "decode_call",
    "decode_header",
    "encode_call",
    "encode_header",
    "totals_of",
]
