"""What the checks look at: the machine, what was asked, and the outputs that several checks share, read once."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from voltriton.doctor.host import Host, Output
from voltriton.doctor.smi import Gpu, Smi, SmiError, Topology, parse_smi, parse_topology

TARGETS = ("v100", "hopper", "cpu")


@dataclass(frozen=True)
class Options:
    target: str | None = None
    """v100, hopper or cpu; None: by what is found."""
    gpus: int | None = None
    """How many cards the model needs; None: four for v100, one for hopper."""
    python: str = sys.executable
    model: Path | None = None
    profile: str | None = None
    infiniband: bool = False
    deep: bool = False


class Box:
    def __init__(self, host: Host, options: Options) -> None:
        self.host = host
        self.options = options

    @cached_property
    def smi_output(self) -> Output:
        return self.host.run("nvidia-smi", ["nvidia-smi", "-q", "-x"], 60)

    @cached_property
    def smi(self) -> Smi | None:
        """None where nvidia-smi is absent, fails, or says something unreadable; `smi_problem` says what."""
        if not self.smi_output.ok:
            return None
        try:
            return parse_smi(self.smi_output.out)
        except SmiError:
            return None

    @cached_property
    def smi_problem(self) -> str:
        output = self.smi_output
        if output.missing:
            return "nvidia-smi is not installed"
        if not output.ok:
            said = (output.out.strip() or output.err.strip() or "nothing").splitlines()
            return f"nvidia-smi failed: {' '.join(said[:2])}"
        try:
            parse_smi(output.out)
        except SmiError as error:
            return f"nvidia-smi's answer cannot be read: {error}"
        return ""

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.smi.gpus if self.smi else ()

    @cached_property
    def target(self) -> str:
        if self.options.target:
            return self.options.target
        if self.options.profile in ("cpu", "hopper"):
            return self.options.profile
        if self.gpus and all(gpu.architecture == "Hopper" for gpu in self.gpus):
            return "hopper"
        return "v100" if self.gpus or self.cards_on_the_bus or self.is_wsl else "cpu"

    @property
    def wanted_gpus(self) -> int:
        return self.options.gpus or {"v100": 4, "hopper": 1, "cpu": 0}[self.target]

    @cached_property
    def cards_on_the_bus(self) -> int:
        """NVIDIA display and 3D controllers that the kernel sees, whatever the driver thinks."""
        folders = [path.rsplit("/", 1)[0] for path in self.host.glob("/sys/bus/pci/devices/*/vendor")]
        return sum(
            (self.host.read(f"{folder}/vendor") or "").strip() == "0x10de"
            and (self.host.read(f"{folder}/class") or "").startswith("0x03")
            for folder in folders
        )

    @cached_property
    def is_wsl(self) -> bool:
        return "microsoft" in (self.host.read("/proc/version") or "").lower()

    @cached_property
    def topology(self) -> Topology | None:
        output = self.host.run("nvidia-smi-topo", ["nvidia-smi", "topo", "-m"], 60)
        try:
            return parse_topology(output.out) if output.ok else None
        except SmiError:
            return None

    @cached_property
    def kernel_log(self) -> str | None:
        """None where this user may not read it."""
        for name, argv in (
            ("dmesg", ["dmesg"]),
            ("journalctl", ["journalctl", "-k", "-b", "--no-pager", "-q"]),
        ):
            output = self.host.run(name, argv)
            if output.ok and output.out.strip():
                return output.out
        return None

    @cached_property
    def lspci(self) -> str | None:
        """`lspci -vvv`; None where it is not installed. Without root the capabilities are missing from it."""
        output = self.host.run("lspci", ["lspci", "-vvv"])
        return output.out if output.ok else None

    @cached_property
    def software(self) -> dict[str, Any]:
        probe = str(Path(__file__).with_name("software_probe.py"))
        output = self.host.run("software-probe", [self.options.python, "-P", probe], 180)
        if not output.ok:
            last = (output.err.strip() or "nothing").splitlines()[-1]
            return {"error": f"{self.options.python} failed ({output.code}): {last}"}
        try:
            found = json.loads(output.out.strip().splitlines()[-1])
        except (ValueError, IndexError):
            return {"error": f"{self.options.python} said something unreadable"}
        return found if isinstance(found, dict) else {"error": "no facts"}

    def software_part(self, name: str) -> dict[str, Any]:
        part = self.software.get(name)
        return part if isinstance(part, dict) else {"error": str(self.software.get("error", "not looked at"))}
