"""Checks of the cards themselves."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable

from voltriton.doctor.box import Box
from voltriton.doctor.rows import FAIL, NOTE, OK, SKIP, WARN, Row, check
from voltriton.doctor.smi import Gpu

# R470 is the oldest branch with CUDA 11.4; CUDA 12's libraries want 525.60 (minor version compatibility);
# R580 is the last branch that drives Volta.
OLDEST_DRIVER, CUDA12_DRIVER, LAST_VOLTA_DRIVER = 470, 525, 580
NEED_GPU = "a GPU that answers"

_PROBLEMS = (
    (
        "Driver/library version mismatch",
        "module and libraries differ in version: reboot, or rmmod the nvidia modules and load them again",
    ),
    (
        "couldn't communicate with the NVIDIA driver",
        "the kernel module is not loaded: `modprobe nvidia`; after a kernel update rebuild it (dkms status); see dmesg",
    ),
    (
        "No devices were found",
        "the driver runs but takes no card: see dmesg for NVRM lines (power cables, BIOS 'above 4G decoding', nouveau)",
    ),
    ("GPU is lost", "a card fell off the bus (Xid 79): reboot; then power, riser and cooling"),
    (
        "Unable to determine the device handle",
        "a card stopped answering (often Xid 79): reboot; then power, riser and cooling",
    ),
)


@check("gpu.present", 5)
def present(box: Box) -> Row:
    """Zero cards, a broken driver and an unreadable answer are three different things."""
    need = f"{box.wanted_gpus} cards" if box.wanted_gpus else "none (target cpu)"
    if box.gpus:
        names = Counter(gpu.name for gpu in box.gpus)
        found = ", ".join(f"{count} x {name}" for name, count in names.items())
        if len(box.gpus) < box.wanted_gpus:
            return Row(
                "gpu.present",
                FAIL,
                found,
                need,
                "tensor parallel needs one card a rank",
                f"`voltriton doctor --gpus {len(box.gpus)}` and a profile with tensor_parallel_size {len(box.gpus)}",
            )
        return Row("gpu.present", OK, found, need)
    if box.target == "cpu":
        return Row("gpu.present", NOTE, "no NVIDIA card", need, "only the cpu profile can serve here")
    if box.smi is not None:
        return Row(
            "gpu.present", FAIL, "nvidia-smi lists no card", need, "nothing to serve from", _PROBLEMS[2][1]
        )
    return Row("gpu.present", FAIL, box.smi_problem, need, _on_the_bus(box), _repair(box))


def _on_the_bus(box: Box) -> str:
    if box.cards_on_the_bus:
        return f"the PCI bus has {box.cards_on_the_bus} NVIDIA card(s), so the driver is at fault"
    return "no NVIDIA card on the PCI bus either"


def _repair(box: Box) -> str:
    said = box.smi_problem
    if known := next((fix for part, fix in _PROBLEMS if part in said), None):
        return known
    if box.is_wsl:
        return "in WSL2 the driver is Windows': install it there, none in Linux; `wsl --update` (docs/windows.md)"
    if box.smi_output.missing and box.host.read("/.dockerenv") is not None:
        return "start the container with --gpus all (NVIDIA container toolkit on the host)"
    if box.smi_output.missing:
        return "install a driver of R535 to R580 (Debian: nvidia-driver; else NVIDIA's .run file)"
    return "run `nvidia-smi -q -x` by hand and see dmesg; a reboot rules out a hung driver"


def gpu_check(
    name: str, *troubles: int
) -> Callable[[Callable[[Box], Row | Iterable[Row]]], Callable[[Box], Row | Iterable[Row]]]:
    """For checks that need nvidia-smi's answer: without it one row says that it was not looked at."""

    def decorate(function: Callable[[Box], Row | Iterable[Row]]) -> Callable[[Box], Row | Iterable[Row]]:
        def guarded(box: Box) -> Row | Iterable[Row]:
            if not box.gpus:
                return Row(
                    name, SKIP, "no answer from nvidia-smi" if box.target != "cpu" else "no card", NEED_GPU
                )
            return function(box)

        return check(name, *troubles)(guarded)

    return decorate


