"""How outputs end (tokens, stop strings, aborts), and which samples or beams are shown."""

from __future__ import annotations

import pytest
from output_support import ABORT, EOS, LENGTH, STOP, OutputFeed, update

from octavo.engine.output import beams_of
from octavo.outputs import OutputKind
from octavo.plan import TokenLogprobs


@pytest.fixture
def engine(byte_tokenizer) -> OutputFeed:
    return OutputFeed(byte_tokenizer)


@pytest.mark.parametrize(("token", "stop_reason"), [(EOS, None), (ord("q"), ord("q"))])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_ending_by_token(engine, token, stop_reason, include, skip) -> None:
    engine.add(
        stop_token_ids=[ord("q")], include_stop_str_in_output=include, skip_special_tokens=skip
    )
    engine.push("hi")
    [last] = engine.step(update([token], reason=STOP, stop_reason=stop_reason))
    completion = last.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == (STOP, stop_reason)
    assert completion.token_ids == [104, 105, token]
    shown = "q" if token != EOS else "" if skip else "</s>"
    assert completion.text == "hi" + shown * include
    assert engine.to_stop == []


@pytest.mark.parametrize("include", [False, True])
def test_ending_by_stop_string(engine, include) -> None:
    engine.add(stop=["no", "END"], include_stop_str_in_output=include)
    outputs = engine.push("abEND")
    assert [o.outputs[0].text for o in outputs[:-1]] == ["a", "ab", "ab", "ab"]
    last = outputs[-1].outputs[0]
    assert last.text == "ab" + "END" * include
    assert (last.finish_reason, last.stop_reason) == (STOP, "END")
    assert outputs[-1].finished
    assert engine.to_stop == [(100, "END")]
    assert engine.step(update([104], reason=ABORT)) == []  # a step that was under way


def test_stop_string_wins_over_the_length_that_came_with_it(engine) -> None:
    engine.add(stop=["b"])
    [last] = engine.step(update(list(b"abc"), reason=LENGTH))
    completion = last.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("a", STOP, "b")
    assert completion.token_ids == [97, 98]  # what came behind it never was
    assert engine.to_stop == []  # it has ended already


def test_stop_string_within_min_tokens(engine) -> None:
    engine.add(stop=["b"], min_tokens=2)
    outputs = engine.push("abcb")
    assert outputs[-1].outputs[0].text == "abc" and outputs[-1].finished


def test_held_back_text_is_shown_at_the_end(engine) -> None:
    engine.add(stop=["END"])
    engine.push("aEN")
    [last] = engine.step(update([0xE2], reason=LENGTH))
    assert last.outputs[0].text == "aEN�"


def test_an_end_without_a_token(engine) -> None:
    """A sequence that fills the pool ends between two tokens."""
    engine.add(stop=["END"])
    engine.push("aE")
    [last] = engine.step(update(reason=LENGTH))
    assert last.outputs[0].text == "aE" and last.outputs[0].finish_reason is LENGTH


def test_abort(engine) -> None:
    engine.add(stop=["END"], n=2)
    engine.step(update([ord("E")]))
    engine.step(update([ord("x")], sample=1, reason=LENGTH))
    last = engine.outputs.abort_sample("r", 0, 50.0)
    assert last.finished and last.metrics.finished_s == 50.0
    assert [c.finish_reason for c in last.outputs] == [ABORT, LENGTH]
    assert [c.text for c in last.outputs] == ["E", "x"]
    assert engine.outputs.abort_sample("r", 0, 51.0) is None
    assert engine.step(update([1])) == []
    engine.add()  # the id is free again
    engine.outputs.drop("r")
    engine.outputs.drop("r")
    assert len(engine.outputs) == 0


def test_one_sample_aborted(engine) -> None:
    engine.add(n=2)
    [output] = engine.step(update(reason=ABORT), update([104], sample=1))
    assert [c.finish_reason for c in output.outputs] == [ABORT, None] and not output.finished


