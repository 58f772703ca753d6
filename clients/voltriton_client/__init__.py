"""Clients of a voltriton server: `Client` and `AsyncClient` over gRPC, `HttpClient` over HTTP.

from voltriton_client import Client
with Client("127.0.0.1:8001") as client:
    for chunk in client.stream(messages=[{"role": "user", "content": "Hello"}], max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from voltriton_client.aio import AsyncClient, AsyncSharedStream
from voltriton_client.calls import Stream
from voltriton_client.channel import Tls
from voltriton_client.client import Client
from voltriton_client.errors import (
    AnswerCut,
    Cancelled,
    CertificateFailed,
    ConnectionFailed,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    MessageTooLarge,
    ModelNotFound,
    ModelNotReady,
    Unauthenticated,
    Unavailable,
    VoltritonError,
    WrongProtocol,
)
from voltriton_client.http import HttpClient
from voltriton_client.request import Request
from voltriton_client.shared import SharedStream
from voltriton_client.sse import SseDecoder
from voltriton_client.types import Choice, Chunk, ModelInfo, Result, Timing, Usage

__all__ = [
    "AnswerCut",
    "AsyncClient",
    "AsyncSharedStream",
    "Cancelled",
    "CertificateFailed",
    "Choice",
    "Chunk",
    "Client",
    "ConnectionFailed",
    "DeadlineExceeded",
    "HttpClient",
    "Internal",
    "InvalidArgument",
    "MessageTooLarge",
    "ModelInfo",
    "ModelNotFound",
    "ModelNotReady",
    "Request",
    "Result",
    "SharedStream",
    "SseDecoder",
    "Stream",
    "Timing",
    "Tls",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "VoltritonError",
    "WrongProtocol",
]
