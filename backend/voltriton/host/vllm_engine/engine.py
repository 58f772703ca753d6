"""VllmEngine: one AsyncLLM."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from voltriton.errors import InvalidArgument, Unavailable
from voltriton.host.engine_api import Prompt
from voltriton.host.vllm_engine import builds
from voltriton.host.vllm_engine.adapters import Adapters
from voltriton.host.vllm_engine.arguments import engine_arguments, prepare_environment
from voltriton.host.vllm_engine.beat import Beat, make_beat
from voltriton.host.vllm_engine.chat_output import ChatOutput, make_chat_output
from voltriton.host.vllm_engine.info import describe
from voltriton.host.vllm_engine.outputs import client_error, deltas, generate_error
from voltriton.settings import ModelSettings
from voltriton.wire import Delta, Generation, is_counter

# No token of a known vocabulary is longer; used only to refuse a hopeless prompt before tokenising it.
MAX_CHARS_PER_TOKEN = 512


class VllmEngine:
    """The service's `Engine`; see `voltriton.host.engine_api` for what each method promises."""

    def __init__(self, llm: Any, beat: Beat, model: ModelSettings) -> None:
        self._llm = llm
        self._beat = beat
        self._settings = model.settings
        self._adapters = Adapters(llm, model.loras)
        self.info = describe(llm)
        self._baseline: dict[tuple[str, str], float] = {}

    @classmethod
    async def start(cls, model: ModelSettings) -> VllmEngine:
        builds.check()
        prepare_environment(model.engine_args)
        from vllm.v1.engine.async_llm import AsyncLLM

        args = engine_arguments(model.engine_args)
        beat = make_beat()
        llm = AsyncLLM.from_engine_args(args, stat_loggers=[beat.factory])
        try:
            # Starts the output handler and asks the core for its tasks: the first proof that it answers.
            await llm.get_supported_tasks()
            engine = cls(llm, beat, model)
            await engine._warm_up()
            # The warm-up is no client's: counters begin after it.
            engine._baseline = {
                (n, str(labels)): v for n, labels, v in engine._raw_samples() if is_counter(n)
            }
        except BaseException:
            llm.shutdown(timeout=5.0)
            raise
        return engine

    async def _warm_up(self) -> None:
        """One token through the whole path, so that the first client does not pay for it."""
        if "generate" not in self.info.tasks:
            return
        generation = Generation(key=0, id="warm-up", input_ids=[0])
        prompt = (await self.render(generation))[0]
        async for _ in self.generate(generation, prompt, {"max_tokens": 1, "temperature": 0.0}, "warm-up"):
            pass

    async def render(self, generation: Generation) -> list[Prompt]:
        if generation.chat is not None:
            return await self._render_chat(generation.chat)
        if generation.input_ids is not None:
            inputs: list[Any] = [{"prompt_token_ids": generation.input_ids}]
        else:
            inputs = [{"prompt": text} for text in generation.prompts or []]
            self._refuse_hopeless(generation.prompts or [])
        if generation.images:
            inputs[0]["multi_modal_data"] = {"image": self._images(generation.images)}
        try:
            return await self._rendered(
                self._llm.renderer.render_cmpl_async(inputs, self._token_params(True))
            )
        except AssertionError as error:
            if not generation.images:
                raise
            # vLLM's way of saying that a prompt has no place for an image.
            raise InvalidArgument(
                f"image: got {len(generation.images)}, and the prompt must hold the model's placeholder "
                f"for each ({error})"
            ) from None

    async def _render_chat(self, chat: dict[str, Any]) -> list[Prompt]:
        from vllm.renderers.params import ChatParams

        options = {
            **self._settings.chat_template_kwargs,
            **(chat.get("chat_template_kwargs") or {}),
            "add_generation_prompt": chat.get(
                "add_generation_prompt", not chat.get("continue_final_message", False)
            ),
            "continue_final_message": chat.get("continue_final_message", False),
        }
        for name in ("tools", "documents"):
            if chat.get(name):
                options[name] = chat[name]
        params = ChatParams(chat_template_kwargs=options)

        async def render() -> Any:
            # A copy: for the template vLLM turns the arguments of former tool calls from text into objects, in place,
            # and its parser of the answer then refuses these messages.
            messages = copy.deepcopy(chat["messages"])
            _, inputs = await self._llm.renderer.render_chat_async(
                [messages], params, self._token_params(False)
            )
            return inputs

        return await self._rendered(render())

    async def _rendered(self, rendering: Any) -> list[Prompt]:
        from jinja2 import TemplateError

        at_fault: tuple[type[Exception], ...] = (
            *builds.client_errors(),
            ValueError,
            TypeError,
            TemplateError,
        )
        try:
            inputs = await rendering
        except at_fault as error:
            raise InvalidArgument(f"prompt: {error}") from None
        return [Prompt(list(each["prompt_token_ids"]), each) for each in inputs]

    def _token_params(self, add_special_tokens: bool) -> Any:
        from vllm.renderers.params import TokenizeParams

        # No limit here: the service refuses a long prompt itself, with both numbers.
        return TokenizeParams(max_total_tokens=None, add_special_tokens=add_special_tokens)

    def _refuse_hopeless(self, prompts: list[str]) -> None:
        most = self.info.max_model_len * MAX_CHARS_PER_TOKEN
        for text in prompts:
            if len(text) > most:
                raise InvalidArgument(
                    f"prompt: {len(text)} characters cannot fit into max_model_len={self.info.max_model_len} tokens"
                )

    @staticmethod
    def _images(images: list[str]) -> list[Any]:
        import base64
        import binascii
        import io

        from PIL import Image, UnidentifiedImageError

        result = []
        for i, text in enumerate(images):
            try:
                data = base64.b64decode(text, validate=True)
                result.append(Image.open(io.BytesIO(data)).convert("RGB"))
            except (
                binascii.Error,
                UnidentifiedImageError,
                OSError,
                ValueError,
                Image.DecompressionBombError,
            ) as error:
                raise InvalidArgument(f"image[{i}]: not a base64 image: {error}") from None
        return result

    async def generate(
        self, generation: Generation, prompt: Prompt, params: dict[str, Any], request_id: str
    ) -> AsyncIterator[Delta]:
        values = dict(params)
        chat = self._chat_output(generation, prompt, values)
        adapter = values.pop("lora_name", None)
        sampling = self._sampling_params(values, generation.stream)
        with self._adapters.use(adapter) as lora:
            async for delta in self._follow(generation, prompt, sampling, request_id, lora, chat):
                yield delta

    async def _follow(
        self,
        generation: Generation,
        prompt: Prompt,
        sampling: Any,
        request_id: str,
        lora: Any,
        chat: ChatOutput | None,
    ) -> AsyncIterator[Delta]:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        outputs = self._llm.generate(
            prompt.engine_input, sampling, request_id, lora_request=lora, priority=generation.priority
        )
        wants = frozenset(generation.wants)
        started = False
        try:
            async for output in outputs:
                self._beat.touch()
                for delta in deltas(output, wants, chat, first=not started):
                    started = True
                    yield delta
        except (*builds.overload_errors(), *builds.client_errors()) as error:
            raise client_error(error) from None
        except (EngineDeadError, EngineGenerateError) as error:
            if self.failure is not None:
                raise Unavailable(f"the engine died while the request was running ({self.failure})") from None
            raise generate_error(error) from error
        finally:
            await outputs.aclose()

    def _sampling_params(self, values: dict[str, Any], stream: bool) -> Any:
        from vllm.sampling_params import (
            RepetitionDetectionParams,
            RequestOutputKind,
            SamplingParams,
            StructuredOutputsParams,
        )

        for name in values:
            if name not in builds.sampling_fields():
                raise InvalidArgument(f"sampling_parameters.{name}: {builds.name()} has no such parameter")
        at_fault: tuple[type[Exception], ...] = (*builds.client_errors(), TypeError, ValueError)
        try:
            if "structured_outputs" in values:
                values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
            if "repetition_detection" in values:
                values["repetition_detection"] = RepetitionDetectionParams(**values["repetition_detection"])
            return SamplingParams(
                **values, output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
            )
        except at_fault as error:
            raise InvalidArgument(f"sampling_parameters: {error}") from None

    def _chat_output(
        self, generation: Generation, prompt: Prompt, values: dict[str, Any]
    ) -> ChatOutput | None:
        if generation.chat is None or not (self._settings.reasoning_parser or self._settings.tool_parser):
            return None
        return make_chat_output(self._llm, self._settings, generation, prompt.token_ids, values)

    async def embed(self, generation: Generation, request_id: str) -> Delta:
        from vllm.pooling_params import PoolingParams

        request = generation.embedding or {}
        source = request.get("input")
        if isinstance(source, str) and source:
            prompt: Any = {"prompt": source}
        elif isinstance(source, list) and source and all(isinstance(i, int) for i in source):
            prompt = {"prompt_token_ids": source}
        else:
            raise InvalidArgument(
                f"embedding_request.input: got {source!r}, a text or a list of token ids is needed"
            )
        dimensions = (request.get("pooling_params") or {}).get("dimensions")
        if isinstance(dimensions, list):
            dimensions = dimensions[0]
        rendered = await self._rendered(
            self._llm.renderer.render_cmpl_async([prompt], self._token_params(True))
        )
        try:
            params = PoolingParams(task="embed", dimensions=dimensions)
            async for output in self._llm.encode(rendered[0].engine_input, params, request_id):
                vector = output.outputs.data
        except (*builds.overload_errors(), *builds.client_errors()) as error:
            raise client_error(error) from None
        return Delta(
            key=0,
            text=json.dumps(vector.float().tolist()),
            finish_reason="stop",
            extra={"num_input_tokens": [len(rendered[0].token_ids)]},
        )

    def samples(self) -> Iterable[tuple[str, dict[str, str], float]]:
        for name, labels, value in self._raw_samples():
            yield name, labels, value - self._baseline.get((name, str(labels)), 0.0)

    @staticmethod
    def _raw_samples() -> Iterable[tuple[str, dict[str, str], float]]:
        from prometheus_client import REGISTRY

        for metric in REGISTRY.collect():
            if not metric.name.startswith("vllm:"):
                continue
            for sample in metric.samples:
                if not sample.name.endswith("_created"):
                    labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                    yield sample.name, labels, sample.value

    @property
    def failure(self) -> str | None:
        return "vLLM's EngineCore is dead" if self._llm.errored else None

    @property
    def last_step_at(self) -> float:
        return self._beat.at

    @property
    def loras(self) -> list[str]:
        return self._adapters.names

    async def load_lora(self, name: str, path: str) -> None:
        await self._adapters.load(name, path)

    async def unload_lora(self, name: str) -> None:
        await self._adapters.unload(name)

    async def stop(self, timeout_s: float) -> None:
        await asyncio.to_thread(self._llm.shutdown, timeout_s)
