"""The default model's GGUF file as what the other engines load.

    python benchmarks/peers/convert_gguf.py --hf OUT_DIR --gguf OUT.gguf [--model NAME_OR_FILE]

--hf: a Hugging Face folder (bf16 safetensors, config.json, tokenizer), made through octavo's own
readers, so that every engine computes with the weights octavo has.
--gguf: the same weights in a bf16 GGUF file for llama.cpp, its metadata copied.

Runs where octavo is installed. Knows Llama-like models without rope scaling or biases.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing

from octavo.arch import ModelArch
from octavo.config import DEFAULT_MODEL
from octavo.text.gguf_tokenizer import load_gguf_tokenizer
from octavo.text.tokenizer import FastTokenizer
from octavo.weights.load import open_model
from octavo.weights.locate import ModelFiles, locate

_FILE_TYPE_BF16 = 32
"""`general.file_type`: mostly bf16."""


def write_hf(files: ModelFiles, out: Path) -> None:
    """The folder. Tied heads are left out, as Hugging Face's own files do."""
    model = open_model(files)
    config = hf_config(model.arch)
    assert model.source is not None, "opened for its weights"
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor, _ in model.source.tensors(torch.bfloat16)
    }
    tokenizer = load_gguf_tokenizer(files.path)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(tokenizer, model.arch.max_position_embeddings, out)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": list(tokenizer.eos_token_ids),
    }
    write_json(out / "config.json", config | ids)
    write_json(out / "generation_config.json", ids)


def hf_config(arch: ModelArch) -> dict[str, Any]:
    """`config.json` of a Llama model."""
    plain = arch.rope.scaling_type == "default" and arch.rope.rotary_dim == arch.head_dim
    biased = arch.qkv_bias or arch.o_bias or arch.mlp_bias
    if arch.architecture != "LlamaForCausalLM" or not plain or biased or any(arch.sliding_windows):
        raise SystemExit("only Llama models without rope scaling, biases and windows are known")
    return {
        "architectures": [arch.architecture],
        "model_type": "llama",
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": arch.max_position_embeddings,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope.theta,
        "tie_word_embeddings": arch.tie_word_embeddings,
        "torch_dtype": "bfloat16",
    }


def write_tokenizer(tokenizer: FastTokenizer, max_length: int, out: Path) -> None:
    """tokenizer.json and tokenizer_config.json."""
    backend = tokenizer._backend
    bos = tokenizer.special_tokens.get("bos_token")
    if bos is not None and tokenizer.encode("")[:1] == [tokenizer.bos_token_id]:
        # octavo puts it before the text itself; tokenizer.json says so in a post-processor
        template = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
        )
        backend.post_processor = template
    backend.save(str(out / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    if tokenizer.chat_template is not None:
        config["chat_template"] = tokenizer.chat_template
    write_json(out / "tokenizer_config.json", config | dict(tokenizer.special_tokens))


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Indented, as such files usually are."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def write_gguf(source: Path, out: Path) -> None:
    """The file with every matrix in bf16, vectors in float32 as llama.cpp wants them."""
    reader = GGUFReader(source)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        kind = field.types[0]
        if key.startswith("GGUF.") or key == "general.architecture":
            continue  # the writer's own
        value = _FILE_TYPE_BF16 if key == "general.file_type" else field.contents()
        sub_type = field.types[-1] if kind is GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, kind, sub_type)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            packed = gguf.quantize(values, GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, packed, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    """Write what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a .gguf file, or a name with one")
    parser.add_argument("--hf", type=Path, metavar="OUT_DIR")
    parser.add_argument("--gguf", type=Path, metavar="OUT.gguf")
    args = parser.parse_args()
    if args.hf is None and args.gguf is None:
        parser.error("name what to write: --hf OUT_DIR, --gguf OUT.gguf, or both")
    files = locate(args.model, load_format="gguf")
    if args.hf is not None:
        write_hf(files, args.hf)
    if args.gguf is not None:
        args.gguf.parent.mkdir(parents=True, exist_ok=True)
        write_gguf(files.path, args.gguf)


if __name__ == "__main__":
    main()
