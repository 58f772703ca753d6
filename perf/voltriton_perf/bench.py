"""A level of load, measured: the tool, the server's side beside it, and what a report keeps of both."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from voltriton_client import Client

from voltriton_perf import load, pa
from voltriton_perf.load import Prompt
from voltriton_perf.pa import AnalyzerError, Level
from voltriton_perf.perf_analyzer import PerfAnalyzer
from voltriton_perf.server_side import Sampler
from voltriton_perf.stats import Record, percentile, summarise

TIMELINE_POINTS = 1000


@dataclass(frozen=True)
class Service:
    """What is measured: a model behind a gRPC address, and where its metrics are."""

    address: str
    model: str
    metrics_url: str | None

    def inputs(self) -> frozenset[str]:
        """Names of the model's inputs. A VoltritonError says why it is not ready."""
        with Client(self.address) as client:
            client.wait_ready(self.model, 0.0)
            return frozenset(client._takes(self.model))


@dataclass
class Measured:
    """A level's outcome as the report has it."""

    level: Level
    tool: str
    records: list[Record]
    server: dict[str, Any]
    failed: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def interrupted(self) -> bool:
        return len(self.records) < self.level.requests and not self.failed

    def as_dict(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "mode": self.level.mode, "value": self.level.value, "requests": self.level.requests, "tool": self.tool,
            "failed": self.failed, "partial": self.interrupted, "notes": self.notes,
            "load_average": round(os.getloadavg()[0], 2), "server": self.server,
        }  # fmt: skip
        if self.records:
            values["summary"] = asdict(summarise(self.records))
            values |= _curves(self.records)
        return values


def _curves(records: Sequence[Record]) -> dict[str, Any]:
    """Quantiles (0, 1 ... 100 %) and the requests over time, thinned to what a plot can show."""
    good = [r for r in records if r.error is None and r.arrivals_s]
    if not good:
        return {}
    columns = {
        "ttft_ms": [r.ttft_s * 1e3 for r in good],
        "itl_ms": [r.itl_s * 1e3 for r in good if r.itl_s is not None],
        "e2e_ms": [r.total_s * 1e3 for r in good],
    }
    began_s = good[0].sent_s
    step = max(1, len(good) // TIMELINE_POINTS)
    return {
        "quantiles": {k: [round(percentile(v, q), 3) for q in range(101)] for k, v in columns.items() if v},
        "timeline": [
            [round(r.sent_s - began_s, 3), round(r.ttft_s * 1e3, 2), round(r.total_s * 1e3, 2)]
            for r in good[::step]
        ],
    }


@dataclass
class Bench:
    """Measures levels of one service."""

    service: Service
    sampling: dict[str, Any]
    seed: int
    timeout_s: float
    # None: by our own client.
    analyzer: PerfAnalyzer | None = None

    def warm_up(self, prompts: Sequence[Prompt], concurrency: int, requests: int) -> list[Record]:
        return self._client(Level("concurrency", concurrency, requests), prompts)

    def measure(
        self, level: Level, prompts: Sequence[Prompt], done: Callable[[Record], None] = lambda record: None
    ) -> Measured:
        """Never raises for a failed run: what went wrong is in the result."""
        notes: list[str] = []
        if self.analyzer is not None:
            result = self._by_analyzer(level, prompts)
            if result.failed is None:
                return result
            # Any refused request ends perf_analyzer; our own client counts it and goes on.
            notes.append(f"{result.failed}; measured by our own client instead")
        with Sampler(self.service.metrics_url) as sampler:
            records = self._client(level, prompts, done)
        result = Measured(level, "client", records, sampler.report(), notes=notes)
        if records and all(r.error or not r.arrivals_s for r in records):
            result.failed = "every request failed: " + "; ".join(summarise(records).errors)
        return result

    def _by_analyzer(self, level: Level, prompts: Sequence[Prompt]) -> Measured:
        if self.analyzer is None:
            raise ValueError("no perf_analyzer")
        texts = [prompt.text for prompt in prompts]
        data = pa.input_data(texts, self.sampling, self.service.inputs())
        with tempfile.TemporaryDirectory() as folder, Sampler(self.service.metrics_url) as sampler:
            try:
                records = pa.run(
                    self.analyzer,
                    level,
                    self.service.model,
                    self.service.address,
                    data,
                    Path(folder),
                    self.timeout_s,
                )
            except AnalyzerError as error:
                return Measured(level, "perf_analyzer", [], {}, failed=str(error))
        return Measured(level, "perf_analyzer", records, sampler.report())

    def _client(
        self, level: Level, prompts: Sequence[Prompt], done: Callable[[Record], None] = lambda record: None
    ) -> list[Record]:
        return asyncio.run(
            load.run(
                level, self.service.model, self.service.address, prompts, self.sampling,
                seed=self.seed, timeout_s=self.timeout_s, done=done,
            )
        )  # fmt: skip
