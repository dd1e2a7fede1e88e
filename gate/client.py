"""The load client: warm waves, then a closed loop of c clients; what arrives is stamped and nothing else is done.

Lives here: the loop, and turning raw lines into Records. Lines are read after the cell is over, so that reading one reply never
delays the stamp of another. It runs in a process of its own (gate/load.py).
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from gate.cell import IDS, SPEECH_TASKS, Cell
from gate.door import Door, Reply
from gate.generate import GenerateDoor
from gate.openai import CHAT, COMPLETIONS, OpenAiDoor
from gate.record import Item, JudgePlan, Lag, Record

TIMEOUTS_IN_A_ROW = 2  # after so many, a cell's remaining requests are not sent: a hung server would cost hours
_LAG_TICK_S = 0.01


@dataclass(frozen=True)
class Limits:
    """Time allowed for a whole request, and between two arrivals of its stream (seconds)."""

    request_s: float = 600.0
    silence_s: float = 120.0


@dataclass(frozen=True)
class Target:
    """Whom the client drives and under which name: the server's address, the session, its arm, and its clock's origin.

    `door` is generate or openai; at the latter `model` is the served model's name and `ours` says that the server takes our
    extensions. `origin_ns` is of time.perf_counter_ns(), which all processes of a machine share.
    """

    url: str
    session: str
    arm: str
    origin_ns: int
    limits: Limits = Limits()
    door: str = "generate"
    model: str = ""
    ours: bool = True


@dataclass(frozen=True)
class Ask:
    """One request ready to be written: the item it came from and the encoded body."""

    item: Item
    body: bytes


@dataclass
class _Raw:
    """What one request left behind: stamps (ns) with raw lines, and how it ended."""

    ask: Ask
    index: int
    client: int
    warm: bool
    t0_ns: int = 0
    end_ns: int = 0
    lines: list[tuple[int, bytes]] = field(default_factory=list)
    error: str | None = None
    timed_out: bool = False


@dataclass(frozen=True)
class Measured:
    """A cell's records, warm ones first, how late the client's own loop was meanwhile, and the PCM to be judged by name."""

    records: list[Record]
    lag: Lag
    speech: dict[str, bytes] = field(default_factory=dict)


def door_of(target: Target, cell: Cell) -> Door:
    """The door at which a target is asked for a cell."""
    if target.door != "openai":
        return GenerateDoor()
    return OpenAiDoor(target.model, target.ours, COMPLETIONS if cell.workload == IDS else CHAT)


def measure(
    target: Target,
    cell: Cell,
    warm: Sequence[Item],
    items: Sequence[Item],
    root: Path,
    headers: dict[str, str] | None = None,
    judge: JudgePlan | None = None,
) -> Measured:
    """Run a cell: `warm` items in waves of c, then `items` in a closed loop of c clients. Failures are Records.

    `headers` go with every request and are written nowhere. The speech that `judge` takes comes with the records.
    """
    door = door_of(target, cell)
    warm_asks = [Ask(item, door.body(cell, item, root)) for item in warm]
    asks = [Ask(item, door.body(cell, item, root)) for item in items]
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in the window would show as a stall of the server
    try:
        raws, late_ms = asyncio.run(_Drive(target, door, headers or {}).cell(cell, warm_asks, asks))
    finally:
        gc.enable()
        gc.unfreeze()
    records: list[Record] = []
    speech: dict[str, bytes] = {}
    for raw in raws:
        record, pcm = _record(raw, target, cell, door)
        records.append(record)
        if judge is not None and record.speech is not None and judge.takes(record):
            speech[record.speech] = pcm
    return Measured(records, lag_of(late_ms), speech)


def lag_of(late_ms: Sequence[float]) -> Lag:
    """The median, 99th percentile (nearest rank) and greatest of a timer's delays in ms; zeros for a cell without a tick."""
    if not late_ms:
        return Lag(0.0, 0.0, 0.0)
    ranked = sorted(max(late, 0.0) for late in late_ms)
    p50, p99 = (ranked[math.ceil(share * len(ranked)) - 1] for share in (0.50, 0.99))
    return Lag(round(p50, 3), round(p99, 3), round(ranked[-1], 3))


