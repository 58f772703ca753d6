"""Checks of NVFP4 scales around the load, on small modules that look like vLLM's."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from voltriton_vllm import scales

E4M3 = torch.float8_e4m3fn


def parameter(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def linear(widths: tuple[int, ...], k: int, modelopt: bool, inputs: bool = False) -> nn.Module:
    layer = nn.Module()
    layer.logical_widths = list(widths)
    n = sum(widths)
    names = ("weight", "weight_scale_2") if modelopt else ("weight_packed", "weight_global_scale")
    if not modelopt:
        layer.input_size_per_partition = k
    layer.register_parameter(names[0], parameter(torch.zeros(n, k // 2, dtype=torch.uint8)))
    layer.register_parameter("weight_scale", parameter(torch.ones(n, k // 16).to(E4M3)))
    layer.register_parameter(names[1], parameter(torch.ones(len(widths))))
    if inputs:
        name = "input_scale" if modelopt else "input_global_scale"
        layer.register_parameter(name, parameter(torch.ones(len(widths))))
    return layer


def experts(count: int, inner: int, hidden: int, modelopt: bool, weight_only: bool) -> nn.Module:
    layer = nn.Module()
    end, scale_2 = ("", "weight_scale_2") if modelopt else ("_packed", "weight_global_scale")
    input_scale = "input_scale" if modelopt else "input_global_scale"
    for which, n, k in (("w13", 2 * inner, hidden), ("w2", hidden, inner)):
        shape = (count, 2) if which == "w13" else (count,)
        layer.register_parameter(
            f"{which}_weight{end}", parameter(torch.zeros(count, n, k // 2, dtype=torch.uint8))
        )
        layer.register_parameter(f"{which}_weight_scale", parameter(torch.ones(count, n, k // 16).to(E4M3)))
        layer.register_parameter(f"{which}_{scale_2}", parameter(torch.ones(shape)))
        layer.register_parameter(f"{which}_{input_scale}", parameter(torch.ones(shape)))
    layer.quant_method = SimpleNamespace(use_a16=weight_only)
    return layer


class Model(nn.Module):
    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)


def load_all(model: nn.Module, skip: str = "") -> None:
    """What a loader does: fill every scale but one."""
    for name, tensor in model.named_parameters():
        if "scale" in name and name != skip:
            tensor.data.fill_(1.0)


@pytest.mark.parametrize("modelopt", [True, False])
@pytest.mark.parametrize("which", ["weight_scale", "global", "input"])
def test_a_scale_that_was_not_loaded_is_refused_by_name(modelopt, which):
    names = {
        "weight_scale": "weight_scale",
        "global": "weight_scale_2" if modelopt else "weight_global_scale",
        "input": "input_scale" if modelopt else "input_global_scale",
    }
    model = Model(o_proj=linear((8,), 32, modelopt, inputs=True))
    scales.before_load(model)
    load_all(model, skip=f"layers.o_proj.{names[which]}")
    with pytest.raises(scales.CheckpointError) as error:
        scales.after_load(model)
    assert f"layers.o_proj.{names[which]}: NVFP4 scale is missing in the checkpoint, or NaN" in str(
        error.value
    )
    assert "\n" not in str(error.value)


def test_the_missing_part_of_a_fused_layer_is_named():
    model = Model(qkv_proj=linear((8, 4, 4), 32, modelopt=True))
    scales.before_load(model)
    load_all(model)
    model.layers["qkv_proj"].weight_scale_2.data[1] = float("nan")
    with pytest.raises(scales.CheckpointError, match=r"^layers\.k_proj\.weight_scale_2: "):
        scales.after_load(model)


def test_a_nan_among_the_block_scales_is_found_in_its_part():
    model = Model(qkv_proj=linear((8, 4, 4), 32, modelopt=False))
    scales.before_load(model)
    load_all(model)
    model.layers["qkv_proj"].weight_scale.data.view(torch.uint8)[13, 1] = 0x7F
    with pytest.raises(scales.CheckpointError, match=r"^layers\.v_proj\.weight_scale: .*\(1 of 32 values"):
        scales.after_load(model)


@pytest.mark.parametrize("value", [float("inf"), 0.0])
def test_infinite_and_zero_global_scales_are_refused_with_the_value(value):
    model = Model(o_proj=linear((8,), 32, modelopt=False))
    scales.before_load(model)
    load_all(model)
    model.layers["o_proj"].weight_global_scale.data.fill_(value)
    with pytest.raises(scales.CheckpointError, match=f"weight_global_scale: NVFP4 scale is {value}"):
        scales.after_load(model)


@pytest.mark.parametrize("modelopt", [True, False])
def test_experts_are_named_by_number_and_part(modelopt):
    model = Model(experts=experts(4, 16, 32, modelopt, weight_only=False))
    scales.before_load(model)
    load_all(model)
    name = "weight_scale_2" if modelopt else "weight_global_scale"
    getattr(model.layers["experts"], f"w13_{name}").data[2, 1] = float("nan")
    with pytest.raises(scales.CheckpointError, match=rf"^layers\.experts\.2\.up_proj\.{name}: "):
        scales.after_load(model)


def test_weight_only_experts_need_no_input_scales():
    for weight_only in (True, False):
        model = Model(experts=experts(2, 16, 32, modelopt=True, weight_only=weight_only))
        scales.before_load(model)
        load_all(model)
        model.layers["experts"].w2_input_scale.data.fill_(float("nan"))
        if weight_only:
            scales.after_load(model)
        else:
            with pytest.raises(scales.CheckpointError, match=r"experts\.0\.down_proj\.input_scale"):
                scales.after_load(model)


def test_weight_only_layers_need_no_input_scales():
    layer = linear((8,), 32, modelopt=True, inputs=True)
    layer.quant_method = SimpleNamespace(spec=SimpleNamespace(activation=None))
    model = Model(o_proj=layer)
    scales.before_load(model)
    load_all(model, skip="layers.o_proj.input_scale")
    layer.input_scale.data.fill_(float("nan"))
    scales.after_load(model)


def test_a_width_that_cuts_a_scale_group_is_refused_with_layer_width_and_group():
    # 1,856 at TP 8, and 96 at TP 4.
    for width in (232, 24):
        model = Model(down_proj=linear((8,), width, modelopt=False))
        with pytest.raises(
            scales.CheckpointError, match=rf"^layers\.down_proj: input width {width} .* group 16"
        ):
            scales.before_load(model)


def test_experts_with_a_cut_group_are_refused():
    model = Model(experts=experts(2, 24, 32, modelopt=True, weight_only=True))
    with pytest.raises(scales.CheckpointError, match=r"layers\.experts\.w2_weight: input width 24"):
        scales.before_load(model)


@pytest.mark.parametrize("modelopt", [True, False])
def test_unequal_global_scales_are_kept_one_an_output_row(modelopt):
    layer = linear((2, 1, 1), 32, modelopt)
    model = Model(qkv_proj=layer)
    scales.before_load(model)
    load_all(model)
    values = torch.tensor([2.0, 4.0, 8.0])
    getattr(layer, "weight_scale_2" if modelopt else "weight_global_scale").data.copy_(values)
    scales.after_load(model)
    factors = values if modelopt else 1 / values
    assert layer.nvfp4_row_factors.tolist() == [float(factors[i]) for i in (0, 0, 1, 2)]


def test_unequal_global_scales_of_experts_are_kept():
    layer = experts(2, 16, 32, modelopt=True, weight_only=True)
    model = Model(experts=layer)
    scales.before_load(model)
    load_all(model)
    layer.w13_weight_scale_2.data.copy_(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
    scales.after_load(model)
    assert layer.nvfp4_w13_row_factors.shape == (2, 32)
    assert layer.nvfp4_w13_row_factors[0].tolist() == [1.0] * 16 + [3.0] * 16


def test_other_layers_are_left_alone():
    plain = nn.Linear(8, 8)
    fp8 = nn.Module()
    fp8.register_parameter("weight", parameter(torch.zeros(8, 8).to(E4M3)))
    fp8.register_parameter("weight_scale", parameter(torch.full((1,), float("nan"))))
    model = Model(plain=plain, fp8=fp8)
    scales.before_load(model)
    scales.after_load(model)
    assert list(scales.nvfp4_layers(model)) == []
