"""Entry of the Python-based Triton backend `vllm`: finds the package and hands over.

Triton's stub runs an isolated interpreter, without PYTHONPATH. Laid out by `voltriton.triton`, the package is on
its path already; where this file still lies in the checkout (a container, say), the package is beside it.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("voltriton") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from voltriton.stub.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
