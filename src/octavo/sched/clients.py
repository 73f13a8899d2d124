"""Accounts of clients: what each has got, and what it holds of the pool."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from octavo.kv.manager import KVCacheManager
from octavo.sched.events import over_share
from octavo.sched.sequence import SequenceGroup

INPUT_WEIGHT = 1.0
"""Of a prompt token that is computed; one found in the prefix cache is free."""
OUTPUT_WEIGHT = 2.0
"""Of a token generated."""
_MAX_IDLE = 1024
"""Clients without a request whose counters are kept."""
_FORGET_EVERY = 256
"""Requests that end between two looks for idle clients."""


def service_of(group: SequenceGroup) -> float:
    """What a request has got. Tokens computed again after a preemption are not charged again."""
    output = OUTPUT_WEIGHT * group.stats.metrics.num_generation_tokens
    return INPUT_WEIGHT * group.num_charged_tokens + output


@dataclass(slots=True, eq=False)
class ClientAccount:
    """A client and what it has got."""

    client_id: str
    ended: float = 0.0
    """Service of requests that have ended."""
    lifted: float = 0.0
    """What its counter was raised by when it came back: service that it did not get."""
    live: dict[SequenceGroup, None] = field(default_factory=dict)
    """Its requests that have begun and not ended: those that wait have got nothing."""
    num_requests: int = 0
    """Its requests that have not ended."""

    @property
    def service(self) -> float:
        """What it has got."""
        return self.ended + sum(service_of(group) for group in self.live)

    @property
    def counter(self) -> float:
        """The virtual token counter."""
        return self.lifted + self.service


class Clients:
    """The accounts of all clients; of idle ones the latest, and those who got most."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._accounts: dict[str, ClientAccount] = {}
        self._num_closed = 0

    def add(self, group: SequenceGroup) -> None:
        """A request has come."""
        self.of(group).num_requests += 1

    def begin(self, group: SequenceGroup) -> None:
        """A request runs for the first time."""
        self.of(group).live[group] = None

    def close(self, group: SequenceGroup) -> None:
        """A request has ended."""
        account = self.of(group)
        account.num_requests -= 1
        if group in account.live:
            del account.live[group]
            account.ended += service_of(group)
        self._num_closed += 1
        if self._num_closed % _FORGET_EVERY == 0 and len(self._accounts) > 2 * _MAX_IDLE:
            self._forget()

    def of(self, group: SequenceGroup) -> ClientAccount:
        """The account that a request is on."""
        client_id = group.request.client_id
        account = self._accounts.get(client_id)
        if account is None:
            account = self._accounts[client_id] = ClientAccount(client_id)
        return account

    def __iter__(self) -> Iterator[ClientAccount]:
        return iter(self._accounts.values())

    def service(self) -> dict[str, float]:
        """By client what it has got, in weighted tokens."""
        return {account.client_id: account.service for account in self}

    def blocks(self) -> dict[str, int]:
        """By client with live requests the blocks that these hold."""
        return {account.client_id: self._num_held(account) for account in self if account.live}

    def _num_held(self, account: ClientAccount) -> int:
        """Blocks of its requests; one that several of them share counts for each."""
        return sum(self._kv.num_blocks_of(group.request.request_id) for group in account.live)

    def why_over_share(self, group: SequenceGroup) -> str | None:
        """Why a request may not begin now: its client holds its share of the pool; None: it may.
        Who holds nothing may, whatever it needs."""
        share = group.request.max_kv_share
        if share is None:
            return None
        account, num_blocks = self.of(group), self._kv.num_blocks
        num_held = self._num_held(account)
        num_needed = self._kv.num_needed(len(group.request.prompt_token_ids))
        if not num_held or num_held + num_needed <= share * num_blocks:
            return None
        return over_share(account.client_id, num_held, num_needed, share, num_blocks)

    def _forget(self) -> None:
        """Who got least would be lifted when it comes back: its counter need not be kept."""
        idle = sorted((a for a in self if not a.num_requests), key=lambda a: a.counter)
        for account in idle[: max(0, len(idle) - _MAX_IDLE)]:
            del self._accounts[account.client_id]
