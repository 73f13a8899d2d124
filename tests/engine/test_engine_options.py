"""Every field of `EngineConfig` takes effect through the whole engine (I6)."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, EngineConfig, EngineEvent, EventKind, SamplingParams
from octavo.errors import ConfigError, RequestCapacityError
from octavo.ops.cpu import gemm, native

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="what these options do on a CPU; tests/gpu has the GPU's"
)

OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 64, "max_num_seqs": 8, "num_threads": 1,
}  # fmt: skip
BLOCK_BYTES = 16 * 2 * 2 * 16 * 2 * 4
"""Tokens x layers x KV heads x head_dim x 2 x float32."""


def tokens_of(llm: LLM, prompt: Any = "A", **params: Any) -> list[int]:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 4, "ignore_eos": True, **params})
    return llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0].token_ids


def sizes(llm: LLM) -> tuple[int, int]:
    plan = llm.memory_report().plan
    return plan.num_blocks, plan.block_size


def num_steps_of_a_prompt(llm: LLM) -> int:
    tokens_of(llm, "x" * 40, max_tokens=1)
    return llm.memory_report().history.num_steps


def peak_seqs(llm: LLM) -> int:
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    llm.generate(["a"] * 4, params, use_tqdm=False)
    return llm.memory_report().history.peak_seqs


def longest(llm: LLM) -> int:
    """Prompt and output that are taken; one more is refused."""
    assert llm.config.max_model_len is not None
    room = llm.config.max_model_len - 1
    with pytest.raises(RequestCapacityError):
        tokens_of(llm, max_tokens=room + 1)
    return 1 + len(tokens_of(llm, max_tokens=room))


def order_of_ends(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    prompts = ["a", "b", "c"]
    # Under fcfs priorities are refused: they would be ignored.
    ranks = [3, 2, 1] if llm.config.scheduling_policy == "priority" else None
    outputs = llm.generate(prompts, params, use_tqdm=False, priority=ranks)
    times = [output.metrics.finished_s or 0.0 for output in outputs]
    return sorted(range(3), key=times.__getitem__)


def cached_tokens(llm: LLM) -> int:
    """What a prompt finds that was there before."""
    prompt = {"prompt": "x" * 40}
    params = SamplingParams(max_tokens=1)
    return [llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens for _ in "12"][1]


def preempt(llm: LLM) -> dict[str, EngineEvent]:
    """Three requests in a pool for two; the first preemption of each."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompts = ["a" * 40, "b" * 8, "c" * 32]  # all want a block in the same step: a first
    ranks = None if llm.config.preemption_victim != "priority" else [1, 3, 2]
    outputs = llm.generate(prompts, params, use_tqdm=False, priority=ranks)
    found: dict[str, EngineEvent] = {}
    for output, prompt in zip(outputs, prompts, strict=True):
        for event in llm.events(output.request_id):
            if event.kind == EventKind.PREEMPTED:
                found.setdefault(prompt[0], event)
    return dict(sorted(found.items(), key=lambda item: item[1].time_s))


def first_mode(llm: LLM) -> str | None:
    return next(iter(preempt(llm).values())).mode


def first_victim(llm: LLM) -> str:
    return next(iter(preempt(llm)))


def host_blocks(llm: LLM) -> int:
    return llm.memory_report().host.num_blocks


def kv_bytes_per_number(llm: LLM) -> int:
    return llm.memory_report().plan.shape.element_bytes


def kv_bytes_per_token(llm: LLM) -> int:
    return llm.memory_report().plan.shape.bytes_per_token


def kind_of_head(llm: LLM) -> str:
    runner: Any = llm._engine.engine.core._launch.__self__  # type: ignore[union-attr]
    return type(runner.model.head).__name__


def backend(llm: LLM) -> str:
    return llm.config.attention_backend


def replays_steps(llm: LLM) -> bool:
    """Whether decode steps are recorded, of a model whose steps can be."""
    tokens_of(llm, max_tokens=3)
    runner: Any = llm._engine.engine.core._launch.__self__  # type: ignore[union-attr]
    return runner._replay is not None


