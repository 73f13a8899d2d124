"""`octavo generate`: answers prompts."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from octavo.cli.flags import (
    BeamFlags,
    EngineFlags,
    SamplingFlags,
    check_beams,
    flags,
    make_params,
    parse,
)
from octavo.cli.jobs import (
    InputFormat,
    Job,
    Params,
    jsonl_jobs,
    prompts_in,
    read_file,
    read_stdin,
    run_jobs,
)
from octavo.cli.start import note, start_engine
from octavo.errors import ConfigError, InvalidRequestError, OctavoError
from octavo.outputs import RequestOutput
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.cli.blocks import BlockView
    from octavo.events import EngineEvent

Results = Iterator[tuple[Job, RequestOutput | OctavoError]]

_MISSING_PROMPT = (
    "no prompt: give one as an argument (in front of a flag that takes several values, or behind "
    "--), with --file, or through a pipe; 'octavo chat' starts a conversation"
)


@flags
@dataclass(frozen=True, kw_only=True)
class Generate:
    """Answer prompts. The answer is streamed to stdout as its tokens come; all else is stderr.

    A prompt is put to the model as a message, through its chat template, where it has one; --raw
    continues the text as it stands. Several prompts run as one batch and are answered in order.
    """

    prompts: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[PROMPT ...]")
    ] = ()
    """What to answer; without any, and without --file, stdin is read."""
    file: Path | None = None
    """Read prompts from a file, besides those given as arguments."""
    input_format: InputFormat = "auto"
    """What is in the file or stdin: one prompt (text), a prompt a line (lines), or JSONL with
    "prompt" (continued as it stands), "prompt_token_ids" or "messages" in each line, "id",
    "priority", "cache_salt" and parameters of sampling or beam search (with underscores) if
    wanted; auto: jsonl for a name that ends so, else text."""
    jsonl: bool = False
    """Write one JSON object a request, in the order of the input: its id, and all that is known
    of it (texts, token ids, logprobs, finish reasons, times, KV blocks). stdin is then JSONL too
    under --input-format auto."""
    raw: bool = False
    """Continue prompts as they stand, without the chat template."""
    system: str | None = None
    """System message to put before each prompt."""
    show_blocks: bool = False
    """Draw each sequence's block table, logical to physical, as it grows."""
    memory: bool = False
    """Print the memory report at the end: where every byte of the KV pool went."""
    events: bool = False
    """Print at the end what happened for lack of memory: who was preempted, had to wait or was
    refused, why, and until when."""
    sampling: SamplingFlags
    beams: Annotated[BeamFlags, tyro.conf.arg(name="beam search")]
    engine: EngineFlags


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command; 1 if some requests were refused and the others answered, 2 if all were."""
    args = parse(Generate, prog, argv)
    jobs = _jobs(args)
    check_beams(args.beams, [job.params for job in jobs])
    _check(args, jobs)
    config = args.engine.config()
    if any(_samples_alike(job.params) for job in jobs):
        print("samples are equal at temperature 0: add --temperature 0.8", file=sys.stderr)
    with start_engine(config) as llm:
        begin_s = time.monotonic()  # the clock of events
        jobs = [_as_chat(llm, args, job) for job in jobs]
        printer = _print_jsonl if args.jsonl else _print_text
        num_errors = printer(args, llm, jobs)
        if args.memory:
            sys.stdout.flush()
            print(f"\n{llm.memory_report()}", file=sys.stderr)
        if args.events:
            sys.stdout.flush()
            print(f"\n{_events_text(llm.events(), begin_s)}", file=sys.stderr)
    return 0 if not num_errors else 2 if num_errors == len(jobs) else 1


def _events_text(events: Sequence[EngineEvent], begin_s: float) -> str:
    """A line an event, with times since `begin_s`."""
    if not events:
        return "no events"
    lines = ["events, by seconds since the engine was ready"]
    for event in events:
        until_s = None if event.until_s is None else event.until_s - begin_s
        since = dataclasses.replace(event, time_s=event.time_s - begin_s, until_s=until_s)
        lines.append(str(since))
    return "\n".join(lines)


def _jobs(args: Generate) -> list[Job]:
    """Everything that is asked. Raises `InvalidRequestError` when that is nothing."""
    params = partial(make_params, args.sampling, args.beams)
    jobs = [Job(i, params(), prompt=text) for i, text in enumerate(args.prompts)]
    if not all(isinstance(job.prompt, str) and job.prompt.strip() for job in jobs):
        raise InvalidRequestError("a prompt is empty: give it some text", parameter="prompt")
    text = read_file(args.file) if args.file else None if jobs else read_stdin()
    source = str(args.file) if args.file else "stdin"
    if text is not None:
        kind = args.input_format
        if kind == "auto":
            is_jsonl = args.file.suffix == ".jsonl" if args.file else args.jsonl
            kind = "jsonl" if is_jsonl else "text"
        if kind == "jsonl":
            jobs += jsonl_jobs(text, source, params, first=len(jobs))
        else:
            for prompt in prompts_in(text, kind):
                jobs.append(Job(len(jobs), params(), prompt=prompt))
    if not jobs:
        raise InvalidRequestError(_MISSING_PROMPT, parameter="prompt")
    return jobs


def _check(args: Generate, jobs: list[Job]) -> None:
    """Refuse flags that would have no effect."""
    sampling = args.sampling
    for name, used in (
        ("--logprobs", sampling.logprobs is not None),
        ("--prompt-logprobs", sampling.prompt_logprobs is not None),
        ("--no-detokenize", not sampling.detokenize),
        ("--skip-tokenizer-init", args.engine.skip_tokenizer_init),
    ):
        if used and not args.jsonl:
            raise ConfigError(f"{name} shows nothing in text output: add --jsonl")
    if args.raw and args.system is not None:
        raise ConfigError("--system needs the chat template, which --raw leaves out: drop one")
    if args.system is not None and all(job.verbatim or job.messages for job in jobs):
        raise ConfigError(
            '--system does nothing to JSONL: "prompt" is continued as it stands there, and '
            '"messages" hold their own system message'
        )
    if args.input_format != "auto" and args.prompts and args.file is None:
        raise ConfigError("--input-format is for --file and stdin, and neither is read: drop it")


def _samples_alike(params: Params) -> bool:
    return (
        isinstance(params, SamplingParams) and params.num_sequences > 1 and not params.temperature
    )


def _as_chat(llm: LLM, args: Generate, job: Job) -> Job:
    """A plain prompt becomes a message, unless it is verbatim or there is no template."""
    plain = isinstance(job.prompt, str) and not (args.raw or job.verbatim)
    tokenizer = llm.get_tokenizer()
    has_template = tokenizer is not None and tokenizer.chat_template is not None
    if not plain or not (has_template or args.system is not None):
        return job
    messages: list[dict[str, Any]] = [{"role": "user", "content": job.prompt}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    return dataclasses.replace(job, prompt=None, messages=messages)


def _print_text(args: Generate, llm: LLM, jobs: list[Job]) -> int:
    """Stream answers to stdout, one after the other, though they run side by side; how many were
    refused."""
    shared_terminal = sys.stdout.isatty() and sys.stderr.isatty()
    hold_back = args.show_blocks and shared_terminal
    printer = TextPrinter(jobs, with_ids=args.events or args.show_blocks)
    start = time.perf_counter()
    num_tokens, first_s = 0, math.nan
    with _block_view(args, llm, with_text=hold_back) as view:
        for job, result in _watched(run_jobs(llm, jobs), view):
            if math.isnan(first_s):
                first_s = time.perf_counter() - start
            if isinstance(result, RequestOutput) and result.finished:
                num_tokens += sum(len(sample.token_ids) for sample in result.outputs)
            printer.add(job, result)
            if not hold_back:
                printer.print_ready()
    printer.print_ready()
    seconds = time.perf_counter() - start
    note(f"{num_tokens} tokens in {seconds:.1f} s, the first after {first_s:.2f} s")
    return printer.num_errors


def _print_jsonl(args: Generate, llm: LLM, jobs: list[Job]) -> int:
    """One object a request on stdout, in the jobs' order; how many were refused."""
    done: dict[int, dict[str, Any]] = {}
    next_index = num_errors = 0
    with _block_view(args, llm, with_text=False) as view:
        for job, result in _watched(run_jobs(llm, jobs), view):
            if isinstance(result, RequestOutput) and not result.finished:
                continue
            done[job.index] = _as_json(job, result)
            num_errors += isinstance(result, OctavoError)
            while next_index in done:
                print(json.dumps(done.pop(next_index), ensure_ascii=False), flush=True)
                next_index += 1
    return num_errors


