"""`octavo models inspect` and `octavo models verify`, on tiny models of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from octavo.cli.main import main
from octavo.errors import UnsupportedModelError

COMMON = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers with a window of 32, and one without; byte-level tokens."""
    config = transformers.Gemma3TextConfig(
        **COMMON,
        sliding_window=32,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(5)
    folder = tmp_path_factory.mktemp("gemma")
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
    _write_byte_tokenizer(folder)
    return folder


def _write_byte_tokenizer(folder: Path) -> None:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i + 3 for i, char in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_inspect_counts_parameters_and_kv_by_layer_group(
    gemma: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "inspect", str(gemma), "--json", "--gpu", "h200"]) == 0
    found = json.loads(capsys.readouterr().out)
    own = transformers.AutoModelForCausalLM.from_pretrained(gemma)
    assert found["num_params"] == found["num_active_params"] == own.num_parameters()
    assert found["architecture"] == "Gemma3ForCausalLM"
    per_layer = 2 * 2 * 16 * 2  # K and V, heads, head size, bytes
    assert found["layer_groups"] == [
        {"num_layers": 1, "num_padding": 0, "window": 0, "kv_bytes_per_token": per_layer},
        {"num_layers": 3, "num_padding": 0, "window": 32, "kv_bytes_per_token": 3 * per_layer},
    ]
    assert found["kv_bytes_per_token"] == 4 * per_layer
    assert found["formats"] == {"F32": 4 * found["num_params"]}
    assert found["file_bytes"] == 4 * found["num_params"]
    assert found["quantization"] is None
    assert found["chat_templates"] == ["default"]
    (fit,) = found["fits"]
    longest = 256 * per_layer + 32 * 3 * per_layer
    assert fit["tokens"] == fit["kv_bytes"] // (4 * per_layer)
    assert fit["sequences"] == pytest.approx(fit["kv_bytes"] / longest)


def test_inspect_reads_well(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "inspect", str(gemma), "--gpu", "h200", "l4"]) == 0
    out = capsys.readouterr().out
    assert "3 layers: 384 B a token of the last 32, at most 12.0 KiB" in out
    assert "1 layer: 128 B a token, all tokens are kept" in out
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["h200", "l4"]


