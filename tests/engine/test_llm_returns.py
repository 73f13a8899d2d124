"""What `LLM` returns: outputs, streams, chats, times, and what the memory report says."""

from __future__ import annotations

from pathlib import Path

import pytest
from llm_support import GREEDY, OPTIONS, assert_drained, tokens

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import RequestCapacityError
from octavo.request import FinishReason


def test_prompt_forms_are_one(llm: LLM) -> None:
    text = "paged"
    ids = llm.get_tokenizer().encode(text)  # type: ignore[union-attr]
    expected = tokens(llm, text)
    assert len(expected) == 6
    for prompt in (ids, {"prompt": text}, {"prompt_token_ids": ids}, [text], [ids]):
        assert tokens(llm, prompt) == expected


def test_outputs_in_order_with_params_each(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 1, 3)]
    outputs = llm.generate(["a", "bb", "ccc"], params, use_tqdm=False)
    assert [o.prompt for o in outputs] == ["a", "bb", "ccc"]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [5, 1, 3]
    assert all(o.finished and o.outputs[0].finish_reason == FinishReason.LENGTH for o in outputs)


def test_logprobs_are_those_of_the_model(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    (output,) = llm.generate([[5, 6, 7, 8, 9]], params, use_tqdm=False)
    completion = output.outputs[0]
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 5
    # Forcing the generated tokens as a prompt must give the same numbers at the same positions.
    forced = [5, 6, 7, 8, 9, *completion.token_ids]
    (again,) = llm.generate([forced], params, use_tqdm=False)
    assert completion.logprobs is not None and again.prompt_logprobs is not None
    for i, token in enumerate(completion.token_ids):
        own = completion.logprobs[i][token]
        assert own.rank == 1 and len(completion.logprobs[i]) == 2
        forced_entry = again.prompt_logprobs[5 + i]
        assert forced_entry is not None
        assert forced_entry[token].logprob == pytest.approx(own.logprob, abs=1e-4)
    total = sum(completion.logprobs[i][t].logprob for i, t in enumerate(completion.token_ids))
    assert completion.cumulative_logprob == pytest.approx(total)


def test_seed_is_the_same_alone_and_in_a_crowd(llm: LLM) -> None:
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=12, ignore_eos=True, n=2)
    crowd = [SamplingParams(temperature=1.5, max_tokens=9, ignore_eos=True)] * 5
    alone = llm.generate("same", params, use_tqdm=False)[0]
    among = llm.generate([*"vwxyz", "same"], [*crowd, params], use_tqdm=False)[-1]
    for a, b in zip(alone.outputs, among.outputs, strict=True):
        assert a.token_ids == b.token_ids
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids


def test_stop_string_frees_at_once(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    text = llm.generate("x", long, use_tqdm=False)[0].outputs[0].text
    stop = text[3:5]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=stop)
    completion = llm.generate("x", params, use_tqdm=False)[0].outputs[0]
    assert completion.finish_reason == FinishReason.STOP and completion.stop_reason == stop
    assert completion.text == text[: text.index(stop)]
    assert len(completion.token_ids) < 20


def test_stream_is_cumulative_and_ends_like_generate(llm: LLM) -> None:
    seen = [o.outputs[0].token_ids for o in llm.stream("stream", GREEDY)]
    assert [len(s) for s in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[-1] == tokens(llm, "stream")


def test_streams_side_by_side_and_left_early(llm: LLM) -> None:
    expected = {p: tokens(llm, p) for p in ("one", "two")}
    first, second = llm.stream("one", GREEDY), llm.stream("two", GREEDY)
    next(first)
    next(second)
    assert len(llm.block_tables()) == 2
    second.close()
    assert len(llm.block_tables()) == 1
    assert list(first)[-1].outputs[0].token_ids == expected["one"]
    assert_drained(llm)


def test_chat_goes_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert output.prompt == "user: hi<eos>assistant: "
    assert output.outputs[0].token_ids == tokens(llm, output.prompt_token_ids)
    assert [o.finished for o in llm.chat([messages, messages], GREEDY, use_tqdm=False)] == [
        True
    ] * 2


def test_chat_has_priorities_and_beams(tiny_model_path: Path) -> None:
    options = OPTIONS | {"scheduling_policy": "priority", "max_num_seqs": 2}
    beams = BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True)
    chats = [[{"role": "user", "content": text}] for text in "abc"]
    with LLM(str(tiny_model_path), **options) as llm:
        outputs = llm.chat(chats, beams, use_tqdm=False, priority=[3, 2, 1])
        assert [len(output.outputs) for output in outputs] == [2, 2, 2]
        ends = [output.metrics.finished_s or 0.0 for output in outputs]
        assert ends[2] < ends[1] < ends[0]


def test_usage_and_metrics(llm: LLM) -> None:
    (output,) = llm.generate("sixteen tokens..", GREEDY, use_tqdm=False)
    assert len(output.prompt_token_ids) == 16
    # 16 prompt and 5 of 6 output tokens have KV: 21 tokens in blocks of 4.
    assert output.kv.peak_blocks == 6 and output.kv.block_seconds > 0
    metrics = output.metrics
    assert metrics.num_generation_tokens == 6
    assert metrics.queue_s is not None and metrics.ttft_s is not None and metrics.e2e_s is not None
    assert 0 <= metrics.queue_s <= metrics.ttft_s <= metrics.e2e_s


def test_one_request_that_fills_the_pool_ends_with_its_text(tiny_model_path: Path) -> None:
    # 6 blocks of 4 slots, and a context that could be longer.
    options = {**OPTIONS, "num_gpu_blocks_override": 6, "max_model_len": None}
    with LLM(str(tiny_model_path), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        (output,) = llm.generate("0123456789", params, use_tqdm=False)
        completion = output.outputs[0]
        assert completion.finish_reason == FinishReason.LENGTH
        assert len(completion.token_ids) in (24 - 10, 24 - 10 + 1)
        with pytest.raises(RequestCapacityError, match="max_tokens"):
            llm.generate("0123456789", SamplingParams(max_tokens=20), use_tqdm=False)
        assert_drained(llm)


def test_priority_runs_first(tiny_model_path: Path) -> None:
    options = {**OPTIONS, "max_num_seqs": 1, "scheduling_policy": "priority"}
    with LLM(str(tiny_model_path), **options) as llm:
        outputs = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False, priority=[2, 1, 0])
        ends = [o.metrics.finished_s for o in outputs]
        assert ends == sorted(ends, reverse=True)  # type: ignore[type-var]
