"""The library against a scripted server: streaming, cancelling, shared streams, errors."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from typing import Any

import grpc
import pytest
import voltriton_client as vc
from kserve import CONTRACT_INPUTS, OFFICIAL_INPUTS, FakeServer, Model
from voltriton_client.errors import from_text
from voltriton_client.request import request_for


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture
def client(server: FakeServer) -> Iterator[vc.Client]:
    server.asked.clear()
    server.cancelled.clear()
    with vc.Client(server.address) as client:
        yield client


def wait_for(condition: Callable[[], Any], timeout_s: float = 5) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def test_chunks_have_text_ids_usage_timing_and_one_end(client: vc.Client) -> None:
    chunks = list(client.stream("one two three", want={"token_ids"}, temperature=0))
    assert [chunk.text for chunk in chunks] == ["one ", "two ", "three"]
    assert [chunk.token_ids for chunk in chunks] == [(100,), (101,), (102,)]
    assert [chunk.final for chunk in chunks] == [False, False, True]
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].usage == vc.Usage(prompt_tokens=3, completion_tokens=3, cached_tokens=1)
    assert chunks[-1].timing == vc.Timing(queue_ms=1, prefill_ms=2, first_token_ms=3, total_ms=9)
    assert 0 < chunks[0].at_s <= chunks[-1].at_s


def test_generate_asks_for_one_response(server: FakeServer, client: vc.Client) -> None:
    result = client.generate("a b c", max_tokens=2, stop=["x"])
    assert (result.text, result.finish_reason) == ("a b ", "length")
    assert server.asked[-1]["stream"] is False
    assert server.asked[-1]["exclude_input_in_output"] is True
    assert server.asked[-1].sampling == {"max_tokens": 2, "stop": ["x"]}


def test_chat_sends_messages_and_what_belongs_to_them(server: FakeServer, client: vc.Client) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    messages = [{"role": "user", "content": "!tool"}]
    result = client.chat(messages, tools=tools, chat_template_kwargs={"enable_thinking": False})
    assert result.tool_calls[0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert '"enable_thinking": false' in server.asked[-1]["messages"]


def test_streamed_tool_calls_are_joined(client: vc.Client) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    collector = vc.types.Collector()
    for chunk in client.stream(messages=[{"role": "user", "content": "!tool"}], tools=tools):
        collector.add(chunk)
    call = collector.result().tool_calls[0]
    assert (call["id"], call["function"]["arguments"]) == ("call_1", '{"city": "Bern"}')


def test_reasoning_is_told_apart(client: vc.Client) -> None:
    result = client.chat([{"role": "user", "content": "!think"}])
    assert (result.reasoning, result.text) == ("Two and two. ", "It is 4.")


def test_every_piece_of_several_sequences_has_its_index(client: vc.Client) -> None:
    """C045."""
    texts = {0: "", 1: ""}
    for chunk in client.stream("a b", n=2, want={"token_ids"}):
        texts[chunk.index] += chunk.text
        assert len(chunk.token_ids) == 1
    assert texts == {0: "0:a b", 1: "1:a b"}


def test_final_flag_alone_is_an_empty_last_chunk(client: vc.Client) -> None:
    chunks = list(client.stream("!flag"))
    assert [(chunk.text, chunk.final) for chunk in chunks] == [
        ("said ", False),
        ("before", False),
        ("", True),
    ]
    assert client.generate("!flag").text == "said before"


def test_a_model_of_the_official_backend_is_asked_only_for_what_it_knows(
    server: FakeServer, client: vc.Client
) -> None:
    server.models["official"] = Model(OFFICIAL_INPUTS)
    assert client.generate("x y", model="official", timeout_s=5).text == "x y"
    assert "return_timing" not in server.asked[-1]
    assert "timeout_ms" not in server.asked[-1]
    with pytest.raises(vc.InvalidArgument, match="no input 'messages'"):
        client.chat([{"role": "user", "content": "x"}], model="official")


def test_closing_the_iterator_cancels(server: FakeServer, client: vc.Client) -> None:
    stream = client.stream("!long", request_id="to-cancel")
    assert next(stream).text == "tick "
    stream.close()
    wait_for(lambda: "to-cancel" in server.cancelled)


def test_leaving_with_and_dropping_cancel_too(server: FakeServer, client: vc.Client) -> None:
    with client.stream("!long", request_id="left") as stream:
        next(stream)
    stream = client.stream("!long", request_id="dropped")
    next(stream)
    del stream
    wait_for(lambda: {"left", "dropped"} <= set(server.cancelled))


def test_closing_from_another_thread_ends_the_waiting_one(client: vc.Client) -> None:
    stream = client.stream("!silent")
    threading.Timer(0.1, stream.close).start()
    with pytest.raises(vc.Cancelled):
        next(stream)


async def until_open(server: FakeServer) -> None:
    while not server.open:
        await asyncio.sleep(0.005)


def leave(server: FakeServer, prompt: str, **options: Any) -> None:
    """Ask for an answer and close it after its first chunk."""
    with vc.Client(server.address) as client, client.stream(prompt, **options) as stream:
        next(stream)


def leave_async(server: FakeServer, prompt: str, **options: Any) -> None:
    async def main() -> None:
        async with (
            vc.AsyncClient(server.address) as client,
            aclosing(client.stream(prompt, **options)) as chunks,
        ):
            await anext(chunks)

    asyncio.run(main())


def cancel_task(server: FakeServer, prompt: str, **options: Any) -> None:
    """The task is cancelled while it waits for gRPC."""

    async def main() -> None:
        async with vc.AsyncClient(server.address) as client:
            task = asyncio.create_task(client.generate(prompt, **options))
            await until_open(server)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()

    asyncio.run(main())


def close_client(server: FakeServer, prompt: str, **options: Any) -> None:
    """The client is closed, and the answer is not."""
    client = vc.Client(server.address)
    stream = client.stream(prompt, **options)
    next(stream)
    client.close()
    with pytest.raises(vc.Cancelled):
        list(stream)


def close_async_client(server: FakeServer, prompt: str, **options: Any) -> None:
    async def main() -> None:
        client = vc.AsyncClient(server.address)
        task = asyncio.create_task(client.generate(prompt, **options))
        await until_open(server)
        await client.close()
        with pytest.raises(vc.Cancelled):
            await task

    asyncio.run(main())


WAYS = [leave, leave_async, cancel_task, close_client, close_async_client]
in_every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


@in_every_way
def test_leaving_cancels_by_a_request_and_resets_no_stream(way: Callable[..., None]) -> None:
    """Triton 24.10 leaks what a reset crosses."""
    with FakeServer() as server:
        way(server, "!long", request_id="victim")
        assert [asked["cancel"] for asked in server.asked if "cancel" in asked] == ["victim"]
        assert (server.cancelled, server.resets) == (["victim"], 0)


@in_every_way
def test_leaving_what_cannot_be_cancelled_resets_the_stream_at_once(
    way: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vc.core, "LEAVE_S", 60)
    with FakeServer() as server:
        server.models["vllm"] = Model([name for name in CONTRACT_INPUTS if name != "cancel"])
        way(server, "!long", request_id="victim")
        wait_for(lambda: server.cancelled == ["victim"])
        assert (server.resets, len(server.asked)) == (1, 1)


@pytest.mark.parametrize("refuses", [True, False])
def test_a_server_that_does_not_cancel_has_the_stream_reset(
    monkeypatch: pytest.MonkeyPatch, refuses: bool
) -> None:
    monkeypatch.setattr(vc.core, "LEAVE_S", 60 if refuses else 0.1)
    with FakeServer() as server:
        server.deaf = not refuses
        with vc.Client(server.address) as client, client.stream("!long") as stream:
            next(stream)
            if refuses:
                server.models["vllm"] = Model(OFFICIAL_INPUTS)
        wait_for(lambda: server.resets == 1 and not server.active)

        async def main() -> None:
            async with vc.AsyncClient(server.address) as client:
                client._inputs["vllm"] = frozenset(CONTRACT_INPUTS)
                async with aclosing(client.stream("!long")) as chunks:
                    await anext(chunks)

        asyncio.run(main())
        wait_for(lambda: server.resets == 2 and not server.active)


def test_leaving_a_server_that_says_nothing_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the request has got there cannot be known: it is not reset before `LEAVE_S` is over."""
    monkeypatch.setattr(vc.core, "LEAVE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with vc.Client(address) as client:
            client._inputs["vllm"] = frozenset(CONTRACT_INPUTS)
            stream = client.stream("x")
            threading.Timer(0.1, stream.close).start()
            with pytest.raises(vc.Cancelled):
                next(stream)

        async def main() -> None:
            async with vc.AsyncClient(address) as client:
                client._inputs["vllm"] = frozenset(CONTRACT_INPUTS)
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(client.generate("x"), 0.1)

        asyncio.run(asyncio.wait_for(main(), 5))


def test_leaving_after_the_end_sends_nothing() -> None:
    with FakeServer() as server:
        for way in (leave, leave_async):
            way(server, "one")
        assert (len(server.asked), server.resets) == (2, 0)


def test_one_answer_of_a_shared_stream_is_cancelled_alone() -> None:
    async def main(address: str) -> None:
        async with vc.AsyncClient(address) as client, client.open_stream() as shared:
            other = asyncio.create_task(shared.generate("!late 0.3 a b"))
            async with aclosing(shared.stream("!long", request_id="second")) as chunks:
                await anext(chunks)
            assert (await other).text == "a b"

    with FakeServer() as server:
        with vc.Client(server.address) as client, client.open_stream() as shared:
            other, victim = shared.stream("!late 0.3 a b"), shared.stream("!silent", request_id="first")
            threading.Timer(0.05, victim.close).start()
            with pytest.raises(vc.Cancelled):
                next(victim)
            wait_for(lambda: server.cancelled == ["first"])
            assert "".join(chunk.text for chunk in other) == "a b"
        asyncio.run(main(server.address))
        assert (server.cancelled, server.resets, server.streams) == (["first", "second"], 0, 2)


def test_closing_a_client_ends_its_shared_streams() -> None:
    async def main(address: str) -> None:
        client = vc.AsyncClient(address)
        chunks = client.open_stream().stream("!long")
        await anext(chunks)
        await client.close()
        with pytest.raises(vc.Cancelled):
            async for _ in chunks:
                pass

    with FakeServer() as server:
        client = vc.Client(server.address)
        stream = client.open_stream().stream("!long")
        next(stream)
        client.close()
        with pytest.raises(vc.Cancelled):
            list(stream)
        asyncio.run(main(server.address))
        assert (len(server.cancelled), server.resets) == (2, 0)


def test_closing_a_shared_stream_resets_it_only_where_it_must() -> None:
    with FakeServer() as server, vc.Client(server.address) as client:
        for inputs, resets in ((CONTRACT_INPUTS, 0), (OFFICIAL_INPUTS, 1)):
            server.models["m"] = Model(inputs)
            client._inputs.clear()
            with client.open_stream() as shared:
                streams = [shared.stream("!long", model="m") for _ in range(3)]
                for stream in streams:
                    next(stream)
            for stream in streams:
                with pytest.raises(vc.Cancelled):
                    list(stream)
            wait_for(lambda resets=resets: server.resets == resets and not server.active)


def test_deadline_is_the_servers_and_ours(server: FakeServer, client: vc.Client) -> None:
    with pytest.raises(vc.DeadlineExceeded, match="timeout_ms"):
        client.generate("!silent", timeout_s=0.2)
    assert server.asked[-1]["timeout_ms"] == 200
    server.models["old"] = Model(OFFICIAL_INPUTS)
    with pytest.raises(vc.DeadlineExceeded, match=r"within 0\.2 s"):
        client.generate("!silent", model="old", timeout_s=0.2)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("INVALID_ARGUMENT", vc.InvalidArgument),
        ("UNAVAILABLE", vc.Unavailable),
        ("CANCELLED", vc.Cancelled),
        ("DEADLINE_EXCEEDED", vc.DeadlineExceeded),
        ("INTERNAL", vc.Internal),
    ],
)
def test_codes_of_the_contract_become_exceptions(
    client: vc.Client, code: str, kind: type[vc.VoltritonError]
) -> None:
    with pytest.raises(vc.VoltritonError) as caught:
        client.generate(f"!error {code} field: got 1, allowed 2", request_id="mine")
    assert type(caught.value) is kind
    assert (str(caught.value), caught.value.request_id) == ("field: got 1, allowed 2", "mine")