@gpu_check("gpu.driver", 34, 35)
def driver(box: Box) -> Row:
    assert box.smi is not None
    version = box.smi.driver
    need = (
        f"R{CUDA12_DRIVER} to R{LAST_VOLTA_DRIVER}" if box.target == "v100" else f"R{CUDA12_DRIVER} or newer"
    )
    match = re.match(r"(\d+)\.", version)
    if not match:
        return Row("gpu.driver", WARN, f"version {version!r}", need, "unreadable", "see `nvidia-smi`")
    branch = int(match.group(1))
    found = f"{version} (CUDA {box.smi.cuda or '?'})"
    if branch > LAST_VOLTA_DRIVER and box.target == "v100":
        return Row(
            "gpu.driver", FAIL, found, need, "branches after R580 have no Volta support", "install R580"
        )
    if branch < OLDEST_DRIVER:
        return Row(
            "gpu.driver",
            FAIL,
            found,
            need,
            "too old for any CUDA that we use; custom all-reduce failed on 450 (trouble 34)",
            "install R535 to R580",
        )
    if branch < CUDA12_DRIVER:
        return Row(
            "gpu.driver",
            FAIL,
            found,
            need,
            "CUDA 12 needs 525.60 or newer; with R470 only CUDA 11 works",
            "install R535 to R580; or stay with the extra nccl-cu11 and a CUDA 11 PyTorch of your own",
        )
    return Row("gpu.driver", OK, found, need)


@gpu_check("gpu.model", 4, 5)
def model(box: Box) -> Row:
    need = {"v100": "Volta, compute capability 7.0", "hopper": "Hopper, 9.0", "cpu": "any"}[box.target]
    wanted = {"v100": "Volta", "hopper": "Hopper"}.get(box.target)
    found = ", ".join(
        sorted(
            {
                f"{gpu.name} ({gpu.architecture or 'unknown architecture'}, {gpu.capability})"
                for gpu in box.gpus
            }
        )
    )
    unknown = [gpu for gpu in box.gpus if gpu.capability == "unknown"]
    if unknown:
        return Row(
            "gpu.model",
            WARN,
            found,
            need,
            "a card that this version does not know; nothing was tried on it",
            "`voltriton doctor --deep` runs PyTorch on it; name the target with --target",
        )
    if wanted and any(gpu.architecture != wanted for gpu in box.gpus):
        return Row(
            "gpu.model",
            FAIL,
            found,
            need,
            "kernels and profile are made for that architecture",
            "choose another --target, or hide the other cards with CUDA_VISIBLE_DEVICES",
        )
    return Row("gpu.model", OK, found, need)


@gpu_check("gpu.mixed", 42)
def mixed(box: Box) -> Row:
    kinds = Counter((gpu.name, gpu.total_mib) for gpu in box.gpus)
    found = ", ".join(f"{count} x {name} {mib} MiB" for (name, mib), count in kinds.items())
    if len(kinds) > 1:
        return Row(
            "gpu.mixed",
            WARN,
            found,
            "equal cards",
            "every rank gets the same share, so the smallest card "
            "decides the memory and the slowest the speed",
            "CUDA_VISIBLE_DEVICES with equal cards only",
        )
    return Row("gpu.mixed", OK, found, "equal cards")


@gpu_check("gpu.mig")
def mig(box: Box) -> Row:
    active = _indices(box, lambda gpu: gpu.mig == "Enabled")
    if active:
        return Row(
            "gpu.mig",
            FAIL,
            f"MIG on: GPU {active}",
            "MIG off",
            "NCCL and P2P do not cross MIG instances",
            "`nvidia-smi -i N -mig 0` with nothing running",
        )
    return Row("gpu.mig", OK, "off" if box.target != "v100" else "off (V100 has none)", "off")


