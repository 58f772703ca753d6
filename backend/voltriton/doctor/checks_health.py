"""Is a card well: memory errors, Xid events, clocks, power, heat."""

from __future__ import annotations

import re
from collections import Counter

from voltriton.doctor.box import Box
from voltriton.doctor.checks_gpu import NEED_GPU, gpu_check, indices
from voltriton.doctor.rows import FAIL, NOTE, OK, SKIP, WARN, Row, check


@gpu_check("gpu.ecc", 54)
def ecc(box: Box) -> Row:
    bad = indices(box, lambda gpu: gpu.uncorrected_errors > 0)
    if bad:
        return Row(
            "gpu.ecc",
            FAIL,
            f"uncorrected memory errors since the driver was loaded: GPU {bad}",
            "none",
            "wrong numbers or a dead engine sooner or later",
            "drain, reset the card (`nvidia-smi -i N -r`) or reboot; replace it when they come back",
        )
    off = indices(box, lambda gpu: gpu.ecc == "Disabled")
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
    pending = indices(box, lambda gpu: gpu.retirement_pending)
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
