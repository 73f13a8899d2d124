"""OpenVINO GenAI's continuous batching pipeline, on CPU.

    python -m venv openvino
    openvino/bin/pip install torch==2.13.0 openvino==2026.4.1 openvino-genai==2026.4.1.0 \
        openvino-tokenizers==2026.4.1.0 'optimum-intel[openvino]==2.2.0'
    openvino/bin/pip uninstall --yes torchvision    # not needed; must match torch if it is there
    openvino/bin/optimum-cli export openvino --model hf --task text-generation-with-past \
        --weight-format fp16 ov
    openvino/bin/python benchmarks/peers/run_openvino.py --workload W --single S --model ov

Measured with transformers 5.5.4 (for the export alone). --model: the exported folder. Weights lie
there in fp16, which holds these exactly but for the smallest; it computes in bf16.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import harness
import numpy as np
import openvino
import openvino_genai as genai

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 64, 512


class OpenVINO:
    """See `harness.Engine`."""

    version = openvino.get_version()

    def __init__(self, options: harness.Options) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = harness.KV_CACHE_GIB
        scheduler.max_num_seqs = MAX_NUM_SEQS
        scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties = {
            "INFERENCE_NUM_THREADS": options.threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
        }
        self._pipe = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)

    def generate(self, requests: Sequence[harness.Request]) -> list[list[int]]:
        handles = [self._add(i, request) for i, request in enumerate(requests)]
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
        return [_read(handle) for handle in handles]

    def stream(self, request: harness.Request) -> tuple[list[int], float]:
        handle = self._add(0, request)
        ids: list[int] = []
        while not ids:
            self._pipe.step()
            ids += _read(handle)
        first = time.perf_counter()
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            ids += _read(handle)
        return ids + _read(handle), first

    def _add(self, index: int, request: harness.Request) -> Any:
        config = genai.GenerationConfig()
        config.max_new_tokens = request.max_tokens
        config.ignore_eos = True
        config.do_sample = False
        prompt = openvino.Tensor(np.array([request.prompt_ids], dtype=np.int64))
        return self._pipe.add_request(index, prompt, config)


def _read(handle: Any) -> list[int]:
    """What came since the last read."""
    ids: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            ids += output.generated_ids
    return ids


if __name__ == "__main__":
    harness.main("openvino-genai", OpenVINO)
