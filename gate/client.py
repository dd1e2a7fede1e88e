"""The load client: warm waves, then a closed loop of c clients; what arrives is stamped and nothing else is done.

Lives here: request bodies, the loop, and turning raw lines into Records. Lines are decoded after the cell is over, so that
decoding one reply never delays the stamp of another.
"""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import msgspec

from gate.cell import SPEECH_TASKS, Cell
from gate.record import EventStamp, Item, Record

TIMEOUTS_IN_A_ROW = 2  # after so many, a cell's remaining requests are not sent: a hung server would cost hours
_LAG_TICK_S = 0.02


@dataclass(frozen=True)
class Limits:
    """Time allowed for a whole request, and between two arrivals of its stream (seconds)."""

    request_s: float = 600.0
    silence_s: float = 120.0


@dataclass(frozen=True)
class Target:
    """Whom the client drives and under which name: the server's address, the session, its arm, and its clock's origin."""

    url: str
    session: str
    arm: str
    origin_ns: int
    limits: Limits = Limits()


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
    """A cell's records, warm ones first, and the longest time (ms) that the client's own loop was late meanwhile."""

    records: list[Record]
    client_lag_ms: float


class _Top2(msgspec.Struct):
    token_ids: list[int]
    logprobs: list[float]


class _Trace(msgspec.Struct):
    step: int
    bucket: int
    rows: int


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    audio_samples: int | None = None
    audio_seconds_in: float = 0.0


class _Fault(msgspec.Struct):
    message: str = ""
    field: str | None = None
    code: str = ""


class _Line(msgspec.Struct):
    token_ids: list[int] = []
    text: str = ""
    logprobs: list[_Top2] = []
    trace: list[_Trace] = []
    pcm: bytes = b""
    sample_rate: int | None = None
    finished: bool = False
    finish_reason: str | None = None
    audio_finish_reason: str | None = None
    usage: _Usage | None = None
    error: _Fault | None = None


_DECODER = msgspec.json.Decoder(_Line)


def request_body(cell: Cell, item: Item, root: Path) -> bytes:
    """The JSON body for one item in one cell; audio paths are relative to `root` unless absolute."""
    speech = cell.task in SPEECH_TASKS
    body: dict[str, object] = {
        "text": item.text or "",
        "output": ["text", "audio"] if speech else ["text"],
        "stream": True,
        "max_tokens": cell.max_tokens,
        "temperature": 0.0,
        "ignore_eos": cell.ignore_eos,
    }
    if item.audio is not None:
        body["audio"] = [base64.b64encode((root / item.audio).read_bytes()).decode("ascii")]
    if cell.greedy:
        body |= {"top_logprobs": 2, "trace": True}
    if speech:
        frames = {} if cell.max_frames is None else {"max_frames": cell.max_frames}
        body["speech"] = {**frames, "ignore_eos": cell.ignore_eos}
    return msgspec.json.encode(body)


def measure(target: Target, cell: Cell, warm: Sequence[Item], items: Sequence[Item], root: Path) -> Measured:
    """Run a cell: `warm` items in waves of c, then `items` in a closed loop of c clients. Failures are Records."""
    warm_asks = [Ask(item, request_body(cell, item, root)) for item in warm]
    asks = [Ask(item, request_body(cell, item, root)) for item in items]
    gc.collect()
    gc.freeze()  # a collection over everything loaded so far would show as a stall of the server
    try:
        raws, lag_ms = asyncio.run(_drive(target, cell, warm_asks, asks))
    finally:
        gc.unfreeze()
    return Measured([_record(raw, target, cell) for raw in raws], lag_ms)


async def _drive(target: Target, cell: Cell, warm: list[Ask], asks: list[Ask]) -> tuple[list[_Raw], float]:
    limits = aiohttp.ClientTimeout(total=target.limits.request_s, sock_read=target.limits.silence_s)
    async with (
        _lag_watch() as lag,
        aiohttp.ClientSession(timeout=limits, connector=aiohttp.TCPConnector(limit=0)) as http,
    ):
        raws: list[_Raw] = []
        for start in range(0, len(warm), cell.concurrency):
            wave = warm[start : start + cell.concurrency]
            raws += await _loop(http, target, list(enumerate(wave, start)), cell.concurrency, warm=True)
        raws += await _loop(http, target, list(enumerate(asks)), cell.concurrency, warm=False)
        return raws, max(lag, default=0.0)


