"""How long a kernel that only reads so many bytes takes here: no kernel that has to read them is faster.

For few megabytes it is far from the copy bandwidth, as a launch, the first bytes and the last ones cost microseconds.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from voltriton_vllm.sm70.compile import Module, build, device_arch

SOURCE = """
typedef unsigned int u32;
__device__ __forceinline__ u32 piece(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v.x ^ v.y ^ v.z ^ v.w;
}
// n pieces of 16 bytes, each block a run of its own; what was read is used, and never written.
extern "C" __global__ void __launch_bounds__(256) plain_read(const uint4* p, unsigned long long n, u32* never)
{
    unsigned long long share = (n + gridDim.x - 1) / gridDim.x, i = share * blockIdx.x + threadIdx.x;
    unsigned long long end = min(n, share * (blockIdx.x + 1));
    u32 s = 0;
    for (; i + 7 * 256 < end; i += 8 * 256) {
#pragma unroll
        for (int j = 0; j < 8; j++) s ^= piece(p + i + j * 256);
    }
    for (; i < end; i += 256) s ^= piece(p + i);
    if (s == 0x9E3779B9u && n == 1) *never = s;
}
"""
BLOCKS_A_MULTIPROCESSOR = (1, 2, 4, 8)
Timer = Callable[[Callable[[int], object], int], float]


class PlainRead:
    """Times such a kernel as the others are timed, by graph replay over rotating buffers."""

    def __init__(self, timer: Timer, rotate_bytes: float) -> None:
        device = torch.cuda.current_device()
        self._kernel = Module(build(SOURCE, device_arch(device))).kernel("plain_read")
        self._multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._timer, self._rotate_bytes = timer, rotate_bytes
        self.seconds = functools.cache(self._seconds)

    def _seconds(self, size: int) -> float:
        """The best of several grids for `size` bytes."""
        size = -(-size // 16) * 16
        count = max(2, min(30, int(self._rotate_bytes / size)))
        buffers = torch.empty(count, size, dtype=torch.uint8, device="cuda").random_()
        never = torch.zeros(1, dtype=torch.int32, device="cuda")

        def run(i: int, blocks: int) -> None:
            self._kernel((blocks, 1, 1), 256, 0, buffers[i], ctypes.c_uint64(size // 16), never)

        return min(
            self._timer(functools.partial(run, blocks=n * self._multiprocessors), count)
            for n in BLOCKS_A_MULTIPROCESSOR
        )
