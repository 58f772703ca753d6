"""One streamed chat answer from NVFP4 weights through a real tritonserver; see the Makefile.

Prepares the model, starts the server by the same supervisor as `voltriton serve`, asks one question over gRPC, prints
the answer token by token and what it cost, and stops everything (or stays up with --serve).
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from pathlib import Path

from voltriton.checkpoint import fetch
from voltriton.errors import StartError
from voltriton.server import Options, check_ports
from voltriton.supervisor import Supervisor
from voltriton.triton import default_root
from voltriton_client import Client, VoltritonError

QUESTIONS = {"qwen0.5b": "用一句话介绍机器学习。", "qwen1.5b": "用一句话介绍机器学习。"}
QUESTION = "What is the capital of France?"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, qwen0.5b, or the path of a model folder or GGUF file"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="HTTP; gRPC is the next one, metrics the one after"
    )
    parser.add_argument("--serve", action="store_true", help="stay up after the answer")
    args = parser.parse_args()
    demo = Demo(args.model, args.port, args.serve)
    try:
        demo.check()
    except StartError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return fetch.main([args.model]) or demo.run()


class Demo:
    def __init__(self, model: str, port: int, serve: bool) -> None:
        self._question = QUESTIONS.get(model, QUESTION)
        self._serve = serve
        root = default_root()
        self._log = root / "run" / "tritonserver.log"
        self._options = Options(
            repository=Path("model_repository"), root=root, http_port=port, grpc_port=port + 1, metrics_port=port + 2,
            log=self._log,
        )  # fmt: skip
        self._began = 0.0
        self._ready = threading.Event()
        self._failed = False
        self._supervisor = Supervisor(self._options, self._say)

    def check(self) -> None:
        """Before the minutes that a model takes. StartError."""
        check_ports(self._options, "choose others (PORT=9000 takes 9000, 9001 and 9002)")

    def run(self) -> int:
        self._began = time.monotonic()
        # Not before the ports were found free: it may be the log of a server that runs.
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.write_bytes(b"")
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self._supervisor.stop())
        print(
            f"starting tritonserver on 127.0.0.1:{self._options.http_port} (its log: {self._log})", flush=True
        )
        threading.Thread(target=self._tick, daemon=True).start()
        asking = threading.Thread(target=self._ask)
        status = self._supervisor.run(on_ready=asking.start)
        self._ready.set()
        if asking.ident is not None:
            asking.join()
        if status and not asking.ident:
            self._explain()
        return status or int(self._failed)

    def _say(self, line: str) -> None:
        print(f"\r\033[Kserver: {line}" if sys.stdout.isatty() else f"server: {line}", flush=True)

    def _tick(self) -> None:
        while not self._ready.wait(1.0):
            if sys.stdout.isatty():
                print(f"\rloading the model ... {time.monotonic() - self._began:.0f} s", end="", flush=True)

    def _explain(self) -> None:
        """The reason that tritonserver gives for a model that did not load."""
        for line in self._log.read_text(errors="replace").splitlines():
            if "failed to load" in line and "version" in line:
                print(line.partition(": ")[2] or line, file=sys.stderr)
                return

    def _ask(self) -> None:
        self._ready.set()
        print(f"ready after {time.monotonic() - self._began:.0f} s\n\n> {self._question}\n", flush=True)
        try:
            self._stream()
        except VoltritonError as error:
            self._failed = True
            print(f"\ndemo: {error}", file=sys.stderr)
        if not self._serve or self._failed:
            self._supervisor.stop()

    def _stream(self) -> None:
        grpc = f"127.0.0.1:{self._options.grpc_port}"
        began = time.monotonic()
        first_s = tokens = 0.0
        with Client(grpc) as client:
            messages = [{"role": "user", "content": self._question}]
            for chunk in client.stream(messages=messages, max_tokens=120, temperature=0.0):
                if chunk.text and not first_s:
                    first_s = time.monotonic() - began
                print(chunk.text, end="", flush=True)
                tokens += chunk.num_tokens
        total_s = time.monotonic() - began
        rate = (tokens - 1) / (total_s - first_s) if tokens > 1 else 0.0
        print(f"\n\nTTFT {first_s * 1000:.0f} ms, {tokens:.0f} tokens, {rate:.1f} tokens/s after the first")
        self._next_steps(grpc)

    def _next_steps(self, grpc: str) -> None:
        if not self._serve:
            print("`make serve` keeps the server up for requests of your own.", flush=True)
            return
        print(
            f"next: .venv/bin/voltriton chat --server {grpc}\n"
            f"or:   curl -N http://127.0.0.1:{self._options.http_port}/v2/models/vllm/generate_stream "
            """-d '{"text_input": "Once upon a time", "stream": true, "max_tokens": 40}'\n"""
            "Ctrl-C stops the server.",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
