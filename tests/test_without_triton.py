"""A CPU install of torch brings no Triton: what runs on CPUs must not import it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parent.parent / "src"
GPU_ONLY = (
    "octavo.ops.gpu", "octavo.runner.gpu", "octavo.runner.gpu_copies", "octavo.sampling.device",
    "octavo.sampling.device_rows", "octavo.attention.latent", "octavo.attention.libraries",
    "octavo.attention.triton", "octavo.layers.gpu", "octavo.layers.quantized_gpu",
)  # fmt: skip
"""Modules, with all below them, that are imported where there is a GPU."""


def _name_of(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_name_of(path): path for path in SRC.rglob("*.py")}


def _imports(body: list[ast.stmt]) -> Iterator[str]:
    """What a module imports when it is imported itself: not in functions, nor for types alone."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.orelse)
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from _imports(node.body)


def test_only_what_a_gpu_needs_imports_triton() -> None:
    direct = {
        name: set(_imports(ast.parse(path.read_text(encoding="utf-8")).body))
        for name, path in MODULES.items()
    }
    reaching = {
        name
        for name, found in direct.items()
        if any(module.split(".")[0] in ("triton", "flashinfer") for module in found)
    }
    assert reaching, "the search finds nothing"
    while more := {n for n, found in direct.items() if found & reaching} - reaching:
        reaching |= more
    gpu_only = tuple(f"{name}." for name in GPU_ONLY)
    others = sorted(n for n in reaching if not f"{n}.".startswith(gpu_only))
    assert others == [], "imported on CPUs too, and through them Triton is"
