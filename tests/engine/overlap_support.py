"""What the tests of overlap share: a device that is late, and requests served beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm_support import OPTIONS

from octavo import LLM
from octavo.errors import StepFailedError
from octavo.outputs import OutputKind
from octavo.plan import StepPlan, StepResult


class LateDevice:
    """Between an engine and its runner: carries plans out when they are waited for, and checks that
    the engine keeps to the rules. May be told to fail."""

    def __init__(self, llm: LLM) -> None:
        core = llm._engine.engine.core
        launch = core._launch
        assert launch is not None
        self._run = launch
        self.under_way: list[int] = []
        self.most = 0
        self.num_ahead = 0
        """Shares that were planned while the token was not known."""
        self._sampling: list[set[int]] = []
        self.on_launch: Callable[[StepPlan], None] = lambda plan: None
        self.on_wait: Callable[[StepPlan], None] = lambda plan: None
        core._launch = self.launch

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        self.on_launch(plan)
        self.under_way.append(plan.step_id)
        self.most = max(self.most, len(self.under_way))
        ids = {share.seq_id for share in plan.seqs if share.sample}
        self.num_ahead += len(ids & set().union(*self._sampling))
        self._sampling.append(ids)

        def wait() -> StepResult:
            assert self.under_way[0] == plan.step_id, "waited for out of turn, or twice"
            del self.under_way[0], self._sampling[0]
            self.on_wait(plan)
            return self._run(plan)()

        return wait


def open_llm(model: Path, **options: Any) -> LLM:
    return LLM(str(model), **(OPTIONS | {"async_scheduling": True} | options))


def serve(
    llm: LLM, requests: list[tuple[Any, Any]], abort_at: dict[int, str] | None = None
) -> dict[str, list[tuple[list[int], str | None, int | str | None]]]:
    """By request that was answered: (tokens, finish reason, stop reason) of its completions."""
    engine = llm._engine.engine
    for i, (prompt, params) in enumerate(requests):
        engine.add(f"r{i}", prompt, params, kind=OutputKind.FINAL_ONLY)
    found: dict[str, list[tuple[list[int], str | None, int | str | None]]] = {}
    num_steps = 0
    while engine.has_unfinished():
        num_steps += 1
        if abort_at and num_steps in abort_at:
            engine.abort(abort_at[num_steps])
        try:
            outputs = engine.step()
        except StepFailedError as error:
            assert not any(engine.has(i) for i in error.request_ids)
            continue
        for output in outputs:
            found[output.request_id] = [
                (c.token_ids, c.finish_reason, c.stop_reason) for c in output.outputs
            ]
        engine.core.kv.check_integrity()
    return found
