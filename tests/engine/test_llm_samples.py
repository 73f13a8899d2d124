"""`n`, `best_of` and beams through `LLM`: seeds, streaming, aborts of one sample, ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llm_support import GREEDY, OPTIONS, assert_drained, tokens

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import InvalidRequestError
from octavo.request import FinishReason

PROMPT = [65 + i for i in range(10)]
HOT: dict[str, Any] = {"temperature": 1.5, "seed": 11, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture
def weighted(tiny_weights_path: Path) -> Iterator[LLM]:
    """Fixed random weights, whose logprobs differ from token to token."""
    options = OPTIONS | {"load_format": "auto"}
    with LLM(str(tiny_weights_path), **options) as llm:
        yield llm
        assert_drained(llm)


def samples(output: Any) -> list[list[int]]:
    return [sample.token_ids for sample in output.outputs]


# -- n


def test_sample_i_of_a_seed_is_the_same_alone_and_in_a_crowd(weighted: LLM) -> None:
    crowd = [SamplingParams(temperature=1.0, max_tokens=9, ignore_eos=True)] * 3
    three = SamplingParams(**HOT, n=3)
    alone = samples(weighted.generate(PROMPT, three, use_tqdm=False)[0])
    among = weighted.generate([*"xyz", PROMPT], [*crowd, three], use_tqdm=False)[-1]
    assert samples(among) == alone
    assert len({tuple(sample) for sample in alone}) == 3
    first = weighted.generate(PROMPT, SamplingParams(**HOT), use_tqdm=False)[0]
    assert samples(first) == alone[:1], "sample 0 does not depend on n"


def test_samples_stream_side_by_side(weighted: LLM) -> None:
    params = SamplingParams(**HOT, n=3, logprobs=1)
    (whole,) = weighted.generate(PROMPT, params, use_tqdm=False)
    outputs = list(weighted.stream(PROMPT, params))
    assert [len(o.outputs) for o in outputs] == [3] * 12
    for i, output in enumerate(outputs):
        assert samples(output) == [sample[: i + 1] for sample in samples(whole)]
    assert outputs[-1].finished
    for one, other in zip(outputs[-1].outputs, whole.outputs, strict=True):
        assert one.text == other.text and one.logprobs is not None
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


def test_the_prompt_is_computed_once_and_shared(weighted: LLM) -> None:
    params = SamplingParams(**HOT, n=4)
    (output,) = weighted.generate(PROMPT, params, use_tqdm=False)
    history = weighted.memory_report().history
    assert history.num_tokens_computed == 10 + 4 * 11, "the last token of each is not computed"
    # 2 full blocks of 4 are shared; each sample has 4 blocks for its other 13 tokens.
    assert output.kv.peak_blocks == 2 + 4 * 4
    assert output.kv.forked_tokens == 3 * 10
    assert 0 < history.mean_shared_ratio < 1


def test_more_samples_than_seats(weighted: LLM) -> None:
    params = SamplingParams(**HOT, n=12)
    (output,) = weighted.generate(PROMPT, params, use_tqdm=False)
    again = weighted.generate(PROMPT, SamplingParams(**HOT, n=3), use_tqdm=False)[0]
    assert samples(output)[:3] == samples(again) and len(samples(output)) == 12


def test_samples_stop_on_their_own(weighted: LLM) -> None:
    (whole,) = weighted.generate(PROMPT, SamplingParams(**HOT, n=3), use_tqdm=False)
    stop = samples(whole)[1][4]
    params = SamplingParams(**HOT, n=3, stop_token_ids=[stop])
    (output,) = weighted.generate(PROMPT, params, use_tqdm=False)
    for full, cut in zip(samples(whole), output.outputs, strict=True):
        end = full.index(stop) + 1 if stop in full else len(full)
        assert cut.token_ids == full[:end]
        assert cut.finish_reason == ("stop" if stop in full else "length")


def test_one_sample_is_aborted_and_the_others_go_on(weighted: LLM) -> None:
    params = SamplingParams(**HOT, n=3)
    whole = samples(weighted.generate(PROMPT, params, use_tqdm=False)[0])
    for victim in range(3):
        stream = weighted.stream(PROMPT, params)
        request_id = next(stream).request_id
        assert weighted.abort_sample(request_id, victim)
        assert not weighted.abort_sample(request_id, victim)
        assert not weighted.block_tables()[request_id][victim]
        *_, last = stream
        for index, sample in enumerate(last.outputs):
            if index == victim:
                assert sample.finish_reason == FinishReason.ABORT
                assert sample.token_ids == whole[index][:1]
            else:
                assert sample.token_ids == whole[index]


def test_aborted_sample_by_sample(weighted: LLM) -> None:
    stream = weighted.stream(PROMPT, SamplingParams(**HOT, n=2))
    request_id = next(stream).request_id
    assert weighted.abort_sample(request_id, 1) and weighted.abort_sample(request_id, 0)
    (last,) = stream
    assert last.finished
    assert [sample.finish_reason for sample in last.outputs] == [FinishReason.ABORT] * 2
    assert not weighted.abort_sample(request_id, 0) and not weighted.abort_sample("none", 0)


def test_samples_of_which_only_the_end_is_wanted_keep_what_they_have_when_aborted(
    weighted: LLM,
) -> None:
    params = SamplingParams(**HOT, n=3)
    whole = samples(weighted.generate(PROMPT, params, use_tqdm=False)[0])
    stream = weighted.stream(PROMPT, params, final_only=True)
    others = weighted.stream(PROMPT, GREEDY)  # whoever reads them runs the steps of all
    next(others), next(others), next(others)
    assert weighted.abort_sample(stream.request_id, 1)
    (last,) = stream
    assert samples(last) == [whole[0], whole[1][:3], whole[2]]
    assert last.outputs[1].finish_reason == FinishReason.ABORT
    streamed = list(weighted.stream(PROMPT, params))[-1]
    assert [o.text for o in last.outputs][::2] == [o.text for o in streamed.outputs][::2]
    assert last.outputs[1].text == streamed.outputs[1].text[: len(last.outputs[1].text)]


# -- best_of


def test_best_of_returns_the_best_by_mean_logprob(weighted: LLM) -> None:
    hot = HOT | {"stop_token_ids": list(range(40))}  # lengths differ
    (every,) = weighted.generate(PROMPT, SamplingParams(**hot, n=6, logprobs=0), use_tqdm=False)
    assert len({len(sample) for sample in samples(every)}) > 1
    means = [o.cumulative_logprob / len(o.token_ids) for o in every.outputs]  # type: ignore[operator]
    order = sorted(range(6), key=lambda i: (-means[i], i))
    (best,) = weighted.generate(PROMPT, SamplingParams(**hot, n=2, best_of=6), use_tqdm=False)
    assert samples(best) == [samples(every)[i] for i in order[:2]]
    assert [sample.index for sample in best.outputs] == [0, 1]
    assert [s.score for s in best.outputs] == [pytest.approx(means[i]) for i in order[:2]]
    assert all(sample.logprobs is None for sample in best.outputs)


def test_best_of_as_many_chooses_nothing(weighted: LLM) -> None:
    plain = weighted.generate(PROMPT, SamplingParams(**HOT, n=2), use_tqdm=False)[0]
    *_, last = weighted.stream(PROMPT, SamplingParams(**HOT, n=2, best_of=2))
    assert last.outputs == plain.outputs


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SamplingParams(n=1, best_of=2), "best_of"),
        (BeamSearchParams(beam_width=2, max_tokens=3), "beam_width"),
    ],
)
def test_what_is_ranked_at_the_end_cannot_be_streamed(llm: LLM, params: Any, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be streamed") as caught:
        llm.stream("x", params)
    assert caught.value.parameter == name
    (end,) = llm.stream("x", params, final_only=True)
    assert end.finished


# -- beams


def test_beams_run_with_everything_else(weighted: LLM) -> None:
    beams = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    kinds = [GREEDY, SamplingParams(**HOT), SamplingParams(**HOT, n=2), beams, beams]
    prompts = [PROMPT, PROMPT[:7], PROMPT[:4], PROMPT, [9, 8, 7]]
    alone = [
        samples(weighted.generate([prompt], [kind], use_tqdm=False)[0])
        for prompt, kind in zip(prompts, kinds, strict=True)
    ]
    together = weighted.generate(prompts, kinds, use_tqdm=False)
    assert [samples(output) for output in together] == alone
    assert weighted.memory_report().history.peak_seqs == 7, "of 8 seats; 3 beams wait"


def test_beam_search_has_its_own_kind_of_output(weighted: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True, length_penalty=2.0)
    outputs = weighted.beam_search([PROMPT, "text"], params)
    for output in outputs:
        assert len(output.sequences) == 3
        scores = [beam.score for beam in output.sequences]
        assert scores == sorted(scores, reverse=True)
        for beam in output.sequences:
            assert beam.score == pytest.approx(beam.cum_logprob / 5**2.0)
            assert beam.finish_reason == FinishReason.LENGTH and beam.text
        assert output.kv.peak_blocks and output.metrics.num_generation_tokens
    assert outputs[0].sequences[0].tokens[:10] == PROMPT
    one = [BeamSearchParams(beam_width=width, max_tokens=5) for width in (1, 2)]
    assert [len(o.sequences) for o in weighted.beam_search(["a", "b"], one)] == [1, 2]


def test_one_beam_is_greedy(weighted: LLM) -> None:
    one = BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True)
    (output,) = weighted.beam_search(PROMPT, one)
    assert output.sequences[0].tokens[10:] == tokens(weighted, PROMPT)


def test_a_single_beam_cannot_be_aborted(weighted: LLM) -> None:
    stream = weighted.stream(PROMPT, BeamSearchParams(beam_width=2, max_tokens=9), final_only=True)
    with pytest.raises(InvalidRequestError, match="all of it"):
        weighted.abort_sample(stream.request_id, 0)
    stream.close()
    assert not weighted.block_tables()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda llm: llm.beam_search("a", GREEDY), "params"),
        (lambda llm: llm.beam_search(["a"], []), "params"),
        (lambda llm: llm.beam_search("a", BeamSearchParams(beam_width=9, max_tokens=3)), "width"),
        (lambda llm: llm.beam_search("a", BeamSearchParams(beam_width=8, max_tokens=62)), "width"),
        (lambda llm: BeamSearchParams(beam_width=0, max_tokens=1), "beam_width"),
        (lambda llm: BeamSearchParams(beam_width=1, max_tokens=1, early_stopping=2), "early"),
    ],
)
def test_refused_beam_searches(llm: LLM, call: Any, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        call(llm)


# -- the real model


@pytest.mark.model
def test_real_samples_and_seeds(default_model_path: Path) -> None:
    text = "Once upon a time, in a village by the sea,"
    with LLM(str(default_model_path), max_model_len=256) as llm:
        params = SamplingParams(temperature=0.9, seed=3, n=3, max_tokens=24, logprobs=0)
        *_, streamed = llm.stream(text, params)
        crowd = [SamplingParams(temperature=1.0, max_tokens=16)] * 5
        among = llm.generate(["Ships", "Cats", "Snow", "Bees", "Night", text], [*crowd, params])[-1]
        assert samples(among) == samples(streamed)
        assert len({sample.text for sample in among.outputs}) == 3
        (best,) = llm.generate(
            text, SamplingParams(temperature=0.9, seed=3, n=1, best_of=3, max_tokens=24)
        )
        means = [o.cumulative_logprob / len(o.token_ids) for o in among.outputs]  # type: ignore[operator]
        assert best.outputs[0].token_ids == samples(among)[means.index(max(means))]
