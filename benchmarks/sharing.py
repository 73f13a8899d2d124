"""Memory saved by sharing blocks: 1 - physical / logical blocks, mean over the steps of a run.

    python benchmarks/sharing.py LENGTHS.csv --model null --n 2 4 6
    python benchmarks/sharing.py LENGTHS.csv --n 2 4 6 --beam-width 2 4 6 --num-requests 96

LENGTHS.csv (.gz or not) has `input_tokens`, `output_tokens` and, if requests come over time,
`arrival_s`. Every sequence gets exactly its request's output length. Logical blocks are the entries
of all block tables, physical blocks those that are referenced. The prefix cache is off and prompts
are unlike each other, so only the sequences of one request share (PagedAttention paper, Fig. 15).

`--model null`: the real scheduler and memory manager; no model, so no beams. Time is simulated: a
step takes `--step-ms` and its tokens over `--tokens-per-s`, and requests come when the file says.
By default these are such that about as many requests are served as at the paper's limit (Fig. 14:
18.1, 10.3 and 7.1 a second of 2, 4 and 6 samples). The Alpaca trace has 20 a second, so the pool is
full, as it was there.

Another model (by default octavo's): the whole engine, all requests at once, in the order of the
file; which beams fork is the model's choice. Prompts are cut from `--text` (by default this
repository's Markdown) at places drawn by `--seed`. Samples are drawn at temperature 1.

The pool has 983 blocks of 16 tokens, the paper's 15,728 slots. Two results are printed: the mean
over steps of the saved share, as the paper has it, and the share of all block-steps. They differ
where few requests are left at the end of a short run: those steps count in the first as much as
others. The last line is JSON.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.kv import KVCacheManager
from octavo.plan import SeqResult, StepPlan, StepResult
from octavo.request import BeamSearchParams, Request, SamplingParams
from octavo.sched import Scheduler

if TYPE_CHECKING:
    from octavo import LLM

ROOT = Path(__file__).parent.parent
PAPER = {"n": {2: 6.09, 4: 8.53, 6: 9.79}, "beam": {2: 37.56, 4: 53.13, 6: 55.16}}
"""Alpaca, OPT-13B, 20 requests/s, blocks of 16; per cent."""
FIRST_ID, VOCAB_SIZE = 17, 49_152
MAX_BATCHED_TOKENS = 2048


@dataclass(frozen=True)
class Row:
    """A request of the file."""

    arrival_s: float
    num_input: int
    num_output: int


@dataclass
class Saved:
    """Sums over the steps of a run."""

    mode: str
    """"n" or "beam"."""
    width: int
    num_requests: int = 0
    num_steps: int = 0
    physical: int = 0
    """Block-steps."""
    logical: int = 0
    ratios: float = 0.0
    num_seqs: int = 0
    num_preemptions: int = 0
    seconds: float = 0.0
    """The run took; simulated under the null model."""

    def record(self, kv: KVCacheManager, plan: StepPlan) -> None:
        """Take in one step; steps without blocks do not count."""
        ledger = kv.ledger()
        if not ledger.num_logical_blocks:
            return
        self.num_steps += 1
        self.num_seqs += len(plan.seqs)
        self.physical += ledger.num_physical_blocks
        self.logical += ledger.num_logical_blocks
        self.ratios += ledger.shared_saved_ratio

    @property
    def mean_pct(self) -> float:
        """Mean over steps of 1 - physical / logical, in per cent."""
        return 100 * self.ratios / max(1, self.num_steps)

    @property
    def total_pct(self) -> float:
        """1 - sum of physical / sum of logical, in per cent."""
        return 100 * (1 - self.physical / max(1, self.logical))

    def figures(self) -> dict[str, object]:
        """For JSON."""
        means = {"mean_saved_pct": self.mean_pct, "total_saved_pct": self.total_pct}
        return asdict(self) | {name: round(value, 3) for name, value in means.items()}

    def __str__(self) -> str:
        steps = max(1, self.num_steps)
        paper = PAPER[self.mode].get(self.width)
        name = "parallel" if self.mode == "n" else "beam"
        return (
            f"{name:>9} {self.width}: saved {self.mean_pct:6.2f} % of blocks "
            f"({self.total_pct:.2f} % of all block-steps"
            + (f"; paper {paper} %" if paper else "")
            + f"); {self.physical / steps:,.0f} physical of {self.logical / steps:,.0f} logical "
            f"blocks, {self.num_seqs / steps:.1f} sequences a step; {self.num_requests:,} requests,"
            f" {self.num_steps:,} steps, {self.num_preemptions:,} preemptions, {self.seconds:.0f} s"
        )


def read_rows(path: Path, longest: int) -> list[Row]:
    """Requests that fit, in the order of the file."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        rows = [
            Row(
                float(row.get("arrival_s") or 0.0),
                int(row["input_tokens"]),
                int(row["output_tokens"]),
            )
            for row in csv.DictReader(lines)
        ]
    return [row for row in rows if row.num_input + row.num_output <= longest]


