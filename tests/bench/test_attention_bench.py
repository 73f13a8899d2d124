"""`octavo bench attention`: the kernels compute attention, and what is counted is right."""

from __future__ import annotations

import math

import pytest
import torch

import octavo.engine.attention_kernels as module
from octavo.attention.gather import GatherAttention
from octavo.attention.triton import TritonAttention
from octavo.bench.attention import AttentionResult, AttentionRow, run_attention
from octavo.bench.roofline import Rates, tera
from octavo.engine.attention_kernels import AttentionKernels
from octavo.engine.kernels import AttentionCase, HeadShape, pick_device, pick_dtype
from octavo.errors import ConfigError

SHAPE = HeadShape(4, 2, 16)
LLAMA = HeadShape(32, 8, 128)
CASES = [AttentionCase(2, 40), AttentionCase(2, 20, 20), AttentionCase(1, 40, 20)]
KIND = "cuda" if torch.cuda.is_available() else "cpu"
DEVICE = torch.device(KIND)


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._ROTATED_BYTES, KIND, 1)


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's backend, wherever this runs."""
    monkeypatch.setattr(module, "select_attention", lambda *_, **__: TritonAttention())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["auto", "gather"])
def test_both_layouts_give_attention(backend: str, case: AttentionCase) -> None:
    kernels = AttentionKernels(SHAPE, torch.float32, DEVICE, backend=backend)  # type: ignore[arg-type]
    paged, contiguous = kernels.paged(case, 16), kernels.contiguous(case)
    assert paged.error < 1e-5
    assert contiguous is None or contiguous.error < 1e-5
    assert len(paged.calls) == 2
    for call in paged.calls:
        call()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["auto", "gather"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_on_a_cpu(backend: str, dtype: torch.dtype, case: AttentionCase) -> None:
    kernels = AttentionKernels(
        SHAPE,
        dtype,
        torch.device("cpu"),
        kv_cache_dtype="int8",
        backend=backend,  # type: ignore[arg-type]
    )
    assert kernels.paged(case, 16).error < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.usefixtures("triton")
def test_both_layouts_give_attention_on_a_gpu(case: AttentionCase, kv_cache_dtype: str) -> None:
    kernels = AttentionKernels(
        SHAPE,
        torch.float32,
        DEVICE,
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
    )
    assert kernels.paged(case, 16).error < 1e-3
    contiguous = kernels.contiguous(case)
    has_one = kv_cache_dtype == "auto" and case.query in (1, case.context)
    assert (contiguous is not None) == has_one
    assert contiguous is None or contiguous.error < 1e-3


def test_a_kernel_that_writes_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GatherAttention, "attend", lambda *_: None)
    kernels = AttentionKernels(SHAPE, torch.float32, torch.device("cpu"), backend="gather")
    assert math.isnan(kernels.paged(CASES[0], 16).error)


def test_bytes_and_operations_are_counted_as_the_peers_count_them() -> None:
    decode = AttentionCase(32, 1024)
    assert decode.num_bytes(LLAMA, 2, scaled=False) == 32 * 1024 * 8 * 128 * 2 * 2
    assert decode.num_bytes(LLAMA, 1, scaled=True) == 32 * 1024 * 8 * (128 + 2) * 2
    prefill = AttentionCase(8, 1024, 1024)
    assert prefill.num_flops(LLAMA) == 4 * 8 * 32 * 128 * (1024 * 1025 // 2)
    chunk = AttentionCase(1, 3, 2)
    assert chunk.num_flops(HeadShape(1, 1, 1)) == 4 * (2 + 3)


def test_calls_go_round_more_than_a_cache_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = AttentionKernels(SHAPE, torch.float32, torch.device("cpu"))
    monkeypatch.setitem(module._ROTATED_BYTES, "cpu", 1e5)
    case = AttentionCase(1, 160)
    layer = 160 * 2 * 2 * 16 * 4
    num_layers = int(1e5 / layer) + 1
    assert len(kernels.paged(case, 16).calls) == num_layers
    assert kernels.pool_bytes(case, 16) == num_layers * layer > 1e5


def row(seconds: float, contiguous_s: float | None) -> AttentionRow:
    return AttentionRow(8, 1024, 1, 16, seconds, 10**8, 10**6, 0.5, 0.1, contiguous_s, 1e-3)


def test_the_cost_of_paging_is_a_share_of_the_contiguous_time() -> None:
    assert row(1.03, 1.0).paging_cost == pytest.approx(0.03)
    assert row(1.0, None).paging_cost is None


def test_the_table_has_a_line_for_each_case() -> None:
    rates = Rates("a GPU", "bfloat16", 4e12, 8e14)
    rows = [row(1.03e-4, 1e-4), AttentionRow(2, 9, 4, 16, 1e-3, 1, 10**9, 0.1, 0.4, None, 2e-3)]
    skipped = ["left out: 1 x 1"]
    text = str(AttentionResult(LLAMA, "bfloat16", "fp8", "triton", "so", rates, rows, skipped))
    assert "32/8 heads of 128, bfloat16, fp8 KV cache; backend triton" in text
    assert "copies 4.00 TB/s" in text and "multiplies 800.00 TFLOP/s" in text
    assert "+3.0%" in text and "2 x 4 of 9" in text and text.endswith("left out: 1 x 1")


def test_a_case_without_room_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.bench.attention.free_bytes", lambda _: 100_000)
    monkeypatch.setattr(
        "octavo.bench.attention.measure_rates", lambda *_: Rates("m", "float32", 1e9, 1e9)
    )
    monkeypatch.setattr("octavo.bench.roofline._CPU_S", 0.0)
    cases = [AttentionCase(1, 16), AttentionCase(64, 64)]
    found = run_attention(SHAPE, cases=cases, block_sizes=[8, 16], dtype="float32")
    assert [(r.context, r.block_size) for r in found.rows] == [(16, 8), (16, 16)]
    (skipped,) = found.skipped
    assert skipped.startswith("left out: 64 x 64 needs 2.0 MiB of K and V, and 39.1 KiB can be")


def test_the_roofline_is_the_slower_of_both() -> None:
    rates = Rates("m", "bfloat16", 100.0, 1000.0)
    assert rates.floor_s(200, 1000) == 2
    assert rates.floor_s(200, 9000) == 9
    assert (tera(4.256e12), tera(2.5e10)) == ("4.26 T", "25.00 G")


def test_what_needs_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='fp8' needs a GPU"):
        pick_device("cpu", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match=r"'float16' needs a GPU"):
        pick_dtype("float16", torch.device("cpu"))
    assert pick_dtype("auto", torch.device("cuda")) is torch.bfloat16
