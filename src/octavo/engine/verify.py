"""A model computed by octavo and by transformers: do logits agree, and if not, from which layer on.

transformers' own code is the reference, run in float32 with its eager attention on the same files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.config import EngineConfig
from octavo.engine.build import load_model_of, on_cpu
from octavo.engine.verify_reference import load_reference, other_tokens, their_logits
from octavo.errors import ConfigError
from octavo.models.decoder import Decoder
from octavo.plan import NewSeq, SeqPlan, StepPlan
from octavo.request import SamplerParams
from octavo.runner import memory
from octavo.runner.runner import Runner
from octavo.text.tokenizer import load_tokenizer
from octavo.util import cdiv
from octavo.weights.locate import locate
from octavo.weights.progress import Progress

PROMPTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + ",
    "In 1455 Johannes Gutenberg printed a Bible with movable type. Ένα βιβλίο 書 📚 is",
)
_TOLERANCES = {"float32": (2e-3, 1e-3), "bfloat16": (1.0, 0.1)}
"""Absolute, and as a share of the largest logit."""


@dataclass(frozen=True, slots=True)
class PromptCheck:
    """One prompt, position by position."""

    text: str
    num_tokens: int
    max_error: float
    """Largest difference between two logits."""
    allowed: float
    same_best: int
    """Positions whose most likely next token is the same."""
    same_tokens: bool | None
    """Whether transformers' tokenizer gives the same ids; None: it has none for this model."""

    @property
    def equal(self) -> bool:
        """Within what is allowed; NaN is not."""
        return self.max_error <= self.allowed and self.same_tokens is not False


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """The residual stream behind one layer."""

    layer: int
    max_error: float
    scale: float
    """Root mean square of the reference."""


@dataclass(frozen=True, slots=True)
class Verification:
    """What `octavo models verify` found."""

    model: str
    dtype: str
    prompts: tuple[PromptCheck, ...]
    layers: tuple[LayerCheck, ...]
    """Of the prompt that differs most; empty where all agree."""
    expanded: str | None = None
    """How weights that octavo expanded for transformers are quantized; None: it read the file."""

    @property
    def equal(self) -> bool:
        """Whether all prompts agree."""
        return all(check.equal for check in self.prompts)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "equal": self.equal,
            "expanded": self.expanded,
            "prompts": [
                {
                    "text": c.text, "num_tokens": c.num_tokens, "max_error": c.max_error,
                    "allowed": c.allowed, "same_best": c.same_best, "same_tokens": c.same_tokens,
                }
                for c in self.prompts
            ],
            "layers": [
                {"layer": c.layer, "max_error": c.max_error, "scale": c.scale} for c in self.layers
            ],
        }  # fmt: skip

    def __str__(self) -> str:
        lines = [f"{self.model}, octavo in {self.dtype} against transformers in float32"]
        if self.expanded is not None:
            lines.append(f"(both on weights that octavo expanded: {self.expanded})")
        lines.append("")
        lines.append("  tokens   largest error   allowed   same best token   prompt")
        for c in self.prompts:
            note = "  (other token ids in transformers)" if c.same_tokens is False else ""
            lines.append(
                f"  {c.num_tokens:6}   {c.max_error:13.2e}   {c.allowed:7.1e}   "
                f"{c.same_best:>6} of {c.num_tokens:<6}   {c.text[:40]!r}{note}"
            )
        if self.layers:
            lines += ["", "  layer   largest error   size of the values"]
            lines += [f"  {c.layer:5}   {c.max_error:13.2e}   {c.scale:18.2e}" for c in self.layers]
        differ = any(not c.max_error <= c.allowed for c in self.prompts)
        lines += ["", "logits differ" if differ else "logits agree"]
        return "\n".join(lines)


