"""What a layer is made of: attention or MLP, each with the weights that it waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from octavo.attention.base import ForwardContext
from octavo.layers.linear import Linear, make_linear
from octavo.layers.norm import Norm
from octavo.layers.quantized import Weight

Shapes = dict[str, tuple[int, ...]]
Arrived = Mapping[str, Weight]
"""Weights by their canonical names."""


class Pending:
    """Weights that wait for each other; `finish` gets them once all are there.

    shapes: canonical name -> shape; quantizable: whether they make linear layers that may hold
    their weight quantized; wide: whether they are held in float32 whatever the model computes in.
    """

    def __init__(
        self,
        shapes: Shapes,
        finish: Callable[[Arrived], None],
        quantizable: bool = False,
        wide: bool = False,
    ) -> None:
        self.shapes, self.finish = shapes, finish
        self.quantizable, self.wide = quantizable, wide
        self.arrived: dict[str, Weight] = {}

    def put(self, name: str, weight: Weight) -> None:
        """Take one of them."""
        self.arrived[name] = weight
        if len(self.arrived) == len(self.shapes):
            self.finish(self.arrived)
            self.arrived = {}


class Sublayer(Protocol):
    """One branch of a layer: attention, an MLP, a mixture of experts."""

    def pending(self) -> list[Pending]:
        """What it waits for, as groups of weights that belong together."""
        ...

    def add_to(self, x: Tensor, norm: Norm, ctx: ForwardContext) -> None:
        """`x += f(norm(x))` for the residual stream x [num_tokens, hidden_size], in place."""
        ...

    def compute(self, x: Tensor, norm: Norm | None, ctx: ForwardContext, out: Tensor) -> Tensor:
        """`f(norm(x))`, or f(x) without a norm, into out [num_tokens, hidden_size]; x stays. out is
        none of the buffers that `f` uses."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of its weights."""
        ...

    @property
    def replayable(self) -> bool:
        """Whether `add_to` makes nothing but calls that `ops.cpu.trace` records."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether it can be recorded in a CUDA graph: nothing waits for the device, and no address
        or grid depends on the values of a step."""
        ...

    def transient_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """What it allocates in a step beside the workspace, at most at one time, for activations
        of so many bytes each."""
        ...


def linear_shapes(name: str, out_features: int, in_features: int, bias: bool) -> Shapes:
    """Of `name.weight` and, if there is one, `name.bias`."""
    shapes: Shapes = {f"{name}.weight": (out_features, in_features)}
    if bias:
        shapes[f"{name}.bias"] = (out_features,)
    return shapes


def parts_of(arrived: Arrived, parts: tuple[str, ...], kind: str) -> list[Weight]:
    """The named parts' weights (or biases), in that order; empty where there are none."""
    ends = [f".{part}.{kind}" for part in parts]
    return [weight for end in ends for name, weight in arrived.items() if name.endswith(end)]


def bias_of(arrived: Arrived, parts: tuple[str, ...]) -> list[Tensor]:
    """The named parts' biases, which are never quantized."""
    return [bias for bias in parts_of(arrived, parts, "bias") if isinstance(bias, Tensor)]


def tensor_of(arrived: Arrived, kind: str) -> Tensor | None:
    """The only tensor whose name ends in `kind`; None where there is none."""
    found = [weight for name, weight in arrived.items() if name.rsplit(".", 1)[-1] == kind]
    if not found:
        return None
    (tensor,) = found
    assert isinstance(tensor, Tensor), f"{kind} came quantized"
    return tensor


def linear_of(arrived: Arrived, quantize: str | None = None) -> Linear:
    """A linear layer of one `weight` and perhaps a `bias`."""
    (weight,) = [weight for name, weight in arrived.items() if name.endswith(".weight")]
    return make_linear(weight, tensor_of(arrived, "bias"), quantize)
