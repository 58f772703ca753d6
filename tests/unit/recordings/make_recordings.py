"""Writes the recordings beside it: boxes that we made up, in the formats of the tools.

The XML's form was taken from an H200 with driver 580.159; what older branches call differently (throttle reasons,
power readings, single and double bit errors of Volta) from NVIDIA's documentation of nvidia-smi as we remember it.

    python tests/unit/recordings/make_recordings.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SITE = "/opt/voltriton/lib/python3.11/site-packages"
NCCL = f"{SITE}/nvidia/nccl/lib/libnccl.so.2"
VLLM_LIBRARIES = [f"{SITE}/vllm/_C_stable_libtorch.abi3.so", f"{SITE}/vllm/_moe_C.abi3.so"]


def gpu_xml(index: int, old: bool = False, **changes: Any) -> str:
    """One <gpu>. `old`: as drivers before R535 write it."""
    v = {
        "name": "Tesla V100-SXM2-32GB",
        "architecture": "Volta",
        "total": 32768,
        "used": 0,
        "persistence": "Enabled",
        "mig": "N/A",
        "mode": "Default",
        "ecc": "Enabled",
        "double": 0,
        "single": 0,
        "retired": 0,
        "pending": "No",
        "temperature": 38,
        "slow": 90,
        "limit": 300,
        "default": 300,
        "sm": 135,
        "application": 1290,
        "max": 1530,
        "width": 16,
        "gen": 3,
        "reasons": ("gpu_idle",),
        "processes": (),
    } | changes
    reason = "throttle" if old else "event"
    names = (
        "gpu_idle",
        "applications_clocks_setting",
        "sw_power_cap",
        "hw_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
        "sync_boost",
        "sw_thermal_slowdown",
        "display_clocks_setting",
    )
    reasons = "\n".join(
        f"\t\t\t<clocks_{reason}_reason_{name}>{'Active' if name in v['reasons'] else 'Not Active'}"
        f"</clocks_{reason}_reason_{name}>"
        for name in names
    )
    processes = "\n".join(
        f"\t\t\t<process_info>\n\t\t\t\t<pid>{pid}</pid>\n\t\t\t\t<type>C</type>\n\t\t\t\t<process_name>{name}</process_name>\n"
        f"\t\t\t\t<used_memory>{mib} MiB</used_memory>\n\t\t\t</process_info>"
        for pid, name, mib in v["processes"]
    )
    power = (
        f"\t\t<power_readings>\n\t\t\t<power_state>P0</power_state>\n\t\t\t<power_draw>41.20 W</power_draw>\n"
        f"\t\t\t<power_limit>{v['limit']}.00 W</power_limit>\n"
        f"\t\t\t<default_power_limit>{v['default']}.00 W</default_power_limit>\n"
        "\t\t</power_readings>"
        if old
        else f"\t\t<gpu_power_readings>\n\t\t\t<power_state>P0</power_state>\n"
        "\t\t\t<average_power_draw>N/A</average_power_draw>\n"
        f"\t\t\t<instant_power_draw>41.20 W</instant_power_draw>\n"
        f"\t\t\t<current_power_limit>{v['limit']}.00 W</current_power_limit>\n"
        f"\t\t\t<default_power_limit>{v['default']}.00 W</default_power_limit>\n\t\t</gpu_power_readings>"
    )
    architecture = "" if old else f"\t\t<product_architecture>{v['architecture']}</product_architecture>\n"
    bits = "\n".join(
        f"\t\t\t\t<{kind}_bit>\n\t\t\t\t\t<device_memory>{v[kind]}</device_memory>\n\t\t\t\t\t<register_file>0</register_file>\n"
        f"\t\t\t\t\t<texture_memory>N/A</texture_memory>\n\t\t\t\t\t<total>{v[kind]}</total>\n\t\t\t\t</{kind}_bit>"
        for kind in ("single", "double")
    )
    return f"""\t<gpu id="00000000:{0x1A + index:02X}:00.0">
