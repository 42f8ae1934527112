"""Prometheus metrics, named as vLLM names them, with the prefix ``oscar:``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)

# Name, what it says, and the field of the engine's Stats; read whenever /metrics is asked for.
GAUGES = (
    ("num_requests_running", "Requests that hold a slot of the batch.", "running"),
    ("num_requests_waiting", "Requests that wait for a slot or for pages.", "waiting"),
    ("kv_cache_pages_used", "Pages of the KV cache in use.", "kv_pages_used"),
    ("kv_cache_pages", "Pages of the KV cache.", "kv_pages_total"),
    (
        "kv_page_bits_per_element",
        "Bits per key or value element of a page, its metadata included.",
        "bits_per_element",
    ),
    (
        "kv_cache_bytes_per_token",
        "Bytes a token takes in the pages, all layers, keys and values.",
        "bytes_per_token",
    ),
)
COUNTERS = (
    ("compiles_after_ready", "Compilations since the server was ready; 0.", "compiles_after_ready"),
    ("num_preemptions", "Requests put back into the queue for want of pages.", "preemptions"),
)


class Metrics:
    """The counters of one server, in a registry of their own.

    Args:
        model: the served name, a label of every series.
        stats: the engine's counts, or None while there is no engine.
    """

    def __init__(self, model: str, stats: Callable[[], Any | None]) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model, stats))
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the request's arrival to the first token of a choice.",
            SECONDS,
        )
        self.time_per_output_token = self._histogram(
            "time_per_output_token_seconds",
            "Mean time between the tokens of a choice, the first not counted.",
            TOKEN_SECONDS,
        )
        self.request_seconds = self._histogram(
            "e2e_request_latency_seconds",
            "From the request's arrival to the last token of a choice.",
            SECONDS,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of accepted requests.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._finished = Counter(
            "oscar:request_success",
            "Choices by the way they ended: stop, length, abort, error.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._http = Counter(
            "oscar:http_requests",
            "HTTP requests by route and status.",
            ("model_name", "route", "status"),
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        labels = ("model_name",)
        whole = Histogram(f"oscar:{name}", text, labels, buckets=buckets, registry=self._registry)
        return whole.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        whole = Counter(f"oscar:{name}", text, ("model_name",), registry=self._registry)
        return whole.labels(self._model)

    def finished(self, reason: str) -> None:
        """Count a choice that ended; ``reason`` is the engine's finish_reason."""
        self._finished.labels(self._model, reason).inc()

    def answered(self, route: str, status: int) -> None:
        """Count an HTTP answer; ``route`` is one of the server's own, never a client's text."""
        self._http.labels(self._model, route, str(status)).inc()

    def exposition(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The engine's own numbers, read at the moment of asking."""

    def __init__(self, model: str, stats: Callable[[], Any | None]) -> None:
        self._model, self._stats = model, stats

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._stats()
        if stats is None:
            return
        for name, text, field in GAUGES:
            yield self._family(GaugeMetricFamily, name, text, float(getattr(stats, field)))
        total = stats.kv_pages_total
        usage = stats.kv_pages_used / total if total else 0.0
        text = "Share of the KV cache's pages in use, 0 to 1."
        yield self._family(GaugeMetricFamily, "kv_cache_usage_perc", text, usage)
        for name, text, field in COUNTERS:
            yield self._family(CounterMetricFamily, name, text, float(getattr(stats, field)))

    def _family(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        value: float,
    ) -> GaugeMetricFamily | CounterMetricFamily:
        family = kind(f"oscar:{name}", text, labels=("model_name",))
        family.add_metric((self._model,), value)
        return family
