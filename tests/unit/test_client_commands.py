"""The commands as a person or a script uses them."""

from __future__ import annotations

import http.server
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest
from kserve import OFFICIAL_INPUTS, FakeServer, Model
from terminal import Terminal, command
from voltriton.cli import main as voltriton
from voltriton_client.commands.status import default_run_dir


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(autouse=True)
def _default_server(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.asked.clear()
    monkeypatch.setenv("VOLTRITON_SERVER", server.address)
    monkeypatch.delenv("VOLTRITON_API_KEY", raising=False)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_generate_prints_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert voltriton(["generate", "one two three", "-n", "2"]) == 0
    assert capsys.readouterr().out == "one two \n"


def test_generate_sends_what_was_asked(server: FakeServer) -> None:
    options = [
        "-n",
        "5",
        "-t",
        "0.5",
        "--seed",
        "7",
        "--stop",
        "x",
        "--stop",
        "y",
        "--sampling",
        '{"top_k": 3}',
    ]
    assert voltriton(["generate", "a", *options, "--timeout", "9"]) == 0
    wanted = {"max_tokens": 5, "temperature": 0.5, "seed": 7, "stop": ["x", "y"], "top_k": 3}
    assert server.asked[-1].sampling == wanted
    assert server.asked[-1]["timeout_ms"] == 9000


def test_generate_as_json_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("用 聪明"))
    assert voltriton(["generate", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["text"], body["finish_reason"], body["completion_tokens"]) == ("用 聪明", "stop", 2)
    assert body["total_s"] >= body["first_token_s"] > 0


def test_generate_chat_form(server: FakeServer) -> None:
    assert voltriton(["generate", "--chat", "hello"]) == 0
    assert json.loads(server.asked[-1]["messages"]) == [{"role": "user", "content": "hello"}]


def test_generate_a_file_in_order_and_its_failures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts"
    file.write_text("!late 0.1 first\n!error UNAVAILABLE full\n\nthird\n")
    assert voltriton(["generate", "--file", str(file), "--json"]) == 1
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["number"] for line in lines] == [0, 1, 2]
    assert [line.get("text") for line in lines] == ["first", None, "third"]
    assert lines[1]["error"] == {"code": "UNAVAILABLE", "message": "full"}
    assert err == "voltriton generate: 1 of 3 prompts failed\n"