@pytest.mark.parametrize("how", ["!cut 3", "!end 3"])
def test_a_cut_answer_is_an_error_with_what_had_come(client: vc.Client, how: str) -> None:
    got = []
    with pytest.raises(vc.AnswerCut, match="after 3 tokens") as caught:
        got.extend(chunk.text for chunk in client.stream(how))
    assert caught.value.partial == "tok tok tok "


def test_unknown_model_and_loading_model(server: FakeServer, client: vc.Client) -> None:
    server.models["slow"] = Model(state="LOADING")
    with pytest.raises(vc.ModelNotFound, match=r"no model 'nope'.*voltriton models"):
        client.generate("x", model="nope")
    with pytest.raises(vc.ModelNotReady, match="'slow' is not ready"):
        client.generate("x", model="slow")
    threading.Timer(0.3, lambda: server.models.update(slow=Model())).start()
    client.wait_ready("slow", timeout_s=5)
    assert client.generate("x", model="slow").text == "x"


def test_state_of_server_and_models(server: FakeServer, client: vc.Client) -> None:
    assert client.live() and client.ready() and client.model_ready("vllm")
    assert not client.model_ready("nope")
    assert vc.ModelInfo("vllm", "1", "READY") in client.models()


def test_many_requests_on_one_stream(server: FakeServer, client: vc.Client) -> None:
    """C057: a bad request in the middle has its own error; the good ones are whole."""
    before = server.streams
    prompts = ["good one", "!error INVALID_ARGUMENT bad", "good two", "!error UNAVAILABLE full"]
    outcomes = dict(client.generate_many([vc.Request(prompt=prompt) for prompt in prompts], concurrency=2))
    assert server.streams == before + 1
    assert [type(outcomes[number]) for number in range(4)] == [
        vc.Result,
        vc.InvalidArgument,
        vc.Result,
        vc.Unavailable,
    ]
    assert (outcomes[0].text, outcomes[2].text) == ("good one", "good two")  # type: ignore[union-attr]


