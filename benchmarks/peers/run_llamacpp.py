"""llama.cpp through the C API in llama-cpp-python, with continuous batching as llama-server has it.

    python -m venv llamacpp
    CMAKE_ARGS=-DGGML_NATIVE=ON llamacpp/bin/pip install llama-cpp-python==0.3.36
    llamacpp/bin/python benchmarks/peers/run_llamacpp.py --workload W --single S --model bf16.gguf

--model: the bf16 file that `convert_gguf.py --gguf` makes, or any .gguf. Each `llama_decode` takes
one token of every running sequence and prompt tokens of others up to the batch size; sequences
share one KV cache, fp16 as by default (of the size of bf16).
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import harness
import llama_cpp as llama
import numpy as np

NUM_SLOTS, BATCH_SIZE = 32, 512


@dataclass(eq=False)
class Running:
    """A request in its slot."""

    request: harness.Request
    index: int
    slot: int
    num_computed: int = 0
    ids: list[int] = field(default_factory=list)
    first: float = 0.0
    """When its first token was there."""


class LlamaCpp:
    """See `harness.Engine`."""

    version = llama.__version__

    def __init__(self, options: harness.Options) -> None:
        llama.llama_backend_init()
        self._quiet = llama.llama_log_callback(lambda *_: None)  # kept alive: C calls it
        llama.llama_log_set(self._quiet, ctypes.c_void_p(0))
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        model = llama.llama_model_load_from_file(options.model.encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp cannot load {options.model}")
        self._vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        context = llama.llama_context_default_params()
        context.n_ctx = NUM_SLOTS * harness.MAX_MODEL_LEN
        context.n_batch = context.n_ubatch = BATCH_SIZE
        context.n_seq_max = NUM_SLOTS
        context.n_threads = context.n_threads_batch = options.threads
        context.kv_unified = True
        self._context = llama.llama_init_from_model(model, context)
        self._memory = llama.llama_get_memory(self._context)
        self._batch = llama.llama_batch_init(BATCH_SIZE, 0, 1)

    def generate(self, requests: Sequence[harness.Request]) -> list[list[int]]:
        return [sequence.ids for sequence in self._run(requests)]

    def stream(self, request: harness.Request) -> tuple[list[int], float]:
        (sequence,) = self._run([request])
        return sequence.ids, sequence.first

    def _run(self, requests: Sequence[harness.Request]) -> list[Running]:
        llama.llama_memory_clear(self._memory, True)
        waiting, free = deque(enumerate(requests)), list(range(NUM_SLOTS))
        running: list[Running] = []
        done: list[Running] = []
        while waiting or running:
            while waiting and free:
                index, request = waiting.popleft()
                running.append(Running(request, index, free.pop()))
            self._step(running)
            for sequence in [s for s in running if len(s.ids) == s.request.max_tokens]:
                llama.llama_memory_seq_rm(self._memory, sequence.slot, -1, -1)
                free.append(sequence.slot)
                running.remove(sequence)
                done.append(sequence)
        return sorted(done, key=lambda sequence: sequence.index)

    def _step(self, running: Sequence[Running]) -> None:
        """Compute the next token of those that decode, then as much of the prompts as fits."""
        self._batch.n_tokens = 0
        sampled = []
        for sequence in sorted(running, key=lambda s: not s.ids):  # stable: decodes first
            tokens = sequence.ids[-1:] or sequence.request.prompt_ids[sequence.num_computed :]
            for token in tokens[: BATCH_SIZE - self._batch.n_tokens]:
                self._put(token, sequence)
            if sequence.num_computed >= len(sequence.request.prompt_ids):
                self._batch.logits[self._batch.n_tokens - 1] = True
                sampled.append((sequence, self._batch.n_tokens - 1))
        if llama.llama_decode(self._context, self._batch) != 0:
            raise SystemExit("llama_decode failed")
        for sequence, row in sampled:
            logits = llama.llama_get_logits_ith(self._context, row)
            sequence.ids.append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))
            sequence.first = sequence.first or time.perf_counter()

    def _put(self, token: int, sequence: Running) -> None:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row], batch.pos[row] = token, sequence.num_computed
        batch.n_seq_id[row], batch.seq_id[row][0] = 1, sequence.slot
        batch.logits[row] = False
        batch.n_tokens += 1
        sequence.num_computed += 1


if __name__ == "__main__":
    harness.main("llama.cpp", LlamaCpp)
