"""The forward pass of a step that lies on the device."""

from __future__ import annotations

from torch import Tensor

from octavo.attention.base import ForwardContext
from octavo.layers.workspace import Workspace
from octavo.models.decoder import Decoder
from octavo.runner.gpu.cutting import Shape
from octavo.runner.gpu.inputs import GpuInputs
from octavo.runner.gpu.steps import DeviceStep, HostStep
from octavo.runner.kv_store import KVStore


class Forward:
    """From a placed step to hidden states, which lie in the workspace."""

    def __init__(
        self, model: Decoder, kv_store: KVStore, inputs: GpuInputs, workspace: Workspace
    ) -> None:
        self._model, self._kv_store = model, kv_store
        self._inputs, self._workspace = inputs, workspace

    def hidden(self, step: HostStep | None, placed: DeviceStep) -> Tensor:
        """[num_tokens, hidden_size] after the last layer. step: None for a recorded one."""
        self._inputs.prepare(placed)
        return self._model.forward(placed.token_ids, self._context(step, placed))

    def each_kind(self, placed: DeviceStep) -> Tensor:
        """The same, but of layers that differ in nothing but their weights only one: all kernels of
        a step in a fraction of its time."""
        self._inputs.prepare(placed)
        context, token_ids = self._context(None, placed), placed.token_ids
        hidden = self._model.embedded(token_ids, placed.positions, self._workspace)
        for layer in {layer.kind: layer for layer in self._model.layers}.values():
            layer.forward(hidden, context)
        return hidden

    def _context(self, step: HostStep | None, placed: DeviceStep) -> ForwardContext:
        rotary, rope_rows = self._model.rotary, placed.positions
        cos_sin = rotary.table
        if rotary.is_dynamic and step is not None:
            positions, prompt_lens = step.rope_inputs()
            cos_sin, rope_rows = rotary.rows(positions, prompt_lens)
            rope_rows = rope_rows.to(placed.positions.device)
        inputs, slots = self._inputs, placed.slot_mapping
        first = ForwardContext(
            kv_cache=self._kv_store.data,
            block_tables=inputs.tables_of(0),
            seq_lens=placed.seq_lens,
            query_start_loc=placed.query_start_loc,
            slot_mapping=slots[0],
            rope_rows=rope_rows,
            cos_sin=cos_sin,
            workspace=self._workspace,
            local_cos_sin=self._model.local_cos_sin,
            kv_scales=self._kv_store.scales,
            table_rows=placed.table_rows,
            work=placed.work,
        )
        others = range(1, inputs.num_groups)
        return first.with_groups([inputs.tables_of(g) for g in others], [slots[g] for g in others])


def attention_shape(model: Decoder, num_sms: int) -> Shape:
    """How the model's attention is cut up, on a GPU of so many multiprocessors."""
    arch, attention = model.arch, model.attention
    windows = [layer.window for layer in model.layers]
    return Shape(
        arch.num_heads,
        arch.kv_num_heads,
        arch.kv_head_dim,
        num_sms,
        max(windows) if all(windows) else 0,
        getattr(attention, "fresh_tokens", 0),
    )
