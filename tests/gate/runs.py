"""Runs made by hand: sessions whose every stamp is chosen, so that what the gate must say about them is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from gate.cell import Cell
from gate.record import ArmInfo, EventStamp, Item, Lag, Plan, Record, RunData, SessionInfo

SOURCE = {"base": "ba5e" * 16, "head": "4ead" * 16}
WEIGHTS = "da7a" * 16
WORDS = (
    "the kettle is on the stove",
    "please turn left after the second bridge",
    "she walked seven miles before breakfast",
    "nobody answered the telephone",
)

T2T = Cell("T2T@1", "T2T", 1, 4, 1, 11, True, None, "tok/s", "prompts", True)
A2T = Cell("A2T@1", "A2T", 1, 4, 1, 32, False, None, "RTFx", "clips", True)
T2S = Cell("T2S@1", "T2S", 1, 4, 1, 4, True, 8, "audio-s/s", "prompts", True)

Change = Callable[[Record], Record | None]


def token_record(
    session: str, cell: Cell, index: int, t0_ns: int, ttft_us: int, gap_us: int, tokens: int, **changes: object
) -> Record:
    """A successful text record: one token an event, the first after `ttft_us`, the others `gap_us` apart."""
    events = [EventStamp(ttft_us + step * gap_us, 1, 4, 0) for step in range(tokens)]
    values: dict[str, object] = {
        "session": session,
        "arm": session.partition("-")[2],
        "cell": cell.name,
        "index": index,
        "warm": False,
        "item": f"{cell.workload[0]}{index:02d}",
        "task": cell.task,
        "t0_ns": t0_ns,
        "client": index % cell.concurrency,
        "events": events,
        "e2e_us": events[-1].t_us,
        "ok": True,
        "error": None,
        "finish_reason": "length" if cell.ignore_eos else "stop",
        "audio_finish_reason": None,
        "token_ids": [100 + 10 * index + step for step in range(tokens)],
        "top2": [(100 + 10 * index + step, 7, -0.1, -1.6) for step in range(tokens)],
        "trace": [],
        "text": "",
        "pcm_samples": 0,
        "pcm_sha256": None,
        "audio_in_s": 0.0,
        "completion_tokens": tokens,
        "prompt_tokens": 5,
    }
    return Record(**{**values, **changes})  # type: ignore[arg-type]


def answer(session: str, cell: Cell, index: int, t0_ns: int, gap_us: int) -> Record:
    """What a sound server answers to request `index`: 11 tokens, a transcript, or 4 tokens with 0.64 s of speech."""
    if cell.task == "A2T":
        return token_record(
            session, cell, index, t0_ns, 10_000, gap_us, 6, text=WORDS[index % len(WORDS)], audio_in_s=2.0
        )
    record = token_record(session, cell, index, t0_ns, 10_000, gap_us, cell.max_tokens)
    if cell.task != "T2S":
        return record
    pcm = EventStamp(record.e2e_us + 20_000, 0, 0, 15360)
    changes = {"events": [*record.events, pcm], "e2e_us": pcm.t_us, "pcm_samples": 15360, "pcm_sha256": f"{index:064d}"}
    return msgspec.structs.replace(record, **changes, audio_finish_reason="length", text=WORDS[index % len(WORDS)])


def one_client(session: str, cell: Cell, gap_us: int) -> list[Record]:
    """A warm record and the cell's measured ones, each sent the moment the last one ended."""
    warm = msgspec.structs.replace(answer(session, cell, 0, 0, gap_us * 3), warm=True)
    records, now = [warm], 1_000_000_000
    for index in range(cell.requests):
        records.append(answer(session, cell, index, now, gap_us))
        now += records[-1].e2e_us * 1000
    return records


def session_info(name: str, slot: int, **changes: object) -> SessionInfo:
    """A session that went well on a quiet machine of two cores, 20 s long."""
    arm = name.partition("-")[2]
    host = {
        "cpu_model": "Test CPU",
        "cores_allowed": [0, 1],
        "memory_total_bytes": 8 * 2**30,
        "platform": "Linux-test",
        "python": "3.11.9",
        "load_1m": 0.25,
        "throttled_s": 1.0,
        "heavy_processes": [],
        "gpus": [],
    }
    values: dict[str, object] = {
        "id": name,
        "arm": arm,
        "slot": slot,
        "commit": {"base": "b" * 40, "head": "c" * 40}[arm],
        "dirty": False,
        "source_digest": SOURCE[arm],
        "weights_digest": WEIGHTS,
        "boot_seconds": 2.5,
        "info": {
            "api": ["generate/1"],
            "tasks": ["T2T", "A2T", "T2S", "A2S"],
            "versions": {"python": "3.11.9", "torch": "2.13.0"},
            "switches": {"plan-cache": True, "launch-ahead": arm == "base"},
        },
        "host_before": {**host, "monotonic_s": 100.0 + 30 * slot},
        "host_after": {**host, "monotonic_s": 120.0 + 30 * slot},
        "counters": {"T2T@1 walkgate_steps_total": 44.0},
        "client_lag": {"T2T@1": Lag(0.1, 0.6, 1.5)},
        "problems": [],
    }
    return SessionInfo(**{**values, **changes})  # type: ignore[arg-type]


def make_run(
    gaps: Mapping[str, Sequence[int]],
    cells: Sequence[Cell] = (T2T,),
    change: Change = lambda record: record,
    info: Callable[[SessionInfo], SessionInfo] = lambda session: session,
) -> RunData:
    """A run whose sessions have the given gaps (µs between tokens), in the order base head head base base …

    `change` may alter or drop any record, `info` any session.
    """
    left = {arm: list(values) for arm, values in gaps.items()}
    blocks = ("base", "head", "head", "base") * max(map(len, left.values()))
    order = [arm for place, arm in enumerate(blocks) if blocks[:place].count(arm) < len(left.get(arm, []))]
    sessions, records = [], []
    for slot, arm in enumerate(order):
        sessions.append(info(session_info(f"{slot + 1:02d}-{arm}", slot)))
        gap_us = left[arm].pop(0)
        made = [record for cell in cells for record in one_client(sessions[-1].id, cell, gap_us)]
        records += [kept for record in made if (kept := change(record)) is not None]
    return RunData(make_plan(order, cells, max(map(len, gaps.values()))), sessions, records, make_items())


def make_plan(order: Sequence[str], cells: Sequence[Cell], sessions_per_arm: int) -> Plan:
    """The plan of a hand-made run."""
    arms = (
        ArmInfo("base", "main", "b" * 40, False, SOURCE["base"], [], {}, "commit"),
        ArmInfo("head", "HEAD", "c" * 40, False, SOURCE["head"], ["--disable", "launch-ahead"], {}, "commit"),
    )
    return Plan(
        created="2026-01-02T03:04:05Z",
        arms=arms,
        cells=list(cells),
        set_name="quick",
        sessions_per_arm=sessions_per_arm,
        order=list(order),
        seed=7,
        model_path="models/tiny",
        model_digest=WEIGHTS,
        workload_hash="ab" * 32,
        workload_counts={"prompts": 4, "clips": 4},
    )


def make_items() -> dict[str, Item]:
    """Four prompts and four clips; the clips are spoken by two speakers."""
    prompts = [Item(f"p{n:02d}", f"Say {n}.", None, 0.0, None, None) for n in range(4)]
    clips = [Item(f"c{n:02d}", "Transcribe.", f"c{n}.flac", 2.0, WORDS[n], f"speaker{n % 2}") for n in range(4)]
    return {item.id: item for item in [*prompts, *clips]}
