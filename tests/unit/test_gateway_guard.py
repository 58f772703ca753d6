"""Keys, limits, strictness, several servers, and what the gateway says of itself."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from kserve import FakeServer, Model
from serving import gateway, wait_for
from voltriton_client.errors import InvalidArgument
from voltriton_client.gateway import main
from voltriton_client.gateway.limits import Keys, RateLimit
from voltriton_client.gateway.pool import Upstream
from voltriton_client.gateway.settings import Alias

CHAT = "/v1/chat/completions"


def body(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": "vllm", "messages": [{"role": "user", "content": text}], **more}


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(scope="module")
def url(server: FakeServer) -> Iterator[str]:
    with gateway(server.address, max_body_bytes=20_000, body_timeout_s=0.5) as url:
        yield url


def error(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, after looking at its shape."""
    assert response.headers["content-type"] == "application/json"
    parsed = response.json()
    assert set(parsed) == {"error"} and set(parsed["error"]) == {"message", "type", "param", "code"}
    assert parsed["error"]["message"]
    return dict(parsed["error"])


# Strictness.


@pytest.mark.parametrize(
    ("change", "param", "code"),
    [
        ({"temprature": 1}, "temprature", "unknown_parameter"),
        ({"temperature": "1"}, "temperature", "invalid_value"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"n": True}, "n", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"stream": "false"}, "stream", "invalid_value"),
        ({"max_tokens": 1.5}, "max_tokens", "invalid_value"),
        ({"stop": [""]}, "stop[0]", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, None, "invalid_value"),
        ({"messages": [{"role": "user", "content": "half \ud83d"}]}, None, "invalid_value"),
        ({"top_logprobs": 2}, None, "invalid_value"),
        ({"stream_options": {"include_usage": True}}, None, "invalid_value"),
        ({"tool_choice": "auto"}, None, "invalid_value"),
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, None, "missing_required_parameter"),
        ({"functions": []}, "functions", "unknown_parameter"),
        ({"audio": {}}, "audio", "unknown_parameter"),
        ({"model": ""}, "model", "invalid_value"),
        ({"model": None}, "model", "invalid_value"),
    ],
)
def test_bad_fields_are_refused_by_name(
    url: str, server: FakeServer, change: Any, param: str | None, code: str
) -> None:
    """C028, C029 among them."""
    server.asked.clear()
    response = httpx.post(
        url + CHAT, content=json.dumps({**body(), **change}), headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    found = error(response)
    assert found["code"] == code and found["type"] == "invalid_request_error"
    if param:
        assert found["param"] == param
    assert server.asked == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"model":"vllm"}',
        b"[" * 15_000,
        b'{"seed":' + b"9" * 5000 + b"}",
    ],
)
def test_broken_bodies(url: str, content: bytes) -> None:
    response = httpx.post(url + CHAT, content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error(response)


@pytest.mark.parametrize(
    "content", [b'{"model": "\xff"}', b'{"seed": ' + b"9" * 5000 + b"}", b"[" * 5000 + b"]" * 5000]
)
def test_bodies_that_json_cannot_hold(url: str, content: bytes) -> None:
    response = httpx.post(url + CHAT, content=content, headers={"content-type": "application/json"})
    assert (response.status_code, error(response)["code"]) == (400, "invalid_json")
    assert error(response)["message"].startswith("the body is no JSON: ")


def test_numbers_that_json_does_not_have(url: str) -> None:
    raw = json.dumps({**body(), "temperature": float("nan")})
    for text in (raw, json.dumps({**body(), "structured_outputs": {"json": {"x": float("inf")}}})):
        response = httpx.post(url + CHAT, content=text, headers={"content-type": "application/json"})
        assert response.status_code == 400
        error(response)


@pytest.mark.parametrize(
    ("path", "sent", "status"),
    [
        ("/v1/completions", {"model": "vllm", "prompt": "x", "suffix": "y"}, 400),
        ("/v1/completions", {"model": "vllm", "prompt": "x", "best_of": 2}, 400),
        ("/v1/completions", {"model": "vllm", "prompt": "x", "best_of": 1}, 200),
        ("/v1/completions", {"model": "vllm", "prompt": [1], "echo": True}, 400),
        ("/v1/completions", {"model": "vllm", "prompt": "x", "echo": True, "logprobs": 1}, 400),
        ("/v1/completions", {"model": "vllm", "prompt": []}, 400),
        ("/v1/completions", {"model": "vllm", "prompt": ""}, 400),
        ("/v1/completions", {"model": "vllm", "prompt": ["a", 1]}, 400),
        ("/v1/completions", {"model": "vllm", "prompt": [-1]}, 400),
        ("/v1/embeddings", {"model": "vllm", "input": ""}, 400),
        ("/v1/embeddings", {"model": "vllm", "input": "x", "encoding_format": "int8"}, 400),
        ("/v1/embeddings", {"model": "gone", "input": "x"}, 404),
        (CHAT, {**body(), "model": "gone"}, 404),
        (
            CHAT,
            {**body(), "store": True, "metadata": {"a": "b"}, "service_tier": "auto", "verbosity": "low"},
            200,
        ),
    ],
)
def test_what_is_taken_and_what_not(url: str, path: str, sent: Any, status: int) -> None:
    response = httpx.post(url + path, json=sent)
    assert response.status_code == status
    if status != 200:
        error(response)


def test_unknown_paths_and_methods(url: str) -> None:
    assert error(httpx.get(f"{url}/v1/nothing"))["code"] == "unknown_url"
    response = httpx.get(url + CHAT)
    assert (response.status_code, response.headers["allow"]) == (405, "POST")
    assert error(response)["code"] == "method_not_allowed"


# Bodies.


def test_body_over_the_limit(url: str) -> None:
    declared = httpx.post(url + CHAT, json=body("x" * 30_000))
    assert declared.status_code == 413 and error(declared)["code"] == "body_too_large"

    def pieces() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    chunked = httpx.post(url + CHAT, content=pieces())
    assert chunked.status_code == 413 and error(chunked)["code"] == "body_too_large"


def test_body_that_does_not_come(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        slow.settimeout(5)
        assert slow.recv(100).startswith(b"HTTP/1.1 408 ")


# Keys and rates.


def test_keys(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    # A name may have two keys, while it changes from one to the other.
    file.write_text(
        "# ours\nalice alice-key-0123456789\nalice alice-key-9876543210\nnameless-key-0123456789\n"
    )
    with gateway(server.address, api_keys_file=str(file)) as url:
        for headers in (
            {},
            {"authorization": "alice-key-0123456789"},
            {"authorization": "Basic alice-key-0123456789"},
        ):
            response = httpx.post(url + CHAT, json=body(), headers=headers)
            assert (response.status_code, error(response)["code"]) == (401, "missing_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        for key in ("wrong", "alice", "é"):
            sent = {"authorization": f"Bearer {key}".encode()}
            response = httpx.post(url + CHAT, json=body(), headers=sent)
            assert (response.status_code, error(response)["code"]) == (401, "invalid_api_key")
        for key in ("alice-key-0123456789", "alice-key-9876543210", "nameless-key-0123456789"):
            response = httpx.post(url + CHAT, json=body(), headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 200
        assert httpx.get(f"{url}/v1/models").status_code == 401
        for open_path in ("/health", "/metrics", "/"):
            assert httpx.get(url + open_path).status_code == 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no key"),
        ("# none\n", "holds no key"),
        ("short\n", "line 1"),
        ("a b " + "c" * 20, "line 1"),
    ],
)
def test_key_files_that_are_wrong(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(InvalidArgument, match=words):
        Keys.load(str(tmp_path / "keys"))
    with pytest.raises(InvalidArgument, match="No such file"):
        Keys.load(str(tmp_path / "none"))


def test_rate_limit_is_a_bucket() -> None:
    now = [0.0]
    limit = RateLimit(60, clock=lambda: now[0])
    assert [limit.take("a") for _ in range(60)] == [0.0] * 60
    assert limit.take("a") == pytest.approx(1.0)
    assert limit.take("b") == 0.0
    now[0] = 0.5
    assert limit.take("a") == pytest.approx(0.5)
    now[0] = 1.0
    assert limit.take("a") == 0.0
    assert limit.take("a") > 0


def test_rates_for_keys_and_addresses(server: FakeServer, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("a key-a-0123456789012\nb key-b-0123456789012\n")
    with gateway(server.address, api_keys_file=str(file), requests_per_minute_per_key=2) as url:

        def ask(name: str) -> httpx.Response:
            return httpx.get(
                f"{url}/v1/models", headers={"authorization": f"Bearer key-{name}-0123456789012"}
            )

        assert [ask("a").status_code for _ in range(3)] == [200, 200, 429]
        assert error(ask("a"))["code"] == "rate_limit_exceeded"
        assert int(ask("a").headers["retry-after"]) in range(25, 31)
        assert ask("b").status_code == 200
    with gateway(server.address, requests_per_minute_per_ip=3) as url:
        assert [httpx.get(f"{url}/v1/models").status_code for _ in range(4)] == [200, 200, 200, 429]
        assert httpx.get(f"{url}/health").status_code == 200


def test_wrong_keys_count_for_the_address(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key-a-0123456789012\n")
    with gateway(server.address, api_keys_file=str(tmp_path / "keys"), requests_per_minute_per_ip=2) as url:
        assert [httpx.get(f"{url}/v1/models").status_code for _ in range(3)] == [401, 401, 429]


# Load and time.


def test_too_many_open_requests(server: FakeServer) -> None:
    with gateway(server.address, max_open_requests=2) as url:
        threads = [
            threading.Thread(target=httpx.post, args=(url + CHAT,), kwargs={"json": body("!late 1 x")})
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        wait_for(
            lambda: "open_requests{server" in httpx.get(f"{url}/metrics").text and _open(url, server) == 2
        )
        response = httpx.post(url + CHAT, json=body())
        assert (response.status_code, error(response)["code"]) == (503, "overloaded")
        assert response.headers["retry-after"] == "1"
        for thread in threads:
            thread.join()
        assert httpx.post(url + CHAT, json=body()).status_code == 200


def test_as_many_callers_as_are_taken_are_never_refused(server: FakeServer) -> None:
    """Each asks again as soon as its answer has ended, beside others that look at the metrics."""
    with (
        gateway(server.address, max_open_requests=1) as url,
        httpx.Client() as caller,
        httpx.Client() as looker,
    ):
        stop = threading.Event()

        def look() -> None:
            while not stop.is_set():
                looker.get(f"{url}/metrics")

        looking = threading.Thread(target=look)
        looking.start()
        try:
            answers = [caller.post(url + CHAT, json=body(stream=i % 2 == 0)) for i in range(60)]
        finally:
            stop.set()
            looking.join()
        assert {answer.status_code for answer in answers} == {200}


def _open(url: str, server: FakeServer) -> float:
    name = f'voltriton_gateway_server_open_requests{{server="{server.address}"}} '
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)


@pytest.mark.parametrize("stream", [False, True])
def test_time_limit(server: FakeServer, stream: bool) -> None:
    server.cancelled.clear()
    with gateway(server.address, request_timeout_s=0.3) as url:
        response = httpx.post(url + CHAT, json=body("!silent", stream=stream))
        assert (response.status_code, error(response)["code"]) == (504, "timeout")
    assert server.asked[-1]["timeout_ms"] == 300


# CORS, ids, own pages.


def test_cors_is_off_and_can_be_switched_on(url: str, server: FakeServer) -> None:
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    closed = httpx.options(url + CHAT, headers=headers)
    assert closed.status_code == 405 and "access-control-allow-origin" not in closed.headers
    assert "access-control-allow-origin" not in httpx.get(f"{url}/v1/models", headers=headers).headers
    with gateway(server.address, cors_origins=("https://app.example",)) as opened:
        assert (
            httpx.options(opened + CHAT, headers=headers).headers["access-control-allow-origin"]
            == "https://app.example"
        )
        other = {**headers, "origin": "https://evil.example"}
        assert "access-control-allow-origin" not in httpx.options(opened + CHAT, headers=other).headers


def test_request_ids(url: str) -> None:
    assert httpx.get(f"{url}/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert len(httpx.get(f"{url}/health", headers={"x-request-id": "a b"}).headers["x-request-id"]) == 32


def test_metrics_tell_what_happened(server: FakeServer) -> None:
    with gateway(server.address) as url:
        httpx.post(url + CHAT, json=body("a b c"))
        httpx.post(url + CHAT, json=body(n=0))
        httpx.get(f"{url}/made/up/{time.time()}")
        text = httpx.get(f"{url}/metrics").text
    assert 'voltriton_gateway_requests_total{path="/v1/chat/completions",status="200"} 1.0' in text
    assert 'voltriton_gateway_requests_total{path="/v1/chat/completions",status="400"} 1.0' in text
    assert 'voltriton_gateway_requests_total{path="other",status="404"} 1.0' in text
    assert 'voltriton_gateway_tokens_total{kind="completion",model="vllm"} 3.0' in text
    assert 'voltriton_gateway_first_token_seconds_count{model="vllm"} 1.0' in text
    assert f'voltriton_gateway_server_up{{server="{server.address}"}} 1.0' in text


def test_page_is_one_file_with_a_policy(url: str) -> None:
    response = httpx.get(url)
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'; script-src 'sha256-" in response.headers["content-security-policy"]
    assert "http://" not in response.text and "https://" not in response.text


def test_openapi_document(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json").json()
    assert set(document["paths"]) == {
        CHAT,
        "/v1/completions",
        "/v1/embeddings",
        "/v1/models",
        "/v1/models/{model}",
    }
    assert "422" not in document["paths"][CHAT]["post"]["responses"]


# Several servers.


def test_least_busy_healthy_server_is_asked() -> None:
    with FakeServer() as one, FakeServer() as two, gateway(one.address, two.address) as url:
        long = [
            threading.Thread(target=httpx.post, args=(url + CHAT,), kwargs={"json": body("!late 1 x")})
            for _ in range(4)
        ]
        for thread in long:
            thread.start()
        wait_for(lambda: len(one.asked) + len(two.asked) == 4)
        assert (len(one.asked), len(two.asked)) == (2, 2)
        for thread in long:
            thread.join()


def test_server_that_goes_and_comes_back() -> None:
    one, two = FakeServer().__enter__(), FakeServer().__enter__()
    with gateway(one.address, two.address) as url:
        two.stop()
        for _ in range(6):
            assert httpx.post(url + CHAT, json=body()).status_code == 200
        assert len(one.asked) >= 5
        wait_for(lambda: httpx.get(f"{url}/health").json()["healthy_servers"] == 1)
        one.stop()
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
        response = httpx.post(url + CHAT, json=body())
        assert response.status_code == 503 and error(response)["code"] == "model_not_ready"
        assert one.address in error(response)["message"]


def test_refusal_of_one_server_is_answered_by_another() -> None:
    with FakeServer() as full, FakeServer() as free, gateway(full.address, free.address) as url:
        full.overload = "UNAVAILABLE: full: 8 of 8"
        for _ in range(4):
            assert httpx.post(url + CHAT, json=body()).status_code == 200
        free.overload = full.overload
        response = httpx.post(url + CHAT, json=body())
        assert (response.status_code, error(response)["message"]) == (503, "full: 8 of 8")
        assert "voltriton_gateway_failovers_total" in httpx.get(f"{url}/metrics").text


def test_models_of_several_servers() -> None:
    with FakeServer() as one, FakeServer() as two:
        two.models["second"] = Model()
        two.models["loading"] = Model(state="LOADING")
        aliases = (Alias("fine", "second"),)
        with gateway(one.address, two.address, aliases=aliases) as url:
            names = [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]]
            assert names == ["fine", "second", "vllm"]
            for _ in range(3):
                assert httpx.post(url + CHAT, json={**body(), "model": "fine"}).status_code == 200
            assert len(two.asked) == 3
            two.models["second"].state = "UNAVAILABLE"
            wait_for(lambda: len(httpx.get(f"{url}/v1/models").json()["data"]) == 1)
            assert httpx.post(url + CHAT, json={**body(), "model": "fine"}).status_code == 503
        with gateway(one.address, two.address, models=("vllm",)) as url:
            assert [model["id"] for model in httpx.get(f"{url}/v1/models").json()["data"]] == ["vllm"]


def test_gateway_before_its_server() -> None:
    late = FakeServer()
    with gateway(late.address) as url:
        assert httpx.get(f"{url}/health").json() == {
            "status": "unavailable", "servers": 1, "healthy_servers": 0, "models": [],
        }  # fmt: skip
        with late:
            wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
            assert httpx.post(url + CHAT, json=body()).status_code == 200


def test_what_becomes_of_a_server_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "voltriton.gateway")
    look, looks = Upstream.check, []

    async def counted(upstream: Upstream) -> None:
        await look(upstream)
        looks.append(upstream)

    monkeypatch.setattr(Upstream, "check", counted)
    server = FakeServer()
    with gateway(server.address) as url:
        wait_for(lambda: len(looks) > 3)
        with server:
            wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
    said = [record.getMessage() for record in caplog.records if record.name == "voltriton.gateway"]
    assert said[0].startswith(f"server {server.address} is down: ")
    assert said[1] == f"server {server.address} is healthy, with vllm"
    assert said[2].startswith(f"server {server.address} is down: ") and len(said) == 3


# The command.


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--host", "0.0.0.0"], "there are no keys"),
        (["--trusted-proxy", "proxy"], "--trusted-proxy: got 'proxy', allowed: an IP address or network"),
        (
            ["--cors-origin", "example.org"],
            "--cors-origin: got 'example.org', allowed: * or an origin like https://",
        ),
        (["--health-interval", "0"], "--health-interval: got 0, allowed: 0.1 or more"),
        (["--rate-per-key", "5"], "give --api-keys FILE, or --rate-per-ip"),
        (["--alias", "x"], "NAME=MODEL"),
        (["--api-keys", "/no/keys"], "/no/keys"),
        (["--server", "nonsense"], "HOST:PORT"),
        (["--port", "99999"], "--port"),
    ],
)
def test_command_refuses_in_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_command_without_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main([]) == 1
    assert "uvicorn is not installed: pip install 'voltriton[gateway]'" in capsys.readouterr().err


def test_command_with_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--port", str(taken.getsockname()[1])]) == 1
    assert "choose another --port" in capsys.readouterr().err


def test_command_serves_and_ends(server: FakeServer) -> None:
    argv = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "voltriton.cli",
        "gateway",
        "--port",
        "0",
        "--server",
        server.address,
    ]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr
        url = process.stderr.readline().split()[2]
        assert (
            process.stderr.readline() == f"voltriton gateway: server {server.address} is healthy, with vllm\n"
        )
        answer = httpx.post(url + CHAT, json=body("from outside")).json()
        assert answer["choices"][0]["message"]["content"] == "from outside"
        process.terminate()
        assert process.communicate(timeout=20)[1] == "" and process.returncode == 0
    finally:
        process.kill()
        process.communicate()
