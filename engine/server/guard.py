"""What every HTTP request meets before a route: is a key shown, does the server take requests, is there room for one more.

A refusal is answered before the body is read. Not here: what a body may hold (protocol.py), how large it may be (exchange.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import RequestError
from engine.metrics import FrontCounters
from engine.server.failure import error_for

_OPEN_PATH = "/health"
_RATE_S = 60.0  # how far back the rate of finished requests looks, and so the longest time to ask for
_SHORTEST_RETRY_S = 1
_UNREADY_RETRY_S = 5
_TOO_MANY, _UNAVAILABLE, _UNAUTHORISED = 429, 503, 401

Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class Admission:
    """How many requests are open, and how fast they finish. Times are seconds of any one clock.

    A request is open from its first header to the last byte of its answer. `batch` of the `limit` may run at once.
    """

    limit: int
    batch: int
    open: int = 0
    _busy_since: float = 0.0
    _finished: deque[float] = field(default_factory=deque)

    def enter(self, now: float) -> None:
        """Count a request that was let in."""
        if not self.open:
            self._busy_since = now
        self.open += 1

    def leave(self, now: float) -> None:
        """Count a request that has ended, however it did."""
        self.open -= 1
        self._finished.append(now)
        self._forget(now)

    def retry_after_s(self, now: float) -> int:
        """After how many whole seconds to ask again: when the requests that wait now will have been worked off.

        Never longer than the time over which the rate is known, and the shortest time where none is known.
        """
        self._forget(now)
        if not self._finished:
            return _SHORTEST_RETRY_S
        known_s = min(max(now - self._busy_since, _SHORTEST_RETRY_S), _RATE_S)
        waiting = max(self.open - self.batch, 1)
        return math.ceil(min(waiting / len(self._finished), 1.0) * known_s)

    def _forget(self, now: float) -> None:
        oldest = max(now - _RATE_S, self._busy_since)
        while self._finished and self._finished[0] < oldest:
            self._finished.popleft()


@dataclass(slots=True)
class Guard:
    """The ASGI application `app` behind its checks.

    `unready` says why the server takes no requests now, or None; `engine_open` how many requests the engine holds, of which
    one HTTP request may be several. Without `keys` everybody may ask.
    """

    app: ASGIApp
    admission: Admission
    counters: FrontCounters
    unready: Callable[[], RequestError | None]
    engine_open: Callable[[], int]
    keys: Iterable[str] = field(default=(), repr=False)
    _digests: list[bytes] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._digests = [_digest(key.encode()) for key in self.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a refusal, or hand the request on and keep count of it until it has ended."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif self._digests and scope["path"] != _OPEN_PATH and not self._key_shown(scope["headers"]):
            self.counters.http_unauthorised += 1
            error = RequestError(
                "no valid API key; send one as Authorization: Bearer KEY", code="invalid_api_key", status=_UNAUTHORISED
            )
            await _refuse(scope, send, error, [(b"www-authenticate", b"Bearer")])
        elif scope["method"] != "POST":
            await self.app(scope, receive, send)
        else:
            await self._post(scope, receive, self._with_retry_after(send))

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        if refusal := self.unready() or self._full():
            await _refuse(scope, send, refusal)
            return
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        self.admission.enter(time.monotonic())
        try:
            await self.app(scope, receive, noting)
        except asyncio.CancelledError:
            # Only the server's end does this, to what its drain has cut: a body on its way, a reader that takes nothing.
            if not started:
                error = RequestError("the server is shutting down", code="shutting_down", status=_UNAVAILABLE)
                await _refuse(scope, send, error)
        finally:
            self.admission.leave(time.monotonic())

    def _full(self) -> RequestError | None:
        limit = self.admission.limit
        if max(self.admission.open, self.engine_open()) < limit:
            return None
        message = f"{limit} requests are open, which is all that this server takes at once; try again later"
        return RequestError(message, code="overloaded", status=_TOO_MANY)

    def _key_shown(self, headers: Headers) -> bool:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # Digests, and every key looked at: the time taken tells nothing about the keys, not even their lengths.
        found = [hmac.compare_digest(_digest(key.strip()), known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(found)

    def _with_retry_after(self, send: Send) -> Send:
        """Wrap `send` so that every 429 and 503 says when to come back, whoever made it."""

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] in (_TOO_MANY, _UNAVAILABLE):
                seconds = _UNREADY_RETRY_S
                if message["status"] == _TOO_MANY:
                    self.counters.http_overloaded += 1
                    seconds = self.admission.retry_after_s(time.monotonic())
                message = {**message, "headers": [*message["headers"], (b"retry-after", str(seconds).encode())]}
            await send(message)

        return sending


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


async def _refuse(scope: Scope, send: Send, error: RequestError, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    body = error_for(scope["path"], error)
    # The connection stays open: closing it on a body that is still coming would lose the answer on its way.
    found = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *headers]
    await send({"type": "http.response.start", "status": error.status, "headers": found})
    await send({"type": "http.response.body", "body": body, "more_body": False})
