"""What a build of vLLM offers of the API that the host uses, read from its files: nothing is imported.

    python tests/unit/vllm_api/record.py WHEEL_OR_FOLDER [--write NAME-VERSION]

prints each use by the host (backend/voltriton/host/vllm_engine) that the build cannot serve, and ends with 1 if there is
one. `--write` keeps what was read as NAME-VERSION.json beside this file; the tests hold the host against every such file.

A record has, for each class that the host imports or is given: its attributes (annotated, set on `self`, methods and
properties, those of bases included), the parameters of its constructor and of the methods that the host calls. A name
with a default ends in `=`. A class that the build lacks is null.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOM = HERE.parents[2] / "backend/voltriton/host/vllm_engine"

ASYNC_LLM = "vllm.v1.engine.async_llm:AsyncLLM"
PARSER = "vllm.parser.abstract_parser:DelegatingParser"
PARSER_MANAGER = "vllm.parser.parser_manager:ParserManager"
CHAT_REQUEST = "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest"
MODEL_CONFIG = "vllm.config.model:ModelConfig"
VLLM_CONFIG = "vllm.config.vllm:VllmConfig"
# What the host's expressions hold, in all of its files and in one.
RECEIVERS: dict[str, dict[str, str]] = {
    "": {
        "llm": ASYNC_LLM,
        "self._llm": ASYNC_LLM,
        "self._llm.renderer": "vllm.renderers.base:BaseRenderer",
        "llm.vllm_config": VLLM_CONFIG,
        "llm.vllm_config.model_config": MODEL_CONFIG,
    },
    "info.py": {
        "config": VLLM_CONFIG,
        "config.model_config": MODEL_CONFIG,
        "config.scheduler_config": "vllm.config.scheduler:SchedulerConfig",
        "config.parallel_config": "vllm.config.parallel:ParallelConfig",
    },
    "chat_output.py": {
        "config": MODEL_CONFIG,
        "message": "vllm.parser.abstract_parser:DeltaMessage",
        "parser": PARSER,
        "request": CHAT_REQUEST,
    },
    "outputs.py": {
        "output": "vllm.outputs:RequestOutput",
        "completion": "vllm.outputs:CompletionOutput",
        "stats": "vllm.v1.metrics.stats:RequestStateStats",
        "entry": "vllm.logprobs:Logprob",
    },
}
# `builds.py` chooses by what a build has: its classes and methods, of which a build need not have all.
CHOSEN = {
    "vllm.exceptions:VLLMClientError": (),
    "vllm.exceptions:MaxQueuedTokensError": (),
    "vllm.exceptions:QueueOverflowError": (),
    PARSER: ("parse", "parse_delta", "set_prompt_token_ids", "extract_reasoning", "_parse_tool_calls"),
    PARSER_MANAGER: ("get_parser",),
}
Record = dict[str, dict[str, Any] | None]


class Use(NamedTuple):
    """An attribute of a class, or with `arguments` (number of positional ones, keywords) a call; "" is the class itself."""

    where: str
    owner: str
    name: str
    arguments: tuple[int, frozenset[str], bool] | None = None


@functools.cache
def uses() -> list[Use]:
    """Every use of vLLM in the host's room but `builds.py`."""
    return [use for path in sorted(ROOM.glob("*.py")) if path.name != "builds.py" for use in _uses_in(path)]


def _uses_in(path: Path) -> Iterator[Use]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    receivers = RECEIVERS[""] | RECEIVERS.get(path.name, {})
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            for alias in node.names:
                receivers[alias.name] = f"{node.module}:{alias.name}"
                yield Use(f"{path.name}:{node.lineno}", receivers[alias.name], "")
    for node in ast.walk(tree):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Attribute) and (owner := receivers.get(ast.unparse(node.value))):
            yield Use(where, owner, node.attr)
        if isinstance(node, ast.Call):
            yield from _call(where, node, receivers)


def _call(where: str, node: ast.Call, receivers: dict[str, str]) -> Iterator[Use]:
    keywords = frozenset(word.arg for word in node.keywords if word.arg)
    more = any(word.arg is None for word in node.keywords)
    arguments = (len(node.args), keywords, more)
    if isinstance(node.func, ast.Name) and node.func.id in receivers and ":" in receivers[node.func.id]:
        yield Use(where, receivers[node.func.id], "__init__", arguments)
    elif isinstance(node.func, ast.Attribute) and (owner := receivers.get(ast.unparse(node.func.value))):
        yield Use(where, owner, node.func.attr, arguments)


def unserved(record: Record) -> list[str]:
    """One line for each use that the build cannot serve."""
    found = []
    for use in uses():
        entry = record.get(use.owner)
        problem = f"no class {use.owner}" if entry is None else _problem(use, entry)
        if problem:
            found.append(f"{use.where}: {problem}")
    return found


def _problem(use: Use, entry: dict[str, Any]) -> str:
    if use.name and use.name != "__init__" and use.name not in entry["attributes"]:
        return f"{use.owner} has no {use.name}"
    if use.arguments is None:
        return ""
    parameters = entry["calls"].get(use.name)
    if parameters is None:
        return f"{use.owner}.{use.name} is not recorded: record the build again"
    fault = misfit(parameters, *use.arguments)
    return f"{use.owner}.{use.name}: {fault}" if fault else ""


