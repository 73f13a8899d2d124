"""An engine whose device takes no time: scheduler, KV manager and engine loop are those that serve.

For load tests of what lies around the model. `build` is what `EngineOptions.build` may name, with
this folder on PYTHONPATH: `null_engine:build`. Each sequence reads an English text aloud, token by
token, from a place that depends on its position only. OCTAVO_NULL_STEP_S makes a step take so long;
OCTAVO_NULL_STEP_LOG names a file that gets each step's end (monotonic seconds, 8-byte floats).
"""

from __future__ import annotations

import array
import os
import time
from collections.abc import Callable

from octavo.arch import ModelArch
from octavo.config import EngineConfig
from octavo.engine.built import BuiltEngine
from octavo.engine.core import EngineCore
from octavo.engine.engine import Engine
from octavo.engine.input import InputProcessor
from octavo.engine.output import OutputProcessor
from octavo.kv import KVCacheManager, MemoryPlan
from octavo.kv.policies import make_policy
from octavo.kv.shape import KVShape
from octavo.plan import SeqResult, StepPlan, StepResult
from octavo.sched import Scheduler
from octavo.text.tokenizer import load_tokenizer
from octavo.weights.locate import locate
from octavo.weights.progress import Progress

TEXT = (
    "A sheet that is folded three times gives eight leaves, or sixteen pages, and a book made so is"
    " an octavo. “Every page,” the printer's naïve apprentice said, “has its place — but"
    " none lies beside the next!” In 1,499 such books were sold at 2½ ducats each.\n"
)
_ARCH = ModelArch("Null", 49_152, 576, 1536, 30, 9, 3, 64, 8192)


class NullRunner:
    """Yields the text's next token for each sequence."""

    def __init__(self, token_ids: list[int], step_s: float, step_log: str | None = None) -> None:
        self._token_ids, self._step_s = token_ids, step_s
        self._log = None if step_log is None else open(step_log, "wb", buffering=0)  # noqa: SIM115

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """As a runner's."""
        if self._step_s and plan.seqs:
            time.sleep(self._step_s)
        ids, num = self._token_ids, len(self._token_ids)
        sampled = []
        for seq in plan.seqs:
            if seq.sample:
                token_id = ids[(seq.start + seq.num_tokens) % num]
                sampled.append(SeqResult(seq.seq_id, token_id, None))
                for other in plan.extra_draws.get(seq.seq_id, ()):
                    sampled.append(SeqResult(other, token_id, None))
        result = StepResult(plan.step_id, sampled)
        if self._log is not None:
            self._log.write(array.array("d", [time.monotonic()]).tobytes())
        return lambda: result


def build(config: EngineConfig, progress: Progress | None = None) -> BuiltEngine:
    """An engine around a `NullRunner`. Takes the tokenizer of the configuration's model."""
    files = locate(config.model, config.revision, config.load_format, progress)
    tokenizer = load_tokenizer(files.tokenizer)
    config = config.for_device("cpu")
    limits = config.limits()
    num_blocks = config.num_gpu_blocks_override or 32_768
    max_len = config.max_model_len or min(8192, num_blocks * config.block_size)
    shape = KVShape(_ARCH.num_layers, _ARCH.num_kv_heads, _ARCH.head_dim, 2)
    plan = MemoryPlan(
        available_bytes=shape.bytes_per_block(config.block_size) * num_blocks,
        weights_bytes=0,
        activation_bytes=0,
        logits_bytes=0,
        shape=shape,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_model_len=max_len,
        chosen_by="--num-gpu-blocks-override",
    )
    config = config.replace(
        dtype="bfloat16",
        max_model_len=max_len,
        kv_cache_memory_bytes=plan.kv_bytes,
        num_gpu_blocks_override=num_blocks,
        swap_space=0.0,
    )
    kv = KVCacheManager(
        num_blocks,
        config.block_size,
        make_policy(config.kv_policy, max_seq_tokens=max_len),
        bytes_per_block=plan.bytes_per_block,
        enable_prefix_caching=config.enable_prefix_caching,
    )
    scheduler = Scheduler(
        kv,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=max_len,
        policy=config.scheduling_policy,
        preemption_victim=config.preemption_victim,
    )
    step_s = float(os.environ.get("OCTAVO_NULL_STEP_S", "0"))
    text = tokenizer.encode(TEXT, add_special_tokens=False)
    runner = NullRunner(text, step_s, os.environ.get("OCTAVO_NULL_STEP_LOG"))
    core = EngineCore(scheduler, kv, runner.launch)
    vocab_size = max(tokenizer.vocab_size, 320)
    inputs = InputProcessor(
        tokenizer, vocab_size=vocab_size, max_model_len=max_len, seed=config.seed
    )
    engine = Engine(core, inputs, OutputProcessor(tokenizer))
    return BuiltEngine(config, _ARCH, engine, tokenizer, plan)
