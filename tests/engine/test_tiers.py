"""The disk tier's folder, and the models whose prefixes cannot be shared."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_support import OPTIONS

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.engine.tiers import check_disk_folder, fingerprint
from octavo.errors import CapacityError, ConfigError, InvalidRequestError
from octavo.kv.shape import KVShape
from octavo.ops.cpu import qgemm
from octavo.weights.load import open_model
from octavo.weights.locate import locate

PROMPT = [(3 * i) % 200 for i in range(21)]
"""Five blocks of 4 and one token."""
FIXED = OPTIONS | {"load_format": "auto"}
NEEDS_QGEMM = pytest.mark.skipif(not qgemm.is_available(), reason="no C library")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="int8 caches are for CPUs")


def ask(llm: LLM, prompt: list[int] = PROMPT) -> tuple[int, list[int]]:
    """(tokens found, tokens generated)"""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.num_cached_tokens, output.outputs[0].token_ids


# -- the disk tier


def test_what_was_cached_survives_a_restart(tiny_weights_path: Path, tmp_path: Path) -> None:
    options = FIXED | {"kv_disk_dir": str(tmp_path / "kv")}
    with LLM(str(tiny_weights_path), **options) as llm:
        before = ask(llm)
    with LLM(str(tiny_weights_path), **options) as llm:
        after = ask(llm)
        report = llm.memory_report()
        assert report.disk.cached >= 5 and report.cache.promotions_from_disk == 5
        assert "disk tier" in str(report)
    assert (before[0], after[0]) == (0, 20) and before[1] == after[1]


def test_damaged_files_are_misses(tiny_weights_path: Path, tmp_path: Path) -> None:
    options = FIXED | {"kv_disk_dir": str(tmp_path)}
    with LLM(str(tiny_weights_path), **options) as llm:
        expected = ask(llm)[1]
    for i, file in enumerate(sorted(tmp_path.rglob("*.kv"))):
        content = bytearray(file.read_bytes())
        content[-1 - i] ^= 1
        file.write_bytes(content if i % 2 else content[: len(content) // 2])
    with LLM(str(tiny_weights_path), **options) as llm:
        assert ask(llm) == (0, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 8},
        {"dtype": "bfloat16"},
        {"load_format": "dummy"},
        pytest.param({"quantization": "int8"}, marks=NEEDS_QGEMM),
        pytest.param({"kv_cache_dtype": "int8"}, marks=ON_CPU),
    ],
    ids=str,
)
def test_other_blocks_are_not_found(
    tiny_weights_path: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    """And are left alone: nobody takes them for damaged ones of its own."""
    options = FIXED | {"kv_disk_dir": str(tmp_path)}
    with LLM(str(tiny_weights_path), **options) as llm:
        ask(llm)
    with LLM(str(tiny_weights_path), **options | change) as llm:
        assert ask(llm)[0] == 0
    with LLM(str(tiny_weights_path), **options) as llm:
        assert ask(llm)[0] == 20


def test_other_weights_have_another_fingerprint(tiny_weights_path: Path, tmp_path: Path) -> None:
    def of(path: Path, seed: int = 0, **options: Any) -> str:
        files = locate(str(path), **options)
        config = EngineConfig(dtype="float32", seed=seed)
        return fingerprint(files, open_model(files).arch, config, KVShape(2, 2, 8, 4))

    copy = Path(shutil.copytree(tiny_weights_path, tmp_path / "copy"))
    assert of(copy) == of(tiny_weights_path), "its place says nothing"
    weights = copy / "model.safetensors"
    status = weights.stat()
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert of(copy) != of(tiny_weights_path)
    dummies = {of(copy, seed, load_format="dummy") for seed in (1, 2, 2)}
    assert len(dummies) == 2


def test_a_folder_that_cannot_be_written_is_refused(tiny_model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be written.*--kv-disk-dir"):
        LLM(str(tiny_model_path), **OPTIONS, kv_disk_dir=str(file / "kv"))
    check_disk_folder(EngineConfig(kv_disk_dir=str(tmp_path / "made" / "here")))
    assert (tmp_path / "made" / "here").is_dir()


def test_a_folder_belongs_to_one_engine(tiny_model_path: Path, tmp_path: Path) -> None:
    options = OPTIONS | {"kv_disk_dir": str(tmp_path)}
    with LLM(str(tiny_model_path), **options) as llm:
        with pytest.raises(ConfigError, match="in use by another engine"):
            LLM(str(tiny_model_path), **options)
        ask(llm)
    LLM(str(tiny_model_path), **options).close()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"kv_disk_bytes": 100}, ConfigError, "--kv-disk-bytes"),
        ({"swap_space": 0}, ConfigError, "swap_space is 0"),
        ({"swap_space": 1e-9}, CapacityError, "--swap-space has no room for one KV block"),
        ({"enable_prefix_caching": False}, ConfigError, "enable_prefix_caching"),
    ],
)
def test_disk_tiers_that_are_refused(
    tiny_model_path: Path, tmp_path: Path, options: dict[str, Any], error: Any, says: str
) -> None:
    with pytest.raises(error, match=says):
        LLM(str(tiny_model_path), **(OPTIONS | options), kv_disk_dir=str(tmp_path))


# -- models whose KV depends on more than the tokens before it


@pytest.fixture
def stretched_path(tiny_model_path: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(tiny_model_path, tmp_path / "stretched"))
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32}))
    return folder


def test_dynamic_rope_turns_the_prefix_cache_off(
    stretched_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    longest = open_model(locate(str(stretched_path), load_format="dummy")).arch
    assert longest.max_position_embeddings > 32
    with caplog.at_level(logging.WARNING, "octavo"):
        options = OPTIONS | {"max_model_len": 64}
        with LLM(str(stretched_path), **options) as llm:
            assert not llm.config.enable_prefix_caching
            assert ask(llm) == (0, ask(llm)[1])
            assert "Prefix cache: off" in str(llm.memory_report())
            with pytest.raises(InvalidRequestError, match="dynamic rope") as caught:
                llm.pin_prefix(PROMPT)
            assert "--no-enable" not in str(caught.value)
    (record,) = [r for r in caplog.records if "prefix caching" in r.message]
    assert "dynamic rope" in record.message and "32" in record.message
    with LLM(str(stretched_path), **OPTIONS | {"max_model_len": 32}) as llm:
        assert llm.config.enable_prefix_caching, "within the trained context nothing is stretched"


@pytest.mark.model
def test_a_real_prefix_survives_a_restart(default_model_path: Path, tmp_path: Path) -> None:
    text = "The three laws of motion are well known to everyone who has been to school. " * 4
    params = SamplingParams(temperature=0, max_tokens=12)
    outputs = []
    for _ in range(2):
        with LLM(str(default_model_path), max_model_len=256, kv_disk_dir=str(tmp_path)) as llm:
            outputs += llm.generate(text, params, use_tqdm=False)
    first, second = outputs
    assert (first.num_cached_tokens, second.num_cached_tokens % 16) == (0, 0)
    assert second.num_cached_tokens > len(second.prompt_token_ids) - 32
    assert first.outputs[0].text == second.outputs[0].text
