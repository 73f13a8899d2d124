"""Flags come from the dataclasses: every field has one, defaults and help are the field's."""

from __future__ import annotations

import dataclasses

import pytest

from octavo.cli.chat import Chat
from octavo.cli.flags import (
    BeamFlags,
    EngineFlags,
    SamplingFlags,
    bytes_text,
    check_beams,
    field_docs,
    make_params,
    parse,
    parse_bytes,
)
from octavo.cli.generate import Generate
from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequestError
from octavo.request import BeamSearchParams, SamplingParams


def parsed(*argv: str) -> Generate:
    return parse(Generate, "octavo generate", list(argv))


def help_text(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        parsed("--help")
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_every_field_has_a_flag_and_its_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text(capsys)
    for kind, hidden in ((EngineConfig, set()), (SamplingParams, {"seed"})):
        for field in dataclasses.fields(kind):
            flag = "--" + field.name.replace("_", "-")
            assert field.name in hidden or f"{flag} " in text or f"{flag}," in text, flag
    for name, doc in field_docs(EngineConfig).items():
        assert name == "kv_cache_memory_bytes" or doc in text, name


def test_every_field_of_the_configuration_is_documented() -> None:
    for kind in (EngineConfig, SamplingParams):
        assert field_docs(kind).keys() == {field.name for field in dataclasses.fields(kind)}


def test_defaults_are_the_dataclasses_own() -> None:
    args = parsed("hello")
    assert args.prompts == ("hello",)
    assert args.engine.config() == EngineConfig()
    own = dataclasses.asdict(SamplingParams(temperature=0.0, max_tokens=512))
    assert dataclasses.asdict(args.sampling.params()) == own


def test_values_arrive() -> None:
    args = parsed(
        "--model", "m.gguf", "--block-size", "32", "--kv-cache-memory-bytes", "1.5GiB",
        "--seed", "7", "--top-p", "0.5", "--max-tokens", "none", "--stop", "a", "b",
        "--logit-bias", "3", "-1.5", "--no-skip-special-tokens", "--", "-x",
    )  # fmt: skip
    config, params = args.engine.config(), args.sampling.params()
    assert (config.model, config.block_size, config.seed) == ("m.gguf", 32, 7)
    assert config.kv_cache_memory_bytes == 3 * 2**29
    assert (params.top_p, params.max_tokens, params.stop) == (0.5, None, ["a", "b"])
    assert params.logit_bias == {3: -1.5} and not params.skip_special_tokens
    assert args.prompts == ("-x",)


ARRIVING: dict[str, tuple[list[str], object]] = {
    "model": (["m"], "m"), "tokenizer": (["t"], "t"), "revision": (["r"], "r"),
    "dtype": (["bfloat16"], "bfloat16"), "max_model_len": (["99"], 99), "block_size": (["8"], 8),
    "max_num_seqs": (["3"], 3), "max_num_batched_tokens": (["1024"], 1024),
    "kv_cache_memory_bytes": (["1MB"], 10**6), "num_gpu_blocks_override": (["7"], 7),
    "preemption_mode": (["swap"], "swap"), "preemption_victim": (["lowest-cost"], "lowest-cost"),
    "swap_space": (["0.5"], 0.5), "kv_disk_dir": (["/kv"], "/kv"),
    "kv_disk_bytes": (["10GiB", "--kv-disk-dir", "/kv"], 10 * 2**30),
    "scheduling_policy": (["priority"], "priority"), "seed": (["5"], 5),
    "quantization": (["int8"], "int8"),
    "load_format": (["gguf"], "gguf"), "skip_tokenizer_init": ([], True), "num_threads": (["2"], 2),
    "record": (["a.jsonl"], "a.jsonl"),
    "device": (["cuda"], "cuda"), "kv_cache_dtype": (["fp8"], "fp8"),
    "gpu_memory_utilization": (["0.5"], 0.5), "attention_backend": (["gather"], "gather"),
    "enforce_eager": ([], True), "async_scheduling": ([], True),
    "disable_hybrid_kv_cache_manager": ([], True),
    "n": (["2"], 2), "best_of": (["3"], 3), "presence_penalty": (["0.5"], 0.5),
    "frequency_penalty": (["-0.5"], -0.5),
    "repetition_penalty": (["1.5"], 1.5), "temperature": (["0.7"], 0.7), "top_p": (["0.9"], 0.9),
    "top_k": (["4"], 4), "min_p": (["0.1"], 0.1), "stop": (["a", "b"], ["a", "b"]),
    "stop_token_ids": (["1", "2"], [1, 2]), "ignore_eos": ([], True), "max_tokens": (["9"], 9),
    "min_tokens": (["1"], 1), "logprobs": (["1"], 1), "prompt_logprobs": (["0"], 0),
    "include_stop_str_in_output": ([], True), "logit_bias": (["1", "2.5"], {1: 2.5}),
    "allowed_token_ids": (["3"], [3]), "bad_words": (["x"], ["x"]),
}  # fmt: skip
"""Field -> the words behind its flag, and what becomes of them."""
SWITCHED_OFF = (
    "enable_prefix_caching",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


@pytest.mark.parametrize("name", [*ARRIVING, *SWITCHED_OFF])
def test_every_flag_arrives(name: str) -> None:
    flag = name.replace("_", "-")
    words, expected = ARRIVING.get(name, ([], False))
    args = parsed(f"--no-{flag}" if name in SWITCHED_OFF else f"--{flag}", *words, "--", "hi")
    is_engines = name in {field.name for field in dataclasses.fields(EngineConfig)}
    values = args.engine.config() if is_engines else args.sampling.params()
    assert getattr(values, name) == expected
    default = EngineConfig() if is_engines else SamplingParams(temperature=0, max_tokens=512)
    assert getattr(default, name) != expected


def test_no_flag_is_forgotten_here() -> None:
    names = {f.name for kind in (EngineConfig, SamplingParams) for f in dataclasses.fields(kind)}
    assert names == {*ARRIVING, *SWITCHED_OFF, "kv_policy"}, "kv_policy has one choice only"


def test_underscores_are_understood_too() -> None:
    assert parsed("--max_tokens", "3", "x").sampling.max_tokens == 3


def test_values_are_checked_where_everyone_else_checks_them() -> None:
    with pytest.raises(InvalidRequestError, match="top_p"):
        parsed("--top-p", "3", "x").sampling.params()
    with pytest.raises(ConfigError, match="block_size"):
        parsed("--block-size", "0", "x").engine.config()


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("4096", 4096), ("512M", 512 * 10**6), ("2GiB", 2**31), ("1.5 kib", 1536), ("3GB", 3 * 10**9)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(2**32, "4GiB"), (3 * 2**20, "3MiB"), (10**9, "1000000000"), (0, "0")]
)
def test_sizes_are_written_as_they_are_read(num_bytes: int, text: str) -> None:
    assert bytes_text(num_bytes) == text and parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "1 apple", "-1", "1ib", "1.2.3k"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)