\t\t<product_name>{v["name"]}</product_name>
\t\t<product_brand>Tesla</product_brand>
{architecture}\t\t<persistence_mode>{v["persistence"]}</persistence_mode>
\t\t<mig_mode>
\t\t\t<current_mig>{v["mig"]}</current_mig>
\t\t\t<pending_mig>{v["mig"]}</pending_mig>
\t\t</mig_mode>
\t\t<pci>
\t\t\t<pci_gpu_link_info>
\t\t\t\t<pcie_gen>
\t\t\t\t\t<max_link_gen>{v["gen"]}</max_link_gen>
\t\t\t\t\t<current_link_gen>1</current_link_gen>
\t\t\t\t</pcie_gen>
\t\t\t\t<link_widths>
\t\t\t\t\t<max_link_width>16x</max_link_width>
\t\t\t\t\t<current_link_width>{v["width"]}x</current_link_width>
\t\t\t\t</link_widths>
\t\t\t</pci_gpu_link_info>
\t\t</pci>
\t\t<fan_speed>N/A</fan_speed>
\t\t<clocks_{reason}_reasons>
{reasons}
\t\t</clocks_{reason}_reasons>
\t\t<fb_memory_usage>
\t\t\t<total>{v["total"]} MiB</total>
\t\t\t<used>{v["used"]} MiB</used>
\t\t\t<free>{v["total"] - v["used"]} MiB</free>
\t\t</fb_memory_usage>
\t\t<compute_mode>{v["mode"]}</compute_mode>
\t\t<ecc_mode>
\t\t\t<current_ecc>{v["ecc"]}</current_ecc>
\t\t\t<pending_ecc>{v["ecc"]}</pending_ecc>
\t\t</ecc_mode>
\t\t<ecc_errors>
\t\t\t<volatile>
{bits}
\t\t\t</volatile>
\t\t</ecc_errors>
\t\t<retired_pages>
\t\t\t<multiple_single_bit_retirement>
\t\t\t\t<retired_count>{v["retired"]}</retired_count>
\t\t\t</multiple_single_bit_retirement>
\t\t\t<double_bit_retirement>
\t\t\t\t<retired_count>0</retired_count>
\t\t\t</double_bit_retirement>
\t\t\t<pending_retirement>{v["pending"]}</pending_retirement>
\t\t</retired_pages>
\t\t<temperature>
\t\t\t<gpu_temp>{v["temperature"]} C</gpu_temp>
\t\t\t<gpu_temp_max_threshold>{v["slow"] + 3} C</gpu_temp_max_threshold>
\t\t\t<gpu_temp_slow_threshold>{v["slow"]} C</gpu_temp_slow_threshold>
\t\t</temperature>
{power}
\t\t<clocks>
\t\t\t<graphics_clock>{v["sm"]} MHz</graphics_clock>
\t\t\t<sm_clock>{v["sm"]} MHz</sm_clock>
\t\t\t<mem_clock>877 MHz</mem_clock>
\t\t</clocks>
\t\t<applications_clocks>
\t\t\t<graphics_clock>{v["application"]} MHz</graphics_clock>
\t\t\t<mem_clock>877 MHz</mem_clock>
\t\t</applications_clocks>
\t\t<max_clocks>
\t\t\t<graphics_clock>{v["max"]} MHz</graphics_clock>
\t\t\t<sm_clock>{v["max"]} MHz</sm_clock>
\t\t</max_clocks>
\t\t<processes>
{processes}
\t\t</processes>
\t</gpu>"""


def smi_xml(driver: str, cuda: str, gpus: list[str]) -> str:
    body = "\n".join(gpus)
    return f"""<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
