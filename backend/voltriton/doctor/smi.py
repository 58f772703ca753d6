"""Reads `nvidia-smi -q -x` and `nvidia-smi topo -m`.

The XML differs between driver branches (clocks_throttle_reasons became clocks_event_reasons, power_readings
became gpu_power_readings, V100 counts ECC errors by single and double bit); the readers here take both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree import ElementTree

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
CAPABILITIES = {
    "Kepler": "3.x",
    "Maxwell": "5.x",
    "Pascal": "6.x",
    "Volta": "7.0",
    "Turing": "7.5",
    "Ampere": "8.x",
    "Ada Lovelace": "8.9",
    "Hopper": "9.0",
    "Blackwell": "10.x or 12.x",
}
_NAMES = {
    "V100": "Volta",
    "GV100": "Volta",
    "TITAN V": "Volta",
    "CMP 100": "Volta",
    "P100": "Pascal",
    "P40": "Pascal",
    "T4": "Turing",
    "A100": "Ampere",
    "L40": "Ada Lovelace",
    "H100": "Hopper",
    "H200": "Hopper",
}


class SmiError(ValueError):
    """nvidia-smi's answer cannot be read."""


@dataclass(frozen=True)
class Process:
    pid: int
    name: str
    used_mib: int


@dataclass(frozen=True)
class Gpu:
    index: int
    name: str
    architecture: str
    bus_id: str
    total_mib: int
    free_mib: int
    persistence: str
    mig: str
    compute_mode: str
    ecc: str
    uncorrected_errors: int
    corrected_errors: int
    retired_pages: int
    retirement_pending: bool
    temperature_c: int | None
    slowdown_c: int | None
    power_limit_w: float | None
    default_power_limit_w: float | None
    sm_clock_mhz: int | None
    application_clock_mhz: int | None
    max_clock_mhz: int | None
    link_width: int | None
    max_link_width: int | None
    link_gen: int | None
    max_link_gen: int | None
    throttle_reasons: tuple[str, ...]
    processes: tuple[Process, ...]

    @property
    def capability(self) -> str:
        return CAPABILITIES.get(self.architecture, "unknown")


@dataclass(frozen=True)
class Smi:
    driver: str
    cuda: str
    gpus: tuple[Gpu, ...]


def parse_smi(xml: str) -> Smi:
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise SmiError(f"not the XML of nvidia-smi -q -x ({error})") from error
    if root.tag != "nvidia_smi_log":
        raise SmiError(f"XML of something else: <{root.tag}> instead of <nvidia_smi_log>")
    gpus = tuple(_gpu(index, node) for index, node in enumerate(root.findall("gpu")))
    return Smi(_text(root, "driver_version"), _text(root, "cuda_version"), gpus)


def _gpu(index: int, node: ElementTree.Element) -> Gpu:
    power = next(
        (found for tag in ("gpu_power_readings", "power_readings") if (found := node.find(tag)) is not None),
        None,
    )
    return Gpu(
        index=index,
        name=_text(node, "product_name"),
        architecture=_architecture(node),
        bus_id=node.get("id", "?"),
        total_mib=_int(node, "fb_memory_usage/total") or 0,
        free_mib=_int(node, "fb_memory_usage/free") or 0,
        persistence=_text(node, "persistence_mode"),
        mig=_text(node, "mig_mode/current_mig"),
        compute_mode=_text(node, "compute_mode"),
        ecc=_text(node, "ecc_mode/current_ecc"),
        uncorrected_errors=_errors(
            node,
            (
                "double_bit/total",
                "sram_uncorrectable",
                "dram_uncorrectable",
                "sram_uncorrectable_parity",
                "sram_uncorrectable_secded",
            ),
        ),
        corrected_errors=_errors(node, ("single_bit/total", "sram_correctable", "dram_correctable")),
        retired_pages=sum(
            _int(node, f"retired_pages/{kind}/retired_count") or 0
            for kind in ("multiple_single_bit_retirement", "double_bit_retirement")
        ),
        retirement_pending=_text(node, "retired_pages/pending_retirement") == "Yes",
        temperature_c=_int(node, "temperature/gpu_temp"),
        slowdown_c=_int(node, "temperature/gpu_temp_slow_threshold"),
        power_limit_w=_first_float(power, "current_power_limit", "enforced_power_limit", "power_limit"),
        default_power_limit_w=_first_float(power, "default_power_limit"),
        sm_clock_mhz=_int(node, "clocks/sm_clock"),
        application_clock_mhz=_int(node, "applications_clocks/graphics_clock"),
        max_clock_mhz=_int(node, "max_clocks/sm_clock"),
        link_width=_int(node, "pci/pci_gpu_link_info/link_widths/current_link_width"),
        max_link_width=_int(node, "pci/pci_gpu_link_info/link_widths/max_link_width"),
        link_gen=_int(node, "pci/pci_gpu_link_info/pcie_gen/current_link_gen"),
        max_link_gen=_int(node, "pci/pci_gpu_link_info/pcie_gen/max_link_gen"),
        throttle_reasons=tuple(_throttle_reasons(node)),
        processes=tuple(_processes(node)),
    )


