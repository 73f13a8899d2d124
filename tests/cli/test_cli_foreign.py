"""Flags of other engines: told what they are called here, or why there is none."""

from __future__ import annotations

import pytest

from octavo import foreign
from octavo.cli import main as cli


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serve", "--tensor-parallel-size", "2"], "one engine runs on one GPU"),
        (["serve", "--trust-remote-code"], "leave it out"),
        (["chat", "-c=2048"], "it is --max-model-len here"),
        (["generate", "-n", "5", "Hello"], "it is --max-tokens here"),
        (["generate", "-p", "Hello"], "octavo generate 'PROMPT'"),
    ],
    ids=["tp", "code", "context", "tokens", "prompt"],
)
def test_the_way_out_is_told(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"no flag {words[1].partition('=')[0]}: " in err and hint in err


def test_a_name_that_the_command_has_not_is_not_offered(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):  # `serve` has no --max-tokens
        cli.main(["serve", "-n", "5"])
    assert "--max-tokens" not in capsys.readouterr().err


def test_a_commands_own_flags_and_prompts_are_left_alone() -> None:
    own = {"--tensor-parallel-size", "--max-model-len"}
    assert foreign.refusal(["--tensor-parallel-size", "2"], own) is None
    assert foreign.refusal(["Hello", "--", "-c"], own) is None


@pytest.mark.parametrize("command", ["serve", "chat"])
def test_the_model_is_an_argument_or_m(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([command, "one", "-m", "another"]) == 2
    assert "the model is given twice" in capsys.readouterr().err
