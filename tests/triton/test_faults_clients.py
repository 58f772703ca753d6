"""Clients that vanish, flood, do not read, or send nonsense; and models that are reloaded under them."""

from __future__ import annotations

import json
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from follow import Follow, follow, script
from server import Server, fake_repository, wait_for
from tritonclient.grpc import service_pb2, service_pb2_grpc
from voltriton.processes import shared_memory
from wire_client import WireClient, ask, build

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def explicit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Small limits (32 running, none waiting), and models that can be loaded and unloaded."""
    folder = tmp_path_factory.mktemp("explicit")
    repository = fake_repository(
        folder / "repository",
        {"max_queued_requests": 0, "drain_grace_s": 1},
        max_num_seqs=32,
        max_model_len=200_000,
    )
    options = ("--model-control-mode=explicit", "--load-model=vllm")
    with Server(repository, folder / "log", *options) as server:
        yield server


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


def size_of(pid: int) -> tuple[int, int]:
    """Open files and threads."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), len(list(Path(f"/proc/{pid}/task").iterdir()))


def running(server: Server) -> float:
    if not server.metric("voltriton:engine_up"):
        return -1  # the metrics page comes up last
    return server.metric("vllm:num_requests_running") + server.metric("voltriton:requests_open")


def wait_for_idle(server: Server) -> None:
    """The gauges come once a second."""
    wait_for(lambda: running(server) == 0, 15, "all requests to be gone")