def test_one_bad_request_on_a_shared_stream(client: vc.Client) -> None:
    """C057, with answers read at the same time."""
    with client.open_stream() as shared:
        slow = shared.stream("!slow 0.02 a b c d")
        bad = shared.stream("!error INVALID_ARGUMENT top_p: got 2")
        good = shared.stream("e f")
        with pytest.raises(vc.InvalidArgument, match="top_p"):
            next(bad)
        assert "".join(chunk.text for chunk in good) == "e f"
        assert "".join(chunk.text for chunk in slow) == "a b c d"


def test_error_code_header_ends_a_shared_stream_and_everybody_is_told(server: FakeServer) -> None:
    """C057 with the header: Triton closes the stream with the bad request's status."""
    with vc.Client(server.address, metadata=[("triton_grpc_error", "true")]) as client:
        with pytest.raises(vc.InvalidArgument, match="bad"):
            client.generate("!error INVALID_ARGUMENT bad")
        with client.open_stream() as shared:
            good = shared.stream("!long")
            next(good)
            bad = shared.stream("!error INVALID_ARGUMENT bad")
            for stream in (good, bad):
                with pytest.raises(vc.InvalidArgument, match="bad"):
                    list(stream)
            with pytest.raises(vc.InvalidArgument):
                shared.generate("after")
        assert client.generate("works on").text == "works on"


