"""The front process's side of the engine process: what they say to each other, its start, its streams, its end. No torch.

One socket joins the two, in a private folder. The engine sends one message a step, never one a token.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq

from engine.config import EngineSettings, child_environment
from engine.errors import EngineDeadError, RequestError, WalkgateError
from engine.metrics import RequestHistograms, RequestTimes
from engine.profiling import Outcome, Window
from engine.request import Event, Request

_LONGEST_ADDRESS = 100  # a socket's path holds 107 bytes on Linux, fewer elsewhere
_POLL_S = 0.05


class Add(msgspec.Struct, frozen=True, tag=True):
    """To the engine: serve this request."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """To the engine: drop this request."""

    request_id: str


class AskCounters(msgspec.Struct, frozen=True, tag=True):
    """To the engine: send the counters, under this number."""

    number: int


class OpenWindow(msgspec.Struct, frozen=True, tag=True):
    """To the engine: profile this window, and say under this number how it ended."""

    number: int
    window: Window


class EndWindow(msgspec.Struct, frozen=True, tag=True):
    """To the engine: end the window that is open, if one is, with what it has seen."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """To the engine: stop at once."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """From the engine, once it can serve: the package file that it imported, what it is, and how long its boot took."""

    engine_file: str
    info: dict[str, object]
    weights_digest: str
    boot_seconds: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From the engine, instead of Hello: why it can't serve."""

    message: str


class Events(msgspec.Struct, frozen=True, tag=True):
    """From the engine: what one step made."""

    events: list[Event]


class Beat(msgspec.Struct, frozen=True, tag=True):
    """From the engine, now and then while its steps make no events (a long prompt): it gets on."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a request that it did not take, with the fields of the RequestError."""

    request_id: str
    message: str
    field: str | None
    code: str
    status: int


class Counters(msgspec.Struct, frozen=True, tag=True):
    """From the engine: the counters that were asked for under this number."""

    number: int
    values: dict[str, float]


class WindowEnded(msgspec.Struct, frozen=True, tag=True):
    """From the engine: how the window of this number ended."""

    number: int
    outcome: Outcome


class WindowRefused(msgspec.Struct, frozen=True, tag=True):
    """From the engine: why there is nothing to be had of the window of this number, with the fields of the RequestError."""

    number: int
    message: str
    field: str | None
    code: str
    status: int


Order = Add | Cancel | AskCounters | OpenWindow | EndWindow | Shutdown
News = Hello | Failed | Events | Beat | Refused | Counters | WindowEnded | WindowRefused


class BootError(WalkgateError):
    """The engine process can't serve: a checkpoint or a setting that does not fit, or the wrong source tree."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """The running engine process and the folder of its socket. Made by `start_engine`, ended by `stop`."""

    process: subprocess.Popen[bytes]
    folder: Path
    address: str

    async def exit_code(self) -> int:
        """Wait for the process to end, however it does, and return its exit code (negative for a signal)."""
        while (code := self.process.poll()) is None:
            await asyncio.sleep(_POLL_S)
        return code

    async def stop(self, patience_s: float) -> None:
        """Give the process time to follow a Shutdown, then kill it; remove the socket's folder."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.exit_code(), patience_s)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.remove_folder()

    def remove_folder(self) -> None:
        """Remove the socket's folder, which is needed only until both ends have met: so a killed server leaves none."""
        shutil.rmtree(self.folder, ignore_errors=True)


def start_engine(model: Path, settings: EngineSettings, source_root: Path) -> EngineProcess:
    """Start the engine process on `model` (absolute), importing the tree at `source_root`. Call from the main thread.

    The child dies with the thread that started it, so that no engine ever outlives its front.
    """
    folder = Path(tempfile.mkdtemp(prefix="walkgate-"))
    if len(str(folder)) > _LONGEST_ADDRESS:
        folder.rmdir()
        folder = Path(tempfile.mkdtemp(prefix="walkgate-", dir="/tmp"))
    address = f"ipc://{folder}/engine"
    words = [address, str(os.getpid()), str(model), msgspec.json.encode(settings).decode()]
    # -P keeps the working folder off the child's path: a folder called engine/ there must not be imported.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.server.worker", *words],
        env=child_environment(source_root),
        stdin=subprocess.DEVNULL,
    )
    return EngineProcess(process, folder, address)


