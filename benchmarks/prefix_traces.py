"""Hit rate of the prefix cache over a recorded trace, through the real `KVCacheManager`.

    python benchmarks/prefix_traces.py TRACE.jsonl.gz [--scale 8] [--cache-tokens 256K 1M 4M]

TRACE's first line is {"header": {"block_tokens": B, ...}}; each further line is a request with
`input_tokens`, `output_tokens` and `hash_ids`, one id for each B tokens of the prompt, the last of
which may be partial. Equal ids mean equal tokens and an equal prefix before them. An id is replaced
by B tokens that depend on it alone.

Requests run one after another, whatever their arrivals: start, grow, commit, release. So the only
difference to a least-recently-used list of ids is that the pool also holds the request that runs.
Two such lists are computed beside it, of as many tokens: `LRU` lets a prompt's first block be
evicted before its last one, as a plain list does; `LRU, tail first` the other way round, as octavo
does, because a block is of no use without those before it.

`--scale S` divides B and all lengths, and the cache sizes, by S: the sharing stays what it was.
`--outputs` also leaves each request's output in the cache (which the lists do not).
Hit rates are shares of prompt tokens, and for `LRU, ids` of ids, which is how such traces are often
described. The last line is JSON. No model, no torch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from octavo.kv import KVCacheManager, SeqDemand
from octavo.lab import readers as lab_readers
from octavo.util import cdiv

VOCAB_SIZE = 49_152
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class Row:
    """A request of the trace, scaled."""

    num_input: int
    num_output: int
    hash_ids: list[int]


@dataclass
class Figures:
    """One cache size; rates are shares of all prompt tokens."""

    cache_tokens: int
    """Before scaling."""
    num_blocks: int
    lru_ids: float = 0.0
    """Of the list that evicts a prompt's head first, as a share of all ids, not of tokens."""
    lru: float = 0.0
    """Of the same list, as a share of tokens."""
    lru_tail_first: float = 0.0
    full_hits: float = 0.0
    """Tokens found in whole blocks."""
    partial_hits: float = 0.0
    """Tokens found in a part of a block."""
    num_requests: int = 0
    requests_with_hits: float = 0.0
    """Share of the requests that found anything."""
    us_per_request: float = 0.0
    """Mean time in the manager."""
    us_per_block: float = 0.0
    misses: dict[str, int] = field(default_factory=dict)
    """Prompt blocks that were not found, by reason."""

    @property
    def hits(self) -> float:
        """All that was found."""
        return self.full_hits + self.partial_hits


class TokensOf:
    """Token ids of a trace's block ids, as Python integers that all lists share."""

    def __init__(self, block_tokens: int) -> None:
        self._offsets = np.arange(block_tokens, dtype=np.uint64)
        self._ints = np.array(range(VOCAB_SIZE), dtype=object)

    def __call__(self, hash_ids: Sequence[int]) -> list[int]:
        """`block_tokens` for each id."""
        x = np.asarray(hash_ids, dtype=np.uint64)[:, None] * np.uint64(1 << 20) + self._offsets
        # the finalizer of splitmix64: neighbouring ids get unlike tokens
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        tokens: list[int] = self._ints[(x % np.uint64(VOCAB_SIZE)).ravel()].tolist()
        return tokens