def drawn(rows: list[Row], count: int, seed: int) -> list[Row]:
    """So many of them, in the same order."""
    if count >= len(rows):
        return rows
    return [rows[i] for i in sorted(random.Random(seed).sample(range(len(rows)), count))]


# -- the null model


def answer(plan: StepPlan) -> StepResult:
    """A runner that samples a token of its own for each sequence: with the same one for all,
    samples that are computed again after a preemption would share what they had drawn."""
    sampled = []
    for seq in plan.seqs:
        if seq.sample:
            for seq_id in (seq.seq_id, *plan.extra_draws.get(seq.seq_id, ())):
                sampled.append(SeqResult(seq_id, -1 - seq_id, None))
    return StepResult(plan.step_id, sampled)


def run_null(rows: Sequence[Row], n: int, args: argparse.Namespace) -> Saved:
    """The scheduler and the manager under a simulated clock."""
    kv = KVCacheManager(args.num_blocks, args.block_size, enable_prefix_caching=False)
    scheduler = Scheduler(
        kv,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=max(MAX_BATCHED_TOKENS, args.max_num_seqs),
        max_model_len=args.max_model_len,
    )
    rng = random.Random(args.seed)
    saved, now_s, index = Saved("n", n, len(rows)), 0.0, 0
    while index < len(rows) or scheduler.has_unfinished():
        while index < len(rows) and rows[index].arrival_s <= now_s:
            row = rows[index]
            prompt = [rng.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(row.num_input)]
            scheduler.add(
                Request(
                    request_id=str(index), prompt_token_ids=prompt, n=n,
                    max_tokens=row.num_output, arrival_s=row.arrival_s,
                )
            )  # fmt: skip
            index += 1
        plan = scheduler.schedule(now_s)
        if plan is None:
            scheduler.take_updates()
            if index < len(rows):
                now_s = max(now_s, rows[index].arrival_s)
            continue
        saved.record(kv, plan)
        now_s += args.step_ms / 1e3 + plan.num_tokens / args.tokens_per_s
        scheduler.update(answer(plan), now_s)
    kv.check_integrity()
    saved.num_preemptions, saved.seconds = scheduler.num_preemptions, now_s
    return saved


# -- a real model


def run_model(
    llm: LLM, rows: Sequence[Row], prompts: list[list[int]], mode: str, width: int, seed: int
) -> Saved:
    """The whole engine on all requests at once."""
    saved = Saved(mode, width, len(rows))
    core = llm._engine.engine.core  # the public interface tells means, not every step
    history, record = core.history, core.history.record

    def record_both(plan: StepPlan, now_s: float) -> None:
        record(plan, now_s)
        saved.record(core.kv, plan)

    history.record = record_both  # type: ignore[method-assign]
    before = llm.memory_report().num_preemptions
    begin = time.perf_counter()
    try:
        if mode == "n":
            params = [
                SamplingParams(
                    n=width, temperature=1.0, seed=seed + i, max_tokens=row.num_output,
                    ignore_eos=True, detokenize=False,
                )
                for i, row in enumerate(rows)
            ]  # fmt: skip
            outputs = llm.generate(prompts, params, use_tqdm=False)
            lengths = [{len(s.token_ids) for s in output.outputs} for output in outputs]
        else:
            beam_params = [
                BeamSearchParams(beam_width=width, max_tokens=row.num_output, ignore_eos=True)
                for row in rows
            ]
            found = llm.beam_search(prompts, beam_params, use_tqdm=False)
            lengths = [
                {len(s.tokens) - row.num_input for s in output.sequences}
                for output, row in zip(found, rows, strict=True)
            ]
    finally:
        history.record = record  # type: ignore[method-assign]
    assert lengths == [{row.num_output} for row in rows], "outputs have other lengths than asked"
    saved.seconds = time.perf_counter() - begin
    saved.num_preemptions = llm.memory_report().num_preemptions - before
    return saved


