"""The server's configuration, from which its flags are generated as the engine's are."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, fields
from typing import Literal

from octavo.errors import ConfigError
from octavo.server.tools.parsers import ParserName
from octavo.util import flag_name

LogLevel = Literal["debug", "info", "warning", "error"]
_POSITIVE = (
    "max_body_bytes", "max_prompts", "max_n", "max_output_tokens", "max_concurrent_requests",
    "requests_per_minute", "tokens_per_minute", "request_timeout_s", "slow_reader_timeout_s",
    "step_timeout_s",
)  # fmt: skip
_NOT_NEGATIVE = ("max_queued_requests", "shutdown_timeout_s", "max_restarts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Where the server listens, whom it serves, and how much of it. Raises `ConfigError`."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every one of this machine's, and wants an API key."""
    port: int = 8000
    """Port to listen on; 0 takes a free one and says which."""
    uds: str | None = None
    """Path of a Unix socket to listen on instead."""
    api_key: tuple[str, ...] = ()
    """Keys that clients must have one of; better given by OCTAVO_API_KEY (several with commas) or
    --api-key-file, as other users see a process's arguments."""
    api_key_file: str | None = None
    """File of keys: one a line, or a JSON list of objects with "key", "name",
    "requests_per_minute", "tokens_per_minute", "kv_share" and "max_concurrent"."""
    admin_key: str | None = None
    """Key for the admin endpoints (or OCTAVO_ADMIN_KEY). Without one they answer only this machine,
    and only where the server listens on a loopback address."""
    ssl_keyfile: str | None = None
    """Private key for TLS, as PEM."""
    ssl_certfile: str | None = None
    """Certificate for TLS, as PEM."""
    ssl_ca_certs: str | None = None
    """Certificates that clients' own must be signed by: those without one are turned away."""
    allowed_origins: tuple[str, ...] = ()
    """Web origins whose pages may call the server from a browser (CORS); * is any."""
    root_path: str = ""
    """Path under which a proxy shows the server."""
    served_model_name: tuple[str, ...] = ()
    """Names by which requests may ask for the model; the first is told. By default its own."""
    chat_template: str | None = None
    """File with a Jinja chat template, or the name of one of the model's, to use instead of its
    usual one."""
    trust_request_chat_template: bool = False
    """Render templates that requests bring as "chat_template": in a process of their own, with
    limits on time, memory and what they write."""
    enable_auto_tool_choice: bool = False
    """Find the model's calls of tools in its answers (tool_choice auto); needs --tool-call-parser.
    """
    tool_call_parser: ParserName | None = None
    """How the model writes calls of tools: hermes (Hermes, Qwen), llama3_json or mistral."""
    max_body_bytes: int = 32 * 2**20
    """Largest request body."""
    max_prompts: int = 256
    """Most prompts in one request."""
    max_n: int = 64
    """Most completions of one prompt (n, best_of, beams)."""
    max_output_tokens: int | None = None
    """Most tokens that a request may ask for per completion."""
    max_concurrent_requests: int = 4096
    """Most prompts under way at a time, running or waiting; more are answered 503."""
    max_queued_requests: int | None = None
    """Most prompts waiting at a time, that is under way beyond the engine's --max-num-seqs."""
    requests_per_minute: float | None = None
    """Prompts a minute of each key; as many may come at once after a quiet minute."""
    tokens_per_minute: float | None = None
    """Tokens a minute of each key: prompts', and max_tokens of each completion, of which those not
    generated are given back."""
    max_kv_share: float | None = None
    """Share of the KV pool that each key's requests may hold when one more is admitted; it waits
    meanwhile."""
    request_timeout_s: float | None = None
    """Longest time for an answer; then it is aborted, with an error."""
    slow_reader_timeout_s: float = 60.0
    """So long may a client leave a stream unread, with all buffers full, or pause in the midst of
    sending a request; then it is aborted."""
    shutdown_timeout_s: float = 30.0
    """After SIGTERM, running requests may take so long to finish."""
    compat: Literal["strict", "lenient"] = "strict"
    """What becomes of unknown fields of requests: refused, or ignored and named in the header
    X-Octavo-Ignored."""
    insecure: bool = False
    """Listen on a public address though there is no API key."""
    dashboard: bool = True
    """Show the memory live at /dashboard."""
    log_format: Literal["text", "json"] = "text"
    """Log lines for people, or JSON objects; of both processes."""
    log_requests: bool = False
    """A log line for each request: method, path, status, time, client."""
    log_prompts: bool = False
    """Write prompts to the log, too."""
    log_level: LogLevel = "info"
    """Least severe lines to write."""
    otlp_traces_endpoint: str | None = None
    """URL that takes a span for each request, by OTLP over HTTP; needs the extra octavo[otel]."""
    step_timeout_s: float = 300.0
    """An engine that has work and says nothing for so long is wedged: ended, and started again."""
    max_restarts: int = 5
    """So many times in a row is an engine started again before the server gives up on it."""

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise self._refusal(name, "must be a number above 0")
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and not 0 <= value < float("inf"):
                raise self._refusal(name, "must be a number of at least 0")
        if not 0 <= self.port <= 65535:
            raise self._refusal("port", "must be from 0 to 65535")
        if self.max_kv_share is not None and not 0 < self.max_kv_share <= 1:
            raise self._refusal("max_kv_share", "must be above 0 and at most 1")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("TLS needs both: give --ssl-keyfile and --ssl-certfile")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ConfigError("--ssl-ca-certs is for TLS: give --ssl-certfile and --ssl-keyfile")
        if self.enable_auto_tool_choice != (self.tool_call_parser is not None):
            raise ConfigError(
                "tools need both: give --enable-auto-tool-choice and --tool-call-parser"
            )
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise self._refusal("root_path", "must begin with / and not end with it")

    def _refusal(self, name: str, rule: str) -> ConfigError:
        return ConfigError(f"{flag_name(name)} {rule}, got {getattr(self, name)!r}")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False  # a name: who knows what it resolves to

    @property
    def is_tls(self) -> bool:
        """Whether clients talk TLS."""
        return self.ssl_certfile is not None

    def __repr__(self) -> str:
        """Without keys."""
        secret = ("api_key", "admin_key")
        shown = (
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name not in secret
        )
        return f"ServeConfig({', '.join(shown)})"
