"""Results as files, with the names that vLLM's benchmark gives its figures beside octavo's own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.bench.serve.result import ServeResult
from octavo.errors import ConfigError


def as_vllm(result: ServeResult) -> dict[str, Any]:
    """Under the names that scripts read from what `vllm bench serve --save-result` writes."""
    rates = result.rates
    found: dict[str, Any] = {
        "model_id": result.model,
        "num_prompts": result.num_requests,
        "duration": result.elapsed_s,
        "completed": result.num_completed,
        "failed": result.num_requests - result.num_completed,
        "total_input_tokens": result.num_input_tokens,
        "total_output_tokens": result.num_output_tokens,
        "request_throughput": rates["requests_per_s"],
        "request_goodput": rates.get("goodput_per_s"),
        "output_throughput": rates["output_tokens_per_s"],
        "total_token_throughput": rates["total_tokens_per_s"],
    }
    for name, times in result.times.items():
        for key, value in (times or {}).items():
            if key != "max":
                found[f"{key}_{name}_ms"] = 1e3 * value
    return found


def save(result: ServeResult, path: Path, about: Mapping[str, Any]) -> None:
    """As JSON, for `--compare` and for scripts. about: how it was made. Raises `ConfigError` where
    the file cannot be written."""
    told = {"date": f"{datetime.now():%Y%m%d-%H%M%S}", **about}
    text = json.dumps(told | result.as_dict() | as_vllm(result), indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the result to {path}: {error.strerror}") from None


def file_name(label: str, rate: str, max_concurrency: int | None, model: str) -> str:
    """As vLLM's benchmark names a file, where it was given no name."""
    limit = "" if max_concurrency is None else f"-concurrency{max_concurrency}"
    words = f"{label or 'openai'}-{rate}qps{limit}-{model.rstrip('/').rsplit('/')[-1]}"
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', words)}-{datetime.now():%Y%m%d-%H%M%S}.json"
