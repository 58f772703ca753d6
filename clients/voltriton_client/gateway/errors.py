"""Errors as OpenAI's clients expect them: {"error": {message, type, param, code}} and a status that is right."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

from voltriton_client import errors as family

JSON_TYPE = "application/json"


class ApiError(Exception):
    """An answer that is no success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type_: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.body = {"error": {"message": message, "type": type_, "param": param, "code": code}}

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


# The first class that fits counts: children stand before parents. (status, type, code)
_STATUS: Sequence[tuple[type[family.VoltritonError], int, str, str]] = (
    (family.ModelNotFound, 404, "invalid_request_error", "model_not_found"),
    (family.InvalidArgument, 400, "invalid_request_error", "invalid_value"),
    (family.MessageTooLarge, 413, "invalid_request_error", "message_too_large"),
    (family.DeadlineExceeded, 504, "server_error", "timeout"),
    (family.AnswerCut, 502, "server_error", "answer_cut"),
    (family.Cancelled, 503, "server_error", "cancelled"),
    (family.ModelNotReady, 503, "server_error", "model_not_ready"),
    (family.Unavailable, 503, "server_error", "overloaded"),
    (family.ConnectionFailed, 503, "server_error", "upstream_unreachable"),
    (family.Unauthenticated, 502, "server_error", "upstream_refuses_key"),
    (family.Internal, 500, "server_error", "internal_error"),
)


def from_client(error: family.VoltritonError) -> ApiError:
    """What a failure of the servers behind means to the caller."""
    status, type_, code = next((row[1:] for row in _STATUS if isinstance(error, row[0])), _STATUS[-1][1:])
    retry = 1.0 if status == 503 else None
    return ApiError(status, str(error), type_=type_, code=code, param=_param(error), retry_after_s=retry)


def _param(error: family.VoltritonError) -> str | None:
    """The field that the contract's errors of this kind begin with (`sampling_parameters.top_p: got ...`)."""
    message = str(error)
    if type(error) is not family.InvalidArgument:
        return None
    head = message.split(":", 1)[0]
    if ": " not in message or " " in head or head in ("", "request"):
        return None
    return head.removeprefix("sampling_parameters.")


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first thing that was wrong with a request's body, by its place."""
    field = errors[0].get("loc", ())[:2]
    same = [error for error in errors if error.get("loc", ())[:2] == field]
    # Of a union every member complains; the one that got furthest is the one that was meant.
    first = max(same, key=lambda error: len(error.get("loc", ())))
    errors = [error for error in errors if error not in same or error is first]
    place = _place(first.get("loc", ()))
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if first.get("type") == "extra_forbidden":
        return ApiError(400, f"unknown parameter: {place}{more}", code="unknown_parameter", param=place)
    if first.get("type") == "missing":
        return ApiError(
            400, f"missing: {place or 'the body'}{more}", code="missing_required_parameter", param=place
        )
    if first.get("type") == "json_invalid":
        return ApiError(
            400, f"the body is no JSON: {first.get('ctx', {}).get('error', '')}", code="invalid_json"
        )
    return ApiError(400, f"{place or 'body'}: {first.get('msg')}{more}", code="invalid_value", param=place)


def _place(parts: Sequence[Any]) -> str | None:
    """`messages[0].role` of ("body", "messages", 0, "role"); names of union members are left out."""
    text = ""
    for part in parts[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and not part[0].isupper() and part not in _UNION_TAGS:
            text += f".{part}" if text else part
    return text or None


_UNION_TAGS = {"str", "int", "float", "bool", "list", "dict", "none"}


def dump(value: Any) -> bytes:
    # ASCII: a lone surrogate that a message quotes has no UTF-8.
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def respond(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        dump(error.body), error.status, headers={**error.headers, **(headers or {})}, media_type=JSON_TYPE
    )
