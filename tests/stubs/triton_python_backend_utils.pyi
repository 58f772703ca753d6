"""What the backend uses of Triton's module, which exists only inside the stub."""

from typing import Any

TRITONSERVER_RESPONSE_COMPLETE_FINAL: int

class TritonModelException(Exception): ...

class TritonError(Exception):
    INVALID_ARG: int
    UNAVAILABLE: int
    CANCELLED: int
    INTERNAL: int
    def __init__(self, message: str, code: int = ...) -> None: ...

class Tensor:
    def __init__(self, name: str, values: Any) -> None: ...
    def as_numpy(self) -> Any: ...

class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] = ..., error: TritonError | None = ...) -> None: ...

class Logger:
    @staticmethod
    def log_info(message: str) -> None: ...
    @staticmethod
    def log_warn(message: str) -> None: ...
    @staticmethod
    def log_error(message: str) -> None: ...

class MetricFamily:
    COUNTER: int
    GAUGE: int
    def __init__(self, name: str, description: str, kind: int) -> None: ...
    def Metric(self, labels: dict[str, str]) -> Any: ...

def get_input_tensor_by_name(request: Any, name: str) -> Tensor | None: ...
