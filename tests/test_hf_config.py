"""`read_hf_config` against transformers' own config classes, old spellings and new."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from octavo.arch import ModelArch, RopeConfig
from octavo.errors import UnsupportedModelError
from octavo.hf_config import KNOWN_ARCHITECTURES, read_hf_config
from octavo.hf_config.families import FAMILIES as ALL

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")


def config_class(family: str) -> Any:
    import transformers

    return getattr(transformers, f"{family}Config")


def as_json(config: Any, family: str) -> dict[str, Any]:
    text = json.dumps(config.to_dict() | {"architectures": [f"{family}ForCausalLM"]})
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def tiny(family: str = "Llama", **more: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{family}ForCausalLM"], "vocab_size": 32, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 128,
    } | more  # fmt: skip


def test_known_architectures_have_readers_and_nothing_twice() -> None:
    assert {f"{f}ForCausalLM" for f in FAMILIES} <= set(KNOWN_ARCHITECTURES)
    # another name of an architecture may share its type, and is read alike then
    types = {(family.model_type, family.read) for family in ALL.values()}
    assert len({model_type for model_type, _ in types}) == len(types)
    assert {family.architecture for family in ALL.values()} <= set(KNOWN_ARCHITECTURES)


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    config = config_class(family)()
    full = read_hf_config(as_json(config, family))
    assert read_hf_config({"architectures": [f"{family}ForCausalLM"]}) == full
    assert read_hf_config({"model_type": family.lower()}) == full
    assert full.vocab_size == config.vocab_size
    assert full.hidden_size == config.hidden_size
    assert full.intermediate_size == config.intermediate_size
    assert full.num_layers == config.num_hidden_layers
    assert full.num_heads == config.num_attention_heads
    assert full.num_kv_heads == config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None)
    assert full.head_dim == (head_dim or config.hidden_size // config.num_attention_heads)
    assert full.max_position_embeddings == config.max_position_embeddings
    assert full.norm_eps == config.rms_norm_eps
    assert full.rope.theta == config.rope_parameters["rope_theta"]
    assert full.tie_word_embeddings == config.tie_word_embeddings
    assert full.bos_token_id == config.bos_token_id
    assert full.eos_token_ids == (() if config.eos_token_id is None else (config.eos_token_id,))


@pytest.mark.parametrize("family", FAMILIES)
def test_flags_match_the_parameters_transformers_builds(family: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    for bias in (False, True):
        config = config_class(family)(**tiny(family, attention_bias=bias, mlp_bias=bias))
        with torch.device("meta"):
            names = {n for n, _ in AutoModelForCausalLM.from_config(config).named_parameters()}
        arch = read_hf_config(as_json(config, family))
        layer = "model.layers.0."
        assert arch.qkv_bias == (layer + "self_attn.k_proj.bias" in names)
        assert arch.o_bias == (layer + "self_attn.o_proj.bias" in names)
        assert arch.mlp_bias == (layer + "mlp.up_proj.bias" in names)
        assert (arch.qk_norm == "head") == (layer + "self_attn.q_norm.weight" in names)


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "beta_slow": 2.0,
        "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False, "attention_factor": 1.1,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
def test_old_and_new_spelling_of_rope_scaling_mean_the_same(kind: str) -> None:
    fields = SCALINGS[kind]
    oldest = read_hf_config(tiny(rope_theta=5000.0, rope_scaling={"type": kind, **fields}))
    old = read_hf_config(tiny(rope_theta=5000.0, rope_scaling={"rope_type": kind, **fields}))
    new = read_hf_config(tiny(rope_parameters={"rope_type": kind, "rope_theta": 5000.0, **fields}))
    assert oldest == old == new
    assert (new.rope.scaling_type, new.rope.theta, new.rope.rotary_dim) == (kind, 5000.0, 16)
    for name, value in fields.items():
        field = "original_max_position" if name.startswith("original") else name
        assert getattr(new.rope, field) == value


def test_context_reached_by_each_scaling() -> None:
    reached = {
        kind: read_hf_config(tiny(rope_scaling={"rope_type": kind, **fields}))
        for kind, fields in SCALINGS.items()
    }
    assert {k: a.max_position_embeddings for k, a in reached.items()} == {
        "linear": 128, "dynamic": 256, "llama3": 128, "yarn": 256
    }  # fmt: skip
    assert reached["dynamic"].rope.original_max_position == 128


def test_rope_without_scaling() -> None:
    expected = RopeConfig(theta=1e6, rotary_dim=16)
    for spelling in (
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1000000}},
    ):
        assert read_hf_config(tiny(**spelling)).rope == expected


def test_yarn_defaults() -> None:
    rope = read_hf_config(
        tiny(rope_scaling={"type": "yarn", "original_max_position_embeddings": 32})
    ).rope
    assert (rope.factor, rope.beta_fast, rope.beta_slow) == (4.0, 32.0, 1.0)
    assert rope.attention_factor is None and rope.truncate


def test_windows() -> None:
    def windows(family: str, **more: Any) -> tuple[int, ...]:
        return read_hf_config(tiny(family, **more)).sliding_windows

    assert windows("Llama", sliding_window=8) == ()
    assert windows("Mistral") == (4096,) * 4
    assert windows("Mistral", sliding_window=None) == ()
    assert windows("Mistral", sliding_window=8) == (8,) * 4
    assert windows("Qwen2", sliding_window=8) == ()
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert windows("Qwen2", **on) == ()  # the default of max_window_layers is 28
    assert windows("Qwen3", **on, max_window_layers=2) == (0, 0, 8, 8)
    mixed = ["sliding_attention", "full_attention"] * 2
    assert windows("Qwen3", **on, layer_types=mixed) == (8, 0, 8, 0)
    assert windows("Qwen3", layer_types=mixed) == ()


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_layer_types_transformers_derives_are_read_back(family: str) -> None:
    config = config_class(family)(
        **tiny(family, use_sliding_window=True, sliding_window=8, max_window_layers=3)
    )
    assert read_hf_config(as_json(config, family)).sliding_windows == (0, 0, 0, 8)


def test_dtype_and_end_of_sequence() -> None:
    assert read_hf_config(tiny(torch_dtype="bfloat16")).dtype == "bfloat16"
    assert read_hf_config(tiny(dtype="torch.float16")).dtype == "float16"
    assert read_hf_config(tiny(torch_dtype=None)).dtype == "float32"
    assert read_hf_config(tiny(eos_token_id=[5, 6, 5])).eos_token_ids == (5, 6)
    assert read_hf_config(tiny(eos_token_id=5), {"eos_token_id": [7]}).eos_token_ids == (7,)
    assert read_hf_config(tiny(eos_token_id=None)).eos_token_ids == ()
    assert read_hf_config(tiny(num_key_value_heads=None)).num_kv_heads == 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["Qwen2VLForCausalLM"]}, "'Qwen2VL.*known: Llama.*nearest: Qwen2For"),
        ({"architectures": [], "model_type": "bert"}, "'bert'.*known"),
        ({"architectures": None}, "names no model"),
        ({"hidden_act": "quick_gelu"}, "hidden_act='quick_gelu'.*known: silu"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 1}}}, "per_layer_config"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True is not supported; known: false"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"rope_scaling": {"rope_type": "proportional"}}, "'proportional'.*known: default"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "needs 8 numbers in short"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [4, 4]}}, "mrope_section"),
        ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor must be a number"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "x": {"rope_theta": 2.0}}},
         "differ between layer types"),
        ({"partial_rotary_factor": 0.2}, "cannot rotate 3 of 16"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"vocab_size": "many"}, "vocab_size must be.*'many'"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps must be"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        read_hf_config(tiny(**change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_types": ["full_attention"]}, "1 entries for 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "'linear_attention'"),
    ],
)
def test_layer_types_are_checked(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        read_hf_config(tiny("Qwen3", use_sliding_window=True, sliding_window=8, **change))


def test_partial_rotation_is_carried() -> None:
    arch: ModelArch = read_hf_config(tiny(partial_rotary_factor=0.5))
    assert arch.rope.rotary_dim == 8


def longrope(**more: Any) -> dict[str, Any]:
    return {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **more}


def test_longrope_and_its_older_name() -> None:
    config = tiny("Phi3", original_max_position_embeddings=32)
    new = read_hf_config(config | {"rope_scaling": longrope(rope_type="longrope")})
    old = read_hf_config(config | {"rope_scaling": longrope(type="su")})
    oldest = read_hf_config(config | {"rope_scaling": longrope(type="yarn")})
    assert new == old == oldest
    assert new.rope.scaling_type == "longrope" and new.rope.original_max_position == 32
    assert new.rope.factor == 4.0 and new.rope.long_factor == (2.0,) * 8
    assert new.max_position_embeddings == 128
    llama = read_hf_config(tiny(rope_scaling=longrope(type="su", factor=3.0)))
    assert llama.rope.factor == 3.0 and llama.rope.original_max_position == 128


SPECIAL: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"class": "GPT2Config"},
    "Gemma3ForCausalLM": {"class": "Gemma3TextConfig"},
    "InternLM2ForCausalLM": {"class": None},
    "Gemma3ForConditionalGeneration": {"class": None},
    "Mistral3ForConditionalGeneration": {"class": None},
    "RWForCausalLM": {"class": None},
    "LLaMAForCausalLM": {"class": "LlamaConfig"},
    "YiForCausalLM": {"class": "LlamaConfig"},
    "InternLMForCausalLM": {"class": None},
    "StableLMEpochForCausalLM": {"class": None},
    "StableLmForCausalLM": {"class": "StableLmConfig"},
    "DeepseekV2ForCausalLM": {"class": "DeepseekV2Config", "num_experts_per_tok": 6},
}


@pytest.mark.parametrize("architecture", KNOWN_ARCHITECTURES)
def test_an_empty_file_means_what_transformers_means(architecture: str) -> None:
    """Every family: what transformers writes of its defaults, and no field but the name."""
    import transformers

    special = dict(SPECIAL.get(architecture, {}))
    name = special.pop("class", architecture.replace("ForCausalLM", "Config"))
    stated = {"architectures": [architecture], **special}
    if name is None:
        assert read_hf_config(stated).architecture in KNOWN_ARCHITECTURES
        return
    config = getattr(transformers, name)(**special)
    full = json.loads(json.dumps(config.to_dict() | {"architectures": [architecture]}))
    assert read_hf_config(full) == read_hf_config(stated)


@pytest.mark.parametrize(
    ("architecture", "change", "said"),
    [
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention"),
        ("GPT2LMHeadModel", {"n_embd": 65}, "n_embd=65 is not a multiple of n_head=12"),
        ("OPTForCausalLM", {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 512}, "word_embed_proj_dim=512.*known: 768"),
        ("OPTForCausalLM", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm"),
        ("PhiForCausalLM", {"qk_layernorm": True}, "qk_layernorm"),
        ("Phi3ForCausalLM", {"attention_bias": True}, "attention_bias"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional"),
        ("Gemma2ForCausalLM", {"sliding_window": None}, "sliding_window is null"),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "1 entries for 26 layers"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "softcapping=50.0.*known: null"),
        ("Gemma3ForCausalLM", {"layer_types": ["chunked_attention"] * 26}, "'chunked_attention'"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": {}, "sliding_attention": 3}},
         "sliding_attention must be an object"),
        ("FalconForCausalLM", {"new_decoder_architecture": True, "parallel_attn": False},
         "parallel_attn=false"),
        ("FalconForCausalLM", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2"),
        ("FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 3},
         "num_attention_heads=71 is not a multiple of num_kv_heads=3"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 9}, "more than the 8 experts"),
        ("Qwen2MoeForCausalLM", {"mlp_only_layers": 3}, "mlp_only_layers must be a list"),
        ("DeepseekV2ForCausalLM", {}, "num_experts_per_tok is missing"),
        ("DeepseekV2ForCausalLM", {"num_experts_per_tok": 2, "norm_topk_prob": True},
         "norm_topk_prob"),
        ("DeepseekV2ForCausalLM", {"num_experts_per_tok": 2, "topk_method": "noaux_tc"},
         "topk_method='noaux_tc'.*known: greedy"),
        ("DeepseekV2ForCausalLM",
         {"num_experts_per_tok": 2, "topk_method": "group_limited_greedy", "n_group": 7},
         "n_group=7"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "2 entries for 36 layers"),
    ],
)  # fmt: skip
def test_what_a_family_cannot_honour_is_refused(
    architecture: str, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        read_hf_config({"architectures": [architecture], **change})


def test_gemma3_with_images_is_read_as_its_text_model() -> None:
    text = {
        "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 16,
        "sliding_window": 8, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }  # fmt: skip
    arch = read_hf_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
            "text_config": text, "vision_config": {"hidden_size": 7}, "torch_dtype": "bfloat16",
            "eos_token_id": [1, 106],
        }
    )  # fmt: skip
    assert arch.architecture == "Gemma3ForCausalLM" and arch.eos_token_ids == (1, 106)
    assert (arch.hidden_size, arch.dtype, arch.tie_word_embeddings) == (64, "bfloat16", True)
    assert arch.sliding_windows == (8, 8, 8, 8, 8, 0)
    assert arch.rope == RopeConfig(
        theta=1e6, rotary_dim=16, scaling_type="linear", factor=8.0, original_max_position=131072
    )
    assert arch.local_rope == RopeConfig(theta=1e4, rotary_dim=16)


def test_falcon_of_before_transformers_knew_it() -> None:
    common = {"architectures": ["RWForCausalLM"], "hidden_size": 64, "n_layer": 2, "n_head": 4}
    small = read_hf_config({**common, "multi_query": True, "parallel_attn": True})
    assert (small.num_layers, small.num_heads, small.num_kv_heads) == (2, 4, 1)
    assert small.architecture == "FalconForCausalLM" and small.shared_norm
    large = read_hf_config({**common, "n_head_kv": 2, "model_type": "RefinedWeb"})
    assert large.num_kv_heads == 2 and large.parallel_residual and not large.shared_norm


def test_deepseek_scales_scores_by_its_yarn() -> None:
    yarn = {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096}  # fmt: skip
    config = {
        "architectures": ["DeepseekV2ForCausalLM"], "num_experts_per_tok": 6, "rope_scaling": yarn,
        "q_lora_rank": None, "first_k_dense_replace": 1,
    }  # fmt: skip
    arch = read_hf_config(config)
    mscale = 0.1 * 0.707 * math.log(40) + 1
    assert arch.attention_scale == pytest.approx(192**-0.5 * mscale**2)
    assert arch.mla is not None and arch.mla.q_lora_rank is None
    assert arch.rope.interleaved and arch.rope.rotary_dim == 64
    assert arch.moe is not None and arch.moe.dense_layers == (0,)
    assert arch.max_position_embeddings == 163840
    assert read_hf_config(config | {"first_k_dense_replace": 32}).moe is None


def test_fields_of_published_files() -> None:
    """Spellings that transformers' own classes do not write."""
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48, "type": "longrope"}
    phi4_mini = read_hf_config({
        "architectures": ["Phi3ForCausalLM"], "hidden_size": 3072, "num_attention_heads": 24,
        "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "rope_scaling": factors,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "sliding_window": 262144, "lm_head_bias": False, "tie_word_embeddings": True,
    })  # fmt: skip
    assert phi4_mini.head_dim == 128 and phi4_mini.rope.rotary_dim == 96
    assert phi4_mini.rope.factor == 32.0 and phi4_mini.sliding_windows[0] == 262144
    gemma = read_hf_config({"architectures": ["GemmaForCausalLM"], "hidden_act": "gelu"})
    assert gemma.activation == "gelu_tanh"
    pythia = read_hf_config({
        "architectures": ["GPTNeoXForCausalLM"], "hidden_size": 512, "num_attention_heads": 8,
        "rotary_pct": 0.5, "rotary_emb_base": 20000,
    })  # fmt: skip
    assert (pythia.rope.rotary_dim, pythia.rope.theta) == (32, 20000.0)
    internlm = read_hf_config({
        "architectures": ["InternLM2ForCausalLM"], "bias": False, "rope_theta": 1000000,
        "rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32768,
        "num_key_value_heads": 8,
    })  # fmt: skip
    assert internlm.rope.scaling_type == "dynamic" and not internlm.qkv_bias
    assert (internlm.num_kv_heads, internlm.max_position_embeddings) == (8, 65536)
    chunks = {
        "chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144
    }  # fmt: skip
    million = read_hf_config({
        "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 1010000,
        "rope_theta": 10000000.0, "dual_chunk_attention_config": chunks,
    })  # fmt: skip
    assert million.max_position_embeddings == 262144
    gpt2 = read_hf_config({"architectures": ["GPT2LMHeadModel"], "n_ctx": 1024, "n_embd": 1600,
                           "n_head": 25, "n_layer": 48, "n_positions": 1024})  # fmt: skip
    assert (gpt2.hidden_size, gpt2.intermediate_size, gpt2.head_dim) == (1600, 6400, 64)
