"""The drawing of block tables: who shares which block, and who copied one."""

from __future__ import annotations

import io

from rich.console import Console

from octavo.cli.blocks import BlockView
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.request import FinishReason


def output(*lengths: int, finished: bool = False, scores: bool = False) -> RequestOutput:
    """A request of 5 prompt tokens whose samples have so many output tokens."""
    reason = FinishReason.LENGTH if finished else None
    samples = [
        CompletionOutput(
            i, token_ids=[1] * length, finish_reason=reason, score=-1.0 if scores else None
        )
        for i, length in enumerate(lengths)
    ]
    return RequestOutput("7", None, [1] * 5, None, samples, finished)


def drawn(view: BlockView) -> list[str]:
    console = Console(file=io.StringIO(), width=80, height=40, color_system=None)
    console.print(view)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def test_shared_blocks_are_counted_and_their_sharers_named() -> None:
    view = BlockView(4, with_text=False, stream=io.StringIO())
    view.look({"7": [[3, 9], [3, 4]]})
    view.update(output(2, 1))
    lines = drawn(view)
    assert lines[0].split("  ")[1:] == ["6 tokens in 2 blocks of 4, running; 1 shared with 7.1"]
    assert [line.split() for line in lines[1:5]] == [
        ["logical", "0", "1"], ["physical", "3", "9"], ["tables", "x2"], ["filled", "████", "██··"],
    ]  # fmt: skip
    assert lines[6].startswith("request 7.1  5 tokens") and "shared with 7.0" in lines[6]


def test_a_sequence_that_shares_nothing_has_no_row_for_it() -> None:
    view = BlockView(4, with_text=False, stream=io.StringIO())
    view.look({"7": [[3, 9]]})
    view.update(output(1))
    lines = drawn(view)
    assert lines[0] == "request 7  5 tokens in 2 blocks of 4, running"
    assert not any(line.startswith("tables") for line in lines)


def told(*tables: list[list[int]]) -> list[str]:
    """What is printed where there is no terminal, step by step."""
    stream = io.StringIO()
    view = BlockView(4, with_text=False, stream=stream)
    for table in tables:
        view.look({"7": table})
    return [line.removeprefix("request ") for line in stream.getvalue().splitlines()]


def test_a_copy_is_told_from_beams_that_change_their_order() -> None:
    shared = [[3, 9], [3, 9]]
    assert told(shared, [[3, 9], [3, 5]])[-1:] == [
        "7.1: logical block 1 -> physical block 5, a copy of 9"
    ]
    swapped = told(shared, [[3, 9], [3, 5]], [[3, 5], [3, 9]])
    assert swapped[-2:] == [
        "7.0: logical block 1 -> physical block 5",
        "7.1: logical block 1 -> physical block 9",
    ]
    assert not any("copy" in line for line in swapped[-2:])


def test_many_sharers_are_summed_up() -> None:
    (first, *_) = told([[3]] * 7)
    assert first == (
        "7.0: logical block 0 -> physical block 3, shared with 7.1, 7.2, 7.3, 7.4 and 2 more"
    )


def test_beams_end_without_saying_which_is_which() -> None:
    stream = io.StringIO()
    view = BlockView(4, with_text=False, stream=stream)
    view.look({"7": [[3, 9], [3, 4]]})
    view.update(output(6, 5, finished=True, scores=True))
    assert stream.getvalue().splitlines()[-2:] == [
        "request 7.0: ended with 2 blocks, all released",
        "request 7.1: ended with 2 blocks, all released",
    ]
