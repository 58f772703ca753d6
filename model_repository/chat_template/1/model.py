"""See voltriton.stub.bls."""

from voltriton.stub.bls import ChatTemplateModel as TritonPythonModel

__all__ = ["TritonPythonModel"]