class _Mailbox:
    """What came for one stream and was not read yet. One task reads it; what it holds is bounded by what was asked for."""

    __slots__ = ("_items", "_waiter", "times")

    def __init__(self, times: RequestTimes) -> None:
        self.times = times
        self._items: deque[Event | WalkgateError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Event | WalkgateError) -> None:
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> Event:
        """Return the next event, or raise the error that came in its place."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        if isinstance(item, WalkgateError):
            raise item
        return item


@dataclass(slots=True)
class EngineClient:
    """Sends requests to the engine process and hands each one's events to whoever asked. Lives in one event loop.

    At most `max_open` requests may be open at once. `histograms` has how they got on, however slowly their events are read.
    """

    address: str
    max_open: int = sys.maxsize
    histograms: RequestHistograms = field(default_factory=RequestHistograms, init=False)
    _loop: asyncio.AbstractEventLoop = field(init=False)
    _context: zmq.Context[zmq.Socket[bytes]] = field(init=False)
    _socket: zmq.Socket[bytes] = field(init=False)
    _hello: asyncio.Future[Hello] = field(init=False)
    _decoder: msgspec.msgpack.Decoder[News] = field(default_factory=lambda: msgspec.msgpack.Decoder(News), init=False)
    _streams: dict[str, _Mailbox] = field(default_factory=dict, init=False)
    _asked: dict[int, asyncio.Future[dict[str, float]]] = field(default_factory=dict, init=False)
    _windows: dict[int, asyncio.Future[Outcome]] = field(default_factory=dict, init=False)
    _number: int = field(default=0, init=False)
    _ended: WalkgateError | None = field(default=None, init=False)
    _progress_at: float = field(default=0.0, init=False)
    _work_since: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._hello = self._loop.create_future()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        # No limit on either side: neither process may ever wait for the other. Requests bound what can pile up.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.bind(self.address)
        # zmq.asyncio would spend a future and several turns of the loop on every message.
        self._loop.add_reader(int(self._socket.get(zmq.FD)), self._read)

    @property
    def open_requests(self) -> int:
        """How many requests wait for events."""
        return len(self._streams)

    @property
    def progress_at(self) -> float:
        """When the engine was last heard to have finished a step, by time.monotonic()."""
        return self._progress_at

    @property
    def silent_seconds(self) -> float:
        """For how long the engine has held work without finishing a step; 0 when it holds none."""
        return time.monotonic() - max(self._progress_at, self._work_since) if self._streams else 0.0

    async def hello(self) -> Hello:
        """Wait until the engine can serve; BootError if it says that it can't, EngineDeadError if it dies before."""
        return await asyncio.shield(self._hello)

    async def generate(self, request: Request) -> AsyncGenerator[Event, None]:
        """Yield a request's events, the last one `done`. Closing the iterator early cancels the request.

        Raises RequestError if the engine refuses it, too many are open or the server shuts down, EngineDeadError if the engine
        process ends.
        """
        if self._ended is not None:
            raise self._ended
        if len(self._streams) >= self.max_open:
            raise RequestError(
                f"{self.max_open} requests are open, which is all that this server takes at once; try again later",
                code="overloaded",
                status=429,
            )
        mailbox = self._open(request)
        try:
            while True:
                event = await mailbox.get()
                yield event
                if event.done:
                    return
        finally:
            if self._streams.pop(request.id, None) is not None:
                self.cancel(request.id)

    def _open(self, request: Request) -> _Mailbox:
        now = time.monotonic()
        if not self._streams:
            self._work_since = now
        mailbox = self._streams[request.id] = _Mailbox(RequestTimes(self.histograms, now))
        self._post(Add(request))
        return mailbox

    def cancel(self, request_id: str) -> None:
        """Tell the engine to drop a request; its stream, if one is open, gets no more events."""
        self._streams.pop(request_id, None)
        self._post(Cancel(request_id))

    async def counters(self, timeout_s: float) -> dict[str, float] | None:
        """Ask for the engine's counters; None when it is too busy to answer within `timeout_s`, or dead."""
        if self._ended is not None:
            return None
        self._number += 1
        number, answer = self._number, self._loop.create_future()
        self._asked[number] = answer
        self._post(AskCounters(number))
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except (TimeoutError, WalkgateError):
            return None
        finally:
            self._asked.pop(number, None)

    async def profile(self, window: Window) -> Outcome:
        """Let the engine profile a window and wait for its end, which comes whether or not anybody still waits.

        Raises RequestError if the engine refuses it or the server shuts down, EngineDeadError if the engine process ends.
        """
        if self._ended is not None:
            raise self._ended
        self._number += 1
        number = self._number
        answer: asyncio.Future[Outcome] = self._loop.create_future()
        self._windows[number] = answer
        self._post(OpenWindow(number, window))
        try:
            return await answer
        finally:
            self._windows.pop(number, None)

    def end_window(self) -> None:
        """Let the window that is open, if one is, end with what it has seen."""
        self._post(EndWindow())

    def fail(self, message: str) -> None:
        """End every open stream with an EngineDeadError: the engine process is gone."""
        self._end(EngineDeadError(message))

    def shut_down(self) -> None:
        """Ask the engine process to end, and end the open streams with a RequestError (503)."""
        self._post(Shutdown())
        self._end(RequestError("the server is shutting down", code="shutting_down", status=503))

    def _end(self, error: WalkgateError) -> None:
        self._ended = error
        if not self._hello.done():
            self._hello.set_exception(error)
            self._hello.exception()  # marks it as seen: nobody may be waiting for it
        for mailbox in self._streams.values():
            mailbox.put(error)
        waiting: list[asyncio.Future[dict[str, float]] | asyncio.Future[Outcome]] = [*self._asked.values()]
        for answer in [*waiting, *self._windows.values()]:
            if not answer.done():
                answer.set_exception(error)

    def close(self) -> None:
        """Close the socket. The client is of no use afterwards."""
        self._loop.remove_reader(int(self._socket.get(zmq.FD)))
        self._context.destroy(linger=0)

    def _post(self, order: Order) -> None:
        if self._ended is not None:
            return
        # Without a limit on the queue the socket takes every message at once, as long as the engine is there. Where it is not
        # (yet, or any more), sending would wait for it; its end is noticed elsewhere, and ends every stream.
        with suppress(zmq.Again):
            self._socket.send(msgspec.msgpack.encode(order), zmq.NOBLOCK)
        # Sending may use up the one signal that the descriptor gives for news.
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Take everything that has come: the descriptor signals once, not once a message."""
        while not self._socket.closed:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(self._decoder.decode(data))

    def _take(self, news: News) -> None:
        if isinstance(news, Events):
            self._deal_out(news.events)
        elif isinstance(news, Beat):
            self._progress_at = time.monotonic()
        elif isinstance(news, Refused):
            refusal = RequestError(news.message, field=news.field, code=news.code, status=news.status)
            if mailbox := self._streams.pop(news.request_id, None):
                mailbox.put(refusal)
        elif isinstance(news, Counters):
            answer = self._asked.get(news.number)
            if answer is not None and not answer.done():
                answer.set_result(news.values)
        elif isinstance(news, WindowEnded | WindowRefused):
            self._end_window(news)
        elif not self._hello.done():
            if isinstance(news, Hello):
                self._hello.set_result(news)
            else:
                self._hello.set_exception(BootError(news.message))

    def _end_window(self, news: WindowEnded | WindowRefused) -> None:
        answer = self._windows.get(news.number)
        if answer is None or answer.done():
            return
        if isinstance(news, WindowEnded):
            answer.set_result(news.outcome)
        else:
            answer.set_exception(RequestError(news.message, field=news.field, code=news.code, status=news.status))

    def _deal_out(self, events: list[Event]) -> None:
        """Put each event into its stream; the last one closes it, so that its end is not taken for a cancellation."""
        now = self._progress_at = time.monotonic()
        for event in events:
            mailbox = self._streams.pop(event.request_id, None) if event.done else self._streams.get(event.request_id)
            if mailbox is not None:
                mailbox.times.take(event, now)
                mailbox.put(event)
