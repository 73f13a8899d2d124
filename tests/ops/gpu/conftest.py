"""Random paged caches of awkward shapes, on the GPU or, under Triton's interpreter, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

_E4M3_MAX = 448.0


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels of these tests run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(params=[torch.float32, torch.float16, torch.bfloat16], ids=["f32", "f16", "bf16"])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    """Each type in turn; bfloat16 products are wrong under the interpreter."""
    chosen: torch.dtype = request.param
    if chosen == torch.bfloat16 and device.type == "cpu":
        pytest.skip("tl.dot of bfloat16 needs an NVIDIA GPU")
    return chosen


@pytest.fixture
def generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


@dataclass(frozen=True)
class Paged:
    """A pool in which only the sequences' own slots hold numbers; all others are NaN."""

    kv_cache: Tensor
    """[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]"""
    kv_scales: Tensor | None
    """[num_blocks, num_layers, 2, num_kv_heads, block_size] float16, of an fp8 cache."""
    block_tables: Tensor
    """[max_rows, max_blocks] int32; entries of no sequence are far outside the pool."""
    table_rows: Tensor
    """[num_seqs] int32, not in order."""
    seq_lens: Tensor
    """[num_seqs] int32"""

    def wide(self) -> Tensor:
        """The cache's values in float64, NaN turned to 0."""
        values = self.kv_cache.to(torch.float32).double()
        if self.kv_scales is not None:
            values *= self.kv_scales.double()[..., None]
        return values.nan_to_num(0.0)

    def tables(self) -> Tensor:
        """Each sequence's row, in order, with entries of no sequence turned to 0."""
        tables = self.block_tables[self.table_rows.long()]
        return torch.where((tables >= 0) & (tables < self.kv_cache.shape[0]), tables, 0)

    def give_back(self, first_needed: Sequence[int], entry: int) -> None:
        """Fills each sequence's blocks that lie wholly before a position with NaN, and puts
        `entry` into the table in their place."""
        block_size = self.kv_cache.shape[4]
        for row, position in zip(self.table_rows.tolist(), first_needed, strict=True):
            behind = position // block_size
            blocks = self.block_tables[row, :behind].long()
            self.kv_cache[blocks] = torch.nan
            if self.kv_scales is not None:
                self.kv_scales[blocks] = torch.nan
            self.block_tables[row, :behind] = entry


MakePaged = Callable[..., Paged]


def _pool(
    shape: tuple[int, ...], dtype: torch.dtype, fp8: bool, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """NaN everywhere, in blocks some bytes longer than what they hold."""
    num_blocks, *inner = shape
    size = torch.Size(inner).numel()
    if not fp8:
        pool = torch.full((num_blocks, size + 64), torch.nan, dtype=dtype, device=device)
        return pool[:, :size].view(shape), None
    num_scales = size // inner[-1]
    pool = torch.full((num_blocks, size + 2 * num_scales + 64), 0x7F, dtype=torch.uint8)
    pool = pool.to(device)
    codes = pool[:, :size].view(torch.float8_e4m3fn).view(shape)
    scales = pool[:, size : size + 2 * num_scales].view(torch.float16).view(shape[:-1])
    return codes, scales.fill_(torch.nan)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """float8 codes of x's shape and float16 scales of all but its last dimension."""
    peak = x.float().abs().amax(-1)
    scale = (peak / _E4M3_MAX).half()
    up = torch.nextafter(scale.float(), torch.tensor(torch.inf, device=x.device))
    above = (up * (1 + 2**-10)).half()
    scale = torch.where(scale.float() * _E4M3_MAX < peak, above, scale)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (x.float() / scale.float()[..., None]).clamp(-_E4M3_MAX, _E4M3_MAX)
    return codes.to(torch.float8_e4m3fn), scale


@pytest.fixture
def make_paged(device: torch.device, generator: torch.Generator) -> MakePaged:
    """make_paged(seq_lens, block_size=, num_kv_heads=, head_dim=, dtype=, num_layers=2, layer=1,
    fp8=False): `Paged` with random numbers in the slots of `layer`."""

    def make(
        seq_lens: Sequence[int],
        *,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        num_layers: int = 2,
        layer: int = 1,
        fp8: bool = False,
    ) -> Paged:
        counts = [-(-length // block_size) for length in seq_lens]
        num_blocks = sum(counts) + 3
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        cache, scales = _pool(shape, dtype, fp8, device)
        order = torch.randperm(num_blocks, generator=generator, device=device).int()
        num_rows = len(seq_lens) + 2
        tables = torch.full(
            (num_rows, max([*counts, 1]) + 2), 2**31 - 1, dtype=torch.int32, device=device
        )
        rows = torch.randperm(num_rows, generator=generator, device=device)[: len(seq_lens)].int()
        first = 0
        for row, length, count in zip(rows.tolist(), seq_lens, counts, strict=True):
            blocks = order[first : first + count]
            tables[row, :count] = blocks
            first += count
            x = torch.randn((length, 2, num_kv_heads, head_dim), generator=generator, device=device)
            where = torch.arange(length, device=device)
            at = blocks.long()[where // block_size], where % block_size
            if scales is None:
                cache[at[0], layer, :, :, at[1]] = x.to(dtype)
            else:
                # Heads and tokens of different size, so that a wrong scale shows.
                x *= torch.rand(x.shape[:-1], generator=generator, device=device)[..., None] + 0.5
                codes, token_scales = quantize(x)
                view = cache.view(torch.uint8)
                view[at[0], layer, :, :, at[1]] = codes.view(torch.uint8)
                scales[at[0], layer, :, :, at[1]] = token_scales
        lens = torch.tensor(list(seq_lens), dtype=torch.int32, device=device)
        return Paged(cache, scales, tables, rows, lens)

    return make


@pytest.fixture
def relative_error() -> Callable[[Tensor, Tensor], float]:
    """||out - expected|| / ||expected||; NaN where out has one."""

    def error(out: Tensor, expected: Tensor) -> float:
        expected = expected.double()
        return float((out.double() - expected).norm() / expected.norm())

    return error
