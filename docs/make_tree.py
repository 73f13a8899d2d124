"""Writes the file tree of docs/architecture.md from the first sentence of every file.

python docs/make_tree.py            # writes it
python docs/make_tree.py --check    # exit status 1 if it is out of date
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "octavo"
PAGE = ROOT / "docs" / "architecture.md"
CONTRACTS = (
    "errors", "config", "arch", "kv_groups", "quantization", "request", "plan", "outputs",
    "events", "stats", "foreign", "util",
)  # fmt: skip
ROOMS = (
    "hf_config", "kv", "sched", "ops", "attention", "layers", "sampling", "models", "weights",
    "runner", "text", "engine", "server", "dashboard", "cli", "bench",
)  # fmt: skip
BEGIN, END = "<!-- tree: docs/make_tree.py -->", "<!-- end of tree -->"
WIDTH = 29


def first_sentence(path: Path) -> str:
    """What a file says of itself, shortened to a line."""
    text = path.read_text("utf-8")
    if path.suffix == ".py":
        text = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    else:
        comment = re.match(r"/\*(.*?)(?:\*/|\n \*\s*\n)", text, re.DOTALL)
        text = re.sub(r"\n \* ?", " ", comment[1]) if comment else ""
    sentence = re.split(r"(?<=[a-z)])\. |; ", " ".join(text.split()))[0]
    return sentence.rstrip(".")


def lines_of(folder: Path, depth: int) -> list[str]:
    """A folder's files, and those of the folders in it."""
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith((".", "__")):
            found += [f"{'  ' * depth}{path.name}/", *lines_of(path, depth + 1)]
        elif path.suffix in (".py", ".c", ".h") and path.name != "__init__.py":
            found.append(f"{'  ' * depth}{path.name:<{WIDTH - 2 * depth}} {first_sentence(path)}")
    return found


def tree() -> str:
    """The whole tree as a code block, in the order of the layers."""
    lines = []
    for name in ("__init__", "__main__", *CONTRACTS):
        path = PACKAGE / f"{name}.py"
        lines.append(f"{path.name:<{WIDTH}} {first_sentence(path)}")
    for room in ROOMS:
        lines += [f"{room}/", *lines_of(PACKAGE / room, 1)]
    return "\n".join(["```text", *lines, "```"])


def main() -> int:
    """Write the page, or compare."""
    page = PAGE.read_text("utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    fresh = f"{before}{BEGIN}\n{tree()}\n{END}{after}"
    if "--check" in sys.argv:
        return int(fresh != page)
    PAGE.write_text(fresh, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
