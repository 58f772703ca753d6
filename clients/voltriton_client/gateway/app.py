"""The gateway's routes."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from voltriton_client import core
from voltriton_client import errors as family
from voltriton_client.gateway import answers, schemas, translate
from voltriton_client.gateway.desk import Gateway
from voltriton_client.gateway.errors import ApiError, dump, from_client, from_validation, respond
from voltriton_client.gateway.guard import Guard
from voltriton_client.gateway.limits import Keys
from voltriton_client.gateway.settings import Settings
from voltriton_client.gateway.work import Answer, EventStream

log = logging.getLogger("voltriton.gateway")
PAGE = Path(__file__).with_name("page.html")
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorBody} for status in (400, 401, 404, 408, 413, 429, 500, 502, 503, 504)
}


def create_app(settings: Settings) -> FastAPI:
    """The ASGI application; it finds its servers when it starts."""
    gateway = Gateway(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.pool.start()
        yield
        await gateway.pool.stop()

    app = FastAPI(
        title="voltriton gateway",
        version=version("voltriton"),
        description="OpenAI's API in front of Triton Inference Server. Ignored: "
        + ", ".join(schemas.IGNORED),
        lifespan=lifespan,
        # These pages load their parts from elsewhere.
        docs_url=None,
        redoc_url=None,
    )
    app.state.gateway = gateway
    keys = Keys.load(settings.api_keys_file) if settings.api_keys_file else None
    app.add_middleware(Guard, settings=settings, telemetry=gateway.telemetry, keys=keys)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(settings.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    _add_errors(app)
    _add_openai(app, gateway)
    _add_own(app, gateway)
    app.openapi = lambda: _openapi(app, keys is not None)  # type: ignore[method-assign]
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def ours(_: Request, error: ApiError) -> Response:
        return respond(error)

    @app.exception_handler(family.VoltritonError)
    async def servers(_: Request, error: family.VoltritonError) -> Response:
        return respond(from_client(error))

    @app.exception_handler(RequestValidationError)
    async def bad_body(_: Request, error: RequestValidationError) -> Response:
        return respond(from_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        texts = {
            # FastAPI's own words for all that json.loads fails at in other ways than at the syntax name no cause.
            400: "the body is no JSON: no UTF-8, nested too deeply, or a number of too many digits",
            404: f"no such path: {request.url.path}",
            405: f"{request.method} is not for this path",
        }
        codes = {400: "invalid_json", 404: "unknown_url", 405: "method_not_allowed"}
        status = error.status_code
        text = texts.get(status, str(error.detail))
        return respond(ApiError(status, text, code=codes.get(status)), error.headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        log.exception("%s %s", request.method, request.url.path, exc_info=error)
        return respond(ApiError(500, "a fault of the gateway; its log has more", type_="server_error"))


def _add_openai(app: FastAPI, gateway: Gateway) -> None:
    limit_s = gateway.settings.request_timeout_s

    @app.post("/v1/chat/completions", responses=_ok(schemas.ChatAnswer, streams=True))
    async def chat(body: schemas.ChatRequest, request: Request) -> Response:
        head = answers.Head(_new_id("chatcmpl"), body.model)
        asked = translate.chat(body, gateway.pool.resolve(body.model), head.id, limit_s)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None

        async def whole() -> dict[str, Any]:
            return answers.chat_whole(head, await gateway.whole(asked), logprobs)

        if body.stream:
            chunks = gateway.chunks(asked)
            events = answers.chat_events(head, chunks, logprobs, _with_usage(body))
            return EventStream(_closing(events, chunks), limit_s, lambda: gateway.left(request.url.path))
        return Answer(whole(), limit_s, lambda: gateway.left(request.url.path))

    @app.post("/v1/completions", responses=_ok(schemas.CompletionAnswer, streams=True))
    async def completions(body: schemas.CompletionRequest, request: Request) -> Response:
        head = answers.Head(_new_id("cmpl"), body.model)
        asked = translate.completions(body, gateway.pool.resolve(body.model), head.id, limit_s)
        echo = (
            [prompt for prompt in translate.prompts_of(body.prompt) if isinstance(prompt, str)]
            if body.echo
            else []
        )

        async def whole() -> dict[str, Any]:
            return answers.completion_whole(head, await gateway.all_whole(asked), echo, body.logprobs)

        if body.stream:
            parts = gateway.merged(asked)
            events = answers.completion_events(
                head, parts, body.n or 1, echo, body.logprobs, _with_usage(body)
            )
            return EventStream(_closing(events, parts), limit_s, lambda: gateway.left(request.url.path))
        return Answer(whole(), limit_s, lambda: gateway.left(request.url.path))

    @app.post("/v1/embeddings", responses=_ok(schemas.EmbeddingAnswer))
    async def embeddings(body: schemas.EmbeddingRequest, request: Request) -> Response:
        asked = translate.embeddings(body, gateway.pool.resolve(body.model), _new_id("embd"), limit_s)

        async def whole() -> dict[str, Any]:
            results = await gateway.all_whole(asked)
            vectors = [core.vector_of(result) for result in results]
            usages = [result.usage for result in results]
            return answers.embedding_whole(body.model, vectors, usages, body.encoding_format == "base64")

        return Answer(whole(), limit_s, lambda: gateway.left(request.url.path))

    @app.get("/v1/models", responses=_ok(schemas.ModelList))
    async def models() -> Response:
        cards = [answers.model_card(name, gateway.started) for name in gateway.pool.names()]
        return _json({"object": "list", "data": cards})

    @app.get("/v1/models/{model:path}", responses=_ok(schemas.ModelCard))
    async def model(model: str) -> Response:
        gateway.pool.resolve(model)
        return _json(answers.model_card(model, gateway.started))


def _add_own(app: FastAPI, gateway: Gateway) -> None:
    page = PAGE.read_text("utf-8")
    policy = _content_policy(page)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return Response(
            page, media_type="text/html; charset=utf-8", headers={"content-security-policy": policy}
        )

    @app.get("/health", include_in_schema=False)
    async def health() -> Response:
        upstreams = gateway.pool.upstreams
        healthy = sum(upstream.healthy for upstream in upstreams)
        names = gateway.pool.names()
        body = {
            "status": "ok" if names else "unavailable",
            "servers": len(upstreams),
            "healthy_servers": healthy,
        }
        return _json({**body, "models": names}, 200 if names else 503)

    @app.get("/metrics", include_in_schema=False)
    async def metrics() -> Response:
        return Response(gateway.telemetry.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _with_usage(body: schemas.Sampling) -> bool:
    return bool(body.stream_options and body.stream_options.include_usage)


async def _closing(
    events: AsyncGenerator[dict[str, Any], None], source: AsyncGenerator[Any, None]
) -> AsyncGenerator[dict[str, Any], None]:
    """The events; when they are given up, what they come from is closed at once, which cancels the request."""
    async with aclosing(source), aclosing(events):
        async for event in events:
            yield event


def _new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"


def _json(body: dict[str, Any], status: int = 200) -> Response:
    return Response(dump(body), status, media_type="application/json")


def _ok(model: type, streams: bool = False) -> dict[int | str, dict[str, Any]]:
    """The responses of a route, for the OpenAPI document."""
    ok: dict[str, Any] = {"model": model}
    if streams:
        ok["content"] = {"text/event-stream": {"schema": {}}}
    return {200: ok, **_ERRORS}


def _content_policy(page: str) -> str:
    """Only this page's own script and style run, and it talks to this gateway alone."""
    allowed = {}
    for tag in ("script", "style"):
        match = re.search(f"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = hashlib.sha256(match.group(1).encode("utf-8")).digest() if match else b""
        allowed[tag] = f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
    return (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _openapi(app: FastAPI, with_keys: bool) -> dict[str, Any]:
    """The OpenAPI document, less the status 422 that FastAPI writes everywhere and this gateway never sends."""
    if app.openapi_schema:
        return app.openapi_schema
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
    if with_keys:
        document.setdefault("components", {})["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"}
        }
        document["security"] = [{"key": []}]
    app.openapi_schema = document
    return document
