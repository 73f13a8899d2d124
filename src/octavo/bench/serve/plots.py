"""Pictures of results: how times are distributed, one line a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from octavo.bench.serve.result import ServeResult
from octavo.errors import ConfigError

_PANELS = (
    ("ttfts_s", "time to first token, ms"),
    ("tpots_s", "time per output token, ms"),
)


def plot(results: Sequence[ServeResult], path: Path) -> None:
    """Cumulative distributions, to a file whose ending says what kind (.svg, .png). Raises
    `ConfigError` without matplotlib, or for an ending that it does not know."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'octavo[lab]'") from None
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        for result in results:
            values = sorted(1e3 * t for t in getattr(result, name))
            shares = [100 * (i + 1) / len(values) for i in range(len(values))]
            axes.step(values, shares, where="post", label=result.label or result.base_url)
        axes.set_xlabel(title)
        axes.set_ylabel("% of requests")
        axes.set_ylim(0, 100)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise ConfigError(f"--plot {path}: {getattr(error, 'strerror', None) or error}") from None
