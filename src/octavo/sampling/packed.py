"""A sequence's sampling parameters as one piece of bytes.

The columns of a step are the pieces of its sequences one after another, read by numpy at once: in a
busy engine somebody comes or goes in nearly every step, and reading a thousand dataclasses for that
took a millisecond.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.request import SamplerParams

_FIELDS = [
    ("key", "<u8"),
    ("temperature", "<f8"),
    ("top_p", "<f8"),
    ("min_p", "<f8"),
    ("repetition", "<f8"),
    ("frequency", "<f8"),
    ("presence", "<f8"),
    ("top_k", "<i8"),
    ("greedy", "?"),
    ("plain", "?"),
    ("bannable", "?"),
    ("counted", "?"),
    ("biased", "?"),
    ("allowed", "?"),
    ("logprobs", "?"),
]
_PACKED = np.dtype(_FIELDS)
_STRUCT = struct.Struct("<Q6dq7?")
assert _STRUCT.size == _PACKED.itemsize


def pack(params: SamplerParams, key: int, *, greedy: bool, plain: bool, counted: bool) -> bytes:
    """A sequence's numbers, and what else there is. key: of its random stream; counted: whether
    its past is counted, for penalties."""
    return _STRUCT.pack(
        key,
        params.temperature,
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        min(params.top_k, 2**31 - 1),
        greedy,
        plain,
        bool(params.bad_words or (params.min_tokens and params.min_tokens_masked_ids)),
        counted,
        bool(params.logit_bias),
        params.allowed_token_ids is not None,
        params.num_logprobs is not None,
    )


def unpack(pieces: Iterable[bytes]) -> NDArray[Any]:
    """[num_seqs] records, whose fields are the columns."""
    columns: NDArray[Any] = np.frombuffer(bytearray().join(pieces), _PACKED)
    return columns
