"""Writes docs/models.md from the registry and the tables of formats.

python docs/make_models.py            # writes it
python docs/make_models.py --check    # exit status 1 if it is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "src"))

from octavo.arch import ROPE_SCALING_TYPES  # noqa: E402
from octavo.hf_config.families import FAMILIES  # noqa: E402
from octavo.models.registry import ARCHITECTURES  # noqa: E402
from octavo.quantization import METHODS  # noqa: E402
from octavo.weights.gguf_arch import FAMILIES as GGUF_FAMILIES  # noqa: E402

PAGE = DOCS / "models.md"
_AS_LLAMA = {"MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
             "InternLM3ForCausalLM": "llama"}  # fmt: skip
"""Families that llama.cpp writes under another's name."""


def page() -> str:
    """The whole page."""
    rows = "\n".join(_row(name) for name in ARCHITECTURES)
    return f"""<!-- written by docs/make_models.py -->
# Models

What octavo runs, {len(ARCHITECTURES)} architectures, all through one decoder whose flags are the
fields of `ModelArch` in [arch.py](../src/octavo/arch.py). A configuration field that changes what a
model computes is honoured or refused by an error that names it; an unknown architecture is refused
with the list of known ones and the nearest.

| models | architecture | how its decoder differs from Llama's | GGUF name | not run |
|---|---|---|---|---|
{rows}

Rope scalings, for every family that rotates: {", ".join(ROPE_SCALING_TYPES)} (`su` is an older name
of longrope); partial rotation; a rope of their own for layers with a window (Gemma 3).

## Formats

- **safetensors**, single or sharded, with the `config.json` beside it: every family, under the
  names that transformers writes and those of the original releases.
- **GGUF**: the families that have a GGUF name above, and all of its quantizations.
- **Quantized safetensors** ({", ".join(METHODS)}): see `--quantization` in
  [serve-flags.md](serve-flags.md). They apply to the linear layers of every family whose checkpoint
  keeps them as [out, in] matrices: all but GPT-2.
- **`--load-format dummy`**: random weights, from `config.json` alone: every family.

Nothing pickled is ever opened. Models that are only pickled on the hub (OPT's are) often have
safetensors in a pull request of the hub's own bot, which `--revision refs/pr/NUMBER` names; the
error says how else to convert them.

## How each is tested

Each row below is a tiny configuration that transformers saves with random weights, biases and norms
among them, and octavo loads. In float32 the logits at every position of three prompts of 1, 7 and
41 tokens are within 1e-4 of transformers', and 32 greedy tokens of each are the same, computed in
chunks of 8 tokens over a pool so small that sequences are preempted, and once more out of the
prefix cache. Windows are shorter than the prompt. The same configuration runs on dummy weights.
(`tests/models/test_families.py`)

| architecture | rows |
|---|---|
{_tests()}
"""


def _row(architecture: str) -> str:
    info = ARCHITECTURES[architecture]
    names = [name for name, family in FAMILIES.items() if family.architecture == architecture]
    gguf = [
        name for name, family in GGUF_FAMILIES.items() if family.architecture == architecture
    ] or [_AS_LLAMA.get(architecture, "")]
    cells = (
        info.title,
        ", ".join(f"`{name}`" for name in names),
        info.flags,
        ", ".join(f"`{name}`" for name in gguf if name),
        info.refused,
    )
    return "| " + " | ".join(cells) + " |"


def _tests() -> str:
    return "\n".join(
        f"| `{name}` | {', '.join(info.rows)} |" for name, info in ARCHITECTURES.items()
    )


def main() -> int:
    """Write the page, or compare it."""
    text = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print(f"{PAGE} is out of date: python docs/make_models.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
