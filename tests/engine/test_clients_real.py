"""The clients, the commands and the gateway with the real engine and the demo model."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import voltriton_client as vc
from repository import real_repository
from server import Server, wait_for
from serving import gateway
from voltriton.cli import main as voltriton

PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]


def idle(server: Server) -> None:
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, 20, "no running request")


def test_stream_and_whole_are_the_same_answer(server: Server) -> None:
    with vc.Client(server.grpc_url) as client:
        chunks = list(client.stream(messages=PARIS, temperature=0, max_tokens=40, want={"token_ids"}))
        whole = client.chat(PARIS, temperature=0, max_tokens=40)
    text = "".join(chunk.text for chunk in chunks)
    assert "Paris" in text and text == whole.text
    assert chunks[-1].finish_reason == whole.finish_reason == "stop"
    assert sum(len(chunk.token_ids) for chunk in chunks) == chunks[-1].usage.completion_tokens
    assert whole.usage == vc.Usage(
        chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens, whole.usage.cached_tokens
    )
    assert whole.timing and whole.timing.first_token_ms and whole.timing.first_token_ms > 0
    assert len(chunks) > 3


def test_cancelled_requests_leave_the_engine(server: Server) -> None:
    endless = {"max_tokens": 1500, "ignore_eos": True}
    with vc.Client(server.grpc_url) as client:
        with client.stream("Once upon a time", **endless) as stream:
            next(stream)
        idle(server)
        with pytest.raises(vc.DeadlineExceeded):
            client.generate("Once upon a time", timeout_s=1, **endless)
        idle(server)


def test_several_at_a_time(server: Server) -> None:
    async def main() -> list[vc.Result]:
        async with vc.AsyncClient(server.grpc_url) as client:
            asked = (client.chat(PARIS, temperature=0, max_tokens=24) for _ in range(6))
            return list(await asyncio.gather(*asked))

    assert all("Paris" in result.text for result in asyncio.run(main()))


def test_http_form(server: Server) -> None:
    with vc.HttpClient(f"127.0.0.1:{server.http}") as client:
        chunks = list(client.stream(messages=PARIS, temperature=0, max_tokens=24))
        assert "Paris" in "".join(chunk.text for chunk in chunks)
        assert chunks[-1].final


def test_commands(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    where = ["--server", server.grpc_url]
    assert (
        voltriton(["chat", "--stats", "-t", "0", "-n", "24", "What is the capital of France?", *where]) == 0
    )
    out, err = capsys.readouterr()
    assert "Paris" in out and "tok/s" in err
    (tmp_path / "prompts").write_text("One plus one is\nThe sky is\n")
    assert (
        voltriton(["generate", "-f", str(tmp_path / "prompts"), "-n", "8", "-t", "0", "--json", *where]) == 0
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["completion_tokens"] for line in lines] == [8, 8]
    status = ["status", *where, "--metrics", f"127.0.0.1:{server.metrics}", "--json"]
    assert voltriton(status) == 0
    engine = json.loads(capsys.readouterr().out)["engine"]["vllm"]
    assert {"running", "waiting", "kv_cache_use", "generation_tokens"} <= set(engine)


def test_gateway(server: Server) -> None:
    with (
        gateway(server.grpc_url, request_timeout_s=60) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        create = client.chat.completions.create
        whole = create(model="vllm", messages=PARIS, temperature=0, max_tokens=40)
        assert (
            "Paris" in (whole.choices[0].message.content or "") and whole.choices[0].finish_reason == "stop"
        )
        events = list(
            create(
                model="vllm", messages=PARIS, temperature=0, max_tokens=40, stream=True,
                stream_options={"include_usage": True},
            )
        )  # fmt: skip
        assert (
            "".join(e.choices[0].delta.content or "" for e in events if e.choices)
            == whole.choices[0].message.content
        )
        assert (
            whole.usage
            and events[-1].usage
            and events[-1].usage.completion_tokens == whole.usage.completion_tokens
        )
        cut = create(model="vllm", messages=PARIS, temperature=0, max_tokens=2)
        assert cut.choices[0].finish_reason == "length"


def test_gateway_logprobs_n_stop_seed(server: Server) -> None:
    with (
        gateway(server.grpc_url, request_timeout_s=60) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        create = client.chat.completions.create
        answer = create(
            model="vllm", messages=PARIS, temperature=0, max_tokens=6, logprobs=True, top_logprobs=3
        )
        content = answer.choices[0].logprobs.content if answer.choices[0].logprobs else None
        assert content and len(content) == 6
        assert "".join(entry.token for entry in content) == answer.choices[0].message.content
        for entry in content:
            # Greedy: the chosen token is the likeliest.
            assert entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 3
        several = create(model="vllm", messages=PARIS, n=3, seed=5, temperature=1, max_tokens=8)
        again = create(model="vllm", messages=PARIS, n=3, seed=5, temperature=1, max_tokens=8)
        assert [c.message.content for c in several.choices] == [c.message.content for c in again.choices]
        assert len({c.message.content for c in several.choices}) > 1
        stopped = create(model="vllm", messages=PARIS, temperature=0, max_tokens=40, stop=["France"])
        assert "France" not in (stopped.choices[0].message.content or "")
        completion = client.completions.create(
            model="vllm", prompt=["The sky is", "Water is"], temperature=0, max_tokens=4, logprobs=2
        )
        assert [len(c.logprobs.tokens or []) for c in completion.choices if c.logprobs] == [4, 4]


def test_gateway_json_schema(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "capital": {"type": "boolean"}},
        "required": ["city", "capital"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    with (
        gateway(server.grpc_url, request_timeout_s=60) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(
            model="vllm", messages=PARIS, temperature=0, max_tokens=64, response_format=form
        )
        parsed = json.loads(answer.choices[0].message.content or "")
        assert set(parsed) == {"city", "capital"} and isinstance(parsed["capital"], bool)
        with pytest.raises(openai.BadRequestError):
            bad: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}
            client.chat.completions.create(model="vllm", messages=PARIS, max_tokens=8, response_format=bad)
        assert httpx.get(f"{url}/health").status_code == 200


def test_gateway_leaving_cancels(server: Server) -> None:
    endless: Any = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with (
        gateway(server.grpc_url, request_timeout_s=60) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        with client.chat.completions.create(model="vllm", messages=PARIS, stream=True, **endless) as stream:
            next(iter(stream))
        idle(server)
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=1).chat.completions.create(model="vllm", messages=PARIS, **endless)
        idle(server)


def test_refusals_reach_the_caller(server: Server) -> None:
    with gateway(server.grpc_url) as url:
        body = {"model": "vllm", "messages": PARIS, "chat_template_kwargs": {"enable_thinkin": False}}
        response = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert response.status_code == 400 and "enable_thinkin" in response.json()["error"]["message"]
        long = httpx.post(
            f"{url}/v1/completions", json={"model": "vllm", "prompt": "word " * 20_000}, timeout=60
        )
        embedding = httpx.post(f"{url}/v1/embeddings", json={"model": "vllm", "input": "x"})
        assert embedding.status_code == 400 and "embed" in embedding.json()["error"]["message"]
        assert long.status_code == 400 and "tokens" in long.json()["error"]["message"]


def test_page_with_the_demo_model(server: Server, tmp_path: Path) -> None:
    browser = pytest.importorskip("browser")
    if browser.CHROMIUM is None:
        pytest.skip("no Chromium here (Debian: apt-get install chromium)")
    with gateway(server.grpc_url) as url, browser.Browser(tmp_path) as page:
        page.go(url)
        page.until("document.querySelector('#model').value === 'vllm'")
        page.ask("document.querySelector('#temperature').value = '0'")
        page.ask("document.querySelector('#text').focus()")
        page.type("What is the capital of France?")
        page.press_enter()
        page.until("document.querySelector('.note')?.textContent.includes('tok/s')", 60)
        page.until("!document.querySelector('#send').disabled", 60)
        assert "Paris" in page.ask("document.querySelector('.assistant').textContent")
        page.screenshot(tmp_path / "page.png")
        print(f"screenshot: {tmp_path / 'page.png'}", file=sys.stderr)


ASK: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
# What a model that was trained to think writes; the grammar makes the demo model write it, so that the parser reads a
# real engine's tokens, and the same ones each time.
THINKS = {"regex": r"<think>\n[a-z ]{10,30}\n</think>\n\nParis\."}


@pytest.fixture(scope="module")
def parsing(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[Server]:
    """The demo model behind the parser of <think>, and Hermes' of tool calls."""
    folder = tmp_path_factory.mktemp("parsing")
    repository = real_repository(
        folder / "repository", demo_model, {"tool_parser": "hermes", "reasoning_parser": "olmo3"}
    )
    with Server(repository, folder / "log", ready_s=600) as running:
        yield running


