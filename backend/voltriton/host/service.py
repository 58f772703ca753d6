"""The engine host's service: admission, deadlines, cancellation, drain. No tensors, no vLLM types.

A request is one asyncio task. What the tasks produce is gathered and leaves as one frame a turn of the
event loop. Whatever happens to a task, its request is answered exactly once: by a final delta or by "ended".
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from voltriton.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    Unavailable,
    VoltritonError,
)
from voltriton.host import chat, lora, sampling
from voltriton.host.engine_api import Engine, Prompt
from voltriton.settings import Settings
from voltriton.wire import Delta, Generation

Send = Callable[[list[Any]], None]


class Service:
    """Requests between the stub and one engine."""

    def __init__(self, engine: Engine, settings: Settings, send: Send) -> None:
        self._engine = engine
        self._settings = settings
        self._send = send
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelling: dict[int, VoltritonError] = {}
        self._outbox: list[list[Any]] = []
        self._flushing = False
        self._draining = False
        self._closing: asyncio.Task[None] | None = None
        # Sequences that were admitted and have not ended, and prompt tokens still without a first token.
        self.open_sequences = 0
        self.waiting_tokens = 0
        info = engine.info
        self._limits = sampling.Limits(
            vocab_size=info.vocab_size,
            max_logprobs=info.max_logprobs,
            max_model_len=info.max_model_len,
            max_max_tokens=settings.max_max_tokens,
            max_grammar_chars=settings.max_grammar_chars,
        )

    @property
    def open_requests(self) -> int:
        return len(self._tasks)

    def submit(self, generation: Generation) -> None:
        if self._settings.log_prompts:
            prompt = generation.prompts or generation.input_ids or generation.chat or generation.embedding
            print(f"[vllm] request {generation.id}: {json.dumps(prompt, ensure_ascii=False)}", flush=True)
        task = asyncio.get_running_loop().create_task(self._run(generation), name=generation.id)
        self._tasks[generation.key] = task
        task.add_done_callback(lambda done: self._tasks.pop(generation.key, None))

    def cancel(self, key: int, error: VoltritonError | None = None) -> None:
        """Ends a request wherever it is; the engine is told by the closing of its generator."""
        task = self._tasks.get(key)
        if task is not None and key not in self._cancelling:
            self._cancelling[key] = error or Cancelled("Request was cancelled")
            task.cancel()

    def drain(self) -> None:
        self._draining = True

    def start_drain(self, grace_s: float) -> None:
        """Refuses new requests at once; what is still open after the grace is ended with an error."""
        if not self._draining:
            self.drain()
            self._closing = asyncio.get_running_loop().create_task(self.finish(grace_s))

    async def finish(self, grace_s: float) -> None:
        """Lets open requests end by themselves for so long, then ends them."""
        self.drain()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=grace_s)
        self.fail_all(Unavailable(f"the model is being stopped and its grace of {grace_s:g} s is over"))
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=5.0)

    def fail_all(self, error: VoltritonError) -> None:
        for key in list(self._tasks):
            self.cancel(key, error)

    async def _run(self, generation: Generation) -> None:
        try:
            async with asyncio.timeout(self._timeout_s(generation)):
                await self._answer(generation)
        except TimeoutError:
            limit_ms = (self._timeout_s(generation) or 0.0) * 1000
            self._ended(generation, DeadlineExceeded(f"the request took longer than {limit_ms:.0f} ms"))
        except asyncio.CancelledError:
            self._ended(generation, self._cancelling.pop(generation.key, Cancelled("Request was cancelled")))
        except VoltritonError as error:
            self._ended(generation, error)
        except Exception as error:
            if self._engine.failure is not None:
                self._ended(generation, Unavailable(f"the engine died: {self._engine.failure}"))
                return
            traceback.print_exc(file=sys.stderr)
            self._ended(generation, InternalError(f"{type(error).__name__}: {error}"))
        finally:
            self._cancelling.pop(generation.key, None)

    def _timeout_s(self, generation: Generation) -> float | None:
        limits = [self._settings.max_request_s]
        if generation.timeout_ms is not None:
            limits.append(generation.timeout_ms / 1000)
        return min((x for x in limits if x is not None), default=None)

    def _ended(self, generation: Generation, error: VoltritonError) -> None:
        self._flush()
        self._send(["ended", generation.key, type(error).__name__, str(error)])

    async def _answer(self, generation: Generation) -> None:
        if self._draining:
            raise Unavailable("the model is being drained; send the request elsewhere")
        began = time.monotonic()
        if generation.embedding is not None:
            await self._embed(generation)
            return
        if generation.lora is not None:
            await lora.apply(generation.lora, self._engine, self._settings.lora_folder)
            names = json.dumps(self._engine.loras)
            self._emit(Delta(generation.key, text=names, finish_reason="stop", final=True))
            return
        params = sampling.parse(generation.sampling, self._limits)
        self._check_task("generate")
        if generation.chat is not None:
            chat.check(generation.chat, self._engine.info)
            chat.check_tool_choice(generation.chat, self._settings.tool_parser)
        self._check_lora(params)
        self._check_images(generation)
        sequences = params.get("n", 1) * max(1, len(generation.prompts or []))
        with self._admitted(sequences):
            prompts = await self._engine.render(generation)
            if generation.render_only:
                self._emit_prompts(generation, prompts)
                return
            each = [self._params_for(prompt, params, generation) for prompt in prompts]
            self._admit_tokens(sum(len(prompt.token_ids) for prompt in prompts))
            await self._generate(generation, prompts, each, began)

    def _check_task(self, task: str) -> None:
        tasks = self._engine.info.tasks
        if task not in tasks:
            raise InvalidArgument(
                f"the model does not support '{task}' requests; it supports {', '.join(tasks)}"
            )

    def _check_lora(self, params: dict[str, Any]) -> None:
        """The official backend's sentences, which clients search for."""
        name = params.get("lora_name")
        if name is None:
            return
        info = self._engine.info
        if not info.lora_enabled:
            raise InvalidArgument(
                f"sampling_parameters.lora_name: got {name!r}: LoRA feature is not enabled."
            )
        known = self._engine.loras
        if name not in known:
            raise InvalidArgument(
                f"sampling_parameters.lora_name: LoRA {name} is not supported, we currently support {known}"
            )

    def _check_images(self, generation: Generation) -> None:
        limit = self._settings.max_images
        if len(generation.images) > limit:
            raise InvalidArgument(
                f"image: got {len(generation.images)} images, at most max_images={limit} are allowed"
            )
        for i, image in enumerate(generation.images):
            size = len(image) * 3 // 4
            if size > self._settings.max_image_bytes:
                raise InvalidArgument(
                    f"image[{i}]: {size} bytes, at most max_image_bytes={self._settings.max_image_bytes} are allowed"
                )

    @contextlib.contextmanager
    def _admitted(self, sequences: int) -> Iterator[None]:
        """Counts the request's sequences while it lives; refuses at once, with the numbers, when it is one too many."""
        running, waiting = self._engine.info.max_num_seqs, self._settings.max_queued_requests
        if self.open_sequences + sequences > running + waiting:
            raise Unavailable(
                f"overloaded: {self.open_sequences} sequences are open, {running} run at once (max_num_seqs) and "
                f"{waiting} more may wait (max_queued_requests); try again later"
            )
        self.open_sequences += sequences
        try:
            yield
        finally:
            self.open_sequences -= sequences

    def _admit_tokens(self, tokens: int) -> None:
        limit = self._settings.max_queued_prompt_tokens
        # A prompt alone is never refused: it could not be served at any other time either.
        if limit is not None and self.waiting_tokens and self.waiting_tokens + tokens > limit:
            raise Unavailable(
                f"overloaded: {self.waiting_tokens} prompt tokens wait for their prefill and this request has "
                f"{tokens} more; at most max_queued_prompt_tokens={limit} may wait; try again later"
            )

    def _params_for(self, prompt: Prompt, params: dict[str, Any], generation: Generation) -> dict[str, Any]:
        default = self._settings.default_max_tokens
        if default is None and generation.chat is None:
            default = 16  # vLLM's own, and so the official backend's
        limit = sampling.resolve_max_tokens(params, len(prompt.token_ids), self._limits, default)
        return {**params, "max_tokens": limit}

    async def _generate(
        self, generation: Generation, prompts: list[Prompt], params: list[dict[str, Any]], began: float
    ) -> None:
        emit = Emitter(generation, prompts, params[0].get("n", 1), began, self._emit)
        if len(prompts) == 1:
            await self._follow(generation, prompts[0], params[0], 0, emit)
            return
        try:
            async with asyncio.TaskGroup() as group:
                for i, prompt in enumerate(prompts):
                    group.create_task(self._follow(generation, prompt, params[i], i, emit))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _follow(
        self, generation: Generation, prompt: Prompt, params: dict[str, Any], position: int, emit: Emitter
    ) -> None:
        waiting = len(prompt.token_ids)
        self.waiting_tokens += waiting
        request_id = generation.id if position == 0 else f"{generation.id}-{position}"
        stream = self._engine.generate(generation, prompt, params, request_id)
        try:
            async for delta in stream:
                if waiting:
                    self.waiting_tokens -= waiting
                    waiting = 0
                emit(position, delta)
        finally:
            self.waiting_tokens -= waiting
            # Closing the generator is what tells the engine to abort.
            await stream.aclose()  # type: ignore[attr-defined]

    def _emit_prompts(self, generation: Generation, prompts: list[Prompt]) -> None:
        for i, prompt in enumerate(prompts):
            ids = prompt.token_ids
            self._emit(
                Delta(
                    generation.key,
                    i,
                    num_tokens=len(ids),
                    token_ids=ids,
                    finish_reason="stop",
                    final=i == len(prompts) - 1,
                )
            )

    async def _embed(self, generation: Generation) -> None:
        self._check_task("embed")
        with self._admitted(1):
            delta = await self._engine.embed(generation, generation.id)
        delta.key, delta.final = generation.key, True
        self._emit(delta)

    def _emit(self, delta: Delta) -> None:
        self._outbox.append(delta.row())
        if not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._outbox:
            rows, self._outbox = self._outbox, []
            self._send(["deltas", rows])


