"""Orca's policies: what is reserved, what is promised, and what the ledger calls it."""

from __future__ import annotations

import pytest

from octavo.errors import CapacityError, ConfigError
from octavo.kv import NO_GROWTH, Growth, KVCacheManager, OrcaPolicy, SeqDemand, make_policy
from octavo.kv.orca import OrcaEstimate
from octavo.plan import BlockCopy


def make(
    estimate: OrcaEstimate, num_blocks: int = 40, max_seq_tokens: int = 64
) -> tuple[KVCacheManager, OrcaPolicy]:
    """Blocks of 4."""
    policy = OrcaPolicy(max_seq_tokens, estimate)
    return KVCacheManager(num_blocks, 4, policy), policy


def run(kv: KVCacheManager, seq_id: int, num_tokens: int) -> Growth:
    growth = kv.grow(seq_id, num_tokens, kv.num_committed(seq_id))
    assert growth is not None
    kv.commit(seq_id, num_tokens)
    return growth


@pytest.mark.parametrize(
    ("estimate", "demand", "asked", "run_len"),
    [
        ("max", SeqDemand(5, 30), 64, 16),
        ("oracle", SeqDemand(5, 30), 30, 8),
        ("oracle", SeqDemand(5, 64, 30), 30, 8),
        ("oracle", SeqDemand(5, 64, 33), 33, 16),
        ("pow2", SeqDemand(5, 30), 5 + 32, 16),  # the paper's example: 25 -> 32
        ("pow2", SeqDemand(5, 64, 30), 5 + 32, 16),
        ("pow2", SeqDemand(5, 21), 5 + 16, 8),
        ("pow2", SeqDemand(5, 6), 5 + 1, 2),
        ("pow2", SeqDemand(40, 60), 64, 16),  # 40 + 32, but no more than the longest
        ("pow2", SeqDemand(5, 9, 5), 5 + 1, 2),
    ],
)
def test_prompt_and_estimate_are_rounded_to_a_power_of_two_of_blocks(
    estimate: OrcaEstimate, demand: SeqDemand, asked: int, run_len: int
) -> None:
    kv, _ = make(estimate)
    kv.start(0, demand)
    assert len(kv.block_table(0)) == run_len
    ledger = kv.ledger()
    most = min(demand.max_total_tokens, asked)
    assert (ledger.reserved, ledger.internal) == (most, asked - most)
    assert ledger.rounding == 4 * run_len - asked


def test_a_length_beyond_the_largest_chunk_is_not_reserved() -> None:
    """23 blocks: the largest chunk is one of 16; the longest sequence is shorter than it."""
    kv, _ = make("max", 23, max_seq_tokens=100)
    assert kv.max_tokens_of_one_sequence == 64
    assert kv.fits_idle(SeqDemand(1, 64))
    assert not kv.fits_idle(SeqDemand(1, 65))
    assert not kv.can_admit(SeqDemand(1, 65))
    assert make("oracle", 40, max_seq_tokens=50)[0].max_tokens_of_one_sequence == 50


def test_terms_as_the_paper_defines_them() -> None:
    """A pool of 40 blocks of 4, four sequences of 10 tokens in and 12 out.

    token: filled; reservation: prompt + output - filled; internal: allocated - (prompt + output);
    external and others: the rest, with the slack of rounding.
    """
    in_, total = 10, 22
    expected = {  # reserved for each, and blocks of each: 22, 10 + 16, 64 tokens
        "oracle": (22, 8, 4),
        "pow2": (26, 8, 4),
        "max": (64, 16, 2),
    }
    for estimate, (asked, run_len, num_fit) in expected.items():
        kv, _ = make(estimate)  # type: ignore[arg-type]
        num_seqs = 0
        while kv.can_admit(SeqDemand(in_, total)):
            kv.start(num_seqs, SeqDemand(in_, total))
            run(kv, num_seqs, in_ + num_seqs)
            num_seqs += 1
        assert num_seqs == num_fit + (estimate != "max")  # 40 = 32 + 8 blocks: 5 chunks of 8
        filled = sum(in_ + i for i in range(num_seqs))
        ledger = kv.ledger()
        assert ledger.tokens == filled
        assert ledger.reserved == num_seqs * total - filled
        assert ledger.internal == num_seqs * (asked - total)
        assert ledger.rounding == num_seqs * (4 * run_len - asked)
        rest = 160 - num_seqs * asked
        assert ledger.external + ledger.free == rest
        kv.check_integrity()


