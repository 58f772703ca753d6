"""A scripted engine for the real service behind a real tritonserver: no model, exact timing.

A prompt that is a JSON object is a script, anything else is answered by its own words:

    tokens          texts of the tokens ("" is a token whose text is held back), or "repeat": [text, count]
    hex             instead: bytes of each token, as hexadecimal; text appears when a character is whole
    delay_ms        before each token        first_ms   before the first one (the prefill)
    finish          "stop" (default) or "length"        stop_reason
    die_at, stop_at, stall_at, fail_at   before the token of this number: SIGKILL or SIGSTOP of the host itself,
                    no further step, an exception

`FAKE_STEP_MS` in the environment is the default delay. Token ids are 100, 101, ...; a prompt has one token a word.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from voltriton.errors import InvalidArgument, StartError
from voltriton.host.engine_api import EngineInfo, Prompt
from voltriton.settings import ModelSettings
from voltriton.wire import Delta, Generation


class FakeEngine:
    def __init__(self, args: dict[str, Any], loras: dict[str, str]) -> None:
        self.info = EngineInfo(
            max_model_len=args.get("max_model_len", 4096),
            max_num_seqs=args.get("max_num_seqs", 32),
            vocab_size=1000,
            max_logprobs=20,
            tasks=("generate", "embed"),
            control_tokens=frozenset({"<|im_end|>", "<|im_start|>"}),
            template_variables=frozenset({"messages", "tools", "enable_thinking", "add_generation_prompt"}),
            lora_enabled=bool(args.get("enable_lora")),
            about={"engine": "fake", "model": args.get("model")},
        )
        self._loras = dict(loras)
        self._failure: str | None = None
        self._last_step = time.monotonic()
        self.running = 0
        self.tokens = 0

    @classmethod
    async def start(cls, model: ModelSettings) -> FakeEngine:
        args = model.engine_args
        if message := args.get("fail_to_start"):
            raise StartError(message)
        if args.get("die_at_start"):
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(args.get("start_s", 0.0))
        return cls(args, model.loras)

    async def render(self, generation: Generation) -> list[Prompt]:
        if generation.input_ids is not None:
            if max(generation.input_ids) >= self.info.vocab_size:
                raise InvalidArgument(f"prompt: Token id {max(generation.input_ids)} is out of vocabulary")
            return [Prompt(generation.input_ids, " ".join(f"<{i}>" for i in generation.input_ids))]
        if generation.chat is not None:
            return [self._prompt(_flat(generation.chat["messages"][-1]["content"]))]
        return [self._prompt(text) for text in generation.prompts or []]

    @staticmethod
    def _prompt(text: str) -> Prompt:
        return Prompt(list(range(1, 1 + len(text.split()))), text)

    async def generate(
        self, generation: Generation, prompt: Prompt, params: dict[str, Any], request_id: str
    ) -> AsyncIterator[Delta]:
        n = params.get("n", 1)
        queue: asyncio.Queue[Delta | Exception] = asyncio.Queue()
        tasks = [asyncio.create_task(self._sequence(i, generation, prompt, params, queue)) for i in range(n)]
        self.running += 1
        try:
            left = n
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                left -= item.finish_reason is not None
                yield item
        finally:
            self.running -= 1
            for task in tasks:
                task.cancel()

    async def _sequence(
        self,
        index: int,
        generation: Generation,
        prompt: Prompt,
        params: dict[str, Any],
        queue: asyncio.Queue[Any],
    ) -> None:
        try:
            whole = Delta(key=0, index=index, token_ids=[], logprobs=[])
            async for delta in self._steps(index, generation, prompt, params):
                if generation.stream:
                    queue.put_nowait(delta)
                    continue
                _merge(whole, delta)
                if delta.finish_reason is not None:
                    queue.put_nowait(whole)
        except Exception as error:
            queue.put_nowait(error)

    async def _steps(
        self, index: int, generation: Generation, prompt: Prompt, params: dict[str, Any]
    ) -> AsyncIterator[Delta]:
        script = _script(prompt.engine_input)
        texts = _texts(script)[: params["max_tokens"]]
        cut = len(texts) < len(_texts(script))
        delay = float(script.get("delay_ms", os.environ.get("FAKE_STEP_MS", "0"))) / 1000
        await asyncio.sleep(float(script.get("first_ms", 0)) / 1000)
        for i, text in enumerate(texts):
            await self._faults(script, i)
            await asyncio.sleep(delay)
            self._last_step = time.monotonic()
            self.tokens += 1
            last = i == len(texts) - 1
            yield Delta(
                key=0,
                index=index,
                text=text if params.get("n", 1) == 1 else text.replace("{i}", str(index)),
                num_tokens=1,
                token_ids=[100 + i] if "token_ids" in generation.wants else None,
                logprobs=[json.dumps({"100": {"logprob": -0.5, "rank": 1, "decoded_token": text}})]
                if params.get("logprobs") is not None
                else None,
                cumulative_logprob=-0.5 * (i + 1),
                finish_reason=("length" if cut else script.get("finish", "stop")) if last else None,
                stop_reason=script.get("stop_reason") if last else None,
                extra=_extra(i == 0, last),
            )

    async def _faults(self, script: dict[str, Any], step: int) -> None:
        if script.get("die_at") == step:
            os.kill(os.getpid(), signal.SIGKILL)
        if script.get("stop_at") == step:
            os.kill(os.getpid(), signal.SIGSTOP)
        if script.get("core_dies_at") == step:
            self._failure = "the core is dead"
        if script.get("stall_at") == step:
            await asyncio.sleep(3600)
        if script.get("fail_at") == step:
            raise RuntimeError("scripted fault")

    async def embed(self, generation: Generation, request_id: str) -> Delta:
        return Delta(key=0, text="[0.5, -0.25]", finish_reason="stop", extra={"num_input_tokens": [2]})

    def samples(self) -> Iterable[tuple[str, dict[str, str], float]]:
        yield "vllm:num_requests_running", {}, float(self.running)
        yield "vllm:generation_tokens_total", {}, float(self.tokens)
        yield "vllm:time_to_first_token_seconds_bucket", {"le": "0.1"}, float(self.tokens > 0)

    @property
    def failure(self) -> str | None:
        return self._failure

    @property
    def last_step_at(self) -> float:
        return self._last_step

    @property
    def loras(self) -> list[str]:
        return list(self._loras)

    async def load_lora(self, name: str, path: str) -> None:
        self._loras[name] = path

    async def unload_lora(self, name: str) -> None:
        del self._loras[name]

    async def stop(self, timeout_s: float) -> None:
        pass


def _flat(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _script(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        script: Any = json.loads(text)
        if isinstance(script, dict) and {"tokens", "repeat", "hex"} & script.keys():
            return script
    words = text.split(" ")
    return {"tokens": [word + " " for word in words[:-1]] + words[-1:]}


def _texts(script: dict[str, Any]) -> list[str]:
    if "hex" in script:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(bytes.fromhex(token)) for token in script["hex"]]
    if "repeat" in script:
        text, count = script["repeat"]
        return [text] * count
    return list(script["tokens"])


def _extra(first: bool, last: bool) -> dict[str, Any] | None:
    extra: dict[str, Any] = {}
    if first:
        extra["num_cached_tokens"] = 3
    if last:
        extra["timing"] = {"queue_ms": 0.5, "prefill_ms": 1.0, "first_token_ms": 1.5}
    return extra or None


def _merge(whole: Delta, delta: Delta) -> None:
    whole.text += delta.text
    whole.num_tokens += delta.num_tokens
    whole.token_ids = (whole.token_ids or []) + (delta.token_ids or [])
    whole.logprobs = (
        (whole.logprobs or []) + (delta.logprobs or []) if delta.logprobs else whole.logprobs or None
    )
    whole.cumulative_logprob = delta.cumulative_logprob
    whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
    whole.extra = {**(whole.extra or {}), **(delta.extra or {})} or None
