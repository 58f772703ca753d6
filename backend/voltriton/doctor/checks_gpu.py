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
    active = indices(box, lambda gpu: gpu.mig == "Enabled")
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


def indices(box: Box, test: Callable[[Gpu], bool]) -> str:
    return ", ".join(str(gpu.index) for gpu in box.gpus if test(gpu))
