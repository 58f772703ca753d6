"""Clients and gateway behind `voltriton serve`, which keeps the repository's calls to itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import voltriton_client as vc
from serve import Serve
from server import fake_repository, free_ports, wait_for

MODELS = ["chat", "chat_template", "generate", "vllm"]


def test_models_status_and_gateway(tmp_path: Path) -> None:
    with Serve(fake_repository(tmp_path / "repository"), tmp_path) as serve:
        with vc.Client(serve.grpc_url) as client:
            assert sorted(m.name for m in client.models()) == MODELS
        command = [sys.executable, "-m", "voltriton.cli"]
        listed = subprocess.run(
            [*command, "models", "--server", serve.grpc_url], capture_output=True, text=True
        )
        assert listed.returncode == 0, listed.stderr
        assert all(name in listed.stdout for name in MODELS)
        status = subprocess.run(
            [*command, "status", "--server", serve.grpc_url], capture_output=True, text=True
        )
        assert status.returncode == 0, status.stdout + status.stderr
        (port,) = free_ports(1)
        gateway = subprocess.Popen([*command, "gateway", "--port", str(port), "--server", serve.grpc_url])
        try:
            base = f"http://127.0.0.1:{port}"
            wait_for(lambda: _names(base) == ["vllm"], 30, "the gateway to see the model")
            body = {"model": "vllm", "messages": [{"role": "user", "content": "a b"}]}
            answer = httpx.post(f"{base}/v1/chat/completions", json=body, timeout=30)
            assert answer.json()["choices"][0]["message"]["content"] == "a b"
        finally:
            gateway.terminate()
            gateway.wait(30)


def _names(base: str) -> list[str]:
    try:
        return [m["id"] for m in httpx.get(f"{base}/v1/models", timeout=5).json()["data"]]
    except (httpx.HTTPError, KeyError):
        return []
