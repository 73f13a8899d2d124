"""What the host does in every step of a GPU's engine: all of it around a device without work.

    python benchmarks/host_path.py [--num-seqs 256 1024] [--tokens 200] [--kinds final stream]
    python benchmarks/host_path.py --trace LENGTHS.csv.gz [--num 2000]

Scheduler, KV manager, engine, driver and the runner's host side are those that serve, with overlap
(`host_runner.py` leaves out the kernels); the text is English. For steps in which every sequence
decodes it prints microseconds by part, each the 10th percentile of its own (what other work on the
machine adds is left out so; compare two versions in turns):

  schedule  to plan a step
  launch    to bring tables up to date, lay the step's arrays out and stage them
  collect   to read the step's tokens from where the device put them
  history   to look at the pool's ledger
  update    to take the tokens in
  outputs   to make text and outputs of them
  rest      the loops around these, and whoever reads the outputs
  step      the whole, not the sum; "mean" has garbage collections in it

final: `LLM.generate`. stream: `LLM.stream`, all streams read in turns, one output each a step.
stream+read: the same, where the reader looks at token ids and text of each output. delta: what is
new, for servers. Last, what adding a request takes.

--trace: requests of these lengths at once, as in `gpu_serving.py`, without text: seconds of all
steps by part. It is what the host adds where it waits for the GPU, and the least that a run takes.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config import DEFAULT_MODEL
from octavo.engine.core import EngineCore
from octavo.engine.driver import Driver
from octavo.engine.engine import Engine
from octavo.engine.garbage import leave_out_what_is_there, look_at_all_again
from octavo.engine.input import InputProcessor
from octavo.engine.output import OutputProcessor
from octavo.kv import KVCacheManager
from octavo.outputs import OutputKind
from octavo.plan import StepPlan, StepResult
from octavo.request import SamplingParams
from octavo.sched import Scheduler
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.weights.locate import locate, locate_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from gpu_serving import read_trace
from host_runner import HostRunner

_PROMPT_LEN = 160
_BLOCK_SIZE = 16
_TEXT = (
    "A sheet that is folded three times gives eight leaves, or sixteen pages, and a book made so is"
    " an octavo. “Every page,” the printer's naïve apprentice said, “has its place — but"
    " none lies beside the next!” In 1,499 such books were sold at 2½ ducats each.\n"
)
_KINDS = {
    "final": OutputKind.FINAL_ONLY,
    "stream": OutputKind.CUMULATIVE,
    "stream+read": OutputKind.CUMULATIVE,
    "delta": OutputKind.DELTA,
}
_PARTS = ("schedule", "launch", "collect", "history", "update", "outputs")


@dataclass(slots=True)
class Row:
    """Seconds of one step."""

    is_decode: bool = False
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    total_s: float = 0.0


class Host:
    """An engine without a device, with clocks around its parts."""

    def __init__(
        self, num_seqs: int, max_len: int, tokenizer: Tokenizer | None, *, prefix_caching: bool
    ) -> None:
        self.num_seqs = num_seqs
        kv = KVCacheManager(
            num_seqs * (max_len // _BLOCK_SIZE + 2),
            _BLOCK_SIZE,
            enable_prefix_caching=prefix_caching,
        )
        scheduler = Scheduler(
            kv,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=max_len,
            plan_ahead=True,
        )
        ids = [1 + i % 1000 for i in range(500)]
        if tokenizer is not None:
            ids = tokenizer.encode(_TEXT, add_special_tokens=False)
        runner = HostRunner(
            ids,
            block_size=_BLOCK_SIZE,
            max_num_seqs=num_seqs,
            max_num_tokens=8192,
            max_model_len=max_len,
        )
        self._launch_inner = runner.launch
        core = EngineCore(scheduler, kv, self._launch, overlap=True)
        inputs = InputProcessor(
            tokenizer, vocab_size=49152, max_model_len=max_len, eos_token_ids=()
        )
        outputs = OutputProcessor(tokenizer)
        self.rows: list[Row] = []
        self._row = Row()
        self._since_s = time.perf_counter()
        self._clock(scheduler, "schedule")
        self._clock(scheduler, "update")
        self._clock(outputs, "process", "outputs")
        self._clock(core.history, "record", "history")
        self.driver = Driver(Engine(core, inputs, outputs))
        self.driver.after_step = self._end_row

    def _clock(self, owner: Any, name: str, part: str = "") -> None:
        setattr(owner, name, self._timed(getattr(owner, name), part or name))

    def _timed(self, inner: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_s = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._row.parts[part] += time.perf_counter() - begun_s

        return timed

    def _launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        begun_s = time.perf_counter()
        wait = self._launch_inner(plan)
        self._row.parts["launch"] += time.perf_counter() - begun_s
        self._row.is_decode = plan.num_tokens == self.num_seqs == len(plan.seqs)
        return self._timed(wait, "collect")

    def _end_row(self) -> None:
        now_s = time.perf_counter()
        self._row.total_s, self._since_s = now_s - self._since_s, now_s
        self.rows.append(self._row)
        self._row = Row()

    def add(self, prompts: list[list[int]], params: SamplingParams, kind: OutputKind) -> list[str]:
        """Queue requests."""
        return [self.driver.add(prompt, params, kind) for prompt in prompts]


def make_prompts(num_prompts: int) -> list[list[int]]:
    """Prompts that begin with nothing in common, of lengths that cross block borders apart."""
    return [
        [1 + 16 * i + j for j in range(_PROMPT_LEN + i % _BLOCK_SIZE)] for i in range(num_prompts)
    ]


def measure(name: str, num_seqs: int, num_tokens: int, tokenizer: Tokenizer | None) -> dict:
    """Microseconds of a step in which all decode, by part."""
    max_len = _PROMPT_LEN + _BLOCK_SIZE + num_tokens + 2
    host = Host(num_seqs, max_len, tokenizer, prefix_caching=True)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, seed=0)
    request_ids = host.add(make_prompts(num_seqs), params, _KINDS[name])
    gc.collect()
    if name == "final":
        host.driver.run_to_end(request_ids, use_tqdm=False)
        host.driver.forget(request_ids)
    else:
        read_all(host, request_ids, look=name == "stream+read")
    rows = [row for row in host.rows if row.is_decode][2:-2]
    figures = {part: _low([row.parts[part] for row in rows]) for part in _PARTS}
    figures["rest"] = _low([row.total_s - sum(row.parts.values()) for row in rows])
    figures["step"] = _low([row.total_s for row in rows])
    figures["mean"] = statistics.fmean(row.total_s for row in rows)
    in_us = {part: round(seconds * 1e6, 1) for part, seconds in figures.items()}
    return {"kind": name, "num_seqs": num_seqs, "text": tokenizer is not None} | in_us


def _low(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=10)[0]


def read_all(host: Host, request_ids: list[str], *, look: bool) -> None:
    """Read streams in turns until all have ended."""
    streams = [host.driver.stream(request_id) for request_id in request_ids]
    while streams:
        running = []
        for stream in streams:
            output = next(stream)
            if look:
                for completion in output.outputs:
                    len(completion.token_ids), len(completion.text)
            if not output.finished:
                running.append(stream)
        streams = running


def measure_trace(lengths: list[tuple[int, int]], num_seqs: int, max_len: int) -> dict:
    """Seconds of a whole run, by part."""
    host = Host(num_seqs, max_len, None, prefix_caching=False)
    rng = random.Random(0)
    prompts = [[rng.randrange(1000, 49_152) for _ in range(num)] for num, _ in lengths]
    gc.collect()
    begun_s = time.perf_counter()
    request_ids = [
        host.driver.add(
            prompt,
            SamplingParams(temperature=0, max_tokens=num, ignore_eos=True, detokenize=False),
            OutputKind.FINAL_ONLY,
        )
        for prompt, (_, num) in zip(prompts, lengths, strict=True)
    ]
    added_s = time.perf_counter()
    host.driver.run_to_end(request_ids, use_tqdm=False)
    ended_s = time.perf_counter()
    found = {part: sum(row.parts[part] for row in host.rows) for part in _PARTS}
    found |= {"rest": ended_s - added_s - sum(found.values()), "steps_s": ended_s - added_s}
    found = {"add": added_s - begun_s} | found
    return {"requests": len(lengths), "steps": len(host.rows)} | {
        part: round(seconds, 3) for part, seconds in found.items()
    }


def measure_adding(num_requests: int, tokenizer: Tokenizer | None) -> dict:
    """Microseconds to add a request of token ids."""
    host = Host(1, _PROMPT_LEN + _BLOCK_SIZE + 20, tokenizer, prefix_caching=True)
    params = SamplingParams(temperature=0, ignore_eos=True)
    prompts = make_prompts(num_requests)
    gc.collect()
    begun_s = time.perf_counter()
    request_ids = host.add(prompts, params, OutputKind.FINAL_ONLY)
    seconds = time.perf_counter() - begun_s
    host.driver.forget(request_ids)
    return {"text": tokenizer is not None, "add_us": round(seconds / num_requests * 1e6, 1)}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of a sequence")
    parser.add_argument("--requests", type=int, default=2000, help="for the cost of adding")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=list(_KINDS))
    parser.add_argument("--tokenizer", help="of a folder or repository; default: the small model's")
    parser.add_argument("--no-text", action="store_true", help="no tokenizer is needed then")
    parser.add_argument("--text", action="store_true", help="only with text")
    parser.add_argument("--trace", type=Path, help="lengths of requests: see above")
    parser.add_argument("--num", type=int, default=2000, help="requests taken from the trace")
    return parser.parse_args()


def main() -> None:
    """Measure and print, with garbage collected as where a GPU serves."""
    args = parse()
    leave_out_what_is_there()
    try:
        run(args)
    finally:
        look_at_all_again()


def run(args: argparse.Namespace) -> None:
    """All that was asked for."""
    if args.trace is not None:
        found = measure_trace(read_trace(args.trace, args.num, 0, 2048), 1024, 2048)
        print(" ".join(f"{name} {value}" for name, value in found.items()))
        print(json.dumps(found))
        return
    tokenizers: list[Tokenizer | None] = [] if args.text else [None]
    if not args.no_text:
        path = locate(DEFAULT_MODEL).tokenizer
        if args.tokenizer is not None:
            path = locate_tokenizer(args.tokenizer)
        tokenizers.append(load_tokenizer(path))
    columns = (*_PARTS, "rest", "step", "mean")
    print("us a step    seqs text" + "".join(f"{name:>10}" for name in columns))
    steps = []
    for tokenizer in tokenizers:
        for name in args.kinds:
            for num_seqs in args.num_seqs:
                row = measure(name, num_seqs, args.tokens, tokenizer)
                steps.append(row)
                print(
                    f"{name:<12}{num_seqs:>5}{'yes' if row['text'] else 'no':>5}"
                    + "".join(f"{row[column]:>10,}" for column in columns),
                    flush=True,
                )
    adding = []
    if args.requests:
        adding = [measure_adding(args.requests, tokenizer) for tokenizer in tokenizers]
    for each in adding:
        print(
            f"adding a request of {_PROMPT_LEN} token ids, "
            f"{'with' if each['text'] else 'without'} a tokenizer: {each['add_us']} us"
        )
    print(json.dumps({"tokens": args.tokens, "steps": steps, "adding": adding}))


if __name__ == "__main__":
    main()
