"""What a user can get wrong, from Python and from the command line: each a typed error that says
what to do, on one line and with status 2 at the terminal, after which the engine goes on."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.cli.main import main
from octavo.errors import (
    CapacityError,
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    OctavoError,
    RequestCapacityError,
    TokenizerError,
    UnsupportedModelError,
    WeightsError,
)

Capture = pytest.CaptureFixture[str]
Break = Callable[[Path], Path | str]
"""Spoils a copy of a good model's folder; what to give as `model`."""

SMALL: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 16, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.fixture
def folder(tiny_weights_path: Path, tmp_path: Path) -> Path:
    """A good model's folder, to be spoiled."""
    return Path(shutil.copytree(tiny_weights_path, tmp_path / "model"))


def without(*names: str) -> Break:
    def spoil(folder: Path) -> Path:
        for name in names:
            (folder / name).unlink()
        return folder

    return spoil


def with_text(name: str, text: str) -> Break:
    def spoil(folder: Path) -> Path:
        (folder / name).write_text(text)
        return folder

    return spoil


def with_config(**changes: Any) -> Break:
    def spoil(folder: Path) -> Path:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return folder

    return spoil


def cut(name: str, num_bytes: int) -> Break:
    def spoil(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(path.read_bytes()[:num_bytes])
        return folder

    return spoil


def pickled_only(folder: Path) -> Path:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder


def write_gguf(path: Path, arch: str, num_bytes: int | None = None) -> Path:
    """A file of one tensor, cut off after `num_bytes`."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_uint32(f"{arch}.block_count", 1)
    writer.add_tensor("token_embd.weight", np.zeros((64, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if num_bytes is not None:
        path.write_bytes(path.read_bytes()[:num_bytes])
    return path


def in_place(path: str) -> Break:
    return lambda folder: path


BAD_MODELS: dict[str, tuple[Break, type[OctavoError], str]] = {
    "no such file": (in_place("/nowhere/m.gguf"), ModelNotFoundError, "--model"),
    "no name": (in_place(""), ModelNotFoundError, "--model"),
    "no path": (in_place("~nobody-of-that-name/m"), ModelNotFoundError, "--model"),
    "too long": (in_place("x" * 5000), ModelNotFoundError, "--model"),
    "empty folder": (lambda f: f.parent, ModelNotFoundError, "safetensors or GGUF"),
    "no weights": (without("model.safetensors"), ModelNotFoundError, "download the model again"),
    "pickled weights": (pickled_only, ModelNotFoundError, "never loads; convert"),
    "pickled file": (
        lambda f: pickled_only(f) / "pytorch_model.bin", UnsupportedModelError, "convert",
    ),
    "a file of a folder": (
        lambda f: f / "model.safetensors", UnsupportedModelError, "give one, or the model's folder",
    ),
    "no config.json": (without("config.json"), ModelNotFoundError, "no config.json"),
    "broken config.json": (cut("config.json", 40), WeightsError, "download it again"),
    "config.json of a list": (with_text("config.json", "[]"), WeightsError, "not a JSON object"),
    "unknown architecture": (
        with_config(architectures=["BloomForCausalLM"]), UnsupportedModelError,
        "'BloomForCausalLM' is not supported; known: Llama",
    ),
    "quantized": (
        with_config(quantization_config={"quant_method": "bitsandbytes"}), UnsupportedModelError,
        "the unquantized checkpoint, or a GGUF",
    ),
    "impossible size": (
        with_config(hidden_size=-4), UnsupportedModelError, "hidden_size must be a whole number",
    ),
    "layers without end": (
        with_config(num_hidden_layers=10**30), UnsupportedModelError, "num_hidden_layers",
    ),
    "other size": (
        with_config(hidden_size=128, head_dim=32), WeightsError, "of the wrong shape.*of one model",
    ),
    "empty safetensors": (cut("model.safetensors", 0), WeightsError, "download it again"),
    "safetensors cut in the header": (
        cut("model.safetensors", 100), WeightsError, "truncated.*download it again",
    ),
    "safetensors cut in a tensor": (
        cut("model.safetensors", 90_000), WeightsError, "truncated.*download it again",
    ),
    "missing shard": (
        with_text(
            "model.safetensors.index.json", json.dumps({"weight_map": {"a": "part-2.safetensors"}})
        ),
        WeightsError, "part-2.safetensors; download",
    ),
    "no tokenizer": (
        without("tokenizer.json"), TokenizerError, "--tokenizer, or use --skip-tokenizer-init",
    ),
    "broken tokenizer.json": (cut("tokenizer.json", 40), TokenizerError, "--tokenizer"),
    "broken tokenizer_config.json": (
        cut("tokenizer_config.json", 5), TokenizerError, "--tokenizer",
    ),
    "no gguf": (
        lambda f: write_gguf(f / "m.gguf", "llama", 0), WeightsError, "it is empty; download",
    ),
    "gguf cut in the header": (
        lambda f: write_gguf(f / "m.gguf", "llama", 60), WeightsError, "truncated or damaged",
    ),
    "gguf cut in a tensor": (
        lambda f: write_gguf(f / "m.gguf", "llama", 4096), WeightsError,
        "'token_embd.weight' ends at byte .* download it again",
    ),
    "gguf of an unknown architecture": (
        lambda f: write_gguf(f / "m.gguf", "rwkv6"), UnsupportedModelError,
        "'rwkv6' is not supported; known: llama, qwen2, qwen3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_models(case: str, folder: Path, capsys: Capture) -> None:
    spoil, kind, says = BAD_MODELS[case]
    model = str(spoil(folder))
    with pytest.raises(kind, match=says):
        LLM(model, **SMALL)
    assert_refused_at_the_terminal(["--model", model, "hi"], kind, says, capsys)


def assert_refused_at_the_terminal(
    words: list[str], kind: type[OctavoError], says: str, capsys: Capture
) -> None:
    """Status 2, nothing on stdout, and one line that a person can act on."""
    capsys.readouterr()
    assert main(["generate", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("octavo: ") and err.count("\n") == 1
    assert re.search(says, err) and "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"kv_cache_memory_bytes": 1}, CapacityError, "raise it to at least"),
        ({"num_gpu_blocks_override": 0}, ConfigError, "num_gpu_blocks_override"),
        ({"num_gpu_blocks_override": 1, "max_model_len": 64}, CapacityError, "raise --num-gpu"),
        ({"kv_cache_memory_bytes": 2**60}, CapacityError, "lower it to at most"),
        ({"max_model_len": 1}, ConfigError, "raise --max-model-len"),
        ({"max_model_len": 4096}, ConfigError, "lower --max-model-len to at most 256"),
        ({"tokenizer": "/nowhere"}, ModelNotFoundError, "--tokenizer"),
        ({"revision": "main"}, ConfigError, "leave --revision out"),
        ({"load_format": "gguf"}, ModelNotFoundError, "--load-format auto"),
        ({"num_threads": 10**6}, ConfigError, "num_threads must be at most"),
        ({"num_threads": 0}, ConfigError, "num_threads"),
    ],
    ids=str,
)
def test_bad_options(
    options: dict[str, Any], kind: type[OctavoError], says: str, folder: Path, capsys: Capture
) -> None:
    with pytest.raises(kind, match=says):
        LLM(str(folder), **options)
    flags = [
        word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value)
    ]
    words = ["--model", str(folder), *map(str, flags), "hi"]
    assert_refused_at_the_terminal(words, kind, says, capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([""], "a prompt is empty"),
        (["x" * 400], "shorten the prompt to at most"),
        (["x", "--max-tokens", "1000000000"], "lower max_tokens to at most"),
        (["x", "--max-tokens", "-1"], "max_tokens must be at least 1"),
        (["x", "--temperature", "nan"], "temperature must be a number at least 0"),
        (["x", "--temperature", "-0.5"], "temperature must be"),
        (["x", "--top-p", "nan"], "top_p must be"),
        (["x", "--presence-penalty", "-3"], "presence_penalty must be"),
        (["x", "--repetition-penalty", "0"], "repetition_penalty must be"),
        (["x", "--n", "100000000"], "n must be at least 1 and at most"),
        (["x", "--stop-token-ids", "320"], "vocabulary ends at 319"),
        (["x", "--logit-bias", "5", "nan"], "logit_bias must map"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_requests_at_the_terminal(
    words: list[str], says: str, tiny_weights_path: Path, capsys: Capture
) -> None:
    flags = ["--model", str(tiny_weights_path), "--dtype", "float32", "--num-threads", "1"]
    words = [*flags, "--num-gpu-blocks-override", "16", *words]
    assert_refused_at_the_terminal(words, OctavoError, says, capsys)


def test_bad_requests_in_a_batch_are_answered_in_place(
    tiny_weights_path: Path, tmp_path: Path, capsys: Capture
) -> None:
    requests: list[dict[str, Any]] = [
        {"prompt": ""},
        {"prompt": "good"},
        {"prompt_token_ids": [320]},
        {"prompt": "\ud800"},
        {"prompt": "x", "max_tokens": 10**9},
        {"prompt": "good"},
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(json.dumps(r) for r in requests))
    flags = ["--model", str(tiny_weights_path), "--dtype", "float32", "--num-threads", "1"]
    assert main(["generate", *flags, "--jsonl", "--file", str(file)]) == 1
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    kinds = [answer.get("error", {}).get("type") for answer in answers]
    refused = InvalidRequestError.__name__
    assert kinds == [refused, None, refused, refused, RequestCapacityError.__name__, None]
    assert answers[1]["outputs"] == answers[5]["outputs"]


def test_the_process_goes_on_after_every_bad_model(tiny_weights_path: Path) -> None:
    def answer() -> list[int]:
        with LLM(str(tiny_weights_path), **SMALL) as llm:
            return llm.generate("good", GREEDY, use_tqdm=False)[0].outputs[0].token_ids

    expected = answer()
    for options in ({"kv_cache_memory_bytes": 1, "num_gpu_blocks_override": None}, {"revision": 1}):
        with pytest.raises(OctavoError):
            LLM(str(tiny_weights_path), **{**SMALL, **options})
    assert answer() == expected


def test_ends_of_sequence_that_the_model_does_not_have(folder: Path) -> None:
    """Masked under `min_tokens`, such an id would be a neighbour's logit in the batch."""
    spoiled = with_config(eos_token_id=[258, 321, 10**6])(folder)
    params = SamplingParams(temperature=0, min_tokens=4, max_tokens=4)
    with LLM(str(spoiled), **SMALL) as llm:
        alone = [llm.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids for p in "ab"]
        both = [o.outputs[0].token_ids for o in llm.generate(["a", "b"], params, use_tqdm=False)]
    assert both == alone
