"""Prompts and parameters: what they become, and what is refused by name."""

from __future__ import annotations

import pytest

from octavo.engine.input import InputProcessor
from octavo.errors import InvalidRequestError, RequestCapacityError
from octavo.request import BeamSearchParams, SamplingParams

BOS, EOS, SPACE_CAT = 256, 257, 259


@pytest.fixture
def inputs(byte_tokenizer) -> InputProcessor:
    return InputProcessor(byte_tokenizer, vocab_size=300, max_model_len=100, seed=7)


@pytest.fixture
def bare() -> InputProcessor:
    return InputProcessor(None, vocab_size=300, max_model_len=100)


def request_of(inputs, prompt="hi", **params):
    """One that the engine takes."""
    request, _ = inputs.process("r", prompt, SamplingParams(**params))
    inputs.accepted(SamplingParams(**params))
    return request


@pytest.mark.parametrize("prompt", ["hi", {"prompt": "hi"}])
def test_text_prompts(inputs, prompt) -> None:
    request, text = inputs.process("r", prompt, SamplingParams(), arrival_s=3.5, priority=-2)
    assert request.prompt_token_ids == [BOS, 104, 105] and text == "hi"
    assert (request.request_id, request.arrival_s, request.priority) == ("r", 3.5, -2)


@pytest.mark.parametrize("prompt", [[BOS, 104], (BOS, 104), {"prompt_token_ids": [BOS, 104]}])
def test_token_prompts(inputs, bare, prompt) -> None:
    request, text = inputs.process("r", prompt, SamplingParams())
    assert request.prompt_token_ids == [BOS, 104] and text is None
    assert bare.process("r", prompt, SamplingParams())[0].prompt_token_ids == [BOS, 104]


def test_the_prompt_is_a_copy(inputs) -> None:
    ids = [1, 2]
    request = request_of(inputs, ids)
    ids.append(3)
    assert request.prompt_token_ids == [1, 2]


def test_everything_reaches_the_request(inputs) -> None:
    request = request_of(
        inputs,
        n=3,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=2,
        seed=-5,
        stop_token_ids=[10, 11, 10],
        max_tokens=20,
        min_tokens=2,
        logprobs=3,
        prompt_logprobs=0,
        logit_bias={5: 1, 299: -100.0},
        allowed_token_ids=[9, 8, 9],
    )
    sampler = request.sampler
    assert (request.n, request.max_tokens) == (3, 20)
    assert request.stop_token_ids == {10, 11} and request.eos_token_ids == {EOS}
    assert (sampler.temperature, sampler.top_p, sampler.top_k, sampler.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampler.presence_penalty, sampler.frequency_penalty) == (1.0, -1.0)
    assert (sampler.repetition_penalty, sampler.seed) == (2.0, -5)
    assert sampler.logit_bias == ((5, 1.0), (299, -100.0))
    assert sampler.allowed_token_ids == (9, 8)
    assert (sampler.min_tokens, sampler.min_tokens_masked_ids) == (2, (10, 11, EOS))
    assert (sampler.num_logprobs, sampler.num_prompt_logprobs) == (3, 0)


def test_defaults_cost_nothing(inputs) -> None:
    sampler = request_of(inputs).sampler
    assert sampler.min_tokens_masked_ids == () and sampler.bad_words == ()
    assert sampler.allowed_token_ids is None and sampler.num_logprobs is None


def test_best_of_generates_more_and_needs_logprobs_to_choose(inputs) -> None:
    request = request_of(inputs, n=2, best_of=5)
    assert (request.n, request.sampler.num_logprobs) == (5, 0)
    assert request_of(inputs, n=2, best_of=5, logprobs=3).sampler.num_logprobs == 3
    alike = request_of(inputs, n=2, best_of=2)
    assert (alike.n, alike.sampler.num_logprobs) == (2, None), "nothing is chosen"


def test_beam_search_parameters(inputs) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=7, temperature=0.5)
    request, _ = inputs.process("r", "hi", params)
    assert request.beam is params
    assert (request.n, request.max_tokens, request.sampler.temperature) == (3, 7, 0.5)
    assert request.eos_token_ids == {EOS} and request.stop_token_ids == frozenset()
    params = BeamSearchParams(beam_width=3, max_tokens=7, ignore_eos=True)
    assert inputs.process("r", "hi", params)[0].eos_token_ids == frozenset()


