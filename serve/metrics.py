"""What Prometheus reads under /metrics, under vLLM's names where it has the same thing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Stats = Mapping[str, int | float]

# Upper bounds in seconds, as vLLM has them.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
               7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
BETWEEN_TOKENS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
                  10.0, 20.0, 40.0, 80.0)
WHOLE = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
         240.0, 480.0, 960.0, 1920.0, 7680.0)

# What the engine counts by itself: the name in its `stats`, the metric, and what it says.
ENGINE_COUNTERS = (
    ("preempted", "vllm:num_preemptions", "Answers that made way for an earlier one."),
    ("steps", "kvfunc:steps", "Steps of the device."),
    ("computed", "kvfunc:computed_tokens", "Tokens of prompts and answers that a query ran for."),
    ("recovered", "kvfunc:recovered_tokens",
     "Tokens computed again though what follows them was resident."),
    ("estimated", "kvfunc:estimated_tokens", "Tokens of shared texts whose KV was estimated."),
    ("evicted", "kvfunc:evicted_tokens", "Tokens that lost their KV to make room."),
    ("compilations", "kvfunc:compilations", "Steps that were compiled, warm-up included."),
    ("host_seconds", "kvfunc:host_seconds", "Time spent on planning, packing and delivering."),
    ("device_seconds", "kvfunc:device_seconds", "Time from the call of a step to its tokens."),
)


class Metrics:
    """One application's metrics, in a registry of their own.

    Counters and histograms are fed by requestlog.py; what the engine counts is read at a scrape.

    Args:
      model: the label `model_name` of all.
      stats: the engine's counters and gauges (`Engine.stats`).
    """

    def __init__(self, model: str, stats: Callable[[], Stats]):
        self._registry, self._model = CollectorRegistry(), model
        self._registry.register(_EngineCollector(model, stats))
        counter, histogram = self._counter, self._histogram
        self.prompt_tokens = counter(
            "vllm:prompt_tokens", "Tokens of prompts whose turn came, each prompt once.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens of answers.")
        self.cache_queries = counter(
            "vllm:prefix_cache_queries", "Tokens of prompts that were looked up in the cache.")
        self.cache_hits = counter(
            "vllm:prefix_cache_hits", "Of these, the tokens whose KV was found and read.")
        self.dropped_tokens = counter(
            "kvfunc:dropped_tokens", "Prompt tokens that were dropped and cost nothing.")
        self.dropped_answer_tokens = counter(
            "kvfunc:dropped_generation_tokens", "Tokens of answers dropped as thinking.")
        self.repositioned_tokens = counter(
            "kvfunc:repositioned_tokens", "Prompt tokens whose KV was read at another position.")
        self.approximate_tokens = counter(
            "kvfunc:approximate_tokens", "Prompt tokens whose KV rests on estimates.")
        self._success = Counter(
            "vllm:request_success", "Answers of requests that ended well, each answer of n.",
            ["model_name", "finished_reason"], registry=self._registry)
        self._failed = Counter(
            "kvfunc:requests_failed", "Requests that were refused, broke off or were given up.",
            ["model_name", "code"], registry=self._registry)
        self.queue_time = histogram(
            "vllm:request_queue_time_seconds", "From submission to a request's turn.", WHOLE)
        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to a request's first token.",
            FIRST_TOKEN)
        self.between_tokens = histogram(
            "vllm:inter_token_latency_seconds", "Between the tokens of an answer.", BETWEEN_TOKENS)
        self.whole_time = histogram(
            "vllm:e2e_request_latency_seconds",
            "From arrival to the end, for requests that ended well.", WHOLE)

    def succeeded(self, reason: str) -> None:
        """An answer of a request that ended well has this finish reason."""
        self._success.labels(self._model, reason).inc()

    def failed(self, code: str) -> None:
        """A request ended with this error code."""
        self._failed.labels(self._model, code).inc()

    def text(self) -> bytes:
        """In Prometheus' text format; it asks the engine, which may take a moment."""
        return generate_latest(self._registry)

    def _counter(self, name: str, documentation: str) -> Counter:
        return Counter(name, documentation, ["model_name"],
                       registry=self._registry).labels(self._model)

    def _histogram(self, name: str, documentation: str, bounds: tuple[float, ...]) -> Histogram:
        return Histogram(name, documentation, ["model_name"], registry=self._registry,
                         buckets=bounds).labels(self._model)


class _EngineCollector(Collector):
    def __init__(self, model: str, stats: Callable[[], Stats]):
        self._model, self._stats = model, stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        pages = stats["free_pages"] + stats["held_pages"] + stats["evictable_pages"]
        for name, documentation, value in (
                ("vllm:num_requests_running", "Answers that run.", stats["running"]),
                ("vllm:num_requests_waiting", "Answers that wait for their turn.",
                 stats["waiting"]),
                ("vllm:kv_cache_usage_perc", "Part of the KV pages that running requests hold; 1 "
                 "is all.", stats["held_pages"] / pages),
                ("kvfunc:anchor_pool_readers", "Prompts of which is known what they do to shared "
                 "texts.", stats["readers"]),
                ("kvfunc:anchor_pool_bytes", "Memory that this takes.", stats["reader_bytes"])):
            gauge = GaugeMetricFamily(name, documentation, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, metric, documentation in ENGINE_COUNTERS:
            counter = CounterMetricFamily(metric, documentation, labels=["model_name"])
            counter.add_metric([self._model], stats[name])
            yield counter
