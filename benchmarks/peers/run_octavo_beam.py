"""octavo's beam search, through its Python API.

    make .venv/.installed         # or: pip install octavo
    .venv/bin/python benchmarks/peers/run_octavo_beam.py --workload W --model hf

--model: whatever octavo loads; for a comparison the folder that `convert_gguf.py` makes. KV memory
is the most blocks that were referenced at one time, times their bytes. No prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import beam_harness
import harness

import octavo
from octavo import LLM, BeamSearchParams


class Octavo:
    """See `beam_harness.Engine`."""

    version = octavo.__version__

    def __init__(self, options: beam_harness.Options) -> None:
        self._width = options.width
        self.kv_bytes = 0
        self._llm = LLM(
            model=options.model,
            dtype=options.dtype,
            num_threads=options.threads,
            max_model_len=harness.MAX_MODEL_LEN,
            max_num_seqs=options.width * options.batch_size,
            kv_cache_memory_bytes=harness.KV_CACHE_GIB << 30,
            enable_prefix_caching=False,
            skip_tokenizer_init=True,
        )

    def search(self, requests: Sequence[harness.Request]) -> list[list[list[int]]]:
        params = [
            BeamSearchParams(beam_width=self._width, max_tokens=request.max_tokens, ignore_eos=True)
            for request in requests
        ]
        prompts = [request.prompt_ids for request in requests]
        outputs = self._llm.beam_search(prompts, params, use_tqdm=False)
        report = self._llm.memory_report()
        self.kv_bytes = report.history.peak_blocks * report.ledger.bytes_per_block
        return [
            [beam.tokens[len(request.prompt_ids) :] for beam in output.sequences]
            for output, request in zip(outputs, requests, strict=True)
        ]


if __name__ == "__main__":
    beam_harness.main("octavo", Octavo)
