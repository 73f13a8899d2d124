"""Quantized weights on a CPU beside bf16: speed, memory and perplexity, in one run.

    python benchmarks/quantized.py [--model NAME] [--rounds 5]
    python benchmarks/quantized.py --llama VENV/bin/python [--llama-q8 FILE.gguf]

Engines (bf16, int8, what the file holds) stay loaded together and take turns, so that whatever else
the machine does meets all of them. Printed: tokens/s of one stream and of a batch of 32 (the best
and the median round, and the median of the rounds' ratios to bf16), bytes of weights, perplexity on
tests/data/public_domain.txt. --llama: an interpreter that has llama-cpp-python; its process is
started in each round, after octavo's turns, with the same file and the same number of tokens.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.config import DEFAULT_MODEL
from octavo.weights.locate import locate

TEXT = Path(__file__).parents[1] / "tests" / "data" / "public_domain.txt"
KINDS = {"bf16": "none", "int8": "int8", "as in the file": "gguf"}
BATCH = 32

LLAMA = """
import ctypes, sys, time
import numpy as np, llama_cpp as L
path, threads, num_tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
L.llama_backend_init()
quiet = L.llama_log_callback(lambda *_: None)
L.llama_log_set(quiet, ctypes.c_void_p(0))
model = L.llama_model_load_from_file(path.encode(), L.llama_model_default_params())
size = L.llama_vocab_n_tokens(L.llama_model_get_vocab(model))
params = L.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = 512, threads, threads
context = L.llama_init_from_model(model, params)
batch = L.llama_batch_init(1, 0, 1)
best = 0.0
for _ in range(2):
    L.llama_memory_clear(L.llama_get_memory(context), True)
    token, began = 100, time.perf_counter()
    for position in range(num_tokens):
        batch.n_tokens, batch.token[0], batch.pos[0] = 1, token, position
        batch.n_seq_id[0], batch.seq_id[0][0], batch.logits[0] = 1, 0, 1
        assert L.llama_decode(context, batch) == 0
        logits = L.llama_get_logits_ith(context, 0)
        token = int(np.ctypeslib.as_array(logits, (size,)).argmax())
    best = max(best, num_tokens / (time.perf_counter() - began))
print(best)
"""


def perplexity(llm: LLM) -> float:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    texts = [text.strip() for text in TEXT.read_text("utf-8").split("%%")]
    found = []
    for output in llm.generate(texts, params, use_tqdm=False):
        assert output.prompt_logprobs is not None
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found += [entry[token].logprob for token, entry in pairs if entry is not None]
    return math.exp(-statistics.mean(found))


def decode(llm: LLM, num_seqs: int, num_tokens: int) -> float:
    """Output tokens/s of so many sequences, each from a prompt of one token."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    prompts = [{"prompt_token_ids": [100 + i]} for i in range(num_seqs)]
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)  # type: ignore[arg-type]
    return num_seqs * num_tokens / (time.perf_counter() - began)


def llama_speed(python: str, path: str, threads: int, num_tokens: int) -> float:
    command = [python, "-c", LLAMA, path, str(threads), str(num_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def measure(llms: dict[str, LLM], args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Speeds by task, then by engine, a number a round."""
    single: dict[str, Callable[[], float]] = {
        name: lambda llm=llm: decode(llm, 1, args.num_tokens) for name, llm in llms.items()
    }
    batch: dict[str, Callable[[], float]] = {
        name: lambda llm=llm: decode(llm, BATCH, args.num_tokens // 2) for name, llm in llms.items()
    }
    if args.llama:
        threads = next(iter(llms.values())).config.num_threads or 1
        files = {"llama.cpp, the same file": str(locate(args.model).path)}
        if args.llama_q8:
            files["llama.cpp, --llama-q8"] = args.llama_q8
        for name, path in files.items():
            single[name] = lambda path=path: llama_speed(args.llama, path, threads, args.num_tokens)
    results: dict[str, dict[str, list[float]]] = {"one stream": {}, f"batch {BATCH}": {}}
    for round_number in range(args.rounds + 1):
        for tasks, rounds in zip((single, batch), results.values(), strict=True):
            for name, task in tasks.items():
                speed = task()
                if round_number:  # the first one warms up
                    rounds.setdefault(name, []).append(speed)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-tokens", type=int, default=128)
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--llama", metavar="PYTHON", help="interpreter with llama-cpp-python")
    parser.add_argument("--llama-q8", metavar="FILE", help="the same model as Q8_0, for it")
    args = parser.parse_args()
    llms = {
        name: LLM(
            args.model, quantization=quantization, dtype="bfloat16", device="cpu",
            num_threads=args.num_threads, num_gpu_blocks_override=1024,
            enable_prefix_caching=False,
        )
        for name, quantization in KINDS.items()
    }  # fmt: skip
    plans = {name: llm.memory_report().plan for name, llm in llms.items()}
    whole = plans["bf16"].weights_bytes
    measures = {name: perplexity(llm) for name, llm in llms.items()}
    print(f"{args.model}, {llms['bf16'].config.num_threads} threads")
    for name, llm in llms.items():
        num_bytes, value = plans[name].weights_bytes, measures[name]
        print(
            f"{name:26} {llm.config.quantization:6} weights {num_bytes / 1e6:7.1f} MB "
            f"({num_bytes / whole:.3f}), perplexity {value:.3f} "
            f"({value / measures['bf16'] - 1:+.2%})"
        )
    for task, rounds in measure(llms, args).items():
        for name, speeds in rounds.items():
            ratios = [a / b for a, b in zip(speeds, rounds["bf16"], strict=True)]
            print(
                f"{task:12} {name:26} tokens/s best {max(speeds):7.1f}, median "
                f"{statistics.median(speeds):7.1f}; {statistics.median(ratios):.2f} x bf16 "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