def text_prompts(
    llm: LLM, rows: Sequence[Row], files: Sequence[Path], seed: int
) -> list[list[int]]:
    """Pieces of the text with the rows' lengths, at places drawn by `seed`."""
    tokenizer = llm.get_tokenizer()
    assert tokenizer is not None
    text = "\n\n".join(path.read_text("utf-8") for path in files)
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    rng = random.Random(seed)
    starts = [rng.randrange(max(1, len(ids) - row.num_input)) for row in rows]
    return [ids[start : start + row.num_input] for start, row in zip(starts, rows, strict=True)]


def run_models(rows: Sequence[Row], args: argparse.Namespace) -> list[Saved]:
    """One engine for all widths."""
    from octavo import LLM

    options = {} if args.model is None else {"model": args.model}
    found = []
    with LLM(
        **options,
        dtype=args.dtype,
        block_size=args.block_size,
        num_gpu_blocks_override=args.num_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=max(512, args.max_num_seqs),
        max_model_len=args.max_model_len,
        enable_prefix_caching=False,
        preemption_mode=args.preemption_mode,
    ) as llm:
        files = args.text or [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md"))]
        prompts = text_prompts(llm, rows, files, args.seed)
        for mode, widths in (("n", args.n), ("beam", args.beam_width)):
            for width in widths:
                found.append(run_model(llm, rows, prompts, mode, width, args.seed))
                print(found[-1], flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lengths", type=Path)
    parser.add_argument("--model", help="`null`, or what octavo loads; by default its own")
    parser.add_argument("--n", type=int, nargs="*", default=[], help="samples of a prompt")
    parser.add_argument("--beam-width", type=int, nargs="*", default=[])
    parser.add_argument(
        "--num-requests", type=int, help="so many: the first under `null`, else drawn by --seed"
    )
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-blocks", type=int, default=983)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    simulated = parser.add_argument_group("null model")
    simulated.add_argument("--step-ms", type=float, default=40.0)
    simulated.add_argument("--tokens-per-s", type=float, default=5000.0)
    real = parser.add_argument_group("real models")
    real.add_argument("--dtype", default="auto")
    real.add_argument("--preemption-mode", default="auto")
    real.add_argument("--text", type=Path, nargs="+", metavar="FILE")
    args = parser.parse_args()
    if not args.n and not args.beam_width:
        parser.error("nothing to measure: give --n, --beam-width or both")
    if args.model == "null" and args.beam_width:
        parser.error("--beam-width needs a model that chooses which beams fork; it has `null`")
    rows = read_rows(args.lengths, args.max_model_len)
    if args.num_requests is not None:  # a thinned trace would be a lighter load
        null = args.model == "null"
        rows = rows[: args.num_requests] if null else drawn(rows, args.num_requests, args.seed)
    mean_in = sum(row.num_input for row in rows) / len(rows)
    mean_out = sum(row.num_output for row in rows) / len(rows)
    print(
        f"{len(rows):,} requests of {args.lengths.name}, mean {mean_in:.2f} in, {mean_out:.2f} out;"
        f" pool of {args.num_blocks} blocks of {args.block_size}",
        flush=True,
    )
    if args.model == "null":
        found = []
        for n in args.n:
            found.append(run_null(rows, n, args))
            print(found[-1], flush=True)
    else:
        found = run_models(rows, args)
    setup = {name: value for name, value in vars(args).items() if name not in ("lengths", "text")}
    print(json.dumps(setup | {"runs": [one.figures() for one in found]}))


if __name__ == "__main__":
    main()
