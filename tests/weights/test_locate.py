"""Finding local models and octavo's own cache; nothing here touches the network."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from octavo.config import DEFAULT_MODEL
from octavo.errors import ModelNotFoundError, UnsupportedModelError
from octavo.weights import hub, manage, wheel
from octavo.weights.locate import cache_home, locate, locate_tokenizer, model_cache


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, an empty hub cache, and a hub and pip that must not be asked."""
    from huggingface_hub import constants

    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def refuse(*_: Any) -> Any:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(hub, "_ask", refuse)
    monkeypatch.setattr(wheel, "_download", refuse)


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()
    return folder


def test_folder_with_safetensors(tmp_path: Path) -> None:
    folder = touch(tmp_path / "m", "config.json", "model.safetensors", "x.gguf")
    files = locate(str(folder))
    assert (files.kind, files.path, files.tokenizer) == ("hf", folder, folder)
    assert files.config == folder / "config.json" and files.name == str(folder)
    assert locate(str(folder), load_format="gguf").path == folder / "x.gguf"
    assert locate(str(folder), load_format="dummy").kind == "dummy"


def test_gguf_file_and_folder(tmp_path: Path) -> None:
    folder = touch(tmp_path / "m", "x.Q4_0.gguf", "mmproj-x.gguf")
    for name in (folder, folder / "x.Q4_0.gguf"):
        files = locate(str(name))
        path = folder / "x.Q4_0.gguf"
        assert (files.kind, files.path, files.config, files.tokenizer) == ("gguf", path, path, path)
    assert locate(str(folder), load_format="dummy").kind == "dummy"
    with pytest.raises(ModelNotFoundError, match="GGUF file, not safetensors"):
        locate(str(folder / "x.Q4_0.gguf"), load_format="safetensors")


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    touch(tmp_path, "x.gguf")
    assert locate("~/x.gguf").path == tmp_path / "x.gguf"


@pytest.mark.parametrize(
    ("names", "load_format", "said"),
    [
        ([], "auto", "no safetensors or GGUF file"),
        (["config.json"], "safetensors", "no safetensors file"),
        (["model.safetensors"], "auto", r"no config\.json"),
        (["config.json", "pytorch_model.bin"], "auto", r"pickled weights \(pytorch_model\.bin\)"),
        (["a.gguf", "b.gguf"], "auto", r"2 GGUF files; name one: a\.gguf, b\.gguf"),
        (["model.safetensors"], "dummy", r"no config\.json or GGUF"),
    ],
)
def test_folders_that_hold_no_model(
    tmp_path: Path, names: list[str], load_format: Any, said: str
) -> None:
    with pytest.raises(ModelNotFoundError, match=said):
        locate(str(touch(tmp_path / "m", *names)), load_format=load_format)


