"""Load by Locust: the mixed traffic of many users, over Triton's gRPC stream or over the OpenAI gateway.

    pip install 'voltriton[load]'
    locust -f perf/locustfile.py GrpcUser   --headless -u 32 -r 4 -t 60s --host 127.0.0.1:8001
    locust -f perf/locustfile.py OpenAiUser --headless -u 32 -r 4 -t 60s --host http://127.0.0.1:9000

65 % of the requests have 128 input tokens, 25 % 1024, 10 % 4096; each answer has 128 tokens, forced. Prompts are
token ids, so that their length is exact. Two rows a kind: `ttft` until the first text, `answer` until the end;
"content size" of an answer is its tokens, by the server's count. `--scale 0.1` shortens prompts and answers, for
models with a short context.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

from locust import HttpUser, User, constant, events, task
from locust.env import Environment

# (share, input tokens), as the seeds have it.
MIX = ((0.65, 128), (0.25, 1024), (0.10, 4096))
OUTPUT_TOKENS = 128
# Ids that every vocabulary has, clear of its special tokens, which are first or last in most.
TOKEN_IDS = range(300, 1000)


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--model", default="vllm", help="model to ask")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor for the lengths; 1: 128/1024/4096 in, 128 out"
    )
    parser.add_argument("--api-key", default=os.environ.get("VOLTRITON_API_KEY", ""), help="for the gateway")


@events.test_start.add_listener
def check_options(environment: Environment, **_: Any) -> None:
    scale = environment.parsed_options.scale
    if not 0 < scale <= 100:
        raise SystemExit(f"--scale: got {scale}, allowed: more than 0, at most 100")


class Ask:
    """One request of the mix: its name in the report, its prompt, and how long its answer is."""

    def __init__(self, scale: float) -> None:
        length = random.choices([tokens for _, tokens in MIX], [share for share, _ in MIX])[0]
        self.kind = f"{length} in"
        self.prompt = random.choices(TOKEN_IDS, k=max(1, round(length * scale)))
        self.max_tokens = max(1, round(OUTPUT_TOKENS * scale))

    @property
    def sampling(self) -> dict[str, Any]:
        return {
            "max_tokens": self.max_tokens,
            "min_tokens": self.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
        }


class Report:
    """Tells Locust of one answer: when its first text came, when its last, or what went wrong."""

    def __init__(self, environment: Environment, kind: str) -> None:
        self._environment = environment
        self._kind = kind
        self._started = time.perf_counter()
        self._has_text = False

    def text(self) -> None:
        """The first text that can be seen counts; an empty piece does not."""
        if not self._has_text:
            self._has_text = True
            self._fire("ttft", 0, None)

    def end(self, tokens: int, error: Exception | None = None) -> None:
        self._fire("answer", tokens, error)

    def _fire(self, what: str, size: int, error: Exception | None) -> None:
        elapsed_ms = (time.perf_counter() - self._started) * 1000
        self._environment.events.request.fire(
            request_type=what,
            name=self._kind,
            response_time=elapsed_ms,
            response_length=size,
            exception=error,
            context={},
        )


class GrpcUser(User):
    """Waits for one answer after another over Triton's gRPC stream."""

    wait_time = constant(0)

    def on_start(self) -> None:
        import grpc.experimental.gevent

        # Locust's users are greenlets: gRPC must know before its first channel.
        grpc.experimental.gevent.init_gevent()
        from voltriton_client import Client

        self._client = Client(str(self.host))

    def on_stop(self) -> None:
        self._client.close()

    @task
    def ask(self) -> None:
        options = self.environment.parsed_options
        asked = Ask(options.scale)
        report, tokens = Report(self.environment, asked.kind), 0
        try:
            for chunk in self._client.stream(
                token_ids=asked.prompt, model=options.model, sampling=asked.sampling
            ):
                tokens = chunk.usage.completion_tokens
                if chunk.has_content:
                    report.text()
        except Exception as error:
            report.end(tokens, error)
        else:
            report.end(tokens, _shortfall(tokens, asked))


class OpenAiUser(HttpUser):
    """The same over the gateway: /v1/completions with token ids, streamed, with usage."""

    wait_time = constant(0)

    @task
    def ask(self) -> None:
        options = self.environment.parsed_options
        asked = Ask(options.scale)
        body = {"model": options.model, "prompt": asked.prompt, "stream": True, **asked.sampling}
        body["stream_options"] = {"include_usage": True}
        headers = {"authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        report, tokens = Report(self.environment, asked.kind), 0
        with self.client.post(
            "/v1/completions", json=body, headers=headers, stream=True, catch_response=True, name=asked.kind
        ) as response:
            try:
                tokens = self._read(response, report)
                response.success()
                report.end(tokens, _shortfall(tokens, asked))
            except Exception as error:
                response.failure(error)
                report.end(tokens, error)

    def _read(self, response: Any, report: Report) -> int:
        """The server's count of tokens. RuntimeError: an error, or no end."""
        if response.status_code != 200:
            raise RuntimeError(f"status {response.status_code}: {response.text[:200]}")
        tokens = 0
        for line in response.iter_lines():
            data = line.decode("utf-8").removeprefix("data: ")
            if data == "[DONE]":
                return tokens
            if not data:
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            if any(choice["text"] for choice in event["choices"]):
                report.text()
        raise RuntimeError("the answer was cut")


def _shortfall(tokens: int, asked: Ask) -> Exception | None:
    """An answer of another length than was forced is a failure: its times mean nothing."""
    if tokens == asked.max_tokens:
        return None
    return RuntimeError(f"{tokens} tokens instead of {asked.max_tokens}")
