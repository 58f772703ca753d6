"""`voltriton status`: whether server, models and engine are well. 0: all is ready; 1: something is not."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from voltriton_client.client import Client
from voltriton_client.commands.common import add_server_options, client_for, command
from voltriton_client.commands.models import table
from voltriton_client.errors import VoltritonError
from voltriton_client.types import ModelInfo

# What is shown of the engine: our word for it, and the metrics' names that mean it (the first found counts).
ENGINE_METRICS = {
    "up": ("voltriton:engine_up",),
    "open": ("voltriton:requests_open",),
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_cache_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "prompt_tokens": ("vllm:prompt_tokens_total", "vllm:prompt_tokens"),
    "generation_tokens": ("vllm:generation_tokens_total", "vllm:generation_tokens"),
    "restarts": ("voltriton:engine_restarts_total",),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
}


def default_run_dir() -> Path:
    """Where `voltriton serve` notes its state by default: in `VOLTRITON_HOME`, this checkout, or this folder."""
    if home := os.environ.get("VOLTRITON_HOME"):
        return Path(home, "run")
    checkout = Path(__file__).resolve().parents[3]
    return (checkout if (checkout / "pyproject.toml").is_file() else Path.cwd()) / ".voltriton" / "run"


@command("status")
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="voltriton status", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--metrics", metavar="HOST:PORT", help="default: the port after gRPC's")
    parser.add_argument(
        "--run-dir",
        type=Path,
        default=default_run_dir(),
        help="where `voltriton serve` notes its state (%(default)s)",
    )
    add_server_options(parser)
    args = parser.parse_args(argv)
    with client_for(args) as client:
        status = collect(client, args.metrics, args.run_dir)
    print(json.dumps(status) if args.json else text_of(status))
    for problem in status["problems"]:
        print(f"voltriton status: {problem}", file=sys.stderr)
    return 1 if status["problems"] else 0


def collect(client: Client, metrics_address: str | None, run_dir: Path) -> dict[str, Any]:
    """Everything that is to be had; what is missing is named in `problems`."""
    supervisors = [state for state in supervisor(run_dir) if _is_of(state, client.target.address)]
    metrics_address = metrics_address or _metrics_of(client.target.address, supervisors)
    status: dict[str, Any] = {"server": client.target.address, "live": False, "ready": False, "models": []}
    status |= {"engine": None, "supervisor": supervisors, "problems": []}
    if any(state["alive"] and state.get("state") == "draining" for state in supervisors):
        status["problems"].append("the server is being drained: new requests are refused")
    try:
        status["live"], status["ready"] = client.live(), client.ready()
        models = models_of(client, status["supervisor"])
    except VoltritonError as error:
        status["problems"].append(f"{error.code}: {error}")
        return status
    status["models"] = [asdict(model) for model in models]
    status["problems"] += [_problem(model) for model in models if not model.ready]
    if not status["ready"]:
        status["problems"].append(f"{client.target.address} is live and not ready: models load or failed")
    try:
        status["engine"] = engine_numbers(read_metrics(metrics_address))
        for model, numbers in status["engine"].items():
            if numbers.get("up") == 0:
                status["problems"].append(f"the engine of model {model!r} is down or being started again")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        # Metrics are an extra: a server without them is not unwell.
        status["engine_note"] = f"no metrics at {metrics_address}: {error}"
    return status


def _is_of(state: dict[str, Any], address: str) -> bool:
    """By the port alone: a server on 0.0.0.0 or 127.0.0.1 has many names. Other servers have notes here as well."""
    grpc = state.get("grpc")
    return not grpc or str(grpc).rpartition(":")[2] == address.rpartition(":")[2]


def _metrics_of(address: str, supervisors: list[dict[str, Any]]) -> str:
    """Where the server's metrics are: as its supervisor says, else on the next port, as by default (8001, 8002)."""
    known = (state.get("metrics") for state in supervisors if state.get("grpc") == address and state["alive"])
    host, _, port = address.rpartition(":")
    return next(filter(None, known), f"{host}:{int(port) + 1}")


def models_of(client: Client, supervisors: list[dict[str, Any]]) -> list[ModelInfo]:
    """The server's list, and what `voltriton serve` says that it serves beside it, which is then not loaded."""
    models = client.models()
    known = {model.name for model in models}
    served = {name for state in supervisors if state["alive"] for name in state.get("models", [])}
    return models + [ModelInfo(name, "", "not loaded", "") for name in sorted(served - known)]


def _problem(model: ModelInfo) -> str:
    return f"model {model.name!r} is {model.state or 'not loaded'}" + (
        f": {model.reason}" if model.reason else ""
    )


def read_metrics(address: str) -> str:
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        return client.get(f"http://{address}/metrics").raise_for_status().text


def engine_numbers(text: str) -> dict[str, dict[str, float]]:
    """Per model the numbers of ENGINE_METRICS that the metrics page has."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            word = next((word for word, names in ENGINE_METRICS.items() if sample.name in names), None)
            if word:
                model = found.setdefault(sample.labels.get("model", sample.labels.get("model_name", "")), {})
                model.setdefault(word, sample.value)
    return found


def supervisor(run_dir: Path) -> list[dict[str, Any]]:
    """The state files of `voltriton serve` whose process lives: each a JSON object with `pid`."""
    states = []
    for path in sorted(run_dir.glob("*.json")):
        try:
            state = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError):
            # Half-written, or gone in between; the next look will tell.
            continue
        if isinstance(state, dict):
            states.append({**state, "alive": _alive(state.get("pid"))})
    return states


def _alive(pid: Any) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def text_of(status: dict[str, Any]) -> str:
    words = ["live" if status["live"] else "not live", "ready" if status["ready"] else "not ready"]
    lines = [f"server {status['server']}: {', '.join(words)}"]
    if status["models"]:
        lines += ["", table([ModelInfo(**model) for model in status["models"]])]
    for model, numbers in (status["engine"] or {}).items():
        lines += [
            "",
            f"engine {model}: "
            + ", ".join(
                f"{word} {_number(word, numbers[word])}" for word in ENGINE_METRICS if word in numbers
            ),
        ]
    if "engine_note" in status:
        lines += ["", status["engine_note"]]
    for state in status["supervisor"]:
        lines += ["", "supervisor: " + _supervisor_text(state)]
    return "\n".join(lines)


def _supervisor_text(state: dict[str, Any]) -> str:
    """`voltriton serve` as it noted its state; a file that its process left behind says so."""
    shown = {
        name: value
        for name, value in state.items()
        if name not in ("alive", "since") and value not in (None, "", [])
    }
    if isinstance(state.get("since"), int | float):
        shown["for"] = f"{max(0, time.time() - state['since']):.0f} s"
    text = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())
    return text if state["alive"] else f"not running any more ({text})"


def _number(word: str, value: float) -> str:
    return f"{value:.1%}" if word == "kv_cache_use" else f"{value:.0f}"
