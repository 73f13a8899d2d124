"""`octavo`: finds the command, runs it, and turns what goes wrong into one line and an exit status.

Exit status: 0 done; 1 done in part, or a bug of octavo; 2 refused, with the reason on stderr;
130 stopped by Ctrl-C; 141 nobody reads the output any more. OCTAVO_DEBUG=1 shows tracebacks.

A command is one row of `COMMANDS` and one module with `main(prog, argv) -> int`, imported when it
runs: `octavo --help` imports none of them.
"""

from __future__ import annotations

import difflib
import errno
import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple


class Command(NamedTuple):
    """One row of the command table."""

    name: str
    """One word, or two for a command of a group."""
    module: str
    summary: str
    """Half a line for `octavo --help`."""


COMMANDS = (
    Command("generate", "octavo.cli.generate", "answer prompts, streaming; JSONL in and out"),
    Command("chat", "octavo.cli.chat", "talk with the model"),
    Command("serve", "octavo.cli.serve", "an OpenAI-compatible server"),
    Command("bench throughput", "octavo.cli.bench", "tokens per second of a batch of requests"),
    Command("bench latency", "octavo.cli.bench", "how fast a few requests alone are answered"),
    Command("bench serve", "octavo.cli.bench_serve", "what clients of a server see under load"),
    Command("bench preemption", "octavo.cli.bench", "recompute or swap: what each costs here"),
    Command("bench attention", "octavo.cli.bench_device", "attention kernels, what paging costs"),
    Command("bench step", "octavo.cli.bench_device", "the model's steps against the machine"),
    Command("bench startup", "octavo.cli.bench_device", "from nothing to the first token"),
    Command("profile", "octavo.cli.profile", "a trace of steps, and where their time went"),
    Command("plan", "octavo.cli.plan", "how many GPUs a workload needs, and what limits it"),
    Command("tune block-size", "octavo.cli.tune", "which block size suits a workload"),
    Command("lab compare", "octavo.cli.compare", "one workload under paging and what came before"),
    Command("lab simulate", "octavo.cli.simulate", "a workload through the scheduler, without GPU"),
    Command("lab paper", "octavo.cli.paper", "the PagedAttention paper's figures, reproduced"),
    Command("lab calibrate", "octavo.cli.calibrate", "how long steps take on this machine"),
    Command("lab replay", "octavo.cli.replay", "a recorded run again, exactly or with a change"),
    Command("top", "octavo.cli.top", "a server's memory, live in the terminal"),
    Command("demo memory", "octavo.cli.demo", "one load through two policies, side by side"),
    Command("models pull", "octavo.cli.models", "fetch a model, so that it starts at once"),
    Command("models list", "octavo.cli.models", "models on this machine, with their sizes"),
    Command("models inspect", "octavo.cli.models_inspect", "what a model is, and where it fits"),
    Command("models verify", "octavo.cli.models_inspect", "its logits against transformers'"),
    Command("models rm", "octavo.cli.models", "delete a fetched model"),
    Command("env", "octavo.cli.env", "what to paste into a bug report"),
)

