"""The thermal sampler against a made-up NVML."""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from voltriton.doctor import thermal


class FakeNvml:
    """Two cards; the second has no throttle counters and can be lost. Anything that would set a value is not there."""

    class NVMLError(Exception):
        def __init__(self, value: int) -> None:
            super().__init__(f"NVML error {value}")
            self.value = value

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.events = [SimpleNamespace(device=1, eventData=79)]
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the sampler called {name}")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return b"Tesla V100-SXM2-32GB" if handle else "Tesla V100-SXM2-32GB"

    def _value(self, handle: int, value: Any) -> Any:
        if handle in self.lost:
            raise self.NVMLError(15)
        return value

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return self._value(handle, 71 + handle)

    def nvmlDeviceGetTemperatureThreshold(self, handle: int, kind: int) -> int:
        return self._value(handle, 90)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return self._value(handle, 195500)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: int) -> int:
        return self._value(handle, 300000)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return self._value(handle, SimpleNamespace(gpu=93))

    nvmlMemory_v2 = 0x2000028

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        kept_by_the_driver = 0 if version == self.nvmlMemory_v2 else 600 << 20
        used = (30 << 30) + kept_by_the_driver
        return self._value(handle, SimpleNamespace(used=used, total=32 << 30))

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return self._value(handle, {1: 1380, 2: 877}[kind])

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return self._value(handle, 0x4 | 0x40 if handle == 0 else 0x1)

    def nvmlDeviceGetViolationStatus(self, handle: int, kind: int) -> Any:
        if handle == 1:
            raise self.NVMLError(3)
        return SimpleNamespace(violationTime=2_500_000_000)

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> int:
        return self._value(handle, handle)

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, handle: int, kinds: int, events: object) -> None:
        assert kinds == 0x8

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        if self.events:
            return self.events.pop()
        raise self.NVMLError(10)

    def nvmlShutdown(self) -> None:
        self.asked.append("shutdown")


def samples(text: str) -> dict[tuple[str, ...], float]:
    """(name, values of the labels but the card's name...) -> value"""
    return {
        (sample.name, *(value for key, value in sorted(sample.labels.items()) if key != "name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.fixture
def nvml() -> Iterator[FakeNvml]:
    yield FakeNvml()


def scrape(cards: thermal.Cards) -> dict[tuple[str, ...], float]:
    registry = CollectorRegistry()
    registry.register(cards)
    return samples(generate_latest(registry).decode())


def test_values_and_units(nvml: FakeNvml) -> None:
    found = scrape(thermal.Cards(nvml))
    assert found["voltriton_gpu_temperature_celsius", "1"] == 72
    assert found["voltriton_gpu_power_watts", "0"] == 195.5
    assert found["voltriton_gpu_power_limit_watts", "0"] == 300
    assert found["voltriton_gpu_clock_hertz", "sm", "0"] == 1380e6
    assert found["voltriton_gpu_utilization_ratio", "0"] == 0.93
    assert found["voltriton_gpu_memory_used_bytes", "0"] == 30 << 30, "as nvidia-smi counts it"
    assert found["voltriton_gpu_memory_errors_total", "1"] == 1
    assert found["voltriton_gpu_throttled_seconds_total", "0", "thermal"] == 2.5
    throttled = {
        reason for reason in thermal.THROTTLE_REASONS if found["voltriton_gpu_throttled", "0", reason]
    }
    assert throttled == {"sw_power_cap", "hw_thermal"}


def test_what_a_card_lacks_is_left_out_and_a_lost_card_is_down(nvml: FakeNvml) -> None:
    cards = thermal.Cards(nvml)
    assert ("voltriton_gpu_throttled_seconds_total", "1", "thermal") not in scrape(cards)
    nvml.lost.add(1)
    found = scrape(cards)
    assert found["voltriton_gpu_up", "0"] == 1 and found["voltriton_gpu_up", "1"] == 0
    assert ("voltriton_gpu_temperature_celsius", "1") not in found


def test_server_with_xid_events(nvml: FakeNvml) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stop = threading.Event()
    results: list[int] = []
    server = threading.Thread(target=lambda: results.append(thermal.serve(nvml, "127.0.0.1", port, stop)))
    server.start()
    try:
        found = _wait_for(port, ("voltriton_gpu_xid_errors_total", "1", "79"))
        assert found["voltriton_gpu_xid_errors_total", "1", "79"] == 1
    finally:
        stop.set()
        server.join(timeout=20)
    assert results == [0] and nvml.asked == ["shutdown"]


def _wait_for(port: int, name: tuple[str, ...]) -> dict[tuple[str, ...], float]:
    deadline = threading.Event()
    for _ in range(100):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                found = samples(answer.read().decode())
        except OSError:
            found = {}
        if name in found:
            return found
        deadline.wait(0.05)
    raise AssertionError(f"{name} did not come")


def test_a_port_in_use_is_one_line(nvml: FakeNvml, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert thermal.serve(nvml, "127.0.0.1", taken.getsockname()[1], threading.Event()) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_without_nvml_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(thermal.importlib, "import_module", missing)
    assert thermal.main([]) == 1
    assert "nvidia-ml-py" in capsys.readouterr().err
