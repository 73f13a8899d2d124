"""Metrics that the server counts itself, as requests come and go; see `metrics_table`."""

from __future__ import annotations

from octavo.server.metrics_table import Metric

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_ITL = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_LATENCY = (
    0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
)  # fmt: skip
_LENGTHS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
_FEW = (1.0, 2.0, 5.0, 10.0, 20.0)
_BLOCK_SECONDS = tuple(float(10**e) for e in range(-2, 6))

REQUEST_METRICS = (
    Metric(
        name="vllm:time_to_first_token_seconds",
        kind="histogram",
        help="Time from a request's arrival to its first token.",
        formula="first token - arrival, in the engine's clock",
        buckets=_TTFT,
    ),
    Metric(
        name="vllm:inter_token_latency_seconds",
        kind="histogram",
        help="Time between a streamed request's tokens.",
        formula="time since the last news of the request, shared evenly by the news' tokens",
        buckets=_ITL,
    ),
    Metric(
        name="vllm:request_time_per_output_token_seconds",
        kind="histogram",
        help="Mean time between a request's tokens.",
        formula="(last token - first token) / (tokens of a sequence - 1)",
        buckets=_ITL,
    ),
    Metric(
        name="vllm:e2e_request_latency_seconds",
        kind="histogram",
        help="Time from a request's arrival to its end.",
        formula="end - arrival",
        buckets=_LATENCY,
    ),
    Metric(
        name="vllm:request_queue_time_seconds",
        kind="histogram",
        help="Time a request waited before it first ran.",
        formula="first scheduled - arrival",
        buckets=_LATENCY,
    ),
    Metric(
        name="vllm:request_prefill_time_seconds",
        kind="histogram",
        help="Time from first running to the first token.",
        formula="first token - first scheduled",
        buckets=_LATENCY,
    ),
    Metric(
        name="vllm:request_decode_time_seconds",
        kind="histogram",
        help="Time from the first token to the last.",
        formula="last token - first token",
        buckets=_LATENCY,
    ),
    Metric(
        name="vllm:request_inference_time_seconds",
        kind="histogram",
        help="Time from first running to the last token.",
        formula="last token - first scheduled",
        buckets=_LATENCY,
    ),
    Metric(
        name="vllm:request_prompt_tokens",
        kind="histogram",
        help="Tokens of a request's prompt.",
        formula="prompt tokens of each request that ended",
        buckets=_LENGTHS,
    ),
    Metric(
        name="vllm:request_generation_tokens",
        kind="histogram",
        help="Tokens generated for a request.",
        formula="tokens over all of its samples, of each request that ended",
        buckets=_LENGTHS,
    ),
    Metric(
        name="vllm:request_max_num_generation_tokens",
        kind="histogram",
        help="Tokens of a request's longest completion.",
        formula="most tokens of one of its samples, of each request that ended",
        buckets=_LENGTHS,
    ),
    Metric(
        name="vllm:request_params_max_tokens",
        kind="histogram",
        help="Tokens asked for at most.",
        formula="`max_tokens` of each request that ended and had one",
        buckets=_LENGTHS,
    ),
    Metric(
        name="vllm:request_params_n",
        kind="histogram",
        help="Completions asked for.",
        formula="`n` of each request that ended",
        buckets=_FEW,
    ),
    Metric(
        name="vllm:request_success",
        kind="counter",
        help="Completions that ended, by why.",
        formula="completions by finish reason (stop, length, abort)",
        labels=("finished_reason",),
    ),
    Metric(
        name="octavo:request_kv_block_seconds",
        kind="histogram",
        help="What a request cost the pool.",
        formula="integral over time of the blocks that its sequences referenced",
        buckets=_BLOCK_SECONDS,
    ),
    Metric(
        name="octavo:request_cached_tokens",
        kind="histogram",
        help="Prompt tokens that a request found in the cache.",
        formula="cached tokens of each request that ended",
        buckets=(0.0, *_LENGTHS),
    ),
    Metric(
        name="octavo:requests_aborted",
        kind="counter",
        help="Requests that ended without an answer, by why.",
        formula="requests by reason (disconnect, timeout, slow_reader, admin, shutdown, engine, "
        "failed)",
        labels=("reason",),
    ),
    Metric(
        name="octavo:requests_refused",
        kind="counter",
        help="HTTP requests refused before they reached the engine, by why.",
        formula="refusals by error code (see docs/serving.md)",
        labels=("code",),
    ),
    Metric(
        name="octavo:http_requests",
        kind="counter",
        help="HTTP requests answered.",
        formula="responses by endpoint and status",
        labels=("endpoint", "status"),
    ),
    Metric(
        name="octavo:requests_in_flight",
        kind="gauge",
        help="HTTP requests under way that generate.",
        formula="calls that have begun and not ended",
    ),
    Metric(
        name="octavo:engine_up",
        kind="gauge",
        help="1 while the engine can take requests.",
        formula="1 if the state is ready, else 0",
    ),
    Metric(
        name="octavo:engine_restarts",
        kind="counter",
        help="How often the engine's process was started again.",
        formula="restarts since the server started",
    ),
)
"""Counted in the server."""
