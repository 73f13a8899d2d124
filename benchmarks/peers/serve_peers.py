"""Servers beside each other: one client, the same requests, the same machine, one after another.

    python benchmarks/peers/serve_peers.py --model FOLDER --dataset LENGTHS.csv \
        --octavo .venv/bin/python [--vllm VENV/bin/vllm] [--transformers VENV/bin/transformers]

FOLDER is the model as Hugging Face has it (benchmarks/peers/convert_gguf.py makes it of a GGUF
file), in bfloat16. Each server is started, warmed up, loaded by `octavo bench serve` with 16 and
with 64 streams, and stopped; then the next one. Prompts are text: not every server takes token ids.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

_ENV = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0,1", "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
}  # fmt: skip


def commands(args: argparse.Namespace) -> dict[str, list[str]]:
    """How each server is started."""
    port, model = str(args.port), str(args.model)
    found = {
        "octavo": [args.octavo, "-m", "octavo", "serve", model, "--port", port],
    }
    if args.vllm:
        found["vllm"] = [args.vllm, "serve", model, "--port", port, "--dtype", "bfloat16"]
        found["vllm"] += ["--max-model-len", "2048"]
    if args.transformers:
        found["transformers"] = [
            args.transformers, "serve", model, "--port", port, "--dtype", "bfloat16",
            "--continuous-batching",
        ]  # fmt: skip
    return found


def measure(name: str, args: argparse.Namespace, streams: int, out: Path) -> bool:
    """One load; whether it was answered."""
    command = [
        sys.executable, "-m", "octavo", "bench", "serve", "--base-url",
        f"http://127.0.0.1:{args.port}", "--tokenizer", str(args.model),
        "--dataset-name", "lengths", "--dataset-path", str(args.dataset),
        "--num-prompts", str(args.num), "--max-model-len", "1024",
        "--prompt-kind", "text", "--max-concurrency", str(streams), "--seed", str(streams),
        "--num-warmups", "2", "--ready-check-timeout-sec", "600", "--label", name, "--save-result",
        "--result-dir", str(out.parent), "--result-filename", out.name, "--timeout-s", "900",
    ]  # fmt: skip
    if name == "transformers":  # it knows no ignore_eos, but a generation config
        config = '{"generation_config": "{\\"eos_token_id\\": -1}"}'
        command += ["--model", str(args.model), "--extra-body", config]
    else:
        command.append("--ignore-eos")
    return subprocess.run(command, check=False).returncode == 0


def main() -> int:
    """All servers, then the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--octavo", default=sys.executable, help="a Python that has octavo")
    parser.add_argument("--vllm", help="the command of a vLLM installation")
    parser.add_argument("--transformers", help="the command of a transformers installation")
    parser.add_argument("--num", type=int, default=128)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--port", type=int, default=8767)
    parser.add_argument("--out", type=Path, default=Path("serve_peers"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[int, list[str]] = {streams: [] for streams in args.streams}
    for name, command in commands(args).items():
        with (args.out / f"{name}.log").open("wb") as log:
            folder = str(Path(command[0]).parent)
            path = os.pathsep.join([folder, os.environ["PATH"]])
            env = {**os.environ, **(_ENV if name != "octavo" else {}), "PATH": path}
            if name != "octavo":
                env.pop("PYTHONPATH", None)
            try:
                process = subprocess.Popen(
                    command, stdout=log, stderr=log, env=env, start_new_session=True
                )
            except FileNotFoundError:
                print(f"{name} is not here: there is no {command[0]}")
                continue
            try:
                for streams in args.streams:
                    out = args.out / f"{name}-{streams}.json"
                    if measure(name, args, streams, out):
                        results[streams].append(str(out))
                    else:
                        print(f"{name} did not answer with {streams} streams: see {log.name}")
            finally:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and its children
    for streams, files in results.items():
        print(f"\n{streams} streams")
        if files:
            compare = ["-m", "octavo", "bench", "serve", "--compare", *files]
            subprocess.run([sys.executable, *compare], check=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
