"""Outputs: text, ends, logprobs and times, in the three kinds; no output changes later."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from output_support import EOS, LENGTH, STOP, OutputFeed, update

from octavo.outputs import CompletionOutput, Logprob, OutputKind, RequestKVUsage, RequestMetrics
from octavo.plan import TokenLogprobs
from octavo.sched import SeqUpdate


@pytest.fixture
def engine(byte_tokenizer) -> OutputFeed:
    return OutputFeed(byte_tokenizer)


def test_cumulative_outputs_grow(engine) -> None:
    engine.add()
    texts = [output.outputs[0].text for output in engine.push("hé!")]
    assert texts == ["h", "h", "hé", "hé!"]
    [last] = engine.step(update([ord("x")], reason=LENGTH))
    assert last.finished and last.outputs[0].finish_reason is LENGTH
    assert last.outputs[0].text == "hé!x" and last.outputs[0].token_ids == list("hé!x".encode())
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("r", "a", [97])
    assert len(engine.outputs) == 0


def test_delta_outputs_add_up(byte_tokenizer) -> None:
    engine = OutputFeed(byte_tokenizer, OutputKind.DELTA)
    engine.add(stop=["END"])
    outputs = engine.push("héEN")
    assert [o.outputs[0].text for o in outputs] == ["h", "", "é", "", ""]
    assert [o.outputs[0].token_ids for o in outputs] == [[b] for b in "héEN".encode()]
    [last] = engine.step(update([ord("x")], reason=LENGTH))
    assert last.outputs[0].text == "ENx"


@pytest.mark.parametrize("kind", [OutputKind.CUMULATIVE, OutputKind.DELTA])
def test_what_is_made_without_its_init_has_every_field(byte_tokenizer, kind) -> None:
    engine = OutputFeed(byte_tokenizer, kind)
    engine.add()
    (output,) = engine.push("x")
    for made in (output, *output.outputs, output.metrics, output.metrics.copy()):
        names = {field.name for field in dataclasses.fields(made)}
        assert {name for name in names if hasattr(made, name)} == names, type(made)
    assert output.outputs == [CompletionOutput(0, "x", [ord("x")])]
    assert output.kv == RequestKVUsage() and output.prompt == "a"


def test_final_only(byte_tokenizer) -> None:
    engine = OutputFeed(byte_tokenizer, OutputKind.FINAL_ONLY)
    engine.add(n=2)
    assert engine.push("abc") == []
    assert engine.step(update([1], reason=LENGTH)) == []
    [last] = engine.step(update([ord("z"), EOS], sample=1, reason=STOP))
    assert [c.text for c in last.outputs] == ["abc\x01", "z"]
    assert last.finished


def test_outputs_are_snapshots(engine) -> None:
    metrics = RequestMetrics()
    engine.stats = lambda request_id: (metrics, RequestKVUsage())
    engine.add(logprobs=0, prompt_logprobs=0)
    entry = TokenLogprobs(5, -1.0, 1, ())
    [first] = engine.step(update([104], logprobs=[entry], prompt=[entry]))
    kept = copy.deepcopy(first)
    metrics.last_token_s = 5.0
    engine.step(update([105], logprobs=[entry]))
    engine.step(update([105], logprobs=[entry], reason=LENGTH))
    assert first == kept


@pytest.mark.parametrize("logprobs", [None, 0])
def test_what_is_read_late_is_what_it_was(engine, logprobs) -> None:
    """Whoever reads an output first after later steps, or changes it, changes nothing else."""
    engine.add(logprobs=logprobs)
    outputs = []
    for i in range(4):
        entry = TokenLogprobs(97 + i, -1.0, 1, ())
        reason = LENGTH if i == 3 else None
        outputs += engine.step(update([97 + i], logprobs=[entry], reason=reason))
    outputs[1].outputs[0].token_ids.append(-1)
    for i, output in enumerate(outputs):
        [completion] = output.outputs
        assert completion.text == "abcd"[: i + 1]
        assert completion.token_ids == [97, 98, 99, 100][: i + 1] + [-1] * (i == 1)
        assert completion.token_ids is completion.token_ids
        if logprobs is None:
            assert completion.logprobs is None
        else:
            assert [list(p) for p in completion.logprobs] == [[97 + j] for j in range(i + 1)]


def test_outputs_can_be_copied_compared_and_pickled(engine) -> None:
    engine.add(logprobs=0)
    entry = TokenLogprobs(97, -1.0, 1, ())
    [first] = engine.step(update([97], logprobs=[entry]))
    copies = [copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    engine.step(update([97], logprobs=[entry]))
    copies.append(dataclasses.replace(first))
    plain = CompletionOutput(0, "a", [97], -1.0, [{97: Logprob(-1.0, 1, "a")}])
    for same in copies:
        assert same == first and repr(same) == repr(first) and same.outputs == [plain]
        assert dataclasses.asdict(same) == dataclasses.asdict(first)
        assert not hasattr(same, "_prompt_text") and not hasattr(same.outputs[0], "tokens")


def test_a_prompt_of_token_ids_becomes_text_when_it_is_read(byte_tokenizer, monkeypatch) -> None:
    decoded = []

    def decode(ids, **kwargs):
        decoded.append(list(ids))
        return "text"

    engine = OutputFeed(byte_tokenizer)
    engine.add(prompt=(98, 99), detokenize=False)
    monkeypatch.setattr(byte_tokenizer, "decode", decode)
    outputs = engine.step(update([97])) + engine.step(update([97], reason=LENGTH))
    assert decoded == []
    assert [output.prompt for output in outputs] == ["text", "text"] and decoded == [[98, 99]]


# -- many


def test_samples_of_one_step_come_in_one_output(engine, byte_tokenizer) -> None:
    engine.add(n=3)
    [output] = engine.step(update([97], sample=2), update([98], sample=0))
    assert [c.text for c in output.outputs] == ["b", "", "a"]
    deltas = OutputFeed(byte_tokenizer, OutputKind.DELTA)
    deltas.add(n=3)
    [output] = deltas.step(update([97], sample=2), update([98], sample=0))
    assert [(c.index, c.text) for c in output.outputs] == [(0, "b"), (2, "a")]


def test_requests_do_not_mix(engine) -> None:
    engine.add("a", prompt=[1])
    engine.add("b", prompt=[2])
    outputs = engine.step(
        update([104], request_id="b"), update([105], request_id="a"), update([1], request_id="c")
    )
    assert [(o.request_id, o.outputs[0].text) for o in outputs] == [("b", "h"), ("a", "i")]


def test_no_text_when_none_is_wanted_or_possible(engine) -> None:
    engine.add(detokenize=False, logprobs=0)
    [output] = engine.step(update([104], logprobs=[TokenLogprobs(104, -1.0, 1, ())]))
    assert output.outputs[0].text == "" and output.outputs[0].token_ids == [104]
    assert output.outputs[0].logprobs[0][104].decoded_token == "h"
    bare = OutputFeed(None)
    bare.add(logprobs=0)
    [output] = bare.step(update([104], logprobs=[TokenLogprobs(104, -1.0, 1, ())], reason=LENGTH))
    assert output.outputs[0].text == "" and output.prompt is None
    assert output.outputs[0].logprobs[0][104].decoded_token is None


# -- logprobs and metrics


def test_logprobs(engine) -> None:
    engine.add(logprobs=2)
    first = TokenLogprobs(104, -3.0, 7, ((105, -0.5), (EOS, -1.0)))
    second = TokenLogprobs(105, -0.25, 1, ((105, -0.25), (0xE2, -2.0)))
    [output] = engine.step(update([104], logprobs=[first]))
    [output] = engine.step(update([105], logprobs=[second]))
    completion = output.outputs[0]
    assert completion.cumulative_logprob == -3.25
    one, two = completion.logprobs
    assert list(one) == [104, 105, EOS] and list(two) == [105, 0xE2]
    assert [(p.logprob, p.rank, p.decoded_token) for p in one.values()] == [
        (-3.0, 7, "h"),
        (-0.5, 1, "i"),
        (-1.0, 2, "</s>"),
    ]
    assert (two[0xE2].rank, two[0xE2].decoded_token) == (2, "�")


def test_no_logprobs_unless_asked(engine) -> None:
    engine.add()
    [output] = engine.step(update([104]))
    assert output.outputs[0].logprobs is None and output.outputs[0].cumulative_logprob is None
    assert output.prompt_logprobs is None


def test_delta_logprobs(byte_tokenizer) -> None:
    engine = OutputFeed(byte_tokenizer, OutputKind.DELTA)
    engine.add(logprobs=0)
    entries = [TokenLogprobs(104 + i, -1.0 - i, 1, ()) for i in range(3)]
    for i, entry in enumerate(entries):
        [output] = engine.step(update([entry.token_id], logprobs=[entry]))
        assert [list(position) for position in output.outputs[0].logprobs] == [[104 + i]]
    assert output.outputs[0].cumulative_logprob == -6.0


@pytest.mark.parametrize("kind", OutputKind)
def test_prompt_logprobs_come_in_chunks(byte_tokenizer, kind) -> None:
    engine = OutputFeed(byte_tokenizer, kind)
    engine.add(prompt=[97, 98, 99, 100], prompt_logprobs=1, n=2)
    entries = [TokenLogprobs(i, -float(i), 1, ((5, -0.1),)) for i in (98, 99, 100)]
    assert engine.step(update(prompt=entries[:2]), update(prompt=entries[:2], sample=1)) == []
    outputs = engine.step(update([1], prompt=entries[2:]), update(prompt=entries[2:], sample=1))
    outputs += engine.step(update([1], reason=LENGTH), update([1], sample=1, reason=LENGTH))
    with_them = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert len(with_them) == (2 if kind is OutputKind.CUMULATIVE else 1)
    assert with_them[0][0] is None
    assert [list(position) for position in with_them[0][1:]] == [[98, 5], [99, 5], [100, 5]]


def test_prompt_logprobs_when_the_sample_that_brought_them_is_aborted(engine) -> None:
    """Another one then runs the prompt from its start."""
    engine.add(prompt=[97, 98, 99], prompt_logprobs=0, n=2)
    entries = [TokenLogprobs(i, -float(i), 1, ()) for i in (98, 99)]
    engine.step(update(prompt=entries[:1]))
    engine.outputs.abort_sample("r", 0, 1.0)
    engine.step(update(prompt=entries[:1], sample=1))
    [output] = engine.step(update([1], prompt=entries[1:], sample=1))
    assert [list(position) for position in output.prompt_logprobs[1:]] == [[98], [99]]


def test_cached_tokens_are_said(engine) -> None:
    usage = RequestKVUsage(cached_tokens=7)
    engine.stats = lambda request_id: (RequestMetrics(), usage)
    engine.add()
    [output] = engine.step(update([104]))
    assert output.num_cached_tokens == 7


def test_times_without_stats(engine) -> None:
    engine.add()
    engine.push("ab")
    [last] = engine.step(update([1], reason=LENGTH))
    metrics = last.metrics
    assert (metrics.arrival_s, metrics.first_token_s, metrics.last_token_s) == (-1.0, 1.0, 3.0)
    assert (metrics.finished_s, metrics.num_generation_tokens, metrics.ttft_s) == (3.0, 3, 2.0)


def test_stats_are_copied_and_completed(byte_tokenizer) -> None:
    """A request that a stop string ends is not finished yet for the scheduler."""
    engine = OutputFeed(byte_tokenizer)
    metrics = RequestMetrics(arrival_s=1.0, num_preemptions=2, first_token_s=3.0)
    usage = RequestKVUsage(peak_blocks=3)
    engine.stats = lambda request_id: (metrics, usage) if request_id == "r" else None
    engine.add(stop=["b"])
    engine.add("other")
    [output, other] = engine.step(update([98]), update([98], request_id="other"))
    assert output.metrics.finished_s == 1.0 and output.metrics.num_preemptions == 2
    assert output.kv == usage and output.kv is not usage
    assert metrics.finished_s is None
    assert other.metrics.first_token_s == 1.0 and other.kv == RequestKVUsage()


# -- the three kinds


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_three_kinds_tell_the_same_story(byte_tokenizer, data) -> None:
    """Whatever comes: deltas add up to the last cumulative output, which the final one equals."""
    text = data.draw(st.text("abé", max_size=12))
    ids = list(text.encode())
    n = data.draw(st.integers(1, 2))
    stop = data.draw(st.lists(st.text("abé", min_size=1, max_size=3), max_size=2))
    params = dict(
        n=n, stop=stop, logprobs=data.draw(st.sampled_from([None, 0])),
        include_stop_str_in_output=data.draw(st.booleans()),
        min_tokens=data.draw(st.integers(0, 3)),
    )  # fmt: skip
    steps: list[list[SeqUpdate]] = []
    places = [0] * n
    while any(place <= len(ids) for place in places):
        updates = []
        for sample in range(n):
            place = places[sample]
            if place > len(ids) or data.draw(st.integers(0, 3)) == 3:
                continue
            count = data.draw(st.integers(1, 3))
            new = ids[place : place + count]
            places[sample] += count
            ends = places[sample] > len(ids)
            entries = [TokenLogprobs(i, math.log(0.5), 1, ()) for i in new]
            updates.append(
                update(new, sample=sample, logprobs=entries, reason=LENGTH if ends else None)
            )
        steps.append(updates)
    stories = {}
    for kind in OutputKind:
        engine = OutputFeed(byte_tokenizer, kind)
        engine.add(**params)
        stories[kind] = [output for updates in steps for output in engine.step(*updates)]
        assert len(engine.outputs) == 0 and stories[kind][-1].finished
    [final] = stories[OutputKind.FINAL_ONLY]
    assert stories[OutputKind.CUMULATIVE][-1] == final
    for sample in range(n):
        deltas = [c for o in stories[OutputKind.DELTA] for c in o.outputs if c.index == sample]
        whole = final.outputs[sample]
        assert "".join(c.text for c in deltas) == whole.text
        assert [i for c in deltas for i in c.token_ids] == whole.token_ids
        assert [p for c in deltas for p in c.logprobs or ()] == (whole.logprobs or [])
        assert deltas[-1].finish_reason == whole.finish_reason
        so_far = [o.outputs[sample].text for o in stories[OutputKind.CUMULATIVE]]
        for before, after in pairwise(so_far):
            assert after.startswith(before)
