"""Calibration: the layerwise pass is the model's, the chosen rounding is better, bad texts are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_tiny import CONFIG, LINEARS, tiny_tokenizer, tiny_weights, write_expert_folder, write_folder
from safetensors.torch import load_file
from test_checkpoint_gguf import NORMS, to_folder, write_gguf
from transformers import AutoModelForCausalLM
from voltriton.checkpoint import calibrate as calibrate_module
from voltriton.checkpoint import layers as layers_module
from voltriton.checkpoint import moments as moments_module
from voltriton.checkpoint.calibrate import token_bytes
from voltriton.checkpoint.codec import Rule, dequantise, quantise
from voltriton.checkpoint.convert import main
from voltriton.checkpoint.feedback import Basis, feedback_scales
from voltriton.checkpoint.layers import LayerwiseModel
from voltriton.checkpoint.moments import Moments, energy, group_sizes, importance
from voltriton.checkpoint.rounding import Recipe
from voltriton.checkpoint.scales import max_scales, searched_scales
from voltriton.checkpoint.source import Source
from voltriton.checkpoint.texts import windows

PROSE = "".join(
    f"The quick brown fox no. {i} jumps over {i * i} lazy dogs; {i % 7} did not. " for i in range(200)
)


def correlated_inputs(columns: int, count: int = 2000) -> torch.Tensor:
    """Inputs as real layers have them: a few strong directions, channels of very unlike size."""
    mix = torch.randn(columns // 4, columns)
    noise = torch.randn(count, columns)
    return (torch.randn(count, columns // 4) @ mix + noise) * torch.logspace(-1, 1, columns)


EXPERTS = ("qwen3_moe", "qwen3_next")


@pytest.mark.parametrize("family", [*NORMS, *EXPERTS])
def test_layer_by_layer_is_the_whole_model(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers_module, "BATCH_TOKENS", 96)  # two windows at a time, and one left
    if family in EXPERTS:
        write_expert_folder(tmp_path / "hf", family)
    else:
        write_gguf(tmp_path / "m.gguf", family)
        to_folder(tmp_path / "m.gguf", tmp_path / "hf", "--dtype", "float32")
    ids = [torch.randint(0, 96, (1, 48)) for _ in range(3)]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    layerwise = LayerwiseModel(Source(tmp_path / "hf"), ids)
    layerwise.forward()
    with torch.no_grad():
        whole = model.model(torch.cat(ids)).last_hidden_state
        got = model.model.norm(torch.cat(layerwise.states))
        torch.testing.assert_close(got, whole, rtol=1e-4, atol=1e-5)
        logits = torch.cat([part for _, part in layerwise.logits(2, 20)])
        torch.testing.assert_close(logits, model(ids[2]).logits[0], rtol=1e-4, atol=1e-4)


def test_a_layer_that_is_kept_is_the_one_that_is_read_again_and_bfloat16_is_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(write_folder(tmp_path / "hf", tiny_weights()))
    ids = [torch.randint(0, 96, (1, 48)) for _ in range(3)]

    def states(dtype: torch.dtype, kept_bytes: int) -> torch.Tensor:
        monkeypatch.setattr(layers_module, "KEPT_BYTES", kept_bytes)
        model = LayerwiseModel(source, ids, tmp_path, dtype)
        model.forward()
        return torch.cat(list(model.states))

    exact = states(torch.float32, 1 << 30)
    near = states(torch.bfloat16, 1 << 30)
    assert torch.equal(states(torch.float32, 0), exact)
    assert torch.equal(states(torch.bfloat16, 0), near)
    assert 0 < (near - exact).norm() < 0.01 * exact.norm()


def test_moments_in_bfloat16_are_near_and_can_be_factored() -> None:
    """Also with channels as unlike as those of real models, and more columns than tokens."""
    torch.manual_seed(0)
    inputs = torch.randn(8, 100, 256) * torch.where(torch.rand(256) < 0.02, 300.0, 1.0)
    exact, near = Moments(256), Moments(256, torch.bfloat16)
    for batch in inputs[:2]:
        for moments in (exact, near):
            moments.add(batch)
    (a,), (b,) = exact.groups(), near.groups()
    size = a.diagonal().sqrt()
    assert 0 < ((a - b) / size / size[:, None]).abs().max() < 0.01
    Basis.of(b, Recipe().shrink)


def test_wanted_inputs_are_those_of_the_layer_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer gets what it should; behind what was rounded in it, the difference is small but there."""
    seen: list[float] = []
    real = Moments.add

    def add(self: Moments, inputs: torch.Tensor, share: torch.Tensor, wanted: torch.Tensor) -> None:
        seen.append(float((inputs - wanted).norm() / inputs.norm()))
        real(self, inputs, share, wanted)

    monkeypatch.setattr(Moments, "add", add)
    calibrated(tmp_path, "out")
    qkv, o, gate_up, down, *later = seen
    assert qkv < 0.004  # they are kept in bfloat16
    assert all(0.004 < error < 0.3 for error in (o, gate_up, down, *later))