def test_beams_use_no_seed(inputs) -> None:
    before = request_of(inputs).sampler.seed
    fresh = InputProcessor(inputs._tokenizer, vocab_size=300, max_model_len=100, seed=7)
    fresh.process("r", "hi", BeamSearchParams(beam_width=2, max_tokens=1))
    assert request_of(fresh).sampler.seed == before


def test_cache_salt(inputs) -> None:
    assert request_of(inputs).cache_salt == ""
    assert request_of(inputs, {"prompt": "hi", "cache_salt": "a"}).cache_salt == "a"
    prompt = {"prompt_token_ids": [1, 2], "cache_salt": "b"}
    request = request_of(inputs, prompt)
    assert (request.prompt_token_ids, request.cache_salt) == ([1, 2], "b")
    assert set(prompt) == {"prompt_token_ids", "cache_salt"}, "the caller's dict is left alone"


def test_ignore_eos(inputs) -> None:
    request = request_of(inputs, ignore_eos=True, min_tokens=1, stop_token_ids=[3])
    assert request.eos_token_ids == frozenset() and request.stop_token_ids == {3}
    assert request.sampler.min_tokens_masked_ids == (3, EOS)


def test_the_models_eos_replaces_the_tokenizers(byte_tokenizer) -> None:
    inputs = InputProcessor(byte_tokenizer, vocab_size=300, max_model_len=9, eos_token_ids=(1, 2))
    assert request_of(inputs).eos_token_ids == {1, 2}


def test_seeds_are_drawn_from_the_engines_and_repeatable(byte_tokenizer) -> None:
    def seeds(engine_seed: int) -> list[int]:
        inputs = InputProcessor(byte_tokenizer, vocab_size=300, max_model_len=9, seed=engine_seed)
        found = []
        for i in range(20):
            if i == 7:
                with pytest.raises(InvalidRequestError):
                    request_of(inputs, "")
                request_of(inputs, seed=1)
            found.append(request_of(inputs).sampler.seed)
        return found

    assert seeds(1) == seeds(1)  # refused requests and those with a seed use none up
    assert len(set(seeds(1) + seeds(2))) == 40
    assert all(0 <= seed < 2**63 for seed in seeds(3))


def test_a_refused_request_uses_no_seed(byte_tokenizer) -> None:
    calm, troubled = (
        InputProcessor(byte_tokenizer, vocab_size=300, max_model_len=9, seed=1) for _ in range(2)
    )
    for _ in range(5):
        with pytest.raises(InvalidRequestError):
            request_of(troubled, "much too long for the context")
        troubled.process("r", "hi", SamplingParams())  # the scheduler refuses it
        assert request_of(calm).sampler.seed == request_of(troubled).sampler.seed


@pytest.mark.parametrize("capped_by", [None, "--num-gpu-blocks-override"])
def test_what_capped_the_context_is_said(byte_tokenizer, capped_by) -> None:
    inputs = InputProcessor(byte_tokenizer, vocab_size=300, max_model_len=9, capped_by=capped_by)
    with pytest.raises(RequestCapacityError, match="max_model_len 9") as caught:
        request_of(inputs, "more than nine")
    assert ("raise --max-model-len" in str(caught.value)) == (capped_by is None)
    assert ("held at the start" in str(caught.value)) == (capped_by is not None)
    if capped_by is None:
        assert request_of(inputs, max_tokens=7), "left to the scheduler"
    else:
        with pytest.raises(RequestCapacityError, match="larger KV pool: raise --num-gpu") as caught:
            request_of(inputs, max_tokens=7)
        assert caught.value.parameter == "max_tokens"
        assert request_of(inputs, max_tokens=6)


def test_bad_words_at_the_start_and_behind_a_space(inputs) -> None:
    assert request_of(inputs, bad_words=["cat"]).sampler.bad_words == (
        tuple(b"cat"),
        (SPACE_CAT,),
    )
    # " dog" ends in the tokens of "dog": forbidding those forbids it too.
    assert request_of(inputs, bad_words=[" dog"]).sampler.bad_words == (tuple(b"dog"),)
    assert request_of(inputs, bad_words=["\n"]).sampler.bad_words == ((10,),)
    assert request_of(inputs, bad_words=["x", "x"]).sampler.bad_words == ((120,),)