def verify_model(
    model: str,
    revision: str | None = None,
    *,
    prompts: Sequence[str] = (),
    dtype: Literal["float32", "bfloat16"] = "float32",
    tolerance: float | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Compute `prompts` with both. Raises `ConfigError` without transformers, and `ModelError`s."""
    files = locate(model, revision, "auto", progress)
    texts = tuple(prompts) or PROMPTS
    tokenizer = load_tokenizer(files.tokenizer)
    ids = [tokenizer.encode(text) for text in texts]
    if empty := [text for text, tokens in zip(texts, ids, strict=True) if not tokens]:
        raise ConfigError(f"--prompt {empty[0]!r} has no tokens: give a longer text")
    config = EngineConfig(
        model=model,
        revision=revision,
        device="cpu",
        dtype=dtype,
        quantization="none",
        max_model_len=max(map(len, ids)) + 1,
        enforce_eager=True,
        enable_prefix_caching=False,
        swap_space=0,
        disable_hybrid_kv_cache_manager=True,
        max_num_seqs=1,
    ).for_device("cpu")
    available = memory.available_bytes()
    decoder, _ = load_model_of(files, config, progress)
    runner = on_cpu(config, decoder, available).runner
    assert isinstance(runner, Runner)
    # second, since what octavo says of a file that does not fit is clearer
    reference = load_reference(files)
    other = other_tokens(files)
    absolute, share = _TOLERANCES[dtype]
    checks: list[PromptCheck] = []
    worst, by_layer = -1.0, tuple[LayerCheck, ...]()
    for number, (text, tokens) in enumerate(zip(texts, ids, strict=True)):
        own_layers, own = _own_logits(decoder, runner, number, tokens, config.block_size)
        their_layers, theirs = their_logits(reference.model, decoder.arch.num_layers, tokens)
        error = float((own - theirs).abs().max())
        allowed = max(absolute, share * float(theirs.abs().max()))
        allowed = allowed if tolerance is None else tolerance
        checks.append(
            PromptCheck(
                text=text,
                num_tokens=len(tokens),
                max_error=error,
                allowed=allowed,
                same_best=int((own.argmax(-1) == theirs.argmax(-1)).sum()),
                same_tokens=None if other is None else other(text) == tokens,
            )
        )
        if not error <= allowed and not error <= worst:
            worst, by_layer = error, tuple(_compared(own_layers, their_layers))
    return Verification(model, dtype, tuple(checks), by_layer, reference.expanded)


# -- octavo


@torch.inference_mode()
def _own_logits(
    decoder: Decoder, runner: Runner, seq_id: int, ids: list[int], block_size: int
) -> tuple[list[Tensor], Tensor]:
    """(The residual stream behind each layer, logits), each [num_tokens, ...] float32."""
    blocks = tuple(range(cdiv(len(ids), block_size)))
    plan = StepPlan(
        seq_id,
        new_seqs=[NewSeq(seq_id, ids, SamplerParams())],
        seqs=[SeqPlan(seq_id, 0, len(ids), blocks, None, False)],
        finished=[seq_id - 1] if seq_id else [],
    )
    with _watched(decoder) as seen:
        hidden = runner.forward(plan).clone()
    at_once = len(runner.workspace.logits)
    rows = [
        decoder.logits(hidden[first : first + at_once], runner.workspace).clone()
        for first in range(0, len(hidden), at_once)
    ]
    return seen, torch.cat(rows)


class _Watched:
    """A layer that keeps what it made of the residual stream."""

    def __init__(self, layer: Any, seen: list[Tensor]) -> None:
        self._layer, self._seen = layer, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def forward(self, x: Tensor, ctx: Any) -> None:
        self._layer.forward(x, ctx)
        self._seen.append(x.float().clone())


@contextmanager
def _watched(decoder: Decoder) -> Iterator[list[Tensor]]:
    layers: list[Any] = decoder.layers
    own, seen = list(layers), list[Tensor]()
    layers[:] = [_Watched(layer, seen) for layer in own]
    try:
        yield seen
    finally:
        layers[:] = own


def _compared(own: list[Tensor], theirs: list[Tensor]) -> Iterator[LayerCheck]:
    for layer, (a, b) in enumerate(zip(own, theirs, strict=False)):
        yield LayerCheck(layer, float((a - b).abs().max()), float(b.square().mean().sqrt()))
