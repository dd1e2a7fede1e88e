"""OpenAI routes where something is wrong on the server's side: planted faults, a killed engine, no room, a key."""

from __future__ import annotations

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from tests.server.serving import Server, serving, wait_ready, wait_until
from tests.server.test_faults import planted, served

NAME = "tiny-checkpoint"
LONG = [65] * 200
# Only a request with a long prompt, or long speech, ever runs at position 220.
FAULT = "        if any(row.start == 220 for row in step.rows):\n            raise ValueError('planted')\n"
LAUNCH = "    def launch(self, step: Step) -> Launched:\n"


@pytest.fixture(scope="module")
def faulty(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("faulty")
    with served(planted(folder, LAUNCH, FAULT, "runner.py"), tiny_checkpoint, folder / "log") as server:
        yield wait_ready(server)


def client_of(server: Server) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)


def events(reply: http.client.HTTPResponse) -> list[str]:
    return [event.removeprefix("data: ") for event in reply.read().decode().split("\n\n") if event]


def post(server: Server, path: str, body: dict) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection.getresponse()


def assert_nothing_runs(server: Server) -> None:
    assert wait_until(lambda: server.metrics()["http_open"] == 0, 5)
    found = server.metrics()
    assert found["requests_running"] == found["requests_waiting"] == 0
    assert found["thinker_pages_free"] == found["thinker_pages"]


def test_a_choice_that_fails_ends_the_stream_with_an_error_and_cancels_the_others(faulty: Server):
    body = {"model": NAME, "prompt": [LONG, [65]], "max_tokens": 3000, "ignore_eos": True, "stream": True}
    reply = post(faulty, "/v1/completions", body)
    assert reply.status == 200
    *pieces, last = events(reply)
    assert {json.loads(piece)["choices"][0]["index"] for piece in pieces} == {0, 1}
    assert json.loads(last) == {
        "error": {"message": "ValueError: planted", "type": "server_error", "param": None, "code": "engine"}
    }
    assert_nothing_runs(faulty)


def test_the_client_raises_on_that_error_and_on_the_status_of_an_answer_that_is_not_streamed(faulty: Server):
    client = client_of(faulty)
    stream = client.completions.create(
        model=NAME, prompt=LONG, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
    )
    with pytest.raises(openai.APIError, match="planted"):
        list(stream)
    with pytest.raises(openai.InternalServerError, match="planted"):
        client.completions.create(model=NAME, prompt=[LONG, [65]], max_tokens=3000, extra_body={"ignore_eos": True})
    assert_nothing_runs(faulty)


def test_speech_that_fails_breaks_off_instead_of_looking_whole(faulty: Server):
    speech = {"max_frames": 400, "ignore_eos": True}
    body = {"model": NAME, "input": "The sea.", "response_format": "pcm", "speech": speech}
    reply = post(faulty, "/v1/audio/speech", body)
    assert reply.status == 200
    with pytest.raises(http.client.IncompleteRead) as broken:
        reply.read()
    assert len(broken.value.partial) > 1920
    assert_nothing_runs(faulty)


def test_a_killed_engine_ends_a_stream_with_an_error_within_two_seconds(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log") as server:
        body = {"model": NAME, "messages": [{"role": "user", "content": "a"}], "ignore_eos": True, "stream": True}
        reply = post(server, "/v1/chat/completions", body)
        assert reply.readline().startswith(b"data: {")
        os.kill(server.engine_pid(), signal.SIGKILL)
        began = time.monotonic()
        last = events(reply)[-1]
        assert time.monotonic() - began < 2
        error = json.loads(last)["error"]
        assert (error["type"], error["code"]) == ("server_error", "engine_dead")
        assert server.process.wait(5) == 70


@pytest.mark.parametrize("stream", [True, False])
def test_an_interrupt_ends_a_request_as_a_server_that_shuts_down(tiny_checkpoint: Path, tmp_path: Path, stream: bool):
    with serving(tiny_checkpoint, tmp_path / "log") as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        body = {"model": NAME, "prompt": "a", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        assert wait_until(lambda: server.metrics()["requests_running"] == 1, 5)
        server.process.send_signal(signal.SIGINT)
        reply = connection.getresponse()
        assert reply.status == (200 if stream else 503)
        error = json.loads(events(reply)[-1])["error"]
        assert (error["type"], error["code"]) == ("server_error", "shutting_down")
        assert server.process.wait(5) == 0


@pytest.fixture(scope="module")
def narrow(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that takes three requests at once, from those who know its key."""
    log = tmp_path_factory.mktemp("narrow") / "log"
    with serving(tiny_checkpoint, log, "--max-batch", "2", "--max-queue", "1", "--api-key", "sesame") as server:
        yield server


def chat_on(server: Server, key: str, n: int, max_tokens: int = 4, **more: object):
    client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0)
    messages = [{"role": "user", "content": "a"}]
    return client.chat.completions.create(
        model=NAME, messages=messages, n=n, max_tokens=max_tokens, extra_body={"ignore_eos": True}, **more
    )


def test_a_key_opens_every_route(narrow: Server):
    assert len(chat_on(narrow, "sesame", 3).choices) == 3
    with pytest.raises(openai.AuthenticationError) as refused:
        chat_on(narrow, "wrong", 1)
    assert refused.value.code == "invalid_api_key"


def test_choices_that_find_no_room_are_429_and_nothing_of_them_is_left_running(narrow: Server):
    stream = chat_on(narrow, "sesame", 2, max_tokens=2000, stream=True)
    next(iter(stream))
    with pytest.raises(openai.RateLimitError) as refused:
        chat_on(narrow, "sesame", 2)
    assert refused.value.code == "overloaded"
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    stream.close()
    key = {"Authorization": "Bearer sesame"}
    assert wait_until(lambda: b"\nwalkgate_engine_open 0.0" in narrow.request("GET", "/metrics", headers=key)[1], 5)
    assert len(chat_on(narrow, "sesame", 3).choices) == 3


def test_more_choices_than_the_server_takes_at_once_are_a_400(narrow: Server):
    with pytest.raises(openai.BadRequestError, match="4 choices are more than the 3 requests") as refused:
        chat_on(narrow, "sesame", 4)
    assert refused.value.param == "n"
