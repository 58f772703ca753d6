"""`voltriton models`: what the server's repository has."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from voltriton_client.commands.common import add_server_options, client_for, command
from voltriton_client.types import ModelInfo


@command("models")
def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="voltriton models", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON list")
    add_server_options(parser)
    args = parser.parse_args(argv)
    with client_for(args) as client:
        models = client.models()
    print(json.dumps([asdict(model) for model in models]) if args.json else table(models))
    if not models:
        print("voltriton models: the server's repository is empty", file=sys.stderr)
    return 0


def table(models: list[ModelInfo]) -> str:
    """One line a model: name, version, state, and why it is not ready."""
    rows = [("MODEL", "VERSION", "STATE", "")]
    rows += [(model.name, model.version or "-", model.state or "UNLOADED", model.reason) for model in models]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    cells = ("  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip() for row in rows)
    return "\n".join(cells)
