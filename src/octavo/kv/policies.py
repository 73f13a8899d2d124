"""Allocation policies by the names of `--kv-policy`."""

from __future__ import annotations

from octavo.config import KVPolicy
from octavo.errors import ConfigError
from octavo.kv.contiguous import ContiguousPolicy
from octavo.kv.orca import OrcaPolicy
from octavo.kv.paged import PagedPolicy
from octavo.kv.policy import AllocationPolicy


def make_policy(
    name: KVPolicy,
    *,
    max_seq_tokens: int,
    max_batch: int | None = None,
    max_padded_tokens: int | None = None,
    region_tokens: int | None = None,
    windows: tuple[int, ...] = (0,),
    max_chunk_tokens: int = 1,
) -> AllocationPolicy:
    """A fresh policy for one pool.

    `max_seq_tokens` is the longest sequence. Of `contiguous` only: `max_batch` requests at most in
    a batch, at most `max_padded_tokens` of its longest prompt and longest output together, and
    `region_tokens` reserved for each sequence (None: `max_seq_tokens`). Of `paged` only: the
    `windows` of layer groups (see `PagedPolicy`) and the most tokens that a sequence computes in a
    step. Raises `ConfigError` for a limit below 1, one that the policy does not have, and an
    unknown name.
    """
    limits = {
        "max_batch": max_batch,
        "max_padded_tokens": max_padded_tokens,
        "region_tokens": region_tokens,
    }
    given = [limit for limit, value in limits.items() if value is not None]
    if given and name != "contiguous":
        raise ConfigError(f"{given[0]} is a limit of --kv-policy contiguous, not of {name}")
    if windows != (0,) and name != "paged":
        raise ConfigError(f"--kv-policy {name} keeps all layers in one group: use paged")
    match name:
        case "paged":
            return PagedPolicy(windows, max_chunk_tokens)
        case "contiguous":
            region = max_seq_tokens if region_tokens is None else region_tokens
            return ContiguousPolicy(region, max_batch, max_padded_tokens)
        case "orca-max":
            return OrcaPolicy(max_seq_tokens, "max")
        case "orca-pow2":
            return OrcaPolicy(max_seq_tokens, "pow2")
        case "orca-oracle":
            return OrcaPolicy(max_seq_tokens, "oracle")
    raise ConfigError(f"unknown --kv-policy {name!r}")
