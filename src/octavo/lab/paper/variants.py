"""Rates with several sequences a request (Fig. 14), a shared prefix (16), and in chat (17)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.config import KVPolicy
from octavo.lab.paper import reference
from octavo.lab.paper.figure import FigureResult, Row, Task
from octavo.lab.paper.grids import FIG14_GRIDS, FIG16_GRIDS, FIG17_GRIDS
from octavo.lab.paper.protocol import Length
from octavo.lab.paper.rates import (
    SHORT,
    how,
    rate_plot,
    rate_rows,
    ratio_row,
    search_task,
)
from octavo.lab.paper.systems import ITERATION_LEVEL, ORCAS, paper_costs
from octavo.lab.paper.workloads import Chat, Plain, Translation, Workloads

_BEAMS = Length(max_s=300.0, min_s=90.0, num_requests=400)


class ManySequences:
    """Fig. 14: parallel samples and beams."""

    name = "14"
    systems = ITERATION_LEVEL

    def tasks(self, workloads: Workloads) -> list[Task]:
        """See `Figure.tasks`."""
        return [
            search_task(
                f"14/{kind}/{width}/{policy}",
                Plain(
                    workloads.alpaca,
                    n=width if kind == "parallel" else 1,
                    beam_width=width if kind == "beam" else 0,
                ),
                policy,
                FIG14_GRIDS[kind, width][policy],
                rates[policy],
                length=_BEAMS if kind == "beam" else SHORT,
                weight=width * (4 if kind == "beam" else 1),
            )
            for (kind, width), rates in reference.FIG14.items()
            for policy in self.systems
        ]

    def collect(self, results: Mapping[str, Any]) -> FigureResult:
        """See `Figure.collect`."""
        rows: list[Row] = []
        plots = []
        for (kind, width), paper in reference.FIG14.items():
            found = {p: results[f"14/{kind}/{width}/{p}"] for p in self.systems}
            here = {policy: crossing.rate for policy, crossing in found.items()}
            series = f"{kind} {width}"
            rows += rate_rows(self.name, series, paper, here)
            expected = reference.share(paper["paged"] / paper["orca-oracle"], 0.25)
            rows.append(ratio_row(self.name, series, expected, here, "orca-oracle"))
            plots.append(rate_plot(f"OPT-13B, Alpaca, {series}", found, paper))
        return FigureResult(
            name=self.name,
            title="Fig. 14: parallel samples and beams",
            rows=rows,
            plots=plots,
            protocol=f"OPT-13B, Alpaca. {how(SHORT)}; of beams {_BEAMS.num_requests:,} and "
            f"{_BEAMS.min_s:.0f} s.",
            why="A fork copies the prompt's KV in the systems before paging, and a beam that "
            "loses is replaced by a copy; here these copies cost what bandwidth allows, there "
            "they are made one after another, with beams at every step: with beams the Orcas come "
            "out 30-100 % too fast, and what paging gains over them too small (width 6: 1.6x "
            "instead of 2.2x). Paged comes out too slow with many samples: the cost model has a "
            "fixed time for each sequence of a step, also for those of one request. What beams "
            "share is drawn, see Fig. 15.",
        )


class SharedPrefix:
    """Fig. 16: translation with one and with five examples before every sentence."""

    name = "16"
    systems: tuple[KVPolicy, ...] = ("orca-oracle", "paged")

    def tasks(self, workloads: Workloads) -> list[Task]:
        """See `Figure.tasks`."""
        return [
            search_task(
                f"16/{tokens}/{policy}",
                Translation(tokens),
                policy,
                FIG16_GRIDS[tokens][policy],
                guess,
                length=SHORT,
                costs=paper_costs(policy, "13b", shape="llama-13b"),
                enable_prefix_caching=policy == "paged",
            )
            for tokens, rates in reference.FIG16.items()
            for policy, guess in zip(self.systems, rates, strict=True)
        ]

    def collect(self, results: Mapping[str, Any]) -> FigureResult:
        """See `Figure.collect`."""
        rows: list[Row] = []
        plots = []
        for tokens, rates in reference.FIG16.items():
            found = {p: results[f"16/{tokens}/{p}"] for p in self.systems}
            here = {policy: crossing.rate for policy, crossing in found.items()}
            series = f"prefix of {tokens}"
            paper = dict(zip(self.systems, rates, strict=True))
            rows += rate_rows(self.name, series, paper, here)
            expected = reference.share(reference.FIG16_TEXT[tokens], 0.25)
            rows.append(ratio_row(self.name, series, expected, here, "orca-oracle"))
            plots.append(
                rate_plot(f"LLaMA-13B, WMT16 en-de, prefix of {tokens} tokens", found, paper)
            )
        return FigureResult(
            name=self.name,
            title="Fig. 16: a shared prefix",
            rows=rows,
            plots=plots,
            protocol=f"LLaMA-13B, prefixes of 80 and 341 tokens. {how(SHORT)}. The prefix is "
            "found in the prefix cache, where the first request put it; the paper registers it in "
            "advance.",
            why="ASSUMED: lengths of the WMT16 sentences are not published with the paper. They "
            "are drawn from a log-normal distribution of mean 33 tokens in and 40 out; rates move "
            "about inversely with the output length, their ratio much less. A long prefix comes "
            "out too slow: the cost model reads it from memory once for each sequence, and a GPU "
            "that has just read it for another one has it in its cache.",
        )


class Chatbot:
    """Fig. 17: rounds of conversations."""

    name = "17"
    systems = ITERATION_LEVEL

    def tasks(self, workloads: Workloads) -> list[Task]:
        """See `Figure.tasks`."""
        return [
            search_task(
                f"17/{policy}",
                Chat(workloads.sharegpt),
                policy,
                FIG17_GRIDS[policy],
                reference.FIG17[policy],
                dataset="sharegpt",
                weight=4,
            )
            for policy in self.systems
        ]

    def collect(self, results: Mapping[str, Any]) -> FigureResult:
        """See `Figure.collect`."""
        found = {p: results[f"17/{p}"] for p in self.systems}
        here = {policy: crossing.rate for policy, crossing in found.items()}
        rows = list(rate_rows(self.name, "chat", reference.FIG17, here))
        for other in ORCAS:
            expected = reference.share(reference.FIG17["paged"] / reference.FIG17[other], 0.34)
            rows.append(ratio_row(self.name, "", expected, here, other))
        return FigureResult(
            name=self.name,
            title="Fig. 17: chat",
            rows=rows,
            plots=[rate_plot("OPT-13B, ShareGPT conversations", found, reference.FIG17)],
            protocol=f"OPT-13B; the prompt is the last 1,024 tokens of a conversation, the answer "
            f"at most 1,016; nothing is kept between rounds. {how()}.",
            why="ASSUMED: the list has first rounds only. Later rounds are taken to be like them, "
            "and conversations to have a geometric number of rounds, 6 on average, which cuts as "
            "many prompts at 1,024 tokens as multi-round lists of ShareGPT have beyond (64 %). "
            "The paper's text has 2x over all three Orcas, its figure 1.5x at 0.5 s/token.",
        )
