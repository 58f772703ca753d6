"""How the cards reach each other and the host: NVLink, PCIe, NUMA, IOMMU, ACS, ASPM, InfiniBand."""

from __future__ import annotations

import re

from voltriton.doctor.box import Box
from voltriton.doctor.checks_gpu import gpu_check
from voltriton.doctor.rows import FAIL, NOTE, OK, SKIP, WARN, Row, check

_COST = {
    "NV": "NVLink: 2.8 to 9.6 us an all-reduce of a token were published",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's host bridge",
    "NODE": "several host bridges of one socket",
    "SYS": "the link between sockets",
}


@gpu_check("link.topology", 27, 28, 39, 41, 83)
def topology(box: Box) -> Row:
    """What the matrix means for the all-reduce: the slowest pair decides."""
    need = "NVLink between all pairs, or one PCIe switch"
    if len(box.gpus) == 1:
        return Row("link.topology", OK, "one card", "nothing")
    found = box.topology
    if found is None:
        return Row(
            "link.topology",
            WARN,
            "nvidia-smi topo -m gives no matrix",
            need,
            "the all-reduce's path is unknown",
            "keep disable_custom_all_reduce true",
        )
    pairs = found.pairs
    kinds = sorted(set(pairs))
    text = ", ".join(f"{pairs.count(kind)} x {kind}" for kind in kinds)
    if all(kind.startswith("NV") for kind in kinds):
        return Row(
            "link.topology",
            OK,
            text,
            need,
            f"{_COST['NV']}; custom all-reduce can work",
            "after `--deep` passes, disable_custom_all_reduce false may be tried",
        )
    slow = next(
        name for name in ("SYS", "NODE", "PHB", "PXB", "PIX", "NV") if any(k.startswith(name) for k in kinds)
    )
    advice = "keep disable_custom_all_reduce true: without NVLink it hung with Xid 62 (trouble 27)"
    if slow in ("PIX", "PXB"):
        return Row("link.topology", NOTE, text, need, f"the slowest pair goes through {_COST[slow]}", advice)
    return Row(
        "link.topology",
        WARN,
        text,
        need,
        f"the slowest pair goes through {_COST[slow]}: expect NCCL at 20 to "
        "40 us an all-reduce, and more cards may be slower than fewer (trouble 83)",
        advice,
    )


@gpu_check("link.nvlink")
def nvlink(box: Box) -> Row:
    output = box.host.run("nvidia-smi-nvlink", ["nvidia-smi", "nvlink", "-s"], 60)
    speeds = re.findall(r"Link \d+: ([\d.]+) GB/s", output.out)
    inactive = len(re.findall(r"Link \d+: <inactive>", output.out))
    if not speeds and not inactive:
        return Row("link.nvlink", NOTE, "no NVLink", "NVLink, if the board has it", "PCIe cards have none")
    if inactive:
        return Row(
            "link.nvlink",
            WARN,
            f"{len(speeds)} links up, {inactive} down",
            "all up",
            "a bridge or module sits badly, or the board does not wire them",
            "compare with the board's manual; `nvidia-smi nvlink -e`",
        )
    return Row("link.nvlink", OK, f"{len(speeds)} links up, {min(speeds, key=float)} GB/s each way", "all up")


@gpu_check("link.p2p", 28, 33, 37)
def p2p(box: Box) -> Row:
    """What the driver says; whether the bytes arrive is seen by deep.p2p only."""
    if len(box.gpus) == 1:
        return Row("link.p2p", OK, "one card", "nothing")
    output = box.host.run("nvidia-smi-p2p", ["nvidia-smi", "topo", "-p2p", "r"], 60)
    words = re.findall(r"\b(OK|CNS|GNS|TNS|NS)\b", output.out.split("Legend")[0])
    if not output.ok or not words:
        return Row("link.p2p", SKIP, "nvidia-smi topo -p2p gives no matrix", "P2P reads between all pairs")
    bad = [word for word in words if word != "OK"]
    if bad:
        return Row(
            "link.p2p",
            WARN,
            f"{len(bad) // 2} of {len(words) // 2} pairs without P2P ({', '.join(sorted(set(bad)))})",
            "P2P between all pairs",
            "NCCL goes through the host's memory: slower, but it works",
            "BIOS: ACS and VT-d off for the switches; else leave it",
        )
    return Row(
        "link.p2p",
        OK,
        "the driver allows all pairs",
        "P2P between all pairs",
        "",
        "`--deep` copies data to be sure",
    )


