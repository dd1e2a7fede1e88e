"""The routes of the server. Not here: what a body may hold (protocol.py), what is answered (reply.py), processes (front.py)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from engine.detokenize import Detokenizer
from engine.errors import EngineDeadError, RequestError
from engine.request import Event, Request
from engine.server.exchange import Stream, answer
from engine.server.front import OK, Front
from engine.server.protocol import GenerateFields
from engine.server.reply import Reply, error_body, failure_line

_JSON, _LINES = "application/json", "application/x-ndjson"


def create_app(front: Front) -> FastAPI:
    """Return the ASGI application that serves `front`."""
    app = FastAPI(title="Walkgate", description="An Omni serving engine", docs_url=None, redoc_url=None)

    @app.get("/health")
    async def health() -> Response:
        return _json({"status": front.status}, 200 if front.status == OK else 503)

    @app.get("/info")
    async def info() -> Response:
        return _json(front.info())

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(await front.metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/generate", openapi_extra={"requestBody": _body_schema()})
    async def generate(request: HTTPRequest) -> Response:
        async def begin(data: bytes) -> Response:
            fields, wanted = await front.prepare(request.headers.get("content-type", ""), data)
            return await _Answer(front, fields, wanted).begin()

        return await answer(front.counters, request, begin)

    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(EngineDeadError, _engine_dead)
    app.add_exception_handler(StarletteHTTPException, _no_route)
    app.add_exception_handler(Exception, _unexpected)
    return app


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type=_JSON)


def _body_schema() -> dict[str, object]:
    schema = GenerateFields.model_json_schema()
    # The one nested object is written out in place: references inside a schema don't resolve in an OpenAPI document.
    schema["properties"]["speech"] = schema.pop("$defs")["SpeechFields"]
    form = {"type": "object", "required": ["request"], "properties": {"request": {"type": "string"}}}
    form["properties"] = {
        "request": schema,
        "audio": {"type": "array", "items": {"type": "string", "format": "binary"}},
    }
    return {"required": True, "content": {_JSON: {"schema": schema}, "multipart/form-data": {"schema": form}}}


class _Answer:
    """One request on its way through the engine."""

    def __init__(self, front: Front, fields: GenerateFields, request: Request) -> None:
        assert front.processor is not None
        self.front = front
        self.fields = fields
        self.reply = Reply(fields, Detokenizer(front.processor.token_bytes))
        self.events = front.client.generate(request)

    async def begin(self) -> Response:
        """Wait for the whole answer, or for a stream's first event: until then a refusal can still be an HTTP status."""
        if not self.fields.stream:
            async with aclosing(self.events):
                return await self._whole()
        try:
            first = await anext(self.events)
        except BaseException:
            await self.events.aclose()
            raise
        return Stream(self.front.counters, self._lines(first), _LINES)

    async def _whole(self) -> Response:
        async for event in self.events:
            if event.error is not None:
                self.front.counters.http_failed += 1
                failure = RequestError(event.error, code="engine", status=500)
                return Response(error_body(failure), 500, media_type=_JSON)
            self.reply.add(event)
            if event.done:
                return Response(self.reply.whole(event), media_type=_JSON)
        raise EngineDeadError("the engine closed the stream without a last event")

    async def _lines(self, first: Event) -> AsyncGenerator[bytes, None]:
        """The stream's chunks, each of whole lines; a failure is the last line. Closing it early cancels the request."""
        event = first
        try:
            while True:
                if event.error is not None:
                    self.front.counters.http_failed += 1
                    yield failure_line(event.error)
                    return
                if chunk := self.reply.lines(event):
                    yield chunk
                if event.done:
                    return
                event = await anext(self.events)
        except EngineDeadError as error:
            self.front.counters.http_failed += 1
            yield failure_line(str(error))
        finally:
            await self.events.aclose()


async def _refused(_: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = {"Connection": "close"} if error.status == 413 else None
    return Response(error_body(error), error.status, headers, _JSON)


async def _engine_dead(_: HTTPRequest, error: Exception) -> Response:
    return Response(error_body(RequestError(str(error), code="engine_dead")), 503, media_type=_JSON)


async def _no_route(request: HTTPRequest, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    known = "POST /generate, GET /health, GET /info, GET /metrics"
    message = f"{request.method} {request.url.path}: {error.detail}; there are {known}"
    body = error_body(RequestError(message, code="not_found" if error.status_code == 404 else "bad_request"))
    return Response(body, error.status_code, dict(error.headers or {}), _JSON)


async def _unexpected(_: HTTPRequest, error: Exception) -> Response:
    return Response(
        error_body(RequestError(f"{type(error).__name__}: {error}", code="internal")), 500, media_type=_JSON
    )
