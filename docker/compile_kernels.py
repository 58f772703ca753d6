"""Compiles the plugin's CUDA kernels for sm_70 into its cache, so that a start compiles nothing.

Needs no card and no driver, only NVRTC of CUDA 12. Ends with 1 when a kernel fails. The texts are those that the plugin
compiles at load on such a card.
"""

from __future__ import annotations

import sys

from voltriton_vllm.sm70.compile import CompileError, build, cache_dir
from voltriton_vllm.sm70.runtime import fragment_of, sources


def main(capability: tuple[int, int] = (7, 0)) -> int:
    architecture = "sm_{}{}".format(*capability)
    texts = sources(fragment_of(capability))
    for number, text in enumerate(texts, 1):
        try:
            image = build(text, architecture)
        except CompileError as error:
            print(f"source {number} of {len(texts)}: {error}", file=sys.stderr)
            return 1
        print(
            f"source {number} of {len(texts)}: {len(image)} bytes of {architecture} in {cache_dir()}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