def test_abort_of_single_samples(engine) -> None:
    engine.add(n=3)
    engine.step(update([104]), update([105], sample=1), update([106], sample=2))
    assert engine.outputs.abort_sample("r", 1, 5.0) is None
    assert not engine.outputs.has_sample("r", 1) and engine.outputs.has_sample("r", 2)
    [output] = engine.step(update([104]), update([1], sample=1), update([107], sample=2))
    assert [c.text for c in output.outputs] == ["hh", "i", "jk"]
    assert [c.finish_reason for c in output.outputs] == [None, ABORT, None]
    [output] = engine.step(update([104], reason=LENGTH))
    assert not output.finished
    last = engine.outputs.abort_sample("r", 2, 9.0)
    assert last.finished and [c.finish_reason for c in last.outputs] == [LENGTH, ABORT, ABORT]
    assert len(engine.outputs) == 0 and engine.outputs.abort_sample("r", 2, 9.0) is None


# -- ranked: best_of and beams


def ranked(tokenizer, **params) -> OutputFeed:
    engine = OutputFeed(tokenizer, OutputKind.FINAL_ONLY)
    engine.add(**params)
    return engine


def logged(text, *logprobs) -> dict:
    ids = list(text.encode())
    entries = [TokenLogprobs(i, logprob, 1, ()) for i, logprob in zip(ids, logprobs, strict=True)]
    return {"ids": ids, "logprobs": entries, "reason": LENGTH}


def test_best_of_takes_the_best_mean_logprob(byte_tokenizer) -> None:
    engine = ranked(byte_tokenizer, n=2, best_of=4)
    [last] = engine.step(
        update(**logged("ab", -3.0, -1.0)),
        update(**logged("c", -1.5), sample=1),  # less in sum, yet not in the mean
        update(**logged("de", -1.5, -1.5), sample=2),  # as good: the lower index is first
        update(reason=ABORT, sample=3),
    )
    assert [(c.index, c.text, c.score) for c in last.outputs] == [(0, "c", -1.5), (1, "de", -1.5)]
    assert all(c.logprobs is None and c.cumulative_logprob is None for c in last.outputs)


def test_best_of_prefers_what_was_not_aborted(byte_tokenizer) -> None:
    engine = ranked(byte_tokenizer, n=1, best_of=2)
    good = logged("a", -0.1)
    del good["reason"]
    assert engine.step(update(**good)) == []
    engine.outputs.abort_sample("r", 0, 1.0)
    [last] = engine.step(update(**logged("b", -9.0), sample=1))
    assert [c.text for c in last.outputs] == ["b"]


def test_best_of_shows_logprobs_that_were_asked_for(byte_tokenizer) -> None:
    engine = ranked(byte_tokenizer, n=1, best_of=2, logprobs=0)
    [last] = engine.step(update(**logged("a", -2.0)), update(**logged("b", -1.0), sample=1))
    [best] = last.outputs
    assert best.cumulative_logprob == best.score == -1.0 and best.logprobs[0][98].logprob == -1.0


@pytest.mark.parametrize("include", [False, True])
def test_beams_come_with_scores_and_text(byte_tokenizer, include) -> None:
    engine = ranked(byte_tokenizer, beam_width=2, max_tokens=3, include_stop_str_in_output=include)
    [last] = engine.step(
        update([104, 105, EOS], reason=STOP, cum_logprob=-1.5, score=-0.5),
        update([104, 106, 107], sample=1, reason=LENGTH, cum_logprob=-3.0, score=-1.0),
    )
    assert [c.text for c in last.outputs] == ["hi" + "</s>" * include, "hjk"]
    assert [(c.cumulative_logprob, c.score) for c in last.outputs] == [(-1.5, -0.5), (-3.0, -1.0)]
    beams = beams_of(last, with_text=True)
    assert beams.request_id == "r"
    assert [b.tokens for b in beams.sequences] == [[97, 104, 105, EOS], [97, 104, 106, 107]]
    assert [(b.text, b.cum_logprob, b.score) for b in beams.sequences] == [
        (c.text, c.cumulative_logprob, c.score) for c in last.outputs
    ]
    assert [b.finish_reason for b in beams.sequences] == [STOP, LENGTH]
    assert [b.text for b in beams_of(last, with_text=False).sequences] == [None, None]