def test_folder_with_an_adapter_alone(tmp_path: Path) -> None:
    folder = touch(tmp_path / "m", "adapter_config.json", "adapter_model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"holds an adapter .*merge_and_unload"):
        locate(str(folder))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("model.bin", "pickled.*never loads; convert"),
        ("x.pt", "pickled.*never loads; convert"),
        ("model.safetensors", r"not a \.gguf file; give one, or the model's folder /"),
        ("config.json", r"not a \.gguf file; give one, or the model's folder /"),
        ("notes.txt", r"not a \.gguf file; give one, or the model's folder$"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, says: str) -> None:
    touch(tmp_path, name)
    with pytest.raises(UnsupportedModelError, match=says):
        locate(str(tmp_path / name))


@pytest.mark.parametrize(
    "name",
    ["/none/here", "./none", "../none", "~/none-here", "a/b/c", "none.gguf", "a b", "", "a\\b"],
)
def test_what_cannot_be_a_hub_name_is_not_asked_for(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        locate(name)


def test_own_cache_comes_first(tmp_path: Path) -> None:
    folder = touch(model_cache("org/name"), "config.json", "model.safetensors")
    assert folder == tmp_path / "home" / "models" / "org--name"
    assert locate("org/name").path == folder
    assert locate_tokenizer("org/name") == folder
    with pytest.raises(AssertionError, match="network"):
        locate("org/name", revision="v1.0")


def test_default_model_in_own_cache_counts_only_when_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = model_cache(DEFAULT_MODEL) / wheel.WHEEL_MODELS[0].file_name
    touch(file.parent, file.name)
    with pytest.raises(AssertionError, match="network"):
        locate(DEFAULT_MODEL)
    empty = dataclasses.replace(wheel.WHEEL_MODELS[0], parts=())
    monkeypatch.setattr(wheel, "WHEEL_MODELS", (empty,))
    assert locate(DEFAULT_MODEL).path == file
    assert locate(DEFAULT_MODEL, load_format="dummy").kind == "dummy"
    with pytest.raises(AssertionError, match="network"):
        locate(DEFAULT_MODEL, load_format="safetensors")


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_home() == tmp_path / "home"
    monkeypatch.delenv("OCTAVO_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_home() == tmp_path / "xdg" / "octavo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_home() == tmp_path / ".cache" / "octavo"


def test_tokenizer_of_its_own(tmp_path: Path) -> None:
    folder = touch(tmp_path / "t", "tokenizer.json")
    assert locate_tokenizer(str(folder)) == folder
    assert locate_tokenizer(str(folder / "tokenizer.json")) == folder
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer at '\./none'"):
        locate_tokenizer("./none")


def hub_snapshot(tmp_path: Path, *names: str) -> Path:
    base = tmp_path / "hub" / "models--org--name"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text("c0ffee")
    return touch(base / "snapshots" / "c0ffee", *names)


def test_complete_snapshot_in_the_hub_cache_needs_no_network(tmp_path: Path) -> None:
    folder = hub_snapshot(tmp_path, "config.json", "model.safetensors", "tokenizer.json")
    for revision in (None, "main", "c0ffee"):
        assert locate("org/name", revision).path == folder
    assert locate_tokenizer("org/name") == folder
    with pytest.raises(AssertionError, match="network"):
        locate("org/name", "other-branch")


@pytest.mark.parametrize(
    "names",
    [
        ("config.json", "tokenizer.json"),
        ("model.safetensors", "tokenizer.json"),
        ("config.json", "model.safetensors"),
    ],
)
def test_incomplete_snapshot_is_completed(tmp_path: Path, names: tuple[str, ...]) -> None:
    hub_snapshot(tmp_path, *names)
    with pytest.raises(AssertionError, match="network"):
        locate("org/name")


def test_list_and_remove(tmp_path: Path) -> None:
    (touch(model_cache("org/own"), "x.gguf") / "x.gguf").write_bytes(b"x" * 10)
    touch(model_cache("org/empty"))
    hub_snapshot(tmp_path, "config.json", "model.safetensors")
    stored = manage.list_models()
    assert [(m.name, m.where, m.num_bytes, m.formats) for m in stored] == [
        ("org/name", "hub", 6, ("safetensors",)),
        ("org/own", "octavo", 10, ("gguf",)),
    ]
    assert [m.name for m in manage.remove("org/own")] == ["org/own"]
    assert [m.name for m in manage.list_models()] == ["org/name"]
    with pytest.raises(ModelNotFoundError, match="no stored model 'org/own'; stored: org/name"):
        manage.remove("org/own")


FILES = ["README.md", "config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin",
         "onnx/model.safetensors", "original/consolidated.00.pth"]  # fmt: skip
QUANTS = ["README.md", "M-Q4_0.gguf", "M-Q4_K_M.gguf", "M-IQ4_K_M.gguf", "mmproj-M.gguf"]


def select(files: list[str], load_format: str = "auto", name: str = "org/m") -> list[str]:
    parsed = hub.HubName.parse(name)
    assert parsed is not None
    return hub.select_files(parsed, files, load_format)


def test_only_needed_files_are_selected() -> None:
    assert select(FILES) == ["config.json", "tokenizer.json", "model.safetensors"]
    assert select(FILES, "dummy") == ["config.json", "tokenizer.json"]
    shards = ["config.json", "model-2.safetensors", "model-1.safetensors", hub.INDEX]
    assert select([*shards, "consolidated.safetensors"]) == [
        "config.json", hub.INDEX, "model-1.safetensors", "model-2.safetensors"
    ]  # fmt: skip
    assert select(["a.gguf", "README.md"]) == ["a.gguf"]
    assert select([*FILES, "a.gguf"], "gguf") == ["a.gguf"]


def test_one_of_many_gguf_files_is_named_after_a_colon() -> None:
    assert select(QUANTS, name="org/m:Q4_K_M") == ["M-Q4_K_M.gguf"]
    assert select(QUANTS, name="org/m:q4_0") == ["M-Q4_0.gguf"]
    assert select(QUANTS, name="org/m:M-IQ4_K_M.gguf") == ["M-IQ4_K_M.gguf"]
    with pytest.raises(ModelNotFoundError, match="3 GGUF files; choose one as org/m:FILE: M-IQ4"):
        select(QUANTS)
    with pytest.raises(ModelNotFoundError, match=r"0 GGUF files called 'Q8_0'.*M-Q4_0"):
        select(QUANTS, name="org/m:Q8_0")


def test_large_gguf_files_lie_in_folders_of_the_repository() -> None:
    parts = [f"BF16/M-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]
    files = [*QUANTS, *parts, "BF16/mmproj-BF16.gguf"]
    assert select(files, name="org/m:bf16") == parts
    assert select(files, name=f"org/m:{parts[0]}") == parts
    assert select(["M-Q4_0.gguf", *parts]) == ["M-Q4_0.gguf"]
    twice = [*QUANTS, "old/M-Q4_0.gguf"]
    assert select(twice, name="org/m:Q4_0") == ["M-Q4_0.gguf"]
    assert select(twice, name="org/m:old/M-Q4_0.gguf") == ["old/M-Q4_0.gguf"]
    with pytest.raises(ModelNotFoundError, match="1 GGUF files; choose one as org/m:FILE: BF16/M"):
        select(parts)
    with pytest.raises(ModelNotFoundError, match=r"lacks 1 of the 2 parts of .*: BF16/M-BF16-0000"):
        select(parts[:1], name="org/m:bf16")


def test_repositories_without_usable_weights() -> None:
    with pytest.raises(ModelNotFoundError, match=r"pickled weights \(pytorch_model\.bin\)") as told:
        select(["config.json", "pytorch_model.bin"])
    assert "--revision refs/pr/NUMBER" in str(told.value)
    assert "from_pretrained('org/m', dtype='auto').save_pretrained" in str(told.value)
    with pytest.raises(ModelNotFoundError, match="no safetensors file"):
        select(QUANTS, "safetensors")
    with pytest.raises(ModelNotFoundError, match="no gguf file"):
        select(FILES, "gguf")
