"""See voltriton.stub.bls."""

from voltriton.stub.bls import GenerateModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
