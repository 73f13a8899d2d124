"""How long decoding takes by block size, on this machine: the whole step, through the engine."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from octavo.bench.report import tpot_s
from octavo.bench.restore import StartEngine
from octavo.config import EngineConfig
from octavo.errors import InvalidRequestError
from octavo.request import SamplingParams
from octavo.util import cdiv

if TYPE_CHECKING:
    from octavo import LLM


def measure_decode(
    config: EngineConfig,
    start: StartEngine,
    *,
    block_sizes: Sequence[int],
    batch_size: int = 16,
    context: int = 512,
    num_steps: int = 16,
    num_iters: int = 3,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[int, float]:
    """Seconds of a step in which `batch_size` sequences of about `context` tokens decode, for each
    block size: the least of `num_iters` medians over sequences.

    An engine is started for each; all prompts are computed in one step, so that all decode
    together. Raises `InvalidRequestError` for numbers below 1, and what
    starting raises.
    """
    numbers = (batch_size, context, num_steps - 1, num_iters, *block_sizes)
    if not block_sizes or min(numbers) < 1:
        raise InvalidRequestError(
            f"block sizes {tuple(block_sizes)}, batch {batch_size}, context {context} and "
            f"iterations {num_iters} must be at least 1 each, and steps ({num_steps}) 2"
        )
    longest = context + num_steps
    found = {}
    for size in block_sizes:
        tell(f"measuring blocks of {size}")
        changed = config.replace(
            block_size=size,
            num_gpu_blocks_override=batch_size * cdiv(longest, size) + cdiv(batch_size, size) + 1,
            kv_cache_memory_bytes=None,
            max_model_len=longest,
            max_num_seqs=batch_size,
            max_num_batched_tokens=batch_size * context,
            enable_prefix_caching=False,
            preemption_mode="recompute",
            swap_space=0,
            skip_tokenizer_init=True,
            tokenizer=None,
        )
        with start(changed) as llm:
            found[size] = _decode_s(llm, batch_size, context, num_steps, num_iters)
    return found


def _decode_s(llm: LLM, batch_size: int, context: int, num_steps: int, num_iters: int) -> float:
    params = SamplingParams(max_tokens=num_steps, ignore_eos=True, detokenize=False)
    medians = []
    for number in range(num_iters + 1):
        rng = random.Random(f"{llm.config.seed} {number}")
        vocab_size = llm.arch.vocab_size
        prompts = [
            {"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(context)]}
            for _ in range(batch_size)
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        medians.append(statistics.median(tpot_s(outputs)))
    return min(medians[1:])
