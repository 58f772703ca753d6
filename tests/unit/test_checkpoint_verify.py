"""`voltriton verify`: sound checkpoints pass, every kind of fault is named, and the numbers are right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_tiny import CONFIG, tiny_weights, write_folder
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from voltriton.checkpoint import convert
from voltriton.checkpoint.codec import Rule, dequantise
from voltriton.checkpoint.comparison import layer_errors, passed, quality
from voltriton.checkpoint.source import Source
from voltriton.checkpoint.verify import expanded_model, main

Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=list(Rule), ids=str)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A 16-bit folder and its NVFP4 checkpoint."""
    source = write_folder(tmp_path / "hf", tiny_weights(), tokenizer=True)
    assert convert.main([str(source), str(tmp_path / "ckpt"), "--layout", request.param]) == 0
    return source, tmp_path / "ckpt"


def test_a_sound_checkpoint_passes_and_is_reported(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, checkpoint = pair
    (tmp_path / "t.txt").write_text("Once upon a time there was a model. " * 40)
    options = ["--text", str(tmp_path / "t.txt"), "--tokens", "256", "--window", "64", "--min-agreement", "0"]
    reports = ["--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]
    capsys.readouterr()
    # A model of random numbers may well answer with nothing: then that is the one fault.
    code = main([str(checkpoint), "--against", str(source), *options, *reports])
    text = capsys.readouterr().out
    assert code == (1 if "no sensible answer" in text else 0)
    assert "all 20 parameters of the configuration are there" in text
    assert "ok    tensor parallel 2" in text
    assert "no    tensor parallel 8: 4 attention heads are not divisible by 8" in text
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["layers"]) == 14
    assert result["quality"]["tokens"] == 4 * 63
    page = (tmp_path / "r.html").read_text()
    assert page.count("<svg") == 2
    assert page.count("<rect") == 28


def test_weight_errors_are_the_plain_formula(pair: tuple[Path, Path]) -> None:
    source, checkpoint = Source(pair[0]), Source(pair[1])
    original = load_file(pair[0] / "model.safetensors")
    for error in layer_errors(checkpoint, source):
        w = checkpoint.nvfp4[error.module]
        back = dequantise(w.packed.rows(), w.scale.rows(), w.global_scale.rows().reshape(()), w.rule)
        wide = original[f"{error.module}.weight"].float()
        relative = float((back - wide).norm() / wide.norm())
        assert error.relative == pytest.approx(relative, rel=1e-4)
        assert error.snr_db == pytest.approx(-20 * math.log10(relative), abs=1e-2)
        block = slice(error.worst_column, error.worst_column + 16)
        difference = (back - wide)[error.worst_row, block].norm() / wide[error.worst_row, block].norm()
        assert error.worst_block == pytest.approx(float(difference), rel=1e-4)


def test_quality_is_that_of_the_whole_models(pair: tuple[Path, Path]) -> None:
    source, checkpoint = Source(pair[0]), Source(pair[1])
    ids = [torch.randint(0, 96, (1, 80)) for _ in range(3)]
    got = quality(checkpoint, passed(source, ids), ids)
    base = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    ours = expanded_model(checkpoint)
    with torch.no_grad():
        p = torch.cat([base(i).logits[0, :-1].log_softmax(-1) for i in ids])
        q = torch.cat([ours(i).logits[0, :-1].log_softmax(-1) for i in ids])
    target = torch.cat([i[0, 1:] for i in ids])
    rows = torch.arange(len(target))
    assert got.tokens == len(target) == 3 * 79
    assert got.perplexity == pytest.approx(math.exp(-q[rows, target].mean()), rel=1e-4)
    assert got.source_perplexity == pytest.approx(math.exp(-p[rows, target].mean()), rel=1e-4)
    assert got.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert got.agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))


def change(name_end: str, edit: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    """Edit the first tensor whose name ends so; None removes it."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        name = next(n for n in sorted(tensors) if n.endswith(name_end))
        value = edit(tensors.pop(name))
        save_file(tensors if value is None else tensors | {name: value}, folder / "model.safetensors")

    return apply


def poke(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def edit(tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.float()
        wide.reshape(-1)[5 % wide.numel()] = value
        return wide.to(tensor.dtype)

    return edit


def set_config(**values: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return apply


def forget_ignored(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", "*.mlp.up_proj"]
    (folder / "config.json").write_text(json.dumps(config))


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "scale missing": (change("down_proj.weight_scale", lambda t: None), "weight_scale is missing"),
    "scale zero": (
        change("down_proj.weight_scale", poke(0.0)),
        "mlp.down_proj: the scale of row 0, block 5 is 0.0",
    ),
    "scale NaN": (
        change("k_proj.weight_scale", poke(math.nan)),
        "self_attn.k_proj: the scale of row 1, block 1 is nan",
    ),
    "scale shape": (change("k_proj.weight_scale", lambda t: t[:, :2].clone()), "do not fit weights (32, 64)"),
    "NaN in 16 bit": (change("embed_tokens.weight", poke(math.nan)), "embed_tokens.weight has NaN"),
    "norm missing": (change("model.norm.weight", lambda t: None), "model.norm.weight is missing"),
    "another size": (
        set_config(intermediate_size=256),
        "has shape (128, 64), the configuration says (256, 64)",
    ),
    "quantised and ignored": (forget_ignored, "mlp.up_proj is quantised but in the ignore list"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer cannot be loaded"),
    "small vocabulary": (
        change("embed_tokens.weight", lambda t: t[:90].clone()),
        "embed_tokens.weight has shape",
    ),
    "cut off": (lambda f: (f / "model.safetensors").write_bytes(b"\x40"), "not a safetensors file"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_named(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "hf", tiny_weights(), tokenizer=True)
    assert convert.main([str(source), str(tmp_path / "ckpt")]) == 0
    damage, text = FAULTS[case]
    damage(tmp_path / "ckpt")
    capsys.readouterr()
    assert main([str(tmp_path / "ckpt"), "--no-chat"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert text in lines[0]


def test_global_scale_of_zero(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    leaf = "weight_global_scale" if (pair[1] / "hf_quant_config.json").exists() is False else "weight_scale_2"
    change(leaf, torch.zeros_like)(pair[1])
    assert main([str(pair[1]), "--no-chat"]) == 1
    assert "is 0.0, not finite and positive" in capsys.readouterr().err


def test_limits_decide_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "hf", tiny_weights(), tokenizer=True)
    assert convert.main([str(source), str(tmp_path / "ckpt")]) == 0
    (tmp_path / "t.txt").write_text("Once upon a time there was a model. " * 40)
    options = ["--text", str(tmp_path / "t.txt"), "--tokens", "128", "--window", "64", "--no-chat"]
    assert main([str(tmp_path / "ckpt"), "--against", str(source), *options, "--min-agreement", "1.01"]) == 1
    assert "same most likely token" in capsys.readouterr().err
    assert main([str(tmp_path / "ckpt"), "--against", str(source), *options, "--min-agreement", "0"]) == 0


def test_a_16_bit_folder_is_no_nvfp4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_folder(tmp_path / "hf", tiny_weights(), CONFIG, tokenizer=True)
    assert main([str(source)]) == 1
    assert "is no NVFP4 checkpoint" in capsys.readouterr().err
