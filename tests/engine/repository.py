"""The product's repository with a model of the test's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from server import ROOT
from voltriton.triton import default_root

DEMO = default_root() / "models" / "smollm2-nvfp4"


def real_repository(
    folder: Path, model: Path, settings: dict[str, Any] | None = None, **engine_args: Any
) -> Path:
    shutil.copytree(ROOT / "model_repository", folder)
    # The same numbers on every CPU: the profile would take bfloat16 on some.
    content = {
        "model": str(model),
        "dtype": "float32",
        **engine_args,
        "voltriton": {"profile": "cpu", **(settings or {})},
    }
    (folder / "vllm" / "1" / "model.json").write_text(json.dumps(content))
    return folder
