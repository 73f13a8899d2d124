"""Metrics: each is counted, named as vLLM names it, and the Grafana dashboard knows only those."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.outputs import CompletionOutput, RequestKVUsage, RequestMetrics, RequestOutput
from octavo.server.metrics import Metrics
from octavo.server.metrics_table import ENGINE_METRICS
from octavo.server.request_metrics import REQUEST_METRICS
from octavo.stats import EngineStats

GENERATED = "vllm:generation_tokens_total"
SUCCESS = "vllm:request_success_total"
TTFT = "vllm:time_to_first_token_seconds_count"
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "octavo.json"
STATS = EngineStats(
    num_running=3,
    num_waiting=2,
    ledger={"tokens": 30, "reserved": 6, "internal": 4, "external": 0, "cached": 8, "free": 112},
    shared_saved_blocks=5,
    num_blocks=40,
    num_used_blocks=15,
    num_cached_blocks=2,
    pinned_slots=4,
    host_blocks={"held": 1, "cached": 2, "free": 3},
    disk_blocks={"held": 0, "cached": 7, "free": 1},
    steps_total=9,
    prompt_tokens_total=100,
    generation_tokens_total=50,
    preemptions_total={"recompute": 2, "swap": 3},
    storms_total=1,
    prefix_query_tokens_total=100,
    prefix_hit_tokens_total=64,
    miss_blocks_total={"never seen": 4},
    evictions_total=6,
    tier_blocks_total={"to_host": 11, "from_host": 10, "to_disk": 2, "from_disk": 1},
    step_seconds_total=1.5,
    client_tokens_total={"alice": 300.0},
    client_blocks={"alice": 9},
    process_bytes=1 << 20,
)


def scraped(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(name, labels but the model's as text) -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "m", sample
            text = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            found[sample.name, text] = sample.value
    return found


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("m", lambda: STATS)


def test_the_engines_numbers(metrics: Metrics) -> None:
    found = scraped(metrics)
    assert found["vllm:num_requests_running", ""] == 3
    assert found["vllm:kv_cache_usage_perc", ""] == 15 / 40
    assert found["vllm:num_preemptions_total", ""] == 5
    assert found["octavo:preemptions_total", "mode=swap"] == 3
    assert found["octavo:kv_waste_ratio", ""] == 1 - 30 / 40  # of 160 slots 120 are free or cached
    assert found["octavo:kv_shared_saved_ratio", ""] == 5 / 20
    assert found["octavo:kv_blocks", "state=free"] == 23
    assert found["octavo:prefix_miss_blocks_total", "reason=never seen"] == 4
    assert found["octavo:client_service_tokens_total", "client=alice"] == 300
    assert sum(v for (n, _), v in found.items() if n == "octavo:kv_slots") == 160


def test_every_number_that_the_engine_tells_is_shown() -> None:
    """A field of `EngineStats` that no metric reads would be told for nothing."""

    class Spy:
        def __init__(self) -> None:
            self.read: set[str] = set()

        def __getattr__(self, name: str) -> Any:
            self.read.add(name)
            return getattr(STATS, name)

    spy = Spy()
    for metric in ENGINE_METRICS:
        assert metric.read is not None
        metric.read(spy)  # type: ignore[arg-type]
    assert {f.name for f in fields(EngineStats)} - spy.read == {"time_s"}


def test_a_requests_times_and_costs(metrics: Metrics) -> None:
    output = RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=[1] * 12,
        prompt_logprobs=None,
        outputs=[CompletionOutput(0), CompletionOutput(1)],
        finished=True,
        metrics=RequestMetrics(
            arrival_s=10.0, first_scheduled_s=10.5, first_token_s=11.0, last_token_s=13.0,
            finished_s=13.25, num_generation_tokens=10,
        ),
        num_cached_tokens=8,
        kv=RequestKVUsage(block_seconds=2.5),
    )  # fmt: skip
    metrics.ended(output, [6, 4], 32)
    metrics.ended(output, [6, 4], None)
    metrics.completion_ended("stop")
    metrics.completion_ended("length")
    metrics.news(4, 0.02)
    found = scraped(metrics)
    for name, value in {
        "vllm:time_to_first_token_seconds": 1.0,
        "vllm:e2e_request_latency_seconds": 3.25,
        "vllm:request_queue_time_seconds": 0.5,
        "vllm:request_prefill_time_seconds": 0.5,
        "vllm:request_decode_time_seconds": 2.0,
        "vllm:request_inference_time_seconds": 2.5,
        "vllm:request_time_per_output_token_seconds": 0.4,  # of the longest: 2 s over five gaps
        "vllm:request_prompt_tokens": 12,
        "vllm:request_generation_tokens": 10,
        "vllm:request_max_num_generation_tokens": 6,
        "vllm:request_params_n": 2,
        "octavo:request_kv_block_seconds": 2.5,
        "octavo:request_cached_tokens": 8,
    }.items():
        assert found[f"{name}_count", ""] == 2, name
        assert found[f"{name}_sum", ""] == pytest.approx(2 * value), name
    assert found["vllm:request_params_max_tokens_count", ""] == 1
    assert found["vllm:request_params_max_tokens_sum", ""] == 32
    assert found["vllm:request_success_total", "finished_reason=stop"] == 1
    assert found["vllm:inter_token_latency_seconds_count", ""] == 4
    assert found["vllm:inter_token_latency_seconds_sum", ""] == pytest.approx(0.02)
    assert found["vllm:inter_token_latency_seconds_bucket", "le=0.005"] == 4


def test_what_the_server_counts(metrics: Metrics) -> None:
    metrics.answered("/v1/completions", 200)
    metrics.refused("rate_limit_exceeded")
    metrics.aborted("client_gone")
    metrics.in_flight(7)
    metrics.engine_up(True)
    metrics.engine_restarted()
    found = scraped(metrics)
    assert found["octavo:http_requests_total", "endpoint=/v1/completions,status=200"] == 1
    assert found["octavo:requests_refused_total", "code=rate_limit_exceeded"] == 1
    assert found["octavo:requests_aborted_total", "reason=client_gone"] == 1
    assert found["octavo:requests_in_flight", ""] == 7
    assert found["octavo:engine_up", ""] == 1
    assert found["octavo:engine_restarts_total", ""] == 1


def test_names_are_unique_and_each_says_how_it_is_computed() -> None:
    every = [*ENGINE_METRICS, *REQUEST_METRICS]
    assert len({m.name for m in every}) == len(every)
    for metric in every:
        assert metric.help.endswith(".") and metric.formula, metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def expressions(node: Any) -> Iterator[str]:
    """Every query of a dashboard."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "query") and isinstance(value, str):
                yield value
            else:
                yield from expressions(value)
    elif isinstance(node, list):
        for value in node:
            yield from expressions(value)


