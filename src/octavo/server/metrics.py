"""Prometheus metrics of a server: what it counts itself, and what the engine tells when scraped."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.outputs import RequestOutput
from octavo.server.metrics_table import ENGINE_METRICS, Metric
from octavo.server.request_metrics import REQUEST_METRICS
from octavo.stats import EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MODEL = "model_name"
_GAPS = "vllm:inter_token_latency_seconds"


class EngineCollector(Collector):
    """Reads the engine's latest numbers when somebody scrapes; costs nothing otherwise."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._model_name, self._stats = model_name, stats

    def collect(self) -> Iterator[Family]:
        """One family a metric of `ENGINE_METRICS`."""
        stats = self._stats()
        for metric in ENGINE_METRICS:
            yield self._family(metric, stats)

    def describe(self) -> Iterator[Family]:
        """The same families, empty: a registry asks for names before there is an engine."""
        for metric in ENGINE_METRICS:
            yield self._family(metric, None)

    def _family(self, metric: Metric, stats: EngineStats | None) -> Family:
        labels = (_MODEL, *metric.labels)
        make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family: CounterMetricFamily | GaugeMetricFamily
        family = make(metric.name, metric.help, labels=labels)
        if stats is not None:
            assert metric.read is not None, f"{metric.name} is not read from the engine"
            value = metric.read(stats)
            if isinstance(value, Mapping):
                for label, number in value.items():
                    family.add_metric([self._model_name, label], number)
            else:
                family.add_metric([self._model_name], value)
        return family


class TokenGaps(Collector):
    """A histogram that every token of a stream is counted in, by one thread: without the locks of
    prometheus_client's, which take longer than writing the token."""

    def __init__(self, metric: Metric, model_name: str) -> None:
        self._metric, self._model_name = metric, model_name
        self._bounds = metric.buckets
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum_s = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        """So many tokens came together, so long after those before."""
        self._counts[bisect_left(self._bounds, seconds / num_tokens)] += num_tokens
        self._sum_s += seconds

    def collect(self) -> Iterator[Family]:
        """The one family."""
        metric = self._metric
        family = HistogramMetricFamily(metric.name, metric.help, labels=(_MODEL,))
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric([self._model_name], buckets, self._sum_s)
        yield family


class Metrics:
    """What `/metrics` shows. Names, meanings and formulas stand in `metrics_table`."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(model_name, stats))
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._model_name = model_name
        self.news: Callable[[int, float], None]
        """A streamed request got so many tokens, so many seconds after those before."""
        for metric in REQUEST_METRICS:
            labels = (_MODEL, *metric.labels)
            if metric.kind == "counter":
                counter = Counter(metric.name, metric.help, labels, registry=self.registry)
                self._counters[metric.name] = counter
                if not metric.labels:
                    counter.labels(model_name)
            elif metric.kind == "gauge":
                gauge = Gauge(metric.name, metric.help, labels, registry=self.registry)
                self._gauges[metric.name] = gauge.labels(model_name)
            elif metric.name == _GAPS:
                gaps = TokenGaps(metric, model_name)
                self.registry.register(gaps)
                self.news = gaps.add
            else:
                histogram = Histogram(
                    metric.name, metric.help, labels, buckets=metric.buckets, registry=self.registry
                )
                self._histograms[metric.name] = histogram.labels(model_name)

    def text(self) -> bytes:
        """The page that Prometheus scrapes."""
        return generate_latest(self.registry)

    # -- what the server tells

    def ended(
        self, output: RequestOutput, num_tokens_each: Sequence[int], max_tokens: int | None
    ) -> None:
        """A request has got its last output. num_tokens_each: of its completions."""
        times, observe = output.metrics, self._observe
        queue_s, ttft_s, e2e_s = times.queue_s, times.ttft_s, times.e2e_s
        for name, seconds in (
            ("vllm:request_queue_time_seconds", queue_s),
            ("vllm:time_to_first_token_seconds", ttft_s),
            ("vllm:e2e_request_latency_seconds", e2e_s),
        ):
            if seconds is not None:
                observe(name, seconds)
        first, last, begun = times.first_token_s, times.last_token_s, times.first_scheduled_s
        num_tokens = times.num_generation_tokens
        if first is not None and last is not None and begun is not None:
            observe("vllm:request_prefill_time_seconds", first - begun)
            observe("vllm:request_decode_time_seconds", last - first)
            observe("vllm:request_inference_time_seconds", last - begun)
            num_gaps = max(num_tokens_each) - 1
            if num_gaps > 0:
                observe("vllm:request_time_per_output_token_seconds", (last - first) / num_gaps)
        observe("vllm:request_prompt_tokens", len(output.prompt_token_ids))
        observe("vllm:request_generation_tokens", num_tokens)
        observe("vllm:request_max_num_generation_tokens", max(num_tokens_each))
        observe("vllm:request_params_n", len(num_tokens_each))
        if max_tokens is not None:
            observe("vllm:request_params_max_tokens", max_tokens)
        observe("octavo:request_kv_block_seconds", output.kv.block_seconds)
        observe("octavo:request_cached_tokens", output.num_cached_tokens)

    def completion_ended(self, reason: str) -> None:
        """One of a request's completions has ended."""
        self._count("vllm:request_success", reason)

    def aborted(self, reason: str) -> None:
        """A request ended without an answer."""
        self._count("octavo:requests_aborted", reason)

    def refused(self, code: str) -> None:
        """An HTTP request was refused with this error code."""
        self._count("octavo:requests_refused", code)

    def answered(self, endpoint: str, status: int) -> None:
        """An HTTP request was answered. endpoint: the route, never the path as it was asked."""
        self._count("octavo:http_requests", endpoint, str(status))

    def in_flight(self, num: int) -> None:
        """So many calls are under way."""
        self._gauges["octavo:requests_in_flight"].set(num)

    def engine_up(self, is_up: bool) -> None:
        """Whether the engine takes requests."""
        self._gauges["octavo:engine_up"].set(is_up)

    def engine_restarted(self) -> None:
        """The engine's process was started again."""
        self._count("octavo:engine_restarts")

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    def _count(self, name: str, *labels: str) -> None:
        self._counters[name].labels(self._model_name, *labels).inc()
