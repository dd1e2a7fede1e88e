"""A server whose front process is the real one and whose engine process only keeps a pace: it shows what the front costs.

`python -m tests.perf.paced MODEL STREAMS PACE_HZ` serves; `... --engine ADDRESS STREAMS PACE_HZ` is the engine process that it
starts.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import zmq

import engine
from engine.client import Add, AskCounters, Cancel, EngineProcess, Events, Hello, Order, Shutdown
from engine.config import EngineSettings, ServerSettings, child_environment
from engine.model.config import OmniConfig
from engine.request import Event, Usage
from engine.server import life
from engine.server.cli import _listen

MODEL_NAME = "paced"
LIMITS = {"kv_pages": 2048, "page_size": 16}
_USAGE = Usage(
    prompt_tokens=1, completion_tokens=1, audio_tokens_in=0, audio_seconds_in=0.0, audio_frames=0, audio_samples=0
)


class PacedEngine:
    """Once `streams` requests are open, sends one token of each, in one message, `pace_hz` times a second."""

    def __init__(self, address: str, streams: int, pace_hz: float) -> None:
        self.link: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self.link.connect(address)
        self.streams = streams
        self.period_s = 1 / pace_hz
        self.left: dict[str, int] = {}

    def run(self) -> None:
        """Play until the front says Shutdown or is gone."""
        self.link.send(msgspec.msgpack.encode(Hello(str(engine.__file__), {"limits": LIMITS}, "0", 0.0)))
        parent, due = os.getppid(), time.perf_counter()
        while os.getppid() == parent:
            if not self._hear(due):
                return
            due = max(due, time.perf_counter() - 1.0) + self.period_s
            if len(self.left) >= self.streams:
                self.streams = 1  # all have come: from now on nothing waits for more
                self.link.send(msgspec.msgpack.encode(Events([self._token(name) for name in list(self.left)])))

    def _hear(self, due: float) -> bool:
        """Follow the orders that come before `due`; False after a Shutdown."""
        while self.link.poll(int(1000 * max(due - time.perf_counter(), 0.0))):
            order = msgspec.msgpack.decode(self.link.recv(), type=Order)
            if isinstance(order, Shutdown):
                return False
            if isinstance(order, Add):
                self.left[order.request.id] = order.request.max_tokens
            elif isinstance(order, Cancel):
                self.left.pop(order.request_id, None)
            else:
                assert isinstance(order, AskCounters)  # an engine that is too busy answers no question
        time.sleep(max(due - time.perf_counter(), 0.0))
        return True

    def _token(self, name: str) -> Event:
        self.left[name] -= 1
        if self.left[name]:
            return Event(request_id=name, token_ids=[65 + self.left[name] % 26])
        del self.left[name]
        return Event(request_id=name, token_ids=[65], finish_reason="length", usage=_USAGE, done=True)


def serve(model: Path, *pace: str) -> int:
    """Run the real front process on `model` with a PacedEngine beside it; prints the port once it is ready."""

    def start(_: Path, __: EngineSettings, root: Path) -> EngineProcess:
        folder = Path(tempfile.mkdtemp(prefix="walkgate-"))
        address = f"ipc://{folder}/engine"
        words = [sys.executable, "-m", "tests.perf.paced", "--engine", address, *pace]
        return EngineProcess(subprocess.Popen(words, env=child_environment(root), cwd=root), folder, address)

    life.start_engine = start
    listener = _listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    serving = life.serve(
        model,
        OmniConfig.load(model),
        ServerSettings(served_model_name=MODEL_NAME),
        listener,
        lambda _: print(f"port {port}", flush=True),
    )
    return asyncio.run(serving)


if __name__ == "__main__":
    if sys.argv[1] == "--engine":
        PacedEngine(sys.argv[2], int(sys.argv[3]), float(sys.argv[4])).run()
        zmq.Context.instance().destroy()
    else:
        sys.exit(serve(Path(sys.argv[1]), *sys.argv[2:]))