@pytest.mark.parametrize(
    ("prompt", "parameter", "words"),
    [
        ("", "prompt", "empty"),
        ([], "prompt_token_ids", "empty"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt_token_ids": []}, "prompt_token_ids", "empty"),
        ([1, 300], "prompt_token_ids", "token id 300 at index 1.*ends at 299"),
        ([-1], "prompt_token_ids", "token id -1 at index 0"),
        ([1, "a"], "prompt_token_ids", "got 'a' at index 1"),
        ([True], "prompt_token_ids", "got True"),
        ([1.0], "prompt_token_ids", r"got 1\.0"),
        (7, "prompt", "got int"),
        (None, "prompt", "got NoneType"),
        ({}, "prompt", "exactly one of"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt", "exactly one of"),
        ({"prompt": "a", "multi_modal_data": {}}, "multi_modal_data", "unknown key"),
        ({"prompt": [1]}, "prompt", "prompt_token_ids"),
        ({"prompt": "a", "cache_salt": 3}, "cache_salt", "string"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt", "not empty"),
        ({"cache_salt": "a"}, "prompt", "exactly one of"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids", "got str"),
    ],
)
def test_refused_prompts(inputs, prompt, parameter, words) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        request_of(inputs, prompt)
    assert caught.value.parameter == parameter
    request_of(inputs)  # and the next one is taken


def test_prompt_as_long_as_the_context(inputs) -> None:
    assert len(request_of(inputs, [1] * 99).prompt_token_ids) == 99
    with pytest.raises(RequestCapacityError, match=r"100 \+ 1.*max_model_len 100.*at most 99"):
        request_of(inputs, [1] * 100)
    with pytest.raises(RequestCapacityError):
        request_of(inputs, "x" * 5000)


@pytest.mark.parametrize(
    ("params", "parameter", "words"),
    [
        (dict(stop_token_ids=[5, 300]), "stop_token_ids", "token id 300 at index 1"),
        (dict(allowed_token_ids=[300]), "allowed_token_ids", "token id 300"),
        (dict(logit_bias={1: 0.5, 400: 1.0}), "logit_bias", "token id 400"),
        (dict(bad_words=["a"], allowed_token_ids=[97]), "bad_words", "nothing could be sampled"),
        (
            dict(min_tokens=1, allowed_token_ids=[EOS, 5], stop_token_ids=[5]),
            "min_tokens",
            "lower min_tokens",
        ),
    ],
)
def test_refused_parameters(inputs, params, parameter, words) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        request_of(inputs, **params)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("prompt", "params", "parameter"),
    [
        ("hi", {}, "prompt"),
        ({"prompt": "hi"}, {}, "prompt"),
        ([1], dict(stop=["x"]), "stop"),
        ([1], dict(bad_words=["x"]), "bad_words"),
    ],
)
def test_text_without_a_tokenizer(bare, prompt, params, parameter) -> None:
    with pytest.raises(InvalidRequestError, match=r"no tokenizer.*--skip-tokenizer-init") as caught:
        request_of(bare, prompt, **params)
    assert caught.value.parameter == parameter


def test_words_without_tokens(byte_tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(byte_tokenizer, "encode", lambda text, add_special_tokens=True: [])
    inputs = InputProcessor(byte_tokenizer, vocab_size=300, max_model_len=100)
    with pytest.raises(InvalidRequestError, match="no tokens") as caught:
        request_of(inputs, [1], bad_words=["x"])
    assert caught.value.parameter == "bad_words"


def test_a_tokenizer_larger_than_the_model_is_noticed(byte_tokenizer) -> None:
    inputs = InputProcessor(byte_tokenizer, vocab_size=200, max_model_len=100)
    with pytest.raises(InvalidRequestError, match="256"):
        request_of(inputs)


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        (("", "hi", SamplingParams()), "request_id"),
        ((5, "hi", SamplingParams()), "request_id"),
        (("r", "hi", {"temperature": 1}), "sampling_params"),
    ],
)
def test_wrong_types(inputs, arguments, parameter) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        inputs.process(*arguments)
    assert caught.value.parameter == parameter
    with pytest.raises(InvalidRequestError) as caught:
        inputs.process("r", "hi", SamplingParams(), priority="high")
    assert caught.value.parameter == "priority"
