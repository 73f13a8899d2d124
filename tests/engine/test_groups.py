"""Layers in groups: those with a window give blocks back, and nobody can tell by the tokens.

Two models of random weights: one like Gemma 3, with local and global layers, one like Mistral, all
of whose layers have one window. After each step what is free in the pool is filled with NaN, so
that reading what was given back shows.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import CapacityError, ConfigError
from octavo.lab.replay import replay
from octavo.record import RecordReader
from octavo.sched.watch import PoolWatch

WINDOW, BLOCK, CHUNK = 24, 4, 16
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "skip_tokenizer_init": True,
    "block_size": BLOCK,
    "max_model_len": 400,
    "num_gpu_blocks_override": 600,
    "max_num_seqs": 8,
    "max_num_batched_tokens": CHUNK,
    "num_threads": 1,
    "swap_space": 0,
}
OFF = {"disable_hybrid_kv_cache_manager": True}
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True)
"""The best tokens of random weights are the same ones again and again; these are not."""
_SIZES: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    "sliding_window": WINDOW, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four local layers and two global ones: three groups of two layers."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=6, layer_types=kinds, query_pre_attn_scalar=8, **_SIZES
    )
    return _saved(transformers.Gemma3ForCausalLM(config), tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = transformers.MistralConfig(num_hidden_layers=3, **_SIZES)
    return _saved(transformers.MistralForCausalLM(config), tmp_path_factory.mktemp("mistral"))


def _saved(model: Any, folder: Path) -> str:
    torch.manual_seed(7)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return str(folder)


def prompt(length: int, seed: int = 0) -> dict[str, list[int]]:
    rng = random.Random(1000 * seed + length)
    return {"prompt_token_ids": [rng.randrange(1, 99) for _ in range(length)]}


def core_of(llm: LLM) -> Any:
    return llm._engine.engine.core


def poisoned(model: str, **options: Any) -> LLM:
    """An engine in which every free block holds NaN, from the start and after every step."""
    llm = LLM(model, **(OPTIONS | options))
    core = core_of(llm)
    store, kv = core._launch.__self__.kv_store, core.kv
    store.data[: store.num_blocks] = float("nan")  # what is behind is addresses only

    def look() -> None:
        kv.check_integrity()
        free = [i for i in kv.pool.free_block_ids() if not kv.is_cached(i)]
        store.data[free] = float("nan")

    llm.after_step = look
    return llm


def outputs(llm: LLM, prompts: list[Any], params: Any = DRAWN) -> list[list[list[int]]]:
    answers = llm.generate(prompts, params, use_tqdm=False)
    return [[one.token_ids for one in answer.outputs] for answer in answers]


def peak_blocks(llm: LLM) -> int:
    return core_of(llm).history.summary().peak_blocks


PROMPTS = [prompt(n) for n in (2, 23, 24, 25, 60, 150)]
MODES: dict[str, dict[str, Any]] = {
    "whole prompts": {"max_num_batched_tokens": 512},
    "chunks": {},
    "recomputed": {"num_gpu_blocks_override": 78, "max_model_len": 180},
    "swapped": {
        "num_gpu_blocks_override": 78, "max_model_len": 180, "preemption_mode": "swap",
        "swap_space": 0.001,
    },
    "swapped without a cache": {
        "num_gpu_blocks_override": 78, "max_model_len": 180, "preemption_mode": "swap",
        "swap_space": 0.001, "enable_prefix_caching": False,
    },
    "overlap": {"async_scheduling": True},
    "gather": {"attention_backend": "gather"},
}  # fmt: skip


@pytest.fixture(scope="module")
def expected(gemma: str) -> list[list[list[int]]]:
    with LLM(gemma, **(OPTIONS | OFF)) as llm:
        assert core_of(llm).kv.windows == (0,)
        found = outputs(llm, PROMPTS)
    kinds = [len(set(one[0])) for one in found]
    assert min(kinds) > 9, f"the tokens say little about the context: {kinds}"
    return found


@pytest.mark.parametrize("mode", MODES)
def test_the_same_tokens(gemma: str, expected: list[list[list[int]]], mode: str) -> None:
    with poisoned(gemma, **MODES[mode]) as llm:
        core = core_of(llm)
        assert core.kv.windows == (0, WINDOW, WINDOW)
        assert outputs(llm, PROMPTS) == expected
        totals = core.scheduler.pressure_totals.by_mode
        if mode == "recomputed":
            assert totals["recompute"].num_seqs > 0
        elif "swapped" in mode:
            assert totals["swap"].num_seqs > 0
            assert core.kv.cache_stats().resumed_tokens > 0
        # Once more, with whatever is found.
        assert outputs(llm, PROMPTS) == expected
        hits = core.kv.cache_stats().hit_tokens
        if "num_gpu_blocks_override" not in MODES[mode]:
            assert hits > 0
        assert not llm.block_tables()
        core.kv.check_integrity()


def test_every_layer_with_the_window_is_one_group(mistral: str) -> None:
    with LLM(mistral, **(OPTIONS | OFF)) as llm:
        full = outputs(llm, PROMPTS)
    with poisoned(mistral) as llm:
        assert core_of(llm).kv.windows == (WINDOW,)
        assert outputs(llm, PROMPTS) == full
    # A pool of what one sequence holds while it computes a chunk runs any length.
    num_blocks = -(-(WINDOW - 1 + CHUNK - 1) // BLOCK) + 1
    with poisoned(mistral, num_gpu_blocks_override=num_blocks) as llm:
        assert outputs(llm, PROMPTS) == full
        assert llm.config.max_model_len == 400
    with pytest.raises(CapacityError, match=f"needs {num_blocks} KV blocks"):
        LLM(mistral, **(OPTIONS | {"num_gpu_blocks_override": num_blocks - 1}))


def test_memory_falls_as_the_ledger_says(gemma: str) -> None:
    """One sequence: what each group holds when most is held, to the block."""
    length, num_new = 150, 24
    for chunk in (CHUNK, 512):
        with LLM(gemma, **(OPTIONS | {"max_num_batched_tokens": chunk})) as llm:
            outputs(llm, [prompt(length)], DRAWN)
            shape = llm.memory_report().plan.shape
            assert shape.bytes_per_token == 6 * 2 * 8 * 2 * 4
            assert shape.bytes_per_block(BLOCK) == BLOCK * shape.bytes_per_token // 3
            most = max(
                -(-end // BLOCK) + 2 * (-(-end // BLOCK) - max(0, start - WINDOW + 1) // BLOCK)
                for start, end in _steps(length, num_new, chunk)
            )
            assert peak_blocks(llm) == most
            groups = core_of(llm).history.summary().peak_groups
            assert sum(group.num_blocks for group in groups) == most
            assert groups[1] == groups[2] and groups[0].num_behind == 0
            report = str(llm.memory_report())
            assert "1 group of 2 layers that keeps all, 2 that keep 24 tokens" in report
            assert f"1 keeps 24 tokens {groups[1].num_tokens:>15,} tokens" in report
    with LLM(gemma, **(OPTIONS | OFF)) as llm:
        outputs(llm, [prompt(length)], DRAWN)
        num_tokens = length + num_new - 1
        assert peak_blocks(llm) == -(-num_tokens // BLOCK)
        assert llm.memory_report().plan.bytes_per_block == 3 * shape.bytes_per_block(BLOCK)


def _steps(length: int, num_new: int, chunk: int) -> list[tuple[int, int]]:
    starts = [*range(0, length, chunk), *range(length, length + num_new - 1)]
    return list(zip(starts, [*starts[1:], length + num_new - 1], strict=True))


def test_four_windows_run_where_full_attention_does_not_fit(gemma: str) -> None:
    length, num_new = 4 * WINDOW, 8
    num_blocks = -(-(length + num_new) // BLOCK) + 2 * 11
    bytes_of_pool = num_blocks * BLOCK * 256
    options = {
        "num_gpu_blocks_override": None, "kv_cache_memory_bytes": bytes_of_pool,
        "max_model_len": length + num_new,
    }  # fmt: skip
    with pytest.raises(CapacityError, match="needs 26 KV blocks"):
        LLM(gemma, **(OPTIONS | OFF | options))
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    with poisoned(gemma, **options) as llm:
        assert core_of(llm).kv.num_blocks == num_blocks
        answer = outputs(llm, [prompt(length)], params)
    with LLM(gemma, **(OPTIONS | OFF)) as llm:
        assert outputs(llm, [prompt(length)], params) == answer
    less = options | {"kv_cache_memory_bytes": bytes_of_pool - 1}
    with pytest.raises(CapacityError, match=f"needs {num_blocks} KV blocks"):
        LLM(gemma, **(OPTIONS | less))


def test_as_many_sequences_run_at_once_as_the_plan_says(gemma: str) -> None:
    """Three of the longest fit, and nobody is preempted; one block less and the plan says two."""
    longest, num_new = 120, 40
    prompts = [prompt(longest - num_new, seed) for seed in range(3)]
    params = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    needed = 3 * (30 + 2 * 7) + 2 * (CHUNK // BLOCK + 3)
    options = {"max_model_len": longest, "enable_prefix_caching": False}
    with LLM(gemma, **(OPTIONS | options | {"num_gpu_blocks_override": needed})) as llm:
        assert llm.memory_report().plan.max_concurrency == 3
        assert "of such 3 fit at one time" in str(llm.memory_report())
        running = []
        roster = core_of(llm).scheduler.roster
        llm.after_step = lambda: running.append(len(roster.running))
        outputs(llm, prompts, params)
        assert core_of(llm).scheduler.num_preemptions == 0
        assert max(running) == 3
        assert 0.8 * needed < peak_blocks(llm) <= needed
    with LLM(gemma, **(OPTIONS | options | {"num_gpu_blocks_override": needed - 1})) as llm:
        assert llm.memory_report().plan.max_concurrency == 2


def test_a_prefix_is_found_without_what_is_behind_the_window(gemma: str) -> None:
    """The window groups' first blocks are gone, and the prompt goes on all the same."""
    first = prompt(120)["prompt_token_ids"]
    longer = {"prompt_token_ids": [*first, *prompt(30, 1)["prompt_token_ids"]]}
    with LLM(gemma, **(OPTIONS | OFF)) as llm:
        full = outputs(llm, [longer])
    with poisoned(gemma, num_gpu_blocks_override=110, max_model_len=200) as llm:
        kv = core_of(llm).kv
        outputs(llm, [{"prompt_token_ids": first}])
        for seed in (2, 3, 4):  # others use what was given back first
            outputs(llm, [prompt(20, seed)], SamplingParams(temperature=0, max_tokens=1))
        gone = [node for node in kv._cache.tree.walk() if not node.is_resident]
        assert gone, "every block is still there: this test shows nothing"
        found = kv.cache_stats().hit_tokens
        assert outputs(llm, [longer]) == full
        assert kv.cache_stats().hit_tokens - found >= 118


