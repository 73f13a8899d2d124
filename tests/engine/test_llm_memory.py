"""What is kept and moved: prefix hits, salts, pins, events, a pool that changes its size."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llm_support import GREEDY, OPTIONS, assert_drained, tokens

from octavo import LLM, EventKind, SamplingParams
from octavo.errors import CapacityError, InvalidRequestError, RequestCapacityError, StepFailedError
from octavo.outputs import MissReason, RequestOutput

LONG = [(7 * i) % 200 for i in range(34)]
"""Eight blocks of 4 and a half."""


def ask(llm: LLM, prompt: Any, **params: Any) -> RequestOutput:
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 4, "ignore_eos": True, **params})
    return llm.generate([prompt], sampling, use_tqdm=False)[0]


def salted(prompt: list[int], salt: str) -> dict[str, Any]:
    return {"prompt_token_ids": prompt, "cache_salt": salt}


# -- the prefix cache


def test_a_second_prompt_finds_what_the_first_left(llm: LLM) -> None:
    first, second = ask(llm, LONG), ask(llm, LONG)
    assert (first.num_cached_tokens, first.kv.misses[0].reason) == (0, MissReason.NEVER_SEEN)
    assert second.num_cached_tokens == second.kv.cached_tokens == 33, "all but the last token"
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    other = ask(llm, [*LONG[:18], *LONG[:9]])
    assert other.num_cached_tokens == 18, "two tokens inside the fifth block"
    assert other.kv.misses[0].reason == MissReason.DIVERGED
    assert other.kv.misses[0].diverged_at == 18
    stats = llm.cache_stats()
    assert stats.hit_tokens == 33 + 18 and stats.query_tokens == 34 + 34 + 27


def test_two_equal_prompts_of_one_step(llm: LLM) -> None:
    outputs = llm.generate([LONG, LONG], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [tokens(llm, LONG)] * 2


def test_prompt_logprobs_are_those_of_the_whole_prompt(llm: LLM) -> None:
    fresh = ask(llm, LONG, prompt_logprobs=0)
    ask(llm, LONG)
    again = ask(llm, LONG, prompt_logprobs=0)
    assert again.num_cached_tokens == 0 and again.kv.misses[0].reason == MissReason.NOT_ASKED
    assert again.prompt_logprobs is not None and fresh.prompt_logprobs is not None
    for one, other in zip(again.prompt_logprobs[1:], fresh.prompt_logprobs[1:], strict=True):
        assert one is not None and other is not None and one.keys() == other.keys()
        for token in one:
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


def test_salts_keep_prefixes_apart(llm: LLM) -> None:
    assert ask(llm, salted(LONG, "a")).num_cached_tokens == 0
    other = ask(llm, salted(LONG, "b"))
    assert other.num_cached_tokens == 0 and other.kv.misses[0].reason == MissReason.OTHER_SALT
    assert ask(llm, LONG).num_cached_tokens == 0
    assert ask(llm, salted(LONG, "a")).num_cached_tokens == 33


def test_the_cache_can_be_reset(llm: LLM) -> None:
    ask(llm, LONG)
    num_cached = llm.memory_report().ledger.cached // 4
    assert llm.reset_prefix_cache() == num_cached > 0
    assert llm.reset_prefix_cache() == 0
    assert llm.memory_report().ledger.cached == 0
    assert ask(llm, LONG).num_cached_tokens == 0


def test_a_failed_step_leaves_nothing_to_be_found(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(llm, LONG)
    core = llm._engine.engine.core

    def fail(plan: Any) -> Any:
        raise RuntimeError("a device was lost")

    with monkeypatch.context() as patch:
        patch.setattr(core, "_launch", fail)
        with pytest.raises(StepFailedError):
            llm.generate([[1, 2, *LONG]], GREEDY, use_tqdm=False)
    output = ask(llm, [1, 2, *LONG])
    assert output.num_cached_tokens == 0
    assert tokens(llm, LONG) == expected


def test_a_conversation_is_computed_once(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello you"}]
    llm.chat(messages, GREEDY, use_tqdm=False)
    messages += [{"role": "assistant", "content": "well"}, {"role": "user", "content": "go on"}]
    (second,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert second.num_cached_tokens >= len("user: hello you")
    (apart,) = llm.chat(messages, GREEDY, use_tqdm=False, cache_salt="other")
    assert apart.num_cached_tokens == 0
    *_, streamed = llm.stream_chat(messages, GREEDY, cache_salt="other")
    assert streamed.num_cached_tokens > 0


# -- pins


def crowd_out(llm: LLM) -> None:
    """Fill the pool with prompts that nobody asks for again, and the host tier too."""
    for i in range(40):
        ask(llm, [i, *[(i + 3 * j) % 256 for j in range(40)]])


def test_a_pinned_prefix_is_never_evicted(tiny_model_path: Path) -> None:
    options = OPTIONS | {"num_gpu_blocks_override": 24, "swap_space": 0}
    with LLM(str(tiny_model_path), **options) as llm:
        pin = llm.pin_prefix(LONG)
        assert (pin.num_tokens, pin.num_blocks) == (32, 8)
        assert llm.memory_report().ledger.cached == 32
        crowd_out(llm)
        assert ask(llm, LONG).num_cached_tokens == 32
        again = llm.pin_prefix(LONG)
        assert again.num_tokens == 32 and again.pin_id != pin.pin_id
        for pin_id in (pin.pin_id, again.pin_id):
            llm.unpin_prefix(pin_id)
        crowd_out(llm)
        assert ask(llm, LONG).num_cached_tokens == 0
        with pytest.raises(InvalidRequestError, match="not pinned"):
            llm.unpin_prefix(pin.pin_id)
        assert_drained(llm)


def test_pins_have_salts_and_take_text(llm: LLM) -> None:
    text = "a system prompt"
    ids = llm.get_tokenizer().encode(text)  # type: ignore[union-attr]
    assert llm.pin_prefix(text, cache_salt="t").num_tokens == len(ids) // 4 * 4
    prompt = {"prompt": text + "!", "cache_salt": "t"}
    assert ask(llm, prompt).num_cached_tokens >= len(ids) // 4 * 4
    assert ask(llm, text + "!").num_cached_tokens == 0
    with pytest.raises(InvalidRequestError, match="contradicts"):
        llm.pin_prefix({"prompt": text, "cache_salt": "t"}, cache_salt="u")
    assert llm.pin_prefix({"prompt": text, "cache_salt": "t"}).num_blocks == len(ids) // 4
    for pin_id in (0, 1):
        llm.unpin_prefix(pin_id)


def test_a_pinned_system_message_is_found_by_chats(llm: LLM) -> None:
    system = {"role": "system", "content": "you know a lot"}
    pin = llm.pin_prefix([system])
    assert pin.num_blocks >= 4
    report = llm.memory_report()
    assert report.ledger.pinned == report.as_dict()["ledger"]["pinned"] == pin.num_tokens
    assert sum(report.ledger.terms().values()) == report.ledger.num_slots
    assert "pinned, of these" in str(report.ledger) and f"({pin.num_blocks} of them p" in str(
        report
    )
    llm.reset_prefix_cache()
    (output,) = llm.chat([system, {"role": "user", "content": "so?"}], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens >= pin.num_tokens
    llm.unpin_prefix(pin.pin_id)
    llm.reset_prefix_cache()
    (output,) = llm.chat([system, {"role": "user", "content": "so?"}], GREEDY, use_tqdm=False)
    assert output.num_cached_tokens == 0
    report = llm.memory_report()
    assert report.ledger.pinned == 0 and "pinned" not in str(report.ledger)


def test_seeds_do_not_depend_on_pins_and_refusals(tiny_model_path: Path) -> None:
    hot = SamplingParams(temperature=2.0, max_tokens=8, ignore_eos=True)
    found = []
    for troubled in (False, True):
        with LLM(str(tiny_model_path), **OPTIONS) as llm:
            if troubled:
                llm.pin_prefix(LONG)
                for max_tokens in (64, 600):
                    with pytest.raises(RequestCapacityError):
                        llm.generate("abc", SamplingParams(max_tokens=max_tokens), use_tqdm=False)
            found.append([tokens(llm, "x", hot), tokens(llm, "x", hot)])
    assert found[0] == found[1] and found[0][0] != found[0][1]


def test_pins_that_are_refused(llm: LLM, tiny_model_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="block of 4"):
        llm.pin_prefix([1, 2, 3])
    options = OPTIONS | {"num_gpu_blocks_override": 20}
    with LLM(str(tiny_model_path), **options) as small:
        with pytest.raises(CapacityError, match="half of the KV pool"):
            small.pin_prefix([5] * 44)
        (event,) = small.events()
        assert event.kind == EventKind.REFUSED and "half of the KV pool" in event.why
        assert_drained(small)
    with (
        LLM(str(tiny_model_path), **OPTIONS, enable_prefix_caching=False) as without,
        pytest.raises(InvalidRequestError, match="caching is off"),
    ):
        without.pin_prefix(LONG)


# -- events


@pytest.fixture
def tight(tiny_model_path: Path) -> Iterator[LLM]:
    options = OPTIONS | {"num_gpu_blocks_override": 12, "max_model_len": 44}
    with LLM(str(tiny_model_path), **options) as llm:
        yield llm
        assert_drained(llm)


def test_preemptions_are_events_of_their_requests(tight: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    outputs = tight.generate(["first one", "second one", "third one"], params, use_tqdm=False)
    hit = [o for o in outputs if o.metrics.num_preemptions]
    assert hit
    for output in outputs:
        events = [e for e in tight.events(output.request_id) if e.kind == EventKind.PREEMPTED]
        assert len(events) == output.metrics.num_preemptions
        for event in events:
            assert event.request_id == output.request_id and event.mode in ("recompute", "swap")
            assert event.why and event.until_s is not None and event.until_s >= event.time_s
            assert event.tokens_lost or event.tokens_moved or event.num_blocks
    every = tight.events()
    assert [e.time_s for e in every] == sorted(e.time_s for e in every)
    assert len(every) >= sum(len(tight.events(o.request_id)) for o in outputs)


def test_waiting_for_a_seat_is_an_event(tiny_model_path: Path) -> None:
    with LLM(str(tiny_model_path), **(OPTIONS | {"max_num_seqs": 1})) as llm:
        _, second = llm.generate(["a", "b"], GREEDY, use_tqdm=False)
        (event,) = llm.events(second.request_id)
        assert event.kind == EventKind.WAITED and "--max-num-seqs 1" in event.why
        assert event.until_s is not None


def test_refusals_are_events(llm: LLM) -> None:
    with pytest.raises(RequestCapacityError):
        llm.generate("x" * 64, GREEDY, use_tqdm=False)
    with pytest.raises(RequestCapacityError):
        llm.generate("x", SamplingParams(max_tokens=400), use_tqdm=False)
    first, second = llm.events()
    assert (first.kind, second.kind) == (EventKind.REFUSED, EventKind.REFUSED)
    assert "max_model_len" in first.why and "max_tokens" in second.why
    assert first.request_id is not None and llm.events(first.request_id) == [first]


def test_a_failed_step_is_an_event(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(plan: Any) -> Any:
        raise RuntimeError("a device was lost")

    with monkeypatch.context() as patch:
        patch.setattr(llm._engine.engine.core, "_launch", fail)
        with pytest.raises(StepFailedError):
            llm.generate("a", GREEDY, use_tqdm=False)
        with pytest.raises(StepFailedError):
            llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    events = llm.events()
    assert [(e.kind, e.request_id) for e in events] == [(EventKind.FAILED, i) for i in "012"]
    assert all("a device was lost" in event.why for event in events)
    assert llm.events("1") == [events[1]]


def test_events_that_are_forgotten_are_counted(llm: LLM) -> None:
    core = llm._engine.engine.core
    for i in range(1003):
        core.note_refusal(f"r{i}", CapacityError("too large"))
    report = llm.memory_report()
    assert len(llm.events()) == 1000 and report.pressure.num_events_forgotten == 3
    assert "3 older ones are forgotten" in str(report)


# -- the size of the pool


def test_the_pool_grows_and_shrinks_while_requests_run(llm: LLM) -> None:
    block = llm.memory_report().plan.bytes_per_block
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [LONG[:20], LONG[5:20], [9] * 9]
    expected = [tokens(llm, prompt, params) for prompt in prompts]
    streams = [llm.stream(prompt, params) for prompt in prompts]
    ends: list[list[int]] = []
    sizes = iter([200, 40, 28, 100, 64])
    while streams:
        size = next(sizes, None)
        if size is not None:
            assert llm.resize_kv_cache(size * block + 5) == size * block
            report = llm.memory_report()
            assert report.plan.num_blocks == report.ledger.num_blocks == size
            assert llm.config.num_gpu_blocks_override == size
            assert sum(report.ledger.terms().values()) == size * 4
            llm._engine.engine.core.kv.check_integrity()
        for stream in list(streams):
            output = next(stream)
            if output.finished:
                ends.append(output.outputs[0].token_ids)
                streams.remove(stream)
    assert sorted(ends) == sorted(expected)
    assert [e.kind for e in llm.events()].count(EventKind.RESIZED) == 5


def test_a_pool_that_shrinks_preempts_if_it_must(llm: LLM) -> None:
    block = llm.memory_report().plan.bytes_per_block
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [LONG[:20], LONG[5:23], [9] * 19]
    expected = {str(prompt): tokens(llm, prompt, params) for prompt in prompts}
    streams = {str(prompt): llm.stream(prompt, params) for prompt in prompts}
    for stream in streams.values():
        next(stream)
    llm.resize_kv_cache(12 * block)
    found = {prompt: list(stream)[-1] for prompt, stream in streams.items()}
    assert {p: o.outputs[0].token_ids for p, o in found.items()} == expected
    assert sum(o.metrics.num_preemptions for o in found.values())
    llm.resize_kv_cache(64 * block)


@pytest.mark.parametrize(
    ("num_bytes", "error", "says"),
    [
        (100, CapacityError, "less than one KV block"),
        (0, CapacityError, r"^resize_kv_cache\(0\): .*; the pool can have 1 to "),
        (-5, CapacityError, r"^resize_kv_cache\(-5\): .*; the pool can have 1 to "),
        (2**60, CapacityError, "is more than is left"),
        (1.5, InvalidRequestError, "whole number"),
    ],
)
def test_refused_sizes(llm: LLM, num_bytes: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        llm.resize_kv_cache(num_bytes)
    if error is CapacityError:
        (event,) = llm.events()
        assert event.kind is EventKind.REFUSED
        assert event.why.startswith(f"resize_kv_cache({num_bytes:,}): ")
    assert llm.memory_report().plan.num_blocks == 64
    assert tokens(llm, "goes on")


def test_a_pool_cannot_shrink_below_its_pins(llm: LLM) -> None:
    pin = llm.pin_prefix(LONG)
    block = llm.memory_report().plan.bytes_per_block
    with pytest.raises(CapacityError, match="the pool can have 16 to"):
        llm.resize_kv_cache(6 * block)
    (event,) = llm.events()
    assert event.kind == EventKind.REFUSED and "8 are pinned" in event.why
    assert event.why.startswith(f"resize_kv_cache({6 * block:,}): ")
    llm.resize_kv_cache(16 * block)
    llm.unpin_prefix(pin.pin_id)
    llm.resize_kv_cache(6 * block)
    llm.resize_kv_cache(64 * block)


def test_a_small_pool_caps_contexts_for_good(tiny_model_path: Path) -> None:
    options = OPTIONS | {"max_model_len": None, "num_gpu_blocks_override": 10}
    with LLM(str(tiny_model_path), **options) as llm:
        llm.resize_kv_cache(60 * llm.memory_report().plan.bytes_per_block)
        for prompt, max_tokens in (([5] * 50, 1), ([5] * 30, 11)):
            with pytest.raises(RequestCapacityError, match="held at the start") as caught:
                ask(llm, prompt, max_tokens=max_tokens)
            assert "raise --num-gpu-blocks-override" in str(caught.value)
        assert ask(llm, [5] * 30, max_tokens=10).finished


# -- the report


def test_the_report_after_a_resize(llm: LLM) -> None:
    block = llm.memory_report().plan.bytes_per_block
    llm.resize_kv_cache(40 * block)
    llm.generate([[i] * 40 for i in range(3)], GREEDY, use_tqdm=False)
    llm.resize_kv_cache(12 * block)
    report = llm.memory_report()
    assert report.history.peak is not None and report.history.peak.num_blocks == 40
    assert "at its fullest, when it had 40 blocks; now 12 of 12 blocks are cached" in str(report)
    llm.reset_prefix_cache()
    assert "now all of 12 are free" in str(llm.memory_report())
    llm.resize_kv_cache(64 * block)


def test_the_report_knows_every_tier(llm: LLM) -> None:
    ask(llm, LONG)
    ask(llm, LONG)
    report = llm.memory_report()
    values = report.as_dict()
    assert report.ledger.cached > 0 and sum(report.ledger.terms().values()) == 256
    assert sum(report.host.terms().values()) == report.host.num_blocks == 256
    assert values["cache"]["hit_tokens"] == 33 and values["cache"]["hit_rate"] == 33 / 68
    assert "33 of 68 prompt tokens found (48.5%)" in str(report)
    assert "host tier" in str(report) and "disk tier" not in str(report)


def test_the_report_tells_what_preemptions_did(tight: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tight.generate(["first one", "second one", "third one"], params, use_tqdm=False)
    report = tight.memory_report()
    by_mode = report.pressure.by_mode
    assert sum(sums.num_seqs for sums in by_mode.values()) == report.num_preemptions > 0
    moved = sum(sums.tokens_moved + sums.tokens_lost for sums in by_mode.values())
    assert moved == sum(e.tokens_moved + e.tokens_lost for e in tight.events())
    values = report.as_dict()
    assert values["num_preemptions"] == report.num_preemptions
    assert set(values["pressure"]["by_mode"]) == set(by_mode)
    assert all(f"by {mode}" in str(report) for mode in by_mode)


def test_the_report_counts_what_events_forget(tight: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = tight._engine.engine.core
    monkeypatch.setattr(core.scheduler._log, "_over", deque(maxlen=1))
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    tight.generate(["first one", "second one", "third one"], params, use_tqdm=False)
    pressure = tight.memory_report().pressure
    assert len(tight.events()) == 1 < pressure.num_preemptions
    assert sum(sums.num_seqs for sums in pressure.by_mode.values()) == pressure.num_preemptions
    assert pressure.num_events_forgotten > 0


# -- the real model


@pytest.mark.model
def test_a_real_chat_is_computed_once(default_model_path: Path) -> None:
    """And what is found gives the tokens that computing gives."""
    system = "You are a helpful assistant who knows a lot about the sea. " * 8
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Name a fish."},
    ]
    params = SamplingParams(temperature=0, max_tokens=16)
    options: dict[str, Any] = {"max_model_len": 512}
    answers = []
    for caching in (True, False):
        with LLM(str(default_model_path), **options, enable_prefix_caching=caching) as llm:
            (first,) = llm.chat(messages, params, use_tqdm=False)
            more = [
                {"role": "assistant", "content": first.outputs[0].text},
                {"role": "user", "content": "And a bird?"},
            ]
            (second,) = llm.chat([*messages, *more], params, use_tqdm=False)
            answers.append((first.outputs[0].text, second.outputs[0].text))
            found = second.num_cached_tokens
            assert found >= len(first.prompt_token_ids) - 16 if caching else found == 0
            if caching:
                pin = llm.pin_prefix(messages[:1])
                llm.reset_prefix_cache()
                (again,) = llm.chat(messages, params, use_tqdm=False)
                assert again.num_cached_tokens >= pin.num_tokens >= 80
    assert answers[0] == answers[1]


@pytest.mark.model
def test_real_requests_do_not_notice_that_the_pool_is_resized(default_model_path: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    texts = ["Water boils at a lower temperature on a mountain because", "The sea is"]
    with LLM(
        str(default_model_path), dtype="float32", max_model_len=128, num_gpu_blocks_override=64
    ) as llm:
        block = llm.memory_report().plan.bytes_per_block
        expected = [o.outputs[0].text for o in llm.generate(texts, params, use_tqdm=False)]
        streams = [llm.stream(text, params) for text in texts]
        for num_blocks in (9, 100, 8, 64):
            for stream in streams:
                next(stream)
            llm.resize_kv_cache(num_blocks * block)
        assert [list(stream)[-1].outputs[0].text for stream in streams] == expected
