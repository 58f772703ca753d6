"""Tuning of norms: its gradients are those of the whole model, predictions come nearer, nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_tiny import tiny_tokenizer, tiny_weights, write_expert_folder, write_folder
from test_checkpoint_calibrate import EXPERTS, PROSE
from transformers import AutoModelForCausalLM
from voltriton.checkpoint import convert as convert_module
from voltriton.checkpoint import layers as layers_module
from voltriton.checkpoint import tuning as tuning_module
from voltriton.checkpoint.convert import Options, convert
from voltriton.checkpoint.layers import LayerwiseModel
from voltriton.checkpoint.progress import meter
from voltriton.checkpoint.rounding import Recipe
from voltriton.checkpoint.source import Source
from voltriton.checkpoint.texts import windows
from voltriton.checkpoint.tuning import Norm, Tuner, Tuning


def unsure_weights() -> dict[str, torch.Tensor]:
    """Of a model that does not merely repeat its input."""
    weights = tiny_weights()
    weights["model.embed_tokens.weight"] *= 0.1
    return weights


def whole(quantised: Source, source: Source) -> torch.nn.Module:
    """The quantised model as transformers runs it."""
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    for name in quantised.names:
        weight = quantised.matrix(name)
        model.get_parameter(name).data.copy_(weight.rows(0, weight.spec.shape[0]))
    return model


def divergence(model: torch.nn.Module, source: Source, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        p = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)(ids).logits.log_softmax(-1)
    q = model(ids).logits.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean()


def test_gradients_are_those_of_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_module, "products_dtype", lambda: torch.float32)
    monkeypatch.setattr(layers_module, "BATCH_TOKENS", 96)  # two batches a step
    monkeypatch.setattr(tuning_module, "LOGIT_ROWS", 40)
    source = Source(write_folder(tmp_path / "in", unsure_weights()))
    convert(source.path, tmp_path / "plain", Options())
    quantised = Source(tmp_path / "plain")
    ids = torch.randint(0, 96, (4, 48), generator=torch.Generator().manual_seed(1))
    wanted, model = (LayerwiseModel(source, list(ids.split(1)), tmp_path) for _ in range(2))
    wanted.forward()
    tuner = Tuner(model, wanted.states, dict(quantised.nvfp4), Tuning(192, 192), seed=0)
    before = {name: weight.clone() for name, weight in tuner.norms()}
    monkeypatch.setattr(Norm, "move", lambda self, gradient, rate: self.weight.sub_(gradient))
    with meter("tuning", 1) as shown:
        (loss,) = tuner.run(shown, 1)

    same = whole(quantised, source)
    expected = divergence(same, source, ids)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-3)
    for name, weight in tuner.norms():
        gradient = same.get_parameter(name).grad
        assert (before[name] - weight - gradient).norm() < 0.01 * gradient.norm(), name


def tuned(tmp_path: Path, out: str, tuning: Tuning) -> Source:
    """A tiny model calibrated and tuned on a short text."""
    if not (tmp_path / "hf").exists():
        write_folder(tmp_path / "hf", unsure_weights(), tokenizer=True)
        (tmp_path / "text.txt").write_text(PROSE)
    recipe = Recipe([tmp_path / "text.txt"], tokens=2048, window=64, tuning=tuning)
    convert(tmp_path / "hf", tmp_path / out, Options(jobs=1, calibration=recipe))
    return Source(tmp_path / out)


SOME = Tuning(tokens=50 * 512, batch=512, rate=0.004)


def test_predictions_come_nearer_and_only_norms_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers_module, "BATCH_TOKENS", 128)
    before, after, again = (tuned(tmp_path, *a) for a in (("no", Tuning(0)), ("yes", SOME), ("again", SOME)))
    source = Source(tmp_path / "hf")
    ids = torch.cat(windows(tiny_tokenizer(), [tmp_path / "text.txt"], 2048, 64, seed=99))
    kl = [divergence(whole(q, source), source, ids).item() for q in (before, after)]
    assert kl[1] < 0.98 * kl[0]
    for name, stored in before.stored.items():
        same = torch.equal(stored.rows().view(torch.uint8), after.stored[name].rows().view(torch.uint8))
        assert same == ("norm" not in name), name
        assert torch.equal(
            again.stored[name].rows().view(torch.uint8), after.stored[name].rows().view(torch.uint8)
        )
    assert {f.name for f in after.path.iterdir()} == {f.name for f in before.path.iterdir()}


@pytest.mark.parametrize("arch", EXPERTS)
def test_experts_pass_gradients_on(arch: str, tmp_path: Path) -> None:
    write_expert_folder(tmp_path / "hf", arch)
    (tmp_path / "text.txt").write_text(PROSE)
    few = Tuning(tokens=4096, batch=2048)
    before, after = tuned(tmp_path, "no", Tuning(0)), tuned(tmp_path, "yes", few)
    norms = [name for name in before.stored if name.endswith("norm.weight")]
    assert norms
    for name in norms:
        moved = after.stored[name].rows().float() - before.stored[name].rows().float()
        assert 0 < moved.abs().max() < 0.2, name


def test_norms_that_an_earlier_run_tuned_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = Tuning(tokens=4096, batch=2048)
    expected = tuned(tmp_path, "whole", few)

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as stop:
        stop.setattr(convert_module, "_write_metadata", stopped)
        with pytest.raises(KeyboardInterrupt):
            tuned(tmp_path, "out", few)
    monkeypatch.setattr(tuning_module, "Tuner", stopped)  # is not asked for again
    resumed = tuned(tmp_path, "out", few)
    for name, stored in expected.stored.items():
        assert torch.equal(stored.rows().view(torch.uint8), resumed.stored[name].rows().view(torch.uint8)), (
            name
        )