def test_reasoning_is_told_apart(parsing: Server) -> None:
    asked: Any = {"temperature": 0, "max_tokens": 60, "structured_outputs": THINKS}
    with vc.Client(parsing.grpc_url) as client:
        chunks = list(client.stream(messages=ASK, **asked))
        whole = client.chat(ASK, **asked)
    assert whole.text.strip() == "".join(c.text for c in chunks).strip() == "Paris."
    assert whole.reasoning and re.fullmatch(r"[a-z ]{10,30}", whole.reasoning.strip())
    assert "".join(c.reasoning for c in chunks).strip() == whole.reasoning.strip()
    assert "think" not in whole.text + whole.reasoning
    with opened(parsing) as client:
        create = functools.partial(
            client.chat.completions.create, model="vllm", messages=ASK, temperature=0, max_tokens=60,
            extra_body={"structured_outputs": THINKS},
        )  # fmt: skip
        message = create().choices[0].message
        assert message.content == whole.text
        assert message.model_extra and message.model_extra["reasoning_content"] == whole.reasoning
        deltas = [event.choices[0].delta for event in create(stream=True) if event.choices]
        assert "".join(d.content or "" for d in deltas).strip() == "Paris."
        said = "".join((d.model_extra or {}).get("reasoning_content") or "" for d in deltas)
        assert said.strip() == whole.reasoning.strip()


@contextmanager
def opened(server: Server) -> Iterator[openai.OpenAI]:
    """The openai package, through a gateway of its own."""
    with (
        gateway(server.grpc_url, request_timeout_s=60) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client
