"""`load_weights`: everything arrives once, and everything that does not fit is in one error."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.arch import ModelArch
from octavo.engine.build import load_model
from octavo.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from octavo.layers.gguf_weight import GGUFWeight
from octavo.layers.quantized import Weight
from octavo.weights.dummy import DummySource
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.load import load_weights, open_model
from octavo.weights.locate import from_folder, locate
from octavo.weights.source import Keep

ARCH = ModelArch(
    architecture="LlamaForCausalLM", vocab_size=8, hidden_size=4, intermediate_size=6, num_layers=1,
    num_heads=1, num_kv_heads=1, head_dim=4, max_position_embeddings=16,
)  # fmt: skip
TIED = dataclasses.replace(ARCH, tie_word_embeddings=True)
EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class Model:
    """Keeps what it is given."""

    def __init__(self, spec: dict[str, tuple[int, ...]]) -> None:
        self.spec, self.got = spec, dict[str, Any]()

    def parameters_spec(self) -> dict[str, tuple[int, ...]]:
        return self.spec

    def load(self, name: str, weight: Weight) -> None:
        assert name not in self.got
        self.got[name] = weight


class Memory:
    """A source over tensors made when they are asked for; says whether they were."""

    name = "memory"

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self._shapes = {k.replace("__", "."): v for k, v in shapes.items()}
        self.opened = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    @property
    def num_bytes(self) -> int:
        return 4 * len(self._shapes)

    def tensors(
        self, dtype: torch.dtype | None = None, keep: Keep | None = None
    ) -> Iterator[tuple[str, Weight, int]]:
        self.opened = True
        for number, (name, shape) in enumerate(self._shapes.items()):
            yield name, torch.full(shape, float(number)), 4


SPEC: dict[str, tuple[int, ...]] = {EMBED: (8, 4), NORM: (4,)}


def test_all_problems_are_in_one_error_before_anything_is_read() -> None:
    model = Model(SPEC | {HEAD: (8, 4), "model.layers.0.mlp.up_proj.weight": (6, 4)})
    source = Memory(
        model__embed_tokens__weight=(9, 4), model__norm__weight=(4,), model__layers__7__odd=(1,)
    )
    with pytest.raises(WeightsError) as caught:
        load_weights(model, source, ARCH)
    message = str(caught.value)
    assert "2 missing: lm_head.weight, model.layers.0.mlp.up_proj.weight" in message
    assert "1 left over: model.layers.7.odd" in message
    assert "1 of the wrong shape: model.embed_tokens.weight is [9, 4], expected [8, 4]" in message
    assert message.startswith("memory does not hold the tensors of LlamaForCausalLM")
    assert not source.opened and not model.got


def test_long_lists_are_cut() -> None:
    model = Model({f"t{i}": (1,) for i in range(40)})
    with pytest.raises(WeightsError, match=r"40 missing: t0, .*t11 and 28 more"):
        load_weights(model, Memory(), ARCH)


def test_head_in_the_file_of_a_tied_model_is_skipped() -> None:
    model = Model(SPEC)
    source = Memory(
        model__embed_tokens__weight=(8, 4), lm_head__weight=(8, 4), model__norm__weight=(4,)
    )
    load_weights(model, source, TIED)
    assert model.got.keys() == SPEC.keys()
    with pytest.raises(WeightsError, match=r"left over: lm_head\.weight"):
        load_weights(Model(SPEC), source, ARCH)


def test_tied_model_that_wants_a_head_gets_the_embedding() -> None:
    model = Model(SPEC | {HEAD: (8, 4)})
    load_weights(model, Memory(model__embed_tokens__weight=(8, 4), model__norm__weight=(4,)), TIED)
    assert model.got[HEAD] is model.got[EMBED]


def test_file_of_a_tied_model_may_hold_the_head_alone() -> None:
    model = Model(SPEC)
    load_weights(model, Memory(lm_head__weight=(8, 4), model__norm__weight=(4,)), TIED)
    assert model.got.keys() == SPEC.keys()


def test_known_buffers_are_skipped() -> None:
    source = Memory(
        model__embed_tokens__weight=(8, 4),
        model__norm__weight=(4,),
        model__layers__0__self_attn__rotary_emb__inv_freq=(2,),
        transformer__h__0__self_attention__maybe_rotary__inv_freq=(2,),
    )
    load_weights(Model(SPEC), source, ARCH)


def test_progress_counts_bytes_and_finishes_on_error() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def start(self, what: str, total_bytes: int | None = None) -> None:
            self.calls.append(total_bytes)

        def update(self, done_bytes: int) -> None:
            self.calls.append(done_bytes)

        def finish(self) -> None:
            self.calls.append("finish")

    source = Memory(model__embed_tokens__weight=(8, 4), model__norm__weight=(4,))
    recorder = Recorder()
    load_weights(Model(SPEC), source, ARCH, progress=recorder)
    assert recorder.calls == [8, 4, 8, "finish"]

    class Failing(Model):
        def load(self, name: str, tensor: torch.Tensor) -> None:
            raise RuntimeError

    recorder = Recorder()
    with pytest.raises(RuntimeError):
        load_weights(Failing(SPEC), source, ARCH, progress=recorder)
    assert recorder.calls == [8, "finish"]


def test_dummy_tensors_depend_on_seed_and_name_alone() -> None:
    spec = SPEC | {HEAD: (8, 4), "model.layers.0.self_attn.q_norm.weight": (4,)}
    spec |= {"model.layers.0.self_attn.q_proj.bias": (400,)}
    first = {n: t for n, t, _ in DummySource(spec, 5).tensors()}
    other_order = dict(reversed(spec.items()))
    again = {n: t for n, t, _ in DummySource(other_order, 5).tensors()}
    assert all(torch.equal(first[n], again[n]) for n in spec)
    assert not torch.equal(first[EMBED], first[HEAD])
    other_seed = {n: t for n, t, _ in DummySource(spec, 6).tensors()}
    assert not torch.equal(first[EMBED], other_seed[EMBED])
    assert torch.equal(first[NORM], torch.ones(4))
    assert torch.equal(first["model.layers.0.self_attn.q_norm.weight"], torch.ones(4))
    bias = first["model.layers.0.self_attn.q_proj.bias"]
    assert 0.015 < bias.std().item() < 0.025 and abs(bias.mean().item()) < 0.005


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen3"])
def test_folder_from_transformers_opens_and_loads(
    tmp_path: Path, tiny_model: Any, family: str
) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "m")
    opened = open_model(locate(str(tmp_path / "m")))
    tied = family == "llama-tied"
    assert opened.arch.tie_word_embeddings is tied
    state = {k: v for k, v in model.state_dict().items() if not (tied and k == HEAD)}
    target = Model({k: tuple(v.shape) for k, v in state.items()})
    load_weights(target, opened.weight_source(target), opened.arch)
    assert all(torch.equal(target.got[k], v) for k, v in state.items())


def test_dummy_needs_only_a_config(tmp_path: Path, tiny_configs: Any) -> None:
    tiny_configs["qwen2"].save_pretrained(tmp_path)
    opened = open_model(locate(str(tmp_path), load_format="dummy"))
    assert opened.arch.architecture == "Qwen2ForCausalLM" and opened.source is None
    model = Model(SPEC)
    load_weights(model, opened.weight_source(model, seed=1), opened.arch)
    assert model.got.keys() == SPEC.keys()


def test_generation_config_wins_for_end_of_sequence(tmp_path: Path, tiny_model: Any) -> None:
    model = tiny_model("qwen2")
    model.generation_config.eos_token_id = [3, 4]
    model.save_pretrained(tmp_path)
    assert open_model(locate(str(tmp_path))).arch.eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("text", "error"),
    [("{", WeightsError), ("[]", WeightsError), ('{"model_type": "bert"}', UnsupportedModelError)],
)
def test_bad_config(tmp_path: Path, text: str, error: type[Exception]) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(error, match=r"config\.json"):
        open_model(from_folder(tmp_path, "dummy", "m"))


def test_config_that_vanished(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = from_folder(tmp_path, "dummy", "m")
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        open_model(files)


@pytest.mark.model
def test_default_model_loads_exactly_as_package_gguf_dequantizes(default_model_path: Path) -> None:
    import gguf

    if default_model_path.suffix != ".gguf":
        pytest.skip("the default model came from the hub, not as a GGUF file")
    opened = open_model(locate(str(default_model_path)))
    arch, source = opened.arch, opened.source
    assert source is not None
    assert (arch.num_layers, arch.num_heads, arch.num_kv_heads, arch.head_dim) == (30, 9, 3, 64)
    assert (arch.vocab_size, arch.rope.theta, arch.norm_eps) == (49152, 100000.0, 1e-5)
    assert arch.tie_word_embeddings and arch.eos_token_ids == (2,) and arch.bos_token_id == 1
    assert len(source.shapes()) == 272
    file = GGUFFile(default_model_path)

    def reference(name: str) -> torch.Tensor:
        packed = file.tensors[name]
        rows = file.data(packed).reshape(packed.shape[0], -1)
        kind = gguf.GGMLQuantizationType(packed.type_id)
        return torch.from_numpy(gguf.dequantize(rows, kind))

    # in the file, rows i and i + 32 of each head lie side by side
    order = torch.arange(192).reshape(3, 2, 32).transpose(1, 2).reshape(-1)
    checked = 0
    for name, tensor, _ in source.tensors():
        if name == EMBED:
            assert torch.equal(tensor, reference("token_embd.weight"))
        elif name == "model.layers.29.self_attn.k_proj.weight":
            assert torch.equal(tensor[order], reference("blk.29.attn_k.weight"))
        else:
            continue
        checked += 1
    assert checked == 2


class Packed(Memory):
    """A source whose matrices are quantized: rows of Q8_0 blocks, all of them 1.0."""

    def tensors(
        self, dtype: torch.dtype | None = None, keep: Keep | None = None
    ) -> Iterator[tuple[str, Weight, int]]:
        for name, shape in self._shapes.items():
            if len(shape) < 2 or keep is None or not keep(name):
                yield name, torch.ones(shape, dtype=dtype), 4
                continue
            block = torch.tensor([0x00, 0x3C, *[1] * 32], dtype=torch.uint8)  # 1.0 in half, 1s
            yield name, GGUFWeight.of(block.repeat(shape[0], shape[1] // 32), 8, shape[1]), 4


def test_weights_stay_quantized_where_the_model_wants_them_so() -> None:
    spec = {EMBED: (8, 32), "a.weight": (4, 32), "b.weight": (4, 32), NORM: (32,)}
    model = Model(spec)
    source = Packed(**{k.replace(".", "__"): v for k, v in spec.items()})
    load_weights(model, source, TIED, dtype=torch.bfloat16, keep=lambda name: name == "a.weight")
    kept = model.got["a.weight"]
    assert isinstance(kept, GGUFWeight) and kept.format == "Q8_0" and kept.shape == (4, 32)
    for name in (EMBED, "b.weight"):
        assert model.got[name].dtype == torch.bfloat16


@pytest.mark.parametrize("kept", [(HEAD,), (EMBED,), (HEAD, EMBED), ()])
def test_tied_head_may_stay_quantized_without_the_embedding(kept: tuple[str, ...]) -> None:
    model = Model({EMBED: (8, 32), HEAD: (8, 32)})
    load_weights(
        model, Packed(model__embed_tokens__weight=(8, 32)), TIED, dtype=torch.bfloat16,
        keep=lambda name: name in kept,
    )  # fmt: skip
    for name in (EMBED, HEAD):
        weight = model.got[name]
        assert isinstance(weight, GGUFWeight) == (name in kept)
        values = weight.dequantize(torch.float32) if name in kept else weight.float()
        assert torch.equal(values, torch.ones(8, 32))


def test_model_does_not_keep_its_file_mapped(tiny_weights_path: Path) -> None:
    """Neither its memory nor its answers may depend on what becomes of the file."""
    maps = Path("/proc/self/maps")
    if not maps.is_file():
        pytest.skip("only Linux tells what a process has mapped")
    before = maps.read_text().count(str(tiny_weights_path))
    model = load_model(str(tiny_weights_path), dtype="float32")
    assert maps.read_text().count(str(tiny_weights_path)) == before
    assert model.parameters_spec()
