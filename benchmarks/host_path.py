"""What the host does in every step: the whole engine around a device that takes no time.

    python benchmarks/host_path.py [--num-seqs 1 32 256 1024] [--tokens 200] [--no-text]

A null device answers every step at once with tokens of an English text; scheduler, KV manager,
engine and driver are those that serve, with overlap. Prints the median microseconds of a step in
which every sequence decodes: to plan it ("schedule"), to take in its result ("update"), to make
outputs ("outputs"), and all else ("rest": the loops around these, and whoever reads the outputs);
"per token" is outputs and rest over the sequences. Last, what adding a request takes. The last line
is JSON.

final: `LLM.generate`. stream: `LLM.stream`, all streams read in turns, one output each a step.
stream+read: the same, where the reader looks at token ids and text of each output. delta: what is
new, for servers.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.config import DEFAULT_MODEL
from octavo.engine.core import EngineCore
from octavo.engine.driver import Driver
from octavo.engine.engine import Engine
from octavo.engine.input import InputProcessor
from octavo.engine.output import OutputKind, OutputProcessor
from octavo.kv import KVCacheManager
from octavo.plan import SeqResult, StepPlan, StepResult
from octavo.request import SamplingParams
from octavo.sched import Scheduler
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.weights.locate import locate, locate_tokenizer

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


@dataclass(slots=True)
class Row:
    """Seconds of one step."""

    is_decode: bool = False
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))
    total_s: float = 0.0


_PARTS = ("schedule", "device", "update", "outputs")


class Host:
    """An engine on a null device, with clocks around its parts."""

    def __init__(self, num_seqs: int, num_tokens: int, tokenizer: Tokenizer | None) -> None:
        self.num_seqs = num_seqs
        max_len = _PROMPT_LEN + num_tokens + 2
        kv = KVCacheManager(num_seqs * (max_len // _BLOCK_SIZE + 2), _BLOCK_SIZE)
        scheduler = Scheduler(
            kv,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=8192,
            max_model_len=max_len,
            plan_ahead=True,
        )
        core = EngineCore(scheduler, kv, self._launch, overlap=True)
        self._ids = [1 + i % 1000 for i in range(500)]
        if tokenizer is not None:
            self._ids = tokenizer.encode(_TEXT, add_special_tokens=False)
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
        self.driver = Driver(Engine(core, inputs, outputs))
        self.driver.after_step = self._end_row

    def _clock(self, owner: Any, name: str, part: str = "") -> None:
        inner: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begun_s = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._row.parts[part or name] += time.perf_counter() - begun_s

        setattr(owner, name, timed)

    def _launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        begun_s = time.perf_counter()
        ids = self._ids
        sampled = [
            SeqResult(s.seq_id, ids[(s.seq_id + s.start + s.num_tokens) % len(ids)], None)
            for s in plan.seqs
            if s.sample
        ]
        result = StepResult(plan.step_id, sampled)
        self._row.is_decode = plan.num_tokens == self.num_seqs == len(plan.seqs)
        self._row.parts["device"] += time.perf_counter() - begun_s
        return lambda: result

    def _end_row(self) -> None:
        now_s = time.perf_counter()
        self._row.total_s, self._since_s = now_s - self._since_s, now_s
        self.rows.append(self._row)
        self._row = Row()

    def add(self, prompts: list[list[int]], params: SamplingParams, kind: OutputKind) -> list[str]:
        """Queue requests."""
        return [self.driver.add(prompt, params, kind) for prompt in prompts]


def make_prompts(num_prompts: int) -> list[list[int]]:
    """Prompts that begin with nothing in common."""
    return [[1 + 16 * i + j for j in range(_PROMPT_LEN)] for i in range(num_prompts)]


def measure(name: str, num_seqs: int, num_tokens: int, tokenizer: Tokenizer | None) -> dict:
    """Microseconds of a step in which all decode, by part."""
    host = Host(num_seqs, num_tokens, tokenizer)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, seed=0)
    request_ids = host.add(make_prompts(num_seqs), params, _KINDS[name])
    gc.collect()
    if name == "final":
        host.driver.run_to_end(request_ids, use_tqdm=False)
        host.driver.forget(request_ids)
    else:
        read_all(host, request_ids, look=name == "stream+read")
    rows = [row for row in host.rows if row.is_decode][2:-2]
    parts = {part: statistics.median(row.parts[part] for row in rows) for part in _PARTS}
    rest = statistics.median(row.total_s - sum(row.parts.values()) for row in rows)
    del parts["device"]
    figures = {part: round(seconds * 1e6, 1) for part, seconds in parts.items()}
    figures["rest"] = round(rest * 1e6, 1)
    figures["per_token"] = round((parts["outputs"] + rest) * 1e6 / num_seqs, 2)
    return {"kind": name, "num_seqs": num_seqs, "text": tokenizer is not None} | figures


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


def measure_adding(num_requests: int, tokenizer: Tokenizer | None) -> dict:
    """Microseconds to add a request of token ids."""
    host = Host(1, 16, tokenizer)
    params = SamplingParams(temperature=0, ignore_eos=True)
    prompts = make_prompts(num_requests)
    gc.collect()
    begun_s = time.perf_counter()
    request_ids = host.add(prompts, params, OutputKind.FINAL_ONLY)
    seconds = time.perf_counter() - begun_s
    host.driver.forget(request_ids)
    return {"text": tokenizer is not None, "add_us": round(seconds / num_requests * 1e6, 1)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of a sequence")
    parser.add_argument("--requests", type=int, default=2000, help="for the cost of adding")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS, default=list(_KINDS))
    parser.add_argument("--tokenizer", help="of a folder or repository; default: the small model's")
    parser.add_argument("--no-text", action="store_true", help="no tokenizer is needed then")
    args = parser.parse_args()
    tokenizers: list[Tokenizer | None] = [None]
    if not args.no_text:
        path = locate(DEFAULT_MODEL).tokenizer
        if args.tokenizer is not None:
            path = locate_tokenizer(args.tokenizer)
        tokenizers.append(load_tokenizer(path))
    print("us a step     seqs  text  schedule    update   outputs      rest  per token")
    steps = []
    for tokenizer in tokenizers:
        for name in args.kinds:
            for num_seqs in args.num_seqs:
                row = measure(name, num_seqs, args.tokens, tokenizer)
                steps.append(row)
                print(
                    f"{name:<12} {num_seqs:>5}  {'yes' if row['text'] else 'no':>4}"
                    f"{row['schedule']:>10}{row['update']:>10}{row['outputs']:>10}"
                    f"{row['rest']:>10}{row['per_token']:>11}",
                    flush=True,
                )
    adding = [measure_adding(args.requests, tokenizer) for tokenizer in tokenizers]
    for found in adding:
        print(
            f"adding a request of {_PROMPT_LEN} token ids, "
            f"{'with' if found['text'] else 'without'} a tokenizer: {found['add_us']} us"
        )
    print(json.dumps({"tokens": args.tokens, "steps": steps, "adding": adding}))


if __name__ == "__main__":
    main()