_INTRO = "LLM inference and serving from memory you can see."
_EXAMPLES = (
    ("octavo generate 'What is the capital of France?'", "one answer from the default model"),
    ("octavo generate --show-blocks 'Write a haiku.'", "watch its KV blocks being taken"),
    ("octavo generate --file requests.jsonl --jsonl", "a file of requests, as one batch"),
    ("octavo serve", "OpenAI's API at http://127.0.0.1:8000/v1"),
    ("octavo serve Qwen/Qwen3-0.6B", "the same with a model of the Hugging Face hub"),
    ("octavo chat ./model.gguf", "a conversation with a local model"),
)
_ELSEWHERE = {
    "run": "octavo chat MODEL",
    "ls": "octavo models list",
    "ps": "octavo top",
    "rm": "octavo models rm",
    "show": "octavo models inspect",
}
"""What ollama's commands are called here, where the names are not alike."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status. `argv` defaults to the process's own."""
    words = list(sys.argv[1:] if argv is None else argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # started with it closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    debug = os.environ.get("OCTAVO_DEBUG", "") not in ("", "0")
    try:
        status = _run(words)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_stdout()
        return 141
    except Exception as error:
        if debug:
            raise
        return _report(error)


def _run(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(COMMANDS, "octavo"))
        return 0
    if words[0] in ("-V", "--version", "version"):
        from octavo import __version__

        print(f"octavo {__version__}")
        return 0
    group = [command for command in COMMANDS if command.name.split()[0] == words[0]]
    is_group = any(command.name != words[0] for command in group)
    if is_group and (len(words) == 1 or words[1] in ("-h", "--help")):
        print(_overview(group, f"octavo {words[0]}"))
        return 0
    for command in group:
        name = command.name.split()
        if words[: len(name)] == name:
            _set_up_process()
            run = import_module(command.module).main
            return int(run(f"octavo {command.name}", words[len(name) :]))
    return _unknown(words, group)


def _overview(commands: Sequence[Command], prog: str) -> str:
    bold, plain = ("\033[1m", "\033[0m") if _has_colour(sys.stdout) else ("", "")
    lines = [f"usage: {prog} COMMAND [ARGUMENT ...]", ""]
    lines += [_INTRO, ""] if len(commands) == len(COMMANDS) else []
    lines += [f"{bold}Commands{plain}"]
    lines += [f"  {bold}{c.name:18}{plain}{c.summary}" for c in commands]
    if len(commands) == len(COMMANDS):
        lines += ["", f"{bold}Examples{plain}"]
        lines += [f"  {example:50}{meaning}" for example, meaning in _EXAMPLES]
        lines += ["", "octavo --version tells the version."]
    lines += ["", f"{prog} COMMAND --help explains a command and its flags."]
    return "\n".join(lines)


def _unknown(words: list[str], group: Sequence[Command]) -> int:
    """Say which command was probably meant."""
    said = words[:2] if group else words[:1]
    asked = " ".join(said)
    known = {command.name for command in group or COMMANDS}
    if not group:
        known |= {name.split()[0] for name in known}
    elsewhere = _ELSEWHERE.get(said[-1], "")
    is_here = elsewhere.startswith(f"octavo {words[0]} " if group else "octavo ")
    near = [elsewhere] if is_here else []
    near += [f"octavo {name}" for name in difflib.get_close_matches(asked, sorted(known), 1, 0.5)]
    kind = "option" if asked.startswith("-") else "command"
    hint = f"did you mean '{near[0]}'? " if near else ""
    _complain(f"unknown {kind} {asked!r}; {hint}'octavo --help' lists the commands")
    return 2


def _report(error: Exception) -> int:
    """One line on stderr; the exit status."""
    from octavo.errors import OctavoError

    if isinstance(error, OctavoError):
        _complain(str(error))
        return 2
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        _complain(f"cannot write: {error.strerror}")
        _discard_stdout()
        return 1
    _complain(
        f"{type(error).__name__}: {error}; this is a bug of octavo: OCTAVO_DEBUG=1 shows where, "
        "please report it with the output of 'octavo env'"
    )
    return 1


def _discard_stdout() -> None:
    """What is left in the buffer must not fail once more when Python closes stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(message: str) -> None:
    red, plain = ("\033[31m", "\033[0m") if _has_colour(sys.stderr) else ("", "")
    print(f"{red}octavo: {' '.join(message.split())}{plain}", file=sys.stderr)


def _has_colour(stream: object) -> bool:
    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty()) and "NO_COLOR" not in os.environ


def _set_up_process() -> None:
    """Before anything heavy is imported: output and logging."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character it cannot write must not end the run
            stream.reconfigure(errors="replace")
    level = os.environ.get("OCTAVO_LOG_LEVEL", "WARNING").upper()
    if level not in logging.getLevelNamesMapping():
        from octavo.errors import ConfigError

        known = ", ".join(logging.getLevelNamesMapping())
        raise ConfigError(f"OCTAVO_LOG_LEVEL must be one of {known}, got {level!r}")
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
