"""`LLM` as a program uses it: what it returns, refuses, survives, and gives back."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from octavo import LLM, EngineConfig, SamplingParams
from octavo.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    RequestCapacityError,
    StepFailedError,
)
from octavo.request import FinishReason

OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 64,
    "block_size": 4,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
    "num_threads": 1,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def llm(tiny_model_path: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model_path), **OPTIONS) as llm:
        yield llm
        assert_drained(llm)


def assert_drained(llm: LLM) -> None:
    """I3: nothing runs, so the whole pool is free, and nothing is broken."""
    core = llm._engine.engine.core
    core.kv.check_integrity()
    assert not llm.block_tables()
    assert core.kv.num_free_blocks == core.kv.num_blocks


def tokens(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


# -- what it returns


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
    second.close()  # type: ignore[attr-defined]
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


def test_usage_and_metrics(llm: LLM) -> None:
    (output,) = llm.generate("sixteen tokens..", GREEDY, use_tqdm=False)
    assert len(output.prompt_token_ids) == 16
    # 16 prompt and 5 of 6 output tokens have KV: 21 tokens in blocks of 4.
    assert output.kv.peak_blocks == 6 and output.kv.block_seconds > 0
    metrics = output.metrics
    assert metrics.num_generation_tokens == 6
    assert metrics.queue_s is not None and metrics.ttft_s is not None and metrics.e2e_s is not None
    assert 0 <= metrics.queue_s <= metrics.ttft_s <= metrics.e2e_s


# -- what it refuses, and goes on serving


@pytest.mark.parametrize(
    ("prompt", "params", "error", "says"),
    [
        ("", {}, InvalidRequestError, "empty"),
        ([[]], {}, InvalidRequestError, "empty"),
        ("x" * 64, {}, RequestCapacityError, "--max-model-len"),
        ("x", {"max_tokens": 10**9}, RequestCapacityError, "max_tokens"),
        ([[1, 320]], {}, InvalidRequestError, "319"),
        ([[1, -1]], {}, InvalidRequestError, "-1"),
        ("x", {"stop_token_ids": [400]}, InvalidRequestError, "stop_token_ids"),
        ({"promt": "x"}, {}, InvalidRequestError, "promt"),
        (3.5, {}, InvalidRequestError, "prompt must be"),
    ],
)
def test_refused_requests(
    llm: LLM, prompt: Any, params: dict[str, Any], error: Any, says: str
) -> None:
    expected = tokens(llm, "good")
    with pytest.raises(error, match=says):
        llm.generate(prompt, SamplingParams(**{"temperature": 0, **params}), use_tqdm=False)
    assert tokens(llm, "good") == expected


def test_one_bad_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate(["fine", "also fine", ""], GREEDY, use_tqdm=False)
    assert_drained(llm)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"top_p": 1.5},
        {"top_k": -2}, {"min_p": 2}, {"n": 0}, {"max_tokens": 0}, {"min_tokens": -1},
        {"presence_penalty": 3}, {"frequency_penalty": float("inf")}, {"repetition_penalty": 0},
        {"logprobs": -1}, {"logprobs": 1000}, {"logit_bias": {1: 200.0}}, {"stop": [""]},
        {"allowed_token_ids": []}, {"bad_words": [""]}, {"seed": 1.5}, {"max_tokens": True},
        {"min_tokens": 20},
    ],
    ids=str,
)  # fmt: skip
def test_params_are_refused_by_name(params: dict[str, Any]) -> None:
    (name,) = params
    with pytest.raises(InvalidRequestError, match=name) as caught:
        SamplingParams(**params)
    assert caught.value.parameter == name


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="temprature"):
        SamplingParams.from_dict({"temprature": 0})
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        EngineConfig.from_kwargs(blocksize=16)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"block_size": 0}, ConfigError, "block_size"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, ConfigError, "max_num_batched_tokens"),
        ({"max_model_len": 257}, ConfigError, "256"),
        ({"num_gpu_blocks_override": 2}, CapacityError, "--num-gpu-blocks-override"),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 100},
            CapacityError,
            "--kv-cache-memory-bytes",
        ),
        (
            {"num_gpu_blocks_override": None, "kv_cache_memory_bytes": 2**60},
            CapacityError,
            "--kv-cache-memory-bytes",
        ),
        ({"num_gpu_blocks_override": 10**9}, CapacityError, "--num-gpu-blocks-override"),
        ({"max_num_batched_tokens": 10**12}, CapacityError, "--max-num-batched-tokens"),
        ({"dtype": "int3"}, ConfigError, "dtype"),
        ({"kv_policy": "magic"}, ConfigError, "kv_policy"),
    ],
)
def test_refused_configs(
    tiny_model_path: Path, options: dict[str, Any], error: Any, says: str
) -> None:
    with pytest.raises(error, match=says):
        LLM(str(tiny_model_path), **{**OPTIONS, **options})


def test_text_without_tokenizer(tiny_model_path: Path) -> None:
    with LLM(str(tiny_model_path), **OPTIONS, skip_tokenizer_init=True) as llm:
        with pytest.raises(InvalidRequestError, match="skip-tokenizer-init"):
            llm.generate("text", GREEDY, use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)
        (output,) = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)
        assert output.prompt is None and output.outputs[0].text == ""
        assert len(output.outputs[0].token_ids) == 6


# -- what it survives


def test_a_failed_step_names_its_requests_and_the_engine_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(llm, "good")
    core = llm._engine.engine.core
    execute = core._execute

    def fail(plan: Any) -> Any:
        execute(plan)  # type: ignore[misc]
        raise RuntimeError("a device was lost")

    monkeypatch.setattr(core, "_execute", fail)
    with pytest.raises(StepFailedError, match="a device was lost") as caught:
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert len(caught.value.request_ids) == 2
    monkeypatch.setattr(core, "_execute", execute)
    assert tokens(llm, "good") == expected


def test_an_interrupted_step_leaves_an_engine_that_serves(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(llm, "good")
    core = llm._engine.engine.core
    execute = core._execute
    stream = llm.stream("streaming", GREEDY)
    next(stream)

    def interrupted(plan: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(core, "_execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", GREEDY, use_tqdm=False)
    monkeypatch.setattr(core, "_execute", execute)
    with pytest.raises(StepFailedError, match="aborted"):
        next(stream)
    assert not len(llm._engine.engine.outputs)
    assert tokens(llm, "good") == expected


def test_an_interrupted_decision_ends_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(now_s: float) -> Any:
        raise KeyboardInterrupt

    stream = llm.stream("streaming", GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.engine.core.scheduler, "schedule", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a", GREEDY, use_tqdm=False)
    for call in (lambda: next(stream), lambda: llm.generate("a", GREEDY, use_tqdm=False)):
        with pytest.raises(EngineDeadError, match="interrupted"):
            call()


def test_a_failed_step_does_not_lose_who_was_preempted(tiny_model_path: Path) -> None:
    """The runner never hears of a plan: those who live on must not keep their old block tables."""
    options = {**OPTIONS, "num_gpu_blocks_override": 12, "max_model_len": 40}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with LLM(str(tiny_model_path), **options) as llm:
        prompts = ["first one", "second one", "third one"]
        expected = {p: tokens(llm, p, params) for p in prompts}
        core = llm._engine.engine.core
        execute = core._execute
        assert execute is not None
        failed: list[int] = []

        def fail_at_preemption(plan: Any) -> Any:
            if plan.preempted and not failed:
                failed.extend(plan.preempted)
                raise RuntimeError("lost")
            result = execute(plan)
            inputs = execute.__self__.inputs  # type: ignore[attr-defined]
            for seq in plan.seqs:
                assert inputs.block_table(seq.seq_id) == list(core.kv.block_table(seq.seq_id))
            return result

        core._execute = fail_at_preemption
        streams = {p: llm.stream(p, params) for p in prompts}
        ends: dict[str, list[int]] = {}
        while streams:
            for prompt, stream in list(streams.items()):
                try:
                    output = next(stream)
                except StepFailedError:
                    del streams[prompt]
                    continue
                if output.finished:
                    ends[prompt] = output.outputs[0].token_ids
                    del streams[prompt]
        assert failed and 0 < len(ends) < len(prompts)
        assert ends == {p: expected[p] for p in ends}
        assert_drained(llm)


def test_a_stream_that_nobody_reads_is_aborted(llm: LLM) -> None:
    stream = llm.stream("never read", GREEDY)
    assert len(llm.block_tables()) == 1
    del stream
    gc.collect()
    assert not llm.block_tables() and not llm._mail


def test_damaged_weights_are_said_and_not_sampled_from(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(llm, "good")
    norm = llm._engine.engine.core._execute.__self__.model.final_norm.weight  # type: ignore[union-attr]
    good = norm.clone()
    norm.fill_(float("nan"))
    with pytest.raises(StepFailedError, match="NaN or infinity"):
        llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    norm.copy_(good)
    assert tokens(llm, "good") == expected


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda llm: llm.generate("a", 5), "sampling_params"),
        (lambda llm: llm.generate(["a", "b"], [GREEDY]), "sampling_params"),
        (lambda llm: llm.generate("a", GREEDY, priority=["high"]), "priority"),
        (lambda llm: llm.generate("a", GREEDY, priority=[3]), "priority"),
        (lambda llm: llm.stream("a", GREEDY, priority=3), "priority"),
        (lambda llm: llm.chat(None), "messages"),
        (lambda llm: llm.chat([]), "messages"),
    ],
)
def test_refused_calls(llm: LLM, call: Any, name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name) as caught:
        call(llm)
    assert caught.value.parameter == name


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


# -- what it gives back


def test_close_frees(tiny_model_path: Path) -> None:
    options = {**OPTIONS, "num_gpu_blocks_override": 4096, "block_size": 16}

    def cycle() -> int:
        with LLM(str(tiny_model_path), **options) as llm:
            runner = llm._engine.engine.core._execute.__self__  # type: ignore[union-attr]
            pool = weakref.ref(runner.kv_store.data)
            runner.kv_store.data.zero_()  # touch every page: 64 MiB
            llm.generate("x", GREEDY, use_tqdm=False)
            del runner
        assert pool() is None, "the KV pool outlived close()"
        with pytest.raises(EngineDeadError, match="closed"):
            llm.generate("x", GREEDY, use_tqdm=False)
        llm.close()
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    cycle()
    after = [cycle() for _ in range(4)]
    assert max(after) - min(after) < 24 * 2**20, f"resident memory moves: {after}"


def test_memory_is_flat_over_requests(llm: LLM) -> None:
    def run() -> int:
        llm.generate([[i % 256, 7, 9] for i in range(40)], GREEDY, use_tqdm=False)
        gc.collect()
        return int(psutil.Process().memory_info().rss)

    run()
    after = [run() for _ in range(5)]
    assert after[-1] - after[0] < 4 * 2**20, f"resident memory grows: {after}"
    assert not llm._mail and not len(llm._engine.engine.outputs)


def test_report_adds_up(llm: LLM) -> None:
    stream = llm.stream("some text", GREEDY)
    next(stream)
    report = llm.memory_report()
    assert sum(report.ledger.terms().values()) == report.ledger.num_slots == 256
    assert report.ledger.tokens == 9
    assert report.plan.budget_bytes == sum(report.plan.terms().values())
    values = report.as_dict()
    assert values["history"]["peak_blocks"] == 3
    assert "blocks" in str(report)
    list(stream)


def test_threads_are_torchs(tiny_model_path: Path) -> None:
    before = torch.get_num_threads()
    with LLM(str(tiny_model_path), **OPTIONS) as llm:
        assert llm.config.num_threads == 1 == torch.get_num_threads()
    torch.set_num_threads(before)
