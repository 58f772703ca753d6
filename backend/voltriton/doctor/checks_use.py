"""How a card is used: by whom, in which mode, over which link to the host."""

from __future__ import annotations

from voltriton.doctor.box import Box
from voltriton.doctor.checks_gpu import gpu_check, indices
from voltriton.doctor.rows import FAIL, OK, WARN, Row


@gpu_check("gpu.persistence")
def persistence(box: Box) -> Row:
    off = indices(box, lambda gpu: gpu.persistence == "Disabled")
    if off and not box.is_wsl:
        return Row(
            "gpu.persistence",
            WARN,
            f"off: GPU {off}",
            "on",
            "the driver unloads between runs: slower starts, lost power limits and ECC counts",
            "`systemctl enable --now nvidia-persistenced`",
        )
    return Row("gpu.persistence", OK, "on" if not off else "not used in WSL2", "on")


@gpu_check("gpu.processes", 42)
def processes(box: Box) -> Row:
    found = [
        f"GPU {gpu.index}: {p.name} (pid {p.pid}, {p.used_mib} MiB)"
        for gpu in box.gpus
        for p in gpu.processes
    ]
    if found:
        return Row(
            "gpu.processes",
            WARN,
            "; ".join(found[:6]),
            "no other process",
            "its memory is missing from the "
            "KV cache; VLLM::EngineCore or VLLM::Worker may be left from a crash",
            "stop it by its pid",
        )
    return Row("gpu.processes", OK, "none", "none")


@gpu_check("gpu.memory", 42, 44)
def memory(box: Box) -> Row:
    short = [
        f"GPU {gpu.index}: {gpu.free_mib} of {gpu.total_mib} MiB"
        for gpu in box.gpus
        if gpu.free_mib < 0.95 * gpu.total_mib
    ]
    if short:
        return Row(
            "gpu.memory",
            WARN,
            "free: " + ", ".join(short),
            "95 % free",
            "vLLM refuses to start when less is free than gpu_memory_utilization asks for",
            "stop what holds it (row gpu.processes)",
        )
    return Row(
        "gpu.memory", OK, f"{min(gpu.free_mib for gpu in box.gpus)} MiB free on the fullest", "95 % free"
    )


@gpu_check("gpu.compute_mode")
def compute_mode(box: Box) -> Row:
    wrong = [
        f"GPU {gpu.index}: {gpu.compute_mode}" for gpu in box.gpus if gpu.compute_mode not in ("Default", "")
    ]
    if wrong:
        status = FAIL if any("Prohibited" in mode for mode in wrong) else WARN
        return Row(
            "gpu.compute_mode",
            status,
            ", ".join(wrong),
            "Default",
            "a probe, a sampler or a second process cannot use the card",
            "`nvidia-smi -c 0`",
        )
    return Row("gpu.compute_mode", OK, "Default", "Default")


@gpu_check("gpu.pcie", 83)
def pcie(box: Box) -> Row:
    narrow = [
        f"GPU {gpu.index}: x{gpu.link_width} of x{gpu.max_link_width}"
        for gpu in box.gpus
        if gpu.link_width and gpu.max_link_width and gpu.link_width < gpu.max_link_width
    ]
    if narrow:
        return Row(
            "gpu.pcie",
            WARN,
            ", ".join(narrow),
            "full width",
            "loading and, without NVLink, every all-reduce go through it",
            "reseat the card; another slot or riser; BIOS bifurcation",
        )
    kinds = sorted({f"gen{gpu.max_link_gen} x{gpu.max_link_width}" for gpu in box.gpus})
    return Row("gpu.pcie", OK, ", ".join(kinds) + " (the generation drops when idle)", "full width")
