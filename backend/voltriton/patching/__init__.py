"""`voltriton patch`: put our patches into a vLLM (installed or unpacked), check them, take them out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from voltriton.patching import refresh as refreshing
from voltriton.patching import series as patch_series
from voltriton.patching import tree as vllm_tree
from voltriton.patching.series import PatchError, Series


def main(argv: list[str]) -> int:
    args = _parser().parse_args(argv)
    try:
        folder = args.patches or patch_series.default_folder()
        result: int = args.run(args, folder)
    except (PatchError, OSError) as error:
        print(f"voltriton patch: {error}", file=sys.stderr)
        return 1
    return result


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="voltriton patch", description=__doc__)
    parser.add_argument(
        "--patches", type=Path, help="folder of the series (default: this checkout's patches/)"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, run, text in COMMANDS:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        if name != "hash":
            command.add_argument(
                "--tree", type=Path, help="folder that holds `vllm` (default: the installed one)"
            )
    return parser


def _apply(args: argparse.Namespace, folder: Path) -> int:
    series, tree = _both(args, folder)
    changed = vllm_tree.apply(tree, series)
    for path in changed:
        print(f"patched {path}")
    done = f"{len(changed)} files changed" if changed else "nothing to do"
    print(f"{tree.name} {tree.version} in {tree.root} carries series {series.hash} ({done})")
    return 0


def _verify(args: argparse.Namespace, folder: Path) -> int:
    series, tree = _both(args, folder)
    vllm_tree.require_version(tree, series)
    states = vllm_tree.states(tree, series)
    for path, state in states.items():
        print(f"{state:17} {path}")
    return 0 if set(states.values()) == {vllm_tree.PATCHED} else 1


def _revert(args: argparse.Namespace, folder: Path) -> int:
    series, tree = _both(args, folder)
    changed = vllm_tree.revert(tree, series)
    for path in changed:
        print(f"restored {path}")
    print(f"{tree.name} {tree.version} in {tree.root} is as published ({len(changed)} files changed)")
    return 0


def _hash(args: argparse.Namespace, folder: Path) -> int:
    print(patch_series.load(folder).hash)
    return 0


def _check(args: argparse.Namespace, folder: Path) -> int:
    faults = patch_series.problems(folder)
    if not faults:
        series, tree = _both(args, folder)
        vllm_tree.require_version(tree, series)
        faults = refreshing.prefix_problems(series, vllm_tree.pristine(tree, series))
    for fault in faults:
        print(fault, file=sys.stderr)
    if not faults:
        print(f"{len(series.patches)} patches: well formed, apply to {tree.root}, every prefix compiles")
    return 1 if faults else 0


def _refresh(args: argparse.Namespace, folder: Path) -> int:
    series, tree = _both(args, folder)
    for name in refreshing.refresh(series, tree):
        print(f"rewrote {name}")
    return 0


def _both(args: argparse.Namespace, folder: Path) -> tuple[Series, vllm_tree.Tree]:
    return patch_series.load(folder), vllm_tree.find_tree(args.tree)


COMMANDS: tuple[tuple[str, Callable[[argparse.Namespace, Path], int], str], ...] = (
    ("apply", _apply, "bring vLLM to exactly this series (again is harmless)"),
    ("verify", _verify, "one line a file; exit 0 if all carry the series"),
    ("revert", _revert, "restore vLLM byte for byte"),
    ("hash", _hash, "print the hash of the series"),
    ("check", _check, "check form, application and compilation of the series"),
    ("refresh", _refresh, "move the series to the vLLM in --tree: line numbers and UPSTREAM"),
)
