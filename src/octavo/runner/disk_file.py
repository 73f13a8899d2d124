"""A KV block as a file: what it is written as, and proof that it is still that when it is read.

Little-endian: magic, version, bytes of the header, bytes of the data, fingerprint of the model,
digest of the data, lengths of the label's parts, the label (its digest, its parent's, its tokens as
int64), digest of all this; then the data. So the last digest vouches for every byte of the file.

Digests are BLAKE2b of 16 bytes. A CRC of 32 bits lets one damage in 2**32 pass, too many for a
cache that reads gigabytes for months; BLAKE2b is in the standard library, fast without special
instructions (730 MB/s where a CRC makes 4000), and its misses can be forgotten about.
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.plan import BlockLabel

VERSION = 2
"""Written into every file; files of another version are not read."""

_MAGIC = b"octavoKV"
_DIGEST_BYTES = 16
_FIXED = struct.Struct("<8sIIQ16s16sHHI")
_MAX_HEADER_BYTES = 1 << 24

Bytes = NDArray[np.uint8]


class DamagedFileError(Exception):
    """The file is not what was written, or was written for something else; says what is wrong."""


class Header(NamedTuple):
    """What a file says about its block."""

    label: BlockLabel
    data_digest: bytes
    num_bytes: int
    """Of the header, which the data follow."""


def digest_of(data: bytes | memoryview) -> bytes:
    """16 bytes that stand for `data`."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def write_block(path: Path, fingerprint: bytes, label: BlockLabel, data: Bytes) -> None:
    """Write a block under another name and move it to `path`. Raises `OSError`.

    The process may die at any point: `path` is either not there or whole. A machine that loses its
    power may leave part of a file behind; that is noticed when it is read, so that waiting for the
    disk (fsync) would cost time and win nothing.
    """
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(_pack_header(fingerprint, label, data))
            file.write(data.data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _pack_header(fingerprint: bytes, label: BlockLabel, data: Bytes) -> bytes:
    tokens = np.array(label.token_ids, dtype="<i8").tobytes()
    variable = label.digest + label.parent + tokens
    num_bytes = _FIXED.size + len(variable) + _DIGEST_BYTES
    fixed = _FIXED.pack(
        _MAGIC, VERSION, num_bytes, data.nbytes, fingerprint, digest_of(data.data),
        len(label.digest), len(label.parent), len(label.token_ids),
    )  # fmt: skip
    return fixed + variable + digest_of(fixed + variable)


def read_header(file: BinaryIO, fingerprint: bytes, block_bytes: int) -> Header:
    """Read and verify all but the data. Raises `DamagedFileError` or `OSError`.

    fingerprint, block_bytes: what the file must have been written for. The length of the data is
    verified too: a file that was cut off is noticed without being read.
    """
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size or fixed[: len(_MAGIC)] != _MAGIC:
        raise DamagedFileError("cut off, or not a block")
    _, version, num_bytes, data_bytes, owner, data_digest, *lengths = _FIXED.unpack(fixed)
    if version != VERSION:
        raise DamagedFileError(f"of version {version}, not {VERSION}")
    digest_bytes, parent_bytes, num_tokens = lengths
    if num_bytes != _FIXED.size + digest_bytes + parent_bytes + 8 * num_tokens + _DIGEST_BYTES:
        raise DamagedFileError("header damaged")
    rest = file.read(min(num_bytes, _MAX_HEADER_BYTES) - _FIXED.size)
    variable, own_digest = rest[:-_DIGEST_BYTES], rest[-_DIGEST_BYTES:]
    if digest_of(fixed + variable) != own_digest:
        raise DamagedFileError("header damaged")
    if owner != fingerprint or data_bytes != block_bytes:
        raise DamagedFileError("of another model")
    if os.fstat(file.fileno()).st_size != num_bytes + block_bytes:
        raise DamagedFileError("cut off, or too long")
    parent_end = digest_bytes + parent_bytes
    tokens: list[int] = np.frombuffer(variable[parent_end:], dtype="<i8").tolist()
    label = BlockLabel(variable[:digest_bytes], variable[digest_bytes:parent_end], tuple(tokens))
    return Header(label, data_digest, num_bytes)


def read_block(path: Path, fingerprint: bytes, block_bytes: int) -> Bytes:
    """[block_bytes] uint8, verified. Raises `DamagedFileError` or `OSError`."""
    with path.open("rb") as file:
        header = read_header(file, fingerprint, block_bytes)
        data = np.empty(block_bytes, dtype=np.uint8)
        if file.readinto(data.data) != block_bytes or digest_of(data.data) != header.data_digest:
            raise DamagedFileError("data damaged")
    return data