def test_rounding_is_shown_as_a_part_of_external() -> None:
    kv, _ = make("oracle")
    kv.start(0, SeqDemand(5, 14))
    lines = [line.split()[:3] for line in str(kv.ledger()).splitlines()[1:]]
    assert lines[3:5] == [["external", "2", "slots"], ["of", "it", "rounding"]]
    assert "rounding" not in str(KVCacheManager(4, 4).ledger())


def test_external_is_what_lies_in_chunks_too_small_for_the_last_refused() -> None:
    kv, _ = make("oracle", 12)  # chunks of 8 and 4
    assert (kv.ledger().external, kv.ledger().free) == (0, 48)
    kv.start(0, SeqDemand(1, 5))  # 2 blocks, of the 4
    assert (kv.ledger().external, kv.ledger().free) == (3, 40)  # 3 slots of rounding
    kv.start(1, SeqDemand(1, 20))  # the 8
    assert (kv.ledger().external, kv.ledger().free) == (3 + 12, 8)
    assert not kv.can_admit(SeqDemand(1, 13))  # 4 blocks; 2 are free
    assert (kv.ledger().external, kv.ledger().free) == (3 + 12 + 8, 0)
    assert not kv.can_admit(SeqDemand(1, 6, num_seqs=2))  # 2 runs of 2; there is 1
    assert (kv.ledger().external, kv.ledger().free) == (3 + 12, 8)
    kv.check_integrity()


def test_what_is_reserved_by_the_maximum_makes_every_smaller_piece_external() -> None:
    kv, _ = make("max", 23)
    assert (kv.ledger().external, kv.ledger().free) == (28, 64)


def test_what_was_refused_is_not_remembered() -> None:
    """Until the next step, or somebody who does fit; of an idle pool all can be allocated."""
    kv, _ = make("oracle", 12)  # chunks of 8 and 4
    kv.start(0, SeqDemand(1, 8))  # 2 blocks, of the 4
    kv.start(1, SeqDemand(1, 29))  # the 8; 3 slots of rounding
    for told in (kv.begin_step, lambda: kv.can_admit(SeqDemand(1, 5))):
        assert not kv.can_admit(SeqDemand(1, 13))  # 4 blocks; 2 are free
        assert (kv.ledger().external, kv.ledger().free) == (3 + 8, 0)
        told()
        assert (kv.ledger().external, kv.ledger().free) == (3, 8)
    assert not kv.can_admit(SeqDemand(1, 13))
    kv.release(0)
    kv.release(1)
    assert (kv.ledger().external, kv.ledger().free) == (0, 48)
    # Under "max" everybody asks for the same.
    kv, _ = make("max", 23)
    kv.begin_step()
    assert (kv.ledger().external, kv.ledger().free) == (28, 64)


def test_a_run_is_told_once_and_never_lacks_room() -> None:
    kv, _ = make("oracle")
    assert not kv.can_preempt
    assert not kv.batches_requests
    assert kv.start(0, SeqDemand(5, 14)) == 0
    assert run(kv, 0, 5) == Growth((32, 33, 34, 35), None)
    assert kv.grow(0, 14, 5) is NO_GROWTH
    assert kv.can_grow_all([(0, 16, 5)])
    assert not kv.can_grow_all([(0, 17, 5)])
    assert kv.grow(0, 17, 5) is None
    kv.check_integrity()


def test_the_watermark_is_not_for_those_who_reserve() -> None:
    kv, _ = make("max", 16)
    assert kv.can_admit(SeqDemand(5, 64), keep_free=16)


def test_forks_copy_into_the_runs_that_were_promised() -> None:
    kv, policy = make("oracle", 8)
    kv.start(0, SeqDemand(5, 8, num_seqs=3), "r")
    run(kv, 0, 5)
    assert [promise.num_blocks for promise in policy.promises] == [4]
    ledger = kv.ledger()
    assert (ledger.tokens, ledger.reserved, ledger.free) == (5, 3 + 16, 8)
    assert not kv.can_admit(SeqDemand(1, 8, num_seqs=2))
    kv.start(9, SeqDemand(1, 8))
    assert not kv.can_admit(SeqDemand(1, 1))
    assert kv.fork(0, 1)
    assert kv.take_copies() == [BlockCopy(0, 2), BlockCopy(1, 3)]
    assert kv.num_committed(1) == 5
    assert kv.grow(1, 6, 5) == Growth((2, 3), None)
    assert kv.fork(0, 2)
    assert not kv.fork(0, 3)
    assert policy.promises == []
    assert kv.request_usage("r").peak_blocks == 6
    assert kv.ledger().shared_saved == 0
    kv.check_integrity()


