"""PyTorch, vLLM, our patches, Triton's compiler and NCCL: does each carry code for the cards found?"""

from __future__ import annotations

import re

from voltriton_vllm.nccl import LOWEST

from voltriton.doctor.box import Box
from voltriton.doctor.rows import FAIL, NOTE, OK, SKIP, WARN, Row, check
from voltriton.host.vllm_engine.builds import KNOWN

_ARCHITECTURE = {"v100": "sm_70", "hopper": "sm_90"}
_CU126 = (
    "`pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126`: the last line with sm_70"
)
# Before it, large all-reduces write out of bounds (trouble 36). Our vLLM asks for more: `voltriton_vllm.nccl`.
OLDEST_NCCL = (2, 27, 5)


@check("torch.version", 7, 8, 16, 23)
def torch_version(box: Box) -> Row:
    facts = box.software_part("torch")
    if "error" in facts:
        return Row(
            "torch.version",
            FAIL,
            str(facts["error"]),
            "PyTorch that imports",
            "vLLM is built on it",
            _CU126 if box.target == "v100" else "install the extra cpu or cuda of pyproject.toml",
        )
    cuda = facts.get("cuda")
    found = f"{facts.get('version')} (CUDA {cuda or 'none'})"
    if box.target == "cpu":
        return Row("torch.version", OK, found, "any build")
    if cuda is None:
        return Row("torch.version", FAIL, found, "a CUDA build", "a CPU build sees no card", _CU126)
    if box.target == "v100" and not str(cuda).startswith("12."):
        return Row(
            "torch.version",
            FAIL,
            found,
            "CUDA 12.x",
            "CUDA 13 dropped Volta; pip picks it by the driver's version (troubles 5 and 6)",
            _CU126,
        )
    return Row("torch.version", OK, found, "a CUDA build")


@check("torch.architectures", 3, 5, 6, 7, 8)
def torch_architectures(box: Box) -> Row:
    wanted = _ARCHITECTURE.get(box.target)
    facts = box.software_part("torch")
    if wanted is None or "error" in facts or facts.get("cuda") is None:
        return Row(
            "torch.architectures",
            SKIP,
            "no CUDA build of PyTorch" if wanted else "target cpu",
            wanted or "nothing",
        )
    listed = [str(item) for item in facts.get("architectures", [])]
    if wanted not in listed:
        return Row(
            "torch.architectures",
            FAIL,
            " ".join(listed) or "none",
            wanted,
            "'no kernel image is available' at the "
            "first operation: builds for CUDA 12.8 and later left Volta out",
            _CU126,
        )
    return Row("torch.architectures", OK, " ".join(listed), wanted)


@check("torch.runs", 4, 16, 35)
def torch_runs(box: Box) -> Row:
    facts = box.software_part("torch")
    if box.target == "cpu" or "error" in facts or facts.get("cuda") is None:
        return Row("torch.runs", SKIP, "not tried", "a matrix product on the card")
    if not facts.get("available"):
        return Row(
            "torch.runs",
            FAIL,
            f"no device: {facts.get('why_not', '?')}",
            "a matrix product on the card",
            "PyTorch cannot open the driver",
            "rows gpu.driver, env.variables and host.container; /dev/nvidia-uvm "
            "must exist (`nvidia-modprobe -u`)",
        )
    said = str(facts.get("run_on_gpu"))
    if said != "ok":
        return Row(
            "torch.runs",
            FAIL,
            said,
            "a matrix product on the card",
            "",
            "rows torch.architectures and gpu.ecc",
        )
    return Row(
        "torch.runs", OK, f"ok on {len(facts.get('devices', []))} device(s)", "a matrix product on the card"
    )


@check("vllm.version", 1, 2, 3, 10, 22)
def vllm_version(box: Box) -> Row:
    facts = box.software_part("vllm")
    builds = " or ".join(f"{name} {version}" for name, version in KNOWN.items())
    need = f"{builds}, outside the current folder"
    if "error" in facts:
        return Row(
            "vllm.version", FAIL, str(facts["error"]), need, "it is the engine", "`make setup` (README.md)"
        )
    version = str(facts.get("version")).split("+")[0]
    distribution = str(facts.get("distribution", "vllm"))
    found = f"{distribution} {facts.get('version')} in {facts.get('folder')}"
    if version != KNOWN.get(distribution):
        return Row(
            "vllm.version",
            FAIL,
            found,
            need,
            "the engine refuses every other build: its API was not checked",
            f"`pip install vllm=={KNOWN['vllm']}`",
        )
    if box.host.read(f"{str(facts.get('folder')).rpartition('/')[0]}/CMakeLists.txt") is not None:
        return Row(
            "vllm.version",
            WARN,
            found,
            need,
            "a source tree shadows the installed package (trouble 22)",
            "start from another folder",
        )
    return Row("vllm.version", OK, found, need)


@check("vllm.patches", 9, 10, 12)
def vllm_patches(box: Box) -> Row:
    facts = box.software_part("vllm")
    need = "our series, whole, and the plugin"
    if "error" in facts:
        return Row("vllm.patches", SKIP, "no vLLM", need)
    if not facts.get("plugin"):
        return Row(
            "vllm.patches",
            FAIL,
            "plugin voltriton is not installed in this Python",
            need,
            "NVFP4 does not load without it",
            "`pip install -e .` with the same Python",
        )
    if facts.get("patches"):
        return Row(
            "vllm.patches",
            FAIL,
            str(facts["patches"]),
            need,
            "gates refuse compute capability 7.0 and a missing hook means another route, silently",
            "`voltriton patch apply`",
        )
    return Row("vllm.patches", OK, f"series {facts.get('series') or 'of another build'}", need)


