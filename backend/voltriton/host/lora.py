"""`lora_request`: adapters loaded and unloaded by name at run time. A path never comes from a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from voltriton.errors import InvalidArgument
from voltriton.host.engine_api import Engine

WHERE = "lora_request"
ACTIONS = ("load", "unload")


async def apply(request: dict[str, Any], engine: Engine, folder: str | None) -> None:
    """{"load": NAME}, {"unload": NAME} or {} (which only lists). Raises InvalidArgument."""
    unknown = [name for name in request if name not in ACTIONS]
    if unknown or len(request) > 1:
        raise InvalidArgument(
            f'{WHERE}: got {", ".join(request)}; {{"load": NAME}}, {{"unload": NAME}} or {{}} is allowed'
        )
    if not engine.info.lora_enabled:
        raise InvalidArgument(f"{WHERE}: LoRA feature is not enabled.")
    if "load" in request:
        await _load(request["load"], engine, folder)
    elif "unload" in request:
        await _unload(request["unload"], engine)


async def _load(name: Any, engine: Engine, folder: str | None) -> None:
    if name in engine.loras:
        raise InvalidArgument(f"{WHERE}.load: {name!r} is loaded already")
    if folder is None:
        raise InvalidArgument(f"{WHERE}.load: no adapter can be loaded: lora_folder is not set in model.json")
    available = adapters(Path(folder))
    if name not in available:
        raise InvalidArgument(
            f"{WHERE}.load: got {name!r}, there are {', '.join(sorted(available)) or 'none'}"
        )
    await engine.load_lora(name, str(available[name]))


async def _unload(name: Any, engine: Engine) -> None:
    if name not in engine.loras:
        raise InvalidArgument(
            f"{WHERE}.unload: LoRA {name} is not supported, we currently support {engine.loras}"
        )
    await engine.unload_lora(name)


def adapters(folder: Path) -> dict[str, Path]:
    """Folders right below `folder` that hold an adapter, by name: a name with a path in it is none of them."""
    return {path.parent.name: path.parent for path in folder.glob("*/adapter_config.json")}