def test_a_promise_ends_with_the_carrier_or_the_last_beam() -> None:
    kv, policy = make("oracle", 8)
    kv.start(0, SeqDemand(5, 8, num_seqs=3))
    run(kv, 0, 5)
    kv.fork(0, 1)
    kv.fork(0, 5)
    kv.release(1)  # a sample: its run is free
    assert policy.promises == []
    kv.release(0)
    kv.release(5)
    assert policy.promises == []
    kv.start(6, SeqDemand(5, 8, num_seqs=3))
    run(kv, 6, 5)
    kv.fork(6, 7)
    kv.release(6)  # nobody will be forked any more
    assert policy.promises == []
    assert kv.can_admit(SeqDemand(1, 16))
    kv.release(7)
    kv.start(2, SeqDemand(5, 8, num_seqs=3, forks_again=True))
    run(kv, 2, 5)
    kv.fork(2, 3)
    kv.release(2)  # a beam: another one will have its run
    assert sum(p.num_blocks for p in policy.promises) == 4
    kv.take_copies()
    assert kv.fork(3, 4)
    assert kv.take_copies() == [BlockCopy(2, 0), BlockCopy(3, 1)]
    kv.release(3)
    kv.release(4)
    assert policy.promises == []
    assert kv.can_admit(SeqDemand(1, 32))
    kv.check_integrity()


def test_refusals_tell_the_arithmetic() -> None:
    kv, _ = make("pow2", 24)
    demand = SeqDemand(5, 30, num_seqs=4)
    assert not kv.fits_idle(demand)
    assert kv.why_never(demand) == (
        "--kv-policy orca-pow2 reserves 37 tokens for each of 4 sequences, which share nothing: 4 "
        "runs of 16 blocks exceed the 1 that the KV pool of 24 blocks has"
    )
    kv.start(0, SeqDemand(5, 30))
    kv.start(1, SeqDemand(1, 3))  # 1 block of the 8
    assert not kv.can_admit(SeqDemand(5, 30))
    assert kv.why_no_room(SeqDemand(5, 30)) == (
        "--kv-policy orca-pow2 reserves 37 tokens, a run of 16 blocks; 7 blocks are free, in runs "
        "of at most 4"
    )
    with pytest.raises(CapacityError, match=r"orca-pow2 policy cannot reserve 30 tokens"):
        kv.start(2, SeqDemand(5, 30))
    assert not kv.has(2)
    kv.check_integrity()


def test_policies_by_name() -> None:
    for name in ("paged", "contiguous", "orca-max", "orca-pow2", "orca-oracle"):
        assert make_policy(name, max_seq_tokens=64).name == name  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_batch is a limit of --kv-policy contiguous"):
        make_policy("orca-max", max_seq_tokens=64, max_batch=4)
    with pytest.raises(ConfigError, match="max_seq_tokens must be at least 1, got 0"):
        make_policy("orca-max", max_seq_tokens=0)
    with pytest.raises(ConfigError, match="unknown --kv-policy 'magic'"):
        make_policy("magic", max_seq_tokens=64)  # type: ignore[arg-type]


def test_policies_that_share_nothing_have_no_tiers() -> None:
    with pytest.raises(ConfigError, match=r"--kv-policy orca-max moves no blocks .* --swap-space"):
        KVCacheManager(8, 4, OrcaPolicy(16, "max"), num_host_blocks=2)
    kv = KVCacheManager(8, 4, OrcaPolicy(16, "max"), enable_prefix_caching=True)
    tokens = list(range(8))
    for seq_id in (0, 1):
        assert kv.start(seq_id, SeqDemand(8, 9, token_ids=tokens)) == 0
        run(kv, seq_id, 8)
        kv.release(seq_id)
    assert kv.num_free_blocks == 8
    assert kv.ledger().cached == 0
