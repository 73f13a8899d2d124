"""octavo, through its Python API.

    make .venv/.installed         # or: pip install octavo
    .venv/bin/python benchmarks/peers/run_octavo.py --workload W --single S --model hf

--model: whatever octavo loads; for a comparison the folder that `convert_gguf.py` makes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import harness

import octavo
from octavo import LLM, SamplingParams


class Octavo:
    """See `harness.Engine`."""

    version = octavo.__version__

    def __init__(self, options: harness.Options) -> None:
        self._llm = LLM(
            model=options.model,
            dtype="bfloat16",
            num_threads=options.threads,
            max_model_len=harness.MAX_MODEL_LEN,
            kv_cache_memory_bytes=harness.KV_CACHE_GIB << 30,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )

    def generate(self, requests: Sequence[harness.Request]) -> list[list[int]]:
        prompts = [request.prompt_ids for request in requests]
        params = [_params(request) for request in requests]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    def stream(self, request: harness.Request) -> tuple[list[int], float]:
        stream = self._llm.stream(request.prompt_ids, _params(request))
        ids = next(stream).outputs[0].token_ids
        first = time.perf_counter()
        for output in stream:
            ids = output.outputs[0].token_ids
        return ids, first


def _params(request: harness.Request) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False
    )


if __name__ == "__main__":
    harness.main("octavo", Octavo)
