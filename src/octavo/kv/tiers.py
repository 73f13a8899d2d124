"""The tiers behind the pool: which host and disk blocks hold what, and which of them go next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from octavo.errors import ConfigError, IntegrityError
from octavo.kv.node import NOWHERE, Node, block_key
from octavo.kv.policy import AllocationPolicy
from octavo.plan import PLANS_UNDER_WAY, BlockLabel
from octavo.util import human_bytes


class ColdStore(Protocol):
    """What the memory room asks of a disk. Writing is the runner's, by `CopyKind.TO_DISK`."""

    def fetch(self, disk_id: int) -> bool:
        """Read and verify a block into memory, for the FROM_DISK copy of the coming plan. False:
        it is damaged or gone, and will not be asked for again."""
        ...

    def delete(self, disk_id: int) -> None:
        """Forget a block; one that was fetched can still be copied."""
        ...

    def entries(self) -> list[tuple[int, BlockLabel]]:
        """What an earlier process left, the least recently written first."""
        ...


def check_tiers(
    policy: AllocationPolicy,
    *,
    num_host_blocks: int,
    max_disk_blocks: int,
    has_disk: bool,
    caches_prefixes: bool,
) -> None:
    """Raises `ConfigError` for tiers that cannot be used."""
    if num_host_blocks < 0 or max_disk_blocks < 0:
        raise ConfigError(
            f"num_host_blocks={num_host_blocks} and max_disk_blocks={max_disk_blocks} must not "
            "be negative: --swap-space, --kv-disk-bytes"
        )
    if num_host_blocks and not policy.shares_blocks:
        raise ConfigError(
            f"--kv-policy {policy.name} moves no blocks to host memory, and {num_host_blocks:,} "
            "host blocks were asked for: --swap-space 0, or --kv-policy paged"
        )
    if has_disk and not (num_host_blocks and caches_prefixes):
        raise ConfigError(
            "the disk tier keeps cached blocks, which pass through host memory: it needs "
            f"--enable-prefix-caching and a --swap-space of at least one block, and there are "
            f"{num_host_blocks}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierLedger:
    """The blocks of a tier behind the pool: held + cached + free = its blocks (I7)."""

    num_blocks: int
    held: int
    """Blocks kept for preempted sequences."""
    cached: int
    """Blocks that may be used again."""
    free: int
    bytes_per_block: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tier."""
        return self.num_blocks * self.bytes_per_block

    def terms(self) -> dict[str, int]:
        """The kinds of blocks, which add up to the tier."""
        return {"held": self.held, "cached": self.cached, "free": self.free}

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless the terms are sane and sum to the tier."""
        if sum(self.terms().values()) != self.num_blocks or min(self.terms().values()) < 0:
            raise IntegrityError(
                f"the ledger of a tier does not add up: {self.terms()}, expected "
                f"{self.num_blocks} blocks"
            )

    def __str__(self) -> str:
        parts = (
            f"{num:,} {name} ({human_bytes(num * self.bytes_per_block)})"
            for name, num in self.terms().items()
        )
        return f"{self.num_blocks:,} blocks, {human_bytes(self.num_bytes)}: {', '.join(parts)}"


class HostTier:
    """Blocks in host memory. A block that nobody waits for may be used again, the least recently
    used first."""

    __slots__ = ("_free", "_lru", "nodes")

    def __init__(self, num_blocks: int) -> None:
        self.nodes: list[Node | None] = [None] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._lru: OrderedDict[int, Node] = OrderedDict()

    @property
    def num_blocks(self) -> int:
        """Blocks in the tier."""
        return len(self.nodes)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def room(self) -> int:
        """Blocks that can be had: free ones, and those that nobody waits for."""
        return len(self._free) + len(self._lru)

    def oldest(self) -> Node | None:
        """The node whose block is used again first; None: every block is waited for."""
        return next(iter(self._lru.values()), None)

    def put(self, node: Node) -> int:
        """Give the node a free block."""
        host_id = node.host_id = self._free.pop()
        self.nodes[host_id] = node
        if not node.num_holds:
            self._lru[host_id] = node
        return host_id

    def remove(self, node: Node) -> None:
        """Take the node's block away."""
        host_id, node.host_id = node.host_id, NOWHERE
        self.nodes[host_id] = None
        self._lru.pop(host_id, None)
        self._free.append(host_id)

    def touch(self, node: Node, *, last: bool = True) -> None:
        """The node was used; or, with `last=False`, its block may go first."""
        if node.host_id in self._lru:
            self._lru.move_to_end(node.host_id, last=last)

    def hold(self, node: Node) -> None:
        """One more waits for the node, wherever it is."""
        node.num_holds += 1
        self._lru.pop(node.host_id, None)

    def unhold(self, node: Node) -> None:
        """One fewer waits for it."""
        node.num_holds -= 1
        assert node.num_holds >= 0
        if not node.num_holds and node.host_id >= 0:
            self._lru[node.host_id] = node

    def cached(self) -> list[Node]:
        """Nodes that nobody waits for, the next to go first."""
        return list(self._lru.values())

    def check_integrity(self) -> None:
        """Raise `IntegrityError` for a block that is not exactly one of free, held or cached."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a host block is free twice")
        for host_id, node in enumerate(self.nodes):
            if (node is None) != (host_id in free):
                raise IntegrityError(f"host block {host_id} is neither or both of free and used")
            if node is None:
                continue
            if node.host_id != host_id:
                raise IntegrityError(
                    f"host block {host_id} belongs to a node that names {node.host_id}"
                )
            if (host_id in self._lru) == (node.num_holds > 0):
                raise IntegrityError(
                    f"host block {host_id} has {node.num_holds} holds and "
                    + ("may go" if host_id in self._lru else "can never go")
                )
        if len(self._lru) + sum(n is not None and n.num_holds > 0 for n in self.nodes) + len(
            free
        ) != len(self.nodes):
            raise IntegrityError("host blocks are counted twice")


class Orphan(NamedTuple):
    """A block that an earlier process left, and that has no node in the tree yet."""

    parent: bytes
    """The digest above it."""
    key: bytes
    """Its own tokens."""


class DiskTier:
    """Blocks on disk: which node each belongs to, the least recently used in front.

    Ids are never used twice. Blocks that an earlier process left belong to nobody (an orphan)
    until somebody looks for them.
    """

    def __init__(
        self,
        store: ColdStore,
        max_blocks: int,
        on_lost: Callable[[Node], None],
        is_right: Callable[[BlockLabel, bytes], bool],
    ) -> None:
        """`on_lost` is called with every node that has lost its block here. `is_right` is asked of
        every label, with its tokens as a key; blocks with one that is not right are deleted."""
        self._store = store
        self._on_lost = on_lost
        self.max_blocks = max_blocks
        self._nodes: OrderedDict[int, tuple[Node | Orphan, int]] = OrderedDict()
        """By disk id: the owner and the plan in which it is written."""
        self.orphans: dict[bytes, dict[bytes, int]] = {}
        """Blocks without an owner, by the digest above them and their tokens."""
        self._next_id = 0
        for disk_id, label in store.entries():
            self._next_id = max(self._next_id, disk_id + 1)
            orphan = Orphan(label.parent, block_key(label.token_ids, 0, len(label.token_ids)))
            if not is_right(label, orphan.key):
                store.delete(disk_id)
                continue
            before = self.orphans.get(orphan.parent, {}).get(orphan.key)
            if before is not None:
                self.delete(before)
            self._nodes[disk_id] = (orphan, -PLANS_UNDER_WAY)
            self.orphans.setdefault(orphan.parent, {})[orphan.key] = disk_id
        while len(self._nodes) > max_blocks:
            self.delete(next(iter(self._nodes)))

    def __len__(self) -> int:
        return len(self._nodes)

    def put(self, node: Node, plan: int) -> int | None:
        """A new id for the node; None when all room is taken by blocks still on their way."""
        if len(self._nodes) >= self.max_blocks:
            oldest, (_, written) = next(iter(self._nodes.items()), (NOWHERE, (None, 0)))
            if oldest < 0 or plan - written < PLANS_UNDER_WAY:
                return None
            self.delete(oldest)
        disk_id = node.disk_id = self._next_id
        self._next_id += 1
        self._nodes[disk_id] = (node, plan)
        return disk_id

    def can_fetch(self, node: Node, plan: int) -> bool:
        """Whether the node's block can have arrived on the disk."""
        return node.disk_id >= 0 and plan - self._nodes[node.disk_id][1] >= PLANS_UNDER_WAY

    def fetch(self, node: Node) -> bool:
        """Read the node's block for the coming plan; a block that cannot be read is forgotten."""
        disk_id = node.disk_id
        if self._store.fetch(disk_id):
            self._nodes.move_to_end(disk_id)
            return True
        self.delete(disk_id)
        return False

    def delete(self, disk_id: int) -> None:
        """Forget a block."""
        owner, _ = self._nodes.pop(disk_id)
        self._store.delete(disk_id)
        if isinstance(owner, Node):
            owner.disk_id = NOWHERE
            self._on_lost(owner)
        else:
            self._forget_orphan(owner)

    def adopt(self, disk_id: int, node: Node) -> None:
        """An orphan has found its node, which has no block on disk."""
        orphan, written = self._nodes[disk_id]
        assert isinstance(orphan, Orphan) and orphan.key == node.key and node.disk_id < 0
        self._forget_orphan(orphan)
        self._nodes[disk_id] = (node, written)
        node.disk_id = disk_id

    def delete_all(self) -> None:
        """Forget every block."""
        for disk_id in list(self._nodes):
            self.delete(disk_id)

    def delete_since(self, plan: int) -> None:
        """Forget the blocks that were to be written in this plan or later: they were not."""
        for disk_id, (_, written) in list(self._nodes.items()):
            if written >= plan:
                self.delete(disk_id)

    def check_integrity(self, num_nodes: int) -> None:
        """Raise `IntegrityError` unless the blocks are those of `num_nodes` nodes and orphans."""
        orphans = {i for siblings in self.orphans.values() for i in siblings.values()}
        num_owned = 0
        for disk_id, (owner, _) in self._nodes.items():
            if isinstance(owner, Node):
                num_owned += 1
                if owner.disk_id != disk_id:
                    raise IntegrityError(
                        f"disk block {disk_id} belongs to a node that names {owner.disk_id}"
                    )
            elif disk_id not in orphans:
                raise IntegrityError(f"disk block {disk_id} is an orphan that cannot be found")
        if num_owned != num_nodes or len(self._nodes) != num_nodes + len(orphans):
            raise IntegrityError(
                f"{len(self._nodes)} disk blocks, {num_owned} of nodes, are expected to be "
                f"{num_nodes} of nodes and {len(orphans)} orphans"
            )

    def _forget_orphan(self, orphan: Orphan) -> None:
        siblings = self.orphans[orphan.parent]
        del siblings[orphan.key]
        if not siblings:
            del self.orphans[orphan.parent]