@gpu_check("gpu.ecc", 54)
def ecc(box: Box) -> Row:
    bad = _indices(box, lambda gpu: gpu.uncorrected_errors > 0)
    if bad:
        return Row(
            "gpu.ecc",
            FAIL,
            f"uncorrected memory errors since the driver was loaded: GPU {bad}",
            "none",
            "wrong numbers or a dead engine sooner or later",
            "drain, reset the card (`nvidia-smi -i N -r`) or reboot; replace it when they come back",
        )
    off = _indices(box, lambda gpu: gpu.ecc == "Disabled")
    if off:
        return Row(
            "gpu.ecc",
            WARN,
            f"off: GPU {off}",
            "on",
            "flipped bits become silent wrong tokens; HBM2 keeps its ECC bits apart, so off saves no memory",
            "`nvidia-smi -i N -e 1`, then reboot",
        )
    total = sum(gpu.corrected_errors for gpu in box.gpus)
    return Row("gpu.ecc", OK, f"on, {total} corrected, 0 uncorrected", "on, 0 uncorrected")


@gpu_check("gpu.retired_pages")
def retired_pages(box: Box) -> Row:
    pending = _indices(box, lambda gpu: gpu.retirement_pending)
    if pending:
        return Row(
            "gpu.retired_pages",
            WARN,
            f"retirement pending: GPU {pending}",
            "none pending",
            "a bad page stays in use until the driver is loaded again",
            "reboot at the next chance",
        )
    worst = max(gpu.retired_pages for gpu in box.gpus)
    # NVIDIA's RMA criterion for Volta: 60 retired pages (general knowledge, not re-read here).
    if worst >= 60:
        return Row(
            "gpu.retired_pages",
            WARN,
            f"{worst} on one card",
            "under 60",
            "the card's memory wears out",
            "replace it",
        )
    return Row("gpu.retired_pages", OK, f"{worst} at most", "under 60, none pending")


# What the operator should do, by number. From NVIDIA's Xid list (general knowledge, not re-read here).
XIDS = {
    13: ("a kernel read or wrote out of bounds", "software: report it with the engine's log"),
    31: ("a memory page fault of a kernel", "software: report it with the engine's log"),
    32: ("corrupt commands reached the card", "driver or PCIe: reseat the card, check the riser"),
    43: ("a kernel was stopped", "software: see the lines around it"),
    45: (
        "a process was killed while it used the card",
        "follows another error or a kill; see the lines around it",
    ),
    48: ("an uncorrectable memory error", "drain, reboot; replace the card when it comes back"),
    61: ("the card's controller stopped", "reboot"),
    62: (
        "the card's controller halted",
        "reboot; seen with custom all-reduce without NVLink (trouble 27): keep "
        "disable_custom_all_reduce true",
    ),
    63: ("a memory page was retired", "reboot at the next chance"),
    64: ("a memory page could not be retired", "reboot, then replace the card"),
    74: ("an NVLink error", "reseat the module, look at `nvidia-smi nvlink -e`"),
    79: ("the card fell off the bus", "reboot; power, riser, cooling"),
    92: ("many corrected memory errors", "watch it; replace the card when it grows"),
}


@check("gpu.xid", 27)
def xid(box: Box) -> Row:
    if box.target == "cpu":
        return Row("gpu.xid", SKIP, "no card", NEED_GPU)
    log = box.kernel_log
    if log is None:
        return Row(
            "gpu.xid",
            SKIP,
            "the kernel log is not readable",
            "a readable kernel log",
            "errors of the cards are reported there only",
            "run once as root, or read the host's dmesg",
        )
    numbers = Counter(int(number) for number in re.findall(r"NVRM: Xid \([^)]*\): (\d+)", log))
    if not numbers:
        return Row("gpu.xid", OK, "none since boot", "none")
    parts = [
        f"Xid {n} x{c} ({XIDS[n][0]})" if n in XIDS else f"Xid {n} x{c}" for n, c in sorted(numbers.items())
    ]
    fixes = {XIDS[n][1] for n in numbers if n in XIDS} or {"look the number up in NVIDIA's Xid list"}
    serious = any(n not in (13, 31, 43, 45) for n in numbers)
    return Row(
        "gpu.xid",
        FAIL if serious else WARN,
        ", ".join(parts),
        "none",
        "the driver reported errors since boot",
        "; ".join(sorted(fixes)),
    )


