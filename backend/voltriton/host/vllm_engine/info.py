"""Fixed facts of a loaded model, read from vLLM's configuration and the tokenizer."""

from __future__ import annotations

from typing import Any

from voltriton.host.engine_api import EngineInfo
from voltriton.host.vllm_engine import builds


def describe(llm: Any) -> EngineInfo:
    config = llm.vllm_config
    tokenizer = llm.tokenizer
    return EngineInfo(
        max_model_len=config.model_config.max_model_len,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        vocab_size=config.model_config.get_vocab_size(),
        max_logprobs=_max_logprobs(config),
        tasks=tuple(llm._supported_tasks),
        control_tokens=_control_tokens(tokenizer),
        template_variables=_template_variables(tokenizer, config.model_config),
        lora_enabled=config.lora_config is not None,
        about=_about(config),
    )


def _max_logprobs(config: Any) -> int:
    most: int = config.model_config.max_logprobs
    return config.model_config.get_vocab_size() if most == -1 else most


def _control_tokens(tokenizer: Any) -> frozenset[str]:
    if tokenizer is None:
        return frozenset()
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return frozenset(t.content for t in added if t.special) | frozenset(
        getattr(tokenizer, "all_special_tokens", ())
    )


def _template_variables(tokenizer: Any, model_config: Any) -> frozenset[str] | None:
    """Undeclared variables of the model's chat template; None where there is none to read."""
    import jinja2
    import jinja2.ext
    import jinja2.meta

    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        return None
    environment = jinja2.Environment(extensions=[jinja2.ext.loopcontrols])
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(template)))
    except jinja2.TemplateError:
        return None


def _about(config: Any) -> dict[str, Any]:
    import torch

    return {
        "engine": builds.name(),
        "torch": torch.__version__,
        "model": config.model_config.model,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "quantization": config.model_config.quantization,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
    }
