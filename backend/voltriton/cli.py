"""The console command `voltriton NAME ...`: a table of commands, each in a module of its own.

A command's module has `main(argv: list[str]) -> int`: 0 done, 1 failed (one line on stderr that says
what is wrong and what to do), 2 wrong usage (argparse). Modules are imported only when they are asked for.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
from typing import Any, NamedTuple


class Command(NamedTuple):
    module: str
    help: str


COMMANDS = {
    "serve": Command("voltriton.supervisor", "start tritonserver with a model repository and look after it"),
    "drain": Command("voltriton.drain", "refuse new requests, wait for the open ones (for preStop hooks)"),
    "status": Command("voltriton_client.commands.status", "say whether server, models and engine are well"),
    "chat": Command("voltriton_client.commands.chat", "talk to a model"),
    "generate": Command("voltriton_client.commands.generate", "complete prompts"),
    "models": Command("voltriton_client.commands.models", "list the models of a server"),
    "gateway": Command("voltriton_client.gateway", "an OpenAI-compatible HTTP server in front of Triton"),
    "doctor": Command("voltriton.doctor", "check this machine before anything is served from it"),
    "plan": Command("voltriton.planner", "say whether a model fits on given GPUs, and what to change"),
    "fetch": Command("voltriton.checkpoint.fetch", "prepare a demo model, or a folder of yours, for serving"),
    "gguf2hf": Command("voltriton.checkpoint.gguf", "turn a GGUF file into a Hugging Face folder"),
    "convert": Command("voltriton.checkpoint.convert", "quantise a model to NVFP4"),
    "verify": Command("voltriton.checkpoint.verify", "check an NVFP4 checkpoint and measure its quality"),
    "patch": Command("voltriton.patching", "apply, verify, revert or refresh the patches to vLLM"),
    "sweep": Command("voltriton_perf.sweep", "measure latency and throughput over a range of loads"),
    "sla": Command("voltriton_perf.sla", "find the highest load that meets the targets"),
    "compare": Command("voltriton_perf.compare", "put results side by side"),
}


def usage() -> str:
    width = max(map(len, COMMANDS))
    rows = [f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        ["usage: voltriton COMMAND [options]", "", *rows, "", "voltriton COMMAND --help says more."]
    )


def main(argv: list[str] | None = None) -> int:
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return 0 if args else 2
    name, rest = args[0], args[1:]
    if name == "--version":
        from voltriton import __version__

        print(__version__)
        return 0
    if name not in COMMANDS:
        print(f"voltriton: no command {name!r}; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal or pipe of another encoding gets what it cannot show as an escape, not an end in mid-answer.
        sys.stdout.reconfigure(errors="backslashreplace")
    # gRPC would write each attempt at a connection to stderr; a command says in one line what came of them.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        result: int = _load(COMMANDS[name].module).main(rest)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has left (`| head`): say nothing.
        _drop_output()
        return 0
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _drop_output()
        print(f"voltriton {name}: cannot write: {error.strerror}", file=sys.stderr)
        return 1
    return result


def _load(module: str) -> Any:
    """A Ctrl-C meanwhile ends the process at once: libraries take the exception for a fault of their own."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        return importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        return importlib.import_module(module)
    finally:
        signal.signal(signal.SIGINT, before)


def _drop_output() -> None:
    """Keep the interpreter from flushing once more what cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