def test_generate_json_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    # JSON needs no escape for U+2028, which str.splitlines takes for an end of line.
    file.write_text('"two\\nlines"\n{"prompt": "object"}\n"one\u2028line"\n')
    assert voltriton(["generate", "-f", str(file), "--json"]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.split("\n")[:-1]] == [
        "two\nlines",
        "object",
        "one\u2028line",
    ]
    file.write_text('"Well," he said\n')
    assert voltriton(["generate", "-f", str(file)]) == 1
    assert "whose first line begins with a quote or a brace is JSON lines" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["generate", "!error INVALID_ARGUMENT top_p: got 2"],
            "voltriton generate: INVALID_ARGUMENT: top_p: got 2",
        ),
        (["generate", "!cut 2"], "voltriton generate: UNAVAILABLE: answer cut after 2 tokens"),
        (["generate", "x", "-m", "nope"], "voltriton generate: NOT_FOUND: the server has no model 'nope'"),
        (["generate", "x", "--sampling", "{"], "--sampling: no JSON"),
        (["generate", "x", "--sampling", "[]"], "--sampling: got list, allowed: a JSON object"),
        (["generate", "-f", "/no/such"], "/no/such: No such file"),
        (["generate", "-f", "/dev/null"], "/dev/null: holds no prompt"),
        (["generate", "x", "-f", "y"], "a prompt or --file, not both"),
        (["generate", "x", "--server", "nonsense"], "HOST:PORT"),
        (["generate", "x", "--tls-ca", "/no/ca"], "/no/ca"),
        (["generate", "x", "--api-key-file", "/no/key"], "/no/key"),
        (["chat", "!error UNAVAILABLE full"], "voltriton chat: UNAVAILABLE: full"),
        (["chat", "!cut 2"], "voltriton chat: UNAVAILABLE: answer cut after 2 tokens"),
        (["chat", " "], "the message is empty"),
        (["models", "--server", "127.0.0.1:1", "--connect-timeout", "0.1"], "nothing answers at 127.0.0.1:1"),
    ],
)
def test_failures_are_one_line_and_status_1(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert voltriton(argv) == 1
    out, err = capsys.readouterr()
    # What came of an answer that was cut is there, and nothing else.
    assert out == ("tok tok \n" if "!cut 2" in argv else "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "argv", [["generate", "x", "-n", "0"], ["generate", "--nonsense"], ["chat", "--timeout", "-1"]]
)
def test_wrong_usage_is_status_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        voltriton(argv)
    assert caught.value.code == 2


def test_key_from_file_and_environment(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("from-file\n")
    monkeypatch.setenv("VOLTRITON_API_KEY", "from-env")
    assert voltriton(["generate", "x"]) == 0
    assert server.metadata[-1]["authorization"] == "Bearer from-env"
    assert voltriton(["generate", "x", "--api-key-file", str(tmp_path / "key")]) == 0
    assert server.metadata[-1]["authorization"] == "Bearer from-file"


def test_key_that_no_header_can_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("VOLTRITON_API_KEY", "schlüssel")
    assert voltriton(["generate", "x"]) == 1
    assert "api_key: allowed: one word of ASCII" in capsys.readouterr().err


def test_time_limit_of_prompts_of_a_file(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of a file go over one stream, where gRPC has no limit for a single request; this server has none either."""
    server.models["old"] = Model(OFFICIAL_INPUTS)
    (tmp_path / "prompts").write_text("!silent\na\n")
    argv = ["generate", "-f", str(tmp_path / "prompts"), "--json", "-m", "old", "--timeout", "0.5"]
    assert voltriton(argv) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines[0]["error"]["code"] == "DEADLINE_EXCEEDED" and lines[1]["text"] == "a"
    del server.models["old"]


def test_wait_for_a_model_that_loads(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.models["late"] = Model(state="LOADING")
    assert voltriton(["generate", "x", "-m", "late"]) == 1
    assert "not ready" in capsys.readouterr().err
    threading.Timer(0.3, lambda: server.models.update(late=Model())).start()
    assert voltriton(["generate", "x", "-m", "late", "--wait", "5"]) == 0
    del server.models["late"]


def test_chat_answers_arguments_and_pipes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert voltriton(["chat", "--system", "short", "hello", "there"]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert voltriton(["chat"]) == 0
    assert capsys.readouterr() == ("hello there\nfrom a pipe\n", "")


def test_chat_shows_numbers_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert voltriton(["chat", "--stats", "!slow", "0.01", "a", "b", "c"]) == 0
    err = capsys.readouterr().err
    assert "3 tokens in" in err and "tok/s" in err and "first after" in err


def test_models_as_table_and_json(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.models["broken"] = Model(state="UNAVAILABLE", reason="no such folder")
    assert voltriton(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["MODEL", "VERSION", "STATE"]
    assert ["broken", "1", "UNAVAILABLE", "no", "such", "folder"] in [line.split() for line in lines]
    assert voltriton(["models", "--json"]) == 0
    assert {"name": "vllm", "version": "1", "state": "READY", "reason": ""} in json.loads(
        capsys.readouterr().out
    )
    del server.models["broken"]


METRICS = """# TYPE voltriton:engine_up gauge
voltriton:engine_up{model="vllm",version="1"} 1
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model="vllm",version="1"} 3
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model="vllm",version="1"} 1
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model="vllm",version="1"} 0.25
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model="vllm",version="1"} 1200
"""


@pytest.fixture
def metrics_address() -> Iterator[str]:
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(METRICS.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        yield f"127.0.0.1:{page.server_port}"
        page.shutdown()
        thread.join()


def test_status_well(
    server: FakeServer, metrics_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The metrics' address comes from the supervisor's note."""
    note = {
        "pid": os.getpid(),
        "state": "ready",
        "repairs": 2,
        "grpc": server.address,
        "metrics": metrics_address,
    }
    (tmp_path / "serve.json").write_text(json.dumps(note))
    (tmp_path / "half.json").write_text('{"pid"')
    (tmp_path / "old.json").write_text(json.dumps({"pid": 2**22 + 1, "since": 5, "state": "starting"}))
    # Another server of this machine, with models of its own.
    other = {"pid": os.getpid(), "state": "draining", "grpc": "127.0.0.1:1", "models": ["others"]}
    (tmp_path / "other.json").write_text(json.dumps(other))
    argv = ["status", "--run-dir", str(tmp_path)]
    assert voltriton(argv) == 0
    out, err = capsys.readouterr()
    assert "live, ready" in out and "READY" in out and "state ready, repairs 2" in out and err == ""
    assert "not running any more (pid 4194305, state starting, for " in out
    assert "draining" not in out and "others" not in out
    assert "engine vllm: up 1, running 3, waiting 1, kv_cache_use 25.0%, generation_tokens 1200" in out
    assert voltriton([*argv, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["engine"]["vllm"] == {
        "up": 1,
        "running": 3,
        "waiting": 1,
        "kv_cache_use": 0.25,
        "generation_tokens": 1200,
    }
    assert {**note, "alive": True} in body["supervisor"]
    assert body["problems"] == []


def test_status_while_the_engine_is_down(
    metrics_address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    down = METRICS.replace('version="1"} 1\n', 'version="1"} 0\n', 1)
    monkeypatch.setattr(sys.modules[__name__], "METRICS", down)
    assert voltriton(["status", "--metrics", metrics_address, "--run-dir", str(tmp_path)]) == 1
    assert "the engine of model 'vllm' is down" in capsys.readouterr().err


def test_ctrl_c_while_a_command_is_being_loaded(tmp_path: Path) -> None:
    """Some libraries turn the exception into an ImportError of many lines."""
    (tmp_path / "slow.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    import time; time.sleep(5)\n"
        "except KeyboardInterrupt:\n    raise ImportError('umath failed to import')\n"
    )
    code = (
        "import signal, sys; from voltriton import cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "cli.COMMANDS['chat'] = cli.Command('slow', ''); sys.exit(cli.main(['chat']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_status_while_the_server_is_drained(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All is ready, and every request is refused."""
    note = {"pid": os.getpid(), "state": "draining", "grpc": server.address, "metrics": "127.0.0.1:1"}
    (tmp_path / "serve.json").write_text(json.dumps(note))
    assert voltriton(["status", "--run-dir", str(tmp_path)]) == 1
    assert "the server is being drained: new requests are refused" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [([], "no metrics at {next}: "), (["--metrics", "127.0.0.1:abc"], "no metrics at 127.0.0.1:abc: ")],
)
def test_status_without_metrics(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    """Looked for beside gRPC's port: on Triton's usual one there may be another server's."""
    host, port = server.address.rsplit(":", 1)
    assert voltriton(["status", "--run-dir", str(tmp_path), *options]) == 0
    assert words.format(next=f"{host}:{int(port) + 1}") in capsys.readouterr().out


def test_status_finds_the_note_of_this_checkouts_server_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from voltriton.triton import default_root

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VOLTRITON_HOME", raising=False)
    assert default_run_dir() == default_root() / "run"
    monkeypatch.setenv("VOLTRITON_HOME", str(tmp_path / "home"))
    assert default_run_dir() == default_root() / "run" == tmp_path / "home" / "run"


def test_status_unwell(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.models["vllm"].state, server.models["vllm"].reason = "UNAVAILABLE", "engine died"
    server.refuse_ready = True
    try:
        assert voltriton(["status", "--metrics", "127.0.0.1:1", "--run-dir", str(tmp_path)]) == 1
    finally:
        server.models["vllm"].state, server.models["vllm"].reason = "READY", ""
        server.refuse_ready = False
    out, err = capsys.readouterr()
    assert "not ready" in out and "no metrics at 127.0.0.1:1" in out
    assert "model 'vllm' is UNAVAILABLE: engine died" in err


def test_status_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "status",
        "--server",
        "127.0.0.1:1",
        "--connect-timeout",
        "0.1",
        "--run-dir",
        str(tmp_path),
        "--json",
    ]
    assert voltriton(argv) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["live"] is False
    assert "nothing answers" in err


@contextmanager
def running(*argv: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]]:
    """The command's process with its output and errors; gone afterwards whatever happens."""
    process = subprocess.Popen(command(*argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    try:
        yield process, process.stdout, process.stderr
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_output_of_another_encoding_shows_escapes() -> None:
    env = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command("generate", "é 聪明"), env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"\xe9 \\u806a\\u660e\n", b"")


def test_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("generate", "x"), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (
        1,
        "voltriton generate: cannot write: No space left on device\n",
    )


@pytest.mark.parametrize("locale", ["C.UTF-8", "POSIX"])
def test_prompt_that_is_no_text(locale: str) -> None:
    env = {**os.environ, "LC_ALL": locale}
    done = subprocess.run(command("generate"), input=b"ab\xff", env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"voltriton generate: INVALID_ARGUMENT: -: no UTF-8 text at byte 2\n"


def test_closed_pipe_is_no_failure() -> None:
    with running("generate", "!long") as (process, out, err):
        out.read(5)
        out.close()
        assert process.wait(20) == 0
        assert err.read() == b""


@pytest.mark.parametrize("many", [False, True])
def test_ctrl_c_ends_generate_and_cancels(server: FakeServer, tmp_path: Path, many: bool) -> None:
    """By a request: the server sees no stream that is reset, nor a connection that is gone."""
    prompts = tmp_path / "prompts"
    prompts.write_text("!long\n!silent\n")
    server.cancelled.clear()
    resets = server.resets
    with running("generate", *(["--file", str(prompts)] if many else ["!long"])) as (process, _, err):
        wait_for(lambda: len(server.open) == 1 + many)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert err.read() == b""
    wait_for(lambda: len(server.cancelled) == 1 + many)
    assert server.resets == resets


def test_a_talk_on_a_terminal(server: FakeServer) -> None:
    """History, /reset, /system, Ctrl-C that stops the answer and not the program, a failure that does neither."""
    server.cancelled.clear()
    talk = Terminal(command("chat", "--system", "be kind"))
    try:
        talk.until("> ")
        talk.say("hello you\n")
        talk.until("tokens in")
        talk.say("again\n")
        talk.until("tokens in")
        assert [m["content"] for m in messages(server)] == ["be kind", "hello you", "hello you", "again"]
        talk.say("!long\n")
        talk.until("tick tick")
        talk.say("\x03")
        talk.until("[stopped]")
        wait_for(lambda: server.cancelled)
        talk.until("> ")
        talk.say("!error UNAVAILABLE full\n")
        talk.until("UNAVAILABLE: full")
        talk.say("/reset\n")
        talk.until("forgotten")
        talk.say("new\n")
        talk.until("tokens in")
        assert [m["content"] for m in messages(server)] == ["be kind", "new"]
        talk.say("/system terse\n")
        talk.until("system prompt set")
        talk.say("other\n")
        talk.until("tokens in")
        assert [m["content"] for m in messages(server)] == ["terse", "other"]
        talk.say("/what\n")
        talk.until("no order /what")
        talk.until("> ")
        talk.say("half a li")
        talk.until("half a li")
        # CPython's readline sees a signal only within its `select`: one in the microseconds before it, at the next key.
        time.sleep(0.5)
        talk.say("\x03")
        talk.until("/exit or Ctrl-D ends the talk")
        talk.until("> ")
        talk.say("still here\n")
        talk.until("tokens in")
        assert messages(server)[-1]["content"] == "still here"
        talk.say("/exit\n")
    finally:
        assert talk.close() == 0


def messages(server: FakeServer) -> list[dict[str, Any]]:
    return list(json.loads(server.asked[-1]["messages"]))


def wait_for(condition: Callable[[], Any], timeout_s: float = 5) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_generate_asks_for_its_prompt_on_a_terminal() -> None:
    run = Terminal(command("generate"))
    try:
        run.until("the prompt, please")
        run.say("one two\n\x04")
        run.until("one two\r\n")
        run.until("one two")
    finally:
        assert run.close() == 0
    run = Terminal(command("generate"))
    try:
        run.until("the prompt, please")
        run.until("it\r\n")
        run.say("\x03")
    finally:
        assert run.close() == 130


def test_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("a\nb\n")
    run = Terminal(command("generate", "-f", str(tmp_path / "prompts")))
    try:
        run.until("2/2")
    finally:
        assert run.close() == 0


INTERRUPTED = """
import contextlib, io, os, random, signal, sys, threading
from voltriton_client.client import Client
from voltriton_client.commands.common import aside
from voltriton_client.commands.chat import read

random.seed(0)
client = aside(lambda: Client(sys.argv[1]))
for _ in range(60):
    interrupt = threading.Timer(random.random() * 0.04, os.kill, (os.getpid(), signal.SIGINT))
    interrupt.start()
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(read(client.stream("!long"))) as chunks:
        for _ in chunks:
            pass
    with contextlib.suppress(KeyboardInterrupt):
        interrupt.join()
    with contextlib.closing(read(client.stream("a b"))) as chunks:
        assert "".join(chunk.text for chunk in chunks) == "a b"
os._exit(0)
"""


def test_ctrl_c_at_any_moment_leaves_the_client_well(server: FakeServer) -> None:
    """KeyboardInterrupt within gRPC would leave its locks held: in the main thread one in ten made the next call hang."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", INTERRUPTED, server.address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
