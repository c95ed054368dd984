"""What is counted, for Prometheus, in a registry of the server's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cai_apps.serve.model import ServedModel
from cai_apps.serve.wire import Load

FIRST_TOKEN = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
INTERVAL = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)
LENGTH = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
"""Ends of the buckets of histograms, in seconds."""


class Metrics:
    """Counters and times of requests, and the load of engines.

    Args:
        models: the models that are served.
    """

    def __init__(self, models: Sequence[ServedModel]):
        self._registry = CollectorRegistry()
        add = {"registry": self._registry}
        self.requests = Counter("cai_requests", "Requests by their end", ["model", "route", "status"], **add)
        self.tokens = Counter("cai_tokens", "Tokens of prompts and answers", ["model", "kind"], **add)
        self.first_token = Histogram(
            "cai_first_token_seconds",
            "From a prompt to its first token",
            ["model"],
            buckets=FIRST_TOKEN,
            **add,
        )
        self.interval = Histogram(
            "cai_token_interval_seconds",
            "Between what a stream is told and what it was told before, a token",
            ["model"],
            buckets=INTERVAL,
            **add,
        )
        self.length = Histogram(
            "cai_request_seconds", "From the body to the last byte", ["model"], buckets=LENGTH, **add
        )
        self.working = Gauge("cai_requests_open", "Requests that are being answered", **add)
        self._registry.register(_Loads(models))

    def text(self) -> bytes:
        """Return all of it in Prometheus's form."""
        return generate_latest(self._registry)


class _Loads(Collector):
    """How busy each engine is, when it is asked for."""

    ROWS: tuple[tuple[str, str, Callable[[Load], int]], ...] = (
        ("cai_answers_running", "Answers that hold blocks", lambda load: load.running),
        ("cai_answers_waiting", "Answers that wait for room", lambda load: load.waiting),
        ("cai_blocks_free", "Blocks of the cache that nobody holds", lambda load: load.free_blocks),
        ("cai_found_tokens", "Tokens that were in the cache already", lambda load: load.found_tokens),
    )

    def __init__(self, models: Sequence[ServedModel]):
        self._models = models

    def collect(self) -> Iterable[Metric]:
        labels = ["model", "replica"]
        rows = [
            (model.name, str(number), replica)
            for model in self._models
            for number, replica in enumerate(model.replicas)
        ]
        for name, text, value in self.ROWS:
            family = GaugeMetricFamily(name, text, labels=labels)
            for model, number, replica in rows:
                family.add_metric([model, number], value(replica.load))
            yield family
        blocks = GaugeMetricFamily("cai_blocks", "Blocks of the cache", labels=labels)
        for model, number, replica in rows:
            blocks.add_metric([model, number], 0 if replica.ready is None else replica.ready.blocks)
        yield blocks
