"""A span for each request, sent by OTLP; names are OpenTelemetry's for generative AI, and vLLM's.

Needs the extra `octavo[otel]`. A request with a `traceparent` header becomes a part of that trace.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.outputs import RequestOutput

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


class Tracer:
    """Makes spans once requests have ended, from the times that they bring: nothing is done while
    they run."""

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource.create({"service.name": "octavo"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    @classmethod
    def to(cls, endpoint: str, model_name: str) -> Tracer:
        """To a collector that speaks OTLP over HTTP. Raises `ConfigError` without the extra."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError:
            raise ConfigError(
                f"--otlp-traces-endpoint {endpoint} needs OpenTelemetry: pip install 'octavo[otel]'"
            ) from None
        return cls(OTLPSpanExporter(endpoint=endpoint), model_name)

    def ended(
        self,
        request_id: str,
        output: RequestOutput | None,
        traceparent: str | None,
        error: str | None = None,
    ) -> None:
        """A request has ended: with its last output, or without one for a reason."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        context = None
        if traceparent is not None:
            context = self._propagator.extract({"traceparent": traceparent})
        # the engine's clock is monotonic, spans want the time of day
        offset_s = time.time() - time.monotonic()
        now_s = time.monotonic()
        begin_s = now_s if output is None else output.metrics.arrival_s
        span = self._tracer.start_span(
            "llm_request",
            context=context,
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(begin_s + offset_s),
        )
        span.set_attribute("gen_ai.request.id", request_id)
        span.set_attribute("gen_ai.response.model", self._model_name)
        if output is not None:
            for name, value in _attributes(output).items():
                span.set_attribute(name, value)
            end_s = output.metrics.finished_s or now_s
        else:
            span.set_status(Status(StatusCode.ERROR, error or "aborted"))
            end_s = now_s
        span.end(_nanoseconds(end_s + offset_s))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _attributes(output: RequestOutput) -> dict[str, str | int | float]:
    times = output.metrics
    found: dict[str, str | int | float | None] = {
        "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.completion_tokens": times.num_generation_tokens,
        "gen_ai.latency.time_in_queue": times.queue_s,
        "gen_ai.latency.time_to_first_token": times.ttft_s,
        "gen_ai.latency.e2e": times.e2e_s,
        "octavo.cached_tokens": output.num_cached_tokens,
        "octavo.kv.peak_blocks": output.kv.peak_blocks,
        "octavo.kv.block_seconds": output.kv.block_seconds,
        "octavo.num_preemptions": times.num_preemptions,
    }
    return {name: value for name, value in found.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