async def _loop(
    http: aiohttp.ClientSession, target: Target, asks: list[tuple[int, Ask]], clients: int, warm: bool
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
                await _request(http, target, raw)
            done.append(raw)

    await asyncio.gather(*(one(client) for client in range(clients)))
    return sorted(done, key=lambda raw: raw.index)


def _given_up(done: Sequence[_Raw]) -> bool:
    last = done[-TIMEOUTS_IN_A_ROW:]
    stuck = len(last) == TIMEOUTS_IN_A_ROW and all(raw.timed_out for raw in last)
    return stuck or (bool(done) and (done[-1].error or "").startswith("not sent"))


async def _request(http: aiohttp.ClientSession, target: Target, raw: _Raw) -> None:
    headers = {"Content-Type": "application/json", "Accept": "application/x-ndjson"}
    raw.t0_ns = time.perf_counter_ns()
    try:
        async with http.post(f"{target.url}/generate", data=raw.ask.body, headers=headers) as reply:
            await _collect(reply, raw)
            if reply.status != 200:
                raw.error = _refusal(reply.status, b"".join(line for _, line in raw.lines))
    except TimeoutError:
        raw.timed_out = True
        raw.error = (
            f"timed out (limits: {target.limits.request_s:g} s a request, {target.limits.silence_s:g} s of silence)"
        )
    except (aiohttp.ClientError, OSError) as error:
        raw.error = f"{type(error).__name__}: {error}"
    raw.end_ns = raw.lines[-1][0] if raw.lines and raw.error is None else time.perf_counter_ns()


async def _collect(reply: aiohttp.ClientResponse, raw: _Raw) -> None:
    """Stamp each arrival and cut it into lines; lines that one arrival completes share its stamp."""
    rest = b""
    async for data in reply.content.iter_any():
        stamp = time.perf_counter_ns()
        *lines, rest = (rest + data).split(b"\n")
        raw.lines += [(stamp, line) for line in lines if line.strip()]
    if rest.strip():
        raw.lines.append((time.perf_counter_ns(), rest))


def _refusal(status: int, body: bytes) -> str:
    try:
        fault = _DECODER.decode(body).error
    except msgspec.MsgspecError:
        fault = None
    return f"HTTP {status}: {_sentence(fault) if fault else body[:200].decode('utf-8', errors='replace')}"


def _sentence(fault: _Fault) -> str:
    where = f" ({fault.field})" if fault.field else ""
    return f"{fault.code or 'error'}{where}: {fault.message}"


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


@dataclass
class _Sum:
    """A reply added up over its lines."""

    events: list[EventStamp] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    top2: list[tuple[int, int, float, float]] = field(default_factory=list)
    trace: list[tuple[int, int, int]] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    pcm_samples: int = 0
    pcm_hash: str | None = None
    sample_rate: int = 24000  # of the contract; what the stream states counts
    last: _Line = field(default_factory=_Line)


def _record(raw: _Raw, target: Target, cell: Cell) -> Record:
    added, error = _add_up(raw)
    usage = added.last.usage or _Usage()
    error = raw.error or error or _shortfall(cell, added, usage)
    return Record(
        session=target.session,
        arm=target.arm,
        cell=cell.name,
        index=raw.index,
        warm=raw.warm,
        item=raw.ask.item.id,
        task=cell.task,
        t0_ns=max(raw.t0_ns - target.origin_ns, 0),
        client=raw.client,
        events=added.events,
        e2e_us=(raw.end_ns - raw.t0_ns) // 1000 if raw.t0_ns else 0,
        ok=error is None,
        error=error,
        finish_reason=added.last.finish_reason,
        audio_finish_reason=added.last.audio_finish_reason,
        token_ids=added.token_ids,
        top2=added.top2,
        trace=added.trace,
        text="".join(added.text),
        pcm_samples=added.pcm_samples,
        pcm_sha256=added.pcm_hash,
        audio_in_s=raw.ask.item.audio_seconds,
        completion_tokens=usage.completion_tokens,
        prompt_tokens=usage.prompt_tokens,
        sample_rate=added.sample_rate,
    )


def _add_up(raw: _Raw) -> tuple[_Sum, str | None]:
    """Decode a request's lines; the second value says what was wrong with the stream, if anything was."""
    added, pcm = _Sum(), hashlib.sha256()
    if raw.error is not None and raw.error.startswith("HTTP"):
        return added, raw.error
    try:
        for stamp, line in _decoded(raw):
            if line.error is not None:
                return added, _sentence(line.error)
            added.last = line
            _add_line(added, line, (stamp - raw.t0_ns) // 1000)
            pcm.update(line.pcm)
    except msgspec.MsgspecError as error:
        return added, f"a line of the stream is not what the contract says: {error}"
    added.pcm_hash = pcm.hexdigest() if added.pcm_samples else None
    return added, None if added.last.finished else "the stream ended without a final line"


def _decoded(raw: _Raw) -> Iterator[tuple[int, _Line]]:
    for stamp, line in raw.lines:
        yield stamp, _DECODER.decode(line)


def _add_line(added: _Sum, line: _Line, t_us: int) -> None:
    samples = len(line.pcm) // 2  # 16-bit mono
    if line.token_ids or line.text or samples:
        added.events.append(EventStamp(t_us, len(line.token_ids), len(line.text), samples))
    added.token_ids += line.token_ids
    added.text.append(line.text)
    added.pcm_samples += samples
    added.sample_rate = line.sample_rate or added.sample_rate
    added.trace += [(row.step, row.bucket, row.rows) for row in line.trace]
    added.top2 += [(*top.token_ids[:2], *top.logprobs[:2]) for top in line.logprobs]  # type: ignore[misc]


def _shortfall(cell: Cell, added: _Sum, usage: _Usage) -> str | None:
    """What makes a complete reply a failure all the same; short output and absent audio are for the verdict to judge."""
    if usage.completion_tokens == 0:
        return "no tokens"
    if cell.task in SPEECH_TASKS and usage.audio_samples not in (None, added.pcm_samples):
        return f"audio lost: usage says {usage.audio_samples} samples, {added.pcm_samples} arrived"
    return None
