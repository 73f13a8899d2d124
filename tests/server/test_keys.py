"""Who a client is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.server.config import ServeConfig
from octavo.server.keys import load_keys

KEY, OTHER, ADMIN = "key-of-alice", "key-of-the-others", "administrator"


def test_from_flags_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# ours\n{OTHER}\n")
    config = ServeConfig(api_key=(KEY,), api_key_file=str(file), requests_per_minute=5)
    keys = load_keys(config, {"OCTAVO_API_KEY": "from-env-1, from-env-2"})
    names = [keys.client(key).name for key in (KEY, "from-env-1", "from-env-2", OTHER)]  # type: ignore[union-attr]
    assert names == ["key-1", "key-2", "key-3", "key-4"]
    assert keys.client(KEY).requests_per_minute == 5  # type: ignore[union-attr]
    assert keys.client("nobody") is None and keys.client(None) is None
    assert KEY not in repr(config)


def test_a_file_gives_each_its_own_limits(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    rows = [{"key": KEY, "name": "alice", "kv_share": 0.5, "max_concurrent": 2}, {"key": OTHER}]
    file.write_text(json.dumps(rows))
    keys = load_keys(ServeConfig(api_key_file=str(file), max_kv_share=0.25), {})
    alice, other = keys.client(KEY), keys.client(OTHER)
    assert alice is not None and other is not None
    assert (alice.name, alice.kv_share, alice.max_concurrent) == ("alice", 0.5, 2)
    assert (other.name, other.kv_share, other.max_concurrent) == ("key-2", 0.25, None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no key"),
        ("[{]", "no valid JSON"),
        ('[{"name": "a"}]', "a key"),
        ('[{"key": "long-enough", "rpm": 3}]', "unknown field 'rpm'"),
        ('[{"key": "long-enough", "kv_share": 2}]', "kv_share"),
        ('[{"key": "long-enough", "max_concurrent": 1.5}]', "max_concurrent"),
        ("secret\n", "at least 8"),
        ("long-enough\nlong-enough", "twice"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told) as refused:
        load_keys(ServeConfig(api_key_file=str(file)), {})
    assert "long-enough" not in str(refused.value) and "secret" not in str(refused.value)


def test_keys_of_a_server(start_server: Any) -> None:
    server = start_server(
        "--log-requests", "--requests-per-minute", "2", "--request-timeout-s", "0.05",
        env={"OCTAVO_API_KEY": f"{KEY},{OTHER}", "OCTAVO_ADMIN_KEY": ADMIN},
    )  # fmt: skip
    assert server.call("/health").status == 200
    for headers in ({}, {"authorization": "Bearer wrong-key"}, {"authorization": KEY}):
        refused = server.call("/v1/models", **headers)
        assert refused.status == 401 and refused.headers["www-authenticate"] == "Bearer"
    assert server.call("/v1/models", authorization=f"Bearer {KEY}").status == 200
    assert server.call("/v1/models", x_api_key=OTHER).status == 200
    assert server.call("/admin/memory", authorization=f"Bearer {KEY}").status == 401
    assert server.call("/admin/memory", authorization=f"Bearer {ADMIN}").status == 200
    body = {"prompt": "hi", "max_tokens": 250, "ignore_eos": True}
    late = server.call("/v1/completions", body, authorization=f"Bearer {KEY}")
    assert late.status == 503 and "--request-timeout-s" in late.error["message"]
    assert late.headers["x-should-retry"] == "false"
    body = {"prompt": ["hi"] * 2, "max_tokens": 1}
    many = server.call("/v1/completions", body, authorization=f"Bearer {KEY}")
    assert many.status == 429 and int(many.headers["retry-after"]) >= 1
    assert "requests_per_minute" in many.error["message"]
    log = server.log()
    assert "client=key-1" in log and "path=/v1/models" in log
    assert not any(secret in log for secret in (KEY, OTHER, ADMIN, "wrong-key"))
