"""`voltriton chat`: talk to a model. Ctrl-C stops an answer, Ctrl-D or /exit ends the talk.

In the talk: /reset forgets it, /system TEXT sets the system prompt (and resets), /exit ends, /help says this.
With text as arguments, or with standard input that is no terminal, it answers that and ends.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import sys
import threading
import time
from collections.abc import Generator
from typing import Any

from voltriton_client.calls import Stream
from voltriton_client.client import Client
from voltriton_client.commands.common import (
    add_sampling_options,
    add_server_options,
    aside,
    client_for,
    command,
    fail,
    read_text,
    sampling_of,
)
from voltriton_client.errors import InvalidArgument, VoltritonError
from voltriton_client.request import request_for
from voltriton_client.types import Chunk, Collector, Result

HELP = "/reset forgets the talk   /system TEXT sets the system prompt   Ctrl-C stops an answer   /exit ends"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


@command("chat", main_thread=True)
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="voltriton chat", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", nargs="*", help="one message to answer, without a talk")
    parser.add_argument("--system", help="system prompt")
    parser.add_argument("--stats", action="store_true", help="tok/s on stderr also where that is no terminal")
    parser.add_argument("--no-think", action="store_true", help="ask the model's template for no reasoning")
    add_sampling_options(parser, max_tokens=1024)
    add_server_options(parser)
    args = parser.parse_args(argv)
    client = aside(lambda: client_for(args))
    try:
        talk = Talk(client, args)
        aside(lambda: client.wait_ready(args.model, args.wait))
        if args.text:
            return talk.once(" ".join(args.text))
        if not sys.stdin.isatty():
            return talk.once(read_text("-").strip())
        return talk.loop()
    finally:
        aside(client.close)


class Talk:
    """The messages so far, and how to answer the next one."""

    def __init__(self, client: Client, args: argparse.Namespace) -> None:
        self._client = client
        self._args = args
        self._sampling = sampling_of(args)
        self._messages: list[dict[str, Any]] = []
        self._shows_stats = args.stats or sys.stderr.isatty()
        self._colour = sys.stdout.isatty()
        self.reset(args.system)

    def reset(self, system: str | None) -> None:
        self._system = system
        self._messages = [{"role": "system", "content": system}] if system else []

    def once(self, text: str) -> int:
        if not text.strip():
            raise InvalidArgument("nothing to answer: the message is empty")
        return 130 if self.answer(text) is None else 0

    def loop(self) -> int:
        """Ask and answer until the user ends it; a failed answer does not."""
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives input() its line editing)
        print(f"{self._args.model} at {self._args.server}. {HELP}", file=sys.stderr)
        while True:
            try:
                line = input("> ").strip()
                if line in ("/exit", "/quit"):
                    return 0
                self._take(line)
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                # Meant, it may be, for an answer that had ended by itself just before.
                print("\n/exit or Ctrl-D ends the talk", file=sys.stderr)

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            self._order(line)
        elif line:
            self._try(line)

    def answer(self, text: str) -> Result | None:
        """Stream an answer and remember both; None when the user stopped it before anything came."""
        messages = [*self._messages, {"role": "user", "content": text}]
        collector, stopped = Collector(), False
        started = time.perf_counter()
        try:
            self._stream(messages, collector)
        except KeyboardInterrupt:
            stopped = True
        except VoltritonError:
            # The error's line is to begin on a line of its own.
            if collector.result().text:
                print()
            raise
        result = collector.result()
        print("" if not stopped else " [stopped]")
        if result.text:
            self._messages = [*messages, {"role": "assistant", "content": result.text}]
        if self._shows_stats:
            print(stats(result, time.perf_counter() - started), file=sys.stderr)
        return None if stopped and not result.text else result

    def _stream(self, messages: list[dict[str, Any]], collector: Collector) -> None:
        kwargs = {"enable_thinking": False} if self._args.no_think else None
        request = request_for(
            messages=messages,
            chat_template_kwargs=kwargs,
            model=self._args.model,
            timeout_s=self._args.timeout,
            sampling=self._sampling,
        )
        with contextlib.closing(read(self._client.stream(request))) as chunks:
            for chunk in chunks:
                collector.add(chunk)
                if chunk.index == 0:
                    self._show(chunk)

    def _show(self, chunk: Chunk) -> None:
        if chunk.reasoning and self._colour:
            print(f"{_DIM}{chunk.reasoning}{_PLAIN}", end="", flush=True)
        print(chunk.text, end="", flush=True)

    def _try(self, line: str) -> None:
        try:
            self.answer(line)
        except VoltritonError as error:
            fail("chat", error)

    def _order(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self.reset(self._system)
            print("forgotten", file=sys.stderr)
        elif word == "/system":
            self.reset(rest.strip() or None)
            print("system prompt set; forgotten the rest", file=sys.stderr)
        else:
            print(HELP if word == "/help" else f"no order {word}; {HELP}", file=sys.stderr)


def read(stream: Stream) -> Generator[Chunk, None, None]:
    """The chunks of an answer, read by another thread (see `aside`); leaving early cancels it."""
    chunks: queue.SimpleQueue[Chunk | BaseException | None] = queue.SimpleQueue()

    def fetch() -> None:
        try:
            for chunk in stream:
                chunks.put(chunk)
            chunks.put(None)
        except BaseException as error:
            chunks.put(error)

    threading.Thread(target=fetch, name="voltriton-read", daemon=True).start()
    try:
        while (item := chunks.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        aside(stream.close)


def stats(result: Result, seconds: float) -> str:
    """One line: tokens, tokens a second, time to the first."""
    first = f", first after {result.first_content_s:.2f} s" if result.first_content_s is not None else ""
    rate = f", {result.tokens_per_s:.1f} tok/s" if result.tokens_per_s is not None else ""
    return f"[{result.usage.completion_tokens} tokens in {seconds:.2f} s{rate}{first}]"
