"""What all tests share: repeatable random data, markers that skip, and the default model."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if os.environ.get("OCTAVO_TEST_DEVICE", "cpu") == "cpu":
    # Both are read when torch and triton are first used: engines choose the CPU, and GPU kernels
    # run, slowly, on its tensors. With OCTAVO_TEST_DEVICE=cuda the same tests run on a GPU.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    # A process for each core: more threads in each would only wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "octavo",
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("octavo")


def pytest_sessionfinish() -> None:
    """What was left out of garbage collections is looked at again."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU and OCTAVO_TEST_DEVICE=cuda")
        for item in marked:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def small_pools_on_a_gpu() -> None:
    """An engine that is told no size takes all of a GPU; here several share one."""
    if os.environ.get("OCTAVO_TEST_DEVICE", "cpu") != "cpu":
        from octavo.config import EngineConfig

        EngineConfig.__init__.__kwdefaults__["kv_cache_memory_bytes"] = 1 << 28


@pytest.fixture(scope="module", autouse=True)
def garbage_of_this_module_alone() -> None:
    """An engine that closes collects garbage. What is there already (a million objects of tests,
    torch and transformers, which take it half a second) is not looked through each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def torch_threads_as_before() -> Iterator[None]:
    """An engine's `num_threads` holds for the process: the next module's engines set their own."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    yield
    if torch is not None:
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's folder or GGUF file, fetched once if it is not on this machine.

    A test that takes it carries the marker `model`; `-m "not model"` leaves those out.
    """
    from octavo.config import DEFAULT_MODEL
    from octavo.weights.locate import locate

    return locate(DEFAULT_MODEL).path


@pytest.fixture(scope="module")
def one_torch_thread() -> Iterator[None]:
    """Tiny products gain nothing from more threads, and wait for each other on busy machines."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "torch_dtype": "float32",
}
TINY_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the config.json of a tiny Llama, for `--load-format dummy`, a byte-level
    tokenizer (token ids 0-255 are bytes) and a chat template. Its answers are noise."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tiny-model")
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<unk>", "<bos>", "<eos>")]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TINY_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG))
    return folder


@pytest.fixture(scope="session")
def tiny_weights_path(tiny_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's folder with a model.safetensors (random, always the same) beside it."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("tiny-weights") / "model"
    shutil.copytree(tiny_model_path, folder)
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (320, 64), "norm": (64,)}
    for i in range(2):
        layer = {
            "input_layernorm": (64,), "post_attention_layernorm": (64,),
            "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64),
            "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64),
            "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
        }  # fmt: skip
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    tensors = {
        f"model.{name}.weight": torch.ones(shape)
        if len(shape) == 1
        else torch.empty(shape).normal_(0.0, 0.05, generator=generator)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
