"""Fig. 12: one sample a request; three models, two data sets, five systems."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.config import KVPolicy
from octavo.lab.paper import reference
from octavo.lab.paper.figure import FigureResult, Row, Task
from octavo.lab.paper.grids import FIG12_GRIDS
from octavo.lab.paper.protocol import THRESHOLD_S, Crossing
from octavo.lab.paper.rates import (
    how,
    rate_plot,
    rate_rows,
    ratio_row,
    search_task,
)
from octavo.lab.paper.reference import Expected
from octavo.lab.paper.systems import MODELS, SYSTEMS, TITLES
from octavo.lab.paper.workloads import DATASETS, Plain, Workloads

_MAIN = ("13b", "sharegpt")
"""What the paper's ratios are of."""


class BasicSampling:
    """Fig. 12: one sample a request; three models, two data sets, five systems."""

    name = "12"

    def tasks(self, workloads: Workloads) -> list[Task]:
        """See `Figure.tasks`."""
        return [
            search_task(
                f"12/{model}/{dataset}/{policy}",
                Plain(workloads.of(dataset)),
                policy,
                FIG12_GRIDS[model, dataset][policy],
                reference.FIG12[model, dataset][policy],
                model=model,
                dataset=dataset,
                first=reference.FIG12_FIRST.get((model, dataset, policy), ()),
                search=(model, dataset) == _MAIN,
            )
            for model in MODELS
            for dataset in DATASETS
            for policy in SYSTEMS
        ]

    def collect(self, results: Mapping[str, Any]) -> FigureResult:
        """See `Figure.collect`."""
        rows: list[Row] = []
        plots = []
        for dataset, title in DATASETS.items():
            for model in MODELS:
                paper = reference.FIG12[model, dataset]
                found: dict[KVPolicy, Crossing] = {
                    policy: results[f"12/{model}/{dataset}/{policy}"] for policy in SYSTEMS
                }
                here = {policy: crossing.rate for policy, crossing in found.items()}
                series = f"OPT-{model.upper()}, {title}"
                rows += rate_rows(self.name, series, paper, here)
                rows += self._ratios(series, (model, dataset), found)
                for policy in SYSTEMS:
                    rows += self._points(series, (model, dataset, policy), found[policy])
                points = {
                    policy: reference.FIG12_POINTS[model, dataset, policy]
                    for policy in SYSTEMS
                    if (model, dataset, policy) in reference.FIG12_POINTS
                }
                plots.append(rate_plot(series, found, paper, points))
        return FigureResult(
            name=self.name,
            title="Fig. 12: one sample a request",
            rows=rows,
            plots=plots,
            protocol=f"{how()}. Pools of 15,728 / 9,696 / 60,096 slots; FasterTransformer with "
            "batches of at most 5 / 2 / 24 (ShareGPT) and 14 / 8 / 80 (Alpaca).",
            why=_WHY_12,
        )

    def _ratios(
        self, series: str, which: tuple[str, str], found: Mapping[KVPolicy, Crossing]
    ) -> Iterable[Row]:
        paper = reference.FIG12[which]
        others: tuple[KVPolicy, ...] = ("orca-oracle", "orca-pow2", "orca-max", "contiguous")
        rates = {policy: crossing.rate for policy, crossing in found.items()}
        searched = {policy: crossing.searched for policy, crossing in found.items()}
        for other in others:
            expected = Expected(paper["paged"] / paper[other])
            if which == _MAIN:
                expected = reference.FIG12_RATIOS.get(other, expected)
            yield ratio_row(self.name, series, expected, rates, other)
            if which == _MAIN:
                finely = Expected(expected.paper)
                quantity = "ratio of rates, searched"
                yield ratio_row(self.name, series, finely, searched, other, quantity)

    def _points(self, series: str, which: tuple[str, str, str], found: Crossing) -> Iterable[Row]:
        paper = dict(reference.FIG12_POINTS.get(which, ()))
        here = {point.rate: point.latency_s for point in found.points}
        for rate in reference.FIG12_FIRST.get(which, ()):
            yield Expected(paper[rate]).row(
                self.name, f"{series}, {TITLES[which[2]]}", f"s/token at {rate:g} req/s", here[rate]
            )


_WHY_12 = (
    "What a step takes is a model of the paper's GPUs and software whose constants come from its "
    "Figs. 1, 13, 18a and 19a and, for several GPUs, from the rate of vLLM with OPT-66B: that one "
    f"rate is no prediction, the others are. Threshold {THRESHOLD_S:g} s/token is where the curves "
    "are steep, so a few per cent of a step's time are a few per cent of the rate. The paper's "
    "rates lie up to 50 % apart (Orca (Max) has 0.5 and 0.75), and a straight line between a low "
    "and a very high latency crosses the threshold far to the left of where the curve does: "
    "'searched' is where that is. At high rates traces are shorter than the paper's hour: queues "
    "have less time to grow, which moves rates up by a few per cent. FasterTransformer has few "
    "requests in an hour (its rates are 0.1-2.5 req/s), so its crossing depends on where the long "
    "answers fall, and with several GPUs it pays for all-reduces and launches what the paper's own "
    "engine does, which may be too much. OPT-175B comes out 15-50 % too fast with the "
    "Orcas and vLLM: nothing of eight GPUs went into the constants. The ratios of the paper's text "
    "come from other points of the curves than 0.5 s/token."
)