def test_samples_and_beams(gemma: str) -> None:
    samples = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=40, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=12, ignore_eos=True)
    answers = []
    for options in (OFF, {}):
        with LLM(gemma, **(OPTIONS | options)) as llm:
            drawn = outputs(llm, [prompt(50), prompt(61)], samples)
            found = [
                [one.tokens for one in answer.sequences]
                for answer in llm.beam_search([prompt(50), prompt(61)], beams)
            ]
            core_of(llm).kv.check_integrity()
            assert not llm.block_tables()
            answers.append((drawn, found))
    assert answers[0] == answers[1]


def test_beams_that_come_back_find_what_their_siblings_gave_back(gemma: str) -> None:
    """One beam is back and has given its window's blocks back, another request has taken them, and
    the next beam needs them: in a pool that is promised to them they go on, and are not cut."""
    own = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    beams = BeamSearchParams(beam_width=3, max_tokens=10, ignore_eos=True)
    prompts, params = [prompt(50), prompt(90)], [own, beams]
    options = {"block_size": 1, "num_gpu_blocks_override": 280, "max_model_len": 150}
    found = []
    for more in (OFF, options):
        with LLM(gemma, **(OPTIONS | more)) as llm:
            answers = llm._run(prompts, params, None, use_tqdm=False)
            found.append([[one.token_ids for one in answer.outputs] for answer in answers])
            events = [(event.kind.value, event.why) for event in llm.events()]
            core_of(llm).kv.check_integrity()
    assert "cut short" not in [kind for kind, _ in events]
    assert any("lacks what its siblings gave back" in why for _, why in events), "it never came up"
    assert found[0] == found[1]