def test_flag_classes_add_no_fields() -> None:
    for flags, kind in ((EngineFlags, EngineConfig), (SamplingFlags, SamplingParams)):
        assert {f.name for f in dataclasses.fields(flags)} == {
            f.name for f in dataclasses.fields(kind)
        }


def beams(*argv: str) -> BeamSearchParams | SamplingParams:
    args = parsed(*argv, "--", "hi")
    params = make_params(args.sampling, args.beams)
    check_beams(args.beams, [params])
    return params


def test_beam_flags_arrive() -> None:
    assert isinstance(beams(), SamplingParams)
    assert beams("--beam-width", "4") == BeamSearchParams(beam_width=4, max_tokens=512)
    words = [
        "--beam-width", "2", "--length-penalty", "0.5", "--early-stopping", "never",
        "--max-tokens", "9", "--temperature", "0.7", "--ignore-eos", "--include-stop-str-in-output",
    ]  # fmt: skip
    assert beams(*words) == BeamSearchParams(
        beam_width=2, length_penalty=0.5, early_stopping="never", max_tokens=9, temperature=0.7,
        ignore_eos=True, include_stop_str_in_output=True,
    )  # fmt: skip
    assert beams("--beam-width", "2", "--early-stopping", "true").early_stopping is True  # type: ignore[union-attr]


def test_every_beam_parameter_has_a_flag() -> None:
    names = {field.name for field in dataclasses.fields(BeamSearchParams)}
    own = {field.name for field in dataclasses.fields(BeamFlags)}
    assert names <= own | {field.name for field in dataclasses.fields(SamplingFlags)}
    assert own <= names and field_docs(BeamFlags).keys() == own


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--length-penalty", "2"], "--length-penalty"),
        (["--early-stopping", "true"], "--early-stopping"),
        (["--beam-width", "2", "--n", "2"], "--n"),
        (["--beam-width", "2", "--top-p", "0.5"], "--top-p"),
        (["--beam-width", "2", "--stop", "x"], "--stop"),
    ],
)
def test_flags_without_effect_on_beams_are_refused(words: list[str], flag: str) -> None:
    with pytest.raises((ConfigError, InvalidRequestError), match=flag):
        beams(*words)


def test_beams_need_a_limit() -> None:
    with pytest.raises(InvalidRequestError, match="--max-tokens"):
        beams("--beam-width", "2", "--max-tokens", "none")


def test_flags_of_beams_apply_to_whoever_brings_a_width() -> None:
    args = parsed("--length-penalty", "0.5", "--", "hi")
    made = make_params(args.sampling, args.beams, beam_width=2)
    assert made == BeamSearchParams(beam_width=2, max_tokens=512, length_penalty=0.5)
    sampled = make_params(args.sampling, args.beams)
    check_beams(args.beams, [sampled, made])
    with pytest.raises(ConfigError, match="--length-penalty"):
        check_beams(args.beams, [sampled])


@pytest.mark.parametrize(
    ("words", "flag"),
    [(["--top-p", "0.5"], "--top-p"), (["--n", "3"], "--n"), (["--logprobs", "2"], "--logprobs")],
)
def test_flags_of_sampling_are_refused_where_a_width_is_brought(
    words: list[str], flag: str
) -> None:
    args = parsed(*words, "--", "hi")
    with pytest.raises(InvalidRequestError, match=f"{flag} does nothing to beam search"):
        make_params(args.sampling, args.beams, beam_width=2)
    assert isinstance(make_params(args.sampling, args.beams), SamplingParams)


def test_chat_streams_and_so_ranks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    parse(Chat, "octavo chat", ["--top-p", "0.5"])
    for flag in ("--best-of", "--n", "--beam-width"):
        with pytest.raises(SystemExit) as ended:
            parse(Chat, "octavo chat", [flag, "2"])
        assert ended.value.code == 2 and flag in capsys.readouterr().err
