"""The routes of the server. Not here: what a body may hold (protocol.py), what is answered (reply.py), processes (front.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from typing import TypeVar

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.config import MAX_BODY_BYTES
from engine.detokenize import Detokenizer
from engine.errors import EngineDeadError, RequestError
from engine.request import Event, Request
from engine.server.front import OK, Front
from engine.server.protocol import GenerateFields
from engine.server.reply import Reply, error_body, failure_line

_JSON, _LINES = "application/json", "application/x-ndjson"
_DRAINED_BYTES = 4 * MAX_BODY_BYTES

T = TypeVar("T")


class _ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


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
        return await _generate(front, request)

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


async def _generate(front: Front, http: HTTPRequest) -> Response:
    counters = front.counters
    counters.http_requests += 1
    counters.http_open += 1
    streaming = False
    try:
        data = await _read_body(http)
        fields, request = await _unless_gone(http.receive, front.prepare(http.headers.get("content-type", ""), data))
        answer = _Answer(front, fields, request)
        response = await _unless_gone(http.receive, answer.begin())
        streaming = isinstance(response, _Stream)
        return response
    except (_ClientGone, ClientDisconnect):
        counters.http_disconnected += 1
        return Response(status_code=499)  # nobody reads it
    except RequestError as error:
        if error.status < 500:
            counters.http_refused += 1
        else:
            counters.http_failed += 1
        raise
    except Exception:
        counters.http_failed += 1
        raise
    finally:
        if not streaming:
            counters.http_open -= 1


async def _read_body(http: HTTPRequest) -> bytes:
    """The whole body; RequestError (413) beyond the limit, of which some is read away so that the client sees the answer."""
    length = http.headers.get("content-length", "0")
    promised = int(length) if length.isdecimal() else 0
    parts: list[bytes] = []
    read = 0
    if promised <= _DRAINED_BYTES:
        async for part in http.stream():
            read += len(part)
            if read <= MAX_BODY_BYTES:
                parts.append(part)
            elif read > _DRAINED_BYTES:
                break
    if max(read, promised) > MAX_BODY_BYTES:
        raise RequestError(
            f"the body has {max(read, promised)} bytes; this server takes {MAX_BODY_BYTES}",
            code="too_large",
            status=413,
        )
    return b"".join(parts)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Await `work`, but cancel it and raise _ClientGone as soon as the client closes its connection."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _ClientGone
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


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
            return _Stream(self, await anext(self.events))
        except BaseException:
            await self.events.aclose()
            raise

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

    async def lines(self, first: Event) -> AsyncIterator[bytes]:
        """The stream's chunks, each of whole lines; a failure is the last line."""
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


class _Stream(Response):
    """NDJSON as it is made. The engine never waits for a slow reader, and a reader that leaves cancels its request."""

    def __init__(self, answer: _Answer, first: Event) -> None:
        super().__init__(media_type=_LINES)
        del self.headers["content-length"]
        self.answer = answer
        self.first = first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines until the last one, or until the client is gone."""
        counters = self.answer.front.counters
        try:
            await _unless_gone(receive, self._send_all(send))
        except _ClientGone:
            counters.http_disconnected += 1
        finally:
            counters.http_open -= 1
            await self.answer.events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self.answer.lines(self.first):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
