"""The tensors of the `vllm` model, as data: what `auto_complete_config` declares and `request` reads.

Names, types and dims of the official part are NVIDIA's vLLM backend's; `docs/contract.md` describes all.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Tensor(NamedTuple):
    name: str
    type: str
    dims: list[int]


INPUTS = [
    Tensor("text_input", "TYPE_STRING", [1]),
    Tensor("image", "TYPE_STRING", [-1]),
    Tensor("stream", "TYPE_BOOL", [1]),
    Tensor("sampling_parameters", "TYPE_STRING", [1]),
    Tensor("exclude_input_in_output", "TYPE_BOOL", [1]),
    Tensor("return_finish_reason", "TYPE_BOOL", [1]),
    Tensor("return_cumulative_logprob", "TYPE_BOOL", [1]),
    Tensor("return_logprobs", "TYPE_BOOL", [1]),
    Tensor("return_num_input_tokens", "TYPE_BOOL", [1]),
    Tensor("return_num_output_tokens", "TYPE_BOOL", [1]),
    Tensor("embedding_request", "TYPE_STRING", [1]),
    # Ours from here on.
    Tensor("input_ids", "TYPE_INT64", [-1]),
    Tensor("messages", "TYPE_STRING", [1]),
    Tensor("prompts", "TYPE_STRING", [-1]),
    Tensor("priority", "TYPE_INT32", [1]),
    Tensor("timeout_ms", "TYPE_INT32", [1]),
    Tensor("request_id", "TYPE_STRING", [1]),
    Tensor("cancel", "TYPE_STRING", [1]),
    Tensor("render_only", "TYPE_BOOL", [1]),
    Tensor("lora_request", "TYPE_STRING", [1]),
    Tensor("return_token_ids", "TYPE_BOOL", [1]),
    Tensor("return_stop_reason", "TYPE_BOOL", [1]),
    Tensor("return_num_cached_tokens", "TYPE_BOOL", [1]),
    Tensor("return_timing", "TYPE_BOOL", [1]),
    Tensor("return_prompt_logprobs", "TYPE_BOOL", [1]),
]

OUTPUTS = [
    Tensor("text_output", "TYPE_STRING", [-1]),
    Tensor("finish_reason", "TYPE_STRING", [-1]),
    Tensor("cumulative_logprob", "TYPE_FP32", [-1]),
    Tensor("logprobs", "TYPE_STRING", [-1]),
    Tensor("num_input_tokens", "TYPE_UINT32", [-1]),
    Tensor("num_output_tokens", "TYPE_UINT32", [-1]),
    Tensor("token_ids", "TYPE_INT32", [-1]),
    Tensor("stop_reason", "TYPE_STRING", [-1]),
    Tensor("num_cached_tokens", "TYPE_UINT32", [-1]),
    Tensor("timing", "TYPE_STRING", [1]),
    Tensor("prompt_logprobs", "TYPE_STRING", [-1]),
    Tensor("reasoning_output", "TYPE_STRING", [-1]),
    Tensor("tool_calls", "TYPE_STRING", [-1]),
]

# `return_X` asks for the output X.
ASKABLE = [t.name.removeprefix("return_") for t in INPUTS if t.name.startswith("return_")]

# Request parameters that Triton itself reads or makes: never sampling parameters.
RESERVED_PARAMETERS = frozenset(
    {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output"}
)


def is_reserved(name: str) -> bool:
    return name in RESERVED_PARAMETERS or name.startswith("triton_")


def declare(config: Any, besides: frozenset[str] = frozenset()) -> None:
    """`config`, Triton's of a model, gets the tensors that its file does not declare, without the inputs `besides`;
    requests come one by one."""
    as_file = config.as_dict()
    known = besides | {tensor["name"] for part in ("input", "output") for tensor in as_file[part]}
    for tensor in INPUTS:
        if tensor.name not in known:
            config.add_input(
                {"name": tensor.name, "data_type": tensor.type, "dims": tensor.dims, "optional": True}
            )
    for tensor in OUTPUTS:
        if tensor.name not in known:
            config.add_output({"name": tensor.name, "data_type": tensor.type, "dims": tensor.dims})
    config.set_max_batch_size(0)
