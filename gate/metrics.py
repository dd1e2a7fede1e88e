"""Metrics: what one cell of one session measured, as numbers by the names of the registry (`gate.cell.METRICS`).

A session's value is the sample of all statistics; requests are never samples. Failed requests enter `failed`, `issued` and
the window, and no other number. Times: client clock, µs in records, ms in metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from gate.cell import METRICS, SPEECH_TASKS, Cell
from gate.record import Record, RunData

LONG_GAP_MS = 150.0  # a listener or reader notices a pause about this long
IDENTITY_LIMIT = 0.03  # more says a stall, a drain tail, or a wrong token count
# See late_clients. Two processes on one core take turns of some milliseconds: a timer that is 5 ms late says no more than that.
LATE_MS, LATE_SHARE, LATE_LEAST_MS = 20.0, 0.1, 5.0


class SessionMetric(msgspec.Struct, frozen=True):
    """One number of one session: a row of the long table session × cell × metric."""

    session: str
    arm: str
    slot: int
    cell: str
    metric: str
    value: float


class LateClient(msgspec.Struct, frozen=True):
    """A cell of a session whose client's own loop was late: the 99th percentile of its delay, over its limit (ms)."""

    session: str
    cell: str
    p99_ms: float
    limit_ms: float


class PromptTokens(msgspec.Struct, frozen=True):
    """What both arms counted for the prompts of a cell: means per request, and how many of `of` requests they agree on."""

    cell: str
    base: float
    head: float
    equal: int
    of: int


def better_is_up(metric: str) -> bool:
    """Whether a larger value of a registered metric is better; ValueError for a plain fact."""
    if METRICS[metric].better == "none":
        raise ValueError(f"metric {metric!r} is a plain fact without a better direction; compare one that has one")
    return METRICS[metric].better == "up"


def measured(records: Iterable[Record], session: str, cell: str) -> list[Record]:
    """The measured (not warm) records of one cell in one session, by index."""
    found = [record for record in records if record.session == session and record.cell == cell and not record.warm]
    return sorted(found, key=lambda record: record.index)


def ttft_us(record: Record) -> int | None:
    """µs to the first event that carries a text token; its characters may still wait for the rest of a UTF-8 sequence."""
    return next((event.t_us for event in record.events if event.tokens > 0), None)


def ttfa_us(record: Record) -> int | None:
    """µs to the first event that carries a PCM sample."""
    return next((event.t_us for event in record.events if event.pcm_samples > 0), None)


def itl_ms(record: Record) -> float | None:
    """(e2e − TTFT) ÷ (n − 1) in ms with n from the server's usage count; None for fewer than two tokens."""
    first = ttft_us(record)
    if first is None or record.completion_tokens < 2:
        return None
    return (record.e2e_us - first) / (record.completion_tokens - 1) / 1e3


def audio_out_s(record: Record) -> float:
    """Seconds of output audio that arrived."""
    return record.pcm_samples / record.sample_rate


def chunks_us(record: Record) -> dict[int, int]:
    """Arrivals with text tokens: {µs: tokens}; lines that arrived at once are one chunk."""
    chunks: dict[int, int] = {}
    for event in record.events:
        if event.tokens > 0:
            chunks[event.t_us] = chunks.get(event.t_us, 0) + event.tokens
    return chunks


def window_s(records: Sequence[Record]) -> float:
    """Seconds from the first send to the last event of the records; requests that were never sent don't stretch it."""
    sent = [record for record in records if record.e2e_us > 0]
    if not sent:
        return 0.0
    first = min(record.t0_ns for record in sent)
    last = max(record.t0_ns + record.e2e_us * 1000 for record in sent)
    return (last - first) / 1e9


def cell_metrics(cell: Cell, records: Sequence[Record]) -> dict[str, float]:
    """All metrics of a cell's measured records in one session; a metric without a value is absent."""
    good = [record for record in records if record.ok]
    window = window_s(records)
    found = {
        "issued": float(len(records)),
        "failed": float(len(records) - len(good)),
        "tokens out": float(sum(record.completion_tokens for record in good)),
        "audio in": sum(record.audio_in_s for record in good),
        "audio out": sum(audio_out_s(record) for record in good),
        "window": window,
    }
    if not good or window <= 0:
        return found
    found |= {
        "tok/s": found["tokens out"] / window,
        **_spread("e2e", [record.e2e_us / 1e3 for record in good], (50, 99)),
        **_spread("TTFT", [first / 1e3 for record in good if (first := ttft_us(record)) is not None], (50, 99)),
    }
    if found["audio in"]:
        found["RTFx"] = found["audio in"] / window
    return found | (_speech(good, window) if cell.task in SPEECH_TASKS else _tokens(cell, good, window))