def test_grafana_asks_for_nothing_that_does_not_exist() -> None:
    every = (*ENGINE_METRICS, *REQUEST_METRICS)
    known = {m.scraped_name for m in every}
    labels = {m.scraped_name: m.labels for m in every}
    for metric in every:
        if metric.kind == "histogram":
            for suffix in ("_bucket", "_sum", "_count"):
                known.add(metric.name + suffix)
                labels[metric.name + suffix] = ("le",)
    queries = list(expressions(json.loads(DASHBOARD.read_text("utf-8"))))
    used = set()
    for query in queries:
        names = re.findall(r"\b(?:vllm|octavo):[a-z0-9_]+", query)
        assert set(names) <= known, f"{query}: {set(names) - known}"
        used |= set(names)
        for group in re.findall(r"by \(([a-z_, ]*)\)", query):
            for label in group.split(", "):
                assert any(label in labels[name] for name in names), f"{query}: no label {label}"
    assert len(used) > 30
    kinds = {m.scraped_name: m.kind for m in every}
    for query in queries:
        for name in re.findall(r"(?:rate|increase)\(([a-z:_0-9]+)", query):
            is_counter = kinds.get(name, "counter") == "counter"
            assert is_counter, f"{query}: {name} is no counter"


def test_a_real_server_is_scraped(server: Any) -> None:
    def value(name: str) -> float:
        page = server.call("/metrics")
        assert page.status == 200 and page.headers["content-type"].startswith("text/plain")
        found = 0.0
        for family in text_string_to_metric_families(page.body.decode()):
            found += sum(s.value for s in family.samples if s.name == name)
        return found

    longest = "vllm:request_max_num_generation_tokens_sum"
    before = {name: value(name) for name in (GENERATED, SUCCESS, TTFT, longest)}
    assert server.complete(5).status == 200
    assert server.complete(-1).status == 400
    server.until(lambda: value(GENERATED) == before[GENERATED] + 5)
    assert value(SUCCESS) == before[SUCCESS] + 1
    assert value(longest) == before[longest] + 5
    assert value(TTFT) == before[TTFT] + 1
    assert value("octavo:engine_up") == 1
    assert value("octavo:requests_in_flight") == 0
    assert value("vllm:num_requests_running") == 0
    assert value("octavo:requests_refused_total") >= 1
    for stream in (False, True):
        assert server.complete(3, n=2, stream=stream).status == 200
    assert value(longest) == before[longest] + 5 + 3 + 3
