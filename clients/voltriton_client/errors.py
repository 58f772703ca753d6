"""What can go wrong between a client and the service: one family, each with the code of the contract.

VoltritonError
├── ConnectionFailed      nothing answered at the address (nothing was sent; trying again is safe)
│   ├── WrongProtocol     something answered in another protocol: HTTP port for gRPC, or the reverse
│   └── CertificateFailed TLS is on at one side only, or the certificate is not accepted
├── InvalidArgument       the request is at fault; the engine never saw it
│   └── ModelNotFound     the server has no such model
├── Unavailable           overload, engine dead or restarting, draining
│   └── ModelNotReady     the model is there and not (or no longer) ready
├── Unauthenticated       the key is missing or wrong (a proxy or gateway says so)
├── MessageTooLarge       a request or an answer is over a gRPC limit
├── DeadlineExceeded      the time limit passed
├── Cancelled             the request was cancelled, by this side or the server
├── AnswerCut             the answer stopped before its end; `partial` is what had come
└── Internal              a fault of the service

`str(error)` is one line: what is wrong and what to do.
"""

from __future__ import annotations

import re


class VoltritonError(Exception):
    """Base of the family; `code` is the word that errors of the contract begin with."""

    code = "INTERNAL"

    def __init__(self, message: str, request_id: str = "") -> None:
        super().__init__(" ".join(message.split()))
        self.request_id = request_id


class ConnectionFailed(VoltritonError):
    """Nothing answered at the address; nothing was sent."""

    code = "UNAVAILABLE"


class WrongProtocol(ConnectionFailed):
    """Something answered, in another protocol."""


class CertificateFailed(ConnectionFailed):
    """The TLS handshake failed."""


class InvalidArgument(VoltritonError):
    """The request is at fault."""

    code = "INVALID_ARGUMENT"


class ModelNotFound(InvalidArgument):
    """The server has no such model."""

    code = "NOT_FOUND"


class Unavailable(VoltritonError):
    """The service refuses for now."""

    code = "UNAVAILABLE"


class ModelNotReady(Unavailable):
    """The model is known and not ready."""


class Unauthenticated(VoltritonError):
    """The key is missing or wrong."""

    code = "UNAUTHENTICATED"


class MessageTooLarge(VoltritonError):
    """A message is over a gRPC limit."""

    code = "RESOURCE_EXHAUSTED"


class DeadlineExceeded(VoltritonError):
    """The time limit passed."""

    code = "DEADLINE_EXCEEDED"


class Cancelled(VoltritonError):
    """The request was cancelled."""

    code = "CANCELLED"


class AnswerCut(VoltritonError):
    """The answer stopped before its end."""

    code = "UNAVAILABLE"

    def __init__(self, message: str, request_id: str = "", partial: str = "") -> None:
        super().__init__(message, request_id)
        self.partial = partial


class Internal(VoltritonError):
    """A fault of the service."""


BY_CODE: dict[str, type[VoltritonError]] = {
    "INVALID_ARGUMENT": InvalidArgument,
    "FAILED_PRECONDITION": InvalidArgument,
    "OUT_OF_RANGE": InvalidArgument,
    "UNIMPLEMENTED": InvalidArgument,
    "ALREADY_EXISTS": InvalidArgument,
    "NOT_FOUND": ModelNotFound,
    "UNAVAILABLE": Unavailable,
    "ABORTED": Unavailable,
    "UNAUTHENTICATED": Unauthenticated,
    "PERMISSION_DENIED": Unauthenticated,
    "RESOURCE_EXHAUSTED": MessageTooLarge,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "CANCELLED": Cancelled,
    "INTERNAL": Internal,
    "UNKNOWN": Internal,
    "DATA_LOSS": Internal,
}

# Ensembles put "in ensemble 'x', " in front of a member's error.
_CODE = re.compile(
    r"^(?:in ensemble '[^']*', )*(?:Failed to process the request\(s\)[^:]*: )?([A-Z_]{5,20}): (.*)$", re.S
)
_UNKNOWN_MODEL = re.compile(r"unknown model:? '([^']*)'(.*)", re.I | re.S)
_UNARY_HINT = (
    "the model streams (decoupled): use stream() or generate(), which go over the gRPC stream; over HTTP "
    "POST /v2/models/MODEL/generate_stream, or /generate with stream false; for plain infer use the model "
    "'generate'"
)


def from_text(text: str, request_id: str = "", code: str = "INTERNAL") -> VoltritonError:
    """The exception for an error's text: `CODE: ...` of the contract, or Triton's own words.

    `code` is what the transport said, and counts only where the text names none.
    """
    unknown = _UNKNOWN_MODEL.search(text)
    if unknown:
        return _unknown_model(unknown, request_id)
    if "decoupled transaction policy" in text or "produce exactly 1 response" in text:
        return InvalidArgument(f"{text.strip().rstrip('.')}: {_UNARY_HINT}", request_id)
    match = _CODE.match(text)
    if match and match.group(1) in BY_CODE:
        return BY_CODE[match.group(1)](match.group(2), request_id)
    if "unexpected inference input" in text or "inference input" in text:
        return InvalidArgument(text, request_id)
    return BY_CODE.get(code, Internal)(text or f"the server gave the code {code} and no text", request_id)


