"""An engine that holds work and does not get on: /health says so, the log says where it stands, and both pass."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import zmq

from engine.client import Beat, Events, News, Shutdown
from engine.phases import Phases
from engine.request import Event
from engine.server.worker import Worker
from tests.server.serving import Server, serving, wait_ready, wait_until
from tests.server.test_faults import STEP, planted, served
from tests.server.test_life import raw_request

LIMIT_S = 1.0
STACKS = "(most recent call first):"


def health(server: Server) -> tuple[int, str]:
    status, answer = server.get("/health")
    return status, answer["status"]


def test_an_engine_that_stands_still_is_wedged_until_it_goes_on(tiny_checkpoint: Path, tmp_path: Path):
    with serving(tiny_checkpoint, tmp_path / "log", "--wedge-seconds", str(LIMIT_S)) as server:
        engine = server.engine_pid()
        reply = server.open_stream(text="Go on.", max_tokens=400, ignore_eos=True)
        reply.readline()
        assert health(server) == (200, "ok")
        began = time.monotonic()
        os.kill(engine, signal.SIGSTOP)
        try:
            assert wait_until(lambda: health(server) == (503, "wedged"), LIMIT_S + 1)
            assert time.monotonic() - began > LIMIT_S
            answer = server.get("/health")[1]
            assert answer["open_requests"] == 1
            assert LIMIT_S <= answer["silent_seconds"] < LIMIT_S + 2  # rounded to a tenth
            status, refused = server.post({"text": "a"})
            assert (status, refused["error"]["code"]) == (503, "wedged")
        finally:
            os.kill(engine, signal.SIGCONT)
        lines = [json.loads(line) for line in reply.read().splitlines()]
        assert lines[-1]["usage"]["completion_tokens"] == 400
        assert wait_until(lambda: health(server) == (200, "ok"), 1)
        assert server.answer(text="a", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
        assert wait_until(lambda: "the engine goes on" in server.text(), 1)
        assert server.text().count("omni: the engine has finished no step for ") == 1
        assert server.text().count("Current thread") == 1
        assert STACKS in server.text()


def test_an_engine_that_turns_without_a_step_is_wedged_until_its_requests_are_gone(
    tiny_checkpoint: Path, tmp_path: Path
):
    stuck = "        if any(one.max_tokens == 13 for one in self.loop.waiting.values()):\n            return []\n"
    tree = planted(tmp_path, STEP, stuck)
    words = ("--wedge-seconds", str(LIMIT_S))
    with served(tree, tiny_checkpoint, tmp_path / "log", *words) as server:
        wait_ready(server)
        client = raw_request(server, {"text": "a", "max_tokens": 13})
        assert wait_until(lambda: health(server) == (503, "wedged"), LIMIT_S + 2)
        assert wait_until(lambda: STACKS in server.text(), 2)
        assert "in run\n" in server.text()
        client.close()
        assert wait_until(lambda: health(server) == (200, "ok"), 3)
        assert server.answer(text="a", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


class Turning:
    """An engine as a worker sees it, which makes a step only when it is told to."""

    def __init__(self) -> None:
        self.has_work = True
        self.lane = SimpleNamespace(counters={"steps": 0})
        self.loop = SimpleNamespace(lanes=[self.lane])
        self.phases = Phases(enabled=False)
        self.pace_s = 0.0
        self.events: list[Event] = []

    def step(self) -> list[Event]:
        if self.pace_s:
            time.sleep(self.pace_s)
            self.lane.counters["steps"] += 1
        made, self.events = self.events, []
        return made


@contextmanager
def working(engine: Turning) -> Iterator[zmq.Socket]:
    """The front's end of the socket of a worker that runs `engine`."""
    context = zmq.Context()
    ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    ours.bind("inproc://worker")
    theirs.connect("inproc://worker")
    thread = threading.Thread(target=Worker(theirs, engine, os.getppid()).run)
    thread.start()
    try:
        yield ours
    finally:
        ours.send(msgspec.msgpack.encode(Shutdown()))
        thread.join(5)
        context.destroy(linger=0)
        assert not thread.is_alive()


def heard(ours: zmq.Socket, seconds: float) -> list[News]:
    found, end = [], time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if ours.poll(1000 * left):
            found.append(msgspec.msgpack.decode(ours.recv(), type=News))
    return found


def test_a_worker_whose_engine_makes_no_step_is_silent():
    engine = Turning()
    with working(engine) as ours:
        assert heard(ours, 1.2) == []
        engine.pace_s = 0.01
        assert heard(ours, 0.7) == [Beat()]


def test_a_worker_whose_steps_make_no_events_beats_twice_a_second_at_the_most():
    engine = Turning()
    engine.pace_s = 0.01
    with working(engine) as ours:
        beats = heard(ours, 2.2)
    assert set(beats) == {Beat()}
    assert 3 <= len(beats) <= 5


def test_a_worker_that_sends_events_sends_no_beat_beside_them():
    engine = Turning()
    engine.pace_s = 0.01
    with working(engine) as ours:
        heard(ours, 0.1)
        for _ in range(6):
            engine.events = [Event(request_id="a", token_ids=[1])]
            assert [type(news) for news in heard(ours, 0.2)] == [Events]
