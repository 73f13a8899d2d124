"""`octavo bench serve`: a load for any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from octavo.bench.serve.times import METRICS, parse_metrics, parse_shares
from octavo.cli.flags import flags, parse
from octavo.cli.start import note
from octavo.errors import ConfigError, InvalidRequestError
from octavo.util import flag_name

if TYPE_CHECKING:
    from octavo.bench.serve.client import Timeline
    from octavo.bench.serve.load import Target
    from octavo.bench.serve.prompts import Tokenizer
    from octavo.bench.serve.result import ServeResult
    from octavo.bench.workload import Sample

DatasetName = Literal["random", "sharegpt", "custom", "lengths"]
_TEXTS = ("sharegpt", "custom")
_OF_FILES = (*_TEXTS, "lengths")
_OF_DATASET = {
    "random_input_len": "random", "random_output_len": "random", "random_range_ratio": "random",
    "sharegpt_output_len": "sharegpt", "custom_output_len": "custom",
}  # fmt: skip
"""Flags that only one kind of dataset knows."""


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
    dataset_name: DatasetName = "random"
    """random: random words. The others need --dataset-path. sharegpt: first turns of ShareGPT's
    conversations (JSON), of those lengths that vLLM's benchmark takes; custom: rows (.jsonl) with
    prompt, a text, and output_tokens; lengths: rows (.csv or .jsonl, .gz or not) with input_tokens
    and output_tokens, or with prompt_ids and max_tokens, and arrival_s for --request-rate trace."""
    dataset_path: Path | None = None
    """File of the dataset."""
    sharegpt_output_len: int | None = None
    """Tokens to ask for; by default as many as the recorded answer has."""
    custom_output_len: int | None = None
    """Tokens to ask for; by default output_tokens of the row, or 256."""
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
    prompt_kind: Literal["ids", "text"] | None = None
    """ids: prompts are sent as token ids; text: as text of as many tokens. By default text to chat
    and of sharegpt and custom, else ids."""
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
    max_retries: int = 0
    """How often a request that is refused for the time being (HTTP 429 or 503) is sent again, after
    the seconds of its Retry-After; its times count from when it was first sent. By default it is
    not, and counts as an error."""
    goodput: list[str] | None = None
    """Count requests that met limits in milliseconds, such as ttft:500 tpot:50 e2el:9000."""
    percentile_metrics: str = ",".join(METRICS)
    """Which times to show, with commas between them: ttft, tpot, itl (between chunks), e2el."""
    metric_percentiles: str = "50,90,99"
    """Which percentiles of them."""
    max_errors: int | None = None
    """Exit status 1 if more requests than this failed."""
    seed: int = 0
    """Of lengths, prompts and arrivals."""
    label: str = ""
    """Name of this run in comparisons."""
    save_result: bool = False
    """Save the result as JSON, with the names of vLLM's benchmark, too."""
    result_dir: Path | None = None
    """Folder to save it in; by default the current one."""
    result_filename: str | None = None
    """Name of the file; by default one of label, rate, concurrency, model and time."""
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
    metrics = parse_metrics(args.percentile_metrics)
    _check(args)
    with asyncio.Runner(loop_factory=_fast_loop()) as runner:
        result = runner.run(_measure(args))
    print(result.text(metrics))
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

    slo, shares = parse_slo(args.goodput or ()), parse_shares(args.metric_percentiles)
    target = Target(
        base_url=args.base_url, endpoint=args.endpoint, model=args.model, headers=_headers(args),
        timeout_s=args.timeout_s, max_retries=args.max_retries,
    )  # fmt: skip
    model = await wait_ready(target, args.ready_check_timeout_sec, tell=note)
    tokenizer = _tokenizer(args.tokenizer or model)
    about, samples = _samples(args, tokenizer)
    if args.dataset_name not in _TEXTS:
        samples = in_words(samples, word_ids(tokenizer), args.seed)
    is_trace = args.request_rate == "trace"
    if is_trace:
        arrivals = trace_arrivals([sample.arrival_s for sample in samples], args.trace_speed)
    else:
        arrivals = random_arrivals(len(samples), _rate(args), args.burstiness, args.seed)
    jobs = make_jobs(
        samples, arrivals, endpoint=args.endpoint, model=model, ignore_eos=args.ignore_eos,
        temperature=args.temperature, tokenizer=tokenizer if _is_text(args) else None,
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
        load=_load(args), slo=slo, settings=_settings(args), shares=shares,
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


def _check(args: Serve) -> None:
    """Refuse what cannot be measured, and flags that would have no effect."""
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {args.max_concurrency}")
    if args.max_retries < 0:
        raise ConfigError(f"--max-retries must be at least 0, got {args.max_retries}")
    name, path = args.dataset_name, args.dataset_path
    if name == "random" and path is not None:
        others = ", ".join(_OF_FILES)
        raise ConfigError(f"--dataset-path {path} needs --dataset-name: one of {others}")
    if name != "random" and path is None:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path")
    for flag, owner in _OF_DATASET.items():
        if name != owner and getattr(args, flag) != getattr(Serve, flag):
            raise ConfigError(
                f"{flag_name(flag)} is for --dataset-name {owner}, and this is {name}: drop one"
            )
    for flag in ("result_dir", "result_filename"):
        if getattr(args, flag) is not None and not args.save_result:
            raise ConfigError(f"{flag_name(flag)} needs --save-result")


def _is_text(args: Serve) -> bool:
    """Whether prompts are sent as text."""
    if args.prompt_kind is not None:
        return args.prompt_kind == "text"
    return args.dataset_name in _TEXTS or args.endpoint.endswith("/chat/completions")


def _samples(args: Serve, tokenizer: Tokenizer) -> tuple[str, list[Sample]]:
    from octavo.bench.serve.datasets import read_texts
    from octavo.bench.workload import random_workload, read_workload

    name, path = args.dataset_name, args.dataset_path
    limits: dict[str, Any] = {"max_model_len": args.max_model_len, "seed": args.seed}
    if path is None:
        load = random_workload(
            args.num_prompts, args.random_input_len, args.random_output_len,
            args.random_range_ratio, vocab_size=tokenizer.vocab_size, **limits,
        )  # fmt: skip
    elif name == "sharegpt" or name == "custom":
        output_len = args.sharegpt_output_len if name == "sharegpt" else args.custom_output_len
        load = read_texts(name, path, args.num_prompts, tokenizer, output_len=output_len, **limits)
    else:
        load = read_workload(
            path, args.num_prompts, vocab_size=tokenizer.vocab_size,
            in_order=args.request_rate == "trace", **limits,
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
        "timeout_s", "max_retries",
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
    from octavo.bench.serve.plots import plot
    from octavo.bench.serve.saved import file_name, save

    if args.save_result:
        name = args.result_filename or file_name(
            args.label, args.request_rate, args.max_concurrency, result.model
        )
        path = (args.result_dir or Path()) / name
        save(result, path, _about(args, result))
        note(f"saved as {path}")
    if args.plot is not None:
        plot([result], args.plot)
    if args.json:
        print(json.dumps(result.as_dict()))


def _about(args: Serve, result: ServeResult) -> dict[str, Any]:
    """How a result was made, as vLLM's benchmark tells it."""
    rate: float | str = args.request_rate
    if rate != "trace":
        rate = "inf" if math.isinf(_rate(args)) else _rate(args)
    return {
        "backend": "openai-chat" if args.endpoint.endswith("/chat/completions") else "openai",
        "tokenizer_id": args.tokenizer or result.model,
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
