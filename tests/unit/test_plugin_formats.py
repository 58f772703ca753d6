"""One clear answer for each quantisation format on capability 7.0."""

import pytest
from voltriton_vllm.formats import REASONS, SERVED, FormatError, check, refusal


class Config:
    def __init__(self, name: str, layers: dict[str, dict[str, str]] | None = None) -> None:
        self.name = name
        self.quantized_layers = layers

    def get_name(self) -> str:
        return self.name


def test_every_format_of_vllm_has_one_answer_on_volta():
    quantization = pytest.importorskip("vllm.model_executor.layers.quantization")
    for name in quantization.QUANTIZATION_METHODS:
        reason = refusal(name, 70)
        assert (reason is None) == (name in SERVED)
        if reason is not None:
            assert reason.startswith(f"quantisation {name} ")
            assert "compute capability 7.0" in reason
            assert "voltriton convert" in reason
            assert "\n" not in reason


@pytest.mark.parametrize("name", sorted(REASONS))
def test_newer_devices_are_left_to_vllm(name):
    assert refusal(name, 75) is None
    check(Config(name), 90)


def test_a_mixed_checkpoint_is_refused_by_the_part_without_kernels():
    check(Config("modelopt_mixed", {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "w4a16_nvfp4"}}), 70)
    with pytest.raises(FormatError, match=r"layers in FP8 have no kernel for compute capability 7\.0"):
        check(Config("modelopt_mixed", {"a": {"quant_algo": "NVFP4"}, "b": {"quant_algo": "FP8"}}), 70)
