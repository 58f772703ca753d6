"""voltriton: large language models on Volta GPUs, or a CPU, behind Triton Inference Server."""

__version__ = "0.1.0"