def test_beams_that_cannot_fit_are_refused_with_the_arithmetic(gemma: str) -> None:
    options = {"num_gpu_blocks_override": 80, "max_model_len": 100}
    beams = BeamSearchParams(beam_width=4, max_tokens=50)
    refused = pytest.raises(CapacityError, match=r"lower max_tokens to at most \d+")
    with LLM(gemma, **(OPTIONS | options)) as llm, refused:
        llm.beam_search([prompt(40)], beams)


def test_pins_and_resizes(gemma: str) -> None:
    with poisoned(gemma, num_gpu_blocks_override=300) as llm:
        core = core_of(llm)
        before = outputs(llm, PROMPTS)
        pin = llm.pin_prefix(PROMPTS[4])
        # Of 60 tokens 15 blocks, and of each window group the 6 that the next one looks back at.
        assert (pin.num_tokens, pin.num_blocks) == (60, 15 + 2 * 6)
        llm.reset_prefix_cache()
        found = core.kv.cache_stats().hit_tokens
        longer = {"prompt_token_ids": [*PROMPTS[4]["prompt_token_ids"], 5, 6]}
        outputs(llm, [longer])
        assert core.kv.cache_stats().hit_tokens - found == 60
        llm.unpin_prefix(pin.pin_id)
        llm.resize_kv_cache(150 * core.kv.bytes_per_block)
        assert outputs(llm, PROMPTS) == before