@check("vllm.extensions", 3, 4, 9, 16, 18, 20)
def vllm_extensions(box: Box) -> Row:
    """Every library of vLLM that has any GPU code must have it for the card."""
    wanted = _ARCHITECTURE.get(box.target)
    facts = box.software_part("vllm")
    if wanted is None or "error" in facts:
        return Row(
            "vllm.extensions", SKIP, "target cpu" if wanted is None else "no vLLM", wanted or "nothing"
        )
    codes = {path: box.host.device_code(path) for path in facts.get("libraries", [])}
    with_code = {path: found for path, found in codes.items() if found}
    need = f"{wanted} in each, or no compiled extension (the plugin supplies the operations)"
    lacking = [path.rsplit("/", 1)[-1] for path, found in with_code.items() if wanted not in found]
    if lacking:
        return Row(
            "vllm.extensions",
            FAIL if box.target == "v100" else WARN,
            f"without {wanted}: {', '.join(lacking)}",
            need,
            "'no kernel image' at the first use: PyPI's wheel begins at sm_75",
            "build vLLM's source package with "
            "TORCH_CUDA_ARCH_LIST=7.0 and nothing else (docker/Dockerfile.v100)",
        )
    if not with_code:
        return Row(
            "vllm.extensions",
            NOTE,
            "no compiled GPU extension",
            need,
            "custom all-reduce is then off by itself",
        )
    return Row("vllm.extensions", OK, f"{len(with_code)} with {wanted}", need)


@check("triton.compiler", 23, 24, 25, 26, 72)
def triton_compiler(box: Box) -> Row:
    facts = box.software_part("triton")
    if box.target == "cpu":
        return Row("triton.compiler", SKIP, "target cpu", "nothing")
    need = "3.x with a ptxas that knows sm_70" if box.target == "v100" else "3.x"
    if "error" in facts:
        return Row(
            "triton.compiler",
            FAIL,
            str(facts["error"]),
            need,
            "attention and sampling are Triton kernels",
            _CU126,
        )
    version = str(facts.get("version"))
    if version.split(".")[0] == "2":
        return Row(
            "triton.compiler",
            FAIL,
            version,
            need,
            "2.x gives zeros for fp16 dot products on Volta (trouble 26) and aborts with prefix caching (72)",
            "the version that PyTorch 2.13 asks for",
        )
    if box.target == "v100" and not facts.get("ptxas_sm_70"):
        return Row(
            "triton.compiler",
            FAIL,
            f"{version}, ptxas without sm_70",
            need,
            "a ptxas of CUDA 13 cannot make Volta code",
            "triton 3.7.1 or 3.9.0, or TRITON_PTXAS_PATH of a CUDA 12 toolkit",
        )
    return Row("triton.compiler", OK, version, need)


@check("nccl.loaded", 36)
def nccl_loaded(box: Box) -> Row:
    """The file mapped in a process that imports PyTorch first, as vLLM does; not the one that pip lists."""
    facts = box.software_part("nccl")
    ours = box.software_part("vllm").get("distribution", "vllm") == "vllm"
    oldest = LOWEST if ours else OLDEST_NCCL
    need = f"one library, {'.'.join(map(str, oldest))} or newer"
    if box.target == "cpu" or box.wanted_gpus == 1:
        return Row("nccl.loaded", SKIP, "one rank or none", need)
    if "error" in facts:
        return Row(
            "nccl.loaded",
            FAIL,
            str(facts["error"]),
            need,
            "ranks meet through it",
            "`pip install nvidia-nccl-cu12==2.30.7`",
        )
    files = [str(name) for name in facts.get("files", [])]
    found = f"{facts.get('version')} from {', '.join(files) or 'inside PyTorch'}"
    if len(files) > 1:
        return Row(
            "nccl.loaded",
            WARN,
            found,
            need,
            "two copies in one process: each has its own state",
            "unset LD_LIBRARY_PATH and VLLM_NCCL_SO_PATH, remove the system's libnccl2",
        )
    if _numbers(str(facts.get("version"))) < oldest:
        return Row(
            "nccl.loaded",
            FAIL,
            found,
            need,
            "older than 2.27.5 writes past the end for large tensors (trouble 36); vLLM 0.32 wants 2.29.7",
            "`pip install nvidia-nccl-cu12==2.30.7`",
        )
    return Row("nccl.loaded", OK, found, need)


@check("nccl.architectures", 36)
def nccl_architectures(box: Box) -> Row:
    wanted = _ARCHITECTURE.get(box.target)
    files = box.software_part("nccl").get("files", [])
    if wanted is None or not files or box.wanted_gpus == 1:
        return Row("nccl.architectures", SKIP, "nothing to look into", wanted or "nothing")
    found = box.host.device_code(str(files[0]))
    if wanted not in found:
        return Row(
            "nccl.architectures",
            FAIL,
            " ".join(found) or "no GPU code",
            wanted,
            "the first collective fails",
            "`pip install nvidia-nccl-cu12==2.30.7` (has sm_70)",
        )
    return Row("nccl.architectures", OK, " ".join(found), wanted)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
