"""`EngineConfig.quantization` on CPUs: what is chosen, what it costs in quality, who is refused."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octavo import LLM, EngineConfig, SamplingParams
from octavo.engine.quantize import checkpoint_method, plan_weights
from octavo.errors import ConfigError
from octavo.ops.cpu import native, qgemm
from octavo.weights.gguf import GGUFSource
from octavo.weights.load import OpenModel, open_model
from octavo.weights.locate import locate

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU does"),
    pytest.mark.skipif(not qgemm.is_available(), reason="needs the C library"),
]
CPU = torch.device("cpu")
TEXTS = (Path(__file__).parents[1] / "data" / "public_domain.txt").read_text("utf-8").split("%%")
fast = pytest.mark.skipif(not qgemm.is_fast(), reason="needs AVX512_VNNI")


@pytest.fixture(scope="module")
def plain(tiny_weights_path: Path) -> OpenModel:
    return open_model(locate(str(tiny_weights_path)))


@pytest.fixture(scope="module")
def quantized(default_model_path: Path) -> OpenModel:
    return open_model(locate(str(default_model_path)))


def config(quantization: Any = None, **options: Any) -> EngineConfig:
    return EngineConfig(device="cpu", model="m", quantization=quantization, **options)


def test_plain_weights(plain: OpenModel) -> None:
    assert checkpoint_method(plain) is None
    for asked in (None, "none"):
        plan = plan_weights(config(asked), plain, CPU)
        assert (plan.name, plan.keeps, plan.quantize) == ("none", False, None)
    plan = plan_weights(config("int8"), plain, CPU)
    assert (plan.name, plan.quantize, plan.quantize_head) == ("int8", "int8", "int8")
    for asked in ("gguf", "awq", "gptq", "compressed-tensors"):
        with pytest.raises(ConfigError, match=f"'{asked}' is of .* m are not quantized: leave"):
            plan_weights(config(asked), plain, CPU)
    with pytest.raises(ConfigError, match=r"quantization='fp8' needs a GPU .* --quantization int8"):
        plan_weights(config("fp8"), plain, CPU)
    with pytest.raises(ConfigError, match=r"'int8' is for CPUs and device is 'cuda'"):
        plan_weights(config("int8"), plain, torch.device("cuda"))


@pytest.mark.parametrize(
    ("kinds", "method"), [(("F64", "F32", "BF16"), None), (("F32", "Q8_0"), "gguf")], ids=str
)
def test_types_that_are_plain(
    kinds: tuple[str, ...], method: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GGUFSource, "quantizations", lambda _: dict.fromkeys(kinds, 1))
    opened: Any = SimpleNamespace(source=object.__new__(GGUFSource), quantization=None)
    assert checkpoint_method(opened) == method


@pytest.mark.model
@fast
def test_a_quantized_file_stays_so(quantized: OpenModel, caplog: pytest.LogCaptureFixture) -> None:
    assert checkpoint_method(quantized) == "gguf"
    with caplog.at_level(logging.INFO, "octavo"):
        for options in ({}, {"dtype": "bfloat16"}):
            plan = plan_weights(config(None, **options), quantized, CPU)
            assert (plan.name, plan.keeps, plan.quantize_head) == ("int8", False, "int8")
    assert len([r for r in caplog.records if "are held in 8 bits" in r.message]) == 2
    kept = plan_weights(config("gguf"), quantized, CPU)
    assert (kept.name, kept.keeps, kept.quantize) == ("gguf", True, None)
    with pytest.raises(ConfigError, match=r"'awq' is of checkpoints, .* are quantized with gguf"):
        plan_weights(config("awq"), quantized, CPU)


@pytest.mark.model
def test_a_quantized_file_is_expanded(
    quantized: OpenModel, caplog: pytest.LogCaptureFixture, best_isa_afterwards: None
) -> None:
    def log_of(asked: str | None, **options: Any) -> str:
        caplog.clear()
        with caplog.at_level(logging.INFO, "octavo"):
            plan = plan_weights(config(asked, **options), quantized, CPU)
        assert plan == type(plan)("none")
        return " ".join(record.getMessage() for record in caplog.records)

    assert log_of("none") == ""
    assert log_of(None, dtype="float32") == "gguf weights are expanded: dtype is float32"
    native.set_isa("avx2")
    assert "slower without AVX512_VNNI (avx2)" in log_of(None)
    caplog.clear()
    assert plan_weights(config("gguf"), quantized, CPU).keeps
    assert "saves memory and costs speed" in caplog.text


@pytest.fixture
def best_isa_afterwards() -> Any:
    yield
    native.set_isa(None)


def test_without_the_library_it_is_refused(
    plain: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    with pytest.raises(ConfigError, match="'int8' needs the C library"):
        plan_weights(config("int8"), plain, CPU)


def test_refused_names() -> None:
    with pytest.raises(ConfigError, match=r"quantization must be one of none, int8, .* 'int3'"):
        config("int3")


def tokens(llm: LLM, prompts: list[str], **options: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_do_not_depend_on_the_batch(tiny_weights_path: Path, dtype: Any) -> None:
    """Nor on chunks and replayed steps: sums of integers are exact."""
    prompts = ["x" * 60, "ab", "c" * 33, "d", "ef" * 20, "g", "hi", "j" * 9]
    options: dict[str, Any] = {"dtype": dtype, "quantization": "int8", "num_threads": 1}
    options |= {"num_gpu_blocks_override": 128, "enable_prefix_caching": False}
    with LLM(tiny_weights_path, **options) as llm:
        together = tokens(llm, prompts)
        alone = [tokens(llm, [prompt])[0] for prompt in prompts]
    with LLM(tiny_weights_path, **options, max_num_batched_tokens=16, max_num_seqs=4,
             enforce_eager=True) as llm:  # fmt: skip
        chunked = tokens(llm, prompts)
    assert together == alone == chunked


# -- the default model


def perplexity(llm: LLM) -> float:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    texts = [text.strip() for text in TEXTS]
    found = []
    for output in llm.generate(texts, params, use_tqdm=False):
        assert output.prompt_logprobs is not None
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        found += [entry[token].logprob for token, entry in pairs if entry is not None]
    return math.exp(-sum(found) / len(found))


@pytest.mark.model
@fast
def test_quality_and_memory_of_the_default_model(default_model_path: Path) -> None:
    """The measure is bf16 from the same file: 1 % for int8, 3 % for the file's own 4 bits."""
    found = {}
    for quantization in ("none", "int8", "gguf"):
        with LLM(
            default_model_path, quantization=quantization, dtype="bfloat16",
            num_gpu_blocks_override=256, enable_prefix_caching=False,
        ) as llm:  # fmt: skip
            weights = llm.memory_report().plan.weights_bytes
            found[llm.config.quantization] = perplexity(llm), weights
    assert found.keys() == {"none", "int8", "gguf"}
    (measure, bf16_bytes) = found["none"]
    for name, worse, share in (("int8", 1.01, 0.55), ("gguf", 1.03, 0.37)):
        value, num_bytes = found[name]
        assert value < worse * measure, f"{name}: perplexity {value:.2f}, bf16 {measure:.2f}"
        assert num_bytes < share * bf16_bytes
