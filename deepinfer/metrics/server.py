"""What the HTTP server counts itself, beside the engine's numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from deepinfer.metrics.catalogue import SERVER_METRICS


class ServerMetrics(Collector):
    """Counts of one server process. Labels of every metric: model; `http_requests` also route and status."""

    def __init__(self, model: str, *, prefix: str = "dsv_") -> None:
        self.model = model
        self.restarts = 0
        self._prefix = prefix
        self._requests: dict[tuple[str, int], int] = {}  # by route and status
        self._open = {"stream": 0, "complete": 0}
        self.refused: dict[str, int] = {}
        """By reason, of the door."""
        self.queued = 0
        self.queued_tokens = 0

    def count_request(self, route: str, status: int) -> None:
        """route: of the server's own paths, never what a client made up."""
        self._requests[route, status] = self._requests.get((route, status), 0) + 1

    @contextlib.contextmanager
    def open_answer(self, is_stream: bool) -> Iterator[None]:
        kind = "stream" if is_stream else "complete"
        self._open[kind] += 1
        try:
            yield
        finally:
            self._open[kind] -= 1

    def collect(self) -> Iterator[Family]:
        """Called by a scrape."""
        values: dict[str, dict[tuple[str, ...], float]] = {
            "http_requests": {(route, str(status)): n for (route, status), n in self._requests.items()},
            "http_open_answers": {(kind,): n for kind, n in self._open.items()},
            "engine_restarts": {(): self.restarts},
            "door_refusals": {(reason,): n for reason, n in self.refused.items()},
            "door_queued_requests": {(): self.queued},
            "door_queued_tokens": {(): self.queued_tokens},
        }
        for metric in SERVER_METRICS:
            labels = ["model", *(metric.label or "").split()]
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = kind(self._prefix + metric.name, metric.help, labels=labels)
            for own, value in values[metric.name].items():
                family.add_metric([self.model, *own], value)
            yield family
