"""The host: memory, limits, shared memory, containers, WSL2, leftovers."""

from __future__ import annotations

import re

from voltriton.doctor.box import Box
from voltriton.doctor.rows import FAIL, NOTE, OK, SKIP, WARN, Row, check

GIB = 1 << 30


@check("host.memory", 45, 46, 47)
def memory(box: Box) -> Row:
    """Loading maps every shard; without a host table 32 GiB are comfortable for four V100."""
    total = _meminfo(box, "MemTotal")
    need_gib = 4 if box.target == "cpu" else 32
    need = f"{need_gib} GiB, and the n-gram table's size + 16 GiB where a model keeps one on the host"
    if total is None:
        return Row("host.memory", SKIP, "no /proc/meminfo", need)
    limit = cgroup_limit(box)
    usable = min(total, limit) if limit else total
    found = f"{usable / GIB:.1f} GiB" + (
        f" (limit of the container; the host has {total / GIB:.1f})" if usable < total else ""
    )
    if usable < need_gib * GIB:
        return Row(
            "host.memory",
            WARN,
            found,
            need,
            "loading slows down or the kernel kills a rank",
            "more memory, or a higher limit of the container",
        )
    return Row("host.memory", OK, found, need)


def cgroup_limit(box: Box) -> int | None:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = (box.host.read(path) or "").strip()
        # cgroup v1 says "no limit" as a number near 2**63.
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def _meminfo(box: Box, name: str) -> int | None:
    match = re.search(rf"^{name}:\s+(\d+) kB", box.host.read("/proc/meminfo") or "", re.MULTILINE)
    return int(match.group(1)) * 1024 if match else None


@check("host.shm", 79)
def shm(box: Box) -> Row:
    """Triton's stub and vLLM's message queue between ranks live there."""
    output = box.host.run("df-shm", ["df", "-kP", "/dev/shm"])
    match = re.search(r"\s(\d+)\s+(\d+)\s+(\d+)\s+\d+%\s+/dev/shm\s*$", output.out)
    need_mib = 256 if box.target == "cpu" else 1024
    need = f"{need_mib} MiB free"
    if not match:
        return Row(
            "host.shm",
            FAIL,
            "no /dev/shm",
            need,
            "Triton's Python backend cannot start",
            "mount a tmpfs at /dev/shm",
        )
    free_mib = int(match.group(3)) // 1024
    if free_mib < need_mib:
        return Row(
            "host.shm",
            FAIL,
            f"{free_mib} MiB free of {int(match.group(1)) // 1024}",
            need,
            "requests or ranks die with 'bus error' when it is full",
            "docker run --shm-size 8g (compose.yaml has it); remove files of dead servers",
        )
    return Row("host.shm", OK, f"{free_mib} MiB free", need)


def _limit(box: Box, name: str) -> str | None:
    match = re.search(rf"^{name}\s+(\S+)", box.host.read("/proc/self/limits") or "", re.MULTILINE)
    return match.group(1) if match else None


@check("host.memlock", 46, 47)
def memlock(box: Box) -> Row:
    soft = _limit(box, "Max locked memory")
    if box.target == "cpu" or soft is None:
        return Row(
            "host.memlock", SKIP, "not needed" if box.target == "cpu" else "no /proc/self/limits", "unlimited"
        )
    if soft != "unlimited" and int(soft) < 64 * GIB:
        status = WARN if int(soft) < GIB else NOTE
        return Row(
            "host.memlock",
            status,
            f"{int(soft) / GIB:.2f} GiB",
            "unlimited",
            "pinned host memory (n-gram table, offload, InfiniBand) cannot be taken",
            "ulimit -l unlimited; compose.yaml has it; systemd: LimitMEMLOCK=infinity",
        )
    return Row("host.memlock", OK, soft, "unlimited")


@check("host.open_files")
def open_files(box: Box) -> Row:
    soft = _limit(box, "Max open files")
    if soft is None:
        return Row("host.open_files", SKIP, "no /proc/self/limits", "8192")
    if soft != "unlimited" and int(soft) < 8192:
        return Row("host.open_files", WARN, soft, "8192", "each stream holds sockets", "ulimit -n 65536")
    return Row("host.open_files", OK, soft, "8192")


@check("host.processes")
def process_limit(box: Box) -> Row:
    soft = _limit(box, "Max processes")
    if soft is None:
        return Row("host.processes", SKIP, "no /proc/self/limits", "4096")
    if soft != "unlimited" and int(soft) < 4096:
        return Row(
            "host.processes",
            WARN,
            soft,
            "4096",
            "four ranks and Triton start several hundred threads",
            "ulimit -u 16384",
        )
    return Row("host.processes", OK, soft, "4096")