@pytest.mark.parametrize("rule", list(Rule))
def test_feedback_rounds_onto_the_grid_and_lowers_the_output_error(rule: Rule) -> None:
    torch.manual_seed(0)
    weight, inputs = torch.randn(48, 96), correlated_inputs(96)
    moments = Moments(96)
    moments.add(inputs)
    (h,) = moments.groups()
    top = rule.global_scale(weight.abs().max())

    def output_error(values: torch.Tensor) -> float:
        return float((inputs @ (values - weight).T).square().mean())

    rounded, scale = feedback_scales(weight, Basis.of(h, 0.0), top, rule)
    back = dequantise(quantise(rounded, scale, top, rule), scale, top, rule)
    torch.testing.assert_close(back, rounded, rtol=0, atol=0)
    by_search = searched_scales(weight, top, rule, h.diagonal())
    searched = dequantise(quantise(weight, by_search, top, rule), by_search, top, rule)
    by_max = max_scales(weight, top, rule)
    plain = dequantise(quantise(weight, by_max, top, rule), by_max, top, rule)
    assert output_error(back) < 0.8 * output_error(searched) < 0.8 * output_error(plain)


@pytest.mark.parametrize("rule", list(Rule))
def test_each_sweep_lowers_every_rows_error(rule: Rule) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 128)
    moments = Moments(128)
    moments.add(torch.randn(2000, 20) @ torch.randn(20, 128) + 0.3 * torch.randn(2000, 128))
    (h,) = moments.groups()
    top = rule.global_scale(weight.abs().max())
    basis = Basis.of(h, 0.0)
    errors = []
    for sweeps in (0, 1, 2):
        rounded, scale = feedback_scales(weight, basis, top, rule, sweeps)
        back = dequantise(quantise(rounded, scale, top, rule), scale, top, rule)
        torch.testing.assert_close(back, rounded, rtol=0, atol=0)
        gap = (weight - rounded)[:, basis.order]
        errors.append(((gap @ basis.moments) * gap).sum(-1))
    assert (errors[1] <= errors[0] * 1.0001).all()
    assert (errors[2] <= errors[1] * 1.0001).all()
    assert errors[2].mean() < 0.95 * errors[0].mean()


def test_correction_makes_up_for_what_earlier_layers_did() -> None:
    torch.manual_seed(0)
    weight, wanted = torch.randn(24, 32), torch.randn(2000, 32)
    given = wanted @ (torch.eye(32) + 0.1 * torch.randn(32, 32)) + 0.05 * torch.randn(2000, 32)
    share = torch.rand(2000) + 0.5
    moments = Moments(32)
    moments.add(given[:1500], share[:1500], wanted[:1500])
    moments.add(given[1500:], share[1500:], wanted[1500:])
    corrected, none = weight.clone(), weight.clone()
    moments.correct(corrected, 1.0)
    moments.correct(none, 0.0)
    assert torch.equal(none, weight)
    target = wanted @ weight.T
    assert (given @ corrected.T - target).square().mean() < 0.2 * (given @ weight.T - target).square().mean()


