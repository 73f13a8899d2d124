"""transformers' beam search (`generate(num_beams=...)`) on static batches.

    python -m venv transformers
    transformers/bin/pip install torch==2.13.0 transformers==5.24.0
    transformers/bin/python benchmarks/peers/run_transformers_beam.py --workload W --model hf

--model: the folder that `convert_gguf.py` makes. Requests are sorted by the length of their
prompts, so that a batch needs little padding. KV memory is that of the `DynamicCache` at the end of
the largest batch, when it is longest; what the reordering of beams takes besides (a copy of one
layer at a time) does not count.
"""

from __future__ import annotations

from collections.abc import Sequence

import beam_harness
import harness
import torch
import transformers
from run_transformers import PAD_ID, padded


class Transformers:
    """See `beam_harness.Engine`."""

    version = transformers.__version__

    def __init__(self, options: beam_harness.Options) -> None:
        torch.set_num_threads(options.threads)
        self._width, self._batch_size = options.width, options.batch_size
        self.kv_bytes = 0
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
        ).eval()
        self._model.generation_config.eos_token_id = None

    def search(self, requests: Sequence[harness.Request]) -> list[list[list[int]]]:
        order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
        outputs: list[list[list[int]]] = [[] for _ in requests]
        self.kv_bytes = 0
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]
            for i, beams in zip(batch, self._batch([requests[i] for i in batch]), strict=True):
                outputs[i] = beams
        return outputs

    def _batch(self, requests: Sequence[harness.Request]) -> list[list[list[int]]]:
        (num_tokens,) = {request.max_tokens for request in requests}
        ids, mask = padded(requests)
        with torch.inference_mode():
            done = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=num_tokens,
                do_sample=False,
                num_beams=self._width,
                num_return_sequences=self._width,
                length_penalty=1.0,
                pad_token_id=PAD_ID,
                return_dict_in_generate=True,
            )
        layers = done.cache.layers
        self.kv_bytes = max(
            self.kv_bytes, sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        )
        rows = done.sequences[:, ids.shape[1] :].tolist()
        return [rows[i : i + self._width] for i in range(0, len(rows), self._width)]


if __name__ == "__main__":
    beam_harness.main("transformers", Transformers)
