"""How long a step takes, by what is in it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from octavo.errors import ConfigError


class StepShape(NamedTuple):
    """What decides how long a step takes. Sums over its sequences; of pairs of tokens the mean over
    layers, of which some may look back a window only (`octavo.attended`)."""

    num_prefill_tokens: int
    """Tokens of prompts (and of what is computed again): shares of more than one token, or that do
    not sample."""
    prefill_context: int
    """Pairs of a prompt's token and a token before it or itself: the work of their attention."""
    num_decodes: int
    """Sequences that compute their last token only."""
    decode_context: int
    """Tokens whose K and V the decodes read, each for its own: the sum of their lengths."""
    num_samples: int
    """Tokens that are drawn."""
    num_host_blocks: int = 0
    """Blocks copied to or from host memory."""
    num_copied_blocks: int = 0
    """Blocks copied inside the pool."""
    num_prompts: int = 0
    """Sequences that the prefill tokens belong to."""


class StepCosts(Protocol):
    """A model of a machine that runs a model."""

    @property
    def name(self) -> str:
        """For people: the model and the machine, and where the figures are from."""
        ...

    def step_s(self, shape: StepShape) -> float:
        """Seconds that a step takes, from being planned to its tokens. The same for the same
        shape, always: the clock of a simulation is made of these."""
        ...

    def copy_s(self, num_host_blocks: int) -> float:
        """Seconds of them that go into copies to and from host memory."""
        ...


class FixedCosts:
    """So long for a step, so long for each of its tokens."""

    def __init__(self, step_s: float = 0.04, token_s: float = 2e-4, block_s: float = 1e-4) -> None:
        self._step_s, self._token_s, self._block_s = step_s, token_s, block_s
        self.name = f"fixed: {1e3 * step_s:g} ms a step and {1e3 * token_s:g} ms a token"

    @classmethod
    def parse(cls, text: str) -> FixedCosts:
        """`fixed:0.04,0.0002`: seconds a step and seconds a token. Raises `ConfigError`."""
        try:
            step_s, token_s = (float(part) for part in text.removeprefix("fixed:").split(","))
        except ValueError:
            step_s = token_s = -1.0
        if not (min(step_s, token_s) >= 0 and 0 < step_s + token_s < float("inf")):
            raise ConfigError(
                f"--costs {text}: write fixed:STEP,TOKEN, two numbers of seconds that are not both "
                "0, such as fixed:0.04,0.0002"
            )
        return cls(step_s, token_s)

    def step_s(self, shape: StepShape) -> float:
        """See `StepCosts.step_s`."""
        num_tokens = shape.num_prefill_tokens + shape.num_decodes
        return self._step_s + self._token_s * num_tokens + self.copy_s(shape.num_host_blocks)

    def copy_s(self, num_host_blocks: int) -> float:
        """See `StepCosts.copy_s`."""
        return self._block_s * num_host_blocks
