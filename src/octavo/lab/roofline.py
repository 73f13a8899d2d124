"""Step times from first principles: bytes over bandwidth, products over their rate, and what
software adds. Constants and their derivations are in `data/gpus.json`."""

from __future__ import annotations

from dataclasses import replace
from math import cbrt

from octavo.lab.costs import StepShape
from octavo.lab.gpus import PAPER_SOFTWARE, Gpu, Software, find_software, paper_gpus
from octavo.lab.model_shape import ModelShape
from octavo.lab.shapes import find_shape

DEFAULT_BLOCK_SIZE = 16
"""Tokens of a block of what is allocated in blocks and read in one piece."""


class RooflineCosts:
    """A model on GPUs of one kind, shared by tensor parallelism.

    A step takes

        overhead + |weights read, matrix products| + attention of prompts + KV read + all-reduces
        + sequences x their overhead + copies, and at least what the host takes beside the GPU.

    Reading weights and multiplying overlap, but not wholly where both take as long: |a, b| is the
    cube root of a^3 + b^3. Of the linear layers of an 8B model on an H200 it is off by -0.5, -4,
    -1, +13 and +6 % at 1, 32, 128, 256 and 512 tokens.

    block_size: tokens of a block; None: the K and V of a sequence are read in one piece, as before
    paging. copied_tokens: tokens of a block that is copied, where they are not `block_size`; it is
    of one group of layers (see `ModelShape.kv_shape`), or of all layers where not `in_groups`.

    With experts a token is multiplied with those it is sent to, and the weights read are those of
    all that any is (`ModelShape.read_bytes`). That each then multiplies few rows at a time is in
    reading them; sorting tokens by expert, and that some get more than others, is left out.
    """

    def __init__(
        self,
        shape: ModelShape,
        gpu: Gpu,
        *,
        num_gpus: int = 1,
        block_size: int | None = 16,
        copied_tokens: int | None = None,
        max_model_len: int | None = None,
        in_groups: bool = True,
        software: Software | None = None,
    ) -> None:
        assert num_gpus >= 1 and (block_size is None or block_size >= 1)
        soft = find_software() if software is None else software
        self.shape, self.gpu, self.num_gpus, self.software = shape, gpu, num_gpus, soft
        self.block_size = block_size
        element, layers = shape.element_bytes, shape.num_layers
        rate = gpu.flops * soft.flops_share
        self._overhead_s = soft.step_s + layers * soft.layer_s
        self._weights_bytes_s = num_gpus * gpu.hbm_bytes_s * soft.weight_share
        self._weights_cubed: float | None = None
        if shape.moe is None:
            self._weights_cubed = self._read_cubed(1)
        self._token_s = 2 * shape.token_params / num_gpus / rate
        self._sample_s = 2 * shape.head_params / num_gpus / rate
        pair_flops = layers * shape.pair_flops / num_gpus
        self._pair_s = pair_flops / (gpu.flops * soft.attention_share)
        in_blocks = 1.0
        if block_size is not None:
            in_blocks += soft.block_overhead_tokens / block_size
        kv = shape.kv_shape(num_gpus, max_model_len)
        self._read_s = (
            kv.bytes_per_token
            // kv.num_layers
            * layers
            * in_blocks
            / (gpu.hbm_bytes_s * soft.kv_share)
        )
        self._reduced_token_s = 0.0
        if num_gpus > 1:
            self._overhead_s += soft.parallel_step_s + 2 * layers * soft.all_reduce_s
            sent = 2 * (num_gpus - 1) / num_gpus * shape.hidden_size * element
            self._reduced_token_s = 2 * layers * sent / (gpu.link_bytes_s * soft.link_share)
        if not in_groups:
            kv = replace(kv, num_layers=layers, num_padding=0, windows=(0,))
        block_bytes = kv.bytes_per_block(copied_tokens or block_size or DEFAULT_BLOCK_SIZE)
        num_pieces = soft.pieces_per_layer * kv.layers_per_block or 1
        over_pcie = block_bytes / (gpu.pcie_bytes_s * soft.pcie_share)
        self._host_block_s = num_pieces * soft.piece_s + over_pcie
        self._pool_block_s = block_bytes / (gpu.hbm_bytes_s * soft.pool_share)

    @property
    def name(self) -> str:
        """See `StepCosts.name`."""
        count = f"{self.num_gpus} x " if self.num_gpus > 1 else ""
        return f"{self.shape.name} on {count}{self.gpu.name}, software of {self.software.name}"

    def step_s(self, shape: StepShape) -> float:
        """See `StepCosts.step_s`."""
        soft = self.software
        num_tokens = shape.num_prefill_tokens + shape.num_decodes
        total = 0.0
        if num_tokens:
            num_seqs = shape.num_decodes + shape.num_prompts
            products = num_tokens * self._token_s + shape.num_samples * self._sample_s
            weights_cubed = self._weights_cubed
            if weights_cubed is None:
                weights_cubed = self._read_cubed(num_tokens)
            total = (
                self._overhead_s
                + cbrt(weights_cubed + products**3)
                + shape.prefill_context * self._pair_s
                + shape.decode_context * self._read_s
                + num_tokens * self._reduced_token_s
                + num_seqs * soft.seq_s
            )
            if shape.num_prefill_tokens:
                total += soft.prefill_step_s
            total = max(total, soft.host_step_s + num_seqs * soft.host_seq_s)
        total += shape.num_copied_blocks * self._pool_block_s
        return total + self.copy_s(shape.num_host_blocks)

    def _read_cubed(self, num_tokens: int) -> float:
        return (self.shape.read_bytes(num_tokens) / self._weights_bytes_s) ** 3

    def copy_s(self, num_host_blocks: int) -> float:
        """See `StepCosts.copy_s`."""
        return num_host_blocks * self._host_block_s


def paper_costs(model: str = "opt-13b", *, block_size: int | None = 16) -> RooflineCosts:
    """The PagedAttention paper's set-up for a model of its Table 1: its GPUs, its software.

    block_size None: contiguous keys and values, as of the systems it compares with. Raises
    `ConfigError` for a model that is not in the table.
    """
    gpu, num_gpus = paper_gpus(model)
    return RooflineCosts(
        find_shape(model),
        gpu,
        num_gpus=num_gpus,
        block_size=block_size,
        software=find_software(PAPER_SOFTWARE),
    )
