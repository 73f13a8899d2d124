"""Nodes of the prefix tree: a block's tokens behind all blocks before it, and where its KV is."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

NOWHERE = -1
"""In place of a block's number: not in this memory."""
TOKEN_BYTES = 8


def block_key(token_ids: Sequence[int], start: int, end: int) -> bytes:
    """Tokens `start .. end - 1` as 64-bit integers: the exact key of a block, not a hash of it."""
    return array("q", token_ids[start:end]).tobytes()


def tokens_of_key(key: bytes) -> tuple[int, ...]:
    """The way back."""
    tokens = array("q")
    tokens.frombytes(key)
    return tuple(tokens)


def num_common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the longest common prefix of two keys."""
    num_bytes = min(len(a), len(b))
    different = int.from_bytes(a[:num_bytes], "little") ^ int.from_bytes(b[:num_bytes], "little")
    if not different:
        return num_bytes // TOKEN_BYTES
    lowest_bit = (different & -different).bit_length() - 1
    return lowest_bit // (8 * TOKEN_BYTES)


class Node:
    """The tokens of one block below those of its parent, and the blocks that hold their KV.

    Full nodes have as many tokens as a block. Partial ones have fewer and no children. A node
    without a block anywhere is a ghost: it explains misses, and its children are found again as
    soon as it has a block again.
    """

    __slots__ = (
        "block_id",
        "children",
        "digest",
        "disk_id",
        "evicted_s",
        "host_id",
        "key",
        "keys",
        "num_holds",
        "parent",
        "step",
    )

    def __init__(self, parent: Node | None, key: bytes) -> None:
        self.parent = parent
        """None of a root, and of a node that was taken out of the tree."""
        self.key = key
        self.children: dict[bytes, Node] = {}
        self.keys: list[bytes] = []
        """Keys of the children where there are several, sorted: equal beginnings lie side by
        side. Of no meaning where there are fewer."""
        self.block_id = NOWHERE
        """Its block in the pool."""
        self.host_id = NOWHERE
        self.disk_id = NOWHERE
        self.num_holds = 0
        """Waiting sequences for which its KV is kept, or must be moved to the host when it leaves
        the pool; while it is on the host it stays there."""
        self.step = 0
        """The step that computes its tokens; or a later one, where it is not known."""
        self.evicted_s: float | None = None
        """Of a ghost: when its last block was lost."""
        self.digest: bytes | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of its own."""
        return len(self.key) // TOKEN_BYTES

    @property
    def is_resident(self) -> bool:
        """Whether some memory holds its KV."""
        return self.block_id >= 0 or self.host_id >= 0 or self.disk_id >= 0


class Root(Node):
    """The beginning of all prefixes of one name: a salt, or a request where nothing is cached."""

    __slots__ = ("name",)

    def __init__(self, name: RootName) -> None:
        super().__init__(None, b"")
        self.name = name


RootName = tuple[str, str]
"""(salt, "") with the prefix cache, ("", request) without."""