def most_plans_under_way(llm: LLM) -> int:
    core = llm._engine.engine.core
    most = 0
    llm._engine.engine.add("r", "A", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    while core.has_unfinished():
        llm._engine.engine.step()
        most = max(most, len(core._pipeline))
    return 1 + most  # and the one whose result it took


@dataclasses.dataclass(frozen=True)
class Case:
    """What a field changes."""

    value: Any
    look: Callable[[LLM], Any]
    without: Any
    """With the field as `OPTIONS` has it, or at its default."""
    with_it: Any
    beside: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further options, in both."""


DEFAULT_BACKEND = "gather" if native.load() is None else "cpu"
REPLAYS = gemm.is_available() and native.load() is not None
TIGHT = {"num_gpu_blocks_override": 38, "block_size": 4, "max_model_len": 100}

CASES: dict[str, Case] = {
    "dtype": Case("bfloat16", kv_bytes_per_number, 4, 2),
    "kv_cache_dtype": Case("int8", kv_bytes_per_token, BLOCK_BYTES // 16, 2 * 2 * 2 * (16 + 2)),
    "quantization": Case("int8", kind_of_head, "TorchLinear", "QuantizedLinear"),
    "attention_backend": Case("gather", backend, DEFAULT_BACKEND, "gather"),
    "async_scheduling": Case(True, most_plans_under_way, 1, 2),
    "enforce_eager": Case(True, replays_steps, REPLAYS, False, {"dtype": "bfloat16"}),
    "max_model_len": Case(100, longest, 256, 100),
    "block_size": Case(4, sizes, (64, 16), (64, 4)),
    "max_num_seqs": Case(2, peak_seqs, 4, 2),
    "max_num_batched_tokens": Case(16, num_steps_of_a_prompt, 1, 3),
    "kv_cache_memory_bytes": Case(
        20 * BLOCK_BYTES + 1, sizes, (8 * 16, 16), (20, 16), {"num_gpu_blocks_override": None}
    ),
    "num_gpu_blocks_override": Case(30, sizes, (64, 16), (30, 16)),
    "enable_prefix_caching": Case(False, cached_tokens, 39, 0),
    "preemption_mode": Case(
        "swap", first_mode, "recompute", "swap", TIGHT | {"preemption_mode": "recompute"}
    ),
    "preemption_victim": Case("lowest-cost", first_victim, "c", "b", TIGHT),
    "swap_space": Case(20 * BLOCK_BYTES / 2**30, host_blocks, 4 * 64, 20),
    "load_format": Case("dummy", lambda llm: tokens_of(llm) == [0] * 4, True, False),
    "skip_tokenizer_init": Case(True, lambda llm: llm.get_tokenizer() is None, False, True),
    "num_threads": Case(2, lambda llm: llm.config.num_threads, 1, 2),
    "scheduling_policy": Case("priority", order_of_ends, [0, 1, 2], [2, 1, 0], {"max_num_seqs": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_option(name: str, blank_path: Path) -> None:
    case = CASES[name]
    options = OPTIONS | case.beside
    with LLM(str(blank_path), **options) as llm:
        assert case.look(llm) == case.without
    with LLM(str(blank_path), **options | {name: case.value}) as llm:
        assert case.look(llm) == case.with_it


def test_seed(blank_path: Path) -> None:
    def drawn(seed: int) -> list[int]:
        with LLM(str(blank_path), **OPTIONS, seed=seed) as llm:
            return tokens_of(llm, temperature=1.0, max_tokens=8)

    assert drawn(1) == drawn(1) != drawn(2)


def test_seed_of_dummy_weights(tiny_model_path: Path) -> None:
    def answer(seed: int) -> list[int]:
        with LLM(str(tiny_model_path), **OPTIONS, load_format="dummy", seed=seed) as llm:
            return tokens_of(llm, temperature=1.0, seed=0, max_tokens=16)

    assert answer(1) == answer(1) != answer(2)


def test_model_and_tokenizer(blank_path: Path, tiny_weights_path: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    shutil.copy(blank_path / "tokenizer.json", tokenizer)
    with LLM(str(blank_path), **OPTIONS) as llm:
        assert tokens_of(llm) == [0] * 4 and llm.get_tokenizer().chat_template  # type: ignore[union-attr]
    with LLM(tiny_weights_path, tokenizer=tokenizer, **OPTIONS) as llm:  # type: ignore[arg-type]
        assert tokens_of(llm) != [0] * 4
        assert llm.get_tokenizer().chat_template is None  # type: ignore[union-attr]


def test_the_largest_priority_number_is_the_victim(blank_path: Path) -> None:
    options = OPTIONS | TIGHT | {"preemption_victim": "priority"}
    with LLM(str(blank_path), **options) as llm:
        assert first_victim(llm) == "b"


def test_kv_disk_dir_and_bytes(blank_path: Path, tmp_path: Path) -> None:
    """What a closed engine left is found by the next one, as far as there was room."""
    prompt = {"prompt_token_ids": [i % 200 for i in range(16 * 6 + 1)]}
    params = SamplingParams(max_tokens=1)

    def found(**options: Any) -> int:
        with LLM(str(blank_path), **OPTIONS, **options) as llm:
            return llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens

    disk = {"kv_disk_dir": str(tmp_path / "much")}
    assert [found(**disk), found(**disk), found()] == [0, 16 * 6, 0]
    little = {"kv_disk_dir": str(tmp_path / "little"), "kv_disk_bytes": 2 * BLOCK_BYTES}
    assert [found(**little), found(**little)] == [0, 16 * 2]


def test_every_option_has_its_case() -> None:
    """One choice is no choice (`kv_policy`); a `revision` is the hub's, and refused elsewhere. What
    `disable_hybrid_kv_cache_manager` does is in `test_groups`: it takes a model with windows."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    elsewhere = {"model", "tokenizer", "seed", "kv_policy", "revision", "kv_disk_dir"}
    elsewhere |= {"kv_disk_bytes", "record", "disable_hybrid_kv_cache_manager"}
    assert names == CASES.keys() | elsewhere | NEEDS_A_GPU.keys()


NEEDS_A_GPU: dict[str, Any] = {
    "device": "cuda",
    "kv_cache_dtype": "fp8",
    "gpu_memory_utilization": 0.5,
}
"""Without one refused, with one in tests/gpu."""


@pytest.mark.parametrize("name", NEEDS_A_GPU)
def test_what_needs_a_gpu_is_refused_without_one(name: str, blank_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    value, flag = NEEDS_A_GPU[name], "--" + name.replace("_", "-")
    way_out = "use --device cpu" if name == "device" else f"leave {flag} out"
    says = f"^{name}={value!r} needs an NVIDIA GPU .* it found none .*: {way_out}$"
    with pytest.raises(ConfigError, match=says):
        LLM(str(blank_path), **OPTIONS, **{name: value})
    if name != "device":
        with pytest.raises(ConfigError, match=rf"device is 'cpu': leave {flag} or --device out"):
            EngineConfig(device="cpu", **{name: value})


def test_an_int8_cache_is_for_cpus() -> None:
    with pytest.raises(ConfigError, match="is for CPUs and device is 'cuda': use --kv-cache-dtype"):
        EngineConfig(device="cuda", kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of .*auto.*fp8.*int8"):
        EngineConfig(kv_cache_dtype="int4")  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, "on"])
def test_overlap_is_on_off_or_none(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"async_scheduling must be True, False or None"):
        EngineConfig(async_scheduling=value)


@pytest.mark.parametrize("name", ["triton", "fa3", "flashinfer"])
def test_attention_backends_for_gpus(name: str, blank_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=f"{name} runs on NVIDIA GPUs, and device is cpu"):
        LLM(str(blank_path), **OPTIONS, attention_backend=name)


def test_float16_needs_a_gpu(blank_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match=r"float16.* needs a GPU"):
        LLM(str(blank_path), **OPTIONS | {"dtype": "float16"})