\t<timestamp>Mon Nov 30 12:00:00 2026</timestamp>
\t<driver_version>{driver}</driver_version>
\t<cuda_version>{cuda}</cuda_version>
\t<attached_gpus>{len(gpus)}</attached_gpus>
{body}
</nvidia_smi_log>
"""


def topology(links: list[list[str]], numa: list[str]) -> str:
    names = [f"GPU{index}" for index in range(len(links))]
    head = "\x1b[4m" + "\t".join(["", *names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]) + "\x1b[0m"
    rows = [
        "\t".join([name, *(f" {link} " if link == "X" else link for link in row), "0-39", node, "", "N/A"])
        for name, row, node in zip(names, links, numa, strict=True)
    ]
    return "\n".join(
        [
            head,
            *rows,
            "",
            "Legend:",
            "",
            "  X    = Self",
            "  SYS  = Connection traversing PCIe as well as the SMP interconnect",
            "",
        ]
    )


def uniform(count: int, link: str) -> list[list[str]]:
    return [["X" if row == column else link for column in range(count)] for row in range(count)]


def peers(count: int, word: str) -> str:
    names = [f"GPU{index}" for index in range(count)]
    head = " \t\x1b[4m" + "\t".join(names) + "\t\x1b[0m"
    rows = [
        "\t".join([f" {name}", *("X" if i == j else word for j in range(count))])
        for i, name in enumerate(names)
    ]
    return "\n".join(
        [
            head,
            *rows,
            "",
            "Legend:",
            "",
            "  X    = Self",
            "  OK   = Status Ok",
            "  CNS  = Chipset not supported",
            "",
        ]
    )


def nvlink(count: int, links: int) -> str:
    return "".join(
        f"GPU {index}: Tesla V100-SXM2-32GB (UUID: GPU-00000000-0000-0000-0000-00000000000{index})\n"
        + "".join(f"\t Link {link}: 25.781 GB/s\n" for link in range(links))
        for index in range(count)
    )


def software(**changes: Any) -> str:
    facts: dict[str, Any] = {
        "python": "3.11.7",
        "executable": "/opt/voltriton/bin/python",
        "torch": {
            "version": "2.13.0+cu126",
            "cuda": "12.6",
            "file": f"{SITE}/torch/__init__.py",
            "available": True,
            "cudnn": 91002,
            "architectures": ["sm_50", "sm_60", "sm_70", "sm_75", "sm_80", "sm_86", "sm_90"],
            "devices": ["7.0"] * 4,
            "run_on_gpu": "ok",
        },
        "vllm": {
            "version": "0.32.0",
            "folder": f"{SITE}/vllm",
            "libraries": VLLM_LIBRARIES,
            "plugin": True,
            "series": "0123456789abcdef",
            "patches": "",
        },
        "triton": {"version": "3.7.1", "ptxas_sm_70": True},
        "nccl": {"version": "2.30.7", "files": [NCCL]},
        "packages": {"numpy": "2.3.5", "voltriton": "0.1.0"},
    }
    for name, value in changes.items():
        facts[name] = {**facts[name], **value} if isinstance(value, dict) and "error" not in value else value
    return "\n" + json.dumps(facts) + "\n"


def meminfo(gib: int) -> str:
    return f"MemTotal:       {gib << 20} kB\nMemFree:        {gib << 19} kB\n"


def limits(memlock: str = "unlimited", files: str = "1048576") -> str:
    return (
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        f"Max processes             1031199              1031199              processes \n"
        f"Max open files            {files:20} {files:20} files     \n"
        f"Max locked memory         {memlock:20} {memlock:20} bytes     \n"
    )


def df(total_kib: int, free_kib: int) -> str:
    used = total_kib - free_kib
    head = "Filesystem     1024-blocks  Used Available Capacity Mounted on\n"
    return f"{head}tmpfs            {total_kib} {used}  {free_kib}       1% /dev/shm\n"


def cpuinfo(count: int) -> str:
    return "".join(
        f"processor\t: {index}\nmodel name\t: Intel(R) Xeon(R) Gold 6148 CPU @ 2.40GHz\n\n"
        for index in range(count)
    )


def pci(count: int) -> dict[str, str]:
    found = {}
    for index in range(count):
        folder = f"/sys/bus/pci/devices/0000:{0x1A + index:02x}:00.0"
        found |= {f"{folder}/vendor": "0x10de\n", f"{folder}/class": "0x030200\n"}
    return found


DMESG = "[    0.000000] Linux version 6.1.0\n[    5.100000] NVRM: loading NVIDIA UNIX x86_64 Kernel Module\n"
BRIDGE = (
    "3a:00.0 PCI bridge: PLX Technology, Inc. PEX 8747 48-Lane, 5-Port PCIe Gen 3 Switch (prog-if 00 [Normal decode])\n"
    "\tCapabilities: [f24 v1] Access Control Services\n"
    "\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl+ DirectTrans+\n"
    "\t\tACSCtl:\tSrcValid{0} TransBlk- ReqRedir{0} CmpltRedir{0} UpstreamFwd{0} EgressCtrl- DirectTrans-\n"
)

Box = dict[str, Any]


def box(commands: Mapping[str, str], files: Mapping[str, str], **notes: Any) -> Box:
    """Patterns that the checks look up are filled in from the files; a test finds one that was forgotten."""
    globs = {"/sys/bus/pci/devices/*/vendor": [name for name in files if name.endswith("/vendor")]}
    return {
        "commands": commands,
        "files": files,
        "notes": {
            "env": {},
            "device_code": {},
            "failed": {},
            **notes,
            "glob": {**globs, **notes.get("glob", {})},
        },
    }


def healthy_files(gib: int = 256) -> dict[str, str]:
    return {
        "/proc/version": "Linux version 6.1.0-amd64 (debian-kernel@lists.debian.org)\n",
        "/proc/meminfo": meminfo(gib),
        "/proc/self/limits": limits(),
        "/proc/cpuinfo": cpuinfo(40),
        "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/md0 ro iommu=pt\n",
        "/sys/module/pcie_aspm/parameters/policy": "[default] performance powersave powersupersave\n",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "/proc/1/cgroup": "0::/init.scope\n",
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "performance\n",
    }


HEALTHY_GLOBS = {
    "/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor": [
        "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"
    ],
    "/sys/devices/system/node/node[0-9]*": [
        "/sys/devices/system/node/node0",
        "/sys/devices/system/node/node1",
    ],
    "/sys/class/iommu/*": ["/sys/class/iommu/dmar0"],
}
HEALTHY_CODE = {
    NCCL: ["sm_60", "sm_61", "sm_70", "sm_80", "sm_90", "compute_120"],
    **{name: ["sm_70"] for name in VLLM_LIBRARIES},
}


def nvlink_box() -> Box:
    commands = {
        "nvidia-smi": smi_xml("580.126.09", "13.0", [gpu_xml(index) for index in range(4)]),
        "nvidia-smi-topo": topology(uniform(4, "NV2"), ["0", "0", "1", "1"]),
        "nvidia-smi-nvlink": nvlink(4, 6),
        "nvidia-smi-p2p": peers(4, "OK"),
        "dmesg": DMESG,
        "lspci": BRIDGE.format("-"),
        "software-probe": software(),
        "df-shm": df(67108864, 67108864),
        "docker-info": '{"io.containerd.runc.v2":{"path":"runc"},"nvidia":{"path":"nvidia-container-runtime"}}\n',
    }
    return box(commands, healthy_files() | pci(4), glob=HEALTHY_GLOBS, device_code=HEALTHY_CODE)


def pcie_box() -> Box:
    """Four PCIe cards over host bridges, with nearly everything that can be wrong."""
    name = {"name": "Tesla V100-PCIE-32GB", "limit": 250, "default": 250, "max": 1380}
    gpus = [
        gpu_xml(0, **name, ecc="Disabled"),
        gpu_xml(1, **name, used=9000, processes=((4711, "VLLM::Worker_TP1", 8990),)),
        gpu_xml(2, **name, temperature=86, reasons=("hw_thermal_slowdown", "hw_slowdown"), width=8),
        gpu_xml(
            3,
            **{**name, "limit": 150},
            persistence="Disabled",
            double=2,
            retired=3,
            pending="Yes",
            application=900,
        ),
    ]
    links = [
        ["X", "PHB", "SYS", "SYS"],
        ["PHB", "X", "SYS", "SYS"],
        ["SYS", "SYS", "X", "PHB"],
        ["SYS", "SYS", "PHB", "X"],
    ]
    xid = "[  812.000001] NVRM: Xid (PCI:0000:1a:00): 62, pid=4242, name=VLLM::Worker_TP0, 2108(2124)\n"
    files = (
        healthy_files(64)
        | pci(4)
        | {
            "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro quiet intel_iommu=on\n",
            "/proc/self/limits": limits("8388608", "1024"),
            "/sys/module/pcie_aspm/parameters/policy": "default performance [powersave] powersupersave\n",
            "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
            "/proc/999/stat": "999 (VLLM::EngineCor) S 1 999 999 0 -1 4194560\n",
            "/.dockerenv": "",
        }
    )
    commands = {
        "nvidia-smi": smi_xml("535.230.02", "12.2", gpus),
        "nvidia-smi-topo": topology(links, ["0", "0", "1", "1"]),
        "nvidia-smi-nvlink": "",
        "nvidia-smi-p2p": peers(4, "CNS"),
        "dmesg": DMESG + xid,
        "lspci": BRIDGE.format("+"),
        "df-shm": df(65536, 65000),
        "software-probe": software(
            torch={
                "version": "2.13.0+cu130",
                "cuda": "13.0",
                "architectures": ["sm_75", "sm_80", "sm_90", "sm_120"],
                "run_on_gpu": "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            },
            vllm={
                "plugin": True,
                "series": None,
                "patches": f"vLLM in {SITE}/vllm is not patched: run `voltriton patch apply`",
            },
            triton={"version": "3.9.0", "ptxas_sm_70": False},
            nccl={"version": "2.21.5", "files": [NCCL, "/usr/lib/x86_64-linux-gnu/libnccl.so.2"]},
            packages={"tilelang": "0.1.9", "flashinfer-python": "0.6.1", "voltriton": "0.1.0"},
        ),
    }
    code = {
        NCCL: ["sm_80", "sm_90"],
        VLLM_LIBRARIES[0]: ["sm_75", "sm_80", "sm_90"],
        VLLM_LIBRARIES[1]: ["sm_75"],
    }
    return box(
        commands,
        files,
        glob={**HEALTHY_GLOBS, "/proc/[0-9]*/stat": ["/proc/999/stat"]},
        device_code=code,
        env={
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "VLLM_PLE_CPU_OFFLOAD": "1",
            "CUDA_VISIBLE_DEVICES": "0,1",
        },
    )


def wsl2() -> Box:
    """One card in Windows, seen from WSL2: no PCI tree, no topology, no persistence mode."""
    gpu = gpu_xml(
        0,
        name="Tesla V100-PCIE-16GB",
        total=16384,
        used=400,
        persistence="Enabled",
        ecc="Enabled",
        limit=250,
        default=250,
    )
    files = {
        "/proc/version": "Linux version 6.6.87.2-microsoft-standard-WSL2 (root@439a258ad544)\n",
        "/proc/meminfo": meminfo(31),
        "/proc/sys/kernel/osrelease": "6.6.87.2-microsoft-standard-WSL2\n",
        "/proc/self/limits": limits("67108864", "10240"),
        "/proc/cpuinfo": cpuinfo(16),
        "/proc/cmdline": "initrd=\\initrd.img WSL_ROOT_INIT=1\n",
    }
    commands = {
        "nvidia-smi": smi_xml("580.88", "13.0", [gpu]),
        "dmesg": "[    0.000000] Linux version 6.6.87.2-microsoft-standard-WSL2\n",
        "df-shm": df(16000000, 16000000),
        "software-probe": software(torch={"devices": ["7.0"]}),
        "nvidia-smi-nvlink": "",
    }
    return box(commands, files, device_code=HEALTHY_CODE)


def broken_driver() -> Box:
    """After a kernel update: cards on the bus, no module."""
    said = (
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
        "Make sure that the latest NVIDIA driver is "
        "installed and running.\n\n"
    )
    commands = {
        "nvidia-smi": said,
        "dmesg": "[    0.000000] Linux version 6.1.0\n",
        "df-shm": df(67108864, 67108864),
        "lspci": BRIDGE.format("-"),
        "software-probe": software(
            torch={"available": False, "devices": [], "why_not": "Found no NVIDIA driver on your system."}
        ),
    }
    return box(
        commands,
        healthy_files() | pci(4),
        glob=HEALTHY_GLOBS,
        device_code=HEALTHY_CODE,
        failed={
            "nvidia-smi": {"code": 9, "err": ""},
            "dmesg": {"code": 1, "err": "dmesg: read kernel buffer failed"},
        },
    )


def mixed_cards() -> Box:
    """Two sizes of V100, an A100 with MIG, and a card that does not exist yet."""
    gpus = [
        gpu_xml(0),
        gpu_xml(1, name="Tesla V100-SXM2-16GB", total=16384),
        gpu_xml(
            2,
            name="NVIDIA A100-SXM4-80GB",
            architecture="Ampere",
            total=81920,
            mig="Enabled",
            mode="Exclusive_Process",
        ),
        gpu_xml(3, name="NVIDIA X900", architecture="Rubin", total=200000),
    ]
    commands = {
        "nvidia-smi": smi_xml("595.10", "13.2", gpus),
        "software-probe": software(),
        "df-shm": df(67108864, 67108864),
        "nvidia-smi-topo": "garbage",
        "dmesg": DMESG,
    }
    return box(commands, healthy_files() | pci(4), glob=HEALTHY_GLOBS, device_code=HEALTHY_CODE)


def old_driver() -> Box:
    """R470, the way it writes XML; PCIe cards behind one switch."""
    name = {"name": "Tesla V100-PCIE-32GB", "limit": 250, "default": 250}
    commands = {
        "nvidia-smi": smi_xml("470.256.02", "11.4", [gpu_xml(index, old=True, **name) for index in range(4)]),
        "nvidia-smi-topo": topology(uniform(4, "PIX"), ["0"] * 4),
        "nvidia-smi-p2p": peers(4, "OK"),
        "dmesg": DMESG,
        "nvidia-smi-nvlink": "",
        "software-probe": software(
            torch={
                "available": False,
                "why_not": "The NVIDIA driver on your system is too old (found version 11040).",
            }
        ),
        "df-shm": df(67108864, 67108864),
    }
    return box(commands, healthy_files() | pci(4), glob=HEALTHY_GLOBS, device_code=HEALTHY_CODE)


def bare_container() -> Box:
    """A container without --gpus: the host's bus shines through /sys, but there is no nvidia-smi."""
    files = healthy_files() | pci(4) | {"/.dockerenv": "", "/sys/fs/cgroup/memory.max": f"{8 << 30}\n"}
    commands = {
        "df-shm": df(65536, 65536),
        "software-probe": software(torch={"available": False, "why_not": "No CUDA GPUs are available"}),
    }
    return box(commands, files, glob=HEALTHY_GLOBS, device_code=HEALTHY_CODE)


def no_card() -> Box:
    commands = {
        "df-shm": df(8000000, 8000000),
        "software-probe": software(torch={"version": "2.13.0+cpu", "cuda": None}),
    }
    return box(commands, healthy_files(16))


def unreadable() -> Box:
    commands = {
        "nvidia-smi": "<html>proxy error</html>",
        "df-shm": "?",
        "software-probe": "Illegal instruction",
    }
    return box(commands, pci(4))


BOXES = {
    "nvlink-box": nvlink_box,
    "pcie-box": pcie_box,
    "wsl2": wsl2,
    "broken-driver": broken_driver,
    "mixed-cards": mixed_cards,
    "old-driver": old_driver,
    "bare-container": bare_container,
    "no-card": no_card,
    "unreadable": unreadable,
}


def write(folder: Path) -> None:
    for name, make in BOXES.items():
        made = make()
        for command, text in made["commands"].items():
            _write(folder / name / "commands" / command, text)
        for path, text in made["files"].items():
            _write(folder / name / f"root{path}", text)
        _write(folder / name / "notes.json", json.dumps(made["notes"], indent=1, sort_keys=True) + "\n")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
