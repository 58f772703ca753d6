"""The gateway's own numbers, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Telemetry:
    """Names begin with `voltriton_gateway_`; the paths are those of routes, never what a caller made up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Answered requests", ["path", "status"])
        self.open = Gauge("voltriton_gateway_open_requests", "Requests in work", registry=self.registry)
        self.duration = self._histogram(
            "request_seconds", "From the first byte in to the last byte out", ["path"]
        )
        self.first_token = self._histogram(
            "first_token_seconds", "Until the first text of an answer", ["model"]
        )
        self.tokens = self._counter("tokens", "Tokens by kind", ["model", "kind"])
        self.disconnects = self._counter("disconnects", "Callers that left before the end", ["path"])
        self.failovers = self._counter(
            "failovers", "Requests sent to another server after a failure", ["server"]
        )
        self.server_up = Gauge(
            "voltriton_gateway_server_up", "1 where a server is healthy", ["server"], registry=self.registry
        )
        self.server_open = Gauge(
            "voltriton_gateway_server_open_requests",
            "Requests at a server",
            ["server"],
            registry=self.registry,
        )

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"voltriton_gateway_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: list[str]) -> Histogram:
        return Histogram(f"voltriton_gateway_{name}", text, labels, buckets=_SECONDS, registry=self.registry)