def _architecture(node: ElementTree.Element) -> str:
    """Old drivers do not say the architecture; the name then does, if it is one we know."""
    said = _text(node, "product_architecture")
    if said in CAPABILITIES:
        return said
    name = _text(node, "product_name")
    return next((family for part, family in _NAMES.items() if part in name), said)


def _throttle_reasons(node: ElementTree.Element) -> list[str]:
    prefix = re.compile(r"^clocks_(throttle|event)_reason_")
    return [
        prefix.sub("", reason.tag)
        for tag in ("clocks_throttle_reasons", "clocks_event_reasons")
        for reason in node.findall(f"{tag}/*")
        if (reason.text or "").strip() == "Active"
    ]


def _processes(node: ElementTree.Element) -> list[Process]:
    return [
        Process(_int(process, "pid") or 0, _text(process, "process_name"), _int(process, "used_memory") or 0)
        for process in node.findall("processes/process_info")
    ]


def _errors(node: ElementTree.Element, paths: tuple[str, ...]) -> int:
    """Since the driver was loaded (volatile): what is going wrong now."""
    return sum(_int(node, f"ecc_errors/volatile/{path}") or 0 for path in paths)


def _text(node: ElementTree.Element, path: str) -> str:
    found = node.find(path)
    return (found.text or "").strip() if found is not None else ""


def _int(node: ElementTree.Element, path: str) -> int | None:
    match = re.match(r"-?\d+", _text(node, path))
    return int(match.group()) if match else None


def _first_float(node: ElementTree.Element | None, *paths: str) -> float | None:
    for path in paths if node is not None else ():
        assert node is not None
        match = re.match(r"\d+(\.\d+)?", _text(node, path))
        if match:
            return float(match.group())
    return None


@dataclass(frozen=True)
class Topology:
    """`links[i][j]` as nvidia-smi names them: NV2, PIX, PXB, PHB, NODE, SYS; X for itself."""

    links: tuple[tuple[str, ...], ...]
    numa_nodes: tuple[str, ...]

    @property
    def pairs(self) -> list[str]:
        return [
            link for row, line in enumerate(self.links) for column, link in enumerate(line) if column > row
        ]


def parse_topology(text: str) -> Topology:
    """Raises SmiError where the matrix has holes."""
    lines = [_ANSI.sub("", line) for line in text.splitlines()]
    header = next((line for line in lines if "GPU0" in line and not line.startswith("GPU0")), "")
    columns = [part.strip() for part in header.split("\t") if part.strip()]
    count = sum(bool(re.fullmatch(r"GPU\d+", name)) for name in columns)
    rows = [[part.strip() for part in line.split("\t")] for line in lines if re.match(r"GPU\d+\s", line)]
    rows = [row for row in rows if len(row) > count]
    if not count or len(rows) != count:
        raise SmiError("not the matrix of nvidia-smi topo -m")
    links = tuple(tuple(row[1 : count + 1]) for row in rows)
    numa = columns.index("NUMA Affinity") + 1 if "NUMA Affinity" in columns else None
    nodes = tuple(row[numa] if numa is not None and numa < len(row) else "" for row in rows)
    return Topology(links, nodes)
