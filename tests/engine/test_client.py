"""The client of the engine process, held against a socket that plays the process message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

import engine.client
from engine.client import (
    Add,
    AskCounters,
    Beat,
    BootError,
    Cancel,
    Counters,
    EngineClient,
    Events,
    Failed,
    Hello,
    News,
    Order,
    Refused,
    Shutdown,
)
from engine.errors import EngineDeadError, RequestError
from engine.request import Clip, Event, Request, Sampling, Speech, Usage


class Peer:
    """The engine's end of the socket."""

    def __init__(self, address: str) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.PAIR)
        self.socket.connect(address)

    async def say(self, news: News) -> None:
        await self.socket.send(msgspec.msgpack.encode(news))

    async def hear(self) -> Order:
        data = await asyncio.wait_for(self.socket.recv(), 5)
        return msgspec.msgpack.decode(data, type=Order)


def joined(tmp_path: Path, test: Callable[[EngineClient, Peer], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        address = f"ipc://{tmp_path}/e"
        client = EngineClient(address)
        peer = Peer(address)
        assert client._socket.poll(5000, zmq.POLLOUT)  # they have met: before that nothing can be sent
        try:
            await asyncio.wait_for(test(client, peer), 20)
        finally:
            client.close()
            peer.context.destroy(linger=0)

    asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


class Clock:
    """The client's clock, which goes on only where a test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(engine.client, "time", clock)
    return clock


def asked(name: str) -> Request:
    return Request(id=name, prompt_ids=[1, 2, 3], max_tokens=5)


def test_a_request_arrives_whole_clips_included(tmp_path: Path):
    clip = Clip(mel=bytes(range(256)), mel_bins=8, frames=8, tokens=1, seconds=0.08)
    speech = Speech(voice="ethan", max_frames=9, sampling=Sampling(temperature=0.9, seed=2**62))
    request = Request(id="a", prompt_ids=[1], max_tokens=2, clips=[clip], speech=speech, logprobs=2)

    async def test(client: EngineClient, peer: Peer) -> None:
        stream = client.generate(request)
        waiting = asyncio.ensure_future(anext(stream))
        assert await peer.hear() == Add(request)
        await peer.say(Events([Event(request_id="a", done=True)]))
        assert (await waiting).done

    joined(tmp_path, test)


def test_one_message_a_step_is_dealt_out_to_its_streams_in_order(tmp_path: Path):
    async def test(client: EngineClient, peer: Peer) -> None:
        async def collect(name: str) -> list[list[int]]:
            return [event.token_ids async for event in client.generate(asked(name))]

        streams = [asyncio.create_task(collect(name)) for name in "ab"]
        assert {(await peer.hear()).request.id for _ in "ab"} == {"a", "b"}
        for step in range(3):
            events = [Event(request_id=name, token_ids=[step, ord(name)], done=step == 2) for name in "ab"]
            await peer.say(Events([*events, Event(request_id="nobody", token_ids=[9])]))
        assert [await stream for stream in streams] == [[[step, ord(name)] for step in range(3)] for name in "ab"]
        assert client.open_requests == 0

    joined(tmp_path, test)


def test_a_stream_that_is_closed_early_cancels_and_one_that_ended_does_not(tmp_path: Path):
    async def test(client: EngineClient, peer: Peer) -> None:
        await peer.say(Hello("engine", {}, "0", 1.0))
        await client.hello()
        async with aclosing(client.generate(asked("whole"))) as stream:
            waiting = asyncio.ensure_future(anext(stream))
            await peer.hear()
            await peer.say(Events([Event(request_id="whole", done=True)]))
            await waiting
        async with aclosing(client.generate(asked("left"))) as stream:
            waiting = asyncio.ensure_future(anext(stream))
            assert await peer.hear() == Add(asked("left"))
            await peer.say(Events([Event(request_id="left", token_ids=[1])]))
            await waiting
        assert await peer.hear() == Cancel("left")
        assert client.open_requests == 0

    joined(tmp_path, test)


def test_a_task_that_is_cancelled_while_it_waits_cancels_its_request(tmp_path: Path):
    async def test(client: EngineClient, peer: Peer) -> None:
        task = asyncio.ensure_future(anext(client.generate(asked("a"))))
        await peer.hear()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await peer.hear() == Cancel("a")

    joined(tmp_path, test)


def test_a_refusal_of_the_engine_keeps_its_field_and_status(tmp_path: Path):
    async def test(client: EngineClient, peer: Peer) -> None:
        task = asyncio.ensure_future(anext(client.generate(asked("a"))))
        await peer.hear()
        await peer.say(Refused("a", "needs 99 pages of 8", "max_tokens", "too_long", 400))
        with pytest.raises(RequestError) as caught:
            await task
        assert (caught.value.message, caught.value.field) == ("needs 99 pages of 8", "max_tokens")
        assert (caught.value.code, caught.value.status) == ("too_long", 400)

    joined(tmp_path, test)


def test_counters_are_matched_to_their_question_and_a_silent_engine_is_none(tmp_path: Path):
    async def test(client: EngineClient, peer: Peer) -> None:
        assert await client.counters(0.05) is None
        late = await peer.hear()
        task = asyncio.ensure_future(client.counters(5))
        question = await peer.hear()
        assert isinstance(late, AskCounters) and isinstance(question, AskCounters)
        await peer.say(Counters(late.number, {"steps": 1.0}))
        await peer.say(Counters(question.number, {"steps": 2.0}))
        assert await task == {"steps": 2.0}

    joined(tmp_path, test)


def test_a_dead_engine_fails_what_is_open_and_what_comes_later(tmp_path: Path):
    async def test(client: EngineClient, peer: Peer) -> None:
        stream = asyncio.ensure_future(anext(client.generate(asked("a"))))
        counters = asyncio.ensure_future(client.counters(30))
        await asyncio.sleep(0.05)
        client.fail("the engine process ended by signal 9")
        for task in (stream, asyncio.ensure_future(anext(client.generate(asked("b"))))):
            with pytest.raises(EngineDeadError, match="by signal 9"):
                await task
        assert await counters is None
        assert await client.counters(30) is None
        with pytest.raises(EngineDeadError):
            await client.hello()

    joined(tmp_path, test)


def test_an_engine_that_cannot_serve_says_why(tmp_path: Path):
    async def test(client: EngineClient, peer: Peer) -> None:
        await peer.say(Failed("no tensor thinker.lm_head.weight"))
        with pytest.raises(BootError, match=r"no tensor thinker\.lm_head\.weight"):
            await client.hello()

    joined(tmp_path, test)


def test_shutting_down_tells_the_engine_and_ends_streams(tmp_path: Path):
    async def test(client: EngineClient, peer: Peer) -> None:
        task = asyncio.ensure_future(anext(client.generate(asked("a"))))
        await peer.hear()
        client.shut_down()
        assert isinstance(await peer.hear(), Shutdown)
        with pytest.raises(RequestError, match="shutting down") as caught:
            await task
        assert (caught.value.status, caught.value.code) == (503, "shutting_down")
        with pytest.raises(RequestError, match="shutting down"):
            await anext(client.generate(asked("b")))

    joined(tmp_path, test)


def test_more_requests_than_may_be_open_are_refused_before_the_engine_hears_of_them(tmp_path: Path):
    async def test(client: EngineClient, peer: Peer) -> None:
        client.max_open = 2
        held = [asyncio.ensure_future(anext(client.generate(asked(name)))) for name in "ab"]
        assert {(await peer.hear()).request.id for _ in held} == {"a", "b"}
        with pytest.raises(RequestError, match="2 requests are open") as caught:
            await anext(client.generate(asked("c")))
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        await peer.say(Events([Event(request_id="a", done=True)]))
        await held[0]
        late = asyncio.ensure_future(anext(client.generate(asked("d"))))
        assert await peer.hear() == Add(asked("d"))
        for task in (held[1], late):
            task.cancel()

    joined(tmp_path, test)


def test_silence_is_the_time_since_work_came_or_a_step_was_finished(tmp_path: Path, clock: Clock):
    async def test(client: EngineClient, peer: Peer) -> None:
        clock.now += 20
        assert client.silent_seconds == 0
        stream = client.generate(asked("a"))
        first = asyncio.ensure_future(anext(stream))
        await peer.hear()
        assert client.silent_seconds == 0  # the idle time before does not count
        clock.now += 3
        assert client.silent_seconds == 3
        for news in (Beat(), Events([Event(request_id="a", token_ids=[1])])):
            await peer.say(news)
            await until(lambda: client.progress_at == clock.now)
            assert client.silent_seconds == 0
            clock.now += 2
            assert client.silent_seconds == 2
        counters = asyncio.ensure_future(client.counters(5))
        question = await peer.hear()
        assert isinstance(question, AskCounters)
        await peer.say(Counters(question.number, {}))
        assert await counters == {}
        assert client.silent_seconds == 2  # an answer is no step
        await first
        await stream.aclose()
        assert client.silent_seconds == 0

    joined(tmp_path, test)


def test_news_that_come_while_orders_are_sent_are_all_read(tmp_path: Path):
    """The socket's descriptor signals once for many messages, and sending can use the signal up."""

    async def test(client: EngineClient, peer: Peer) -> None:
        async def whole(name: str) -> int:
            return sum([len(event.token_ids) async for event in client.generate(asked(name))])

        async def play() -> None:
            for _ in range(200):
                order = await peer.hear()
                assert isinstance(order, Add)
                for step in range(5):
                    await peer.say(Events([Event(request_id=order.request.id, token_ids=[step], done=step == 4)]))

        player = asyncio.create_task(play())
        assert await asyncio.gather(*(whole(str(number)) for number in range(200))) == [5] * 200
        await player

    joined(tmp_path, test)


def test_times_are_those_of_the_engine_however_late_its_events_are_read(tmp_path: Path, clock: Clock):
    async def test(client: EngineClient, peer: Peer) -> None:
        stream = client.generate(asked("a"))
        first = asyncio.ensure_future(anext(stream))
        await peer.hear()
        usage = Usage(
            prompt_tokens=3, completion_tokens=2, audio_tokens_in=0, audio_seconds_in=0, audio_frames=0, audio_samples=0
        )
        clock.now += 1
        await peer.say(Events([Event(request_id="a", token_ids=[1])]))
        await first
        clock.now += 2
        await peer.say(Events([Event(request_id="a", token_ids=[2], done=True, usage=usage)]))
        await until(lambda: client.open_requests == 0)
        clock.now += 30
        assert (await anext(stream)).done
        for name, seconds in (("ttft_seconds", 1), ("e2e_seconds", 3)):
            histogram = client.histograms.by_name()[name]
            assert (histogram.cumulative()[-1], histogram.sum) == (1, seconds)

    joined(tmp_path, test)


def test_an_error_reaches_a_stream_after_the_events_before_it(tmp_path: Path):
    async def test(client: EngineClient, peer: Peer) -> None:
        stream = client.generate(asked("a"))
        first = asyncio.ensure_future(anext(stream))
        await peer.hear()
        await peer.say(Events([Event(request_id="a", token_ids=[1])]))
        await peer.say(Events([Event(request_id="a", token_ids=[2])]))
        assert (await first).token_ids == [1]
        await asyncio.sleep(0.1)
        client.fail("the engine process ended by signal 9")
        assert (await anext(stream)).token_ids == [2]
        with pytest.raises(EngineDeadError):
            await anext(stream)

    joined(tmp_path, test)


def test_a_request_to_an_engine_that_has_just_gone_blocks_nothing(tmp_path: Path):
    async def test(client: EngineClient, peer: Peer) -> None:
        peer.context.destroy(linger=0)
        while client._socket.poll(0, zmq.POLLOUT):  # until the end of the connection is seen
            await asyncio.sleep(0.01)
        waiting = asyncio.ensure_future(anext(client.generate(asked("a"))))
        await asyncio.sleep(0)
        client.shut_down()
        with pytest.raises(RequestError, match="shutting down"):
            await waiting

    joined(tmp_path, test)
