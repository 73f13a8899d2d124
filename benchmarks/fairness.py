"""Fair turns between clients on a trace, beside first come first served.

    python benchmarks/fairness.py TRACE.csv[.gz] [--blocks 983] [--seats 64] [--speed 1] [--rows N]

TRACE has arrival_s, input_tokens, output_tokens and client. The real scheduler and KV manager run
it under a simulated clock: a step takes 10 ms and 0.05 ms more for each token computed. For both
policies: the largest difference of accumulated service (prompt tokens + 2 x output tokens) between
any two clients while both had requests waiting, against the bound of the paper (Sheng et al., OSDI
2024: 2 max(w_p L_input, w_q M)), and how long the light half of the clients and the heavy ones
waited for their first tokens.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import statistics
from collections import Counter, deque
from pathlib import Path

from octavo.kv import KVCacheManager
from octavo.plan import SeqResult, StepResult
from octavo.request import Request
from octavo.sched import Scheduler
from octavo.sched.clients import INPUT_WEIGHT, OUTPUT_WEIGHT

BLOCK = 16
_STEP_S, _TOKEN_S = 0.010, 0.00005


def read(path: Path, num_rows: int | None) -> list[tuple[float, int, int, str]]:
    """(arrival, input, output, client) of each row."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        rows = [
            (float(r["arrival_s"]), int(r["input_tokens"]), int(r["output_tokens"]), r["client"])
            for r in csv.DictReader(file)
        ]
    return rows[:num_rows]


def run(
    rows: list[tuple[float, int, int, str]], policy: str, args: argparse.Namespace
) -> dict[str, float]:
    """Simulate a policy."""
    kv = KVCacheManager(args.blocks, BLOCK)
    scheduler = Scheduler(
        kv, max_num_seqs=args.seats, max_num_batched_tokens=2048, max_model_len=8192,
        policy=policy,  # type: ignore[arg-type]
    )  # fmt: skip
    line, now_s, steps = deque(enumerate(rows)), 0.0, 0
    waits: dict[str, list[float]] = {}
    arrived: dict[str, tuple[float, str]] = {}
    worst = 0.0
    base: dict[tuple[str, str], float] = {}
    while line or scheduler.has_unfinished():
        while line and line[0][1][0] / args.speed <= now_s:
            number, (at_s, num_input, num_output, client) = line.popleft()
            request = Request(
                request_id=str(number), prompt_token_ids=[-number - 1] * num_input,
                max_tokens=num_output, client_id=client, arrival_s=at_s / args.speed,
            )  # fmt: skip
            arrived[str(number)] = at_s / args.speed, client
            scheduler.add(request)
        plan = scheduler.schedule(now_s)
        if plan is None:
            scheduler.take_updates()
            if line:
                now_s = max(now_s, line[0][1][0] / args.speed)
            continue
        now_s += _STEP_S + _TOKEN_S * plan.num_tokens
        drawn = [SeqResult(s.seq_id, -(10**9), None) for s in plan.seqs if s.sample]
        for update in scheduler.update(StepResult(plan.step_id, drawn), now_s):
            told = arrived.pop(update.request_id, None)
            if told is not None and update.token_ids:
                waits.setdefault(told[1], []).append(now_s - told[0])
        steps += 1
        if steps % 20 == 0:
            worst = max(worst, _difference(scheduler, base))
    totals = Counter(client for _, _, _, client in rows)
    light = {c for c, _ in totals.most_common()[len(totals) // 2 :]}
    few = [w for client, all_ in waits.items() if client in light for w in all_]
    many = [w for client, all_ in waits.items() if client not in light for w in all_]
    return {
        "difference": worst,
        "light": statistics.median(few),
        "light p90": statistics.quantiles(few, n=10)[-1],
        "heavy": statistics.median(many),
        "end": now_s,
    }


def _difference(scheduler: Scheduler, base: dict[tuple[str, str], float]) -> float:
    """The largest, among pairs that have been waiting side by side, since they began to."""
    waiting = sorted({seq.group.request.client_id for seq in scheduler.roster.waiting})
    service = scheduler.roster.clients.service()
    pairs = set(itertools.combinations(waiting, 2))
    for gone in base.keys() - pairs:
        del base[gone]
    worst = 0.0
    for a, b in pairs:
        gap = service[a] - service[b]
        worst = max(worst, abs(gap - base.setdefault((a, b), gap)))
    return worst


def main() -> None:
    """Both policies, and the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, default=983)
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--rows", type=int)
    args = parser.parse_args()
    rows = read(args.trace, args.rows)
    longest = max(num_input for _, num_input, _, _ in rows)
    bound = 2 * max(INPUT_WEIGHT * longest, OUTPUT_WEIGHT * args.blocks * BLOCK)
    print(f"{len(rows):,} requests of {len({r[3] for r in rows})} clients; bound {bound:,.0f}")
    for policy in ("fcfs", "fair"):
        got = run(rows, policy, args)
        print(
            f"{policy:5} largest difference {got['difference']:>9,.0f}; first token: light clients "
            f"p50 {got['light']:.2f} s, p90 {got['light p90']:.2f}, heavy {got['heavy']:.2f} s, "
            f"all done at {got['end']:,.0f} s"
        )


if __name__ == "__main__":
    main()
