"""Prompts for a simulation: token ids that are equal exactly where the trace says texts are.

Only equality matters to the memory room, so every token of a block, of a prefix, or of the rest of
a prompt is one and the same number: lists that are cheap to make and never equal by chance.
"""

from __future__ import annotations

import hashlib

from octavo.lab.trace import TraceRequest

_KINDS = 3
"""Ids, prefixes and rests have their own numbers: remainders 0, 1 and 2."""


class PromptMaker:
    """Makes the prompts of one workload; keeps nothing."""

    def __init__(self, block_tokens: int = 0, unique: bool = True) -> None:
        """block_tokens: tokens that a hash id stands for (`Trace.block_tokens`).
        unique: whether contents matter (prefix caching is on); if not, all tokens are 0."""
        self._block_tokens = block_tokens
        self._unique = unique

    def make(self, request: TraceRequest, index: int) -> list[int]:
        """Token ids of a prompt, `num_input` numbers >= 0: its named prefix, then the blocks of its
        `hash_ids`, then what no other request has.

        index: number of the request, >= 0; equal only for a request that comes once more.
        """
        num = request.num_input
        if not self._unique:
            return [0] * num
        if not request.hash_ids and not request.prefix_tokens:
            return [_KINDS * index + 2] * num
        ids = [_KINDS * _number(request.prefix) + 1] * min(request.prefix_tokens, num)
        for block in request.hash_ids:
            if len(ids) >= num:
                break
            ids += [_KINDS * block] * self._block_tokens
        del ids[num:]
        ids += [_KINDS * index + 2] * (num - len(ids))
        return ids


def _number(name: str) -> int:
    """The same for the same name, in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
