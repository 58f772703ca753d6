"""A test prompt before an engine serves: does the model's arithmetic stay within float16?

Volta has no bfloat16, and float16 ends at 65504. A model whose activations go beyond computes infinities, then NaN, and
answers with one token over and over. Here one prompt runs through the loaded engine; if a logit is not finite, it runs
once more with an eye on every layer, and the load is refused by the name of the first that left the range.

`VOLTRITON_CANARY`: `auto` (float16 models), `on` (all) or `off`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from vllm.logger import init_logger

logger = init_logger("vllm.voltriton")

NAME = "VOLTRITON_CANARY"
PROMPT_TOKENS = 64
_MOST_STEPS = 100  # a prompt takes a handful; more is an engine that stands still


class CanaryError(RuntimeError):
    """The model computes infinities or NaN; the message names the layer and what to do."""


@dataclass(frozen=True)
class Finding:
    """What a rank saw: were logits not finite, and the first layer whose output was not."""

    bad_logits: bool
    layer: str | None


def check(engine: Any) -> None:
    """Hook at the end of `EngineCore.__init__`. Raises CanaryError, or ValueError for a wrong setting."""
    reason = _why_not(engine)
    if reason is not None:
        logger.debug("No test prompt: %s", reason)
        return
    if not _bad(engine, layers=False):
        return
    layers = [finding.layer for finding in _bad(engine, layers=True) if finding.layer]
    where = (
        layers[0] if layers else "not in a layer that runs by itself (CUDA graphs: enforce_eager shows it)"
    )
    dtype = str(engine.vllm_config.model_config.dtype).removeprefix("torch.")
    raise CanaryError(
        f"logits of a test prompt are not finite in {dtype}; first out of range: {where}; "
        f"this checkpoint needs a type with a wider range (dtype), {NAME}=off loads it all the same"
    )


def _why_not(engine: Any) -> str | None:
    mode = os.environ.get(NAME, "auto")
    if mode not in ("auto", "on", "off"):
        raise ValueError(f"{NAME}: got {mode!r}, allowed: auto, on, off")
    config = engine.vllm_config
    if mode == "off":
        return f"{NAME} is off"
    if mode == "auto" and config.model_config.dtype != torch.float16:
        return f"the type is {config.model_config.dtype}"
    if config.model_config.runner_type != "generate" or config.is_mm_encoder_only:
        return "the model does not generate"
    if config.parallel_config.data_parallel_size > 1:
        return "engines of one data-parallel group step together"
    return None if engine.scheduler.get_kv_connector() is None else "the cache is shared with other engines"


def _bad(engine: Any, layers: bool) -> list[Finding]:
    """Findings of the ranks with logits that are not finite, after one prompt."""
    engine.model_executor.collective_rpc(_watch, args=(layers,))
    _run_prompt(engine)
    findings: list[Finding] = engine.model_executor.collective_rpc(_report)
    return [finding for finding in findings if finding.bad_logits or finding.layer]


def _run_prompt(engine: Any) -> None:
    """One request of one new token, through the scheduler; nothing of it is left in the prefix cache."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    config = engine.vllm_config.model_config
    vocabulary, length = config.get_vocab_size(), min(PROMPT_TOKENS, config.max_model_len // 2)
    request = EngineCoreRequest(
        request_id=f"voltriton-canary-{time.monotonic_ns()}",
        prompt_token_ids=[i * vocabulary // length for i in range(length)],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    engine.add_request(*engine.preprocess_add_request(request))
    for _ in range(_MOST_STEPS):
        if not engine.scheduler.has_requests() and not engine.batch_queue:
            break
        _, executed = engine.step_fn()
        engine.post_step(executed)
    else:
        raise CanaryError(f"a test prompt of {length} tokens was not answered in {_MOST_STEPS} steps")
    engine.scheduler.reset_prefix_cache()


class _Watch:
    """Of one rank: logits that are not finite, and the first module whose output is not."""

    def __init__(self, model: nn.Module, layers: bool) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._wrapped = [n for n in ("compute_logits", "compute_logits_local") if hasattr(model, n)]
        self.bad_logits = False
        self.layer: str | None = None
        for name in self._wrapped:
            setattr(model, name, self._watched(getattr(model, name)))
        if layers:
            self._watch_layers()

    def _watched(self, compute: Any) -> Any:
        def compute_logits(*args: Any, **kwargs: Any) -> Any:
            logits = compute(*args, **kwargs)
            if logits is not None and not bool(torch.isfinite(logits).all()):
                self.bad_logits = True
            return logits

        return compute_logits

    def _watch_layers(self) -> None:
        for name, module in self._model.named_modules():
            if hasattr(module, "do_not_compile"):
                module.do_not_compile = True  # compiled code calls no hooks
            self._hooks.append(module.register_forward_hook(self._hook(name), with_kwargs=True))

    def _hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if self.layer is None and not _finite(output):
                inputs = (args, kwargs)
                before = (
                    f"inputs up to {_largest(inputs):.3g}" if _finite(inputs) else "inputs not finite either"
                )
                self.layer = f"{name} ({type(module).__name__}, {before})"

        return hook

    def stop(self) -> Finding:
        for hook in self._hooks:
            hook.remove()
        for name in self._wrapped:
            delattr(self._model, name)
        return Finding(self.bad_logits, self.layer)


def _watch(worker: Any, layers: bool) -> None:
    worker.voltriton_canary = _Watch(worker.get_model(), layers)


def _report(worker: Any) -> Finding:
    finding: Finding = worker.voltriton_canary.stop()
    del worker.voltriton_canary
    return finding


def _tensors(value: Any) -> list[torch.Tensor]:
    """All floating-point tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() and value.numel() else []
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in _tensors(value))


def _largest(value: Any) -> float:
    return max((float(tensor.abs().max()) for tensor in _tensors(value)), default=0.0)