def read_trace(path: Path, scale: int, limit: int | None) -> tuple[int, list[Row]]:
    """Tokens in a block after scaling, and the requests."""
    trace = lab_readers.read_trace(path, limit=limit)
    if trace.block_tokens % scale or not trace.block_tokens:
        raise SystemExit(f"--scale {scale} does not divide block_tokens={trace.block_tokens}")
    block_tokens = trace.block_tokens // scale
    rows = []
    for request in trace.requests:
        num_input = max(1, request.num_input // scale)
        # some traces name the whole blocks only; the rest is nobody else's then
        num_known = min(len(request.hash_ids), cdiv(num_input, block_tokens))
        num_output = max(1, request.num_output // scale)
        rows.append(Row(num_input, num_output, list(request.hash_ids[:num_known])))
    return block_tokens, rows


def lru_hits(
    rows: Iterable[Row], block_tokens: int, capacity: int, *, tail_first: bool, in_ids: bool = False
) -> int:
    """Prompt tokens (or ids) found in a list of the last `capacity` ids, requests one by one."""
    known: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for row in rows:
        num_found = 0
        for hash_id in row.hash_ids:
            if hash_id not in known:
                break
            num_found += 1
        hits += num_found if in_ids else min(num_found * block_tokens, row.num_input)
        for hash_id in reversed(row.hash_ids) if tail_first else row.hash_ids:
            known[hash_id] = None
            known.move_to_end(hash_id)
        while len(known) > capacity:
            known.popitem(last=False)
    return hits


def replay(
    rows: Sequence[Row], block_tokens: int, block_size: int, figures: Figures, outputs: bool
) -> None:
    """Run all requests through a manager and fill in what it found."""
    kv = KVCacheManager(figures.num_blocks, block_size, enable_prefix_caching=True)
    tokens_of = TokensOf(block_tokens)
    num_own = 1 << 40
    """Ids that no trace has, for what only one request has: ends of prompts, outputs."""
    misses: Counter[str] = Counter()
    seconds, num_prompt_blocks = 0.0, 0
    for seq_id, row in enumerate(rows):
        token_ids = tokens_of(row.hash_ids)[: row.num_input]
        # the last token is sampled and never computed
        num_kept = row.num_output - 1 if outputs else 0
        num_more = row.num_input - len(token_ids) + num_kept
        own_ids = [num_own + i for i in range(cdiv(num_more, block_tokens))]
        num_own += len(own_ids)
        own_tokens = tokens_of(own_ids)[:num_more] if own_ids else []
        split = row.num_input - len(token_ids)
        token_ids += own_tokens[:split]

        begin = time.perf_counter()
        num_found = run_one(kv, seq_id, token_ids, own_tokens[split:])
        kv.release(seq_id)
        usage = kv.close_request(str(seq_id))
        seconds += time.perf_counter() - begin

        figures.full_hits += num_found // block_size * block_size
        figures.partial_hits += num_found % block_size
        figures.requests_with_hits += num_found > 0
        num_prompt_blocks += cdiv(row.num_input, block_size)
        for miss in usage.misses:
            misses[str(miss.reason)] += miss.num_blocks
    kv.check_integrity()
    num_tokens = sum(row.num_input for row in rows)
    figures.full_hits /= num_tokens
    figures.partial_hits /= num_tokens
    figures.num_requests = len(rows)
    figures.requests_with_hits /= len(rows)
    figures.us_per_request = round(1e6 * seconds / len(rows), 1)
    figures.us_per_block = round(1e6 * seconds / num_prompt_blocks, 2)
    figures.misses = dict(misses.most_common())


def run_one(kv: KVCacheManager, seq_id: int, token_ids: list[int], output: list[int]) -> int:
    """Prefill a prompt, then append its output; how many tokens were found."""
    kv.begin_step()
    num_input = len(token_ids)
    demand = SeqDemand(num_input, num_input + len(output), token_ids=token_ids)
    assert kv.can_admit(demand), f"a prompt of {num_input} tokens is larger than the cache"
    num_found = kv.start(seq_id, demand, str(seq_id))
    growth = kv.grow(seq_id, num_input, num_found)
    assert growth is not None
    kv.commit(seq_id, num_input)
    kv.take_copies()
    if output:
        kv.begin_step()
        token_ids += output
        growth = kv.grow(seq_id, len(token_ids), num_input)
        assert growth is not None
        kv.commit(seq_id, len(token_ids))
        kv.take_copies()
    return num_found


def parse_size(text: str) -> int:
    """`4M` is 4 x 2^20."""
    unit = _UNITS.get(text[-1:].upper(), 1)
    return int(text if unit == 1 else text[:-1]) * unit


def table(found: Sequence[Figures]) -> str:
    """For people."""
    rates = ("LRU, ids", "LRU", "tail first", "octavo", "in blocks", "partial")
    head = ("cache", *rates, "us/request", "us/block")
    lines = ["".join(f"{name:>12}" for name in head)]
    for row in found:
        lists = (row.lru_ids, row.lru, row.lru_tail_first)
        hits = (*lists, row.hits, row.full_hits, row.partial_hits)
        cells = [f"{row.cache_tokens / (1 << 20):g}M", *(f"{100 * r:.2f} %" for r in hits)]
        cells += [f"{row.us_per_request:,.1f}", f"{row.us_per_block:.2f}"]
        lines.append("".join(f"{cell:>12}" for cell in cells))
    reasons = list(dict.fromkeys(reason for row in found for reason in row.misses))
    if reasons:
        lines += ["", "prompt blocks that were not found"]
        lines.append(f"{'cache':>12}" + "".join(f"{reason:>22}" for reason in reasons))
    for row in found if reasons else ():
        counts = "".join(f"{row.misses.get(reason, 0):>22,}" for reason in reasons)
        lines.append(f"{row.cache_tokens / (1 << 20):>11g}M" + counts)
    return "\n".join(lines)


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--cache-tokens", type=parse_size, nargs="+", metavar="N",
                        default=[256 << 10, 1 << 20, 4 << 20],
                        help="sizes before scaling; K and M are powers of 1024")  # fmt: skip
    parser.add_argument("--num-requests", type=int, help="only the first so many")
    parser.add_argument("--outputs", action="store_true", help="leave outputs in the cache too")
    args = parser.parse_args()
    block_tokens, rows = read_trace(args.trace, args.scale, args.num_requests)
    num_tokens = sum(row.num_input for row in rows)
    num_ids = sum(len(row.hash_ids) for row in rows)
    print(
        f"{args.trace.name}: {len(rows):,} requests, {num_tokens:,} prompt tokens in blocks of "
        f"{block_tokens}, octavo's of {args.block_size}"
        + (f"; lengths and caches divided by {args.scale}" if args.scale > 1 else "")
    )
    found = []
    for size in args.cache_tokens:
        scaled = size // args.scale
        figures = Figures(size, scaled // args.block_size)
        capacity = scaled // block_tokens
        plain = {"tail_first": False, "in_ids": True}
        figures.lru_ids = lru_hits(rows, block_tokens, capacity, **plain) / num_ids
        figures.lru = lru_hits(rows, block_tokens, capacity, tail_first=False) / num_tokens
        hits = lru_hits(rows, block_tokens, capacity, tail_first=True)
        figures.lru_tail_first = hits / num_tokens
        replay(rows, block_tokens, args.block_size, figures, args.outputs)
        found.append(figures)
    print(table(found))
    result = {"trace": args.trace.name, "scale": args.scale, "block_size": args.block_size}
    print(json.dumps(result | {"outputs": args.outputs, "sizes": [asdict(f) for f in found]}))


if __name__ == "__main__":
    main()
