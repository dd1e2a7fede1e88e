"""Starting a real server for tests, and speaking HTTP to it with the standard library."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import soundfile

from tests.shared import REPOSITORY

BOOT_S = 90.0


@dataclass
class Server:
    process: subprocess.Popen
    port: int
    log: Path

    def request(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body or None, headers or {})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, dict]:
        status, data = self.request("GET", path)
        return status, json.loads(data)

    def post(self, body: object) -> tuple[int, dict]:
        status, data = self.request(
            "POST", "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return status, json.loads(data)

    def answer(self, **body: object) -> dict:
        status, answer = self.post(body)
        assert status == 200, answer
        return answer

    def lines(self, **body: object) -> list[dict]:
        data = json.dumps(body | {"stream": True}).encode()
        status, answer = self.request("POST", "/generate", data, {"Content-Type": "application/json"})
        assert status == 200, answer
        return [json.loads(line) for line in answer.splitlines()]

    def open_stream(self, path: str = "/generate", **body: object) -> http.client.HTTPResponse:
        """A stream of which nothing has been read; close its socket to go away."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = json.dumps(body | {"stream": True}).encode()
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        return connection.getresponse()

    def metrics(self) -> dict[str, float]:
        _, data = self.request("GET", "/metrics")
        rows = [line.rpartition(" ") for line in data.decode().splitlines() if not line.startswith("#")]
        return {name.removeprefix("walkgate_"): float(value) for name, _, value in rows}

    def engine_pid(self) -> int:
        (child,) = [
            one for one in psutil.Process(self.process.pid).children() if "engine.server.worker" in one.cmdline()
        ]
        return child.pid

    def text(self) -> str:
        return self.log.read_text(errors="replace")


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "engine.server.cli", *words]


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **extra}


def heed_interrupts() -> None:
    """Undo what a shell does to commands in its background, whose children would ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def started(log: Path, *words: str) -> Iterator[Server]:
    """A server that has printed nothing yet; its processes are gone afterwards."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command("serve", *words),
            stdout=out,
            stderr=out,
            cwd=REPOSITORY,
            env=environment(),
            preexec_fn=heed_interrupts,
        )
    try:
        yield Server(process, 0, log)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(server: Server) -> Server:
    """Wait for the banner, which names the port."""
    assert wait_until(lambda: "(ready in" in server.text() or server.process.poll() is not None, BOOT_S), server.text()
    found = re.search(r"at http://127\.0\.0\.1:(\d+)", server.text())
    assert found, server.text()
    server.port = int(found[1])
    return server


@contextmanager
def serving(model: Path, log: Path, *words: str) -> Iterator[Server]:
    with started(log, str(model), "--port", "0", *words) as server:
        yield wait_ready(server)


def wait_until(holds, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return bool(holds())


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def tone(seconds: float, rate: int = 16000, channels: int = 1) -> np.ndarray:
    """A tone that glides from 200 to 1200 Hz: [n] or [n, channels] float32."""
    at = np.arange(round(seconds * rate)) / rate
    wave = (0.4 * np.sin(2 * np.pi * (200 * at + 500 * at**2 / max(seconds, 1e-3)))).astype(np.float32)
    return wave if channels == 1 else np.repeat(wave[:, None], channels, axis=1)


def audio_file(samples: np.ndarray, rate: int = 16000, kind: str = "WAV", subtype: str | None = None) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def base64_text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def multipart(parts: list[tuple[str, str | None, bytes]], boundary: str = "b0undary") -> tuple[bytes, dict[str, str]]:
    """A body of (name, file name or None, content) parts, and its headers."""
    body = b""
    for name, file_name, content in parts:
        file = f'; filename="{file_name}"' if file_name else ""
        body += (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'.encode() + content + b"\r\n"
        )
    return body + f"--{boundary}--\r\n".encode(), {"Content-Type": f"multipart/form-data; boundary={boundary}"}
