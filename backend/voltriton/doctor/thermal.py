"""Temperature, power, clocks and throttling of the cards for Prometheus: `python -m voltriton.doctor.thermal`.

Reads through NVML at each scrape and never sets anything. Xid events come from NVML's queue, which a thread waits on.
A value that a card does not have is left out; a card that no longer answers is `voltriton_gpu_up 0`.
Needs nvidia-ml-py and prometheus-client (the extra `monitor`).
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PORT = 9401
# Bits of nvmlClocksThrottleReasons that hold a card back against the operator's will.
THROTTLE_REASONS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
}
# nvmlPerfPolicyType_t
VIOLATIONS = {"power": 0, "thermal": 1}
_SM_CLOCK, _MEMORY_CLOCK = 1, 2
_SLOWDOWN_THRESHOLD = 1
_XID_EVENT = 0x8
_ERROR_TIMEOUT = 10


class Cards(Collector):
    """`nvml` is the module pynvml, initialised."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._names = [_text(nvml.nvmlDeviceGetName(handle)) for handle in self._handles]
        self._xids: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        yield self._family(
            "up", "1 while the card answers", lambda handle: [((), float(self._answers(handle)))]
        )
        for name, text, read in self._gauges():
            yield self._family(name, text, read)
        yield self._family("clock_hertz", "clock now", self._clocks, ("clock",))
        yield self._family(
            "throttled", "1 while the card holds itself back for this reason", self._throttled, ("reason",)
        )
        yield self._family(
            "throttled_seconds_total",
            "time lost to the limit since the driver was loaded",
            self._violations,
            ("reason",),
            CounterMetricFamily,
        )
        yield self._family(
            "memory_errors_total",
            "uncorrected memory errors since the driver was loaded",
            self._errors,
            (),
            CounterMetricFamily,
        )
        yield self._xid_family()

    def watch_xids(self, stop: threading.Event) -> None:
        """Counts Xid events until `stop`; returns at once where NVML has no events (WSL2)."""
        nvml = self._nvml
        try:
            events = nvml.nvmlEventSetCreate()
            for handle in self._handles:
                nvml.nvmlDeviceRegisterEvents(handle, _XID_EVENT, events)
        except nvml.NVMLError:
            return
        while not stop.is_set():
            try:
                event = nvml.nvmlEventSetWait_v2(events, 1000)
            except nvml.NVMLError as error:
                if error.value == _ERROR_TIMEOUT:
                    continue
                return
            self._count_xid(nvml.nvmlDeviceGetIndex(event.device), event.eventData)

    def _count_xid(self, index: int, number: int) -> None:
        with self._lock:
            self._xids[str(index), str(number)] += 1

    def _gauges(self) -> Iterator[tuple[str, str, Callable[[Any], list[tuple[tuple[str, ...], float]]]]]:
        nvml = self._nvml
        simple: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
            ("temperature_celsius", "of the chip", lambda h: nvml.nvmlDeviceGetTemperature(h, 0)),
            (
                "slowdown_celsius",
                "at which the card slows itself",
                lambda h: nvml.nvmlDeviceGetTemperatureThreshold(h, _SLOWDOWN_THRESHOLD),
            ),
            ("power_watts", "drawn now", lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000),
            ("power_limit_watts", "enforced", lambda h: nvml.nvmlDeviceGetEnforcedPowerLimit(h) / 1000),
            (
                "utilization_ratio",
                "share of the last sample with a kernel running",
                lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100,
            ),
            ("memory_used_bytes", "of the card's memory", lambda h: self._memory(h).used),
            ("memory_total_bytes", "of the card", lambda h: self._memory(h).total),
        )
        for name, text, read in simple:
            yield name, text, lambda handle, read=read: [((), float(read(handle)))]  # type: ignore[misc]

    def _family(
        self,
        name: str,
        text: str,
        read: Callable[[Any], list[tuple[tuple[str, ...], float]]],
        labels: tuple[str, ...] = (),
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily] = GaugeMetricFamily,
    ) -> Metric:
        family = kind(f"voltriton_gpu_{name}", text, labels=("gpu", "name", *labels))
        for index, handle in enumerate(self._handles):
            try:
                values = read(handle)
            except self._nvml.NVMLError:
                continue
            for extra, value in values:
                family.add_metric([str(index), self._names[index], *extra], value)
        return family

    def _memory(self, handle: Any) -> Any:
        """The second form: the first counts what the driver keeps for itself as used, which nvidia-smi does not."""
        return self._nvml.nvmlDeviceGetMemoryInfo(handle, version=self._nvml.nvmlMemory_v2)

    def _answers(self, handle: Any) -> bool:
        try:
            self._memory(handle)
        except self._nvml.NVMLError:
            return False
        return True

    def _clocks(self, handle: Any) -> list[tuple[tuple[str, ...], float]]:
        read = self._nvml.nvmlDeviceGetClockInfo
        return [(("sm",), read(handle, _SM_CLOCK) * 1e6), (("memory",), read(handle, _MEMORY_CLOCK) * 1e6)]

    def _throttled(self, handle: Any) -> list[tuple[tuple[str, ...], float]]:
        bits = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return [((name,), float(bool(bits & bit))) for name, bit in THROTTLE_REASONS.items()]

    def _violations(self, handle: Any) -> list[tuple[tuple[str, ...], float]]:
        """NVML counts nanoseconds."""
        read = self._nvml.nvmlDeviceGetViolationStatus
        return [((name,), read(handle, kind).violationTime / 1e9) for name, kind in VIOLATIONS.items()]

    def _errors(self, handle: Any) -> list[tuple[tuple[str, ...], float]]:
        return [((), float(self._nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0)))]

    def _xid_family(self) -> Metric:
        family = CounterMetricFamily(
            "voltriton_gpu_xid_errors_total", "since this sampler started", labels=("gpu", "xid")
        )
        with self._lock:
            for (index, number), count in self._xids.items():
                family.add_metric([index, number], count)
        return family


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:
        print(
            f"thermal: NVML cannot be used: {error}; the driver and the package nvidia-ml-py are needed",
            file=sys.stderr,
        )
        return 1
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return serve(nvml, args.address, args.port, stop)


def serve(nvml: Any, address: str, port: int, stop: threading.Event) -> int:
    cards = Cards(nvml)
    registry = CollectorRegistry()
    registry.register(cards)
    try:
        server, thread = start_http_server(port, address, registry)
    except OSError as error:
        print(f"thermal: {address}:{port} cannot be used: {error.strerror}", file=sys.stderr)
        return 1
    watcher = threading.Thread(target=cards.watch_xids, args=(stop,), daemon=True)
    watcher.start()
    stop.wait()
    server.shutdown()
    server.server_close()
    thread.join()
    watcher.join(timeout=5)
    nvml.nvmlShutdown()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m voltriton.doctor.thermal", description="GPU temperatures for Prometheus"
    )
    parser.add_argument("--address", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=PORT, help=f"default: {PORT}")
    return parser


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
