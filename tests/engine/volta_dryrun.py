"""Compile vLLM's Triton kernels for sm_70 on a machine without a GPU, by calling their own wrappers.

`setup()` comes before any import of vLLM: vLLM then sees a CUDA platform of compute capability 7.0 with 80
multiprocessors and 96 KB of shared memory, Triton compiles for sm_70 (ptxas included), and a launch does
nothing, so results are garbage. `compiled(call)` gives one Row for each kernel that a call compiled.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import re
import subprocess
import sys
import tempfile
import types
import unittest.mock
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CAPABILITY = 70
SHARED_LIMIT = 98304  # bytes a block may have on Volta
STUBS = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch")


@dataclass
class Row:
    """One compiled (or refused) kernel."""

    kernel: str
    error: str = ""
    shared: int = 0
    registers: int = 0
    spill: int = 0
    cubin: int = 0

    @property
    def fits(self) -> bool:
        return not self.error and self.cubin > 0 and self.shared <= SHARED_LIMIT


_rows: list[Row] = []


class _Device:
    """What Triton asks of a device driver."""

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_LIMIT,
            "max_num_regs": 65536,
            "multiprocessor_count": 80,
            "warpSize": 32,
            "sm_clock_rate": 1530000,
            "mem_clock_rate": 877000,
            "mem_bus_width": 4096,
        }

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, 0, 0, 0, 1024

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(CAPABILITY, 10)


class _Driver:
    def __init__(self) -> None:
        self.utils = _Device()
        self.launcher_cls = lambda src, metadata: lambda *a, **k: None

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(CAPABILITY, 10)

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        return lambda fn, *a, **k: (fn(), [1.0, 1.0, 1.0])[1]

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1)

    def clear_cache(self, cache: Any) -> None: ...

    @staticmethod
    def is_active() -> bool:
        return True


def setup() -> None:
    _use_driver()
    _record_compilations()
    _prune_autotuning()
    for name in STUBS:
        sys.modules[name] = types.ModuleType(name)
    _without_torchvision()
    _use_platform()
    _operators_without_extensions()
    _torch_says_volta()


def _use_driver() -> None:
    from triton.backends import backends
    from triton.runtime.driver import driver

    fake = _Driver()
    driver.set_active(fake)
    driver._default = fake
    # vllm.triton_utils keeps Triton only where a backend for torch's device is active.
    backends["cpu"] = types.SimpleNamespace(driver=fake, compiler=None)


def _record_compilations() -> None:
    from triton.runtime import jit

    original = jit.JITFunction._do_compile

    def do_compile(self: Any, *args: Any) -> Any:
        name = f"{self.module.removeprefix('vllm.')}:{self.__name__}"
        try:
            kernel = original(self, *args)
        except Exception as error:
            _rows.append(Row(name, error=_innermost(error)))
            raise
        registers, spill = _resources(kernel.asm["ptx"])
        _rows.append(Row(name, "", kernel.metadata.shared, registers, spill, len(kernel.asm["cubin"])))
        return kernel

    jit.JITFunction._do_compile = do_compile


def _prune_autotuning() -> None:
    """One configuration a kernel: all of them take minutes of ptxas, and tuning is another matter."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.run

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        four = [c for c in self.configs if c.num_warps == 4 and c.num_stages == 2]
        self.configs = (four or self.configs)[:1]
        return original(self, *args, **kwargs)

    Autotuner.run = run


def _innermost(error: BaseException | None) -> str:
    text = ""
    while error is not None:
        text = str(error) or text
        error = error.__cause__
    return re.sub(r"\s+", " ", text)[-200:]


def _resources(ptx: str) -> tuple[int, int]:
    """Registers a thread and bytes spilled, as ptxas says."""
    import triton

    ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [str(ptxas), "-v", f"--gpu-name=sm_{CAPABILITY}", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True).stderr
    found = [re.search(pattern, said) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")]
    return int(found[0][1]) if found[0] else -1, int(found[1][1]) if found[1] else -1


def _use_platform() -> None:
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class Volta(CudaPlatformBase):
        dispatch_key = "CPU"  # tensors live there
        device_type = "cpu"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*divmod(CAPABILITY, 10))

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "Tesla V100-SXM2-32GB"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 32 << 30

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 80

        @classmethod
        def import_kernels(cls) -> None: ...

        @classmethod
        def is_arch_support_pdl(cls) -> bool:
            return False

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return False

    vllm.platforms._current_platform = Volta()
    import vllm.triton_utils
    from triton.backends import backends

    if not vllm.triton_utils.HAS_TRITON:
        raise RuntimeError("vLLM has turned Triton off")
    backends.pop("cpu")


def _operators_without_extensions() -> None:
    """Operators of vLLM's extensions do nothing here, and may be declared without being there."""
    import torch

    space = torch._ops._OpNamespace
    original = space.__getattr__

    def attribute(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if not self.name.startswith(("_C", "_moe_C")) or name.startswith("__"):
                raise
            return lambda *a, **k: False if "support" in name else None

    space.__getattr__ = attribute
    register = torch.library.register_fake

    def tolerant(operator: str, *args: Any, **kwargs: Any) -> Any:
        def decorate(function: Any) -> Any:
            with contextlib.suppress(RuntimeError):
                return register(operator, *args, **kwargs)(function)
            return function

        return decorate

    torch.library.register_fake = tolerant


def _torch_says_volta() -> None:
    import torch

    torch.Tensor.is_cuda = property(lambda self: True)
    torch.cuda.get_device_capability = lambda *a: divmod(CAPABILITY, 10)
    properties = {
        "multi_processor_count": 80,
        "name": "V100",
        "total_memory": 32 << 30,
        "shared_memory_per_block_optin": SHARED_LIMIT,
        "major": 7,
        "minor": 0,
        "max_threads_per_multi_processor": 2048,
        "warp_size": 32,
        "gcnArchName": "",
    }
    torch.cuda.get_device_properties = lambda *a: types.SimpleNamespace(**properties)
    torch.cuda.get_device_name = lambda *a: "Tesla V100-SXM2-32GB"
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 1
    torch.cuda.device = lambda *a, **k: contextlib.nullcontext()
    torch.accelerator.device_index = lambda *a, **k: contextlib.nullcontext()
    torch.accelerator.current_device_index = lambda: 0
    for name in ("synchronize", "empty_cache", "set_device_index"):
        setattr(torch.accelerator, name, lambda *a, **k: None)


class _Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        class Module(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return unittest.mock.MagicMock(name=name)

        module = Module(spec.name)
        module.__version__ = "0.28.0"
        return module

    def exec_module(self, module: types.ModuleType) -> None: ...


def _without_torchvision() -> None:
    """qwen4_exp's package imports image code, which wants torchvision."""
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_Torchvision())


def compiled(call: Callable[[], object]) -> list[Row]:
    """What `call` compiled. A kernel over the shared-memory limit, or refused, ends the call: that is its row."""
    first = len(_rows)
    try:
        call()
    except Exception as error:
        if len(_rows) == first or _rows[-1].fits:
            _rows.append(Row("(wrapper)", error=_innermost(error)))
    return _rows[first:]