def misfit(parameters: list[str], positional: int, keywords: frozenset[str], more: bool) -> str:
    """Why a call with so many positional arguments and these keywords does not fit; empty where it does.

    `more`: the call also passes `**something`, so what is missing is not known.
    """
    star = parameters.index("*") if "*" in parameters else len(parameters)
    by_place = [name for name in parameters[:star] if not name.startswith("**")]
    names = {name.rstrip("=") for name in parameters if not name.startswith("*")}
    if positional > len(by_place):
        return f"takes {len(by_place)} positional arguments, {positional} are given"
    unknown = keywords - names
    if unknown and not any(name.startswith("**") for name in parameters):
        return f"has no parameter {', '.join(sorted(unknown))}"
    given = {name.rstrip("=") for name in by_place[:positional]} | keywords
    required = {name for name in parameters if not name.endswith("=") and not name.startswith("*")}
    missing = required - given
    return f"needs {', '.join(sorted(missing))}" if missing and not more else ""


class Package:
    """The modules of a wheel, or of a folder that holds the package `vllm`."""

    def __init__(self, path: Path) -> None:
        self._folder = path
        self._wheel = zipfile.ZipFile(path) if path.is_file() else None
        self._modules: dict[str, ast.Module | None] = {}

    def module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            text = self._read(name.replace(".", "/") + ".py") or self._read(
                name.replace(".", "/") + "/__init__.py"
            )
            self._modules[name] = ast.parse(text) if text is not None else None
        return self._modules[name]

    def _read(self, name: str) -> str | None:
        if self._wheel is not None:
            return self._wheel.read(name).decode() if name in self._wheel.namelist() else None
        path = self._folder / name
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def classes(self, owner: str) -> list[ast.ClassDef]:
        """The class and those of its bases that are in the package, nearest first."""
        module, _, name = owner.partition(":")
        tree = self.module(module)
        for node in ast.walk(tree) if tree else []:
            if isinstance(node, ast.ClassDef) and node.name == name:
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                return [node, *(each for base in bases for each in self.classes(self._home(module, base)))]
            if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
                return self.classes(f"{node.module}:{name}") if node.module else []
        return []

    def _home(self, module: str, name: str) -> str:
        tree = self.module(module)
        for node in ast.walk(tree) if tree else []:
            if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
                return f"{node.module}:{name}"
        return f"{module}:{name}"


def read(path: Path) -> Record:
    """The record of a wheel or folder."""
    package = Package(path)
    calls: dict[str, set[str]] = {owner: set(names) for owner, names in CHOSEN.items()}
    for use in uses():
        names = calls.setdefault(use.owner, set())
        if use.arguments is not None:
            names.add(use.name)
    return {owner: _entry(package.classes(owner), names) for owner, names in sorted(calls.items())}


def _entry(classes: list[ast.ClassDef], names: set[str]) -> dict[str, Any] | None:
    if not classes:
        return None
    methods: dict[str, list[str]] = {}
    attributes: set[str] = set()
    for node in classes:
        attributes |= _attributes(node)
        for item in node.body:
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name in names:
                methods.setdefault(item.name, _parameters(item))
    if "__init__" in names and "__init__" not in methods:
        methods["__init__"] = _fields(classes)
    own = {use.name for use in uses()}
    kept = sorted(name for name in attributes if not name.startswith("_") or name in own)
    return {"attributes": kept, "calls": dict(sorted(methods.items()))}


def _attributes(node: ast.ClassDef) -> set[str]:
    found = {item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    found |= {name for name, _ in _annotated(node)}
    for item in node.body:  # members of an enumeration
        if isinstance(item, ast.Assign):
            found |= {target.id for target in item.targets if isinstance(target, ast.Name)}
    stored = (
        item for item in ast.walk(node) if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store)
    )
    return found | {
        item.attr for item in stored if isinstance(item.value, ast.Name) and item.value.id == "self"
    }


def _annotated(node: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Fields and whether they have a default."""
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        if not ast.unparse(item.annotation).startswith("ClassVar"):
            yield item.target.id, item.value is not None


def _fields(classes: list[ast.ClassDef]) -> list[str]:
    """Constructor of a dataclass, msgspec.Struct or pydantic model: its fields, those of the bases first."""
    fields: dict[str, bool] = {}
    for node in reversed(classes):
        fields |= dict(_annotated(node))
    return [name + "=" * has_default for name, has_default in fields.items() if not name.startswith("_")]


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    args = function.args
    by_place = [arg.arg for arg in args.posonlyargs + args.args]
    defaults = len(by_place) - len(args.defaults)
    found = [name + "=" * (i >= defaults) for i, name in enumerate(by_place)]
    if not any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list):
        found = found[1:]  # self or cls
    if args.kwonlyargs:
        found.append("*")
        found += [
            arg.arg + "=" * (default is not None)
            for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
        ]
    return [*found, *([f"**{args.kwarg.arg}"] if args.kwarg else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("--write", metavar="NAME-VERSION")
    args = parser.parse_args()
    record = read(args.build)
    if args.write:
        lines = ",\n".join(f"{json.dumps(owner)}: {json.dumps(entry)}" for owner, entry in record.items())
        (HERE / f"{args.write}.json").write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    problems = unserved(record)
    print("\n".join(problems) or f"{args.build}: serves every use")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
