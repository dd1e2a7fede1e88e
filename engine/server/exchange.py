"""One HTTP exchange: the body within its limit, a client that leaves cancels its work, and the counters of how it ended.

What a body holds and what is answered belongs to each route.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TypeVar

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.errors import RequestError
from engine.metrics import FrontCounters

# How long a body may take, and how long none of it may come: its sender holds a place in the server meanwhile.
_BODY_S, _IDLE_S = 300.0, 15.0
# Refusals that leave a part of the body unread, so that the connection is of no more use.
BODY_LEFT = (408, 413)
# So much more than its limit is read of a body and thrown away, so that its sender gets to read the refusal.
_DRAINED = 4

T = TypeVar("T")
Begin = Callable[[bytes], Coroutine[object, object, Response]]
"""Answers a body: with the whole answer, or with a Stream once its first event is there."""


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


class Broken(Exception):
    """A stream that must break off, because its form has no place for an error."""


async def answer(counters: FrontCounters, http: HTTPRequest, begin: Begin, max_body_bytes: int) -> Response:
    """Read the body, let `begin` answer it, and count how that went. A client that leaves cancels `begin`."""
    counters.http_requests += 1
    counters.http_open += 1
    streaming = False
    try:
        data = await _read_body(http, max_body_bytes)
        response = await unless_gone(http.receive, begin(data))
        streaming = isinstance(response, Stream)
        return response
    except (ClientGone, ClientDisconnect):
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


async def _read_body(http: HTTPRequest, limit: int) -> bytes:
    """The whole body; RequestError beyond the limit (413) or when it comes too slowly (408).

    Some of what is beyond the limit is read away, so that the client sees the answer.
    """
    length = http.headers.get("content-length", "0")
    promised = int(length) if length.isdecimal() else 0
    parts: list[bytes] = []
    read = 0
    if promised <= _DRAINED * limit:
        async for part in _parts(http):
            read += len(part)
            if read <= limit:
                parts.append(part)
            elif read > _DRAINED * limit:
                break
    if max(read, promised) > limit:
        raise RequestError(
            f"the body has {max(read, promised)} bytes; this server takes {limit} (--max-body-mb {limit >> 20})",
            code="too_large",
            status=413,
        )
    return b"".join(parts)


async def _parts(http: HTTPRequest) -> AsyncGenerator[bytes, None]:
    """The body as it comes; RequestError (408) once it has taken too long, or nothing of it has come for too long."""
    stream = aiter(http.stream())
    end = time.monotonic() + _BODY_S
    while True:
        left = end - time.monotonic()
        try:
            async with asyncio.timeout(min(left, _IDLE_S)):
                part = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            how = (
                f"no byte of the body came for {_IDLE_S:g} s" if left > _IDLE_S else f"the body took over {_BODY_S:g} s"
            )
            raise RequestError(f"{how}; send the whole of it at once", code="body_timeout", status=408) from None
        yield part


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Coroutine[object, object, T]) -> T:
    """Await `work`, but cancel it and raise ClientGone as soon as the client closes its connection."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class Stream(Response):
    """Chunks as they are made. The engine never waits for a slow reader; a reader that leaves closes `chunks`.

    `chunks` puts its own failures into the stream or raises Broken, and cancels its requests when it is closed.
    """

    def __init__(self, counters: FrontCounters, chunks: AsyncGenerator[bytes, None], media_type: str) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self.counters = counters
        self.chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the chunks until the last one, or until the client is gone."""
        try:
            await unless_gone(receive, self._send_all(send))
        except ClientGone:
            self.counters.http_disconnected += 1
        except Broken:
            pass  # Without its last chunk the body is incomplete, and its reader sees that.
        finally:
            self.counters.http_open -= 1
            await self.chunks.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