class Emitter:
    """Turns the prompts' own deltas into the request's: indices, request-level extras, the one final mark."""

    def __init__(
        self,
        generation: Generation,
        prompts: list[Prompt],
        n: int,
        began: float,
        emit: Callable[[Delta], None],
    ) -> None:
        self._key = generation.key
        self._n = n
        self._began = began
        self._send = emit
        self._counts = [len(prompt.token_ids) for prompt in prompts]
        self._open = n * len(prompts)
        self._started = False

    def __call__(self, position: int, delta: Delta) -> None:
        delta.key = self._key
        delta.index += position * self._n
        extra = self._per_prompt(delta.extra, position)
        if not self._started:
            self._started = True
            extra["num_input_tokens"] = self._counts
        if delta.finish_reason is not None:
            self._open -= 1
            delta.final = self._open == 0
        if delta.final:
            timing = extra.setdefault("timing", {})
            timing["total_ms"] = round((time.monotonic() - self._began) * 1000, 3)
        else:
            extra.pop("timing", None)
        delta.extra = extra or None
        self._send(delta)

    def _per_prompt(self, extra: dict[str, Any] | None, position: int) -> dict[str, Any]:
        """The engine says one prompt's value; the request has a list, one element a prompt."""
        result: dict[str, Any] = {}
        for name, value in (extra or {}).items():
            if name == "timing":
                result[name] = value
            else:
                result[name] = [None] * len(self._counts)
                result[name][position] = value
        return result
