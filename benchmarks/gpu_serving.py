"""Dummy models served offline on a GPU, by the protocol that vLLM was measured with.

    python benchmarks/gpu_serving.py run llama8b LENGTHS.csv.gz --num 2000 --busy --out octavo.jsonl
    python benchmarks/gpu_serving.py table octavo.jsonl vllm.jsonl

LENGTHS.csv (.gz or not) has `input_tokens` and `output_tokens`. Requests with fewer than 4 tokens
on either side, or with input + output >= --max-len, are left out; the rest are shuffled by --seed
and the first --num taken. Prompts are random token ids; decoding is greedy to the exact output
length, without text and without prefix cache. All requests of a case are handed over at once.

`run` prints one JSON line a case, and appends them to --out:

  startup  seconds to build the engine, and from the process's start to its first token
  trace    output and total tokens per second, requests per second; one line a repetition
  busy     (--busy) the trace once more, watched in windows of --busy-steps steps: the share of the
           time in which the GPU ran something. Watching slows the host: the share is a lower bound
  stream   tokens per second of one request alone (32 in, 256 out), prefill included
  batch    --batch-input tokens in, --batch-output out, for each size: seconds of the prefill, and
           the mean time between tokens: a run of 1 + N tokens less one of 1 token, over N; median
           of three

`table` prints the cases that two such files have in common, side by side: medians of repetitions.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

BEGUN_S = time.perf_counter()

sys.path.insert(0, str(Path(__file__).parent))
from dummy_models import MODELS, write_model  # noqa: E402

Generate = Callable[[list[list[int]], list[int]], float]


def read_trace(path: Path, num: int, seed: int, max_len: int) -> list[tuple[int, int]]:
    """(Tokens in, tokens out) of up to `num` requests, filtered and shuffled as told above."""
    opened: TextIO
    with (
        gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="")
    ) as opened:  # type: ignore[assignment]
        rows = [(int(r["input_tokens"]), int(r["output_tokens"])) for r in csv.DictReader(opened)]
    rows = [(i, o) for i, o in rows if i >= 4 and o >= 4 and i + o < max_len]
    random.Random(seed).shuffle(rows)
    return rows[:num]


class Cases:
    """The cases of one engine, in the order in which prompts are drawn."""

    def __init__(self, llm: Any, args: argparse.Namespace) -> None:
        self.llm, self.args = llm, args
        self._rng, self._vocab = random.Random(args.seed), MODELS[args.model]["vocab_size"]

    def prompt(self, length: int) -> list[int]:
        """Random token ids; the first thousand are left out, where there are enough others."""
        low = min(1000, self._vocab // 2)
        return [self._rng.randrange(low, self._vocab) for _ in range(length)]

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> float:
        """Seconds to generate lengths[i] tokens for prompts[i], all given at once."""
        from octavo import SamplingParams

        params = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in lengths
        ]
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - begin
        assert [len(out.outputs[0].token_ids) for out in outputs] == lengths
        return seconds

    def warm_up(self) -> None:
        """16 requests of 64 tokens."""
        self.generate([self.prompt(64) for _ in range(16)], [16] * 16)

    def trace(self, emit: Callable[..., None]) -> None:
        """All requests of the trace at once, a few times."""
        args = self.args
        requests = read_trace(args.trace, args.num, args.seed, args.max_len)
        prompts, lengths = [self.prompt(i) for i, _ in requests], [o for _, o in requests]
        num_in, num_out = sum(i for i, _ in requests), sum(lengths)
        for rep in range(args.reps):
            before = self.llm.memory_report()
            seconds = self.generate(prompts, lengths)
            after = self.llm.memory_report()
            steps = after.history.num_steps - before.history.num_steps
            emit(
                "trace", model=args.model, trace=args.trace.name, seed=args.seed, rep=rep,
                requests=len(requests), input_tokens=num_in, output_tokens=num_out,
                seconds=round(seconds, 3), out_tok_s=round(num_out / seconds, 1),
                total_tok_s=round((num_in + num_out) / seconds, 1),
                req_s=round(len(requests) / seconds, 2), steps=steps,
                preemptions=after.num_preemptions - before.num_preemptions,
            )  # fmt: skip
        if args.busy:
            emit("busy", model=args.model, **self.busy(prompts, lengths))

    def busy(self, prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
        """How busy the GPU is meanwhile."""
        from octavo.engine.profiling import BusyWindows

        windows = BusyWindows(self.llm, every=self.args.busy_every, length=self.args.busy_steps)
        with windows.watching():
            self.generate(prompts, lengths)
        shares = [window.share for window in windows.found]
        return {
            "windows": len(shares),
            "steps_each": self.args.busy_steps,
            "busy_pct": round(100 * windows.total.share, 2) if shares else None,
            "median_pct": round(100 * statistics.median(shares), 2) if shares else None,
            "least_pct": round(100 * min(shares), 2) if shares else None,
        }

    def stream(self) -> dict[str, Any]:
        """One request alone."""
        seconds = statistics.median(self.generate([self.prompt(32)], [256]) for _ in range(3))
        return {"input_tokens": 32, "output_tokens": 256, "tok_s": round(256 / seconds, 1)}

    def batch(self, batch: int) -> dict[str, Any]:
        """Equal requests together."""
        num_in, num_out = self.args.batch_input, self.args.batch_output
        runs = []
        for _ in range(3):
            prompts = [self.prompt(num_in) for _ in range(batch)]
            prefill = self.generate(prompts, [1] * batch)
            total = self.generate(prompts, [num_out + 1] * batch)
            runs.append((total - prefill, prefill, total))
        decode, prefill, total = sorted(runs)[1]
        return {
            "batch": batch, "input_tokens": num_in, "output_tokens": num_out,
            "prefill_s": round(prefill, 4), "total_s": round(total, 3),
            "itl_ms": round(decode / num_out * 1e3, 3),
            "decode_tok_s": round(batch * num_out / decode, 1),
        }  # fmt: skip


def options_of(args: argparse.Namespace) -> dict[str, Any]:
    """What may differ from octavo's defaults."""
    options: dict[str, Any] = {
        "enable_prefix_caching": False, "max_model_len": args.max_len,
        "gpu_memory_utilization": args.memory, "kv_policy": args.kv_policy,
        "kv_cache_dtype": args.kv_cache_dtype, "enforce_eager": args.eager,
        "attention_backend": args.backend, "block_size": args.block_size, "device": args.device,
        "quantization": args.quantization,
    }  # fmt: skip
    if args.device == "cpu":
        del options["gpu_memory_utilization"]
    if args.no_overlap:
        options["async_scheduling"] = False
    for name in ("max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    if args.kv_policy == "paged":
        options["preemption_mode"] = "recompute"
    options["swap_space"] = 0
    return options


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    lines = None if args.out is None else args.out.open("a", encoding="utf-8")

    def emit(case: str, **values: Any) -> None:
        text = json.dumps({"case": case, **values})
        print(text, flush=True)
        if lines is not None:
            print(text, file=lines, flush=True)

    import torch

    import octavo

    options = options_of(args)
    model = write_model(args.model, args.dtype)
    start = time.perf_counter()
    llm = octavo.LLM(
        model=str(model), load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype, seed=0,
        **options,
    )  # fmt: skip
    with llm:
        startup_s = time.perf_counter() - start
        cases = Cases(llm, args)
        Cases(llm, args).generate([[3] * 32], [1])
        first_token_s = time.perf_counter() - BEGUN_S
        gpu = llm.config.device == "cuda"
        emit(
            "startup", model=args.model, startup_s=round(startup_s, 1),
            process_to_first_token_s=round(first_token_s, 1), octavo=octavo.__version__,
            torch=torch.__version__, dtype=args.dtype,
            gpu=torch.cuda.get_device_name(0) if gpu else None,
            num_slots=llm.memory_report().ledger.num_slots, **options,
        )  # fmt: skip
        if args.memory_report:
            print(llm.memory_report(), file=sys.stderr, flush=True)
        cases.warm_up()
        if args.trace is not None:
            cases.trace(emit)
        if not args.no_stream:
            emit("stream", model=args.model, **cases.stream())
        for batch in [int(size) for size in args.batches.split(",") if size]:
            emit("batch", model=args.model, **cases.batch(batch))


# -- the table

_FIGURES = {
    "trace": (("out_tok_s", "output tokens/s", True),),
    "stream": (("tok_s", "single stream, tokens/s", True),),
    "batch": (("itl_ms", "decode step, ms", False), ("prefill_s", "prefill, s", False)),
    "startup": (("startup_s", "start, s", False),),
    "busy": (("busy_pct", "GPU busy, %", True),),
}
"""Of each case: field, title, and whether more is better."""


def read_figures(path: Path) -> dict[tuple[str, str, str], tuple[float, bool]]:
    """(Model, title, what of it) -> (median over repetitions, whether more is better)."""
    found: dict[tuple[str, str, str], tuple[list[float], bool]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("{"):
            continue
        values = json.loads(line)
        for field, title, more in _FIGURES.get(values.get("case"), ()):
            of = ""
            if values["case"] == "batch":
                of = f"{values['batch']} x {values['input_tokens']}"
            elif values["case"] == "trace":
                of = f"{values['requests']:,} requests"
            key = (values["model"], title, of)
            if values.get(field) is not None:
                found.setdefault(key, ([], more))[0].append(float(values[field]))
    return {key: (statistics.median(each), more) for key, (each, more) in found.items()}


def table(ours: Path, theirs: Path, names: Sequence[str]) -> str:
    """The figures side by side; how much better the first is, as a factor."""
    a, b = read_figures(ours), read_figures(theirs)
    lines = [f"{'model':<12}{'':<44}{names[0]:>12}{names[1]:>12}{'better by':>11}"]
    for key, (value, more) in a.items():
        model, title, of = key
        text = f"{model:<12}{f'{title}, {of}' if of else title:<44}{value:>12,.4g}"
        if key in b:
            other = b[key][0]
            text += f"{other:>12,.4g}"
            if value and other:
                text += f"{(value / other if more else other / value):>10.2f}x"
        lines.append(text)
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="measure a model")
    one.add_argument("model", choices=MODELS)
    one.add_argument("trace", nargs="?", type=Path, help="without it only stream and batch")
    one.add_argument("--num", type=int, default=1000, help="requests taken from the trace")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--max-len", type=int, default=2048, help="context length")
    one.add_argument("--reps", type=int, default=2, help="repetitions of the trace")
    one.add_argument("--batches", default="1,8,32,128,256", help="batch sizes; '' for none")
    one.add_argument("--batch-input", type=int, default=512)
    one.add_argument("--batch-output", type=int, default=128)
    one.add_argument("--no-stream", action="store_true", help="leave the single stream out")
    one.add_argument("--dtype", default="bfloat16")
    one.add_argument("--device", default="auto")
    one.add_argument("--quantization", help="fp8: weights are rounded to it; none: expanded")
    one.add_argument("--max-num-seqs", type=int)
    one.add_argument("--max-num-batched-tokens", type=int)
    one.add_argument("--num-gpu-blocks-override", type=int)
    one.add_argument("--memory", type=float, default=0.9, help="share of the GPU's memory")
    one.add_argument("--block-size", type=int, default=16)
    one.add_argument("--kv-cache-dtype", default="auto")
    one.add_argument("--kv-policy", default="paged")
    one.add_argument("--backend", default="auto", help="attention kernels")
    one.add_argument("--eager", action="store_true", help="no CUDA graphs")
    one.add_argument("--no-overlap", action="store_true", help="steps one after another")
    one.add_argument("--busy", action="store_true", help="how busy the GPU is during the trace")
    one.add_argument("--busy-every", type=int, default=200, help="steps from window to window")
    one.add_argument("--busy-steps", type=int, default=20, help="steps of a window")
    one.add_argument("--memory-report", action="store_true", help="print it to stderr")
    one.add_argument("--out", type=Path, help="append the lines to this file, too")
    both = commands.add_parser("table", help="two files of results side by side")
    both.add_argument("files", nargs=2, type=Path)
    both.add_argument("--names", nargs=2, default=["octavo", "vLLM"])
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = parse(argv)
    if args.command == "table":
        print(table(*args.files, args.names))
    else:
        run(args)


if __name__ == "__main__":
    main()