def test_closing_a_shared_stream_cancels_all_of_it(server: FakeServer, client: vc.Client) -> None:
    with client.open_stream() as shared:
        streams = [shared.stream("!long", request_id=f"shared-{number}") for number in range(3)]
        for stream in streams:
            next(stream)
    wait_for(lambda: {"shared-0", "shared-1", "shared-2"} <= set(server.cancelled))
    with pytest.raises(vc.Cancelled):
        list(streams[0])


def test_time_limit_on_a_shared_stream(server: FakeServer) -> None:
    """It is this side's, as gRPC can limit the stream only as a whole; the other requests go on."""
    server.models["old"] = Model(OFFICIAL_INPUTS)

    async def main() -> None:
        async with vc.AsyncClient(server.address) as client, client.open_stream() as shared:
            other = asyncio.create_task(shared.generate("!late 0.6 a b"))
            with pytest.raises(vc.DeadlineExceeded, match=r"within 0\.2 s"):
                await shared.generate("!silent", model="old", timeout_s=0.2)
            assert (await other).text == "a b"

    with vc.Client(server.address) as client, client.open_stream() as shared:
        other = shared.stream("!late 0.6 a b")
        with pytest.raises(vc.DeadlineExceeded, match=r"within 0\.2 s"):
            shared.generate("!silent", model="old", timeout_s=0.2)
        assert "".join(chunk.text for chunk in other) == "a b"
    asyncio.run(main())
    del server.models["old"]


