"""A body that comes too slowly loses its place in the server. The limits are shortened in a copy of the source."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.serving import Server, wait_ready, wait_until
from tests.server.test_faults import planted, served

LIMITS = "_BODY_S, _IDLE_S = 300.0, 15.0\n"
IDLE_S, BODY_S = 1.0, 3.0


@pytest.fixture(scope="module")
def hasty(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with room for four requests that waits for little."""
    folder = tmp_path_factory.mktemp("hasty")
    tree = planted(folder, LIMITS, f"_BODY_S, _IDLE_S = {BODY_S}, {IDLE_S}\n", "server/exchange.py")
    with served(tree, tiny_checkpoint, folder / "log", "--max-batch", "2", "--max-queue", "2") as server:
        yield wait_ready(server)


def begun(server: Server, path: str) -> socket.socket:
    """A connection on which a head and one byte of its body were sent."""
    link = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    link.sendall(head.encode() + b"{")
    return link


def answer_of(link: socket.socket) -> tuple[http.client.HTTPResponse, dict]:
    reply = http.client.HTTPResponse(link)
    reply.begin()
    return reply, json.loads(reply.read())


def test_a_body_that_stops_coming_is_a_408_and_gives_its_place_back(hasty: Server):
    links = [begun(hasty, path) for path in ("/generate", "/v1/chat/completions") * 2]
    assert wait_until(lambda: hasty.metrics()["http_open"] == 4, 5)
    assert hasty.post({"text": "a", "max_tokens": 1})[0] == 429
    began = time.monotonic()
    for link, field in zip(links, ("field", "param") * 2, strict=True):
        reply, answer = answer_of(link)
        assert (reply.status, reply.headers["Connection"]) == (408, "close")
        assert answer["error"]["code"] == "body_timeout" and answer["error"][field] is None
        assert "no byte of the body came for 1 s" in answer["error"]["message"]
        assert link.recv(1) == b""
        link.close()
    assert time.monotonic() - began < 3 * IDLE_S
    assert hasty.post({"text": "a", "max_tokens": 1})[0] == 200
    assert hasty.metrics()["http_open"] == 0


def test_a_body_that_comes_byte_by_byte_ends_at_the_limit_of_the_whole(hasty: Server):
    with begun(hasty, "/generate") as link:
        began = time.monotonic()
        link.settimeout(IDLE_S / 4)
        while time.monotonic() - began < 3 * BODY_S:
            try:
                link.sendall(b" ")
                if link.recv(1, socket.MSG_PEEK):
                    break
            except TimeoutError:
                continue
        assert BODY_S - 0.5 < time.monotonic() - began < BODY_S + 2
        reply, answer = answer_of(link)
    assert reply.status == 408
    assert "the body took over 3 s" in answer["error"]["message"]
    assert "Traceback" not in hasty.text()


def test_a_body_that_pauses_for_less_is_read(hasty: Server):
    data = json.dumps({"text": "a", "max_tokens": 1}).encode().ljust(100)
    with begun(hasty, "/generate") as link:
        time.sleep(IDLE_S / 2)
        link.sendall(data[1:50])
        time.sleep(IDLE_S / 2)
        link.sendall(data[50:])
        assert answer_of(link)[0].status == 200
