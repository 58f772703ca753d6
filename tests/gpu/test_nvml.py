"""What doctor, the thermal sampler and the sweep's sampler say of a real card that works, beside nvidia-smi's own numbers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pynvml")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from server import free_ports, wait_for  # noqa: E402
from test_engine_volta import report  # noqa: E402
from voltriton_perf.server_side import Sampler  # noqa: E402
from voltriton_perf.setup import gpus  # noqa: E402

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": ":".join([str(ROOT / "backend"), str(ROOT / "patches"), os.environ.get("PYTHONPATH", "")]),
}
# name of the sampler -> what nvidia-smi calls it, its unit in ours, and how far apart two readings may be (part).
SAME = {
    "temperature_celsius": ("temperature.gpu", 1, 0.15),
    "power_watts": ("power.draw", 1, 0.4),
    "power_limit_watts": ("enforced.power.limit", 1, 0),
    "memory_used_bytes": ("memory.used", 1 << 20, 0.1),
    "memory_total_bytes": ("memory.total", 1 << 20, 1e-3),
    "clock_hertz sm": ("clocks.sm", 1e6, 0.15),
    "clock_hertz memory": ("clocks.mem", 1e6, 0.02),
}


def smi(*fields: str) -> list[str]:
    """Of the first card."""
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", "0"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")


@pytest.fixture(scope="module")
def busy() -> Iterator[None]:
    """The card multiplies matrices."""
    stop = threading.Event()

    def work() -> None:
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
        while not stop.is_set():
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(2)  # the driver's numbers are means of up to a second
    yield
    stop.set()
    thread.join()


@pytest.fixture(scope="module")
def samples(busy: None) -> Iterator[dict[str, float]]:
    """What the sampler's page says of the first card, by name and last label; the program runs as a service does."""
    (port,) = free_ports(1)
    program = [sys.executable, "-m", "voltriton.doctor.thermal", "--port", str(port)]
    process = subprocess.Popen(program, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    page = ""

    def read() -> bool:
        nonlocal page
        assert process.poll() is None, process.communicate()[1]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
                page = response.read().decode()
        except OSError:
            return False
        return True

    try:
        wait_for(read, 30, "the sampler's page")
        found = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.labels.get("gpu") == "0":
                    last = "".join(f" {v}" for k, v in sample.labels.items() if k not in ("gpu", "name"))
                    found[sample.name.removeprefix("voltriton_gpu_") + last] = sample.value
        report("thermal sampler", found)
        yield found
    finally:
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=20)[1]
    assert process.returncode == 0
    assert error == ""


def test_the_thermal_sampler_says_what_nvidia_smi_says(samples: dict[str, float]) -> None:
    fields = [field for field, _, _ in SAME.values()]
    said = dict(zip(fields, smi(*fields), strict=True))
    report("nvidia-smi", said)
    for name, (field, unit, apart) in SAME.items():
        if said[field].startswith("["):  # [N/A], [Not Supported]
            assert name not in samples
        else:
            assert samples[name] == pytest.approx(float(said[field]) * unit, rel=apart, abs=1e-6), name
    assert samples["up"] == 1


def test_the_thermal_sampler_says_that_the_card_works(samples: dict[str, float]) -> None:
    assert samples["utilization_ratio"] > 0.5
    assert {name for name in samples if name.startswith("throttled ")}


def test_a_sweep_has_columns_of_the_card(busy: None) -> None:
    with Sampler(None, interval_s=0.25) as sampler:
        time.sleep(1.5)
    found = sampler.report()
    clock, power = smi("clocks.sm", "power.draw")
    report("columns of a sweep", {k: v for k, v in found.items() if k != "samples"} | {"nvidia-smi": power})
    assert found["gpu0_sm_mhz"]["mean"] == pytest.approx(float(clock), rel=0.15)
    assert found["gpu0_power_w"]["mean"] == pytest.approx(float(power), rel=0.4)
    assert found["gpu0_use"]["max"] > 50
    assert len(found["samples"]) >= 4


def test_a_report_names_the_card() -> None:
    name, memory, driver = smi("name", "memory.total", "driver_version")
    first = gpus()[0]
    assert (first["name"], first["driver"]) == (name, driver)
    assert first["memory_gib"] == pytest.approx(float(memory) / 1024, rel=0.01)


def test_doctor_on_this_card(busy: None) -> None:
    program = [sys.executable, "-m", "voltriton.doctor", "--json"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
    report("doctor", done.stdout + done.stderr)
    assert done.returncode in (0, 1)
    assert "Traceback" not in done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    found = {row["check"]: row["found"] for row in rows}
    name, driver = smi("name", "driver_version")
    assert name in found["gpu.present"]
    assert driver in found["gpu.driver"]
    assert [row for row in rows if "the check itself failed" in row["found"]] == []
