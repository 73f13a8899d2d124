"""The tensors of a Hugging Face checkpoint under the names and in the cuts that the decoder wants.

The decoder's names are Llama's. Other families call their modules otherwise, keep q, k and v (or
gate and up) in one matrix, or matrices the other way round. `canonical` undoes all of that a
tensor at a time, so that no more than one of the file's tensors is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from octavo.arch import ModelArch
from octavo.errors import WeightsError
from octavo.layers.quantized import QuantizedWeight, Weight
from octavo.weights.naming import NAMINGS, Naming
from octavo.weights.source import Keep, WeightSource

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What becomes of one of the file's tensors, or of a part of it."""

    target: str
    """The decoder's name."""
    rows: slice | torch.Tensor | None = None
    """Which rows: a range, or [count] int64; None: all."""
    transposed: bool = False
    """The file holds [in_features, out_features]; turned before rows are taken."""
    item: int | None = None
    """Which entry of a stack of matrices."""
    place: tuple[int, int] | None = None
    """(i, count): it is row i of a target that has so many."""

    def shape(self, shape: Shape) -> Shape:
        """The shape it has, of the tensor's."""
        shape = shape if self.item is None else shape[1:]
        shape = shape[::-1] if self.transposed else shape
        if isinstance(self.rows, slice):
            shape = (len(range(*self.rows.indices(shape[0]))), *shape[1:])
        elif self.rows is not None:
            shape = (len(self.rows), *shape[1:])
        return shape if self.place is None else (self.place[1], *shape)

    def cut(self, weight: Weight) -> Weight:
        """The piece itself, but for `place`."""
        if isinstance(weight, QuantizedWeight):
            assert self.keeps_format
            return weight if self.rows is None else weight.rows(self.rows)
        tensor = weight if self.item is None else weight[self.item]
        tensor = tensor.t() if self.transposed and tensor.ndim > 1 else tensor
        return tensor if self.rows is None else tensor[self.rows]

    @property
    def keeps_format(self) -> bool:
        """Whether it can be cut out of a quantized matrix."""
        return not self.transposed and self.item is None and self.place is None


def canonical(source: WeightSource, arch: ModelArch) -> WeightSource:
    """`source`, a Hugging Face checkpoint of `arch`, under the decoder's names.

    Raises `WeightsError` for a fused matrix whose rows are not those that `arch` gives.
    """
    naming = NAMINGS.get(arch.architecture)
    if naming is None:
        return source
    return CanonicalSource(source, arch, naming)