@pytest.mark.parametrize(
    ("processes", "streams"),
    [(4, 25), pytest.param(100, 1, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
def test_clients_that_vanish(explicit: Server, processes: int, streams: int) -> None:
    """100 streams of processes that are killed in mid-stream."""
    wait_for_idle(explicit)
    stub = explicit.stub_pid()
    before = size_of(stub), len(shared_memory([stub]))
    cancelled = explicit.metric("voltriton:requests_total", outcome="cancelled")
    for i in range(1, processes + 1):
        client = subprocess.Popen(
            [sys.executable, str(HERE / "vanishing_client.py"), explicit.grpc_url, str(streams)],
            stdout=subprocess.PIPE,
        )
        assert client.stdout is not None
        assert client.stdout.readline() == b"streaming\n"
        client.kill()
        client.wait()
        client.stdout.close()
        wait_for(
            lambda i=i: (
                explicit.metric("voltriton:requests_total", outcome="cancelled") == cancelled + streams * i
            ),
            15,
            "the cancellation of the vanished client's requests",
        )
    wait_for_idle(explicit)
    assert (size_of(stub), len(shared_memory([stub]))) == before
    assert ask(explicit.grpc_url, "a b", stream=True).text == "a b"


def test_500_clients_at_once(explicit: Server) -> None:
    """Each is answered, or refused at once with the numbers; those that run keep their pace."""
    wait_for_idle(explicit)
    command = [
        str(HERE / "flooding_client.py"),
        explicit.grpc_url,
        "500",
        script(repeat=["x ", 10], delay_ms=20),
    ]
    with subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as flood:
        assert flood.stdout is not None
        assert flood.stdout.readline() == "connected\n"
        steady = follow(explicit.grpc_url, 8, script(repeat=["w ", 250], delay_ms=20))
        began = time.monotonic()
        time.sleep(1.0)  # the pace without the others
        flooded_at = time.monotonic()
        answers = json.loads(flood.communicate("go\n")[0])
        over_at = time.monotonic()
    errors = [error for error in answers if error]
    assert len(errors) >= 400
    sentence = "UNAVAILABLE: overloaded: "
    assert all(
        error.startswith(sentence) and "32 run at once (max_num_seqs) and 0 more" in error for error in errors
    )
    for stream in steady:
        stream.wait()
        stream.close()
        assert (stream.answer.error, len(stream.text.split())) == (None, 250)
    gaps = [(b - a, b) for s in steady for a, b in zip(s.times, s.times[1:], strict=False)]
    quiet = statistics.mean(gap for gap, at in gaps if began < at < flooded_at)
    busy = statistics.mean(gap for gap, at in gaps if flooded_at < at < over_at)
    longest = max(gap for gap, at in gaps if flooded_at < at < over_at + 1)
    print(f"inter-token latency: {quiet * 1e3:.1f} ms alone, {busy * 1e3:.1f} ms under 500 clients "
          f"({busy / quiet:.2f} times; longest {longest * 1e3:.0f} ms), flood took {over_at - flooded_at:.1f} s")  # fmt: skip
    wait_for_idle(explicit)


def test_a_reader_that_reads_nothing(explicit: Server) -> None:
    """Its answer is bounded by max_tokens, so is what waits for it; others are not disturbed."""
    wait_for_idle(explicit)
    assert explicit.process is not None
    pids = [explicit.process.pid, explicit.stub_pid(), explicit.host_pid()]
    before = [rss_mib(pid) for pid in pids]
    piece = "x" * 1000
    channel = grpc.insecure_channel(explicit.grpc_url)
    stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
    request = build(
        script(repeat=[piece, 20_000], delay_ms=0), stream=True, sampling_parameters={"max_tokens": 20_000}
    )
    ended = explicit.metric("voltriton:requests_total", outcome="stop")
    call = stub.ModelStreamInfer(iter([request]))  # and nobody reads from it
    wait_for(
        lambda: explicit.metric("voltriton:requests_total", outcome="stop") == ended + 1,
        60,
        "the answer's end",
    )
    assert ask(explicit.grpc_url, "a b", stream=True).text == "a b"
    grown = [rss_mib(pid) - was for pid, was in zip(pids, before, strict=True)]
    print(f"20 MB unread: server {grown[0]:.0f} MiB, stub {grown[1]:.0f} MiB, host {grown[2]:.0f} MiB more")
    assert sum(grown) < 400  # the text, a few copies of it, and what allocators keep
    # Read at last: all of it is there.
    assert sum(1 for _ in call) > 1
    channel.close()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Server]:
    repository = fake_repository(tmp_path / "repository", {"drain_grace_s": 1})
    with Server(repository, tmp_path / "log", "--model-control-mode=explicit", "--load-model=vllm") as server:
        yield server


@pytest.mark.parametrize("times", [4, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_reloads_under_traffic(fresh: Server, times: int) -> None:
    """Old requests finish or get UNAVAILABLE, and nothing grows."""
    explicit = fresh
    wait_for_idle(explicit)
    assert explicit.process is not None
    over = threading.Event()
    outcomes: list[str] = []

    def traffic() -> None:
        while not over.is_set():
            answer = ask(explicit.grpc_url, script(repeat=["w ", 10], delay_ms=10), stream=True)
            outcomes.append(answer.error or answer.text)
            if answer.error:
                over.wait(0.05)

    clients = [threading.Thread(target=traffic) for _ in range(3)]
    for client in clients:
        client.start()
    sizes = []
    try:
        for _ in range(times):
            old = explicit.stub_pid()
            assert explicit.post("/v2/repository/models/vllm/unload", {})[0] == 200
            wait_for(lambda old=old: not Path(f"/proc/{old}").exists(), 30, "the old stub's end")
            assert explicit.post("/v2/repository/models/vllm/load", {})[0] == 200
            answered = outcomes.count("w " * 10)
            wait_for(
                lambda answered=answered: outcomes.count("w " * 10) > answered,
                30,
                "an answer of the new model",
            )
            server = explicit.process.pid
            sizes.append((*size_of(server), rss_mib(server), len(shared_memory(explicit.children()))))
    finally:
        over.set()
        for client in clients:
            client.join()
    allowed = ("w " * 10, "UNAVAILABLE: ", "Request for unknown model: 'vllm'")
    assert all(outcome.startswith(allowed) for outcome in outcomes), set(outcomes)
    assert outcomes.count("w " * 10) >= times
    fds, threads, memory, files = zip(*sizes, strict=True)
    print(f"{times} reloads: fds {fds[0]} to {fds[-1]}, threads {threads[0]} to {threads[-1]}, "
          f"RSS {memory[0]:.0f} to {memory[-1]:.0f} MiB, files in /dev/shm {files[0]} to {files[-1]}")  # fmt: skip
    assert fds[-1] <= max(fds[:2]) + 8
    assert threads[-1] <= max(threads[:2]) + 4
    assert files[-1] == files[0]
    assert memory[-1] < max(memory[:2]) + 30


# Nonsense. The server must be alive after each, and say what is wrong.


def test_a_prompt_of_5_mb(explicit: Server) -> None:
    answer = ask(explicit.grpc_url, "word " * 1_000_000, stream=True)
    assert answer.error is not None
    assert answer.error.startswith("INVALID_ARGUMENT: prompt: 1000000 tokens, at most 199999 are allowed")


def send(server: Server, request: Any) -> str:
    with WireClient(server.grpc_url) as client:
        return client.answer(request).error or ""


def test_wrong_types_and_shapes(explicit: Server) -> None:
    request = build("a", stream=True)
    request.inputs[0].datatype = "INT32"
    assert "text_input" in send(explicit, request)
    request = build(text_input="a")
    request.inputs[0].shape[0] = 2
    assert "text_input" in send(explicit, request)
    request = build("a", nonsense="x")
    assert "nonsense" in send(explicit, request)
    assert "unknown model: 'none'" in send(explicit, build("a", model="none"))
    assert ask(explicit.grpc_url, "a b", stream=True).text == "a b"


@pytest.mark.parametrize("raw", [b"hello", struct.pack("<I", 5) + b"abc", struct.pack("<I", 2**31) + b"a"])
def test_raw_bytes_without_their_length(explicit: Server, raw: bytes) -> None:
    """C009"""
    stub = explicit.stub_pid()
    before = rss_mib(stub)
    request = service_pb2.ModelInferRequest(model_name="vllm", id="raw")
    tensor = request.inputs.add(name="text_input", datatype="BYTES")
    tensor.shape.append(1)
    request.raw_input_contents.append(raw)
    error = send(explicit, request)
    assert "text_input" in error
    assert rss_mib(stub) < before + 40
    assert explicit.stub_pid() == stub
    assert ask(explicit.grpc_url, "a b", stream=True).text == "a b"


def test_bytes_that_are_no_protobuf(explicit: Server) -> None:
    with grpc.insecure_channel(explicit.grpc_url) as channel:
        method = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=bytes,
            response_deserializer=bytes,
        )
        with pytest.raises(grpc.RpcError):
            method(b"\xff\xff\xff\xff nonsense", timeout=10)
    # Triton says 500 to what is no JSON; it does not reach us.
    code, text = explicit.post("/v2/models/vllm/generate", b'{"text_input": "a')
    assert code in (400, 500)
    assert "error" in text
    assert ask(explicit.grpc_url, "a b", stream=True).text == "a b"


def test_one_bad_request_on_a_shared_stream(explicit: Server) -> None:
    """C057"""
    requests = [
        build(script(repeat=["w ", 10], delay_ms=10), id="1", stream=True),
        build("a", id="2", stream=True, timeout_ms=-1),
        build(script(repeat=["w ", 10], delay_ms=10), id="3", stream=True),
    ]
    with WireClient(explicit.grpc_url) as client:
        answers = client.answers(*requests)
    assert [answers[i].error and "timeout_ms" in answers[i].error for i in "123"] == [None, True, None]
    assert [answers[i].text for i in "13"] == ["w " * 10] * 2


def test_one_bad_request_with_a_status_code(explicit: Server) -> None:
    """The header ends the stream with the error's code. Never with other requests on the same stream: tritonserver
    24.10 dies of that (signal 11, in its own HandleCancellation; docs/operations.md)."""
    with (
        WireClient(explicit.grpc_url, (("triton_grpc_error", "true"),)) as client,
        pytest.raises(grpc.RpcError) as end,
    ):
        client.answer(build("a", stream=True, timeout_ms=-1))
    assert end.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "timeout_ms: got -1" in str(end.value.details())
    assert ask(explicit.grpc_url, "a b", stream=True).text == "a b"


def test_cancel_stops_the_work(explicit: Server) -> None:
    """C064: within a second."""
    wait_for_idle(explicit)
    stream = Follow(explicit.grpc_url, script(repeat=["w ", 2000], delay_ms=20))
    stream.wait_for_text()
    host = explicit.host_pid()
    cancelled = explicit.metric("voltriton:requests_total", outcome="cancelled")
    stream.cancel()
    began = time.monotonic()
    wait_for(
        lambda: explicit.metric("voltriton:requests_total", outcome="cancelled") == cancelled + 1,
        10,
        "the cancel",
    )
    print(f"cancel seen after {time.monotonic() - began:.2f} s")
    wait_for_idle(explicit)
    assert explicit.host_pid() == host


def test_deadlines_hold(explicit: Server) -> None:
    """C068: work that has begun stops too."""
    began = time.monotonic()
    answer = ask(explicit.grpc_url, script(repeat=["w ", 3000], delay_ms=20), stream=True, timeout_ms=1000,
                 sampling_parameters={"max_tokens": 3000})  # fmt: skip
    assert answer.error == "DEADLINE_EXCEEDED: the request took longer than 1000 ms"
    assert 1.0 <= time.monotonic() - began < 5.0
    wait_for_idle(explicit)


def test_an_http_client_that_leaves(explicit: Server) -> None:
    """C066: streaming, it is seen with the next token; without, Triton does not tell, and a time limit ends it."""
    wait_for_idle(explicit)
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", explicit.http)
    body = (
        '{"text_input": "'
        + script(repeat=["w ", 2000], delay_ms=20).replace('"', '\\"')
        + '", "stream": true,'
        ' "max_tokens": 2000}'
    )
    connection.request("POST", "/v2/models/vllm/generate_stream", body)
    connection.getresponse().read(10)
    connection.close()
    wait_for_idle(explicit)
    connection = http.client.HTTPConnection("127.0.0.1", explicit.http)
    body = body.replace('"stream": true', '"timeout_ms": 700')
    connection.request("POST", "/v2/models/vllm/generate", body)
    time.sleep(0.2)  # it is being served
    connection.close()
    wait_for_idle(explicit)
