"""Triton's Python module as far as the stub uses it, for tests without Triton."""

from __future__ import annotations

from typing import Any

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonError(Exception):
    INVALID_ARG, UNAVAILABLE, CANCELLED, INTERNAL = "invalid", "unavailable", "cancelled", "internal"

    def __init__(self, message: str, code: str = "internal") -> None:
        super().__init__(message)
        self.code = code


class Tensor:
    def __init__(self, name: str, values: Any) -> None:
        self.name, self.values = name, values


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self.outputs = {t.name: t.values.tolist() for t in output_tensors or []}
        self.error = error


class Sender:
    """Records what is sent, and refuses anything after the final flag as Triton does."""

    def __init__(self) -> None:
        self.sent: list[tuple[InferenceResponse | None, int]] = []
        self.cancelled = False
        self.fail = False

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.fail and response is not None:
            raise RuntimeError("the client is gone")
        if self.sent and self.sent[-1][1]:
            raise RuntimeError("Response sender has been closed")
        self.sent.append((response, flags))

    def is_cancelled(self) -> bool:
        return self.cancelled