def test_feedback_without_correlation_is_the_weighted_search() -> None:
    torch.manual_seed(1)
    rule, weight = Rule.MODELOPT, torch.randn(16, 64)
    h = torch.diag(torch.rand(64) + 0.1)
    top = rule.global_scale(weight.abs().max())
    rounded, scale = feedback_scales(weight, Basis.of(h, 0.0), top, rule)
    by_search = searched_scales(weight, top, rule, h.diagonal() + 0.01 * h.diagonal().mean())
    assert (scale.float() == by_search.float()).float().mean() > 0.99
    plain = dequantise(quantise(weight, scale, top, rule), scale, top, rule)
    torch.testing.assert_close(rounded, plain, rtol=0, atol=0)


def test_a_token_with_huge_activations_does_not_rule(tmp_path: Path) -> None:
    """Moments of what is added to the residual stream weigh a token by one over the stream's energy there."""
    state = torch.randn(1, 100, 32)
    state[0, 0] *= 1000
    inputs = torch.randn(100, 48)
    inputs[0] *= 1000
    moments = Moments(48)
    moments.add(inputs, 1 / energy(state))
    (h,) = moments.groups()
    expected = sum(torch.outer(x, x) / s.square().mean() for x, s in zip(inputs, state[0], strict=True)) / 100
    torch.testing.assert_close(h, expected, rtol=1e-4, atol=1e-4)
    alone = torch.outer(inputs[0], inputs[0]) / state[0, 0].square().mean() / 100
    assert alone.trace() < 0.05 * h.trace()


def test_moments_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    assert group_sizes(1536) == [1536]
    assert group_sizes(8960) == [2992, 2992, 2976]
    monkeypatch.setattr(moments_module, "GROUP_COLUMNS", 32)
    inputs = torch.randn(50, 80)
    moments = Moments(80)
    moments.add(inputs[:20])
    moments.add(inputs[20:])
    whole = inputs.T @ inputs / 50
    begin = 0
    for part in moments.groups():
        end = begin + len(part)
        torch.testing.assert_close(part, whole[begin:end, begin:end], rtol=1e-5, atol=1e-5)
        begin = end
    assert begin == 80


