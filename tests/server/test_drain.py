"""SIGTERM: what was begun goes on to its end, nothing new is taken, and the end comes when it was promised."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from tests.server.serving import Server, gone, serving, wait_until

LONG = {"text": "Count to a thousand.", "max_tokens": 4000, "ignore_eos": True}
SHUTTING_DOWN = {"error": {"message": "the server is shutting down", "field": None, "code": "shutting_down"}}
END_S = 3.0  # how long an end may take beside the drain


def opened(server: Server, count: int, **body: object) -> list[http.client.HTTPResponse]:
    replies = [server.open_stream(**body) for _ in range(count)]
    for reply in replies:
        assert json.loads(reply.readline())["token_ids"]
    return replies


def last_line(reply: http.client.HTTPResponse) -> dict:
    return json.loads(reply.read().splitlines()[-1])


def drains(server: Server) -> bool:
    return server.get("/health") == (503, {"status": "draining"})


def test_open_requests_end_whole_while_new_ones_are_refused(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        replies = opened(server, 3, text="Go on.", max_tokens=600, ignore_eos=True)
        data = json.dumps({"text": "Late.", "max_tokens": 2, "ignore_eos": True}).encode()
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as half:
            half.sendall(
                b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
                b"Content-Length: %d\r\n\r\n" % len(data) + data[:10]
            )
            assert wait_until(lambda: server.metrics()["http_open"] == 4, 5)
            server.process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: drains(server), 2)
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            connection.request("POST", "/generate", b'{"text": "a"}', {"Content-Type": "application/json"})
            refused = connection.getresponse()
            assert (refused.status, refused.headers["Retry-After"]) == (503, "5")
            error = json.loads(refused.read())["error"]
            assert error["code"] == "draining"
            assert "finishes what it has begun" in error["message"]
            connection.close()
            # A request whose body was still on its way has begun too.
            half.sendall(data[10:])
            answer = b""
            while chunk := half.recv(1 << 16):
                answer += chunk
            assert answer.startswith(b"HTTP/1.1 200 ") and b'"completion_tokens":2' in answer
        assert [last_line(reply)["usage"]["completion_tokens"] for reply in replies] == [600] * 3
        began = time.monotonic()
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < END_S
        assert wait_until(lambda: all(gone(child.pid) for child in children), 2)
        assert "cut" not in server.text() and "Traceback" not in server.text()


def test_what_is_left_after_the_drain_ends_with_an_error_and_is_counted(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log", "--drain-seconds", "1") as server:
        children = psutil.Process(server.process.pid).children(recursive=True)
        replies = opened(server, 4, **LONG)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert [last_line(reply) for reply in replies] == [SHUTTING_DOWN] * 4
        assert time.monotonic() - began > 1
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < 1 + END_S
        assert wait_until(lambda: all(gone(child.pid) for child in children), 2)
        assert "omni: draining: 4 open requests, up to 1 s\nomni: cut: 4 open requests\n" in server.text()
        assert "Traceback" not in server.text()


def test_a_body_that_is_still_on_its_way_after_the_drain_is_told(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log", "--drain-seconds", "0.5") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as half:
            half.sendall(
                b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
            )
            assert wait_until(lambda: server.metrics()["http_open"] == 1, 5)
            server.process.send_signal(signal.SIGTERM)
            reply = http.client.HTTPResponse(half)
            reply.begin()
            assert (reply.status, json.loads(reply.read())) == (503, SHUTTING_DOWN)
        assert server.process.wait(10) == 0
        assert "cut: 1 open request" in server.text() and "Traceback" not in server.text()


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_drain_at_once(tiny_checkpoint: Path, tmp_path: Path, second: signal.Signals):
    with serving(tiny_checkpoint, tmp_path / "log") as server:
        (reply,) = opened(server, 1, **LONG)
        server.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: drains(server), 2)
        began = time.monotonic()
        server.process.send_signal(second)
        assert last_line(reply) == SHUTTING_DOWN
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < END_S
        assert "omni: draining: 1 open request, up to 30 s\nomni: cut: 1 open request\n" in server.text()


def test_an_idle_server_ends_at_once(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log") as server, socket.create_connection(("127.0.0.1", server.port)):
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < END_S
        assert "draining" not in server.text()


def test_a_client_that_leaves_ends_the_drain(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log") as server:
        (reply,) = opened(server, 1, **LONG)
        server.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: drains(server), 2)
        began = time.monotonic()
        reply.close()
        assert server.process.wait(10) == 0
        assert time.monotonic() - began < END_S
        assert "cut" not in server.text()


def test_an_engine_that_dies_during_the_drain_is_told_as_ever(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log") as server:
        (reply,) = opened(server, 1, **LONG)
        engine = server.engine_pid()
        server.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: drains(server), 2)
        os.kill(engine, signal.SIGKILL)
        assert last_line(reply)["error"]["message"] == "the engine process ended by signal 9"
        assert server.process.wait(10) == 70
