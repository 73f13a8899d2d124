"""Spans of requests: their times, their attributes, and the trace that they belong to."""

from __future__ import annotations

import gzip
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from octavo.outputs import RequestKVUsage, RequestMetrics, RequestOutput
from octavo.server.tracing import Tracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_span_has_the_requests_times_and_costs() -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer(exporter, "m")
    now_s = time.monotonic()
    output = RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=[1, 2, 3],
        prompt_logprobs=None,
        outputs=[],
        finished=True,
        metrics=RequestMetrics(
            arrival_s=now_s - 4, first_scheduled_s=now_s - 3, first_token_s=now_s - 2,
            last_token_s=now_s - 1, finished_s=now_s - 1, num_generation_tokens=7,
        ),
        num_cached_tokens=2,
        kv=RequestKVUsage(peak_blocks=5, block_seconds=1.5),
    )  # fmt: skip
    tracer.ended("a", output, PARENT)
    tracer.ended("b", None, None, "client_gone")
    tracer.close()
    first, second = exporter.get_finished_spans()
    assert first.parent is not None and first.context is not None
    assert f"{first.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{first.parent.span_id:016x}" == PARENT.split("-")[2]
    assert first.start_time is not None and first.end_time is not None
    assert (first.end_time - first.start_time) / 1e9 == pytest.approx(3.0, abs=0.001)
    assert abs(first.end_time / 1e9 - (time.time() - 1)) < 5, "in the time of day"
    attributes = dict(first.attributes or {})
    assert attributes["gen_ai.request.id"] == "a"
    assert attributes["gen_ai.usage.prompt_tokens"] == 3
    assert attributes["gen_ai.usage.completion_tokens"] == 7
    assert attributes["gen_ai.latency.time_in_queue"] == pytest.approx(1.0)
    assert attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(2.0)
    assert attributes["octavo.cached_tokens"] == 2
    assert attributes["octavo.kv.peak_blocks"] == 5
    assert second.parent is None and second.status.status_code is StatusCode.ERROR
    assert second.status.description == "client_gone"


def test_spans_reach_a_collector(start_server: Any) -> None:
    got: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_packed = self.headers.get("content-encoding") == "gzip"
            got.append(gzip.decompress(body) if is_packed else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        server = start_server("--otlp-traces-endpoint", endpoint)
        answer = server.call(
            "/v1/completions", {"prompt": "hi", "max_tokens": 3}, traceparent=PARENT
        )
        assert answer.status == 200
        server.stop()  # what is left is sent before it goes
        collector.shutdown()
    sent = ExportTraceServiceRequest.FromString(b"".join(got))
    (span,) = sent.resource_spans[0].scope_spans[0].spans
    assert span.name == "llm_request"
    assert span.trace_id.hex() == PARENT.split("-")[1]
    attributes = {a.key: a.value for a in span.attributes}
    assert attributes["gen_ai.usage.completion_tokens"].int_value == 3