@check("host.huge_pages")
def huge_pages(box: Box) -> Row:
    text = box.host.read("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    match = re.search(r"\[(\w+)\]", text)
    if not match:
        return Row("host.huge_pages", SKIP, "no /sys/kernel/mm/transparent_hugepage", "madvise or always")
    if match.group(1) == "never":
        return Row(
            "host.huge_pages",
            NOTE,
            "never",
            "madvise or always",
            "look-ups in a large host table miss the TLB more",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return Row("host.huge_pages", OK, match.group(1), "madvise or always")


@check("host.governor", 82)
def governor(box: Box) -> Row:
    paths = box.host.glob("/sys/devices/system/cpu/cpu[0-9]*/cpufreq/scaling_governor")
    found = sorted({(box.host.read(path) or "").strip() for path in paths})
    if not found:
        return Row("host.governor", SKIP, "no cpufreq (virtual machine)", "performance or schedutil")
    if "powersave" in found:
        return Row(
            "host.governor",
            WARN,
            ", ".join(found),
            "performance",
            "a decode step is some ms of launches by one core: a slow core is a slow model",
            "`cpupower frequency-set -g performance`",
        )
    return Row("host.governor", OK, ", ".join(found), "performance or schedutil")


@check("host.cores", 82)
def cores(box: Box) -> Row:
    count = len(re.findall(r"^processor\s*:", box.host.read("/proc/cpuinfo") or "", re.MULTILINE))
    need = 1 if box.target == "cpu" else 2 * box.wanted_gpus
    if not count:
        return Row("host.cores", SKIP, "no /proc/cpuinfo", f"{need}")
    if count < need:
        return Row(
            "host.cores",
            WARN,
            str(count),
            str(need),
            "each rank keeps one core busy, Triton and the engine want the rest",
            "more cores for the machine or the container",
        )
    return Row("host.cores", OK, str(count), str(need))


@check("host.container")
def container(box: Box) -> Row:
    inside = box.host.read("/.dockerenv") is not None or bool(
        re.search(r"docker|kubepods|containerd", box.host.read("/proc/1/cgroup") or "")
    )
    if inside:
        return Row("host.container", NOTE, "inside a container", "any", "limits above are the container's")
    docker = box.host.run("docker-info", ["docker", "info", "--format", "{{json .Runtimes}}"])
    if docker.missing:
        return Row(
            "host.container", NOTE, "no docker command", "only for docker/", "serving needs no container"
        )
    if not docker.ok:
        said = (docker.err.strip() or "no answer").splitlines()[-1]
        return Row(
            "host.container",
            NOTE,
            f"docker does not answer: {said}",
            "only for docker/",
            "",
            "`systemctl start docker`; group docker",
        )
    if box.target != "cpu" and "nvidia" not in docker.out:
        return Row(
            "host.container",
            WARN,
            "docker without the nvidia runtime",
            "nvidia runtime",
            "containers see no card",
            "install nvidia-container-toolkit, `nvidia-ctk runtime configure --runtime=docker`, restart docker",
        )
    return Row(
        "host.container",
        OK,
        "docker" + (" with the nvidia runtime" if "nvidia" in docker.out else ""),
        "docker",
    )


@check("host.wsl", 37)
def wsl(box: Box) -> Row:
    if not box.is_wsl:
        return Row("host.wsl", OK, "not WSL", "Linux")
    release = (box.host.read("/proc/sys/kernel/osrelease") or "?").strip()
    if "WSL2" not in release and "microsoft-standard" not in release:
        return Row(
            "host.wsl", FAIL, f"WSL1 ({release})", "WSL2", "WSL1 has no GPU", "`wsl --set-version DISTRO 2`"
        )
    return Row(
        "host.wsl",
        WARN,
        f"WSL2 ({release})",
        "Linux for production",
        "V100 in WSL2 needs WDDM mode and has no P2P: "
        "one card works best; NVIDIA lists no support for Tesla cards there",
        "docs/windows.md",
    )


@check("host.leftovers", 79)
def leftovers(box: Box) -> Row:
    """Engine processes whose parent is init: their server died and left the cards' memory taken."""
    found = []
    for path in box.host.glob("/proc/[0-9]*/stat"):
        match = re.match(r"(\d+) \((VLLM::[^)]*)\) \S (\d+) ", box.host.read(path) or "")
        if match and match.group(3) == "1":
            found.append(f"{match.group(2)} (pid {match.group(1)})")
    if found:
        return Row(
            "host.leftovers", WARN, ", ".join(found), "none", "they hold GPU memory", "`kill -9` each pid"
        )
    return Row("host.leftovers", OK, "none", "none")
