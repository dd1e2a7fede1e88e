"""Who is let in: keys, room for one more request, and the limits that flags set; refusals come before a body is read."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from starlette.types import Message, Receive, Scope, Send

from engine.errors import RequestError
from engine.metrics import FrontCounters
from engine.server.guard import Admission, Guard
from tests.server.serving import Server, audio_file, base64_text, serving, tone, wait_until

JSON = {"Content-Type": "application/json"}
KEYS = ("first-key", "second-key", "third-key")
LONG = {"text": "Count to a thousand.", "max_tokens": 3000, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize(
    ("entered", "left", "now", "seconds"),
    [
        (8, (), 50.0, 1),  # nothing has finished yet: nobody knows
        (8, (1.0, 2.0, 3.0, 4.0), 4.0, 2),  # one a second, two wait
        (302, (40.0,) * 200, 40.0, 20),  # five a second, 100 wait
        (300, (10.0,) * 60, 10.0, 10),  # 238 would take 40 s at this rate, which is known for 10 s only
        (300, (3.0, 4.0), 4.0, 4),
        (300, (0.1,), 0.1, 1),
        (6, (0.1,) * 4, 0.1, 1),
        (6, (1.0, 2.0, 3.0), 40.0, 14),
        (300, (70.0,), 100.0, 60),
        (6, (1.0, 2.0, 3.0), 70.0, 1),  # long ago
    ],
)
def test_the_time_to_come_back_is_what_the_queue_takes_at_the_recent_rate_as_far_as_that_is_known(
    entered: int, left: tuple[float, ...], now: float, seconds: int
):
    admission = Admission(limit=1000, batch=2)
    for _ in range(entered):
        admission.enter(0.0)
    for at in left:
        admission.leave(at)
    assert admission.open == entered - len(left)
    assert admission.retry_after_s(now) == seconds


def test_idle_time_does_not_count_in_the_rate():
    admission = Admission(limit=10, batch=1)
    admission.enter(0.0)
    admission.leave(1.0)
    for _ in range(6):
        admission.enter(1000.0)
    admission.leave(1002.0)
    assert admission.retry_after_s(1002.0) == 2  # one in two seconds, and no more is known


class Played:
    """A guard in front of an application that takes a body and answers 200; asked without a server."""

    def __init__(self, *, limit: int = 2, keys: tuple[str, ...] = (), engine_open: int = 0, status: int = 200) -> None:
        self.counters = FrontCounters()
        self.admission = Admission(limit, batch=1)
        self.reason: RequestError | None = None
        self.release = asyncio.Event()
        self.status = status
        self.reads = 0
        self.guard = Guard(self.app, self.admission, self.counters, lambda: self.reason, lambda: engine_open, keys)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await self.release.wait()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def ask(self, path: str = "/generate", method: str = "POST", **headers: str) -> tuple[int, dict, bytes]:
        found: list[Message] = []

        async def receive() -> Message:
            self.reads += 1
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            found.append(message)

        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await self.guard({"type": "http", "path": path, "method": method, "headers": raw}, receive, send)
        return found[0]["status"], dict(found[0]["headers"]), found[1]["body"]


def test_a_request_beyond_the_limit_is_refused_unread_and_room_comes_back():
    async def run() -> None:
        played = Played(limit=2)
        held = [asyncio.create_task(played.ask()) for _ in range(2)]
        await asyncio.sleep(0)
        status, headers, body = await played.ask()
        assert (status, headers[b"retry-after"]) == (429, b"1")
        assert json.loads(body)["error"] == {
            "message": "2 requests are open, which is all that this server takes at once; try again later",
            "field": None,
            "code": "overloaded",
        }
        assert (played.reads, played.counters.http_overloaded) == (2, 1)
        played.release.set()
        assert [(await one)[0] for one in held] == [200, 200]
        assert (await played.ask())[0] == 200
        assert played.admission.open == 0

    asyncio.run(run())


def test_under_v1_a_refusal_has_the_form_of_openai():
    status, headers, body = asyncio.run(Played(limit=0).ask("/v1/chat/completions"))
    assert (status, headers[b"content-type"]) == (429, b"application/json")
    error = json.loads(body)["error"]
    assert (error["type"], error["param"], error["code"]) == ("rate_limit_error", None, "overloaded")


def test_choices_in_the_engine_fill_the_server_as_requests_do():
    assert asyncio.run(Played(limit=3, engine_open=3).ask())[0] == 429


def test_what_is_no_post_is_never_counted():
    async def run() -> None:
        played = Played(limit=1, engine_open=1)
        played.release.set()
        assert (await played.ask("/metrics", "GET"))[0] == 200

    asyncio.run(run())


def test_a_server_that_is_not_ready_says_when_to_come_back():
    async def run() -> None:
        played = Played()
        played.reason = RequestError("the server is draining", code="draining", status=503)
        status, headers, body = await played.ask()
        assert (status, headers[b"retry-after"]) == (503, b"5")
        assert json.loads(body)["error"]["code"] == "draining"
        assert played.reads == 0

    asyncio.run(run())


def test_a_429_of_a_route_says_when_to_come_back_too():
    async def run() -> None:
        played = Played(status=429)
        played.release.set()
        status, headers, _ = await played.ask()
        assert (status, headers[b"retry-after"], played.counters.http_overloaded) == (429, b"1", 1)

    asyncio.run(run())


def test_a_request_that_raises_gives_its_room_back():
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("planted")

    played = Played()
    played.guard.app = broken
    with pytest.raises(ValueError, match="planted"):
        asyncio.run(played.ask())
    assert played.admission.open == 0


@pytest.mark.parametrize(
    "given",
    ["Bearer first-key", "bearer second-key", "BEARER  first-key "],
)
def test_each_key_opens_the_server(given: str):
    played = Played(keys=KEYS[:2])
    played.release.set()
    assert asyncio.run(played.ask(authorization=given))[0] == 200


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer ", "first-key", "Basic first-key", "Bearer first-ke", "Bearer first-key2", "Bearer é"],
)
@pytest.mark.parametrize(("path", "method"), [("/generate", "POST"), ("/metrics", "GET"), ("/v1/models", "GET")])
def test_without_a_key_nothing_but_health_answers(given: str | None, path: str, method: str):
    played = Played(keys=KEYS[:2])
    headers = {} if given is None else {"authorization": given}
    status, found, body = asyncio.run(played.ask(path, method, **headers))
    assert (status, found[b"www-authenticate"], played.reads) == (401, b"Bearer", 0)
    error = json.loads(body)["error"]
    assert error["code"] == "invalid_api_key"
    assert error.keys() == ({"message", "type", "param", "code"} if "/v1/" in path else {"message", "field", "code"})
    assert played.counters.http_unauthorised == 1
    played.release.set()
    assert asyncio.run(played.ask("/health", "GET"))[0] == 200


def test_a_guard_shows_no_key():
    guard = Played(keys=KEYS).guard
    assert not any(key in repr(guard) for key in KEYS)


@pytest.fixture(scope="module")
def small(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with room for four requests, keys and narrow limits."""
    words = ["--max-batch", "2", "--max-queue", "2", "--max-body-mb", "1", "--max-audio-seconds", "2"]
    words += ["--served-model-name", "small", "--api-key", KEYS[0]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WALKGATE_API_KEY", f"{KEYS[1]}, {KEYS[2]}")
        with serving(tiny_checkpoint, tmp_path_factory.mktemp("small") / "log", *words) as server:
            yield server


def asked(server: Server, body: object, key: str = KEYS[0]) -> tuple[http.client.HTTPResponse, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/generate", json.dumps(body), {"Authorization": f"Bearer {key}"} | JSON)
    reply = connection.getresponse()
    data = json.loads(reply.read())
    connection.close()
    return reply, data


def fetched(server: Server, path: str, key: str = KEYS[0]) -> bytes:
    status, data = server.request("GET", path, headers={"Authorization": f"Bearer {key}"})
    assert status == 200
    return data


def head(server: Server, length: int, body: bytes = b"") -> socket.socket:
    """A connection on which the head of a request was sent, and perhaps a part of its body."""
    link = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    link.sendall(
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nAuthorization: Bearer {KEYS[0]}\r\n"
        f"Content-Length: {length}\r\n\r\n".encode()
        + body
    )
    return link


def gauges(server: Server, *names: str) -> tuple[float, ...]:
    """What one reading of /metrics says under these names."""
    rows = [row.split() for row in fetched(server, "/metrics").decode().splitlines()]
    return tuple(next(float(row[1]) for row in rows if row[0] == f"walkgate_{name}") for name in names)


def gauge(server: Server, name: str) -> float:
    return gauges(server, name)[0]


def test_keys_of_flags_and_of_the_environment_open_the_server_and_are_shown_nowhere(small: Server):
    for key in KEYS:
        assert asked(small, {"text": "a", "max_tokens": 1}, key)[0].status == 200
    reply, answer = asked(small, {"text": "a", "max_tokens": 1}, "wrong")
    assert (reply.status, answer["error"]["code"]) == (401, "invalid_api_key")
    assert reply.headers["WWW-Authenticate"] == "Bearer"
    assert small.request("GET", "/health")[0] == 200
    assert small.request("GET", "/info")[0] == small.request("GET", "/nowhere")[0] == 401
    engine = psutil.Process(small.engine_pid())
    seen = [small.text(), fetched(small, "/info").decode(), str(engine.cmdline()), str(engine.environ())]
    assert not any(key in text for key in KEYS for text in seen)


def test_limits_of_flags_are_in_info_and_named_by_refusals(small: Server):
    info = json.loads(fetched(small, "/info"))
    wanted = {"max_batch": 2, "max_queue": 2, "max_body_bytes": 1 << 20, "max_audio_seconds": 2}
    assert {name: info["limits"][name] for name in wanted} == wanted
    assert info["model_name"] == "small"
    reply, answer = asked(small, {"text": "a" * (1 << 20)})
    assert (reply.status, answer["error"]["code"]) == (413, "too_large")
    assert "--max-body-mb 1" in answer["error"]["message"]
    clip = base64_text(audio_file(tone(2.5)))
    reply, answer = asked(small, {"text": "a", "audio": clip, "max_tokens": 1})
    assert (reply.status, answer["error"]["field"]) == (400, "audio")
    assert "at most 2 s" in answer["error"]["message"]
    assert asked(small, {"text": "a", "audio": base64_text(audio_file(tone(1.9))), "max_tokens": 1})[0].status == 200


def test_a_crowd_of_connections_gets_no_further_than_the_limit(small: Server):
    """Only heads are sent: what is admitted waits for its body, and the rest is refused without one."""
    before = gauge(small, "http_overloaded_total")
    links = [head(small, length=900_000) for _ in range(40)]
    assert wait_until(lambda: gauge(small, "http_overloaded_total") - before == 36, 10)
    answered = 0
    for link in links:
        link.settimeout(0.05)
        try:
            answer = link.recv(1 << 16).decode()
        except TimeoutError:
            continue
        answered += 1
        assert answer.startswith("HTTP/1.1 429 ")
        assert "retry-after: 1\r\n" in answer.lower()
        assert '"code":"overloaded"' in answer
    assert answered == 36
    for link in links:
        link.close()
    assert wait_until(lambda: gauge(small, "http_open") == 0, 5)
    assert asked(small, {"text": "a", "max_tokens": 1})[0].status == 200


def test_after_many_quick_requests_a_crowd_is_told_to_come_back_soon(tiny_checkpoint: Path, tmp_path: Path):
    words = ["--max-batch", "8", "--max-queue", "24", "--api-key", KEYS[0]]
    with serving(tiny_checkpoint, tmp_path / "log", *words) as server:

        def retry_after(_: int) -> str | None:
            reply, _ = asked(server, {"text": "a", "max_tokens": 1})
            assert reply.status in (200, 429)
            return reply.headers["Retry-After"]

        assert [retry_after(place) for place in range(50)] == [None] * 50
        with ThreadPoolExecutor(60) as pool:
            told = [found for found in pool.map(retry_after, range(60)) if found is not None]
        assert told and set(told) <= {"1", "2"}


def test_a_full_server_refuses_until_a_request_ends(small: Server):
    data = json.dumps(LONG).encode()
    links = [head(small, len(data), data) for _ in range(4)]
    held = ("engine_open", "requests_running", "requests_waiting")
    # The front counts a request as it sends it; the engine lets in those that it has read, step by step.
    assert wait_until(lambda: gauges(small, *held) == (4, 2, 2), 10)
    assert gauge(small, "open_limit") == 4
    reply, answer = asked(small, {"text": "a", "max_tokens": 1})
    assert (reply.status, answer["error"]["code"]) == (429, "overloaded")
    assert 1 <= int(reply.headers["Retry-After"]) <= 60
    while links:
        links.pop().close()
        assert wait_until(lambda: gauge(small, "engine_open") == len(links), 5)
    assert asked(small, {"text": "a", "max_tokens": 1})[0].status == 200