def is_of_contract(text: str) -> bool:
    """Whether a text begins with one of the contract's codes, so that the service wrote it."""
    match = _CODE.match(text)
    return bool(match and match.group(1) in BY_CODE)


def _unknown_model(match: re.Match[str], request_id: str) -> VoltritonError:
    model, rest = match.groups()
    if not model:
        # Every request of ours names its model: Triton answers so for one that it could not read to the end, seen
        # when the server was being stopped.
        return Unavailable(
            "the server did not take the request in whole; nothing was started, send it again", request_id
        )
    if "no available versions" in rest or "not ready" in rest:
        return ModelNotReady(
            f"model {model!r} is not ready (loading, failed or unloaded): `voltriton status` says which; "
            "wait for it, or look at the server's log",
            request_id,
        )
    return ModelNotFound(
        f"the server has no model {model!r}: `voltriton models` lists what it has", request_id
    )


def from_rpc(code: str, details: str, address: str, request_id: str = "") -> VoltritonError:
    """The exception for a failed gRPC call: `code` is the name of the status code."""
    if code == "UNAVAILABLE":
        failed = connection_failure(details, address)
        if failed:
            return failed
    if code == "RESOURCE_EXHAUSTED":
        return MessageTooLarge(_size_message(details), request_id)
    if code == "UNIMPLEMENTED" and "decoupled" not in details:
        return WrongProtocol(
            f"{address} speaks gRPC but is no Triton server ({_short(details)}): give the address "
            "of Triton's gRPC port (8001)"
        )
    return from_text(details, request_id, code)


def connection_failure(details: str, address: str) -> ConnectionFailed | None:
    """What gRPC's words say about a connection that never came to be; None when it did."""
    if "errors resolving" in details or "hostname lookup" in details:
        return ConnectionFailed(f"no host of the name in {address!r}: check the spelling (HOST:PORT)")
    if not _NOT_CONNECTED.search(details):
        return None
    if "Failed parsing HTTP/2" in details or "http1.x" in details:
        return WrongProtocol(
            f"{address} speaks HTTP, not gRPC: give Triton's gRPC port (8001 unless set), not its HTTP port "
            "(8000)"
        )
    if "WRONG_VERSION_NUMBER" in details:
        return CertificateFailed(f"{address} does not speak TLS: leave out --tls, or give the TLS port")
    if "SETTINGS frame" in details or "handshaker shutdown" in details:
        return ConnectionFailed(
            f"{address} takes the connection and gives no answer: no gRPC server, or one that hangs"
        )
    if "andshake" in details and re.search("Socket closed|Connection reset|Broken pipe", details):
        return CertificateFailed(
            f"{address} closes the connection where TLS begins: it does not speak TLS (leave out --tls, or give the "
            "TLS port), or wants a certificate of the client (--tls-cert, --tls-key)"
        )
    if any(word in details for word in ("andshake", "CERTIFICATE", "Hostname Verification")):
        return CertificateFailed(
            f"TLS with {address} failed ({_tls_reason(details)}): check the CA file (--tls-ca), that the "
            "certificate names this host, and the dates"
        )
    if "Socket closed" in details or "GOAWAY" in details:
        # Both Triton's HTTP port and a TLS port do just this.
        return WrongProtocol(
            f"{address} closes the connection: it is Triton's HTTP port (the gRPC port is 8001 unless set), or it "
            "wants TLS (--tls)"
        )
    return ConnectionFailed(
        f"nothing answers at {address} ({_short(details)}): start the server (`voltriton serve`), wait while "
        "it loads, or check the address"
    )


_NOT_CONNECTED = re.compile(r"failed to connect to all addresses|connections to all backends failing")


def nothing_was_sent(code: str, details: str) -> bool:
    """Whether a failed call never left this process, so that sending it again cannot run it twice."""
    return code == "UNAVAILABLE" and bool(_NOT_CONNECTED.search(details))


def _short(details: str) -> str:
    return details.rsplit(": ", 1)[-1][:120].strip().rstrip(".")


def _tls_reason(details: str) -> str:
    for pattern in (
        r"CERTIFICATE_VERIFY_FAILED[^;]*?: ([a-z][^:;]+)",
        r"(Hostname Verification[^.;]*)",
        r"OPENSSL_internal:(\w+)",
    ):
        match = re.search(pattern, details)
        if match:
            return match.group(1).strip()
    return _short(details)


_SIZE = re.compile(r"(Received|Sent) message larger than max \((\d+) vs\.? (\d+)\)")


def _size_message(details: str) -> str:
    match = _SIZE.search(details)
    if not match:
        return details
    way, size, limit = match.groups()
    return (
        f"a gRPC message of {size} bytes is over the limit of {limit}: where this client's limit is meant "
        "raise max_message_bytes (--max-message-mib), else the server's or proxy's; or send less (shorter "
        f"prompt, fewer logprobs). gRPC said: {way} message larger than max"
    )
