"""The servers that `perf/peers.py` compares: how each is started, reached and stopped. Started as commands only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from voltriton_perf.closed_loop import Load, Plan
from voltriton_perf.wires import WIRES, Connection

ROOT = Path(__file__).resolve().parents[2]
START_S = 900.0


class TargetError(Exception):
    """A server cannot be started, or ended: one line."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Process:
    """A server process in its own session; `answers` is what must answer before it counts as started."""

    name: str
    command: list[str]
    answers: str
    folder: Path
    env: dict[str, str] = field(default_factory=dict)
    popen: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        if self.popen is None:
            raise TargetError(f"{self.name} has not been started")
        return self.popen.pid

    def start(self) -> None:
        with self.log.open("wb") as log:
            self.popen = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env={**os.environ, **self.env}, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while not self._ready():
            if self.popen.poll() is not None:
                raise TargetError(
                    f"{self.name} ended with status {self.popen.returncode} while starting: {self.last()}"
                )
            if time.monotonic() > deadline:
                raise TargetError(f"{self.name} was not ready within {START_S:g} s; see {self.log}")
            time.sleep(0.2)

    def _ready(self) -> bool:
        with contextlib.suppress(OSError):
            if self.answers.startswith("http"):
                with urllib.request.urlopen(self.answers, timeout=5) as response:
                    return bool(response.status == 200)
            host, _, port = self.answers.rpartition(":")
            socket.create_connection((host, int(port)), 1).close()
            return True
        return False

    def last(self) -> str:
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:300] if lines else f"no output in {self.log}"

    def stop(self) -> None:
        """SIGTERM; SIGKILL of the session for what is left."""
        if self.popen is None:
            return
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.popen.wait(40)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


@dataclass
class Target:
    """One row of the comparison. `kind` is a wire of `wires.WIRES`, or "engine" (in-process)."""

    name: str
    kind: str
    address: str
    process: Process
    models: list[str] = field(default_factory=lambda: ["vllm"])

    async def measure(self, plan: Plan) -> dict[str, Any]:
        if self.kind == "engine":
            return await self._in_process(plan)
        turn = iter(range(plan.streams))

        async def connect() -> Connection:
            # Streams go to the model instances in turn.
            return await WIRES[self.kind].open(self.address, self.models[next(turn) % len(self.models)])

        return await Load(plan).run(connect, self.process.pid)

    async def _in_process(self, plan: Plan) -> dict[str, Any]:
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(json.dumps(plan.__dict__).encode() + b"\n")
        line = await reader.readline()
        writer.close()
        if not line:
            raise TargetError(f"{self.name} gave no answer: {self.process.last()}")
        row: dict[str, Any] = json.loads(line)
        return row


def engine_env(fake: bool) -> dict[str, str]:
    env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if fake:
        # Ids 1000.. of SmolLM2's vocabulary are whole words; its first ones are bytes, whose text is held back.
        env |= {"PYTHONPATH": str(ROOT / "tests" / "bench"), "FAKE_FIRST_ID": "1000", "OMP_NUM_THREADS": "1"}
    return env


def in_process(folder: Path, engine_args: dict[str, Any], env: dict[str, str]) -> list[Target]:
    port = free_port()
    command = [
        sys.executable, str(ROOT / "tests" / "bench" / "engine_target.py"),
        "--port", str(port), "--engine-args", json.dumps(engine_args),
    ]  # fmt: skip
    address = f"127.0.0.1:{port}"
    return [Target("in-process", "engine", address, Process("in-process", command, address, folder, env))]


def vllm_server(folder: Path, engine_args: dict[str, Any], env: dict[str, str]) -> list[Target]:
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", "vllm", *options_of(engine_args),
    ]  # fmt: skip
    process = Process("vllm-openai", command, f"http://127.0.0.1:{port}/health", folder, env)
    return [Target("vllm-openai", "openai", f"127.0.0.1:{port}", process)]


def options_of(engine_args: dict[str, Any]) -> list[str]:
    """Engine arguments as options of vLLM's command line."""
    words = []
    for name, value in engine_args.items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words += [option, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


def ours(
    folder: Path, engine_args: dict[str, Any], env: dict[str, str], instances: int, settings: dict[str, Any]
) -> list[Target]:
    http, grpc, metrics = free_port(), free_port(), free_port()
    models = write_repository(folder / "repository", engine_args, env, instances, settings)
    command = [
        sys.executable, "-m", "voltriton.cli", "serve", "--model-repository", str(folder / "repository"),
        "--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics),
        # Its requests would be in the figures.
        "--canary-interval-s", "100000",
    ]  # fmt: skip
    process = Process("voltriton", command, f"http://127.0.0.1:{http}/v2/health/ready", folder, env)
    return [
        Target("voltriton-grpc", "grpc", f"127.0.0.1:{grpc}", process, models),
        Target("voltriton-http", "http", f"127.0.0.1:{http}", process, models),
    ]


def write_repository(
    folder: Path, engine_args: dict[str, Any], env: dict[str, str], instances: int, settings: dict[str, Any]
) -> list[str]:
    """A model repository with `instances` models of the same engine arguments: vllm, vllm_2, ..."""
    names = ["vllm", *[f"vllm_{i}" for i in range(2, instances + 1)]]
    for name in names:
        shutil.copytree(ROOT / "model_repository" / "vllm", folder / name)
        config = folder / name / "config.pbtxt"
        config.write_text(config.read_text().replace('name: "vllm"', f'name: "{name}"'))
        model = {**engine_args, "voltriton": {"env": env, **settings}}
        (folder / name / "1" / "model.json").write_text(json.dumps(model, indent=2))
    return names


def gateway(folder: Path, behind: Target) -> list[Target]:
    port = free_port()
    command = [
        sys.executable, "-m", "voltriton.cli", "gateway", "--server", behind.address, "--port", str(port),
        "--max-open", "1024",
    ]  # fmt: skip
    process = Process("gateway", command, f"127.0.0.1:{port}", folder)
    return [Target("gateway", "openai", f"127.0.0.1:{port}", process)]


def extra(folder: Path, text: str, engine_args: dict[str, Any]) -> list[Target]:
    """`NAME=COMMAND` or `NAME:MODEL=COMMAND`; placeholders in COMMAND: {http_port} {grpc_port} {metrics_port}
    {engine_args}. With {grpc_port} it is a Triton server, otherwise an OpenAI-compatible one."""
    head, equals, command = text.partition("=")
    name, _, model = head.partition(":")
    if not (name and equals and "_port}" in command):
        raise TargetError(
            f"--extra: got {text!r}, allowed: NAME=COMMAND with {{grpc_port}} or {{http_port}} in it"
        )
    ports = {key: free_port() for key in ("http_port", "grpc_port", "metrics_port")}
    words = shlex.split(command)
    for key, value in {**ports, "engine_args": json.dumps(engine_args)}.items():
        words = [word.replace("{" + key + "}", str(value)) for word in words]
    triton = "{grpc_port}" in command
    address = f"127.0.0.1:{ports['grpc_port' if triton else 'http_port']}"
    path = "/v2/health/ready" if triton else "/health"
    process = Process(name, words, f"http://127.0.0.1:{ports['http_port']}{path}", folder)
    return [Target(name, "grpc" if triton else "openai", address, process, [model or "vllm"])]
