"""Writes docs/metrics.md and docs/serve-flags.md from the tables that the server runs by.

python docs/make_reference.py            # writes them
python docs/make_reference.py --check    # exit status 1 if one is out of date
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "src"))

from octavo.cli.flags import field_docs  # noqa: E402
from octavo.config import EngineConfig  # noqa: E402
from octavo.server.config import ServeConfig  # noqa: E402
from octavo.server.metrics_table import ENGINE_METRICS, Metric  # noqa: E402
from octavo.server.request_metrics import REQUEST_METRICS  # noqa: E402
from octavo.util import flag_name  # noqa: E402

_HEAD = "<!-- written by docs/make_reference.py -->\n"


def metrics_page() -> str:
    """Every metric with its formula."""
    lines = [
        _HEAD,
        "# Metrics\n",
        "`GET /metrics`, for Prometheus. Names that begin with `vllm:` are vLLM's and mean the",
        "same there; what only octavo knows begins with `octavo:`. Every metric has the label",
        "`model_name`. [grafana/octavo.json](grafana/octavo.json) is a Grafana dashboard of them:",
        "import it and choose the data source.\n",
        "## From the engine\n",
        "Read when somebody scrapes; at most a quarter of a second old. Totals begin again when",
        "the engine's process is started again.\n",
        *_table(ENGINE_METRICS),
        "",
        "## From the server\n",
        *_table(REQUEST_METRICS),
    ]
    return "\n".join(lines) + "\n"


def _table(metrics: tuple[Metric, ...]) -> list[str]:
    rows = ["| metric | kind | what it is | how it is computed |", "|---|---|---|---|"]
    for metric in metrics:
        labels = "".join(f", by `{label}`" for label in metric.labels)
        name, kind = f"`{metric.scraped_name}`", metric.kind + labels
        rows.append(f"| {name} | {kind} | {metric.help} | {metric.formula} |")
    return rows


def flags_page() -> str:
    """Every flag of `octavo serve`."""
    lines = [
        _HEAD,
        "# Flags of `octavo serve`\n",
        "`octavo serve [MODEL] [FLAG ...]`; `octavo serve --help` says the same.\n",
        "## The server\n",
        *_flags(ServeConfig, ()),
        "",
        "## The engine\n",
        "The model, and the memory and steps it is served with: the same for every command.\n",
        *_flags(EngineConfig, ("model",)),
    ]
    return "\n".join(lines) + "\n"


def _flags(kind: type[Any], left_out: tuple[str, ...]) -> list[str]:
    docs = field_docs(kind)
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        if field.name not in left_out:
            default = "" if field.default in (None, (), False, "") else f"`{field.default}`"
            default = "on" if field.default is True else default
            text = docs[field.name].replace("|", "\\|")
            rows.append(f"| `{flag_name(field.name)}` | {default} | {text} |")
    return rows


PAGES = {"metrics.md": metrics_page, "serve-flags.md": flags_page}


def main() -> int:
    """Write the pages, or compare them."""
    status = 0
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if "--check" not in sys.argv[1:]:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date: python docs/make_reference.py", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