def _spread(name: str, values: Sequence[float], percents: tuple[int, ...]) -> dict[str, float]:
    return {f"{name} p{percent}": float(np.percentile(values, percent)) for percent in percents if values}


def _speech(good: Sequence[Record], window: float) -> dict[str, float]:
    seconds = sum(audio_out_s(record) for record in good)
    factors = [record.e2e_us / 1e6 / audio_out_s(record) for record in good if record.pcm_samples]
    firsts = [first / 1e3 for record in good if (first := ttfa_us(record)) is not None]
    return {"audio-s/s": seconds / window, **_spread("TTFA", firsts, (50, 99)), **_spread("RTF", factors, (50, 95))}


def _tokens(cell: Cell, good: Sequence[Record], window: float) -> dict[str, float]:
    itls = [itl for record in good if (itl := itl_ms(record)) is not None]
    chunks = [chunks_us(record) for record in good]
    gaps = [gap for times in chunks for gap in np.diff(sorted(times)) / 1e3]
    found = {
        "ITL undefined": float(len(good) - len(itls)),
        **_spread("ITL", itls, (50,)),
        **_spread("gap", gaps, (50, 99)),
        "gaps > 150 ms": float(sum(gap > LONG_GAP_MS for gap in gaps)),
    }
    if gaps:
        found["gap max"] = float(max(gaps))
    if any(chunks):
        found["tokens per chunk"] = sum(sum(times.values()) for times in chunks) / sum(len(times) for times in chunks)
    residual = identity_residual(cell.concurrency, good, window)
    return found if residual is None else found | {"identity residual": residual}


def identity_residual(concurrency: int, good: Sequence[Record], window: float) -> float | None:
    """How far tok/s is from what c clients must give by their own per-request means (0.0: exactly); None if undefined."""
    firsts = [first / 1e6 for record in good if (first := ttft_us(record)) is not None]
    itls = [itl / 1e3 for record in good if (itl := itl_ms(record)) is not None]
    if not firsts or not itls or window <= 0:
        return None
    tokens = float(np.mean([record.completion_tokens for record in good]))
    request_s = float(np.mean(firsts)) + (tokens - 1) * float(np.mean(itls))
    clients = min(concurrency, len(good))
    return (tokens * len(good) / window) / (clients * tokens / request_s) - 1


def is_finished(run: RunData, cell: Cell, records: Sequence[Record]) -> bool:
    """Whether a session got through all of a cell's requests (failed ones included)."""
    return len(records) >= cell.requests


def session_metrics(run: RunData) -> list[SessionMetric]:
    """The long table of a run: every metric of every finished cell of every session, in the order of slots and cells."""
    rows = []
    for session in sorted(run.sessions, key=lambda session: session.slot):
        for cell in run.plan.cells:
            records = measured(run.records, session.id, cell.name)
            if not is_finished(run, cell, records):
                continue
            found = cell_metrics(cell, records)
            place = (session.id, session.arm, session.slot, cell.name)
            rows += [SessionMetric(*place, name, found[name]) for name in METRICS if name in found]
    return rows


def late_clients(run: RunData, metrics: Sequence[SessionMetric]) -> list[LateClient]:
    """Every cell whose client lag p99 is over 20 ms, or over a tenth of its e2e p50 where that is less (5 ms at least)."""
    wholes = {(row.session, row.cell): row.value for row in metrics if row.metric == "e2e p50"}
    found = []
    for session in sorted(run.sessions, key=lambda session: session.slot):
        for cell, lag in session.client_lag.items():
            whole = wholes.get((session.id, cell))
            limit = LATE_MS if whole is None else min(LATE_MS, max(LATE_SHARE * whole, LATE_LEAST_MS))
            if lag.p99 > limit:
                found.append(LateClient(session.id, cell, lag.p99, round(limit, 3)))
    return found


def prompt_tokens(run: RunData) -> list[PromptTokens]:
    """For each cell that both arms answered: the prompt tokens of the same requests, by each arm's first session with it."""
    rows = []
    for cell in run.plan.cells:
        base, head = (_first_counts(run, cell, arm) for arm in ("base", "head"))
        both = sorted(set(base) & set(head))
        if both:
            ours, theirs = (float(np.mean([counts[index] for index in both])) for counts in (base, head))
            equal = sum(base[index] == head[index] for index in both)
            rows.append(PromptTokens(cell.name, ours, theirs, equal, len(both)))
    return rows


def _first_counts(run: RunData, cell: Cell, arm: str) -> dict[int, int]:
    for session in sorted(run.sessions, key=lambda session: session.slot):
        if session.arm == arm:
            good = [record for record in measured(run.records, session.id, cell.name) if record.ok]
            if good:
                return {record.index: record.prompt_tokens for record in good}
    return {}
