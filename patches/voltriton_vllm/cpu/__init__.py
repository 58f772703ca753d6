"""The NVFP4 kernel for CPUs: built once with the machine's compiler, kept in a cache folder."""

from __future__ import annotations


def allow_amx() -> None:
    """Ask Linux for AMX's registers, once for the process and its threads.

    vLLM 0.32.0 takes AMX for attention in bfloat16 and asks for nothing: with its own layers oneDNN has done so by
    then. Behind our linear kernel nothing has, and the first tile instruction ends the process by SIGILL.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