@gpu_check("link.numa", 82)
def numa(box: Box) -> Row:
    nodes = len(box.host.glob("/sys/devices/system/node/node[0-9]*"))
    if nodes <= 1:
        return Row("link.numa", OK, "one NUMA node", "ranks near their cards")
    places = box.topology.numa_nodes if box.topology else ()
    text = (
        ", ".join(f"GPU {index}: node {node or '?'}" for index, node in enumerate(places))
        or "cards' nodes unknown"
    )
    return Row(
        "link.numa",
        NOTE,
        f"{nodes} nodes; {text}",
        "ranks near their cards",
        "a rank on the other socket pays for every launch and for the host's table",
        "engine argument numa_bind true (vLLM binds each rank)",
    )


@check("link.iommu", 29, 30, 32)
def iommu(box: Box) -> Row:
    if box.target == "cpu":
        return Row("link.iommu", SKIP, "no card", "off or pass-through")
    line = box.host.read("/proc/cmdline") or ""
    units = box.host.glob("/sys/class/iommu/*")
    passthrough = "iommu=pt" in line or "iommu.passthrough=1" in line
    off = re.search(r"(intel_iommu|amd_iommu|iommu)=off", line)
    if not units or off:
        return Row("link.iommu", OK, "off", "off or pass-through")
    if passthrough:
        return Row("link.iommu", OK, f"{len(units)} unit(s), pass-through", "off or pass-through")
    return Row(
        "link.iommu",
        WARN,
        f"{len(units)} unit(s), translating",
        "off or pass-through",
        "P2P copies are sent through it: NCCL hung at the first all-reduce (troubles 29 to 32)",
        "BIOS: VT-d or IOMMU off; or kernel parameter iommu=pt",
    )


@check("link.acs", 29, 30, 31, 32)
def acs(box: Box) -> Row:
    if box.target == "cpu":
        return Row("link.acs", SKIP, "no card", "off on the switches above the cards")
    text = box.lspci
    if text is None or "ACSCtl" not in text:
        why = (
            "lspci is not installed"
            if text is None
            else "no ACS capability shown (needs root, or none there)"
        )
        return Row(
            "link.acs", SKIP, why, "SrcValid-, ReqRedir-, CmpltRedir-", "", "run once as root with pciutils"
        )
    active = [
        block.split(" ", 1)[0]
        for block in re.split(r"\n(?=\S)", text)
        if re.search(r"ACSCtl:.*(SrcValid\+|ReqRedir\+|CmpltRedir\+)", block)
        and "bridge" in block.split("\n", 1)[0]
    ]
    if active:
        return Row(
            "link.acs",
            WARN,
            f"on at {len(active)} bridge(s): {', '.join(active[:8])}",
            "off",
            "P2P between cards is redirected to the root complex: slow, or a hang",
            "BIOS; or `setpci -s BRIDGE ECAP_ACS+6.w=0` after each boot",
        )
    return Row("link.acs", OK, "off", "off")


@check("link.aspm")
def aspm(box: Box) -> Row:
    if box.target == "cpu":
        return Row("link.aspm", SKIP, "no card", "performance or off")
    policy = box.host.read("/sys/module/pcie_aspm/parameters/policy") or ""
    match = re.search(r"\[(\w+)\]", policy)
    if not match:
        return Row("link.aspm", SKIP, "no policy in /sys", "performance or off")
    if match.group(1) in ("powersave", "powersupersave"):
        return Row(
            "link.aspm",
            WARN,
            match.group(1),
            "default or performance",
            "links that sleep cost time and are blamed for cards falling off the bus (not proven)",
            "kernel parameter pcie_aspm=off",
        )
    return Row("link.aspm", OK, match.group(1), "default or performance")


@check("net.infiniband", 35)
def infiniband(box: Box) -> Row:
    if not box.options.infiniband:
        return Row("net.infiniband", SKIP, "not asked for (--infiniband)", "nothing on one host")
    ports = box.host.glob("/sys/class/infiniband/*/ports/*/state")
    if not ports:
        return Row(
            "net.infiniband",
            FAIL,
            "no InfiniBand device",
            "an active port",
            "",
            "load mlx5_ib; or do without",
        )
    states = {
        port.split("/")[4] + "/" + port.split("/")[6]: (box.host.read(port) or "?").strip() for port in ports
    }
    up = [name for name, state in states.items() if "ACTIVE" in state]
    text = ", ".join(f"{name}: {state}" for name, state in states.items())
    module = "nvidia_peermem" in (box.host.read("/proc/modules") or "") or "nv_peer_mem" in (
        box.host.read("/proc/modules") or ""
    )
    if not up:
        return Row(
            "net.infiniband",
            FAIL,
            text,
            "an active port",
            "ranks of several hosts cannot meet",
            "cable, subnet manager",
        )
    if not module:
        return Row(
            "net.infiniband",
            WARN,
            f"{text}; no nvidia_peermem",
            "GPUDirect RDMA",
            "data goes through the host's memory",
            "`modprobe nvidia_peermem`",
        )
    return Row("net.infiniband", OK, text, "an active port")
