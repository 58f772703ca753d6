"""`voltriton generate`: complete a prompt (argument or standard input), or a file of prompts."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from voltriton_client.client import Client
from voltriton_client.commands.common import (
    add_sampling_options,
    add_server_options,
    client_for,
    command,
    positive,
    read_text,
    sampling_of,
)
from voltriton_client.errors import AnswerCut, InvalidArgument, VoltritonError
from voltriton_client.request import Request, request_for
from voltriton_client.types import Collector, Result


@command("generate")
def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    if args.file and args.prompt:
        raise InvalidArgument("give a prompt or --file, not both")
    sampling = sampling_of(args)
    with client_for(args) as client:
        client.wait_ready(args.model, args.wait)
        if args.file:
            return many(client, args, sampling)
        return one(client, args, sampling)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="voltriton generate", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="default: standard input")
    parser.add_argument(
        "--file", "-f", help="prompts: one a line, or JSON lines (text, or object with `prompt`)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object an answer, with usage and times")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a chat message of the user")
    parser.add_argument("--concurrency", type=positive, default=8, help="with --file; default: %(default)s")
    add_sampling_options(parser, max_tokens=128)
    add_server_options(parser)
    return parser


def one(client: Client, args: argparse.Namespace, sampling: dict[str, Any]) -> int:
    """Stream one answer to standard output."""
    if args.prompt is None and sys.stdin.isatty():
        print("the prompt, please; Ctrl-D on a line of its own ends it", file=sys.stderr)
    request = _request(args, args.prompt if args.prompt is not None else read_text("-"), sampling)
    collector = Collector(request.request_id)
    with client.stream(request) as chunks:
        try:
            for chunk in chunks:
                collector.add(chunk)
                if not args.json and chunk.index == 0:
                    print(chunk.text, end="", flush=True)
        except VoltritonError:
            # The error's line is to begin on a line of its own.
            if not args.json and collector.result().text:
                print()
            raise
    print(json.dumps(summary(collector.result()), ensure_ascii=False) if args.json else "")
    return 0


def many(client: Client, args: argparse.Namespace, sampling: dict[str, Any]) -> int:
    """Answer a file's prompts, in the file's order on standard output; 1 when any failed."""
    prompts = list(prompts_of(read_text(args.file), args.file))
    requests = [_request(args, prompt, sampling) for prompt in prompts]
    outcomes: dict[int, Result | VoltritonError] = {}
    printed = failed = 0
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, disable=not console.is_terminal, redirect_stdout=False
    ) as progress:
        task = progress.add_task("prompts", total=len(requests))
        for number, outcome in client.generate_many(requests, args.concurrency):
            outcomes[number] = outcome
            progress.advance(task)
            while printed in outcomes:
                failed += not write(outcomes.pop(printed), printed, args.json, sys.stdout)
                printed += 1
    if failed:
        print(f"voltriton generate: {failed} of {len(requests)} prompts failed", file=sys.stderr)
    return 1 if failed else 0


def write(outcome: Result | VoltritonError, number: int, as_json: bool, out: TextIO) -> bool:
    """One answer, or its error; False for an error."""
    if isinstance(outcome, Result):
        line = (
            json.dumps({"number": number, **summary(outcome)}, ensure_ascii=False)
            if as_json
            else outcome.text
        )
        print(line, file=out, flush=True)
        return True
    if as_json:
        partial = {"partial": outcome.partial} if isinstance(outcome, AnswerCut) else {}
        error = {"code": outcome.code, "message": str(outcome), **partial}
        print(json.dumps({"number": number, "error": error}, ensure_ascii=False), file=out, flush=True)
    else:
        print(file=out, flush=True)
        print(f"voltriton generate: prompt {number}: {outcome.code}: {outcome}", file=sys.stderr)
    return False


def prompts_of(text: str, name: str) -> Iterator[str]:
    """The prompts of a file: JSON lines when its first line is JSON text or an object, else one a line."""
    # Not splitlines: it also cuts at U+2028 and the like, which JSON may hold.
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise InvalidArgument(f"{name}: holds no prompt")
    as_json = lines[0].lstrip()[0] in '"{'
    for number, line in enumerate(lines, 1):
        yield _json_prompt(line, f"{name}, line {number}") if as_json else line


def _json_prompt(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidArgument(
            f"{where}: no JSON: {error} (a file whose first line begins with a quote or a brace is JSON lines)"
        ) from error
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise InvalidArgument(f"{where}: allowed: a JSON text, or an object with the text `prompt`")
    return prompt


def summary(result: Result) -> dict[str, Any]:
    """What --json prints of an answer."""
    times = {
        "first_token_s": result.first_content_s,
        "total_s": result.total_s,
        "tokens_per_s": result.tokens_per_s,
    }
    return {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.usage.prompt_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "cached_tokens": result.usage.cached_tokens,
        **{name: round(value, 6) for name, value in times.items() if value is not None},
        **({"texts": [choice.text for choice in result.choices]} if len(result.choices) > 1 else {}),
        **({"reasoning": result.reasoning} if result.reasoning else {}),
        **({"tool_calls": result.tool_calls} if result.tool_calls else {}),
        "request_id": result.request_id,
    }


def _request(args: argparse.Namespace, prompt: str, sampling: dict[str, Any]) -> Request:
    source: dict[str, Any] = (
        {"messages": [{"role": "user", "content": prompt}]} if args.chat else {"prompt": prompt}
    )
    return request_for(**source, model=args.model, timeout_s=args.timeout, sampling=sampling)