@pytest.mark.parametrize("arch", EXPERTS)
def test_experts_are_calibrated(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several passes, each for as many experts as the memory allows; also those that see no token."""
    monkeypatch.setattr(calibrate_module, "STAGE_BYTES", 4 * 64**2 * 4)  # four experts
    source = write_expert_folder(tmp_path / "in", arch)
    (tmp_path / "text.txt").write_text(PROSE)
    ids = windows(tiny_tokenizer(), [tmp_path / "text.txt"], 512, 64, seed=99)
    passed: list[int] = []
    real = Moments.add

    def add(self: Moments, *args: Any) -> None:
        passed.append(len(args[0].reshape(-1, args[0].shape[-1])))
        real(self, *args)

    monkeypatch.setattr(Moments, "add", add)
    few = ["--calib", str(tmp_path / "text.txt"), "--calib-tokens", "4096", "--calib-window", "64"]
    assert main([str(source), str(tmp_path / "ours"), *few]) == 0
    assert main([str(source), str(tmp_path / "plain")]) == 0
    assert len(set(passed)) > 4  # experts see different numbers of tokens
    target, ours, plain = (states_of(tmp_path / name, ids) for name in ("in", "ours", "plain"))
    assert (ours - target).square().mean() < 0.7 * (plain - target).square().mean()


def states_of(folder: Path, ids: list[torch.Tensor]) -> torch.Tensor:
    model = LayerwiseModel(Source(folder), ids)
    model.forward()
    return torch.cat(model.states)


def test_an_expert_without_tokens_is_rounded_by_its_weights_alone() -> None:
    moments = Moments(32)
    moments.add(torch.zeros(0, 32))
    assert torch.equal(moments.groups()[0], torch.eye(32))


def calibrated(tmp_path: Path, out: str, *options: str) -> dict[str, torch.Tensor]:
    source = tmp_path / "in"
    if not source.exists():
        write_folder(source, tiny_weights(), tokenizer=True)
        (tmp_path / "text.txt").write_text(PROSE)
        chat = {"messages": [{"role": "user", "content": PROSE}, {"role": "assistant", "content": "Yes."}]}
        (tmp_path / "chat.jsonl").write_text(f"{json.dumps(chat)}\n\n{json.dumps({'text': PROSE})}\n")
    texts = ["--calib", str(tmp_path / "text.txt"), "--calib", str(tmp_path / "chat.jsonl")]
    amount = ["--calib-tokens", "512", "--calib-window", "64", "--jobs", "1"]
    assert main([str(source), str(tmp_path / out), *texts, *amount, *options]) == 0
    return load_file(tmp_path / out / "model.safetensors")


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    first = calibrated(tmp_path, "a")
    second = calibrated(tmp_path, "b")
    other = calibrated(tmp_path, "c", "--seed", "7")
    assert all(torch.equal(first[n].view(torch.uint8), second[n].view(torch.uint8)) for n in first)
    assert any(not torch.equal(first[n].view(torch.uint8), other[n].view(torch.uint8)) for n in first)


def logits_of(folder: Path, made: dict[str, torch.Tensor] | None, ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if made is not None and f"{module}.weight_packed" in made:
            parts = [
                made[f"{module}.{leaf}"] for leaf in ("weight_packed", "weight_scale", "weight_global_scale")
            ]
            parameter.data.copy_(
                dequantise(parts[0], parts[1], parts[2].reshape(()), Rule.COMPRESSED_TENSORS)
            )
    with torch.no_grad():
        logits: torch.Tensor = model(ids).logits
    return logits


def test_a_calibrated_model_is_closer_to_its_source(tmp_path: Path) -> None:
    ours = calibrated(tmp_path, "calibrated")
    assert main([str(tmp_path / "in"), str(tmp_path / "plain")]) == 0
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    ids = windows(tiny_tokenizer(), [tmp_path / "text.txt"], 512, 64, seed=99)
    ids = torch.cat(ids)
    target = logits_of(tmp_path / "in", None, ids)
    errors = [(logits_of(tmp_path / "in", made, ids) - target).square().mean() for made in (ours, plain)]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("layout", list(Rule))
def test_input_scales_are_the_largest_activation(layout: Rule, tmp_path: Path) -> None:
    made = calibrated(tmp_path, "w4a4", "--scheme", "w4a4", "--layout", layout)
    leaf = "input_global_scale" if layout is Rule.COMPRESSED_TENSORS else "input_scale"
    stem = "model.layers.0.self_attn."
    ids = windows(tiny_tokenizer(), [tmp_path / "text.txt", tmp_path / "chat.jsonl"], 512, 64, 0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.float32).model
    with torch.no_grad():
        amax = max(model.layers[0].input_layernorm(model.embed_tokens(i)).abs().max() for i in ids)
    assert {made[f"{stem}{p}_proj.{leaf}"].item() for p in "qkv"} == {layout.global_scale(amax).item()}
    config = json.loads((tmp_path / "w4a4" / "config.json").read_text())["quantization_config"]
    if layout is Rule.MODELOPT:
        assert config["quant_algo"] == "NVFP4"
    else:
        assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"


class Letters:
    """A tokenizer with a token a letter; `bos`: the one that it puts before a text, or None."""

    chat_template = None

    def __init__(self, bos: int | None) -> None:
        self._bos, self.bos_token_id = bos, 0

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        before = [self._bos] if add_special_tokens and self._bos is not None else []
        return {"input_ids": before + [ord(letter) for letter in text]}


@pytest.mark.parametrize("bos", [None, 0])
def test_windows_begin_as_texts_do_in_use(bos: int | None, tmp_path: Path) -> None:
    """The token that attention rests on is the first: BOS where the server puts it, otherwise the text's own."""
    texts = ["A" + "a" * 4, "B" + "b" * 4, "C" + "c" * 17, "D" + "d" * 4, "\0E" + "e" * 30]
    (tmp_path / "t.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    found = ["".join(map(chr, ids[0])) for ids in windows(Letters(bos), [tmp_path / "t.jsonl"], 10**6, 8, 0)]
    assert {len(window) for window in found} == {8}
    first = [window.replace("\0", "") if bos is not None else window for window in found]
    if bos is not None:
        assert all(window.startswith("\0") and not window.startswith("\0\0") for window in found)
    assert {"C", "E" if bos is not None else "\0"} <= {window[0] for window in first}
    for window in first:
        # A short text is whole in the window that it begins.
        if window[0] in "ABD" and bos is None:
            assert window[1:5] == window[0].lower() * 4
    assert len(windows(Letters(bos), [tmp_path / "t.jsonl"], 16, 8, 0)) == 2


def test_tokens_that_attention_rests_on_count_more() -> None:
    quiet, loud = torch.ones(4), torch.tensor([1.0, 500.0, 1.0, 3.0])
    counts = importance([[quiet, quiet], [quiet, loud]], 0.5)
    assert [c.tolist() for c in counts] == [[1.0] * 4, [1.0, 0.5 * 7, 1.0, 1.0]]
    assert [c.tolist() for c in importance([[quiet]], 0.5)] == [[1.0] * 4]  # a model without any
    assert importance([[loud]], 0.0)[0].tolist() == [1.0] * 4  # never less than others


BAD_TEXTS: dict[str, tuple[str, bytes, str]] = {
    "empty": ("t.txt", b" \n", "is empty"),
    "not UTF-8": ("t.txt", "größer".encode("latin-1") * 200, "not UTF-8 (byte 2)"),
    "short": ("t.txt", b"hi", "at least 64 are needed"),
    "no JSON": ("t.jsonl", b'{"text": "x"}\n{"text"\n', "line 2: no JSON"),
    "no messages": ("t.jsonl", b'{"prompt": "x"}\n', 'expected {"messages"'),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_bad_text(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, content, text = BAD_TEXTS[case]
    (tmp_path / name).write_bytes(content)
    write_folder(tmp_path / "in", tiny_weights(), tokenizer=True)
    check(tmp_path, capsys, [str(tmp_path / name)], text)


def test_the_text_needs_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Source(write_folder(tmp_path / "in", tiny_weights(), tokenizer=True))
    groups = {
        f"model.layers.0.{g}": [f"model.layers.0.{g}"] for g in LINEARS if g[-6:] not in ("k_proj", "v_proj")
    }
    assert token_bytes(source, groups) == 3 * 4 * 64 + 2 * (4 * 64 + 128)
    (tmp_path / "t.txt").write_text(PROSE)
    free = shutil.disk_usage(tmp_path)
    room = (64 << 20) + 500_000  # what is always left free; the checkpoint; half of what the text needs
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free._replace(free=room))
    few = ["--calib", str(tmp_path / "t.txt"), "--calib-window", "64", "--calib-tokens"]
    assert main([str(tmp_path / "in"), str(tmp_path / "out"), *few, "4096"]) == 1
    assert "calibrating on 4,096 tokens (fewer: --calib-tokens) needs 0.0" in capsys.readouterr().err
    assert not list(tmp_path.glob("*out*"))
    assert main([str(tmp_path / "in"), str(tmp_path / "out"), *few, "64"]) == 0


def test_missing_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "in", tiny_weights(), tokenizer=True)
    check(tmp_path, capsys, [str(tmp_path / "gone.txt")], "gone.txt is no file")


def test_family_without_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.txt").write_text(PROSE)
    config: dict[str, Any] = CONFIG | {"model_type": "qwen3_5_text"}
    write_folder(tmp_path / "in", tiny_weights(), config, tokenizer=True)
    check(tmp_path, capsys, [str(tmp_path / "t.txt")], "calibration does not handle 'qwen3_5_text'")


def test_w4a4_needs_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path / "in", tiny_weights())
    assert main([str(tmp_path / "in"), str(tmp_path / "out"), "--scheme", "w4a4"]) == 1
    assert "needs --calib" in capsys.readouterr().err


def check(tmp_path: Path, capsys: pytest.CaptureFixture[str], files: list[str], text: str) -> None:
    capsys.readouterr()
    options = [part for f in files for part in ("--calib", f)]
    assert main([str(tmp_path / "in"), str(tmp_path / "out"), "--calib-window", "64", *options]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert text in lines[0]
    assert not [p for p in tmp_path.iterdir() if "out" in p.name]
