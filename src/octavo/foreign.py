"""Flags that vLLM, SGLang and llama.cpp have and octavo has not: what to write instead, or why not.

Only where a command has no flag of that name itself: `octavo lab` knows --tensor-parallel-size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_CALLED = {
    "--max-model-len": ("-c", "--ctx-size", "--context-length"),
    "--max-tokens": ("-n", "--n-predict", "--predict"),
    "--num-threads": ("-t", "--threads"),
    "--max-num-seqs": ("-np", "--parallel", "--max-running-requests"),
    "--max-num-batched-tokens": ("-b", "--batch-size", "--chunked-prefill-size"),
    "--kv-cache-dtype": ("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"),
    "--gpu-memory-utilization": ("--mem-fraction-static",),
    "--model": ("-hf", "-hfr", "--hf-repo", "--model-path"),
    "--temperature": ("--temp",),
    "--repetition-penalty": ("--repeat-penalty",),
    "--served-model-name": ("-a", "--alias"),
    "--chat-template": ("--chat-template-file",),
    "--ssl-keyfile": ("--ssl-key-file",),
    "--ssl-certfile": ("--ssl-cert-file",),
    "--system": ("-sys", "--system-prompt"),
    "--file": ("-f",),
    "--seed": ("-s",),
}
"""A flag here, and its names elsewhere."""

_NOT_HERE = {
    "one engine runs on one GPU": (
        "-tp", "--tensor-parallel-size", "--tp-size", "--tensor-split", "-ts", "--split-mode",
        "-pp", "--pipeline-parallel-size",
    ),
    "one engine runs on one GPU: start a server for each, and a load balancer in front": (
        "-dp", "--data-parallel-size", "--dp-size",
    ),
    "long prompts are always computed in chunks (--max-num-batched-tokens): leave it out": (
        "--enable-chunked-prefill",
    ),
    "code that comes with a model is never run: leave it out": ("--trust-remote-code",),
    "requests are logged only where --log-requests is given: leave it out": (
        "--disable-log-requests", "--no-enable-log-requests",
    ),
    "adapters are not run: merge them into the weights": (
        "--enable-lora", "--lora-modules", "--lora",
    ),
    "there is no speculative decoding": ("--speculative-config", "--model-draft", "-md"),
    "models read text alone": ("--limit-mm-per-prompt", "--mmproj"),
    "answers are not held to a grammar or a schema": (
        "--guided-decoding-backend", "--structured-outputs-config", "--grammar", "--grammar-file",
        "--json-schema",
    ),
    "a model's reasoning is part of its answer": ("--reasoning-parser", "--enable-reasoning"),
    "weights are not offloaded: take a smaller model, or --quantization": ("--cpu-offload-gb",),
    "all layers run on one device: see --device": ("-ngl", "--n-gpu-layers", "--gpu-layers"),
    "the model's chat template is always used: leave it out": ("--jinja",),
    "attention is computed in one pass always: leave it out, or see --attention-backend": (
        "-fa", "--flash-attn",
    ),
    "there is nothing to compile; steps are recorded unless --enforce-eager: leave it out": (
        "--compilation-config", "-O",
    ),
    "prompts stand without a flag: octavo generate 'PROMPT'": ("-p", "--prompt"),
    "a conversation is 'octavo chat'": ("-i", "-cnv", "--interactive", "--conversation"),
    "models are kept where HF_HOME and OCTAVO_HOME of the environment say": ("--download-dir",),
    "the hub's token is HF_TOKEN of the environment": ("--hf-token",),
}  # fmt: skip
"""Why there is no such flag, and what it is called elsewhere."""


def why_not(flag: str, known: Collection[str] = ()) -> str | None:
    """What to say of a flag that is one elsewhere: its name here, if that is among those `known`,
    or the reason why there is none. None for others."""
    for here, elsewhere in _CALLED.items():
        if flag in elsewhere and here in known:
            return f"it is {here} here"
    return next((why for why, flags in _NOT_HERE.items() if flag in flags), None)


def refusal(argv: Sequence[str], known: Collection[str]) -> str | None:
    """What to say of the first word of `argv` that is a flag elsewhere; None where there is none.

    `known` are the flags of the command itself, which mean here what they mean here.
    """
    words = argv[: argv.index("--")] if "--" in argv else argv
    for flag in (word.split("=", 1)[0] for word in words if word.startswith("-")):
        if flag not in known and (why := why_not(flag, known)) is not None:
            return f"no flag {flag}: {why}"
    return None