@dataclass(frozen=True)
class _Drive:
    """One cell on its way: whom it asks, at which door, with which headers."""

    target: Target
    door: Door
    headers: dict[str, str]

    async def cell(self, cell: Cell, warm: list[Ask], asks: list[Ask]) -> tuple[list[_Raw], list[float]]:
        """Warm waves, then the measured loop; the delays (ms) are those of the loop alone."""
        limits = aiohttp.ClientTimeout(total=self.target.limits.request_s, sock_read=self.target.limits.silence_s)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=limits, connector=connector, headers=self.headers) as http:
            raws: list[_Raw] = []
            for start in range(0, len(warm), cell.concurrency):
                wave = warm[start : start + cell.concurrency]
                raws += await self._loop(http, list(enumerate(wave, start)), cell.concurrency, warm=True)
            async with _lag_watch() as late_ms:
                raws += await self._loop(http, list(enumerate(asks)), cell.concurrency, warm=False)
            return raws, late_ms

    async def _loop(
        self, http: aiohttp.ClientSession, asks: list[tuple[int, Ask]], clients: int, warm: bool
    ) -> list[_Raw]:
        """A closed loop: each of c clients takes the next request as soon as its last one ended."""
        queue = iter(asks)
        done: list[_Raw] = []

        async def one(client: int) -> None:
            for index, ask in queue:
                raw = _Raw(ask, index, client, warm)
                if _given_up(done):
                    raw.error = f"not sent: {TIMEOUTS_IN_A_ROW} requests in a row had timed out"
                else:
                    await self._request(http, raw)
                done.append(raw)

        await asyncio.gather(*(one(client) for client in range(clients)))
        return sorted(done, key=lambda raw: raw.index)

    async def _request(self, http: aiohttp.ClientSession, raw: _Raw) -> None:
        limits, headers = self.target.limits, {"Content-Type": "application/json", "Accept": self.door.accept}
        raw.t0_ns = time.perf_counter_ns()
        try:
            async with http.post(self.target.url + self.door.path, data=raw.ask.body, headers=headers) as reply:
                await _collect(reply, raw)
                if reply.status != 200:
                    words = self.door.refusal(b"".join(line for _, line in raw.lines))
                    raw.error = f"HTTP {reply.status}: {words}"
        except TimeoutError:
            raw.timed_out = True
            raw.error = f"timed out (limits: {limits.request_s:g} s a request, {limits.silence_s:g} s of silence)"
        except (aiohttp.ClientError, OSError) as error:
            raw.error = f"{type(error).__name__}: {error}"
        raw.end_ns = raw.lines[-1][0] if raw.lines and raw.error is None else time.perf_counter_ns()


def _given_up(done: Sequence[_Raw]) -> bool:
    last = done[-TIMEOUTS_IN_A_ROW:]
    stuck = len(last) == TIMEOUTS_IN_A_ROW and all(raw.timed_out for raw in last)
    return stuck or (bool(done) and (done[-1].error or "").startswith("not sent"))


async def _collect(reply: aiohttp.ClientResponse, raw: _Raw) -> None:
    """Stamp each arrival and cut it into lines; lines that one arrival completes share its stamp."""
    rest = b""
    async for data in reply.content.iter_any():
        stamp = time.perf_counter_ns()
        *lines, rest = (rest + data).split(b"\n")
        raw.lines += [(stamp, line) for line in lines if line.strip()]
    if rest.strip():
        raw.lines.append((time.perf_counter_ns(), rest))


@asynccontextmanager
async def _lag_watch() -> AsyncIterator[list[float]]:
    """Collect how late (ms) a timer of the client's own loop fired: the proof that the client was not the bottleneck."""
    late: list[float] = []

    async def tick() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_LAG_TICK_S)
            late.append((time.perf_counter() - before - _LAG_TICK_S) * 1e3)

    ticker = asyncio.create_task(tick())
    try:
        yield late
    finally:
        ticker.cancel()


def _record(raw: _Raw, target: Target, cell: Cell, door: Door) -> tuple[Record, bytes]:
    """The record of a request, and the PCM that came."""
    refused = raw.error is not None and raw.error.startswith("HTTP")
    reply = Reply() if refused else door.read([((stamp - raw.t0_ns) // 1000, line) for stamp, line in raw.lines])
    error = raw.error or reply.error or _shortfall(cell, reply)
    record = Record(
        session=target.session,
        arm=target.arm,
        cell=cell.name,
        index=raw.index,
        warm=raw.warm,
        item=raw.ask.item.id,
        task=cell.task,
        t0_ns=max(raw.t0_ns - target.origin_ns, 0),
        client=raw.client,
        events=reply.events,
        e2e_us=(raw.end_ns - raw.t0_ns) // 1000 if raw.t0_ns else 0,
        ok=error is None,
        error=error,
        finish_reason=reply.finish_reason,
        audio_finish_reason=reply.audio_finish_reason,
        token_ids=reply.token_ids,
        top2=reply.top2,
        trace=reply.trace,
        text=reply.text,
        pcm_samples=reply.pcm_samples,
        pcm_sha256=reply.pcm_sha256,
        audio_in_s=raw.ask.item.audio_seconds,
        completion_tokens=reply.completion_tokens,
        prompt_tokens=reply.prompt_tokens,
        sample_rate=reply.sample_rate,
    )
    return record, reply.pcm


def _shortfall(cell: Cell, reply: Reply) -> str | None:
    """What makes a complete reply a failure all the same; short output and absent audio are for the verdict to judge."""
    if reply.completion_tokens == 0:
        return "no tokens"
    counted = max(reply.completion_tokens, len(reply.token_ids))
    if counted > cell.max_tokens:
        return f"counted more tokens than asked for: {counted} of {cell.max_tokens}"
    if cell.task in SPEECH_TASKS and reply.stated_samples not in (None, reply.pcm_samples):
        return f"audio lost: usage says {reply.stated_samples} samples, {reply.pcm_samples} arrived"
    return None
