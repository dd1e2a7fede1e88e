"""What the front process costs: its CPU for 64 paced streams, and what HTTP adds to the time to the first token.

`python -m tests.perf.front` prints one JSON object. For the CPU the engine process is one that keeps a pace (paced.py), so that
an engine's own work takes no part; for the first token all is real.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from engine.config import EngineSettings, child_environment, switches_off
from engine.engine import Engine
from engine.model.config import OmniConfig
from engine.model.omni import load_model
from engine.model.processor import Inputs, Processor
from engine.model.tiny import write_tiny
from engine.request import Request
from tests.perf.paced import MODEL_NAME
from tests.server.serving import serving
from tests.shared import REPOSITORY

STREAMS, PACE_HZ = 64, 60
GENERATE, CHAT = "/generate", "/v1/chat/completions"
_PROMPT = "Say hello to everybody who is here."
_LAST_CHUNK = b"0\r\n\r\n"
_SETTLE_S = 1.0
_WARM_ROUNDS = 5


class Cost(NamedTuple):
    """The share of one core that a process took, and how many chunks a second each stream got meanwhile."""

    user: float
    system: float
    pace_hz: float

    @property
    def cores(self) -> float:
        """User and system time together."""
        return self.user + self.system


def _post(path: str, max_tokens: int) -> bytes:
    """A whole HTTP request for a stream."""
    chat = {"model": MODEL_NAME, "messages": [{"role": "user", "content": _PROMPT}]}
    prompt = {"text": _PROMPT} if path == GENERATE else chat
    data = json.dumps({**prompt, "stream": True, "ignore_eos": True, "max_tokens": max_tokens}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


class _Reader(asyncio.Protocol):
    """Sends one request and counts the chunks that come back: the cheapest client that there is."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.chunks = 0
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.body)

    def data_received(self, data: bytes) -> None:
        if not self.chunks and not data.startswith(b"HTTP/1.1 200 "):
            self.ended.set_exception(RuntimeError(data.decode(errors="replace")))
        self.chunks += data.count(b"\r\n") // 2  # a chunk has one before its data and one after
        if data.endswith(_LAST_CHUNK):
            self.ended.set_result(None)
            self.transport.close()


async def _read_streams(port: int, process: psutil.Process, body: bytes, seconds: float) -> Cost:
    """Open the streams, and measure the CPU of `process` for `seconds` in the middle of them."""
    loop = asyncio.get_running_loop()
    readers = [(await loop.create_connection(lambda: _Reader(body), "127.0.0.1", port))[1] for _ in range(STREAMS)]
    while not all(reader.chunks for reader in readers):
        await asyncio.sleep(0.05)
        await asyncio.gather(*(reader.ended for reader in readers if reader.ended.done()))  # raises a refusal
    await asyncio.sleep(_SETTLE_S)
    before, began, chunks = process.cpu_times(), time.perf_counter(), sum(reader.chunks for reader in readers)
    await asyncio.sleep(seconds)
    after, took = process.cpu_times(), time.perf_counter() - began
    pace_hz = (sum(reader.chunks for reader in readers) - chunks) / took / STREAMS
    assert not any(reader.ended.done() for reader in readers), "the streams ended before the measurement did"
    await asyncio.gather(*(reader.ended for reader in readers))
    user, system = (after.user - before.user) / took, (after.system - before.system) / took
    return Cost(user, system, pace_hz)


@contextmanager
def _paced_server(model: Path) -> Iterator[tuple[int, int]]:
    """The port and the front's process id of a server that keeps the pace."""
    words = [sys.executable, "-m", "tests.perf.paced", str(model), str(STREAMS), str(PACE_HZ)]
    environment = child_environment(REPOSITORY)
    process = subprocess.Popen(words, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline().removeprefix("port ")), process.pid
    finally:
        process.terminate()
        process.wait(10)


def front_cpu(model: Path, path: str, seconds: float) -> Cost:
    """What the front process takes for 64 streams of 60 tokens a second each."""
    steps = round((seconds + 2 * _SETTLE_S) * PACE_HZ)
    with _paced_server(model) as (port, pid):
        return asyncio.run(_read_streams(port, psutil.Process(pid), _post(path, steps), seconds))


def first_token(model: Path, rounds: int) -> dict[str, float]:
    """Median milliseconds to the first token, of the engine alone and through HTTP, measured in turn."""
    alone: list[float] = []
    through: list[float] = []
    engine, request = _engine_and_request(model)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(serving(model, Path(folder) / "log"))
        link = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        for _ in range(_WARM_ROUNDS + rounds):
            alone.append(_alone_ms(engine, request))
            through.append(_through_ms(link))
    del alone[:_WARM_ROUNDS], through[:_WARM_ROUNDS]
    added = [one - other for one, other in zip(through, alone, strict=True)]
    medians = {"engine_ms": alone, "http_ms": through, "added_ms": added}
    return {name: statistics.median(values) for name, values in medians.items()}


def _engine_and_request(model: Path) -> tuple[Engine, Request]:
    config, settings = OmniConfig.load(model), EngineSettings(disabled=switches_off("cpu", "", ""))
    torch.set_num_threads(settings.threads)
    processor = Processor.load(model, config, config.thinker.max_positions)
    draft = Request(id="a", prompt_ids=[], max_tokens=2, ignore_eos=True)
    return Engine(load_model(model), settings), processor.complete(draft, Inputs(text=_PROMPT))


def _alone_ms(engine: Engine, request: Request) -> float:
    began = time.perf_counter()
    engine.add(request)
    while not engine.step():
        pass
    took = time.perf_counter() - began
    while engine.has_work:
        engine.step()
    return 1000 * took


def _through_ms(link: socket.socket) -> float:
    body = _post(GENERATE, max_tokens=2)
    began = time.perf_counter()
    link.sendall(body)
    received = b""
    while b'"token_ids"' not in received:
        received += link.recv(1 << 16)
    took = time.perf_counter() - began
    while not received.endswith(_LAST_CHUNK):
        received += link.recv(1 << 16)
    return 1000 * took


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint folder; without one the small checkpoint is made")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the CPU is measured")
    parser.add_argument("--rounds", type=int, default=100, help="how many first tokens of each kind")
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = wish.model or Path(folder) / "tiny"
        if wish.model is None:
            write_tiny(model)
        costs = {path: front_cpu(model, path, wish.seconds) for path in (GENERATE, CHAT)}
        found = {
            "streams": STREAMS,
            "front": {path: _rounded({"cores": cost.cores, **cost._asdict()}) for path, cost in costs.items()},
            "first_token": _rounded(first_token(model, wish.rounds)),
            "load_average": os.getloadavg()[0],
        }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
