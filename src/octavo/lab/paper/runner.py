"""Runs figures: all their tasks, over several processes, the longest first."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from typing import Any

from octavo.lab.paper.basic import BasicSampling
from octavo.lab.paper.blocks import BlockSize, Preemption
from octavo.lab.paper.figure import Figure, FigureResult, Task
from octavo.lab.paper.pool import BatchSizes, MemorySplit, Savings
from octavo.lab.paper.variants import Chatbot, ManySequences, SharedPrefix
from octavo.lab.paper.workloads import Workloads

Progress = Callable[[str, int, int], None]
"""Told after each task: its key, tasks done, tasks in all."""


def all_figures() -> dict[str, Figure]:
    """By name, in the paper's order."""
    figures: tuple[Figure, ...] = (
        MemorySplit(),
        BasicSampling(),
        BatchSizes(),
        ManySequences(),
        Savings(),
        SharedPrefix(),
        Chatbot(),
        BlockSize(),
        Preemption(),
    )
    return {figure.name: figure for figure in figures}


def run_figures(
    figures: Sequence[Figure],
    workloads: Workloads,
    *,
    num_processes: int | None = None,
    progress: Progress | None = None,
) -> list[FigureResult]:
    """Make the figures; the results do not depend on the number of processes (None: one a CPU)."""
    tasks = tasks_of(figures, workloads)
    results: dict[str, Any] = {}
    num = num_processes or _num_cpus()
    for key, result in _run(tasks, min(num, len(tasks))):
        results[key] = result
        if progress is not None:
            progress(key, len(results), len(tasks))
    return [figure.collect(results) for figure in figures]


def tasks_of(figures: Sequence[Figure], workloads: Workloads) -> list[Task]:
    """What is to be done for figures; what several of them need is done once."""
    tasks = {task.key: task for figure in figures for task in figure.tasks(workloads)}
    return list(tasks.values())


def _run(tasks: Sequence[Task], num_processes: int) -> Iterator[tuple[str, Any]]:
    """(key, result) of each as it is done."""
    ordered = sorted(tasks, key=lambda task: -task.weight)  # the last to end should be short
    if num_processes <= 1:
        for task in ordered:
            yield task.key, task.run()
        return
    others = set(active_children())
    # spawn: the same on all systems, and nothing of this process is in the others
    pool = ProcessPoolExecutor(num_processes, get_context("spawn"), initializer=_ignore_ctrl_c)
    try:
        futures = {pool.submit(task.run): task.key for task in ordered}
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException:  # nobody waits for what is still running
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(active_children()) - others:
            process.terminate()
        raise
    pool.shutdown()


def _ignore_ctrl_c() -> None:
    """It goes to all processes of a terminal; the first one ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
