"""Numbers that are not finite, launches that fail, and a GPU that is lost."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from gpu_traffic import (
    GREEDY,
    WARM,
    MakeCpu,
    MakeGpu,
    tokens_of,
)
from runner_support import seq

from octavo.errors import DeviceLostError, NumericsError
from octavo.plan import NewSeq, StepPlan
from octavo.runner.gpu.failure import device_errors
from octavo.runner.gpu.pending import Answer


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_numbers_that_are_not_finite_name_their_sequences(make_gpu_runner: MakeGpu) -> None:
    for params in (GREEDY, WARM):
        runner = make_gpu_runner()
        runner.model.embed.table = runner.model.embed.table.clone()  # the head's stays as it is
        runner.model.embed.table[77] = float("nan")
        new = [NewSeq(4, [1, 2], params), NewSeq(5, [77], params), NewSeq(6, [3], params)]
        plan = StepPlan(
            0, new_seqs=new, seqs=[seq(4, 0, 2, (0,)), seq(5, 0, 1, (1,)), seq(6, 0, 1, (2,))]
        )
        wait = runner.launch(plan)
        with pytest.raises(NumericsError, match=r"sequences \[5\]"):
            wait()


def test_a_failed_launch_leaves_tables_that_are_brought_up_to_date(
    make_gpu_runner: MakeGpu, make_cpu_runner: MakeCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, oracle = make_gpu_runner(), make_cpu_runner()
    both = [NewSeq(0, [1, 2, 3], WARM), NewSeq(1, [4, 5], WARM)]
    plans = [
        StepPlan(0, new_seqs=both[:1], seqs=[seq(0, 0, 3, (3,))]),
        StepPlan(1, new_seqs=both[1:], seqs=[seq(1, 0, 2, (9,))]),
        StepPlan(2, finished=[1], seqs=[seq(0, 3, 1)]),
        StepPlan(3, seqs=[seq(0, 4, 1, (9,))]),
    ]  # fmt: skip
    expected = tokens_of([oracle.execute(plan).sampled for plan in plans])
    first = runner.launch(plans[0])
    with monkeypatch.context() as patch:
        patch.setattr(runner._forward, "hidden", lambda *_: 1 / 0)
        for step in range(3):  # however many fail, the one under way keeps its answer
            new = [NewSeq(10 + step, [4, 5], WARM)] if step < 2 else plans[1].new_seqs
            seqs = [seq(new[0].seq_id, 0, 2, (9,))]
            with pytest.raises(ZeroDivisionError):
                runner.launch(StepPlan(1, new_seqs=new, seqs=seqs))
    assert list(runner._latest) == [first]  # what holds it if the device is lost
    found = [first().sampled, *(runner.execute(plan).sampled for plan in plans[2:])]
    assert tokens_of(found) == [expected[0], *expected[2:]]


def test_a_lost_device_is_told_from_a_failed_step(
    make_gpu_runner: MakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: Exception) -> Callable[..., None]:
        def raises(*_: object) -> None:
            raise error

        return raises

    runner = make_gpu_runner()
    plan = StepPlan(0, new_seqs=[NewSeq(0, [1], GREEDY)], seqs=[seq(0, 0, 1, (0,))])
    under_way = runner.launch(plan)
    runner.device = runner._answers._answers[1].device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    broken = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(runner, "_launch", fail(broken))
    monkeypatch.setattr(torch.cuda, "synchronize", fail(broken))
    with pytest.raises(DeviceLostError, match=r"H200.*illegal memory access.*restart"):
        runner.launch(plan)
    monkeypatch.setattr(Answer, "wait", fail(broken))
    with pytest.raises(DeviceLostError, match=r"H200.*illegal memory access.*restart"):
        under_way()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    with pytest.raises(RuntimeError, match="illegal"):
        runner.launch(plan)
    monkeypatch.setattr(runner, "_launch", fail(torch.OutOfMemoryError("no room")))
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        runner.launch(plan)


def test_what_lies_on_a_lost_device_is_never_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        pass

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    for is_lost in (False, True):
        monkeypatch.setattr(torch.cuda, "synchronize", broken if is_lost else lambda _: None)
        owner, draw = Thing(), Thing()
        owners = weakref.ref(owner), weakref.ref(draw)

        def step(half_made: Thing, owner: Thing) -> None:
            with device_errors(torch.device("cuda"), owner):
                broken(half_made)

        with contextlib.suppress(RuntimeError, DeviceLostError):
            step(draw, owner)
        del owner, draw
        gc.collect()
        assert [held() is not None for held in owners] == [is_lost, is_lost]
