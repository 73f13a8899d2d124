"""What the scheduler costs: `schedule()` + `update()` with many sequences decoding.

    python benchmarks/bench_scheduler.py [--num-seqs 256] [--steps 2000] [--block-size 16]
        [--plan-ahead]

Prompts have nothing in common. The prefix cache is on, unless `--no-prefix-caching`: full blocks
are remembered, none is found. Prints the median time of a step; the last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import deque

from octavo.kv import KVCacheManager
from octavo.plan import SeqResult, StepPlan, StepResult
from octavo.request import Request
from octavo.sched import Scheduler

_PROMPT_LEN = 161


def answer(plan: StepPlan) -> StepResult:
    """A runner that samples token 1 everywhere."""
    return StepResult(plan.step_id, [SeqResult(s.seq_id, 1, None) for s in plan.seqs if s.sample])


def saturated(
    num_seqs: int, max_len: int, block_size: int, prefix_caching: bool, plan_ahead: bool
) -> Scheduler:
    """A scheduler with `num_seqs` sequences, prefilled and decoding."""
    num_blocks = num_seqs * (max_len // block_size + 2)
    scheduler = Scheduler(
        KVCacheManager(num_blocks, block_size, enable_prefix_caching=prefix_caching),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192, num_seqs),
        max_model_len=max_len,
        plan_ahead=plan_ahead,
    )
    for i in range(num_seqs):
        # Different lengths, so that sequences cross block borders in different steps.
        prompt = [i] * (_PROMPT_LEN + i % block_size)
        scheduler.add(Request(request_id=str(i), prompt_token_ids=prompt))
    while not decoding_only(scheduler, num_seqs):
        pass
    return scheduler


def decoding_only(scheduler: Scheduler, num_seqs: int) -> bool:
    """Run one step; whether it was a step of `num_seqs` decodes."""
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.update(answer(plan), 0.0)
    return plan.num_tokens == num_seqs == len(plan.seqs)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--no-prefix-caching", dest="prefix_caching", action="store_false")
    parser.add_argument("--plan-ahead", action="store_true", help="a step is always under way")
    args = parser.parse_args()
    max_len = _PROMPT_LEN + args.block_size + args.steps + 100
    scheduler = saturated(
        args.num_seqs, max_len, args.block_size, args.prefix_caching, args.plan_ahead
    )
    schedule_s, update_s = [], []
    under_way = deque([scheduler.schedule(0.0)] if args.plan_ahead else [])
    gc.collect()
    for step in range(args.steps):
        now_s = float(step)
        t0 = time.perf_counter()
        plan = scheduler.schedule(now_s)
        t1 = time.perf_counter()
        assert plan is not None and len(plan.seqs) == args.num_seqs
        under_way.append(plan)
        result = answer(under_way.popleft())
        t2 = time.perf_counter()
        scheduler.update(result, now_s)
        t3 = time.perf_counter()
        schedule_s.append(t1 - t0)
        update_s.append(t3 - t2)
    total_s = [a + b for a, b in zip(schedule_s, update_s, strict=True)]
    figures = {
        "num_seqs": args.num_seqs,
        "steps": args.steps,
        "block_size": args.block_size,
        "prefix_caching": args.prefix_caching,
        "plan_ahead": args.plan_ahead,
        "schedule_us": round(statistics.median(schedule_s) * 1e6, 1),
        "update_us": round(statistics.median(update_s) * 1e6, 1),
        "step_us": round(statistics.median(total_s) * 1e6, 1),
        "step_us_p10": round(statistics.quantiles(total_s, n=10)[0] * 1e6, 1),
        "step_us_p90": round(statistics.quantiles(total_s, n=10)[-1] * 1e6, 1),
    }
    print(
        f"{args.num_seqs} sequences decoding, block size {args.block_size}, prefix cache "
        f"{'on' if args.prefix_caching else 'off'}: "
        f"schedule {figures['schedule_us']} us + update {figures['update_us']} us "
        f"= {figures['step_us']} us a step (median of {args.steps})"
    )
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
