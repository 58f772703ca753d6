"""vLLM's Marlin FP4 kernel, for side-by-side timing: its library is loaded alone, by `torch.ops.load_library`."""

from __future__ import annotations

from pathlib import Path

import torch

_E2M1 = 562949953487106  # vllm.scalar_type.scalar_types.float4_e2m1f.id of vLLM 0.32.0
_SCALE_ORDER = [i + 8 * j for i in range(8) for j in range(8)]


def load(library: Path) -> None:
    torch.ops.load_library(str(library))


class Marlin:
    """One NVFP4 matrix in Marlin's layout (half activations, one global scale)."""

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, global_scale: float) -> None:
        self.n, self.k = weight.shape[0], weight.shape[1] * 2
        words = weight.view(torch.int32).t().contiguous()
        self._weight = torch.ops._C.gptq_marlin_repack(words, self.k, self.n, 4, False)
        self._scale = self._scales(scale)
        # Marlin expands e2m1 and its own scale format with these exponents left over.
        factor = global_scale * 2.0 ** (14 - 7)
        self._global = torch.tensor([factor], dtype=torch.float32, device=weight.device)
        multiprocessors = torch.cuda.get_device_properties(weight.device).multi_processor_count
        self._workspace = torch.zeros(multiprocessors, dtype=torch.int32, device=weight.device)

    def _scales(self, scale: torch.Tensor) -> torch.Tensor:
        half = scale.to(torch.float16).t().contiguous()
        half = half.reshape(-1, 64)[:, _SCALE_ORDER].reshape(-1, self.n)
        half = half.reshape(-1, 4)[:, [0, 2, 1, 3]].reshape(half.shape[0], -1) * 2**7
        half[half < 2] = 0
        shifted = half.contiguous().view(torch.int16) << 1
        return shifted.view(torch.float8_e4m3fn)[:, 1::2].contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops._C.marlin_gemm(
            x,
            None,
            self._weight,
            None,
            self._scale,
            None,
            self._global,
            None,
            self._workspace,
            _E2M1,
            x.shape[0],
            self.n,
            self.k,
            False,
            True,
            False,
        )
        return y
