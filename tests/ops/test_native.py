"""Finding, compiling and loading the C kernels."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.ops.cpu import native

SOURCE = Path(native.__file__).parents[3]
needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="no C compiler")
SMALL = """
#ifndef OCTAVO_SOURCE_HASH
#define OCTAVO_SOURCE_HASH "unknown"
#endif
__attribute__((visibility("default"))) const char *octavo_source_hash(void) {
    return OCTAVO_SOURCE_HASH;
}
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


@pytest.fixture
def small_source(tmp_path: Path) -> Path:
    source = tmp_path / "src" / "small.c"
    source.parent.mkdir()
    source.write_text(SMALL)
    return source


@needs_compiler
def test_compiled_library_carries_the_hash_of_its_sources(
    small_source: Path, tmp_path: Path
) -> None:
    output = native.compile_library(tmp_path / "small.so", [small_source])
    library = ctypes.CDLL(str(output))
    library.octavo_source_hash.restype = ctypes.c_char_p
    assert library.octavo_source_hash().decode() == native.source_hash([small_source])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["small.so", "src"]


def test_hash_covers_headers_and_names(small_source: Path) -> None:
    first = native.source_hash([small_source])
    header = small_source.with_name("small.h")
    header.write_text("#define A 1\n")
    second = native.source_hash([small_source])
    renamed = small_source.rename(small_source.with_name("other.c"))
    assert len({first, second, native.source_hash([renamed])}) == 3


@needs_compiler
def test_compile_error_has_the_compilers_words(small_source: Path, tmp_path: Path) -> None:
    small_source.write_text("int broken(void) { return missing_name; }\n")
    with pytest.raises(native.CompileError, match="missing_name"):
        native.compile_library(tmp_path / "small.so", [small_source])
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_no_compiler_is_an_error_that_says_so(
    small_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(native.CompileError, match="no C compiler"):
        native.compile_library(tmp_path / "small.so", [small_source])


@needs_compiler
def test_a_library_of_other_sources_is_not_used(small_source: Path, tmp_path: Path) -> None:
    output = native.compile_library(tmp_path / "stale.so", [small_source])
    assert native._open(output) is None


def test_file_loads_without_anything_installed() -> None:
    """A build step loads it by path, before torch is there."""
    code = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("native", {native.__file__!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert module.source_files() and "torch" not in sys.modules
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


@needs_compiler
def test_isa_names_in_the_environment() -> None:
    code = "from octavo.ops.cpu import native; print(native.isa())"
    assert run_python(code, OCTAVO_CPU_ISA="none").stdout.strip() == "none"
    wrong = run_python(code, OCTAVO_CPU_ISA="sse9")
    assert wrong.returncode and "sse9" in wrong.stderr and "avx512_bf16" in wrong.stderr


@pytest.mark.skipif(native.load() is None, reason="no library")
def test_isa_never_rises_above_the_machines() -> None:
    best = native.set_isa(None)
    levels = native.ISA_LEVELS
    for wanted in levels:
        assert native.set_isa(wanted) == min(wanted, best, key=levels.index)
    with pytest.raises(ValueError, match="sse9"):
        native.set_isa("sse9")
    native.set_isa(None)


def test_kernels_work_without_the_library(tmp_path: Path) -> None:
    """No compiler and an empty cache: one warning, and torch does the work."""
    code = """
import logging, torch
logging.basicConfig()
from octavo.ops.cpu import attention, elementwise, native
assert native.load() is None and native.load() is None and native.isa() == "none"
x = torch.ones(1, 1, 4)
out = torch.empty_like(x)
ints = lambda *v: torch.tensor(v, dtype=torch.int32)
cache = torch.ones(1, 1, 2, 1, 1, 4)
attention.paged_attention(out, x, cache, 0, ints(0)[None], ints(1), ints(0, 1), 1.0)
assert torch.equal(out, x)
assert torch.allclose(elementwise.rms_norm(x[0], x[0, 0], 0.0), x[0])
"""
    # a copy, so that no library built at install time lies beside the file
    no_library = shutil.ignore_patterns("_octavo_cpu*")
    shutil.copytree(SOURCE / "octavo", tmp_path / "octavo", ignore=no_library)
    result = run_python(
        code, PATH=str(tmp_path), CC="", XDG_CACHE_HOME=str(tmp_path), PYTHONPATH=str(tmp_path)
    )
    assert result.returncode == 0, result.stderr
    assert len(re.findall("fall back to torch", result.stderr)) == 1


@pytest.mark.skipif(native.load() is None, reason="no library")
def test_isa_obeys_the_environment() -> None:
    code = "from octavo.ops.cpu import native; print(native.isa())"
    result = run_python(code, OCTAVO_CPU_ISA="plain")
    assert result.stdout.strip() == "plain", result.stdout + result.stderr
