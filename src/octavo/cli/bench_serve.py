"""`octavo bench serve`: a load for any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.flags import flags, parse
from octavo.cli.start import note
from octavo.errors import ConfigError, InvalidRequestError

if TYPE_CHECKING:
    from octavo.bench.serve.client import Timeline
    from octavo.bench.serve.load import Target
    from octavo.bench.serve.prompts import Tokenizer
    from octavo.bench.serve.result import ServeResult
    from octavo.bench.workload import Sample


@flags
@dataclass(frozen=True, kw_only=True)
class Serve:
    """Send requests to a server as its clients would, and tell what they see.

    Works with any server that has OpenAI's API, so that several can be measured by one client.
    """

    base_url: str = "http://127.0.0.1:8000"
    """The server, without /v1."""
    endpoint: str = "/v1/completions"
    """/v1/completions or /v1/chat/completions."""
    model: str | None = None
    """Name to ask for; by default the first that the server lists."""
    tokenizer: str | None = None
    """Model whose tokenizer makes the prompts; by default that of --model."""
    api_key: str | None = None
    """Sent as Authorization: Bearer; OPENAI_API_KEY if that is set."""
    header: list[str] | None = None
    """More headers, each as name=value."""
    extra_body: str = "{}"
    """JSON object: more fields of each request."""
    dataset: Path | None = None
    """Lengths or prompts from a .csv or .jsonl file (.gz or not): rows with input_tokens and
    output_tokens, or with prompt_ids and max_tokens; arrival_s for --request-rate trace. By
    default, random lengths."""
    num_prompts: int = 100
    """How many requests."""
    random_input_len: int = 160
    """Mean prompt length of random requests."""
    random_output_len: int = 128
    """Mean output length of random requests."""
    random_range_ratio: float = 0.5
    """Random lengths are up to this share shorter or longer than the mean."""
    max_model_len: int = 4096
    """Rows of the dataset longer than this, prompt and output together, are left out."""
    prompt_kind: str = "ids"
    """ids: prompts are sent as token ids; text: as text of as many tokens."""
    request_rate: str = "inf"
    """Requests a second; inf: all at once; trace: when the dataset says."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of gaps: 1 is a Poisson process, less comes in bursts."""
    trace_speed: float = 1.0
    """How many times as fast as recorded under --request-rate trace."""
    max_concurrency: int | None = None
    """Most requests under way: with --request-rate inf, so many clients that ask one thing after
    another."""
    ignore_eos: bool = False
    """Ask for answers of exactly the length wanted, of servers that know how (octavo, vLLM)."""
    temperature: float = 0.0
    """Of each request."""
    num_warmups: int = 1
    """Requests before the measured ones."""
    ready_check_timeout_sec: float = 60.0
    """Wait so long for the server to be ready."""
    timeout_s: float | None = None
    """Longest time for one answer."""
    goodput: list[str] | None = None
    """Count requests that met limits in milliseconds, such as ttft:500 tpot:50 e2el:9000."""
    max_errors: int | None = None
    """Exit status 1 if more requests than this failed."""
    seed: int = 0
    """Of lengths, prompts and arrivals."""
    label: str = ""
    """Name of this run in comparisons."""
    save_result: Path | None = None
    """File for the result, as JSON."""
    plot: Path | None = None
    """File for a picture of the times (.svg, .png)."""
    json: bool = False
    """End with one line of JSON."""
    compare: list[Path] | None = None
    """Saved results to show side by side, instead of measuring."""


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command; returns the exit status."""
    args = parse(Serve, prog, argv)
    if args.compare:
        from octavo.bench.serve.result import compare

        print(compare(args.compare))
        return 0
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        result = runner.run(_measure(args))
    print(result)
    _keep(args, result)
    num_failed = result.num_requests - result.num_completed
    too_many = args.max_errors is not None and num_failed > args.max_errors
    return 1 if too_many or not result.num_completed else 0


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, which halves what a chunk costs the client; asyncio's where it is not."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def _measure(args: Serve) -> ServeResult:
    from tqdm import tqdm

    from octavo.bench.serve.arrivals import random_arrivals, trace_arrivals
    from octavo.bench.serve.load import Target, run_load, wait_ready
    from octavo.bench.serve.prompts import in_words, make_jobs, word_ids
    from octavo.bench.serve.result import parse_slo, summarize

    slo = parse_slo(args.goodput or ())
    if args.prompt_kind not in ("ids", "text"):
        raise ConfigError(f"--prompt-kind must be ids or text, got {args.prompt_kind!r}")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {args.max_concurrency}")
    target = Target(
        base_url=args.base_url, endpoint=args.endpoint, model=args.model, headers=_headers(args),
        timeout_s=args.timeout_s,
    )  # fmt: skip
    model = await wait_ready(target, args.ready_check_timeout_sec, tell=note)
    tokenizer = _tokenizer(args.tokenizer or model)
    about, samples = _samples(args, tokenizer)
    samples = in_words(samples, word_ids(tokenizer), args.seed)
    is_trace = args.request_rate == "trace"
    if is_trace:
        arrivals = trace_arrivals([sample.arrival_s for sample in samples], args.trace_speed)
    else:
        arrivals = random_arrivals(len(samples), _rate(args), args.burstiness, args.seed)
    jobs = make_jobs(
        samples, arrivals, endpoint=args.endpoint, model=model, ignore_eos=args.ignore_eos,
        temperature=args.temperature, tokenizer=tokenizer if args.prompt_kind == "text" else None,
        extra_body=_extra_body(args),
    )  # fmt: skip
    await _warm_up(target, jobs[: args.num_warmups])
    lines: list[Timeline] = []
    with tqdm(total=len(jobs), unit="request", file=sys.stderr) as bar:

        def ended(_: Timeline) -> None:
            bar.update()

        lines = await run_load(target, jobs, max_concurrency=args.max_concurrency, on_end=ended)
    return summarize(
        lines, label=args.label, base_url=args.base_url, model=model, workload=about,
        load=_load(args), slo=slo, settings=_settings(args),
    )  # fmt: skip


async def _warm_up(target: Target, jobs: Sequence[Any]) -> None:
    from octavo.bench.serve.load import Job, run_load

    first = [Job(job.body, 0.0, job.num_input, job.num_output) for job in jobs]
    lines = await run_load(target, first, max_concurrency=None, on_end=lambda _: None)
    failed = [line.error for line in lines if line.error is not None]
    if failed and len(failed) == len(lines):
        raise ConfigError(
            f"the server does not answer the first request ({failed[0]}): check --endpoint, "
            "--model and --extra-body, or --prompt-kind text for a server that takes no token ids"
        )


def _samples(args: Serve, tokenizer: Tokenizer) -> tuple[str, list[Sample]]:
    from octavo.bench.workload import random_workload, read_workload

    if args.dataset is None:
        load = random_workload(
            args.num_prompts, args.random_input_len, args.random_output_len,
            args.random_range_ratio, vocab_size=tokenizer.vocab_size,
            max_model_len=args.max_model_len, seed=args.seed,
        )  # fmt: skip
    else:
        load = read_workload(
            args.dataset, args.num_prompts, vocab_size=tokenizer.vocab_size,
            max_model_len=args.max_model_len, seed=args.seed,
            in_order=args.request_rate == "trace",
        )  # fmt: skip
    if load.num_too_long:
        note(f"{load.num_too_long:,} rows are longer than --max-model-len and left out")
    return load.description, load.samples


def _tokenizer(name: str) -> Tokenizer:
    from octavo.config import EngineConfig
    from octavo.engine.remote.text import TextSide
    from octavo.errors import ModelError

    try:
        tokenizer = TextSide.load(EngineConfig(model=name, tokenizer=name)).tokenizer
    except ModelError as error:
        raise ConfigError(f"prompts are made with the tokenizer of {name!r}, and {error}; name a "
                          "model that is here with --tokenizer") from None  # fmt: skip
    assert tokenizer is not None
    return tokenizer


def _headers(args: Serve) -> dict[str, str]:
    headers = {}
    for word in args.header or ():
        name, found, value = word.partition("=")
        if not found:
            raise ConfigError(f"--header {word!r}: write name=value")
        headers[name] = value
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    return headers | ({"Authorization": f"Bearer {key}"} if key else {})


def _extra_body(args: Serve) -> dict[str, Any]:
    try:
        extra = json.loads(args.extra_body)
    except ValueError as error:
        raise ConfigError(f"--extra-body is no JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body must be a JSON object, got {args.extra_body!r:.80}")
    return extra


def _rate(args: Serve) -> float:
    try:
        return float(args.request_rate)
    except ValueError:
        raise InvalidRequestError(
            f"--request-rate must be a number, inf or trace, got {args.request_rate!r}",
            parameter="request_rate",
        ) from None


def _settings(args: Serve) -> dict[str, Any]:
    """What would have to be the same for another run to be comparable."""
    names = (
        "endpoint", "prompt_kind", "ignore_eos", "temperature", "seed", "num_warmups", "extra_body",
        "timeout_s",
    )  # fmt: skip
    return {name: getattr(args, name) for name in names}


def _load(args: Serve) -> str:
    how = {"inf": "all at once", "trace": f"as recorded, {args.trace_speed:g} x as fast"}.get(
        args.request_rate, f"{args.request_rate} a second (burstiness {args.burstiness:g})"
    )
    if args.max_concurrency is None:
        return how
    if args.request_rate == "inf":
        return f"{args.max_concurrency} clients, one request after another each"
    return f"{how}, at most {args.max_concurrency} at a time"


def _keep(args: Serve, result: ServeResult) -> None:
    from octavo.bench.serve.plots import plot, save

    if args.save_result is not None:
        save(result, args.save_result)
    if args.plot is not None:
        plot([result], args.plot)
    if args.json:
        print(json.dumps(result.as_dict()))
