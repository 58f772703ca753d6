"""`voltriton convert`: what is written, from which sources, and what bad input gets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tiny import CONFIG, LINEARS, tiny_weights, write_folder
from safetensors.torch import load_file, save_file
from test_checkpoint_gguf import write_gguf
from voltriton.checkpoint import folder as folder_module
from voltriton.checkpoint.codec import Rule, dequantise, quantise
from voltriton.checkpoint.convert import main
from voltriton.checkpoint.scales import max_scales
from voltriton.cli import main as voltriton


def convert(source: Path, out: Path, *options: str) -> dict[str, torch.Tensor]:
    assert main([str(source), str(out), *options]) == 0
    return load_all(out)


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a failing run prints."""
    capsys.readouterr()
    assert main(list(argv)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def left_over(parent: Path, *expected: str) -> list[str]:
    return sorted(p.name for p in parent.iterdir() if p.name not in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_every_matrix_of_a_layer_is_quantised_and_the_rest_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = tiny_weights(dtype)
    made = convert(write_folder(tmp_path / "a model", weights), tmp_path / "out")
    for name, weight in weights.items():
        if name.removeprefix("model.layers.0.").removesuffix(".weight") not in LINEARS and "proj" not in name:
            assert torch.equal(made[name], weight)
    stem = "model.layers.1.mlp.down_proj"
    wide = weights[f"{stem}.weight"].float()
    rule = Rule.COMPRESSED_TENSORS
    top = rule.global_scale(wide.abs().max())
    scale = max_scales(wide, top, rule)
    assert torch.equal(made[f"{stem}.weight_global_scale"], top.reshape(1))
    assert torch.equal(made[f"{stem}.weight_scale"].float(), scale.float())
    assert torch.equal(made[f"{stem}.weight_packed"], quantise(wide, scale, top, rule))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert set(config["quantization_config"]["ignore"]) == {"lm_head", "model.embed_tokens"}


def test_fused_layers_share_one_global_scale(tmp_path: Path) -> None:
    weights = tiny_weights()
    weights["model.layers.0.self_attn.k_proj.weight"] *= 5
    made = convert(write_folder(tmp_path / "in", weights), tmp_path / "out", "--layout", "modelopt")
    stem = "model.layers.0."
    attention = {made[f"{stem}self_attn.{p}_proj.weight_scale_2"].item() for p in "qkv"}
    mlp = {made[f"{stem}mlp.{p}_proj.weight_scale_2"].item() for p in ("gate", "up")}
    assert len(attention) == len(mlp) == 1
    largest = weights["model.layers.0.self_attn.k_proj.weight"].abs().max().float()
    assert attention == {(largest / 2688).item()}


def test_modelopt_layout(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", tiny_weights())
    made = convert(source, tmp_path / "out", "--layout", "modelopt", "--scales", "mse")
    stem = "model.layers.0.self_attn.q_proj"
    assert made[f"{stem}.weight"].dtype is torch.uint8
    assert made[f"{stem}.weight_scale"].dtype is torch.float8_e4m3fn
    assert made[f"{stem}.weight_scale_2"].shape == ()
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    legacy = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"]
    assert config["quant_algo"] == legacy["quant_algo"] == "W4A16_NVFP4"
    assert config["ignore"] == legacy["exclude_modules"]


def test_from_one_layout_to_the_other_and_back_keeps_every_byte(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", tiny_weights())
    first = convert(source, tmp_path / "ct")
    other = convert(tmp_path / "ct", tmp_path / "mo", "--layout", "modelopt")
    back = convert(tmp_path / "mo", tmp_path / "ct2")
    stem = "model.layers.0.mlp.up_proj"
    assert torch.equal(other[f"{stem}.weight"], first[f"{stem}.weight_packed"])
    assert other[f"{stem}.weight_scale_2"].item() == pytest.approx(
        1 / first[f"{stem}.weight_global_scale"].item()
    )
    assert set(back) == set(first)
    for name in first:
        exact = not name.endswith("global_scale")  # 1 / (1 / x) may differ in the last bit
        assert (
            torch.equal(back[name], first[name])
            if exact
            else torch.allclose(back[name], first[name], rtol=2e-7)
        )


def test_fp8_blocks_are_expanded_first(tmp_path: Path) -> None:
    weights = {k: v for k, v in tiny_weights(torch.float32).items() if "layers.1" not in k}
    expected, stored = {}, {}
    for name, weight in weights.items():
        if "proj" not in name:
            stored[name] = weight.bfloat16()
            continue
        scale = torch.rand([-(-n // 48) for n in weight.shape]) + 0.5
        quantised = weight.to(torch.float8_e4m3fn)
        stored |= {name: quantised, f"{name}_scale_inv": scale}
        wide = scale.repeat_interleave(48, 0)[: weight.shape[0]].repeat_interleave(48, 1)[
            :, : weight.shape[1]
        ]
        expected[name] = quantised.float() * wide
    quantization = {"quant_method": "fp8", "weight_block_size": [48, 48]}
    source = write_folder(tmp_path / "in", stored, CONFIG | {"quantization_config": quantization})
    made = convert(source, tmp_path / "out", "--exclude", "*.o_proj")
    stem = "model.layers.0.mlp.down_proj"
    wide = expected[f"{stem}.weight"]
    top = made[f"{stem}.weight_global_scale"]
    assert top.item() == Rule.COMPRESSED_TENSORS.global_scale(wide.abs().max()).item()
    parts = made[f"{stem}.weight_packed"], made[f"{stem}.weight_scale"], top.reshape(())
    assert (dequantise(*parts, Rule.COMPRESSED_TENSORS) - wide).norm() < 0.12 * wide.norm()
    kept = "model.layers.0.self_attn.o_proj.weight"
    assert torch.equal(made[kept], expected[kept].bfloat16())
    assert not [name for name in made if "scale_inv" in name]


def test_stacked_experts_become_one_matrix_each(tmp_path: Path) -> None:
    weights = {"model.embed_tokens.weight": torch.randn(96, 64)}
    stem = "model.language_model.layers.0.mlp"
    both, down = torch.randn(3, 64, 64), torch.randn(3, 64, 32)
    weights |= {f"{stem}.experts.gate_up_proj": both, f"{stem}.experts.down_proj": down}
    weights |= {f"{stem}.gate.weight": torch.randn(3, 64)}
    config = {"model_type": "qwen3_5_moe", "text_config": {"model_type": "qwen3_5_moe_text"}}
    made = convert(write_folder(tmp_path / "in", weights, config), tmp_path / "out")
    up = f"{stem}.experts.2.up_proj"
    parts = [made[f"{up}.{leaf}"] for leaf in ("weight_packed", "weight_scale", "weight_global_scale")]
    back = dequantise(parts[0], parts[1], parts[2].reshape(()), Rule.COMPRESSED_TENSORS)
    assert (back - both[2, 32:]).norm() < 0.12 * both[2, 32:].norm()
    assert torch.equal(made[f"{stem}.gate.weight"], weights[f"{stem}.gate.weight"])
    assert f"{stem}.experts.gate_up_proj" not in made


def test_include_and_exclude_win_over_the_table(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", tiny_weights())
    made = convert(source, tmp_path / "out", "--include", "model.embed_tokens", "--exclude", "*.layers.0.*")
    assert "model.embed_tokens.weight_packed" in made
    assert "model.layers.0.mlp.up_proj.weight" in made
    assert "model.layers.1.mlp.up_proj.weight_packed" in made
    ignore = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.up_proj" in ignore


def test_sharded_in_and_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny_weights()
    source = write_folder(tmp_path / "in", weights)
    (source / "model.safetensors").unlink()
    names = sorted(weights)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({n: weights[n] for n in members}, source / file)
    weight_map = {n: file for file, members in files.items() for n in members}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    monkeypatch.setattr(folder_module, "shards_of", lambda specs: shards(specs, 20_000))
    sharded = convert(source, tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert set(index["weight_map"]) == set(sharded)
    monkeypatch.undo()
    whole = convert(write_folder(tmp_path / "in2", weights), tmp_path / "out2")
    assert all(torch.equal(whole[n], sharded[n]) for n in whole)


shards = folder_module.shards_of


def test_any_number_of_jobs_gives_the_same_bytes(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", tiny_weights())
    convert(source, tmp_path / "one", "--jobs", "1")
    convert(source, tmp_path / "four", "--jobs", "4")
    one, four = ((tmp_path / n / "model.safetensors").read_bytes() for n in ("one", "four"))
    assert one == four


KILLED = """
import os, signal, sys
from voltriton.checkpoint import folder
from voltriton.checkpoint.convert import main
folder.SYNC_BYTES = 1
real, count = folder.ModelFolder.finish, 0
def finish(self, *names):
    global count
    real(self, *names)
    count += 1
    if count == 6:
        os.kill(os.getpid(), signal.SIGKILL)
folder.ModelFolder.finish = finish
main(sys.argv[1:])
"""


def test_a_killed_run_leaves_no_model_and_is_taken_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_folder(tmp_path / "in", tiny_weights())
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(source), str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    journal = (tmp_path / ".out.partial" / ".journal").read_text().splitlines()
    done = set(journal[1:])
    assert len(done) >= 6
    written: set[str] = set()
    real = folder_module.ModelFolder.write

    def write(self: Any, name: str, offset: int, data: torch.Tensor) -> None:
        written.add(name)
        real(self, name, offset, data)

    monkeypatch.setattr(folder_module.ModelFolder, "write", write)
    resumed = convert(source, out)
    assert not written & done
    monkeypatch.undo()
    fresh = convert(source, tmp_path / "fresh")
    assert all(torch.equal(fresh[n], resumed[n]) for n in fresh)
    assert left_over(tmp_path, "in", "out", "fresh") == []


def test_a_killed_calibration_and_a_killed_gguf_run_go_on(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", "qwen3")
    (tmp_path / "t.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    calib = [
        "--calib",
        str(tmp_path / "t.txt"),
        "--calib-tokens",
        "256",
        "--calib-window",
        "64",
        "--jobs",
        "1",
    ]
    command = [str(tmp_path / "m.gguf"), str(tmp_path / "out"), *calib]
    # Its 16-bit folder has more than six tensors to finish as well: kill only in the second step.
    script = KILLED.replace("if count == 6:", "if count == 6 and 'weight_packed' in str(names):")
    script = script.replace("    count += 1\n", "    count += 'weight_packed' in str(names)\n")
    killed = subprocess.run([sys.executable, "-c", script, *command], check=False)
    assert killed.returncode == -signal.SIGKILL
    (work,) = tmp_path.glob(".out.gguf-*")
    before = (work / "hf" / "model.safetensors").stat().st_mtime_ns
    assert len((tmp_path / ".out.partial" / ".journal").read_text().splitlines()) > 6
    stopped = subprocess.run([sys.executable, "-c", script.replace("== 6", "== 2"), *command], check=False)
    assert stopped.returncode == -signal.SIGKILL
    assert (work / "hf" / "model.safetensors").stat().st_mtime_ns == before
    assert main(command) == 0
    assert main([*command[:1], str(tmp_path / "fresh"), *calib]) == 0
    fresh, resumed = load_all(tmp_path / "fresh"), load_all(tmp_path / "out")
    assert all(torch.equal(fresh[n].view(torch.uint8), resumed[n].view(torch.uint8)) for n in fresh)
    assert left_over(tmp_path, "m.gguf", "t.txt", "out", "fresh") == []


def test_a_journal_of_other_options_is_void(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", tiny_weights())
    subprocess.run([sys.executable, "-c", KILLED, str(source), str(tmp_path / "out")], check=False)
    made = convert(source, tmp_path / "out", "--scales", "mse")
    fresh = convert(source, tmp_path / "fresh", "--scales", "mse")
    assert all(torch.equal(fresh[n], made[n]) for n in fresh)


MEASURED = """
import resource, sys
from voltriton.checkpoint.convert import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main(sys.argv[1:]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_tensor(tmp_path: Path) -> None:
    weights = {
        f"model.layers.0.mlp.{n}_proj.weight": torch.randn(8192, 4096).bfloat16() for n in ("down", "up")
    }
    source = write_folder(tmp_path / "in", weights)
    command = [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    grown_mb = int(done.stdout.split()[-1]) / 1024
    assert grown_mb < 150  # the tensors are 67 MB each; the promise is 2x the largest plus 1 GB


def cut(source: Path) -> None:
    os.truncate(source / "model.safetensors", 40_000)


def scramble(source: Path) -> None:
    with (source / "model.safetensors").open("r+b") as file:
        file.seek(20)
        file.write(b"\xff\xfe{{{")


def poison(source: Path) -> None:
    weights = tiny_weights()
    weights["model.layers.1.mlp.up_proj.weight"][7, 3] = torch.nan
    save_file(weights, source / "model.safetensors")


def odd_shape(source: Path) -> None:
    weights = tiny_weights() | {"model.layers.1.mlp.down_proj.weight": torch.randn(64, 120)}
    save_file(weights, source / "model.safetensors")


def set_config(**values: Any) -> Any:
    def change(source: Path) -> None:
        (source / "config.json").write_text(json.dumps(CONFIG | values))

    return change


BAD = {
    "cut off": (cut, "cut off"),
    "damaged header": (scramble, "header is damaged"),
    "empty file": (lambda s: os.truncate(s / "model.safetensors", 0), "not a safetensors file"),
    "NaN": (poison, "model.layers.1.mlp.up_proj.weight has NaN"),
    "not a multiple of 16": (odd_shape, "64x120"),
    "no weights": (lambda s: (s / "model.safetensors").unlink(), "no model.safetensors"),
    "no config": (lambda s: (s / "config.json").unlink(), "config.json is missing"),
    "damaged config": (lambda s: (s / "config.json").write_text("{"), "config.json is damaged"),
    "wrong architecture": (set_config(model_type="bert"), "'bert' is not known"),
    "quantised already": (
        set_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "already quantised (gptq",
    ),
    "half an index": (
        lambda s: (s / "model.safetensors.index.json").write_text(
            '{"weight_map": {"x": "gone.safetensors"}}'
        ),
        "gone.safetensors is missing",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_source(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, text = BAD[case]
    source = write_folder(tmp_path / "in", tiny_weights())
    damage(source)
    assert text in refused(capsys, str(source), str(tmp_path / "out"))
    assert left_over(tmp_path, "in") == []


def test_output_that_is_not_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "in", tiny_weights())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep me")
    assert "not empty" in refused(capsys, str(source), str(tmp_path / "out"))
    assert (tmp_path / "out" / "mine.txt").read_text() == "keep me"


def test_same_layout_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "in", tiny_weights())
    convert(source, tmp_path / "out")
    assert "layout already" in refused(capsys, str(tmp_path / "out"), str(tmp_path / "again"))


def test_nothing_matches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "in", tiny_weights())
    assert "nothing to quantise" in refused(capsys, str(source), str(tmp_path / "out"), "--exclude", "*")
    for option in ("--include", "--exclude"):
        words = refused(capsys, str(source), str(tmp_path / "out"), option, r"layers\.[01]")
        assert rf"{option}: 'layers\\.[01]' matches no matrix" in words and "model." in words


FULL = """
import os, subprocess, sys
from voltriton.checkpoint import folder
from voltriton.checkpoint.convert import main
disk = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", disk], check=True)
main([*sys.argv[2:], disk + "/out"])
folder.check_free_disk = lambda *_: None  # others fill it while we write
main([*sys.argv[2:], disk + "/out"])
print(os.listdir(disk))
"""


@pytest.mark.parametrize("calib", [False, True])
def test_full_disk(calib: bool, tmp_path: Path) -> None:
    """A real one of 200 kB, in a mount namespace of its own."""
    if subprocess.run(["unshare", "-Urm", "true"], check=False, capture_output=True).returncode:
        pytest.skip("no user namespaces on this machine")
    config = CONFIG | {"num_hidden_layers": 12}
    source = write_folder(tmp_path / "in", tiny_weights(layers=12), config, tokenizer=True)
    (tmp_path / "t.txt").write_text("The quick brown fox jumps over the lazy dog. " * 60)
    (tmp_path / "disk").mkdir()
    options = ["--calib", str(tmp_path / "t.txt"), "--calib-window", "64"] if calib else []
    command = ["unshare", "-Urm", sys.executable, "-c", FULL, str(tmp_path / "disk"), str(source), *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    before, during = [line for line in done.stderr.splitlines() if line.startswith("voltriton")]
    assert "free disk" in before
    assert "No space left on device" in during
    assert done.stdout.splitlines()[-1] == "[]"


def test_two_writers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "in", tiny_weights())
    with folder_module.ModelFolder(tmp_path / "out", [], "other"):
        assert "another process" in refused(capsys, str(source), str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("command", "option", "least"),
    [
        ("convert", "--jobs", 0),
        ("convert", "--calib-tokens", 2),
        ("convert", "--calib-window", 2),
        ("convert", "--tune-tokens", 0),
        ("verify", "--tokens", 2),
        ("verify", "--window", 2),
    ],
)
def test_numbers_that_are_too_small_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, option: str, least: int
) -> None:
    out = tmp_path / "out"
    words = [str(tmp_path), str(out)] if command == "convert" else [str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        voltriton([command, *words, option, str(least - 1)])
    assert ended.value.code == 2
    assert f"argument {option}: got {least - 1}, allowed: {least} or more" in capsys.readouterr().err
    assert not out.exists()
