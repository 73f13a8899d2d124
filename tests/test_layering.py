"""The layers of the package: who may import whom, read from the import statements themselves.

Contracts, memory and decisions know no torch; device work knows neither memory nor decisions;
what people use knows only the engine's public interface.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "octavo"
MAX_LINES = 400

CONTRACTS = {
    "errors", "config", "request", "plan", "outputs", "events", "arch", "attended", "foreign",
    "hf_config", "kv_groups", "quantization", "util", "record", "stats",
}  # fmt: skip
DEVICE = [{"ops"}, {"attention", "layers", "sampling"}, {"models", "weights"}, {"runner"}]
ENGINE = {"text", "metrics", "distributed", "engine"}
PEOPLE = {"server", "cli", "bench", "dashboard"}
BELOW_ENGINE = CONTRACTS | {"kv", "sched"} | set().union(*DEVICE)
TOP = {"octavo", "__main__"}
"""The package's own front door, and `python -m octavo`."""


def _allowed() -> dict[str, set[str]]:
    """Room -> rooms that it may import from, besides itself."""
    rooms = {room: set(CONTRACTS) for room in CONTRACTS}
    rooms["kv"] = set(CONTRACTS)
    rooms["sched"] = CONTRACTS | {"kv"}
    rooms["lab"] = CONTRACTS | {"kv", "sched"}
    below = set(CONTRACTS)
    for level in DEVICE:
        below |= level
        rooms |= {room: set(below) for room in level}
    rooms |= {room: BELOW_ENGINE | ENGINE | {"octavo"} for room in ENGINE}
    rooms |= {room: CONTRACTS | PEOPLE | {"octavo", "engine"} for room in PEOPLE}
    rooms["cli"] |= {"lab"}
    rooms["octavo"] = CONTRACTS | {"engine"}
    rooms["__main__"] = {"cli"}
    return rooms


ALLOWED = _allowed()
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    name = parts[0].removesuffix(".py")
    return "octavo" if name == "__init__" else name


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, dotted module) of every absolute import, wherever in the file it stands."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            module = node.module or ""
            if module == "octavo":
                # `from octavo import x`: x is a room, or a name of the front door.
                rooms = set(ALLOWED) - TOP
                found += [
                    (node.lineno, f"octavo.{alias.name}" if alias.name in rooms else "octavo")
                    for alias in node.names
                ]
            else:
                found.append((node.lineno, module))
    return found


def imported_room(module: str) -> str | None:
    """The room that a dotted module lies in; None outside the package."""
    parts = module.split(".")
    if parts[0] != "octavo":
        return None
    return parts[1] if len(parts) > 1 else "octavo"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_layers_above(path: Path) -> None:
    room = room_of(path)
    assert room in ALLOWED, f"{path} is in a room that DESIGN's layers do not know"
    may = ALLOWED[room] | {room}
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line} imports {module}"
        for line, module in imports_of(path)
        if (target := imported_room(module)) is not None and target not in may
    ]
    assert not wrong, f"room {room} may import only {sorted(may)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_file_is_short_enough_to_read(path: Path) -> None:
    num_lines = len(path.read_text(encoding="utf-8").splitlines())
    assert num_lines <= MAX_LINES, f"{path} has {num_lines} lines; split it"


def _torch_free() -> list[Path]:
    rooms = CONTRACTS | {"kv", "sched", "lab", "octavo"}
    return [path for path in MODULES if room_of(path) in rooms]


@pytest.mark.parametrize("path", _torch_free(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_contracts_memory_and_decisions_name_no_torch(path: Path) -> None:
    heavy = {"torch", "triton", "transformers", "numba"}
    found = [(line, name) for line, name in imports_of(path) if name.split(".")[0] in heavy]
    assert not found, f"{path.relative_to(PACKAGE)} imports {found}"


@pytest.mark.parametrize("room", ["kv", "sched"])
def test_memory_and_decisions_have_no_clock(room: str) -> None:
    for path in (PACKAGE / room).rglob("*.py"):
        names = {name.split(".")[0] for _, name in imports_of(path)}
        assert not names & {"time", "datetime"}, f"{path} imports a clock; time is an argument"


def test_contracts_memory_and_decisions_load_no_torch() -> None:
    modules = [
        "octavo." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in _torch_free()
        if room_of(path) not in ("octavo", "lab")
    ]
    modules = [name.removesuffix(".__init__") for name in modules]
    script = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'triton', 'transformers', 'numba'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_layering_rules_can_fail(tmp_path: Path) -> None:
    """The parser sees imports in functions, behind TYPE_CHECKING, and of the package itself."""
    file = tmp_path / "x.py"
    file.write_text(
        "import octavo.kv\nfrom octavo import sched, LLM\n"
        "def f():\n    from octavo.runner.runner import R\n"
    )
    rooms = [imported_room(module) for _, module in imports_of(file)]
    assert sorted(filter(None, rooms)) == ["kv", "octavo", "runner", "sched"]
