"""Options and habits that the commands share: where the server is, one clear line when something fails."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from voltriton_client.channel import MIB, Tls
from voltriton_client.client import Client
from voltriton_client.errors import InvalidArgument, VoltritonError
from voltriton_client.request import DEFAULT_MODEL

T = TypeVar("T")
# What the command has opened: work that goes on aside is to be cancelled when the command ends by Ctrl-C.
_clients: list[Client] = []


def add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--server",
        metavar="HOST:PORT",
        default=os.environ.get("VOLTRITON_SERVER", "127.0.0.1:8001"),
        help="Triton's gRPC address (default: $VOLTRITON_SERVER, else 127.0.0.1:8001)",
    )
    group.add_argument(
        "--tls", action="store_true", help="use TLS, with the system's CAs unless --tls-ca is given"
    )
    group.add_argument("--tls-ca", metavar="FILE", help="CA certificate (PEM)")
    group.add_argument("--tls-cert", metavar="FILE", help="this client's certificate (PEM)")
    group.add_argument("--tls-key", metavar="FILE", help="this client's key (PEM)")
    group.add_argument(
        "--api-key-file", metavar="FILE", help="key for a proxy in front (else $VOLTRITON_API_KEY)"
    )
    group.add_argument("--connect-timeout", type=seconds, default=5.0, metavar="S", help="default: 5")
    group.add_argument(
        "--max-message-mib", type=positive, default=256, metavar="N", help="gRPC limit; default: 256"
    )


def add_sampling_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    group = parser.add_argument_group("answer")
    group.add_argument("--model", "-m", default=DEFAULT_MODEL, help="default: %(default)s")
    group.add_argument("--max-tokens", "-n", type=positive, default=max_tokens, help="default: %(default)s")
    group.add_argument("--temperature", "-t", type=float, help="default: the model's")
    group.add_argument("--seed", type=int)
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="may be given several times"
    )
    group.add_argument("--sampling", metavar="JSON", help="more sampling parameters, as a JSON object")
    group.add_argument("--timeout", type=seconds, metavar="S", help="time limit for one answer")
    group.add_argument(
        "--wait", type=seconds, default=0.0, metavar="S", help="wait so long for the model to be ready"
    )


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters that were given. InvalidArgument: --sampling is no JSON object."""
    sampling: dict[str, Any] = {"max_tokens": args.max_tokens}
    if args.temperature is not None:
        sampling["temperature"] = args.temperature
    if args.seed is not None:
        sampling["seed"] = args.seed
    if args.stop:
        sampling["stop"] = args.stop
    if args.sampling:
        sampling.update(json_object("--sampling", args.sampling))
    return sampling


def json_object(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{name}: no JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{name}: got {type(value).__name__}, allowed: a JSON object")
    return value


def client_for(args: argparse.Namespace) -> Client:
    tls = None
    if args.tls or args.tls_ca or args.tls_cert or args.tls_key:
        tls = Tls(args.tls_ca, args.tls_cert, args.tls_key)
    client = Client(
        args.server,
        tls=tls,
        api_key=_api_key(args),
        connect_timeout_s=args.connect_timeout,
        max_message_bytes=args.max_message_mib * MIB,
    )
    _clients.append(client)
    return client


def _api_key(args: argparse.Namespace) -> str | None:
    if not args.api_key_file:
        return os.environ.get("VOLTRITON_API_KEY") or None
    return read_text(args.api_key_file).strip()


def read_text(path: str) -> str:
    """A file's text, `-` for standard input. InvalidArgument: it cannot be read, or is no UTF-8."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
        # Where the locale says nothing of UTF-8, Python reads wrong bytes as half surrogate pairs.
        text.encode("utf-8")
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from error
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise InvalidArgument(f"{path}: no UTF-8 text at byte {error.start}") from error
    return text


def aside(work: Callable[[], T]) -> T:
    """Do it on a thread of its own, and wait for what comes of it.

    Ctrl-C raises KeyboardInterrupt in the main thread, wherever that is: within gRPC's code it leaves locks held, and
    the channel's next call, or its closing, waits for ever. So the main thread of a command never enters gRPC.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="voltriton-command", daemon=True).start()
    return outcome.result()


def command(
    name: str, main_thread: bool = False
) -> Callable[[Callable[[list[str]], int]], Callable[[list[str]], int]]:
    """Make a command's `main` answer every failure of the service with one line and status 1.

    One that has signals or a terminal to look after runs in the main thread, and keeps that out of gRPC itself.
    """

    def wrap(main: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
        @functools.wraps(main)
        def run(argv: list[str]) -> int:
            try:
                return main(argv) if main_thread else aside(lambda: main(argv))
            except VoltritonError as error:
                return fail(name, error)
            except KeyboardInterrupt:
                aside(_close_clients)
                raise
            finally:
                _clients.clear()

        return run

    return wrap


def _close_clients() -> None:
    for client in _clients:
        client.close()


def fail(name: str, error: VoltritonError) -> int:
    sys.stdout.flush()
    print(f"voltriton {name}: {error.code}: {error}", file=sys.stderr)
    return 1


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, allowed: 1 or more")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e7:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: 0 or more seconds")
    return value
