"""Models that call the `vllm` model from within Triton (BLS): the chat template and the unary facade.

A blocking call occupies its instance, so `instance_group.count` of these models is their concurrency. They
are not on the path of streamed tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from voltriton.processes import end_with
from voltriton.stub.contract import declare

TARGET = "vllm"


def call(request: Any, inputs: list[Any], outputs: Iterable[str]) -> Iterator[Any]:
    """Responses of the `vllm` model, errors included."""
    inner = pb_utils.InferenceRequest(
        model_name=TARGET,
        request_id=request.request_id(),
        inputs=inputs,
        requested_output_names=list(outputs),
        parameters=parameters(request),
    )
    for response in inner.exec(decoupled=True):
        # A flag-only end has neither outputs nor an error.
        if response.has_error() or response.output_tensors():
            yield response


def parameters(request: Any) -> dict[str, bool | int | str]:
    """Triton hands request parameters on as bool, int and text only: a float would be refused."""
    given = json.loads(request.parameters() or "{}")
    return {name: str(value) if isinstance(value, float) else value for name, value in given.items()}


def failed(error: Any) -> Any:
    return pb_utils.InferenceResponse(error=error)


class CallingModel:
    """A stub that waits in a call never ends by itself when its server is killed."""

    def initialize(self, args: dict[str, str]) -> None:
        end_with(os.getppid(), os.getpid())

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    @staticmethod
    def _answer(request: Any) -> Any:
        """The one response to a request."""
        raise NotImplementedError


class ChatTemplateModel(CallingModel):
    """`messages` -> `input_ids`, by the engine's own renderer and the model's own template."""

    @staticmethod
    def _answer(request: Any) -> Any:
        messages = pb_utils.get_input_tensor_by_name(request, "messages")
        inputs = [messages, pb_utils.Tensor("render_only", np.array([True]))]
        for response in call(request, inputs, ["text_output", "token_ids"]):
            if response.has_error():
                return failed(response.error())
            ids = pb_utils.get_output_tensor_by_name(response, "token_ids").as_numpy()
            return pb_utils.InferenceResponse([pb_utils.Tensor("input_ids", ids.astype("int64"))])
        return failed(pb_utils.TritonError("INTERNAL: the vllm model gave no answer"))


class GenerateModel(CallingModel):
    """The `vllm` model for clients that know only one request, one response (ModelInfer, HTTP /infer)."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        # No `cancel`: it would wait for an instance, and all may be busy. Send it to the `vllm` model.
        declare(auto_complete_model_config, besides=frozenset({"stream", "cancel"}))
        return auto_complete_model_config

    @staticmethod
    def _answer(request: Any) -> Any:
        inputs = [tensor for tensor in request.inputs() if tensor.name() != "stream"]
        for response in call(request, inputs, request.requested_output_names()):
            if response.has_error():
                return failed(response.error())
            return pb_utils.InferenceResponse(response.output_tensors())
        return failed(pb_utils.TritonError("INTERNAL: the vllm model gave no answer"))
