"""transformers' `generate` on static batches of 16, sorted by output length.

    python -m venv transformers
    transformers/bin/pip install torch==2.13.0 transformers==5.24.0
    transformers/bin/python benchmarks/peers/run_transformers.py --workload W --single S --model hf

--model: the folder that `convert_gguf.py` makes. A batch is padded on the left and runs until its
longest output is done; tokens past a request's own length are cut off and do not count. Sorting
spares most of those, and needs the output lengths, which no server knows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import harness
import torch
import transformers
from transformers.generation.streamers import BaseStreamer

BATCH_SIZE = 16
PAD_ID = 0
"""Masked, so any token does."""


class Transformers:
    """See `harness.Engine`."""

    version = transformers.__version__

    def __init__(self, options: harness.Options) -> None:
        torch.set_num_threads(options.threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self._model.generation_config.eos_token_id = None

    def generate(self, requests: Sequence[harness.Request]) -> list[list[int]]:
        order = sorted(range(len(requests)), key=lambda i: requests[i].max_tokens)
        outputs: list[list[int]] = [[] for _ in requests]
        for start in range(0, len(order), BATCH_SIZE):
            batch = order[start : start + BATCH_SIZE]
            for i, ids in zip(batch, self._batch([requests[i] for i in batch]), strict=True):
                outputs[i] = ids
        return outputs

    def stream(self, request: harness.Request) -> tuple[list[int], float]:
        clock = _FirstToken()
        (ids,) = self._batch([request], clock)
        return ids, clock.first

    def _batch(
        self, requests: Sequence[harness.Request], streamer: BaseStreamer | None = None
    ) -> list[list[int]]:
        ids, mask = padded(requests)
        with torch.inference_mode():
            done = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(request.max_tokens for request in requests),
                do_sample=False,
                pad_token_id=PAD_ID,
                streamer=streamer,
            )
        rows = done[:, ids.shape[1] :].tolist()
        return [row[: request.max_tokens] for row, request in zip(rows, requests, strict=True)]


class _FirstToken(BaseStreamer):
    """Notes when the first new token comes; the prompt comes before it."""

    def __init__(self) -> None:
        self._num_puts, self.first = 0, 0.0

    def put(self, value: torch.Tensor) -> None:
        self._num_puts += 1
        if self._num_puts == 2:
            self.first = time.perf_counter()

    def end(self) -> None:
        pass


def padded(requests: Sequence[harness.Request]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask of a batch, [requests, longest prompt], padded on the left."""
    longest = max(len(request.prompt_ids) for request in requests)
    ids = torch.full((len(requests), longest), PAD_ID)
    mask = torch.zeros_like(ids)
    for row, request in enumerate(requests):
        ids[row, longest - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
        mask[row, longest - len(request.prompt_ids) :] = 1
    return ids, mask


if __name__ == "__main__":
    harness.main("transformers", Transformers)