def test_a_record_replays(gemma: str, tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    options = {"num_gpu_blocks_override": 78, "max_model_len": 180, "record": str(file)}
    with LLM(gemma, **(OPTIONS | options)) as llm:
        outputs(llm, PROMPTS)
        assert core_of(llm).scheduler.num_preemptions
    reader = RecordReader(file)
    assert reader.header.limits.windows == (0, WINDOW, WINDOW)
    report = replay(reader)
    assert report.is_identical and report.damage is None, str(report.difference)


def test_a_watcher_sees_every_block(gemma: str) -> None:
    """Frames by difference come to the same as whole ones, and add up to the pool."""
    with LLM(gemma, **(OPTIONS | {"num_gpu_blocks_override": 90, "max_model_len": 180})) as llm:
        core = core_of(llm)
        watch = PoolWatch(core.kv, core.scheduler)
        columns = watch.frame(core.clock())["blocks"]

        def look() -> None:
            changes = watch.frame(core.clock())["blocks"]
            for name, column in columns.items():
                for place, block_id in enumerate(changes["id"]):
                    column[block_id] = changes[name][place]
            assert columns["refs"] == list(core.kv.pool.ref_counts)
            pairs = zip(columns["fill"], columns["refs"], strict=True)
            assert sum(fill for fill, refs in pairs if refs) == core.kv.ledger().tokens

        llm.after_step = look
        outputs(llm, PROMPTS)
        watch.close()


def test_when_there_is_one_group(gemma: str) -> None:
    for options in (
        OFF,
        {"kv_policy": "orca-max", "max_model_len": 100},
        {"max_model_len": WINDOW},
    ):
        with LLM(gemma, **(OPTIONS | options)) as llm:
            assert core_of(llm).kv.windows == (0,)
            assert llm.memory_report().plan.shape.layers_per_block == 6
    with pytest.raises(ConfigError, match="disable_hybrid_kv_cache_manager must be True or False"):
        LLM(gemma, **(OPTIONS | {"disable_hybrid_kv_cache_manager": 1}))


def test_windows_give_back_with_a_disk(gemma: str, tmp_path: Path) -> None:
    """What an earlier process left is gone on from, though the first blocks of window groups never
    came to the disk, and nobody can tell by the tokens."""
    first = prompt(120)["prompt_token_ids"]
    longer = {"prompt_token_ids": [*first, *prompt(30, 1)["prompt_token_ids"]]}
    with LLM(gemma, **(OPTIONS | OFF)) as llm:
        full = outputs(llm, [longer])
    options = {"kv_disk_dir": str(tmp_path), "swap_space": 0.001, "max_model_len": 200}
    few = 30 + 2 * 11
    block_bytes = BLOCK * 256
    with poisoned(gemma, **options, kv_disk_bytes=few * block_bytes) as llm:
        assert core_of(llm).kv.windows == (0, WINDOW, WINDOW)
        outputs(llm, [{"prompt_token_ids": first}], SamplingParams(temperature=0, max_tokens=1))
        assert core_of(llm).kv.ledger().cached == 3 * 30 * BLOCK
    with poisoned(gemma, **options) as llm:
        kv = core_of(llm).kv
        assert kv.disk_ledger().cached == few
        assert outputs(llm, [longer]) == full
        assert kv.cache_stats().hit_tokens == 120
        assert kv.cache_stats().promotions_from_disk == 30 + 2 * (WINDOW // BLOCK)


def test_who_keeps_all_is_told_the_price(gemma: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "octavo"):
        LLM(gemma, **(OPTIONS | {"kv_policy": "orca-max", "max_model_len": 100})).close()
        LLM(gemma, **(OPTIONS | OFF)).close()
    (line,) = (m for m in caplog.messages if "layers with a window" in m)
    token = 6 * 2 * 2 * 8 * 4
    assert f"as --kv-policy orca-max needs it: every token takes {token} B" in line
    assert f"not {token // 3} B when it is behind the windows" in line
