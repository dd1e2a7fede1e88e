"""The routes of the server. Not here: what a body may hold (protocol.py), what is answered (reply.py), processes (front.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from engine.detokenize import Detokenizer
from engine.errors import EngineDeadError, RequestError, WalkgateError
from engine.server import openapi
from engine.server.exchange import BODY_LEFT, answer
from engine.server.failure import error_for
from engine.server.fields import shown
from engine.server.front import OK, Front
from engine.server.openai_routes import add_openai_routes
from engine.server.profile import add_profile_route
from engine.server.protocol import GenerateFields
from engine.server.reply import JSON, LINES, GenerateReply
from engine.server.respond import Job, as_request_error, respond


def create_app(front: Front) -> FastAPI:
    """Return the ASGI application that serves `front`."""
    app = FastAPI(title="Walkgate", description="An Omni serving engine", docs_url=None, redoc_url=None)
    unready = openapi.errors(401, 503, openai=False)
    object_of = {JSON: openapi.ANY_OBJECT}

    @app.get("/health", responses=_HEALTH, response_class=Response)
    async def health() -> Response:
        return _json(front.health(), 200 if front.status == OK else 503)

    @app.get("/info", responses=openapi.answers("What is served", object_of) | unready, response_class=Response)
    async def info() -> Response:
        return _json(front.info())

    counters = openapi.answers("Prometheus text", {"text/plain": openapi.TEXT}) | openapi.errors(401, openai=False)

    @app.get("/metrics", responses=counters, response_class=Response)
    async def metrics() -> Response:
        return Response(await front.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    answers = openapi.answers("Text, speech or both", {JSON: openapi.ANY_OBJECT, LINES: openapi.TEXT})
    errors = openapi.errors(*openapi.POST_ERRORS, openai=False)

    @app.post("/generate", openapi_extra=_body_schema(), responses=answers | errors, response_class=Response)
    async def generate(request: HTTPRequest) -> Response:
        async def begin(data: bytes) -> Response:
            fields, wanted = await front.prepare(request.headers.get("content-type", ""), data)
            assert front.processor is not None
            reply = GenerateReply(fields, Detokenizer(front.processor.token_bytes, wanted.stop_ids))
            return await respond(front, Job([wanted], reply, fields.stream))

        return await answer(front.counters, request, begin, front.max_body_bytes)

    add_profile_route(app, front)
    add_openai_routes(app, front)
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(EngineDeadError, _refused)
    app.add_exception_handler(StarletteHTTPException, _no_route)
    app.add_exception_handler(Exception, _unexpected)
    return app


_HEALTH: openapi.Responses = {
    status: {"description": text, "content": {JSON: {"schema": openapi.ANY_OBJECT}}}
    for status, text in ((200, "The server is ready"), (503, "It is not; `status` says why"))
}


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=JSON)


def _body_schema() -> dict[str, object]:
    schema = openapi.schema_of(GenerateFields)
    files = {"type": "array", "items": openapi.BINARY}
    form = {"type": "object", "required": ["request"], "properties": {"request": schema, "audio": files}}
    return openapi.body({JSON: schema, "multipart/form-data": form})


def _refusal(request: HTTPRequest, error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(error_for(request.url.path, error), error.status, headers, JSON)


async def _refused(request: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, WalkgateError)
    told = as_request_error(error)
    return _refusal(request, told, {"Connection": "close"} if told.status in BODY_LEFT else None)


async def _no_route(request: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    known = ", ".join(f"{method} {path}" for method, path in _routes(request.app))
    message = f"{shown(request.method)} {shown(request.url.path)}: {error.detail}; there are {known}"
    code = "not_found" if error.status_code == 404 else "bad_request"
    return _refusal(request, RequestError(message, code=code, status=error.status_code), error.headers)


def _routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    for path, methods in app.openapi()["paths"].items():
        yield from ((method.upper(), path) for method in methods)


async def _unexpected(request: HTTPRequest, error: Exception) -> Response:
    return _refusal(request, RequestError(f"{type(error).__name__}: {error}", code="internal", status=500))
