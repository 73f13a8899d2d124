"""`octavo chat`: a conversation at the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from octavo.cli.flags import ChatSamplingFlags, EngineFlags, flags, parse
from octavo.cli.jobs import Job, start
from octavo.cli.start import note, start_engine, with_model
from octavo.errors import (
    ConfigError,
    InvalidRequestError,
    OctavoError,
    RequestCapacityError,
    TokenizerError,
)

if TYPE_CHECKING:
    from octavo import LLM, SamplingParams

_HELP = """\
/reset    forget the conversation and start anew
/memory   where the memory is: pool, blocks, peaks
/help     this text
/exit     leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends in \\ goes on in the next."""


@flags
@dataclass(frozen=True, kw_only=True)
class Chat:
    """Talk with the model. The whole conversation is its context, until /reset.

    Type /help for the commands. Ctrl-C stops an answer; /exit or Ctrl-D leaves.
    """

    partner: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None
    """Model to talk with, as --model."""
    system: str | None = None
    """System message, which sets the model's role."""
    sampling: ChatSamplingFlags
    engine: EngineFlags


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Chat, prog, argv)
    params, config = args.sampling.params(), with_model(args.engine.config(), args.partner)
    if config.skip_tokenizer_init:
        raise ConfigError("chat needs a tokenizer: drop --skip-tokenizer-init")
    with suppress(ImportError):
        import readline  # noqa: F401  (gives `input` line editing and history)
    with start_engine(config) as llm:
        tokenizer = llm.get_tokenizer()
        if tokenizer is None or tokenizer.chat_template is None:
            raise TokenizerError(
                f"{config.model} has no chat template: take an instruct model, or continue plain "
                "text with 'octavo generate --raw'"
            )
        note("/help lists the commands")
        Conversation(llm, params, args.system).run()
    return 0


class Conversation:
    """Messages so far, and the loop that adds to them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm, self._params = llm, params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = list(self._system)
        self._commands: dict[str, Callable[[], None]] = {
            "/reset": self.reset,
            "/memory": lambda: print(self._llm.memory_report()),
            "/help": lambda: print(_HELP),
        }

    def run(self) -> None:
        """Read lines until /exit or the end of the input."""
        while (line := _read()) is not None and line != "/exit":
            if line in self._commands:
                self._commands[line]()
            elif line.startswith("/"):
                print(f"no command {line.split()[0]!r}; /help lists them")
            elif line:
                self.answer(line)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._system)
        print("(the conversation starts anew)")

    def answer(self, text: str) -> None:
        """Add what the user said and stream the answer; a refused message is taken back."""
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self._stream()
        except OctavoError as error:
            self.messages.pop()
            too_long = isinstance(error, RequestCapacityError) and len(self.messages) > 1
            print(f"octavo: {error}", file=sys.stderr)
            if too_long:
                print("/reset makes room by forgetting the conversation", file=sys.stderr)
            return
        self.messages.append({"role": "assistant", "content": answer})

    def _stream(self) -> str:
        printed = ""
        with _interrupts() as interrupted:
            stream = start(self._llm, Job(0, self._params, messages=self.messages))
            for output in stream:
                sample = output.outputs[0]
                sys.stdout.write(sample.text[len(printed) :])
                sys.stdout.flush()
                printed = sample.text
                if interrupted():
                    # Between steps, so that the engine is never torn in the middle of one.
                    stream.close()
                    note("\n(stopped)", end="")
                    break
                if sample.finish_reason == "length":
                    note("\n(cut off: --max-tokens, the context or the pool is used up)", end="")
        print()
        return printed


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Within: Ctrl-C only sets a mark, which the callable tells; a second one interrupts."""
    pressed = False

    def mark(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, mark)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _read() -> str | None:
    """One message, stripped; None at the end of the input."""
    lines: list[str] = []
    tty = sys.stdin.isatty()
    while True:
        try:
            line = input((". " if lines else "> ") if tty else "")
        except EOFError:
            if tty:
                print()
            return "\n".join(lines).strip() or None
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"stdin is not UTF-8 text: {error}") from None
        except KeyboardInterrupt:
            if not tty:
                raise
            note("\n(/exit or Ctrl-D leaves)")
            lines.clear()
            continue
        if line.endswith("\\"):
            lines.append(line[:-1])
            continue
        return "\n".join([*lines, line]).strip()