def test_inspect_needs_config_json_alone(
    gemma: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_bytes((gemma / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").touch()
    assert main(["models", "inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    own = transformers.AutoModelForCausalLM.from_pretrained(gemma)
    assert found["num_params"] == own.num_parameters()
    assert found["file_bytes"] is None
    assert found["weight_bytes"] == 2 * found["num_params"]


@pytest.mark.parametrize(
    ("how", "size"),
    [
        ({"quant_method": "fp8"}, 1.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, 0.5 + 4 / 32),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True}, 1.0 + 2 / 64),
    ],
)
def test_inspect_counts_what_config_json_says_is_quantized(
    how: dict[str, object], size: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.LlamaConfig(**COMMON | {"intermediate_size": 64})
    saved = config.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": how}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    assert main(["models", "inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    quantized = 4 * (3 * 64 * 64 + 2 * 64 * 64 + 2 * 32 * 64)
    others = found["num_params"] - quantized
    assert others == 2 * 320 * 64 + 9 * 64
    assert found["weight_bytes"] == 2 * others + quantized * size


@pytest.mark.parametrize(
    ("kind", "fields", "windows"),
    [
        ("Olmo", {}, [0]),  # its norms have no weights
        ("Mistral", {"sliding_window": 256}, [0]),
        ("Mistral", {"sliding_window": 255}, [255]),
    ],
)
def test_inspect_of_other_shapes(
    kind: str,
    fields: dict[str, int],
    windows: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = getattr(transformers, f"{kind}Config")(**COMMON, **fields)
    own = getattr(transformers, f"{kind}ForCausalLM")(config)
    own.save_pretrained(tmp_path)
    assert main(["models", "inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_params"] == own.num_parameters()
    assert found["formats"] == {"F32": 4 * found["num_params"]}
    assert [group["window"] for group in found["layer_groups"]] == windows


PUBLISHED = {
    "Mixtral-8x7B": (
        {
            "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 32, "hidden_size": 4096,
            "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
            "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
        (46_702_792_704, 12_879_925_248, 131_072, []),
    ),
    "DeepSeek-V2-Lite": (
        {
            "architectures": ["DeepseekV2ForCausalLM"], "num_hidden_layers": 27,
            "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400,
            "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
            "first_k_dense_replace": 1, "kv_lora_rank": 512, "q_lora_rank": None,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
            "topk_method": "greedy", "n_group": 1, "topk_group": 1, "norm_topk_prob": False,
        },
        (15_706_484_224, 2_661_150_208, 31_104, []),
    ),
    "Gemma-3-1B": (
        {
            "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 26, "hidden_size": 1152,
            "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1,
            "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
            "sliding_window_pattern": 6, "max_position_embeddings": 32768,
        },
        # 4 layers and 22 in groups of 4, of which two places are nobody's
        (999_885_952, 999_885_952, 28_672, [(4, 0, 0), (22, 2, 512)]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_inspect_of_published_configurations(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, (num_params, num_active, token_bytes, groups) = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["models", "inspect", str(tmp_path), "--json", "--gpu", "h200"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_params"], found["num_active_params"]) == (num_params, num_active)
    assert found["kv_bytes_per_token"] == token_bytes
    told = [(g["num_layers"], g["num_padding"], g["window"]) for g in found["layer_groups"]]
    assert told == (groups or [(config["num_hidden_layers"], 0, 0)])
    (fit,) = found["fits"]
    assert fit["tokens"] == fit["kv_bytes"] // token_bytes


def test_inspect_refuses_an_unknown_gpu(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "inspect", str(gemma), "--gpu", "h2000"]) == 2
    assert "h200" in capsys.readouterr().err


def test_verify_agrees(gemma: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "verify", str(gemma), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] and found["layers"] == []
    assert len(found["prompts"]) == 3
    assert all(0 < p["max_error"] <= p["allowed"] for p in found["prompts"])
    assert all(p["same_best"] == p["num_tokens"] and p["same_tokens"] for p in found["prompts"])


def test_verify_of_a_model_with_alibi(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers has it right in one of its attention implementations."""
    config = transformers.FalconConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, alibi=True,
        multi_query=False, parallel_attn=False, bias=True, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.FalconForCausalLM(config).save_pretrained(tmp_path)
    _write_byte_tokenizer(tmp_path)
    assert main(["models", "verify", str(tmp_path), "--prompt", "abcdefghijklm"]) == 0
    assert "logits agree" in capsys.readouterr().out


def test_verify_of_quantized_weights(
    tiny_weights_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers reads fp8 with a scale a tensor under other names, and others not at all."""
    tensors = load_file(tiny_weights_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[name.removesuffix("weight") + "weight_scale"] = scale.reshape(1)
    save_file(tensors, tmp_path / "model.safetensors")
    table = json.loads((tiny_weights_path / "config.json").read_text())
    table["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(table))
    _write_byte_tokenizer(tmp_path)
    assert main(["models", "verify", str(tmp_path), "--prompt", "abcdefghijklm"]) == 0
    out = capsys.readouterr().out
    assert "both on weights that octavo expanded: fp8, 8 bits (e4m3), scales of tensors" in out
    assert "logits agree" in out


def test_verify_runs_no_code_and_opens_no_pickle_beside_the_weights(
    tiny_weights_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.engine.verify_reference import load_reference
    from octavo.weights.locate import locate

    plain, own, beside = (tmp_path / name for name in ("plain", "own", "beside"))
    table = json.loads((tiny_weights_path / "config.json").read_text())
    tensors = load_file(tiny_weights_path / "model.safetensors")
    for folder, more in ((plain, {}), (own, {"model_type": "own"}), (beside, {})):
        folder.mkdir()
        more |= {"auto_map": {"AutoConfig": "own.Own"}} if folder == own else {}
        (folder / "config.json").write_text(json.dumps(table | more))
        (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for folder in (plain, own):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # of a name that transformers does not look for
    save_file(tensors, beside / "weights.safetensors", metadata={"format": "pt"})
    torch.save(tensors, beside / "pytorch_model.bin")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert load_reference(locate(str(plain))).model is not None
    for folder in (own, beside):
        with pytest.raises(UnsupportedModelError, match=f"transformers cannot load {folder}: "):
            load_reference(locate(str(folder)))
    assert not (tmp_path / "ran").exists()


def test_verify_shows_the_layer_from_which_on_they_differ(
    gemma: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers gets the model, octavo a copy whose third layer has another weight."""
    from octavo.engine import verify, verify_reference

    changed = tmp_path / "changed"
    changed.mkdir()
    for file in gemma.iterdir():
        (changed / file.name).write_bytes(file.read_bytes())
    tensors = load_file(gemma / "model.safetensors")
    tensors["model.layers.2.post_feedforward_layernorm.weight"] += 0.5
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        gemma, attn_implementation="eager", dtype=torch.float32
    ).eval()
    found = verify_reference.Reference(reference, None)
    monkeypatch.setattr(verify, "load_reference", lambda files: found)
    assert main(["models", "verify", str(changed), "--prompt", "abcdefgh"]) == 1
    out = capsys.readouterr().out
    rows = [line.split() for line in out[out.index("size of the values") :].splitlines()[1:5]]
    errors = [float(row[1]) for row in rows]
    assert [int(row[0]) for row in rows] == [0, 1, 2, 3]
    assert max(errors[:2]) < 1e-3 < 1e-2 < min(errors[2:])
    assert "logits differ" in out