@gpu_check("gpu.clocks", 87)
def clocks(box: Box) -> Row:
    low = [
        f"GPU {gpu.index}: {gpu.application_clock_mhz} of {gpu.max_clock_mhz} MHz"
        for gpu in box.gpus
        if gpu.application_clock_mhz
        and gpu.max_clock_mhz
        and gpu.application_clock_mhz < 0.8 * gpu.max_clock_mhz
    ]
    if low:
        return Row(
            "gpu.clocks",
            WARN,
            "application clocks held low: " + ", ".join(low),
            "at least 80 % of the maximum",
            "somebody set a lower clock; prefill slows in proportion",
            "`nvidia-smi -rac` (reset application clocks)",
        )
    now = ", ".join(str(gpu.sm_clock_mhz) for gpu in box.gpus)
    return Row("gpu.clocks", OK, f"now {now} MHz (idle cards clock down)", "no low application clock")


@gpu_check("gpu.power_limit", 87)
def power_limit(box: Box) -> Row:
    low = [
        f"GPU {gpu.index}: {gpu.power_limit_w:g} of {gpu.default_power_limit_w:g} W"
        for gpu in box.gpus
        if gpu.power_limit_w and gpu.default_power_limit_w and gpu.power_limit_w < gpu.default_power_limit_w
    ]
    if low:
        return Row(
            "gpu.power_limit",
            NOTE,
            ", ".join(low),
            "known to you",
            "decode is bound by memory and drew 195 to 230 W on V100 SXM2 (trouble 87), prefill draws more",
            "docs/operations.md, Heat and power",
        )
    limits = sorted({f"{gpu.power_limit_w:g} W" for gpu in box.gpus if gpu.power_limit_w})
    return Row("gpu.power_limit", OK, ", ".join(limits) or "not reported", "the card's default")


@gpu_check("gpu.temperature", 87)
def temperature(box: Box) -> Row:
    hot = []
    for gpu in box.gpus:
        # V100 slows at 90 C; 83 idle or in service leaves no room for a warm day.
        limit = (gpu.slowdown_c or 90) - 7
        if gpu.temperature_c is not None and gpu.temperature_c >= limit:
            hot.append(f"GPU {gpu.index}: {gpu.temperature_c} C, slows at {gpu.slowdown_c or 90}")
    if hot:
        return Row(
            "gpu.temperature",
            WARN,
            ", ".join(hot),
            "7 C below the slowdown",
            "V100 is cooled by the chassis' fans only",
            "chassis fans to full, blanking plates, or a lower power limit (docs/operations.md)",
        )
    now = ", ".join(str(gpu.temperature_c) for gpu in box.gpus)
    return Row("gpu.temperature", OK, f"{now} C", "7 C below the slowdown")


_HARMLESS = {"gpu_idle", "applications_clocks_setting", "none", "sync_boost", "display_clocks_setting"}


@gpu_check("gpu.throttle", 87)
def throttle(box: Box) -> Row:
    slowed = [
        f"GPU {gpu.index}: {', '.join(reason for reason in gpu.throttle_reasons if reason not in _HARMLESS)}"
        for gpu in box.gpus
        if set(gpu.throttle_reasons) - _HARMLESS
    ]
    if slowed:
        return Row(
            "gpu.throttle",
            WARN,
            "; ".join(slowed),
            "none",
            "the card holds itself back now",
            "sw_power_cap: the "
            "limit works as set; thermal: cooling; hw_power_brake or hw_slowdown: power supply",
        )
    return Row("gpu.throttle", OK, "none", "none")


@gpu_check("gpu.persistence")
def persistence(box: Box) -> Row:
    off = _indices(box, lambda gpu: gpu.persistence == "Disabled")
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


def _indices(box: Box, test: Callable[[Gpu], bool]) -> str:
    return ", ".join(str(gpu.index) for gpu in box.gpus if test(gpu))
