"""Scheduler, memory manager and the GPU's runner together, with overlap, against the CPU's runner
in synchronous steps: every request gets the same tokens (I4)."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from octavo.arch import ModelArch
from octavo.engine.core import EngineCore
from octavo.kv import KVCacheManager
from octavo.kv.policies import make_policy
from octavo.kv_groups import kv_groups
from octavo.plan import StepPlan, StepResult
from octavo.request import BeamSearchParams, Request, SamplerParams
from octavo.runner.base import RunnerBase
from octavo.sched import Scheduler

NUM_BLOCKS = 24
Answers = dict[str, list[list[int]]]


def requests() -> list[Request]:
    rng = random.Random(7)
    kinds = [
        {},
        {"sampler": SamplerParams(temperature=1.5, seed=3)},
        {"sampler": SamplerParams(temperature=1.5, seed=4), "n": 3},
        {"sampler": SamplerParams(temperature=1.0, seed=5, frequency_penalty=1.0)},
        {"beam": BeamSearchParams(beam_width=2, max_tokens=8), "n": 2},
        {"sampler": SamplerParams(repetition_penalty=1.3), "stop_token_ids": frozenset(range(40))},
        {"stop_token_ids": frozenset(range(30))},
    ]
    shared = [rng.randrange(128) for _ in range(9)]
    found = []
    for i, kind in enumerate([*kinds, *kinds[:4]]):
        own = [rng.randrange(128) for _ in range(rng.randint(1, 12))]
        prompt = shared + own if i % 3 == 0 else own
        found.append(
            Request(
                request_id=str(i), prompt_token_ids=prompt, max_tokens=rng.randint(3, 14), **kind
            )
        )
    return found


class Seen:
    """What the plans of a run had in them."""

    def __init__(self, runner: RunnerBase) -> None:
        self._runner = runner
        self.num_preempted = self.num_planned_ahead = self.most_under_way = 0
        self._under_way: list[set[int]] = []

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        wait = self._runner.launch(plan)
        sampling = {share.seq_id for share in plan.seqs if share.sample}
        self.num_preempted += len(plan.preempted)
        self.num_planned_ahead += len(sampling & set().union(*self._under_way))
        self._under_way.append(sampling)
        self.most_under_way = max(self.most_under_way, len(self._under_way))

        def waited() -> StepResult:
            self._under_way.pop(0)
            return wait()

        return waited


def answers(
    runner: RunnerBase,
    overlap: bool,
    aborted: tuple[str, ...] = (),
    num_blocks: int = NUM_BLOCKS,
    windows: tuple[int, ...] = (0,),
) -> Answers:
    """Tokens of each request's sequences; a small pool, so that some are preempted."""
    seen = Seen(runner)
    policy = make_policy("paged", max_seq_tokens=64, windows=windows, max_chunk_tokens=32)
    kv = KVCacheManager(num_blocks, 4, policy, enable_prefix_caching=len(windows) > 1)
    scheduler = Scheduler(
        kv, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64, plan_ahead=overlap
    )
    core = EngineCore(scheduler, kv, seen.launch, runner.resize_pool, overlap=overlap)
    found: dict[str, dict[int, list[int]]] = {}
    waiting, step = requests(), 0
    while waiting or core.has_unfinished():
        while waiting and step % 2 == 0:
            core.add_request(waiting.pop(0))
            if len(waiting) % 3:
                break
        if aborted and step == 9:
            assert all(core.abort(request_id) for request_id in aborted)
        for update in core.step():
            of = found.setdefault(update.request_id, {})
            of.setdefault(update.sample_index, []).extend(update.token_ids)
        step += 1
        assert step < 1000
    kv.check_integrity()
    assert kv.num_free_blocks == num_blocks
    assert seen.num_preempted and seen.most_under_way == 1 + overlap
    assert (seen.num_planned_ahead > 30) == overlap
    return {
        request_id: [of[index] for index in sorted(of)]
        for request_id, of in found.items()
        if request_id not in aborted
    }


def test_the_same_tokens_with_overlap_and_aborts(
    make_gpu_runner: Callable[..., RunnerBase], make_cpu_runner: Callable[..., RunnerBase]
) -> None:
    aborted = ("1", "3")
    expected = answers(make_cpu_runner(), overlap=False)
    found = answers(make_gpu_runner(graphs=True), overlap=True, aborted=aborted)
    assert found == {key: value for key, value in expected.items() if key not in aborted}


@pytest.mark.parametrize("graphs", [False, True])
def test_the_same_tokens_with_groups_of_layers(
    make_gpu_runner: Callable[..., RunnerBase],
    make_cpu_runner: Callable[..., RunnerBase],
    graphs: bool,
) -> None:
    """Blocks behind the window go to others while steps are under way."""
    windows, num_blocks = (6, 0, 6), 40
    arch = ModelArch("LlamaForCausalLM", 1, 1, 1, 3, 1, 1, 1, 1, sliding_windows=windows)
    groups = kv_groups(arch, 64)
    assert groups.windows == (0, 6, 6)
    expected = answers(make_cpu_runner(windows=windows), overlap=False)
    runner = make_gpu_runner(graphs=graphs, windows=windows, groups=groups, num_blocks=num_blocks)
    found = answers(runner, overlap=True, num_blocks=num_blocks, windows=groups.windows)
    assert found == expected
