"""The kernels' thread pool under callers that compete, fork and change their minds; and replay."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from octavo.ops.cpu import elementwise, gemm, native
from octavo.ops.cpu.rope_cache import rope_and_cache
from octavo.ops.cpu.trace import record

pytestmark = pytest.mark.skipif(native.load() is None, reason="no library")
ROWS, WIDTH = 512, 512  # enough elements for every thread to be asked
WEIGHT = torch.ones(WIDTH)  # lives as long as the traces that name it


def norm(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return elementwise.rms_norm(x, WEIGHT, 1e-5, out)


@pytest.fixture
def threads() -> int:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield 4
    torch.set_num_threads(before)


def test_every_unit_is_done_once_whatever_the_threads(threads: int) -> None:
    x = torch.randn(ROWS, WIDTH)
    torch.set_num_threads(1)
    expected = norm(x)
    for count in (2, 3, 8, 1, 5):
        torch.set_num_threads(count)
        for _ in range(200):
            out = torch.full_like(x, float("nan"))
            assert torch.equal(norm(x, out), expected)


def test_callers_that_compete(threads: int) -> None:
    inputs = [torch.randn(ROWS, WIDTH) for _ in range(4)]
    expected = [norm(x) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        torch.set_num_threads(4)
        for _ in range(100):
            if not torch.equal(norm(inputs[i]), expected[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
        assert not caller.is_alive(), "the pool is stuck"
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_pool_of_its_own(threads: int) -> None:
    x = torch.randn(ROWS, WIDTH)
    expected = norm(x)
    child = os.fork()
    if not child:  # compares with numpy: torch's own threads do not survive a fork
        same = all((norm(x).numpy() == expected.numpy()).all() for _ in range(20))
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(norm(x), expected)


def test_replay_makes_the_same_calls_on_new_values(threads: int) -> None:
    x, h, y = torch.randn(ROWS, WIDTH), torch.empty(ROWS, WIDTH), torch.empty(ROWS, WIDTH // 2)
    with record() as traces:
        elementwise.silu_and_mul(norm(x, h), y)
    (trace,) = traces
    for seed in range(3):
        x.copy_(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)))
        expected = elementwise.silu_and_mul(norm(x))
        y.fill_(float("nan"))
        trace.replay()
        assert torch.equal(y, expected)


def test_replay_reports_a_failed_call() -> None:
    cache = torch.zeros(1, 1, 2, 1, 4, 4)
    head, cos_sin = torch.ones(1, 1, 4), torch.ones(8, 4)
    position, slot = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with record() as traces:
        rope_and_cache(head, head.clone(), head.clone(), position, cos_sin, slot, cache, 0)
    slot.fill_(99)  # beyond the pool
    with pytest.raises(RuntimeError, match="kernel call 0"):
        traces[0].replay()


def test_what_cannot_be_replayed_is_not_recorded() -> None:
    with record() as traces:
        torch.ones(3).sum()
    assert not traces
    if gemm.is_available():
        odd = gemm.pack(torch.ones(8, 34, dtype=torch.bfloat16))  # needs padded copies of x
        with record() as traces:
            gemm.linear(torch.ones(2, 34, dtype=torch.bfloat16), odd)
        assert not traces


def test_recording_ends_with_an_error() -> None:
    with pytest.raises(ZeroDivisionError), record():
        raise ZeroDivisionError
    with record() as traces:
        norm(torch.ones(2, WIDTH))
    assert len(traces) == 1
