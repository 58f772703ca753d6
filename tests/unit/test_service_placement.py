"""Instance groups and devices, without a GPU: the checks of the stub's `initialize`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import fake_pb
import pytest
from voltriton.errors import InvalidArgument


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_pb)  # type: ignore[arg-type]
    import voltriton.stub.model

    yield voltriton.stub.model
    sys.modules.pop("voltriton.stub.model")


def group(kind: str, count: int = 1) -> dict[str, Any]:
    return {"instance_group": [{"kind": kind, "count": count}]}


@pytest.mark.parametrize("engine_args", [{"tensor_parallel_size": 4}, {"pipeline_parallel_size": 2}])
def test_one_gpu_kind_with_several_ranks_is_refused_in_the_official_words(
    model: ModuleType, engine_args: dict[str, int]
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        model.check_placement(group("KIND_GPU"), engine_args)
    words = "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in the model's config.pbtxt for multi-GPU models"
    assert words in str(refused.value)


@pytest.mark.parametrize(("kind", "ranks"), [("KIND_MODEL", 4), ("KIND_CPU", 2), ("KIND_GPU", 1)])
def test_other_placements_are_taken(model: ModuleType, kind: str, ranks: int) -> None:
    model.check_placement(group(kind), {"tensor_parallel_size": ranks})


def test_one_gpu_kind_binds_the_engine_to_its_gpu(model: ModuleType) -> None:
    assert model.device({"model_instance_kind": "GPU", "model_instance_device_id": "3"}) == {
        "CUDA_VISIBLE_DEVICES": "3"
    }
    assert model.device({"model_instance_kind": "MODEL", "model_instance_device_id": "0"}) == {}


def test_configuration_is_completed_and_what_is_declared_stays(model: ModuleType) -> None:
    class Config:
        def __init__(self) -> None:
            self.inputs = {"text_input": {"name": "text_input", "dims": [1]}}
            self.outputs: dict[str, Any] = {}
            self.batch: int | None = None
            self.policy: dict[str, bool] | None = None

        def as_dict(self) -> dict[str, Any]:
            return {"input": list(self.inputs.values()), "output": list(self.outputs.values())}

        def add_input(self, tensor: dict[str, Any]) -> None:
            assert tensor["name"] not in self.inputs
            self.inputs[tensor["name"]] = tensor

        def add_output(self, tensor: dict[str, Any]) -> None:
            self.outputs[tensor["name"]] = tensor

        def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
            self.policy = policy

        def set_max_batch_size(self, size: int) -> None:
            self.batch = size

    config = model.TritonPythonModel.auto_complete_config(Config())
    official = {
        "text_input", "image", "stream", "sampling_parameters", "exclude_input_in_output", "return_finish_reason",
        "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens", "return_num_output_tokens",
        "embedding_request",
    }  # fmt: skip
    assert official <= set(config.inputs)
    assert all(t["optional"] for name, t in config.inputs.items() if name != "text_input")
    assert {"text_output", "finish_reason", "logprobs", "num_input_tokens"} <= set(config.outputs)
    assert (config.policy, config.batch) == ({"decoupled": True}, 0)


def test_execute_always_returns_none(model: ModuleType) -> None:
    """Triton fails a decoupled model that returns anything (C058)."""

    class Front:
        def execute(self, requests: list[Any]) -> None:
            pass

    instance = model.TritonPythonModel()
    instance._front = Front()
    assert instance.execute([]) is None