class CanonicalSource:
    """A `WeightSource` that renames, splits, turns and joins what another one holds."""

    def __init__(self, source: WeightSource, arch: ModelArch, naming: Naming) -> None:
        self.name = source.name
        self._source, self._arch, self._naming = source, arch, naming
        shapes = source.shapes()
        self._pieces = {
            name: self._split(name, shape)
            for name, shape in shapes.items()
            if not naming.is_left_out(name)
        }
        self._shapes = {
            piece.target: piece.shape(shapes[name])
            for name, pieces in self._pieces.items()
            for piece in pieces
        }
        self._made = self._norms_without_weights()

    def shapes(self) -> dict[str, Shape]:
        """See `WeightSource`."""
        return self._shapes | self._made

    @property
    def num_bytes(self) -> int:
        """See `WeightSource`."""
        return self._source.num_bytes

    def tensors(
        self, dtype: torch.dtype | None = None, keep: Keep | None = None
    ) -> Iterator[tuple[str, Weight, int]]:
        """See `WeightSource`; the bytes of what is left out count for what comes next."""
        stacks: dict[str, dict[int, torch.Tensor]] = {}
        read_bytes = 0
        for name, weight, num_bytes in self._source.tensors(dtype, self._keep_in_file(keep)):
            read_bytes += num_bytes
            for piece in self._pieces.get(name, []):
                done = self._finished(piece, piece.cut(weight), stacks)
                if done is not None:
                    yield piece.target, self._offset(piece.target, done), read_bytes
                    read_bytes = 0
        for name, shape in self._made.items():
            yield name, torch.ones(shape), 0

    def _keep_in_file(self, keep: Keep | None) -> Keep | None:
        """`keep`, asked by the file's names."""
        if keep is None:
            return None

        def kept(name: str) -> bool:
            pieces = self._pieces.get(name, [])
            return bool(pieces) and all(p.keeps_format and keep(p.target) for p in pieces)

        return kept

    @staticmethod
    def _finished(
        piece: Piece, weight: Weight, stacks: dict[str, dict[int, torch.Tensor]]
    ) -> Weight | None:
        """The target's tensor; None while others of its rows are still to come."""
        if piece.place is None:
            return weight
        assert isinstance(weight, torch.Tensor)
        index, count = piece.place
        rows = stacks.setdefault(piece.target, {})
        rows[index] = weight
        if len(rows) < count:
            return None
        del stacks[piece.target]
        return torch.stack([rows[i] for i in range(count)])

    def _offset(self, target: str, weight: Weight) -> Weight:
        offset = self._arch.norm_offset
        if not offset or not target.endswith("norm.weight"):
            return weight
        assert isinstance(weight, torch.Tensor)
        # in float32: half a type's digits would go into the 1
        return weight.float() + offset

    def _split(self, name: str, shape: Shape) -> list[Piece]:
        """What becomes of a tensor; an unknown one stays, for the loader to complain about."""
        found = self._naming.parse(name)
        if found is None:
            return [Piece(name)]
        module, kind = found.module, found.kind
        prefix, _, last = module.rpartition(".")
        if found.stacked:
            return self._experts(name, prefix, last, shape)
        if last == "qkv_proj":
            return self._qkv(name, shape, prefix, kind, found.transposed)
        if last == "gate_up_proj":
            half = self._arch.intermediate_size
            self._expect(name, shape[0], 2 * half)
            cuts = {"gate_proj": slice(0, half), "up_proj": slice(half, 2 * half)}
            return [Piece(f"{prefix}.{part}.{kind}", rows) for part, rows in cuts.items()]
        if found.head is not None:
            count = self._arch.num_heads if last == "q_norm" else self._arch.num_kv_heads
            return [Piece(f"{module}.{kind}", place=(found.head, count))]
        return [Piece(f"{module}.{kind}", transposed=found.transposed)]

    def _qkv(
        self, name: str, shape: Shape, prefix: str, kind: str, transposed: bool
    ) -> list[Piece]:
        """q, k and v out of one: one below the other, or for each key head its queries, it, and
        its values (GPT-NeoX, Falcon, InternLM 2)."""
        arch = self._arch
        num_rows = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
        self._expect(name, shape[-1] if transposed else shape[0], num_rows)
        rows: dict[str, slice | torch.Tensor]
        q_size, kv_size = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        if self._naming.grouped_qkv and arch.num_kv_heads > 1:
            group = arch.num_heads // arch.num_kv_heads
            by_group = torch.arange(num_rows).view(arch.num_kv_heads, group + 2, arch.head_dim)
            rows = {
                "q_proj": by_group[:, :group].reshape(-1),
                "k_proj": by_group[:, group].reshape(-1),
                "v_proj": by_group[:, group + 1].reshape(-1),
            }
        else:
            rows = {
                "q_proj": slice(0, q_size),
                "k_proj": slice(q_size, q_size + kv_size),
                "v_proj": slice(q_size + kv_size, num_rows),
            }
        turned = transposed and kind == "weight"
        return [Piece(f"{prefix}.{part}.{kind}", cut, turned) for part, cut in rows.items()]

    def _experts(self, name: str, prefix: str, last: str, shape: Shape) -> list[Piece]:
        """All experts' matrices in one, as transformers 5 holds them in memory."""
        moe = self._arch.moe
        assert moe is not None
        self._expect(name, shape[0], moe.num_experts)
        cuts: dict[str, slice | None] = {last: None}
        if last == "gate_up_proj":
            self._expect(name, shape[1], 2 * moe.expert_size)
            size = moe.expert_size
            cuts = {"gate_proj": slice(0, size), "up_proj": slice(size, 2 * size)}
        return [
            Piece(f"{prefix}.{expert}.{part}.weight", rows, item=expert)
            for expert in range(moe.num_experts)
            for part, rows in cuts.items()
        ]

    def _expect(self, name: str, count: int, expected: int) -> None:
        if count != expected:
            raise WeightsError(
                f"{self.name}: {name} has {count} rows, and {expected} by its configuration; "
                "weights and configuration must be of one model: download both again"
            )

    def _norms_without_weights(self) -> dict[str, Shape]:
        """LayerNorms that the family has no weights for (OLMo 1, some OPT): they become ones."""
        arch = self._arch
        if arch.norm != "layer" or arch.norm_bias or _FINAL_NORM in self._shapes:
            return {}
        layer = ("input_layernorm", "post_attention_layernorm")
        names = [f"model.layers.{i}.{n}.weight" for i in range(arch.num_layers) for n in layer]
        return {name: (arch.hidden_size,) for name in [*names, _FINAL_NORM]}


_FINAL_NORM = "model.norm.weight"
