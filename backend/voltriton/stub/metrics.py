"""Numbers of the host, and our own, as Triton custom metrics.

The host sends Prometheus samples of vLLM (those that changed, once a second). Triton's histograms can only
observe single values, at the price of a round trip each, so a histogram is published as what Prometheus
stores of it: the series NAME_bucket, NAME_sum and NAME_count, as counters. Queries do not see the
difference; totals are exact; and the cost does not grow with the traffic.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from voltriton.wire import is_counter

# The official backend's name for the inter-token latency, which vLLM itself has given up.
ALIASES = {"vllm:inter_token_latency_seconds": "vllm:time_per_output_token_seconds"}

OUTCOMES = "voltriton:requests_total"
RESTARTS = "voltriton:engine_restarts_total"
ENGINE_UP = "voltriton:engine_up"
OPEN = "voltriton:requests_open"
HELP = {
    OUTCOMES: "Requests by outcome",
    RESTARTS: "Times the engine was started again after it had died",
    OPEN: "Requests that have not been answered to the end",
    ENGINE_UP: "1 while the engine answers, 0 while it is down or being started again",
}


class Metrics:
    """Triton metric families by name, made on first use. Thread-safe."""

    def __init__(self, pb_utils: Any, model: str, version: str) -> None:
        self._pb = pb_utils
        self._base = {"model": model, "version": version}
        self._families: dict[str, Any] = {}
        # (name, labels) -> (metric, value that Triton has, offset of counters that began anew)
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], _Series] = {}
        self._lock = threading.Lock()

    def take(self, samples: Iterable[tuple[str, dict[str, str], float]]) -> None:
        """Samples as [name, labels, value]."""
        with self._lock:
            for name, labels, value in samples:
                for each in self._names(name):
                    self._series(each, labels).set(value)

    def count(self, name: str, by: float = 1.0, **labels: str) -> None:
        with self._lock:
            self._series(name, labels).add(by)

    def gauge(self, name: str, value: float) -> None:
        with self._lock:
            self._series(name, {}).set(value)

    def engine_restarted(self) -> None:
        """vLLM's counters begin at zero again: go on from where Triton's stand. Gauges too are gone."""
        with self._lock:
            for series in self._metrics.values():
                series.restart()

    @staticmethod
    def _names(name: str) -> list[str]:
        for old, new in ALIASES.items():
            if name.startswith(old):
                return [name, new + name.removeprefix(old)]
        return [name]

    def _series(self, name: str, labels: dict[str, str]) -> _Series:
        key = (name, tuple(sorted(labels.items())))
        series = self._metrics.get(key)
        if series is None:
            counter = is_counter(name)
            metric = self._family(name, counter).Metric(labels={**self._base, **labels})
            series = self._metrics[key] = _Series(metric, counter, own=name.startswith("voltriton:"))
        return series

    def _family(self, name: str, counter: bool) -> Any:
        family = self._families.get(name)
        if family is None:
            kinds = self._pb.MetricFamily
            family = self._families[name] = self._pb.MetricFamily(
                name=name,
                description=HELP.get(name, "see vLLM"),
                kind=kinds.COUNTER if counter else kinds.GAUGE,
            )
        return family


class _Series:
    """One Triton metric, and what is known of it here so that nothing is sent that changes nothing."""

    def __init__(self, metric: Any, counter: bool, own: bool) -> None:
        self._metric = metric
        self._counter = counter
        self._own = own
        self._value = 0.0

    def add(self, by: float) -> None:
        self._metric.increment(by)

    def set(self, value: float) -> None:
        if value == self._value:
            return
        if self._counter:
            # Below what was there before: the source began anew.
            self._metric.increment(value - self._value if value > self._value else value)
        else:
            self._metric.set(value)
        self._value = value

    def restart(self) -> None:
        if self._own:
            return
        if not self._counter:
            self._metric.set(0.0)
        self._value = 0.0


class NoMetrics(Metrics):
    """Where metrics are switched off, in the model or in the server."""

    def __init__(self) -> None:
        super().__init__(None, "", "")

    def take(self, samples: Iterable[tuple[str, dict[str, str], float]]) -> None:
        pass

    def count(self, name: str, by: float = 1.0, **labels: str) -> None:
        pass

    def gauge(self, name: str, value: float) -> None:
        pass

    def engine_restarted(self) -> None:
        pass
