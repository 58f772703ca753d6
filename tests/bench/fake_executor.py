"""A vLLM executor without a model: a step takes a set time and no CPU.

What is left to measure is all that stands around the model: vLLM's scheduler and output processing, and the
server that streams; so it stands for a GPU server. It is named in the engine arguments as
`"distributed_executor_backend": "fake_executor.FakeExecutor"`, and this folder must be importable in the engine's
process (PYTHONPATH). FAKE_STEP_MS is what a step takes (5). The token ids go round 250 ids from FAKE_FIRST_ID (3)
on: with a real vocabulary choose a stretch of whole words.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

KV_BYTES = int(os.environ.get("FAKE_KV_GIB", "64")) << 30  # counted, never allocated


class Due(Future[Any]):
    """Done from the start, but whoever takes the result sleeps until it is due."""

    def __init__(self, output: Any, at: float) -> None:
        super().__init__()
        self.at = at
        self.set_result(output)

    def result(self, timeout: float | None = None) -> Any:
        left = self.at - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return super().result(timeout)


class FakeExecutor(Executor):
    supported_tasks = ("generate",)

    def _init_executor(self) -> None:
        self.prompt_lens: dict[str, int] = {}
        self.turn = 0
        self.step_s = float(os.environ.get("FAKE_STEP_MS", "5")) / 1000
        self.first_id = int(os.environ.get("FAKE_FIRST_ID", "3"))

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size or 16,
            num_kv_heads=self.model_config.get_num_kv_heads(self.parallel_config),
            head_size=self.model_config.get_head_size(),
            dtype=self.model_config.dtype,
        )
        layers = self.model_config.get_num_layers(self.parallel_config)
        return [{f"model.layers.{i}.self_attn.attn": spec for i in range(layers)}]

    def determine_available_memory(self) -> list[int]:
        return [KV_BYTES]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBHNC"]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        self.cache_config.kv_cache_layout = layout_name

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **_: Any
    ) -> Any:
        return [None]

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        at = time.perf_counter() + self.step_s
        computed = self._computed(scheduler_output)
        ids, tokens = [], []
        for req_id, count in scheduler_output.num_scheduled_tokens.items():
            self.turn += 1
            ids.append(req_id)
            whole = computed[req_id] + count >= self.prompt_lens[req_id]
            tokens.append([self.first_id + self.turn * 7 % 250] if whole else [])
        output = ModelRunnerOutput(
            req_ids=ids, req_id_to_index={r: i for i, r in enumerate(ids)}, sampled_token_ids=tokens
        )
        due = Due(output, at)
        return due if non_block else due.result()

    def _computed(self, scheduler_output: Any) -> dict[str, int]:
        """Tokens already in the cache, by request; keeps the lengths of the prompts."""
        for gone in scheduler_output.finished_req_ids:
            self.prompt_lens.pop(gone, None)
        computed = {}
        for new in scheduler_output.scheduled_new_reqs:
            self.prompt_lens[new.req_id] = len(new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        return computed

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass
