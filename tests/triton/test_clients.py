"""The clients and the gateway against a real tritonserver with the scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import voltriton_client as vc
from server import Server, fake_repository, wait_for
from serving import gateway
from tritonclient.grpc import service_pb2 as pb
from voltriton.cli import main as voltriton
from wire_client import ask


def script(**steps: Any) -> str:
    return json.dumps(steps)


LONG = script(repeat=["tick ", 4000], delay_ms=5)
SILENT = script(tokens=["late"], first_ms=30_000)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    repository = fake_repository(folder / "models", {"max_queued_requests": 4}, max_model_len=4096)
    with Server(repository, folder / "log") as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[vc.Client]:
    with vc.Client(server.grpc_url) as client:
        yield client


def running(server: Server) -> float:
    return server.metric("vllm:num_requests_running") + server.metric("voltriton:requests_open")


def idle(server: Server) -> None:
    wait_for(lambda: running(server) == 0, 10, "no running request")


def test_stream_tokens_usage_timing(client: vc.Client) -> None:
    chunks = list(client.stream("one two three", want={"token_ids"}))
    assert "".join(chunk.text for chunk in chunks) == "one two three"
    assert [number for chunk in chunks for number in chunk.token_ids] == [100, 101, 102]
    assert [chunk.final for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].usage == vc.Usage(3, 3, 3)
    assert chunks[-1].timing and chunks[-1].timing.first_token_ms == 1.5


def test_whole_answers_of_every_kind(client: vc.Client) -> None:
    assert client.generate("a b c", max_tokens=2).finish_reason == "length"
    assert client.chat([{"role": "user", "content": "hello you"}]).text == "hello you"
    assert client.generate(token_ids=[5, 6]).text == "<5> <6>"
    assert [choice.text for choice in client.generate(prompts=["a", "b c"]).choices] == ["a", "b c"]
    assert client.generate("x", n=3).choices[2].text == "x"
    assert client.embed("text") == [0.5, -0.25]


def test_facades_and_ensembles_can_be_asked_too(client: vc.Client) -> None:
    """The client sends only what a model takes, and sees the end of a one-step ensemble and of a façade."""
    messages = [{"role": "user", "content": "hello you"}]
    assert client.chat(messages, model="chat", max_tokens=8).text
    assert client.generate("hello you", model="generate").text == "hello you"
    assert "".join(chunk.text for chunk in client.stream("hello you", model="generate")) == "hello you"


def test_closing_the_iterator_stops_the_engine(server: Server, client: vc.Client) -> None:
    for prompt in (LONG, SILENT):
        with client.stream(prompt, max_tokens=4000) as stream:
            if prompt == LONG:
                next(stream)
            else:
                threading.Timer(0.5, stream.close).start()
                with pytest.raises(vc.Cancelled):
                    next(stream)
        idle(server)


def test_deadline(server: Server, client: vc.Client) -> None:
    started = time.monotonic()
    with pytest.raises(vc.DeadlineExceeded):
        client.generate(SILENT, timeout_s=0.5)
    assert time.monotonic() - started < 2
    idle(server)


@pytest.mark.parametrize(
    ("sampling", "words"),
    [({"temprature": 0}, "temperature"), ({"top_p": 1.7}, "top_p.*1.7"), ({"lora_name": "x"}, "(?i)lora")],
)
def test_refusals_are_named(client: vc.Client, sampling: dict[str, Any], words: str) -> None:
    with pytest.raises(vc.InvalidArgument, match=words):
        client.generate("x", **sampling)


def test_unknown_model(client: vc.Client) -> None:
    with pytest.raises(vc.ModelNotFound, match="no model 'nope'"):
        client.generate("x", model="nope")


def test_one_bad_request_on_a_shared_stream(client: vc.Client) -> None:
    """C057 without the error-code header."""
    with client.open_stream() as shared:
        slow = shared.stream(script(tokens=["a ", "b ", "c"], delay_ms=50))
        bad = shared.stream("x", top_p=7)
        good = shared.stream("d e")
        with pytest.raises(vc.InvalidArgument, match="top_p"):
            next(bad)
        assert "".join(chunk.text for chunk in good) == "d e"
        assert "".join(chunk.text for chunk in slow) == "a b c"


def test_one_bad_request_with_the_error_code_header(server: Server) -> None:
    """C057 with the header, which makes Triton end the stream with the error's status.

    With another request still open on that stream Triton 24.10 ends by a segmentation fault when the other
    one answers (`HandleCancellation called even when the context was not cancelled`), so the client never
    sends this header by itself and docs/clients.md warns of it; here the other one is done before.
    """
    with vc.Client(server.grpc_url, metadata=[("triton_grpc_error", "true")]) as client:
        with pytest.raises(vc.InvalidArgument, match="top_p"):
            client.generate("x", top_p=7)
        with client.open_stream() as shared:
            assert shared.generate("good").text == "good"
            with pytest.raises(vc.InvalidArgument, match="top_p"):
                shared.generate("x", top_p=7)
            with pytest.raises(vc.InvalidArgument, match="top_p"):
                shared.generate("after")
        assert client.generate("works on").text == "works on"
    idle(server)


def test_closing_a_shared_stream_cancels_all_of_it(server: Server, client: vc.Client) -> None:
    for _ in range(3):
        with client.open_stream() as shared:
            streams = [shared.stream(LONG, max_tokens=4000) for _ in range(8)]
            for stream in streams:
                next(stream)
        idle(server)
    with pytest.raises(vc.VoltritonError):
        list(streams[0])
    assert client.generate("alive").text == "alive"


def test_forty_requests_on_one_stream(server: Server, client: vc.Client) -> None:
    idle(server)  # what the test before cancelled is counted until Triton has told of it
    requests = [vc.Request(prompt=f"number {number}") for number in range(40)]
    outcomes = dict(client.generate_many(requests, concurrency=20))
    assert [outcomes[number].text for number in range(40)] == [f"number {n}" for n in range(40)]  # type: ignore[union-attr]


def test_one_of_many_is_cancelled_where_no_more_are_let_in(server: Server, client: vc.Client) -> None:
    idle(server)
    with client.open_stream() as shared:
        streams = [shared.stream(SILENT) for _ in range(36)]
        wait_for(lambda: server.metric("vllm:num_requests_running") == 36, 10, "36 running requests")
        with pytest.raises(vc.Unavailable, match="overloaded: 36"):
            shared.generate("one more")
        streams[7].close()
        wait_for(lambda: server.metric("vllm:num_requests_running") == 35, 10, "one to end")
        assert shared.generate("one more").text == "one more"
    idle(server)


def test_async_client(server: Server) -> None:
    async def main() -> None:
        async with vc.AsyncClient(server.grpc_url) as client:
            texts = await asyncio.gather(*(client.generate(f"n {number}") for number in range(16)))
            assert [result.text for result in texts] == [f"n {number}" for number in range(16)]
            task = asyncio.create_task(client.generate(SILENT))
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())
    idle(server)


async def leave(address: str, prompt: str, after_s: float) -> None:
    """Closes an answer so long after its first chunk."""
    async with vc.AsyncClient(address) as client:
        stream = client.stream(prompt, max_tokens=9)
        await anext(stream)
        await asyncio.sleep(after_s)
        await stream.aclose()


async def cancel(address: str, prompt: str, after_s: float) -> None:
    """Cancels the task that waits for an answer."""
    async with vc.AsyncClient(address) as client:
        await client.generate("a")
        task = asyncio.create_task(client.generate(prompt, max_tokens=9))
        await asyncio.wait([task], timeout=after_s)
        task.cancel()
        await asyncio.wait([task])


async def leave_from_a_thread(address: str, prompt: str, after_s: float) -> None:
    def work() -> None:
        with vc.Client(address) as client, client.stream(prompt, max_tokens=9) as stream:
            next(stream)
            time.sleep(after_s)

    await asyncio.to_thread(work)


def sockets(server: Server) -> int:
    """Of tritonserver; its other open files grow when one of its threads is at work for the first time."""
    assert server.process is not None
    found = 0
    for file in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(file.readlink()).startswith("socket:")
    return found


@pytest.mark.parametrize("way", [leave, cancel, leave_from_a_thread], ids=lambda way: way.__name__)
def test_leaving_early_leaks_no_connection(server: Server, way: Any) -> None:
    """Cancelled just as it ends, an answer would stay in Triton 24.10 for ever, its connection with it.

    Half of the answers are made at once, the others take 25 ms; all are left at random moments about their end.
    """
    chance = random.Random(1)
    slow = script(repeat=["x ", 5], delay_ms=5)

    async def many() -> None:
        for _ in range(6):
            slow_ones = [way(server.grpc_url, slow, chance.uniform(0.01, 0.03)) for _ in range(12)]
            quick_ones = [
                way(server.grpc_url, "a b", max(0.0, chance.uniform(-0.005, 0.005))) for _ in range(12)
            ]
            await asyncio.gather(*quick_ones, *slow_ones)

    idle(server)
    before = sockets(server)
    asyncio.run(many())
    wait_for(lambda: sockets(server) <= before, 15, "the connections to be closed")
    idle(server)


def test_http_form(server: Server) -> None:
    with vc.HttpClient(f"127.0.0.1:{server.http}") as client:
        assert client.ready()
        chunks = list(client.stream("用 聪明 造句", max_tokens=9))
        assert "".join(chunk.text for chunk in chunks) == "用 聪明 造句"
        assert chunks[-1].final and chunks[-1].usage.completion_tokens == 3
        assert client.chat([{"role": "user", "content": "hello"}]).text == "hello"
        with pytest.raises(vc.InvalidArgument, match="top_p"):
            list(client.stream("x", top_p=7))
        with pytest.raises(vc.InvalidArgument, match="top_p"):
            client.generate("x", top_p=7)
        with pytest.raises(vc.ModelNotFound):
            client.generate("x", model="nope")
        stream = client.stream(LONG, max_tokens=4000)
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    idle(server)


def test_plain_infer_on_the_streaming_model(server: Server, client: vc.Client) -> None:
    """C054: what Triton says there, and what our client makes of it."""
    grpc_words = ""
    try:
        client._stub.ModelInfer(pb.ModelInferRequest(model_name="vllm"))
    except Exception as error:
        grpc_words = error.details()  # type: ignore[attr-defined]
    body = {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}
    status, infer_text = server.post("/v2/models/vllm/infer", body)
    assert status == 501
    many = {
        "text_input": script(tokens=["a ", "b"], delay_ms=100),
        "stream": True,
        "sampling_parameters": "{}",
    }
    _, generate_text = server.post("/v2/models/vllm/generate", many)
    for words in (grpc_words, json.loads(infer_text)["error"], json.loads(generate_text)["error"]):
        error = vc.errors.from_text(words)
        assert type(error) is vc.InvalidArgument and "generate_stream" in str(error), words


def test_message_over_the_limit(server: Server) -> None:
    """C053: 5 MB go through as the limits stand; a lower limit is explained, and the server lives."""
    with vc.Client(server.grpc_url) as client, pytest.raises(vc.InvalidArgument, match="4095"):
        client.generate("word " * 1_000_000, timeout_s=60)
    with vc.Client(server.grpc_url, max_message_bytes=4 * 2**20) as client:
        with pytest.raises(vc.MessageTooLarge, match=r"4194304.*max_message_bytes"):
            client.generate("x" * 5_000_000)
        with pytest.raises(vc.MessageTooLarge, match=r"4194304.*max_message_bytes"):
            client.generate(script(tokens=["x" * 5_000_000]))
        assert client.generate("alive").text == "alive"


def test_http_port_for_grpc(server: Server) -> None:
    client = vc.Client(f"127.0.0.1:{server.http}", connect_timeout_s=0.5)
    with client, pytest.raises(vc.WrongProtocol, match="Triton's HTTP port"):
        client.generate("x")
    with vc.HttpClient(server.grpc_url) as http, pytest.raises(vc.WrongProtocol, match="HTTP port"):
        http.generate("x")


def test_commands(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    where = ["--server", server.grpc_url]
    assert voltriton(["generate", "one two", "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["completion_tokens"] == 2
    assert voltriton(["chat", "hello", "you", *where]) == 0
    assert capsys.readouterr().out == "hello you\n"
    assert voltriton(["models", *where]) == 0
    assert "READY" in capsys.readouterr().out
    wait_for(lambda: server.metric("vllm:generation_tokens_total") > 0, 5, "the engine's numbers")
    status = [
        "status",
        *where,
        "--metrics",
        f"127.0.0.1:{server.metrics}",
        "--run-dir",
        str(tmp_path),
        "--json",
    ]
    assert voltriton(status) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ready"] and {model["state"] for model in found["models"]} == {"READY"}
    assert found["engine"]["vllm"]["generation_tokens"] > 0


def test_gateway(server: Server) -> None:
    user: Any = [{"role": "user", "content": "hello you"}]
    with (
        gateway(server.grpc_url) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == ["vllm"]
        answer = client.chat.completions.create(model="vllm", messages=user)
        assert answer.choices[0].message.content == "hello you"
        events = client.chat.completions.create(model="vllm", messages=user, stream=True)
        assert "".join(event.choices[0].delta.content or "" for event in events) == "hello you"
        texts = client.completions.create(model="vllm", prompt=["a b", "c"], n=2).choices
        assert [choice.text for choice in texts] == ["a b", "a b", "c", "c"]
        assert client.embeddings.create(model="vllm", input="x").data[0].embedding == [0.5, -0.25]
        with pytest.raises(openai.BadRequestError, match="top_k"):
            client.chat.completions.create(model="vllm", messages=user, extra_body={"top_k": 5000})
        long: Any = [{"role": "user", "content": LONG}]
        with client.chat.completions.create(model="vllm", messages=long, stream=True) as stream:
            next(iter(stream))
        idle(server)
        with pytest.raises(openai.APITimeoutError):
            silent: Any = [{"role": "user", "content": SILENT}]
            client.with_options(timeout=0.5).chat.completions.create(model="vllm", messages=silent)
        idle(server)
        assert httpx.get(f"{url}/health").json()["models"] == ["vllm"]


def test_gateway_with_two_servers(server: Server, tmp_path: Path) -> None:
    """Both are used; when one is stopped, the other answers everything."""
    user: Any = [{"role": "user", "content": script(tokens=["a ", "b"], delay_ms=100)}]
    body = {"model": "vllm", "messages": user}
    with (
        Server(fake_repository(tmp_path / "models"), tmp_path / "log") as second,
        gateway(server.grpc_url, second.grpc_url) as url,
    ):
        before = [s.metric("vllm:generation_tokens_total") for s in (server, second)]

        async def ask(count: int) -> list[int]:
            async with httpx.AsyncClient() as http:
                posts = [http.post(f"{url}/v1/chat/completions", json=body) for _ in range(count)]
                return [response.status_code for response in await asyncio.gather(*posts)]

        assert asyncio.run(ask(8)) == [200] * 8
        for one, tokens in zip((server, second), before, strict=True):
            wait_for(
                lambda one=one, tokens=tokens: one.metric("vllm:generation_tokens_total") - tokens == 8,
                5,
                "half",
            )
        assert second.stop() == 0
        assert asyncio.run(ask(4)) == [200] * 4
        wait_for(
            lambda: httpx.get(f"{url}/health").json()["healthy_servers"] == 1, 10, "the gateway to notice"
        )


def test_engine_that_dies_in_mid_answer(server: Server, client: vc.Client) -> None:
    """Last here: the client is told at once, and the next request waits for the new engine."""
    got = []
    with pytest.raises(vc.Unavailable):
        for chunk in client.stream(script(repeat=["x ", 50], die_at=5, delay_ms=20)):
            got.append(chunk.text)
    assert got
    # While there is no engine.
    assert ask(server.grpc_url, cancel="gone").last["finish_reason"] == ["None"]
    client.wait_ready("vllm", 20)

    def answers() -> bool:
        try:
            return client.generate("back").text == "back"
        except vc.Unavailable:
            return False

    wait_for(answers, 20, "the new engine")
