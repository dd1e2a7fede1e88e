"""The engine process: takes requests from the front, steps the engine, sends what each step made. Started by engine/client.py.

Heavy imports come only after the process has tied its life to its parent's.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import logging
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

import engine
from engine import precompile
from engine.client import (
    Add,
    AskCounters,
    Beat,
    Cancel,
    Counters,
    EndWindow,
    Events,
    Failed,
    Hello,
    News,
    OpenWindow,
    Order,
    Refused,
    WindowEnded,
    WindowRefused,
)
from engine.config import EngineSettings, SettingError
from engine.errors import RequestError, WalkgateError
from engine.parent import die_with_parent
from engine.request import Event

if TYPE_CHECKING:
    from engine.engine import Engine

EXIT_OK, EXIT_CANNOT_SERVE, EXIT_FAULT = 0, 1, 70
_IDLE_MS = 500
_WINDOW_IDLE_MS = 50  # how late the end of a window for which no steps come may be noticed
_BEAT_S = 0.5
_PROGRESS_S = 5.0

log = logging.getLogger("walkgate.engine")


@dataclass(slots=True)
class Worker:
    """The loop of the engine process. `parent` is the front's process id: when it is no longer ours, the front is gone."""

    socket: zmq.Socket[bytes]
    engine: Engine
    parent: int
    _window: int | None = field(default=None, init=False)
    _windows: int = field(default=0, init=False)
    _told_at: float = field(default=0.0, init=False)
    _told_steps: int = field(default=0, init=False)

    def run(self) -> None:
        """Serve until the front says Shutdown or is gone. What `step` raises ends the process: it is no one request's fault."""
        decoder = msgspec.msgpack.Decoder(Order)
        while os.getppid() == self.parent:
            # Work never waits for messages; without work the process sleeps until one comes.
            if self.socket.poll(self._idle_ms) and not self._take_all(decoder):
                return
            if self.engine.has_work:
                events = self.engine.step()
                with self.engine.phases("emit"):
                    self._tell(events)
            if self._window is not None:
                self._end_window(self._window)

    @property
    def _idle_ms(self) -> int:
        if self.engine.has_work:
            return 0
        return _IDLE_MS if self._window is None else _WINDOW_IDLE_MS

    def _take_all(self, decoder: msgspec.msgpack.Decoder[Order]) -> bool:
        """Follow every order that has arrived; False after a Shutdown."""
        while True:
            try:
                order = decoder.decode(self.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return True
            if isinstance(order, Add):
                self._add(order)
            elif isinstance(order, Cancel):
                self.engine.cancel(order.request_id)
            elif isinstance(order, AskCounters):
                self._send(Counters(order.number, self.engine.counters() | {"profile_windows_total": self._windows}))
            elif isinstance(order, OpenWindow):
                self._open_window(order)
            elif isinstance(order, EndWindow):
                self.engine.profiler.end()
            else:
                return False

    def _add(self, order: Add) -> None:
        request_id = order.request.id
        try:
            self.engine.add(order.request)
        except RequestError as error:
            self._send(Refused(request_id, error.message, error.field, error.code, error.status))
        except Exception as error:  # one request's fault must not end the others
            log.exception("request %s could not be added", request_id)
            self.engine.cancel(request_id)
            self._send(Refused(request_id, f"{type(error).__name__}: {error}", None, "engine", 500))

    def _open_window(self, order: OpenWindow) -> None:
        try:
            self.engine.profiler.open(order.window)
        except RequestError as error:
            self._send(WindowRefused(order.number, error.message, error.field, error.code, error.status))
            return
        self._window = order.number
        self._windows += 1

    def _end_window(self, number: int) -> None:
        """Say how the open window ended, once it has."""
        try:
            outcome = self.engine.profiler.close_if_over()
        except RequestError as error:
            log.exception("the window could not be profiled")
            self._send(WindowRefused(number, error.message, error.field, error.code, error.status))
        else:
            if outcome is None:
                return
            self._send(WindowEnded(number, outcome))
        self._window = None

    def _tell(self, events: list[Event]) -> None:
        """Send what a turn made, or a Beat when none was told of for a while: only if steps ran, so a wedge is silence."""
        if not events and time.monotonic() - self._told_at < _BEAT_S:
            return
        steps = sum(lane.counters["steps"] for lane in self.engine.loop.lanes)
        if events:
            self._send(Events(events))
        elif steps > self._told_steps:
            self._send(Beat())
        self._told_at, self._told_steps = time.monotonic(), steps

    def _send(self, news: News) -> None:
        self.socket.send(msgspec.msgpack.encode(news))


def _tie_to_parent(parent: int) -> None:
    """End with the front (process id `parent`), and leave signals to it."""
    die_with_parent(parent)
    # A terminal sends these to both processes; the front decides and says Shutdown.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


class _Progress:
    """Tells the log how far a load is, every few seconds."""

    def __init__(self) -> None:
        self._told_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told_at >= _PROGRESS_S:
            self._told_at = now
            log.info("loaded %.1f of %.1f GB (%d %%)", done / 1e9, total / 1e9, 100 * done // total)


def _check_device(device: str) -> None:
    """Raise SettingError when this machine, or what is installed, can't run on `device`."""
    import torch

    if device == "cpu":
        return
    if not torch.cuda.is_available():
        raise SettingError(f"--device {device}: torch {torch.__version__} finds no CUDA GPU here; use --device cpu")
    if importlib.util.find_spec("triton") is None:
        raise SettingError(f"--device {device} needs Triton: pip install 'walkgate[cuda]'")


def _build(model_folder: Path, settings: EngineSettings) -> tuple[Engine, str]:
    _check_device(settings.device)
    if settings.device == "cuda":
        precompile.prepare(model_folder, settings)
    import torch

    from engine.detokenize import TokenBytes
    from engine.engine import Engine, kernel_options, kv_pages
    from engine.model.chat import load_tokenizer
    from engine.model.omni import load_model

    torch.set_num_threads(settings.threads)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    token_bytes = TokenBytes(load_tokenizer(model_folder))
    model = load_model(
        model_folder,
        device=settings.device,
        dtype=dtype,
        chunk_frames=settings.chunk_frames,
        dummy=settings.load_format == "dummy",
        options=kernel_options(settings),
        progress=_Progress(),
    )
    try:
        return Engine(model, settings, token_bytes.of), model.weights_digest
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        count = kv_pages(model.config, settings)
        raise SettingError(f"there is no memory for {count} KV pages; ask for fewer with --kv-pages") from None


def _out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, which torch says on a CPU by the words of a RuntimeError only."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in ("alloc", "Storage size"))


def _connect(address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    socket.set(zmq.LINGER, 1000)  # the last message may be the reason why this process ends
    socket.connect(address)
    return socket


def main(address: str, parent: str, model_folder: str, settings_json: str) -> int:
    """Serve `model_folder` to the front (process id `parent`) at `address`.

    Returns the exit code: 1 if the model can't be served as asked, 70 after a fault.
    """
    began = time.perf_counter()
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)
    _tie_to_parent(int(parent))
    socket = _connect(address)
    try:
        settings = msgspec.json.decode(settings_json, type=EngineSettings)
        built, digest = _build(Path(model_folder), settings)
    except WalkgateError as error:
        socket.send(msgspec.msgpack.encode(Failed(str(error))))
        return EXIT_CANNOT_SERVE
    except Exception as error:
        log.exception("the engine could not be built")
        socket.send(msgspec.msgpack.encode(Failed(f"{type(error).__name__}: {error}")))
        return EXIT_FAULT
    # What is loaded stays: later collections need not walk over it.
    gc.collect()
    gc.freeze()
    hello = Hello(str(engine.__file__), built.info(), digest, time.perf_counter() - began)
    socket.send(msgspec.msgpack.encode(hello))
    try:
        Worker(socket, built, int(parent)).run()
    except Exception:
        log.exception("the engine failed; every open request ends with an error")
        return EXIT_FAULT
    return EXIT_OK


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    zmq.Context.instance().destroy()
    sys.exit(code)
