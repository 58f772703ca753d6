"""Environment variables and packages that are known to harm."""

from __future__ import annotations

import re

from voltriton.doctor.box import Box
from voltriton.doctor.rows import FAIL, NOTE, OK, SKIP, WARN, Row, check


@check("python.packages", 13, 14, 15, 17, 19)
def python_packages(box: Box) -> Row:
    """What compiles at run time needs nvcc and headers, and has failed on Volta."""
    packages = box.software.get("packages")
    need = "nothing that compiles CUDA at run time"
    if not isinstance(packages, dict):
        return Row("python.packages", SKIP, str(box.software.get("error", "not looked at")), need)
    risky = [f"{name} {packages[name]}" for name in ("tilelang", "flashinfer-python") if name in packages]
    # ReVolta asks for both, in versions that work for it.
    needed = box.software_part("vllm").get("distribution") == "revolta"
    if risky and box.target == "v100" and not needed:
        return Row(
            "python.packages",
            NOTE,
            ", ".join(risky),
            need,
            "they have no Volta code; tilelang 0.1.9 breaks nvcc for "
            "sm_70 (trouble 13); the profile keeps vLLM from FlashInfer's sampler",
            "`pip uninstall` them",
        )
    return Row(
        "python.packages",
        OK,
        f"Python {box.software.get('python')}, {len(packages)} packages looked at",
        need,
    )


# name -> (value that is a problem as a regular expression, status, why, fix)
_VARIABLES = {
    "PYTORCH_CUDA_ALLOC_CONF": (
        "expandable_segments:True",
        WARN,
        "breaks custom all-reduce and CPU offload of the KV cache (troubles 40 and 49)",
        "unset it, or keep disable_custom_all_reduce true",
    ),
    "NCCL_P2P_DISABLE": (
        "1",
        NOTE,
        "every all-reduce goes through the host's memory",
        "unset it once `--deep` passes",
    ),
    "NCCL_SOCKET_IFNAME": (
        ".+",
        NOTE,
        "one host needs none; a name that does not exist hangs the start",
        "unset it on one host",
    ),
    "VLLM_PLE_CPU_OFFLOAD": (
        ".+",
        FAIL,
        "of older images; spins forever there (trouble 80), means nothing here",
        "unset it; the engine argument is engram_config",
    ),
    "VLLM_USE_AOT_COMPILE": ("1", WARN, "a cached graph changed greedy tokens (trouble 71)", "set it to 0"),
    "VLLM_USE_FLASHINFER_SAMPLER": ("1", FAIL, "FlashInfer has no code for Volta", "set it to 0"),
    "VLLM_NCCL_SO_PATH": (
        ".+",
        NOTE,
        "replaces PyTorch's NCCL",
        "unset it, unless the row nccl.loaded is what you want",
    ),
    "CUDA_LAUNCH_BLOCKING": ("1", WARN, "every launch waits: several times slower", "unset it"),
    "LD_LIBRARY_PATH": (
        r".*cuda-1[13].*",
        WARN,
        "libraries of another CUDA come before PyTorch's own",
        "unset it",
    ),
}


@check("env.variables", 40, 49, 71, 80)
def variables(box: Box) -> list[Row] | Row:
    if box.target == "cpu":
        return Row("env.variables", SKIP, "target cpu", "nothing")
    found = []
    for name, (pattern, status, why, fix) in _VARIABLES.items():
        value = box.host.env(name)
        if value and re.search(f"^{pattern}" if name != "PYTORCH_CUDA_ALLOC_CONF" else pattern, value):
            found.append(Row("env.variables", status, f"{name}={value}", "unset", why, fix))
    visible = box.host.env("CUDA_VISIBLE_DEVICES")
    if visible is not None and len([part for part in visible.split(",") if part.strip()]) < box.wanted_gpus:
        found.append(
            Row(
                "env.variables",
                FAIL,
                f"CUDA_VISIBLE_DEVICES={visible}",
                f"{box.wanted_gpus} devices",
                "ranks without a card",
                "unset it or name more devices",
            )
        )
    return found or Row("env.variables", OK, "nothing that is known to harm", "nothing")