def test_answer_cut_on_a_shared_stream(client: vc.Client) -> None:
    with client.open_stream() as shared:
        other = shared.stream("!silent")
        with pytest.raises(vc.AnswerCut):
            list(shared.stream("!cut 2"))
        with pytest.raises(vc.AnswerCut):
            next(other)


def test_limits_of_messages_are_explained() -> None:
    """C053: both ways, with the numbers and what to raise."""
    with FakeServer() as server, vc.Client(server.address, max_message_bytes=20_000) as client:
        with pytest.raises(
            vc.MessageTooLarge, match=r"limit of 20000: .*max_message_bytes \(--max-message-mib\)"
        ):
            client.generate("x" * 30_000)
        with pytest.raises(vc.MessageTooLarge, match=r"of 3\d{4} bytes is over the limit of 20000"):
            client.generate("!big 30000")
        assert client.generate("still there").text == "still there"
    with (
        FakeServer(options=[("grpc.max_receive_message_length", 10_000)]) as small,
        vc.Client(small.address) as client,
        pytest.raises(vc.MessageTooLarge, match=r"over the limit of 10000: .*server's"),
    ):
        client.generate("x" * 30_000)


def test_plain_infer_says_where_to_go(server: FakeServer) -> None:
    """C054: Triton's sentences, over gRPC and HTTP, become advice."""
    words = "ModelInfer RPC doesn't support models with decoupled transaction policy"
    for error in (
        vc.errors.from_rpc("UNIMPLEMENTED", words, server.address),
        vc.errors.from_text("generate expects model to produce exactly 1 response, use generate stream"),
    ):
        assert type(error) is vc.InvalidArgument
        assert "generate_stream" in str(error) and "stream()" in str(error)


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        (None, {}, "exactly one of prompt"),
        ("x", {"token_ids": [1]}, "exactly one of prompt"),
        ("x", {"tools": []}, "tools: only with messages"),
        ("x", {"timeout_s": 0}, "timeout_s: got 0"),
        ("x", {"top_p": float("nan")}, "not JSON"),
        ("half \ud83d", {}, "surrogate"),
        (None, {"token_ids": ["a"]}, "input_ids"),
    ],
)
def test_bad_arguments_are_named_before_anything_is_sent(
    server: FakeServer, client: vc.Client, prompt: str | None, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(vc.InvalidArgument, match=words):
        client.generate(prompt, **options)
    assert server.asked == []


def test_key_and_metadata_go_along(server: FakeServer) -> None:
    with vc.Client(server.address, api_key="secret", metadata=[("x-team", "blue")]) as client:
        client.generate("x")
    assert server.metadata[-1]["authorization"] == "Bearer secret"
    assert server.metadata[-1]["x-team"] == "blue"


def test_embedding(server: FakeServer, client: vc.Client) -> None:
    assert client.embed("abcd", dimensions=3) == [4, 0.5, -0.25]
    assert '"dimensions": 3' in server.asked[-1]["embedding_request"]


def test_only_what_was_never_sent_is_tried_again(server: FakeServer, client: vc.Client) -> None:
    with pytest.raises(vc.AnswerCut):
        client.generate("!cut 0")
    with pytest.raises(vc.Unavailable):
        client.generate("!error UNAVAILABLE full")
    assert len(server.asked) == 2


# asyncio


def test_async_client_streams_and_generates(server: FakeServer) -> None:
    async def main() -> None:
        async with vc.AsyncClient(server.address) as client:
            assert await client.live() and await client.ready() and await client.model_ready("vllm")
            assert "vllm" in [model.name for model in await client.models()]
            assert [chunk.text async for chunk in client.stream("a b")] == ["a ", "b"]
            assert (await client.generate("c d", n=2)).choices[1].text == "1:c d"
            assert (await client.chat([{"role": "user", "content": "e"}])).text == "e"
            assert await client.embed("ab") == [2, 0.5, -0.25]

    asyncio.run(main())


def test_async_cancel_by_closing_and_by_the_task(server: FakeServer) -> None:
    server.cancelled.clear()

    async def main() -> None:
        async with vc.AsyncClient(server.address) as client:
            async with aclosing(client.stream("!long", request_id="closed")) as chunks:
                async for _ in chunks:
                    break
            task = asyncio.create_task(client.generate("!silent", request_id="task"))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while not {"closed", "task"} <= set(server.cancelled):
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 5))


