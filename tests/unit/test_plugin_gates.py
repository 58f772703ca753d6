"""What the plugin thinks of a device."""

import warnings

import pytest

pytest.importorskip("vllm")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of vLLM and its dependencies, at import
    from voltriton_vllm import gates


@pytest.fixture
def device(monkeypatch):
    def set_device(cpu: bool, capability: int | None) -> None:
        monkeypatch.setattr(gates.current_platform, "is_cpu", lambda: cpu)
        monkeypatch.setattr(gates, "capability", lambda: capability)
        gates.fp8_kv_cache_usable.cache_clear()

    yield set_device
    gates.fp8_kv_cache_usable.cache_clear()


@pytest.mark.parametrize(
    ("cpu", "capability", "ours", "fp8"),
    [
        (False, 70, True, False),
        (False, 75, False, False),
        (False, 80, False, False),
        (False, 90, False, True),
    ],
)
def test_gpus(device, cpu, capability, ours, fp8):
    device(cpu, capability)
    assert gates.needs_our_kernels() is ours
    assert gates.fp8_kv_cache_usable() is fp8


@pytest.mark.parametrize(("level", "fp8"), [("AVX2", False), ("AVX512", True)])
def test_cpus(device, monkeypatch, level, fp8):
    device(True, None)
    monkeypatch.setattr(gates.torch.backends.cpu, "get_cpu_capability", lambda: level)
    assert gates.needs_our_kernels()
    assert gates.fp8_kv_cache_usable() is fp8


def test_an_fp8_cache_falls_back_where_it_cannot_run(device):
    device(False, 70)
    assert gates.kv_cache_dtype_or_auto("fp8") == "auto"
    assert gates.kv_cache_dtype_or_auto("fp8_e4m3") == "auto"
    assert gates.kv_cache_dtype_or_auto("float16") == "float16"
    device(False, 90)
    assert gates.kv_cache_dtype_or_auto("fp8") == "fp8"


def test_an_fp8_cache_is_refused_where_triton_reads_it(device):
    device(False, 70)
    gates.require_triton_fp8("auto")
    with pytest.raises(ValueError, match=r"kv_cache_dtype: got 'fp8_e4m3' on .* allowed here is auto"):
        gates.require_triton_fp8("fp8_e4m3")
    device(False, 90)
    gates.require_triton_fp8("fp8")


def test_the_mode_is_checked(monkeypatch):
    monkeypatch.setenv("VOLTRITON_NVFP4", "fast")
    with pytest.raises(ValueError, match="VOLTRITON_NVFP4: got 'fast', allowed: auto, oracle"):
        gates.mode()


def forced(monkeypatch, wanted: str, real: tuple[int, int]) -> object:
    class Platform:
        @classmethod
        def is_cuda(cls) -> bool:
            return True

        @classmethod
        def get_device_capability(cls, device_id: int = 0):
            return gates.DeviceCapability(*real)

    monkeypatch.setattr(gates, "current_platform", Platform())
    monkeypatch.setenv("VOLTRITON_FORCE_CAPABILITY", wanted)
    gates.force_capability()
    return gates.current_platform.get_device_capability()


def test_a_newer_gpu_can_play_a_v100(monkeypatch):
    assert forced(monkeypatch, "7.0", (9, 0)) == (7, 0)


@pytest.mark.parametrize(("wanted", "message"), [("seven", "allowed: MAJOR.MINOR"), ("9.0", "at most")])
def test_nonsense_is_refused(monkeypatch, wanted, message):
    with pytest.raises(ValueError, match=message):
        forced(monkeypatch, wanted, (7, 0))
