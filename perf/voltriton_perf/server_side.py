"""The server's side of a level, sampled beside it: Triton's /metrics once a second, and NVML where it is there."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

# name in the report -> sample of /metrics; gauges are averaged, counters counted from the level's begin.
GAUGES = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_use": "vllm:kv_cache_usage_perc",
}
COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "generation_tokens": "vllm:generation_tokens_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
}


def read_samples(text: str) -> dict[str, float]:
    """Our names -> values summed over the label sets; what the server does not have is left out."""
    names = {sample: name for name, sample in {**GAUGES, **COUNTERS}.items()}
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if name := names.get(sample.name):
                found[name] = found.get(name, 0.0) + sample.value
    return found


SETTLE_S = 1.2
# `http_proxy` in the environment is for the internet.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Sampler:
    """`with Sampler(url) as sampler:` samples in a thread; `report()` is what it saw."""

    def __init__(self, metrics_url: str | None, interval_s: float = 1.0) -> None:
        self._url = metrics_url
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._began_s = time.perf_counter()
        self._gpus = Gpus()
        self.samples: list[dict[str, Any]] = []
        self.problem: str | None = None

    def __enter__(self) -> Self:
        # What came before (a warm-up) must have been counted before the first sample.
        self._settle()
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5.0)
        self._settle()
        self._sample()
        self._gpus.close()

    def _settle(self) -> None:
        """vLLM's numbers reach Triton once a second."""
        if self._url:
            time.sleep(SETTLE_S)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        values: dict[str, Any] = {"at_s": round(time.perf_counter() - self._began_s, 3)}
        if self._url:
            try:
                with _OPENER.open(self._url, timeout=5) as response:
                    values |= read_samples(response.read().decode())
            except (OSError, ValueError) as error:
                self.problem = f"{self._url}: {error}"
        values |= self._gpus.sample()
        self.samples.append(values)

    def report(self) -> dict[str, Any]:
        result: dict[str, Any] = {"samples": self.samples}
        for name in {key for sample in self.samples for key in sample} - {"at_s"}:
            values = [sample[name] for sample in self.samples if name in sample]
            if name in COUNTERS:
                result[name] = values[-1] - values[0]
            else:
                result[name] = {"mean": round(sum(values) / len(values), 3), "max": max(values)}
        if self.problem:
            result["problem"] = self.problem
        return result


class Gpus:
    """Clocks, power and use of the GPUs of this machine; nothing where there is no NVML."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no driver, or no library: NVML has an error of its own for each
            return
        self._nvml = pynvml
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    def sample(self) -> dict[str, float]:
        values: dict[str, float] = {}
        for i, handle in enumerate(self._handles):
            nvml = self._nvml
            with contextlib.suppress(nvml.NVMLError):
                values[f"gpu{i}_sm_mhz"] = nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
                values[f"gpu{i}_power_w"] = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
                values[f"gpu{i}_use"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        return values

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
