"""Flags of the lab's requests: where their lengths come from, and when they come."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.flags import flags
from octavo.errors import TokenizerError
from octavo.lab.sources import Tokenize, TraceFormat
from octavo.lab.workload import Arrival, Workload, load_trace, make_workload

if TYPE_CHECKING:
    from octavo.lab.trace import Trace


@flags
@dataclass(frozen=True, kw_only=True)
class TraceFlags:
    """The requests: where their lengths come from."""

    trace: str = "sharegpt"
    """A file (CSV of lengths, Azure, BurstGPT, Mooncake or other hash-id JSONL, ShareGPT JSON; .gz
    or not), or synthetic lengths that octavo brings: sharegpt, alpaca."""
    trace_format: TraceFormat = "auto"
    """What the file is; auto looks at what is in it. Of a column of times without a unit in its
    name, seconds are meant, milliseconds under the names of mooncake; --time-scale corrects that.
    """
    num_requests: int | None = None
    """The first so many; of synthetic lengths, draw so many. A list that has fewer is repeated,
    unless its requests come at its own times."""
    skip_bad_lines: bool = False
    """Leave out lines that cannot be used, and say how many, instead of refusing the file."""
    max_trace_tokens: int | None = None
    """Leave out requests whose prompt and output are longer together."""
    length_scale: float = 1.0
    """Multiply all lengths, and the tokens that a hash id stands for: 0.125 makes a workload of
    long prompts fit a small pool, with the same sharing."""
    tokenizer: Path | None = None
    """tokenizer.json, or the folder that has one: counts the tokens of ShareGPT texts."""
    seed: int = 0
    """Of everything that is drawn: lengths, arrivals, priorities."""

    def left_out(self, trace: Trace) -> str:
        """`5 requests`: what was passed over, in words; empty if nothing was."""
        kinds = "requests or lines" if self.skip_bad_lines else "requests"
        return f"{trace.num_skipped:,} {kinds}" if trace.num_skipped else ""

    def load(self) -> Trace:
        """The trace. Raises `TraceError`, `ConfigError`, `TokenizerError`."""
        return load_trace(
            self.trace,
            format=self.trace_format,
            skip_bad_lines=self.skip_bad_lines,
            max_tokens=self.max_trace_tokens,
            limit=self.num_requests,
            tokenize=None if self.tokenizer is None else token_counter(self.tokenizer),
            length_scale=self.length_scale,
            seed=self.seed,
        )


@flags
@dataclass(frozen=True, kw_only=True)
class ArrivalFlags:
    """The requests: when they come, and what each asks for."""

    arrival: Arrival | None = None
    """trace: at the times of the trace. poisson: --rate a second. gamma: the same in bursts, by
    --cv. closed: --concurrency at a time. paper: drawn as the artifact of the PagedAttention paper
    does, --rate a second for --duration. all-at-once: at the start. By default poisson where there
    is a --rate, closed where there is a --concurrency, else trace if it has times, else
    all-at-once."""
    rate: float | None = None
    """Requests a second, on average."""
    cv: float | None = None
    """Coefficient of variation of the gaps between requests, of gamma: 1 is Poisson, more is
    burstier; 2 by default."""
    concurrency: int | None = None
    """Requests that are there at any time."""
    duration: float | None = None
    """Seconds in which requests come; those behind are left out."""
    time_scale: float = 1.0
    """Multiply the times of the trace: 2 halves its rate, 0.001 reads milliseconds."""
    n: int | None = None
    """Samples of each prompt; as the trace says by default, else 1."""
    beam_width: int | None = None
    """Decode by beam search of that width."""
    shared_prefix_tokens: int = 0
    """Put a text of so many tokens, the same for all, in front of every prompt."""
    priorities: tuple[int, ...] = ()
    """Give each request one of these priorities, drawn evenly; smaller runs earlier, under
    --scheduling-policy priority."""

    def workload(self, trace: Trace, num_requests: int | None = None, seed: int = 0) -> Workload:
        """The trace's requests with times. Raises `ConfigError`.

        num_requests: repeat the trace until there are so many; None: as many as it has.
        """
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return make_workload(trace, num_requests=num_requests, seed=seed, **values)


def token_counter(path: Path) -> Tokenize:
    """The number of tokens of a text, by a tokenizer.json. Raises `TokenizerError`."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TokenizerError(f"--tokenizer {path}: no tokenizer.json there")
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError(f"--tokenizer {file}: {error}") from None
    return lambda text: len(tokenizer.encode(text).ids)
