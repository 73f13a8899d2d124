"""Requests of the paper's protocol: which lists, and what is made of them."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from octavo.errors import TraceError
from octavo.lab.arrivals import paper_trace
from octavo.lab.paper.workloads import (
    Chat,
    Lengths,
    Plain,
    Translation,
    Workloads,
    find_workloads,
)
from octavo.lab.trace import TraceRequest

SHORT = "input_tokens,output_tokens\n5,7\n2000,48\n2000,47\n"


def _lengths(num: int = 500) -> Lengths:
    return Lengths("sharegpt", [(1 + i % 90, 1 + i % 41) for i in range(num)], "made up")


def test_without_a_folder_the_lists_are_synthetic() -> None:
    workloads = find_workloads(None)
    for lengths, num_in, num_out in (
        (workloads.sharegpt, 161.31, 337.99),
        (workloads.alpaca, 19.31, 58.45),
    ):
        num = len(lengths.pairs)
        assert sum(i for i, _ in lengths.pairs) / num == pytest.approx(num_in, rel=0.02)
        assert sum(o for _, o in lengths.pairs) / num == pytest.approx(num_out, rel=0.02)
        assert max(i + o for i, o in lengths.pairs) < 2048
        assert "synthetic" in str(lengths)


def test_the_papers_own_list_is_preferred(tmp_path: Path) -> None:
    (tmp_path / "sharegpt_a_lengths.csv").write_text("input_tokens,output_tokens\n1,1\n")
    with gzip.open(tmp_path / "sharegpt_opt_lengths.csv.gz", "wt") as file:
        file.write(SHORT)
    (tmp_path / "alpaca_mine_lengths.csv").write_text("input_tokens,output_tokens\n3,4\n")
    workloads = find_workloads(tmp_path)
    # pairs of 2,048 tokens and more are left out, as in the artifact
    assert list(workloads.sharegpt.pairs) == [(5, 7), (2000, 47)]
    assert workloads.sharegpt.source == "sharegpt_opt_lengths.csv.gz"
    assert list(workloads.alpaca.pairs) == [(3, 4)]


def test_a_folder_without_lists_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such folder"):
        find_workloads(tmp_path / "nowhere")
    with pytest.raises(TraceError, match=r"sharegpt_opt_lengths\.csv"):
        find_workloads(tmp_path)
    (tmp_path / "sharegpt_opt_lengths.csv").write_text(SHORT)
    with pytest.raises(TraceError, match="alpaca"):
        find_workloads(tmp_path)
    (tmp_path / "alpaca_x_lengths.csv").write_text("input_tokens,output_tokens\n2000,2000\n")
    with pytest.raises(TraceError, match="fewer than 2,048"):
        find_workloads(tmp_path)


@pytest.mark.parametrize("num", [20, 500])
def test_plain_is_the_artifacts_recipe(num: int) -> None:
    lengths = _lengths(num)
    everything = [TraceRequest(num_input=i, num_output=o) for i, o in lengths.pairs]
    expected = paper_trace(everything, 1.5, 60.0)
    assert Plain(lengths).requests(1.5, 60.0) == expected
    samples = Plain(lengths, n=3).requests(1.5, 60.0)
    assert [r.arrival_s for r in samples] == [r.arrival_s for r in expected]
    assert {(r.n, r.beam_width) for r in samples} == {(3, 0)}
    assert {r.beam_width for r in Plain(lengths, beam_width=4).requests(1.5, 60.0)} == {4}


def test_sentences_stand_behind_one_prefix() -> None:
    requests = Translation(80).requests(20.0, 100.0)
    assert {(r.prefix, r.prefix_tokens) for r in requests} == {("instruction and examples", 80)}
    num = len(requests)
    assert sum(r.num_input for r in requests) / num == pytest.approx(80 + 33, abs=1.5)
    assert sum(r.num_output for r in requests) / num == pytest.approx(40, abs=1.5)
    assert min(r.num_input for r in requests) > 80


def test_prompts_of_a_chat_are_its_history_cut() -> None:
    chat = Chat(find_workloads(None).sharegpt)
    requests = chat.requests(2.0, 2000.0)
    assert max(r.num_input for r in requests) == 1024
    assert max(r.num_output for r in requests) == 1016
    assert max(r.num_tokens for r in requests) <= 2048
    long = sum(r.num_input >= 1000 for r in requests) / len(requests)
    assert long == pytest.approx(0.64, abs=0.03)
    # prompts grow within a conversation, so the first of all are short ones
    assert requests[0].num_input == min(r.num_input for r in requests[:2])
    assert requests == chat.requests(2.0, 2000.0)


def test_a_conversation_adds_up_what_was_said() -> None:
    """One conversation of all rounds: each prompt is all rounds before it and its own."""
    lengths = Lengths("sharegpt", [(10, 20)] * 50, "made up")
    one = Chat(lengths, mean_rounds=1e9, new_probability=0.0)
    prompts = [r.num_input for r in one.requests(1.0, 50.0)]
    assert prompts == [min(1024, 10 + 30 * i) for i in range(len(prompts))]


def test_slices_are_taken_of_both_lists() -> None:
    lists = Workloads(_lengths(), _lengths()).first(7)
    assert len(lists.sharegpt.pairs) == len(lists.of("alpaca").pairs) == 7
    assert "first 7" in str(lists.sharegpt)
