"""Many requests, half of them given up at random points: the rest get their solo answers, and everything comes back.

As a command: `python -m tests.e2e.soak --requests 2000`; prints one JSON object and fails if something is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

from engine.model.tiny import write_tiny
from tests.server.serving import Server, audio_file, base64_text, serving, tone, wait_until

KINDS = 40
SETTLE_S = 5.0
# What must stand after the storm where it stood before.
GAUGES = ("slots_free", "thinker_pages_free", "talker_pages_free", "requests_waiting", "requests_running", "http_open")


def bodies(seed: int) -> list[dict[str, object]]:
    """Distinct requests of every task, short and long, greedy and sampled; each always has the same answer."""
    rng = random.Random(seed)
    made = []
    for place in range(KINDS):
        body: dict[str, object] = {
            "text": " ".join(
                rng.choice(("tell", "me", "of", "rivers", "and", "stones", "é")) for _ in range(rng.randrange(1, 60))
            ),
            "max_tokens": rng.randrange(1, 24),
            "temperature": rng.choice((0.0, 0.8)),
            "seed": place,
            "ignore_eos": rng.random() < 0.5,
        }
        if rng.random() < 0.3:
            body["audio"] = [base64_text(audio_file(tone(rng.uniform(0.3, 2.0))))]
        if rng.random() < 0.25:
            body |= {
                "output": ["text", "audio"],
                "speech": {"max_frames": rng.randrange(1, 8), "seed": place, "codes": True},
            }
        elif rng.random() < 0.3:
            body |= {"stop": ["q", "th"], "frequency_penalty": 0.4}
        made.append(body)
    return made


@dataclass
class Footprint:
    """What the two processes of a server hold."""

    threads: int
    files: int
    resident: int

    @staticmethod
    def of(server: Server) -> Footprint:
        pair = [psutil.Process(pid) for pid in (server.process.pid, server.engine_pid())]
        return Footprint(
            sum(one.num_threads() for one in pair),
            sum(one.num_fds() for one in pair),
            sum(one.memory_info().rss for one in pair),
        )


@dataclass
class Storm:
    """One closed loop of clients against a server, and what came of it."""

    server: Server
    bodies: list[dict[str, object]]
    expected: list[object]
    rng: random.Random
    completed: int = 0
    given_up: int = 0
    wrong: list[str] = field(default_factory=list)

    async def run(self, requests: int, clients: int) -> None:
        """Send `requests` requests from `clients` clients at once."""
        left = iter(range(requests))
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
            await asyncio.gather(*(self._client(session, left) for _ in range(clients)))

    async def _client(self, session: aiohttp.ClientSession, left) -> None:
        for _ in left:
            place = self.rng.randrange(len(self.bodies))
            if self.rng.random() < 0.5:
                await self._give_up(session, self.bodies[place])
            else:
                await self._complete(session, place)

    async def _complete(self, session: aiohttp.ClientSession, place: int) -> None:
        async with session.post(self._url, json=self.bodies[place]) as reply:
            answer = await reply.json()
        self.completed += 1
        if reply.status != 200 or essence(answer) != self.expected[place]:
            self.wrong.append(f"request {place}: {reply.status} {str(answer)[:200]}")

    async def _give_up(self, session: aiohttp.ClientSession, body: dict[str, object]) -> None:
        """Leave before the answer, after some lines of a stream, or in the middle of the body."""
        self.given_up += 1
        how = self.rng.choice(("early", "stream", "stream", "body"))
        if how == "body":
            await self._half_a_body(body)
            return
        if how == "early":
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._post_and_wait(session, body), self.rng.uniform(0.0, 0.2))
            return
        async with session.post(self._url, json=body | {"stream": True}) as reply:
            for _ in range(self.rng.randrange(0, 6)):
                if not await reply.content.readline():
                    break
            reply.close()

    async def _post_and_wait(self, session: aiohttp.ClientSession, body: dict[str, object]) -> None:
        async with session.post(self._url, json=body) as reply:
            await reply.read()

    async def _half_a_body(self, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data[: len(data) // 2])
        await writer.drain()
        writer.close()

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}/generate"


def essence(answer: dict) -> object:
    """What must be the same in every company: tokens, text, codes, sound, ends."""
    audio = answer.get("audio") or {}
    return [answer.get(name) for name in ("token_ids", "text", "finish_reason", "audio_finish_reason")] + [
        audio.get("codes"),
        audio.get("data"),
    ]


def settled(server: Server) -> dict[str, float]:
    """The gauges once nothing is open any more."""
    assert wait_until(lambda: server.metrics()["requests_running"] == server.metrics()["http_open"] == 0, SETTLE_S)
    metrics = server.metrics()
    return {name: metrics[name] for name in GAUGES}


def soak(server: Server, requests: int, clients: int, seed: int = 0) -> dict[str, object]:
    """Run the storm in two halves; returns the figures. AssertionError when an answer is wrong or something is lost."""
    made = bodies(seed)
    expected = [essence(server.answer(**body)) for body in made]
    before = settled(server)
    storm = Storm(server, made, expected, random.Random(seed))
    asyncio.run(storm.run(max(requests // 20, 4 * clients), clients))  # pools of threads have grown to their size then
    footprint = Footprint.of(server)
    asyncio.run(storm.run(requests // 2, clients))
    settled(server)
    half = Footprint.of(server)
    asyncio.run(storm.run(requests - requests // 2, clients))
    after = settled(server)
    # The last sockets close a moment after their requests.
    wait_until(lambda: Footprint.of(server).files <= footprint.files, SETTLE_S)
    end = Footprint.of(server)
    figures: dict[str, object] = {
        "requests": requests,
        "completed": storm.completed,
        "given_up": storm.given_up,
        "wrong": storm.wrong[:5],
        "before": before,
        "after": after,
        "threads": [footprint.threads, half.threads, end.threads],
        "files": [footprint.files, half.files, end.files],
        "resident_mb": [round(one.resident / 2**20, 1) for one in (footprint, half, end)],
        "growth_of_second_half": round(end.resident / half.resident - 1, 4),
    }
    assert not storm.wrong, figures
    assert after == before, figures
    assert end.threads <= footprint.threads and end.files <= footprint.files, figures
    return figures


def main() -> None:
    """Soak a server of the small model and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        write_tiny(model)
        with serving(model, Path(folder) / "log.txt") as server:
            figures = soak(server, asked.requests, asked.clients, asked.seed)
    print(json.dumps(figures, indent=2))
    if figures["growth_of_second_half"] >= 0.02:
        sys.exit(f"memory grew by {figures['growth_of_second_half']:.1%} over the second half")


if __name__ == "__main__":
    main()