def test_async_client_does_not_block_the_loop(server: FakeServer) -> None:
    async def main() -> float:
        worst = 0.0
        async with vc.AsyncClient(server.address) as client:
            tasks = [asyncio.create_task(client.generate("!late 0.3 x")) for _ in range(16)]
            while not all(task.done() for task in tasks):
                before = time.perf_counter()
                await asyncio.sleep(0.005)
                worst = max(worst, time.perf_counter() - before)
            for task in tasks:
                assert task.result().text == "x"
        return worst

    # A blocking wait would hold the loop for the whole 0.3 s.
    assert asyncio.run(main()) < 0.25


def test_async_errors_and_shared_stream(server: FakeServer) -> None:
    async def main() -> None:
        async with vc.AsyncClient(server.address) as client:
            for prompt, kind in [("!cut 2", vc.AnswerCut), ("!error UNAVAILABLE full", vc.Unavailable)]:
                with pytest.raises(kind):
                    await client.generate(prompt)
            async with client.open_stream() as shared:
                outcomes = await asyncio.gather(
                    *(shared.generate(prompt) for prompt in ("a b", "!error INVALID_ARGUMENT bad", "c d")),
                    return_exceptions=True,
                )
            assert [type(outcome) for outcome in outcomes] == [vc.Result, vc.InvalidArgument, vc.Result]

    asyncio.run(main())


def test_async_shared_stream_closes_with_open_requests(server: FakeServer) -> None:
    async def main() -> None:
        async with vc.AsyncClient(server.address) as client:
            async with client.open_stream() as shared:
                open_ = asyncio.create_task(shared.generate("!silent"))
                await asyncio.sleep(0.1)
            with pytest.raises(vc.VoltritonError):
                await open_

    asyncio.run(asyncio.wait_for(main(), 5))


def test_every_grpc_status_has_an_exception() -> None:
    for code in grpc.StatusCode:
        if code.name != "OK":
            error = vc.errors.from_rpc(code.name, "some words", "127.0.0.1:1")
            assert isinstance(error, vc.VoltritonError) and str(error)


def test_request_for_keeps_a_request() -> None:
    request = vc.Request(prompt="x", stream=True)
    assert request_for(request) is request
    assert request_for(request, stream=False).stream is False


def test_public_names_are_there() -> None:
    for name in vc.__all__:
        assert hasattr(vc, name)


def test_models_of_a_restricted_repository_are_those_that_are_loaded() -> None:
    with FakeServer() as server, vc.Client(server.address) as client:
        server.models["other"] = Model(state="UNAVAILABLE", reason="no weights")
        assert [m.name for m in client.models()] == ["vllm", "chat", "other"]
        server.restricted = True
        assert [(m.name, m.ready) for m in client.models()] == [("vllm", True), ("chat", True)]


def test_models_of_a_restricted_repository_asynchronously() -> None:
    async def names(address: str) -> list[str]:
        async with vc.AsyncClient(address) as client:
            return [model.name for model in await client.models()]

    with FakeServer() as server:
        server.restricted = True
        assert asyncio.run(names(server.address)) == ["vllm", "chat"]


def test_a_request_that_triton_could_not_read_is_one_to_send_again() -> None:
    error = from_text("Request for unknown model: '' is not found", "id")
    assert isinstance(error, vc.Unavailable)
    assert isinstance(from_text("Request for unknown model: 'x' is not found", "id"), vc.ModelNotFound)
