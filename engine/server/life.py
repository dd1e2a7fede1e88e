"""The life of a server: how its processes start together, what signals do, and how all of it ends. Not here: flags (cli.py)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from engine.client import EngineClient, start_engine
from engine.config import ServerSettings
from engine.errors import WalkgateError
from engine.model.config import OmniConfig
from engine.server.front import DEAD, DRAINING, OK, STOPPING, Front
from engine.server.guard import Guard
from engine.server.source import source_root

EXIT_OK, EXIT_ENGINE_DIED = 0, 70
_DEAD_SHOWN_S = 0.7  # how long /health still answers after the engine died, so that watchers see why
_DRAIN_LOOK_S = 0.05
_STOP_S = 2.0  # how long an engine may take to end the step that it is in
_LAST_NEWS_S = 0.2  # how long the last message of a process may take to arrive after its end was seen


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handling, which would end the process by the signal instead of with a code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield


def _http_server(front: Front) -> _Server:
    from engine.server.app import create_app  # slow to import: the engine process is loading by now

    settings = front.settings
    app = Guard(
        create_app(front),
        front.admission,
        front.counters,
        unready=front.unready,
        engine_open=lambda: front.client.open_requests,
        keys=settings.api_keys,
    )
    return _Server(
        uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",  # one parser, whatever else is installed
            lifespan="off",
            ws="none",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=75,  # longer than load clients keep an idle connection
            timeout_graceful_shutdown=1,
        )
    )


async def serve(
    model: Path, config: OmniConfig, settings: ServerSettings, listener: socket.socket, ready: Callable[[Front], None]
) -> int:
    """Serve until a signal or the engine's end; returns the exit code. `ready` is called once, when the server is.

    SIGTERM lets the open requests go on to their end for a while; SIGINT, or a second SIGTERM, ends them at once.
    Raises WalkgateError when the server can't come up. No process outlives this call.
    """
    signals = _Signals()
    signals.listen()  # before there is a child that a signal could orphan
    engine = start_engine(model, settings.engine, source_root())
    client = EngineClient(engine.address, settings.max_open)
    front = Front(model, config, settings, engine, client)
    server = _http_server(front)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    watching = asyncio.create_task(front.watch.run())
    try:
        return await _live(front, serving, signals, ready)
    finally:
        watching.cancel()
        client.shut_down()
        server.should_exit = True
        # An engine that still loads its model hears nothing, and there is nothing that it could spoil.
        stopped = engine.stop(_STOP_S if front.hello is not None else 0.0)
        # How the HTTP side ended is `_live`'s to say; here it must not keep the rest from being closed.
        await asyncio.gather(serving, stopped, return_exceptions=True)
        client.close()
        front.pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class _Signals:
    """What signals asked for: `stop` is set by the first one, `at_once` by SIGINT or a second one."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    at_once: asyncio.Event = field(default_factory=asyncio.Event)

    def listen(self) -> None:
        """Take the signals of this process from now on."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)

    def _terminate(self) -> None:
        if self.stop.is_set():
            self.at_once.set()
        self.stop.set()

    def _interrupt(self) -> None:
        self.at_once.set()
        self.stop.set()


async def _live(front: Front, serving: asyncio.Task[None], signals: _Signals, ready: Callable[[Front], None]) -> int:
    stopped = asyncio.create_task(signals.stop.wait())
    died = asyncio.create_task(front.engine.exit_code())
    booted = asyncio.create_task(front.boot())
    await asyncio.wait({stopped, died, booted, serving}, return_when=asyncio.FIRST_COMPLETED)
    if died.done() and not booted.done():
        # What the engine said before it ended may still be on its way, and says more than an exit code.
        await asyncio.wait({booted}, timeout=_LAST_NEWS_S)
    if booted.done():
        booted.result()
        if not serving.done():
            ready(front)
            await asyncio.wait({stopped, died, serving}, return_when=asyncio.FIRST_COMPLETED)
    booted.cancel()
    if serving.done() and not stopped.done():
        raise WalkgateError(f"the HTTP server ended: {serving.exception() or 'it stopped by itself'}")
    if stopped.done() and front.stage == OK:
        await _drain(front, died, signals.at_once)
    # A server that was told to stop while it loads has nothing to lose with its engine.
    code = EXIT_OK
    if died.done() and (front.stage == DRAINING or not stopped.done()):
        await _mourn(front, died.result(), stopped)
        code = EXIT_ENGINE_DIED
    front.stage = STOPPING
    return code


async def _drain(front: Front, died: asyncio.Task[int], at_once: asyncio.Event) -> None:
    """Let the open requests end, for as long as was set and nothing ends them earlier; say how many are cut."""
    front.stage = DRAINING
    front.client.end_window()  # the steps that it waits for may never come
    if front.admission.open and not at_once.is_set():
        _say(f"draining: {_requests(front.admission.open)}, up to {front.settings.drain_seconds:g} s")
    enough = asyncio.create_task(at_once.wait())
    end = time.monotonic() + front.settings.drain_seconds
    while front.admission.open and not enough.done() and not died.done() and time.monotonic() < end:
        await asyncio.wait({enough, died}, timeout=_DRAIN_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
    enough.cancel()
    if left := front.admission.open:
        _say(f"cut: {_requests(left)}")


def _requests(count: int) -> str:
    return f"{count} open request{'s' * (count != 1)}"


def _say(message: str) -> None:
    print(f"omni: {message}", file=sys.stderr, flush=True)


async def _mourn(front: Front, code: int, stopped: asyncio.Task[bool]) -> None:
    """End every stream with an error and say so on /health for a moment; a signal to the whole group ends that early."""
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    front.stage = DEAD
    front.client.fail(f"the engine process ended {how}")
    _say(f"the engine process ended {how}; see its messages above")
    await asyncio.wait({stopped}, timeout=_DEAD_SHOWN_S)
