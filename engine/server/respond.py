"""From engine requests to one HTTP response, whole or streamed. Not here: what is asked, what an answer looks like."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from starlette.responses import Response

from engine.errors import EngineDeadError, RequestError, WalkgateError
from engine.request import Event, Request
from engine.server.exchange import Broken, Stream
from engine.server.front import Front

Placed = tuple[int, Event]


class Reply(Protocol):
    """An answer in the making. Events come with the number of their engine request, each once, in order.

    They go either through `chunk`, then `end`, or through `add`, then `whole`.
    """

    @property
    def stream_type(self) -> str:
        """The media type of a stream."""

    def chunk(self, place: int, event: Event) -> bytes:
        """What an event adds to a stream; may be nothing."""

    def end(self) -> bytes:
        """What closes a stream after the last event."""

    def failure(self, error: RequestError) -> bytes | None:
        """What closes a stream that fails; None where the stream has no form for that and must break off."""

    def add(self, place: int, event: Event) -> None:
        """Keep what an event brought."""

    def whole(self) -> Response:
        """The answer that is not streamed. May take long, so it is called off the event loop."""


async def together(front: Front, requests: Sequence[Request]) -> AsyncGenerator[Placed, None]:
    """The events of several engine requests as they come, each with its request's number, until all are done.

    A request that fails, or closing the generator early, cancels them all. Raises RequestError and EngineDeadError.
    """
    streams = [_events(front, place, request) for place, request in enumerate(requests)]
    async with aclosing(streams[0] if len(streams) == 1 else _merged(streams)) as merged:
        async for item in merged:
            yield item


async def _events(front: Front, place: int, request: Request) -> AsyncGenerator[Placed, None]:
    async with aclosing(front.client.generate(request)) as events:
        async for event in events:
            if event.error is not None:
                raise RequestError(event.error, code="engine", status=500)
            yield place, event


async def _merged(streams: Sequence[AsyncGenerator[Placed, None]]) -> AsyncGenerator[Placed, None]:
    queue: asyncio.Queue[Placed | WalkgateError] = asyncio.Queue()

    async def pump(stream: AsyncGenerator[Placed, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait(item)
        except WalkgateError as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    left = len(tasks)
    try:
        while left:
            item = await queue.get()
            if isinstance(item, WalkgateError):
                raise item
            left -= item[1].done
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request comes to: engine requests, and the reply that their events make."""

    requests: Sequence[Request]
    reply: Reply
    stream: bool


async def respond(front: Front, job: Job) -> Response:
    """Do a job. A stream begins with its first event, so that until then a refusal can still be an HTTP status."""
    events, reply = together(front, job.requests), job.reply
    if not job.stream:
        async with aclosing(events):
            async for place, event in events:
                reply.add(place, event)
        return await asyncio.get_running_loop().run_in_executor(front.pool, reply.whole)
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return Stream(front.counters, _chunks(front, first, events, reply), reply.stream_type)


async def _chunks(
    front: Front, first: Placed, events: AsyncGenerator[Placed, None], reply: Reply
) -> AsyncGenerator[bytes, None]:
    """The chunks of a stream. Closing it early cancels its requests."""
    try:
        if chunk := reply.chunk(*first):
            yield chunk
        async for place, event in events:
            if chunk := reply.chunk(place, event):
                yield chunk
        if chunk := reply.end():
            yield chunk
    except WalkgateError as error:
        front.counters.http_failed += 1
        last = reply.failure(as_request_error(error))
        if last is None:
            raise Broken from None
        yield last
    finally:
        await events.aclose()


def as_request_error(error: WalkgateError) -> RequestError:
    """What a client is told of an error: a dead engine is a 503, anything else that isn't a RequestError a 500."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDeadError):
        return RequestError(str(error), code="engine_dead", status=503)
    return RequestError(f"{type(error).__name__}: {error}", code="internal", status=500)
