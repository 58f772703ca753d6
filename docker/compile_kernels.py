"""Compiles the CUDA sources of the plugin into the kernel cache: `python docker/compile_kernels.py sm_70`.

A start then compiles nothing. Needs no card and no driver, only NVRTC of CUDA 12. Ends with 1 when a kernel fails.
"""

from __future__ import annotations

import sys

from voltriton_vllm.sm70 import compile as nvrtc


def main(architecture: str) -> int:
    sources = sorted(path.name for path in nvrtc.SOURCE_DIR.glob("sm70_*.cu"))
    for name in sources:
        try:
            image = nvrtc.build(nvrtc.read_source(name), architecture)
        except nvrtc.CompileError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(f"{name}: {len(image)} bytes of {architecture} in {nvrtc.cache_dir()}")
    return 0 if sources else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "sm_70"))
