"""Builds the C kernels into wheels. Everything else about the package is in pyproject.toml.

The kernels are optional at install time: without a compiler the wheel has none, and octavo
compiles them at first use or takes its torch fallbacks. An editable install compiles at first
use, so that a changed source is noticed.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

CPU_ROOM = Path("src/octavo/ops/cpu")
LIBRARY = "_octavo_cpu.dylib" if sys.platform == "darwin" else "_octavo_cpu.so"


def load_native() -> ModuleType:
    """The module that compiles the kernels, by its path: octavo itself needs torch."""
    path = Path(__file__).parent / CPU_ROOM / "native.py"
    spec = importlib.util.spec_from_file_location("octavo_native", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_py):
    """Copies the package, then tries to compile the kernels beside it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        room = Path(self.build_lib) / CPU_ROOM.relative_to("src")
        try:
            load_native().compile_library(room.resolve() / LIBRARY)
        except Exception as error:
            print(f"octavo: no C kernels in this build, they compile at first use: {error}")


class PlatformWheel(bdist_wheel):
    """A wheel with kernels is for one platform, but (ctypes) for any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if platform != "any" else (python, abi, platform)


class KernelDistribution(Distribution):
    """Tells setuptools that the wheel depends on the platform where it can be compiled."""

    def has_ext_modules(self) -> bool:
        return load_native().find_compiler() is not None


setup(
    cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel},
    distclass=KernelDistribution,
)
