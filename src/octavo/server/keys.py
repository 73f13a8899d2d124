"""Who a client is: keys, kept as digests and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import ConfigError
from octavo.server.config import ServeConfig

API_KEY_ENV = "OCTAVO_API_KEY"
ADMIN_KEY_ENV = "OCTAVO_ADMIN_KEY"
_MIN_CHARS = 8
_LIMITS = ("requests_per_minute", "tokens_per_minute", "kv_share", "max_concurrent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """Who sends requests, and how much of the server is theirs. None: no limit."""

    name: str = ""
    """Tells clients apart in logs, metrics and the fair queue; never the key. Empty: no keys."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    kv_share: float | None = None
    max_concurrent: int | None = None
    """Prompts under way at a time."""


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyRing:
    """The clients' keys and the administrator's."""

    def __init__(
        self, clients: Iterable[tuple[str, Client]], admin_key: str | None, anyone: Client
    ) -> None:
        """anyone: who all are where there are no keys."""
        self._clients = [(_digest(key), client) for key, client in clients]
        self._admin = None if admin_key is None else _digest(admin_key)
        self._anyone = anyone
        self._secret = secrets.token_bytes(32)
        """Of this process: what browsers were given is worth nothing to the next one."""

    @property
    def has_keys(self) -> bool:
        """Whether clients need one."""
        return bool(self._clients)

    @property
    def has_admin_key(self) -> bool:
        """Whether administrators need one."""
        return self._admin is not None

    @property
    def clients(self) -> list[Client]:
        """All of them."""
        return [client for _, client in self._clients] or [self._anyone]

    def client(self, key: str | None) -> Client | None:
        """Whose key this is. Looks at every key, so that the time tells nothing."""
        if not self._clients:
            return self._anyone
        if key is None:
            return None
        digest, found = _digest(key), None
        for known, client in self._clients:
            if hmac.compare_digest(known, digest):
                found = client
        return found

    def is_admin(self, key: str | None) -> bool:
        """Whether this is the administrator's key; False where there is none."""
        if self._admin is None or key is None:
            return False
        return hmac.compare_digest(self._admin, _digest(key))

    def cookie_for(self, key: str) -> str | None:
        """What a browser shows instead of the administrator's key, which cannot be told from it;
        None for another key."""
        return self._cookie() if self.is_admin(key) else None

    def is_cookie(self, value: str | None) -> bool:
        """Whether this process gave that to a browser."""
        if self._admin is None or value is None or not value.isascii():
            return False
        return hmac.compare_digest(self._cookie(), value)

    def _cookie(self) -> str:
        assert self._admin is not None
        return hmac.new(self._secret, b"dashboard" + self._admin, hashlib.sha256).hexdigest()


def key_of(header: Callable[[bytes], bytes | None]) -> str | None:
    """The key in `Authorization: Bearer` or `x-api-key` (Anthropic's)."""
    value = header(b"authorization")
    if value is not None:
        scheme, _, key = value.decode("latin-1").partition(" ")
        return key.strip() if scheme.lower() == "bearer" else None
    value = header(b"x-api-key")
    return None if value is None else value.decode("latin-1").strip()


def load_keys(config: ServeConfig, environ: Mapping[str, str]) -> KeyRing:
    """All keys, of flags, environment and file. Raises `ConfigError`, which never holds a key."""
    found: list[tuple[str, Client]] = []
    from_env = [key.strip() for key in environ.get(API_KEY_ENV, "").split(",") if key.strip()]
    for key in (*config.api_key, *from_env):
        found.append((key, _client(config, f"key-{len(found) + 1}", {})))
    if config.api_key_file is not None:
        found += _from_file(config, Path(config.api_key_file), first=len(found) + 1)
    admin_key = config.admin_key or environ.get(ADMIN_KEY_ENV) or None
    for number, (key, client) in enumerate(found, 1):
        if len(key) < _MIN_CHARS or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(
                f"API key {number} ({client.name}) must be at least {_MIN_CHARS} printable ASCII "
                "characters without spaces: 'openssl rand -hex 24' makes one"
            )
    if admin_key is not None and len(admin_key) < _MIN_CHARS:
        raise ConfigError(f"--admin-key must have at least {_MIN_CHARS} characters")
    if len({key for key, _ in found}) < len(found):
        raise ConfigError("an API key is given twice: each belongs to one client")
    if admin_key is not None and admin_key in {key for key, _ in found}:
        raise ConfigError("--admin-key is also an API key: choose another")
    names = [client.name for _, client in found]
    if len(set(names)) < len(names):
        raise ConfigError("two API keys have the same name: requests could not be told apart")
    return KeyRing(found, admin_key, _client(config, "", {}))


def _client(config: ServeConfig, name: str, own: Mapping[str, Any]) -> Client:
    limits: dict[str, Any] = {
        "requests_per_minute": config.requests_per_minute,
        "tokens_per_minute": config.tokens_per_minute,
        "kv_share": config.max_kv_share,
        "max_concurrent": None,
    }
    return Client(name=name, **(limits | {k: v for k, v in own.items() if k in limits}))


def _from_file(config: ServeConfig, path: Path, first: int) -> list[tuple[str, Client]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--api-key-file {path} cannot be read: {reason}") from None
    if not text.lstrip().startswith(("[", "{")):
        lines = [line.strip() for line in text.splitlines()]
        keys = [line for line in lines if line and not line.startswith("#")]
        found = [(k, _client(config, f"key-{i}", {})) for i, k in enumerate(keys, first)]
    else:
        found = _from_json(config, path, text, first)
    if not found:
        raise ConfigError(f"--api-key-file {path} holds no key")
    return found


def _from_json(config: ServeConfig, path: Path, text: str, first: int) -> list[tuple[str, Client]]:
    try:
        rows = msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise ConfigError(f"--api-key-file {path} is no valid JSON") from None
    if not isinstance(rows, list):
        raise ConfigError(f"--api-key-file {path} must hold a JSON list of objects")
    known = {"key", *(field.name for field in fields(Client))}
    found = []
    for number, row in enumerate(rows, first):
        where = f"--api-key-file {path}, entry {number - first + 1}"
        if not isinstance(row, dict) or not isinstance(row.get("key"), str):
            raise ConfigError(f"{where} must be an object with a key (text)")
        if unknown := sorted(set(row) - known):
            raise ConfigError(f"{where}: unknown field {unknown[0]!r}; known: {sorted(known)}")
        name = row.get("name", f"key-{number}")
        if not isinstance(name, str) or not name or len(name) > 64 or not name.isprintable():
            raise ConfigError(f"{where}: name must be text of 1 to 64 printable characters")
        for limit in _LIMITS:
            _check_limit(where, limit, row.get(limit))
        found.append((row["key"], _client(config, name, row)))
    return found


def _check_limit(where: str, name: str, value: Any) -> None:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "max_concurrent":
        is_number = is_number and isinstance(value, int)
    if not is_number or value <= 0 or (name == "kv_share" and value > 1):
        raise ConfigError(f"{where}: {name} must be a number above 0, got {value!r:.40}")