def _as_json(job: Job, result: RequestOutput | OctavoError) -> dict[str, Any]:
    values: dict[str, Any] = {"id": job.index if job.label is None else job.label}
    if isinstance(result, RequestOutput):
        values |= _finite(dataclasses.asdict(result))
        return values
    error = {"type": type(result).__name__, "message": str(result)}
    return values | {"error": error, "finished": True}


def _finite(value: Any) -> Any:
    """JSON knows no infinity: such a logprob becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


@contextmanager
def _block_view(args: Generate, llm: LLM, *, with_text: bool) -> Iterator[BlockView | None]:
    """The view of the block tables after every step, if it is wanted."""
    if not args.show_blocks:
        yield None
        return
    from octavo.cli.blocks import BlockView

    with BlockView(llm.config.block_size, with_text=with_text) as view:
        llm.after_step = lambda: view.look(llm.block_tables())
        try:
            yield view
        finally:
            llm.after_step = None


def _watched(results: Results, view: BlockView | None) -> Results:
    """Pass results on, showing each in the view."""
    for job, result in results:
        if view is not None and isinstance(result, RequestOutput):
            view.update(result)
        yield job, result


class TextPrinter:
    """Prints answers in the order of their jobs, each as far as it is known.

    with_ids: titles tell the ids by which events and block tables name requests, too.
    """

    def __init__(self, jobs: list[Job], *, with_ids: bool = False) -> None:
        self._jobs, self._with_ids = jobs, with_ids
        self._results: dict[int, RequestOutput | OctavoError] = {}
        self._job = self._sample = self._num_printed = 0
        self._titled = False
        self.num_errors = 0

    def add(self, job: Job, result: RequestOutput | OctavoError) -> None:
        """Take in the newest state of a job."""
        self._results[job.index] = result

    def print_ready(self) -> None:
        """Print all text that has become known and whose turn it is."""
        while self._job in self._results and self._print_job(self._results[self._job]):
            del self._results[self._job]
            self._job += 1
            self._sample, self._titled = 0, False
        sys.stdout.flush()

    def _print_job(self, result: RequestOutput | OctavoError) -> bool:
        """Print what is new of the job whose turn it is; whether it has ended."""
        if len(self._jobs) > 1 and not self._titled:
            gap = "\n" if self._job else ""
            title = self._jobs[self._job].title
            if self._with_ids and isinstance(result, RequestOutput):
                title += f" (request {result.request_id})"
            print(f"{gap}== {self._job + 1}. {title}")
            self._titled = True
        if isinstance(result, OctavoError):
            self.num_errors += 1
            sys.stdout.flush()
            print(f"octavo: {result}", file=sys.stderr)
            return True
        while self._sample < len(result.outputs):
            sample = result.outputs[self._sample]
            if not (self._num_printed or sample.score is None or len(result.outputs) == 1):
                print(f"-- {self._sample + 1} of {len(result.outputs)}, score {sample.score:.3f}")
            sys.stdout.write(sample.text[self._num_printed :])
            self._num_printed = len(sample.text)
            if sample.finish_reason is None:
                return False
            print()
            if sample.finish_reason == "length":
                note("(cut off: --max-tokens, the context or the pool is used up)")
            self._sample, self._num_printed = self._sample + 1, 0
            if self._sample < len(result.outputs) and sample.score is None:
                print(f"-- {self._sample + 1} of {len(result.outputs)}")
        return True
