"""Checkpoints of `voltriton convert` in vLLM as it is published: no patch, no plugin (Marlin's kernels on Hopper).

Each against float32 on the numbers that the checkpoint says, and so is our engine on the code path of a V100, with the
bounds of test_engine_volta. The published vLLM is a copy of the installed one, out of which the patches are taken.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import reference  # noqa: E402
import test_engine_volta as volta  # noqa: E402
from test_engine_volta import models  # noqa: E402, F401  # a fixture
from voltriton.checkpoint.convert import main as convert  # noqa: E402
from voltriton.patching import series, tree  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

SCHEMES = {
    "compressed-tensors NVFP4A16": ["--scales", "mse"],
    "compressed-tensors NVFP4": ["--scheme", "w4a4"],
    "ModelOpt W4A16_NVFP4": ["--layout", "modelopt"],
    "ModelOpt NVFP4": ["--layout", "modelopt", "--scheme", "w4a4"],
}
TEXT = "hello world, this is a test of the tokenizer; once more with feeling, a zebra. " * 40
ARCHS = ["qwen3", "qwen3_moe"]
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"max_num_seqs": 8, "attention_backend": "TRITON_ATTN"},
    "graphs": {"max_num_seqs": 8, "attention_backend": "TRITON_ATTN", "enforce_eager": False},
}


def _link(source: str, target: str) -> None:
    """Of gigabytes of libraries no copy; taking patches out writes new files."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    installed, folder = tree.find_tree(None), tmp_path_factory.mktemp("stock")
    if not list((installed.root / "vllm").glob("_C_stable_libtorch*.so")):
        pytest.skip("the installed vLLM has no compiled extensions")
    for part in (installed.root / "vllm", *installed.root.glob("vllm-*.dist-info")):
        shutil.copytree(part, folder / part.name, copy_function=_link)
    ours = series.load(series.default_folder())
    tree.revert(tree.find_tree(folder), ours)
    assert set(tree.states(tree.find_tree(folder), ours).values()) == {tree.PINNED}
    return folder


@pytest.fixture
def checkpoint(models: dict[str, Path], tmp_path: Path, arch: str, scheme: str) -> Path:  # noqa: F811
    (tmp_path / "text.txt").write_text(TEXT)
    options = [*SCHEMES[scheme]]
    if "w4a4" in options:
        options += ["--calib", str(tmp_path / "text.txt"), "--calib-tokens", "512", "--calib-window", "128"]
    assert convert([str(models[arch] / "base"), str(tmp_path / "nvfp4"), *options]) == 0
    return tmp_path / "nvfp4"


@pytest.fixture
def numbers(models: dict[str, Path], checkpoint: Path, tmp_path: Path, arch: str) -> Path:  # noqa: F811
    return reference.with_the_same_numbers(checkpoint, models[arch] / "base", tmp_path / "numbers")


def check(case: str, arch: str, numbers: Path, found: dict[str, Any]) -> None:
    """With experts the mean of all positions says at how many near-ties a router went the other way, and no more."""
    volta.check(case, arch, numbers, found, all_positions=arch == "qwen3")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("way", list(WAYS))
def test_a_converted_checkpoint_in_a_published_vllm(
    stock: Path, checkpoint: Path, numbers: Path, tmp_path: Path, arch: str, scheme: str, way: str
) -> None:
    path = {"PYTHONPATH": f"{stock}:{os.environ.get('PYTHONPATH', '')}", "VLLM_PLUGINS": ""}
    done = volta.start(checkpoint, tmp_path / "out.pt", WAYS[way], **path)
    log = done.stdout + done.stderr
    assert "voltriton" not in log.replace(str(volta.ROOT), ""), "no plugin of ours was to be loaded"
    chosen = [line.partition("] ")[2] for line in log.splitlines() if "NvFp4" in line and "Using" in line]
    volta.report(f"{arch}, {scheme}, {way}", chosen)
    check(f"{scheme}, published vLLM, {way}", arch, numbers, volta.result(done, tmp_path / "out.pt"))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("scheme", list(SCHEMES))
def test_a_converted_checkpoint_on_the_path_of_a_v100(
    checkpoint: Path, numbers: Path, tmp_path: Path, arch: str, scheme: str
) -> None:
    ours = volta.run_engine(checkpoint, tmp_path / "ours.pt", {"max_num_seqs": 8})
    check(f"{scheme}, ours", arch, numbers, ours)
