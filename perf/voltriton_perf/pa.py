"""One level of load by NVIDIA's perf_analyzer: its input file, its run, its profile export.

Traps of 2.60.0 that were met: any error answer ends the run without an export; `--warmup-request-count` together
with a request rate never ends (so the warm-up is ours); the export file must not exist; its own throughput counts
whole seconds of idle window (so ours is taken from the timestamps).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from voltriton_perf.perf_analyzer import PerfAnalyzer
from voltriton_perf.stats import Record

# What a count cannot be: perf_analyzer shows garbage for the numbers of a flag-only response.
MOST_TOKENS = 1 << 20
LOOK_S = 1.0  # between two looks at whether the server is still there


class AnalyzerError(Exception):
    """perf_analyzer gave no result: one line with its own words."""


@dataclass(frozen=True)
class Level:
    """`mode` is "concurrency" (closed loop) or "rate" (open loop, requests a second)."""

    mode: str
    value: float
    requests: int

    @property
    def least_requests(self) -> int:
        """perf_analyzer refuses fewer requests than the concurrency or rate."""
        return max(self.requests, math.ceil(self.value))


def input_data(prompts: Sequence[str], sampling: dict[str, Any], takes: Collection[str]) -> dict[str, Any]:
    """The JSON for --input-data; optional inputs only where the model takes them."""
    extras: dict[str, list[Any]] = {
        "stream": [True], "exclude_input_in_output": [True], "return_num_output_tokens": [True],
        "return_num_input_tokens": [True], "return_finish_reason": [True],
    }  # fmt: skip
    extras = {name: value for name, value in extras.items() if name in takes}
    parameters = json.dumps(sampling, ensure_ascii=False)
    return {"data": [{"text_input": [p], "sampling_parameters": [parameters], **extras} for p in prompts]}


def options(level: Level, model: str, address: str, data: Path, export: Path) -> list[str]:
    words = ["-m", model, "-u", address, "-i", "grpc", "--async", "--streaming", "--input-data", str(data)]
    words += ["--request-count", str(level.least_requests), "--profile-export-file", str(export)]
    if level.mode == "rate":
        # The default of 4 threads under-sends without a word.
        return [
            *words,
            "--request-rate-range",
            f"{level.value:g}",
            "--request-distribution",
            "poisson",
            "--max-threads",
            "16",
        ]
    return [*words, "--concurrency-range", f"{level.value:.0f}"]


def run(
    tool: PerfAnalyzer,
    level: Level,
    model: str,
    address: str,
    data: dict[str, Any],
    folder: Path,
    timeout_s: float,
) -> list[Record]:
    """Records of a level. AnalyzerError where it ended badly or not at all; nothing of it is left running."""
    source, export = folder / "inputs.json", folder / "export.json"
    source.write_text(json.dumps(data, ensure_ascii=False))
    export.unlink(missing_ok=True)
    command = [*tool.command, *options(level, model, address, source, export)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # As our own client does, gRPC in there is to ask no proxy.
        env={**os.environ, "no_grpc_proxy": "*"},
    )
    try:
        output = _output(process, address, timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    if process.returncode:
        raise AnalyzerError(f"perf_analyzer ended with {ending(process.returncode)}: {failure(output)}")
    return read_export(export)


def _output(process: subprocess.Popen[str], address: str, timeout_s: float) -> str:
    """What it said until its end. Where its server dies it waits for the answers for ever, so that is looked at too."""
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            return process.communicate(timeout=max(min(LOOK_S, left_s), 0.0))[0]
        except subprocess.TimeoutExpired:
            if left_s <= LOOK_S:
                raise AnalyzerError(f"perf_analyzer did not end within {timeout_s:g} s") from None
            if _refuses(address):
                raise AnalyzerError(f"the server went away: nothing listens at {address} any more") from None


def _refuses(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def ending(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-status).name}"
    return f"status {status}"


def failure(output: str) -> str:
    """The line of perf_analyzer's output that says why it stopped."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for mark in ("had error:", "Error:", "error:", "Failed"):
        for line in reversed(lines):
            if mark in line:
                return line[:300]
    return lines[-1][:300] if lines else "no output"


def read_export(path: Path) -> list[Record]:
    """Records of a profile export. AnalyzerError where it is none, or holds no request."""
    try:
        experiments = json.loads(path.read_text(encoding="utf-8"))["experiments"]
        requests = [request for experiment in experiments for request in experiment["requests"]]
        records = [_record(request) for request in requests]
    except FileNotFoundError:
        raise AnalyzerError("perf_analyzer wrote no export") from None
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise AnalyzerError(f"{path.name} is no profile export: {type(error).__name__}: {error}") from None
    if not records:
        raise AnalyzerError("perf_analyzer's export holds no request")
    return sorted(records, key=lambda record: record.sent_s)


def _record(request: dict[str, Any]) -> Record:
    arrivals, tokens, prompt_tokens = [], [], None
    for at_ns, outputs in zip(request["response_timestamps"], request["response_outputs"], strict=True):
        if _is_empty(outputs):
            continue
        arrivals.append(at_ns / 1e9)
        # A model that does not count is taken to send one token a response.
        tokens.append(_count(outputs.get("num_output_tokens"), 1))
        prompt_tokens = _count(outputs.get("num_input_tokens"), 0) or prompt_tokens
    return Record(request["timestamp"] / 1e9, tuple(arrivals), tuple(tokens), prompt_tokens=prompt_tokens)


def _is_empty(outputs: dict[str, Any]) -> bool:
    """A response that only carries the final flag: no output is there, numbers are garbage."""
    return all(not isinstance(value, str) or value == "" for value in outputs.values())


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) and 0 <= value < MOST_TOKENS else default
