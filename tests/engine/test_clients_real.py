"""The clients, the commands and the gateway with the real engine and the demo model."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import voltriton_client as vc
from browser import CHROMIUM, Browser, assert_drawn
from repository import real_repository
from serve import Serve
from server import Server, wait_for
from serving import gateway
from terminal import Terminal, command
from voltriton.cli import main as voltriton
from voltriton.triton import default_root

PARIS: Any = [{"role": "user", "content": "What is the capital of France?"}]


STORY = "Tell me a very long story about a dragon."
ENDLESS: Any = {"max_tokens": 1500, "ignore_eos": True}


@contextmanager
def given_up(server: Server, outcome: str = "cancelled") -> Iterator[Callable[[], None]]:
    """`with given_up(server) as runs:` the one request of the block, which runs when `runs()` returns and is given up
    then, ends so in the engine too. (vLLM's numbers are up to a second old.)"""

    def ended() -> float:
        return server.metric("voltriton:requests_total", outcome=outcome)

    before = ended()
    yield lambda: wait_for(lambda: server.metric("vllm:num_requests_running") > 0, 20, "a running request")
    wait_for(lambda: server.metric("vllm:num_requests_running") == 0, 20, "no running request")
    wait_for(lambda: ended() == before + 1, 20, f"a request that ended as {outcome}")


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
    with vc.Client(server.grpc_url) as client:
        with given_up(server) as runs, client.stream("Once upon a time", **ENDLESS) as stream:
            next(stream)
            runs()
        with given_up(server, "deadline"), pytest.raises(vc.DeadlineExceeded):
            client.generate("Once upon a time", timeout_s=1, **ENDLESS)


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
    with opened(server) as client:
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
    with opened(server) as client:
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
    """Streaming and not; and the gateway's own time limit."""
    endless: Any = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with opened(server) as client:
        with given_up(server) as runs, client.chat.completions.create(
            model="vllm", messages=PARIS, stream=True, **endless
        ) as stream:  # fmt: skip
            next(iter(stream))
            runs()
        with given_up(server), pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=2).chat.completions.create(model="vllm", messages=PARIS, **endless)
    with given_up(server, "deadline"), opened(server, request_timeout_s=1) as client:
        with pytest.raises(openai.InternalServerError, match="longer than 1000 ms") as caught:
            client.chat.completions.create(model="vllm", messages=PARIS, **endless)
        assert caught.value.status_code == 504


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


def say(page: Browser, text: str) -> None:
    page.ask("document.querySelector('#text').focus()")
    page.type(text)
    page.press_enter()


def use_the_page(server: Server, url: str, folder: Path) -> None:
    """As a person does: an answer that streams, with its numbers, and a long one that is stopped."""
    last, note = (
        f"[...document.querySelectorAll('{kind}')].at(-1)?.textContent" for kind in (".assistant", ".note")
    )
    done = "!document.querySelector('#send').disabled"
    with Browser(folder) as page:
        page.go(url)
        page.until("document.querySelector('#model').value === 'vllm'")
        page.ask("document.querySelector('#temperature').value = '0'")
        say(page, PARIS[0]["content"])
        # Some of the answer is there while it is being made.
        first = page.until(f"document.querySelector('#send').disabled && {last}", 60)
        page.until(done, 60)
        whole = page.ask(last)
        assert "Paris" in whole and whole.startswith(first) and first != whole
        assert re.fullmatch(r"TTFT \d+ ms · \d+\.\d tok/s · \d+ tokens", page.ask(note))
        with given_up(server) as runs:
            say(page, STORY)
            page.until(f"{last}.length > 40", 60)
            runs()
            page.click("#stop")
            page.until(done)
        assert re.fullmatch(r"TTFT \d+ ms · \d+\.\d tok/s · \d+ tokens · stopped", page.ask(note))
        assert page.errors == []
        page.screenshot(folder / "page.png")
    assert_drawn(folder / "page.png")
    print(f"screenshot: {folder / 'page.png'}", file=sys.stderr)


needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)"
)


@needs_chromium
def test_page_with_the_demo_model(server: Server, tmp_path: Path) -> None:
    with gateway(server.grpc_url) as url:
        use_the_page(server, url, tmp_path)


@pytest.mark.slow
@needs_chromium
def test_page_and_commands_as_a_newcomer_has_them(demo_model: Path, tmp_path: Path) -> None:
    """`voltriton serve`, `voltriton gateway`, a browser, and the commands that look after them."""
    repository = real_repository(tmp_path / "repository", demo_model)
    with Serve(repository, tmp_path, ready_s=600) as serve, served_gateway(serve) as url:
        use_the_page(serve, url, tmp_path)
        # The supervisor keeps the repository's calls to itself, and notes where the metrics are.
        status = ["status", "--server", serve.grpc_url, "--run-dir", str(default_root() / "run"), "--json"]
        done = subprocess.run(command(*status), capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert (
            said["ready"] and said["engine"]["vllm"]["up"] == 1 and said["supervisor"][0]["state"] == "ready"
        )
        listed = subprocess.run(
            command("models", "--server", serve.grpc_url), capture_output=True, text=True, timeout=60
        )
        assert listed.returncode == 0 and re.search(r"^vllm +1 +READY$", listed.stdout, re.M)


@contextmanager
def served_gateway(server: Server) -> Iterator[str]:
    """`voltriton gateway` as a process; it ends on SIGTERM, well."""
    argv = command("gateway", "--port", "0", "--server", server.grpc_url)
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        yield process.stderr.readline().split()[2]
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


def test_a_talk_on_a_terminal(server: Server) -> None:
    """History, /reset, a system prompt, and Ctrl-C that ends the answer in the engine and not the program."""

    def prompt_tokens() -> float:
        return server.metric("vllm:prompt_tokens_total")

    def settled() -> float:
        """The count, when it has stood still for as long as a number may be old."""
        while True:
            before = prompt_tokens()
            time.sleep(1.1)
            if prompt_tokens() == before:
                return before

    def asks_with(prompt: float) -> None:
        """The question goes out in a prompt of so many tokens, that is with the history that it should have."""
        nonlocal total
        talk.until("> ")
        talk.say(f"{PARIS[0]['content']}\n")
        answer = talk.until(" tok/s", 60)
        assert "Paris" in answer and "tokens in" in answer
        total += prompt
        wait_for(lambda: prompt_tokens() >= total, 10, f"{prompt} tokens of a prompt")
        assert prompt_tokens() == total

    with vc.Client(server.grpc_url) as client:
        system = {"role": "system", "content": "You know all about France."}
        answer = {"role": "assistant", "content": client.chat(PARIS, temperature=0, max_tokens=64).text}
        bare, second, with_system = (
            client.chat(messages, max_tokens=1).usage.prompt_tokens
            for messages in (PARIS, [*PARIS, answer, *PARIS], [system, *PARIS])
        )
    assert bare != with_system
    total = settled()
    talk = Terminal(command("chat", "-t", "0", "--server", server.grpc_url))
    try:
        asks_with(bare)
        asks_with(second)
        talk.until("> ")
        talk.say(f"/system {system['content']}\n")
        with given_up(server) as runs:
            talk.until("> ")
            talk.say(f"{STORY}\n")
            # The echo, and the first word of the answer.
            talk.until(f"{STORY}\r\n")
            talk.until(" ", 60)
            runs()
            talk.say("\x03")
            talk.until("[stopped]")
        talk.until("> ")
        talk.say("/reset\n")
        total = prompt_tokens()
        asks_with(with_system)
        talk.say("/exit\n")
        assert talk.process.wait(20) == 0
    finally:
        talk.close()


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
def opened(server: Server, **settings: Any) -> Iterator[openai.OpenAI]:
    """The openai package, through a gateway of its own."""
    with (
        gateway(server.grpc_url, **{"request_timeout_s": 60, **settings}) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client
