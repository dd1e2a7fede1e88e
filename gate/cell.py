"""Cells: a task at a concurrency with a workload, the sets they form, and the one registry of metrics.

The text that `parse_cells` reads (`workloads/cells.toml`):

    version = 1

    [defaults.T2T]                  # per task; every key of a cell but `task` and `concurrency`
    workload = "prompts"            # prompts | questions | clips | librispeech | ids
    primary = "tok/s"               # a name of METRICS; leave out for the task's usual one
    warm_waves = 1                  # waves of `concurrency` requests that are asked first and never measured

    [sets.quick]
    about = "one sentence"          # optional
    cells = [                       # a row overrides its task's defaults; the name is made: T2T@1
      { task = "T2T", concurrency = 1, requests = 16, max_tokens = 48, ignore_eos = true, greedy = true },
    ]

Keys of a cell: task, concurrency, requests, warm_waves (0), max_tokens (256), ignore_eos (false), max_frames (none; speech
tasks only), primary, workload, greedy (false: compare its tokens). The workload `ids` asks T2T for prompts of `prompt_tokens`
random token ids, each below `ids_below` (256: the single bytes, which every byte-level tokenizer has first; at most 1048576).
`prompt_tokens` is at most 131072. An unknown key, task, metric or workload is a ValueError.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

import msgspec

TASKS = ("T2T", "A2T", "T2S", "A2S")
SPEECH_TASKS = frozenset({"T2S", "A2S"})
AUDIO_IN_TASKS = frozenset({"A2T", "A2S"})
IDS = "ids"
WORKLOADS = ("prompts", "questions", "clips", "librispeech", IDS)
BYTE_IDS = 256
_USUAL_PRIMARY = {"T2T": "tok/s", "A2T": "RTFx", "T2S": "audio-s/s", "A2S": "audio-s/s"}
_SPEECH_ONLY_METRICS = frozenset({"audio-s/s"})


class Metric(msgspec.Struct, frozen=True):
    """A metric's unit, which way is better (`up`, `down`, `none` for plain facts), its practical floor and its definition."""

    unit: str
    better: str
    about: str
    floor: float | None = None


# Floors: reference figures of published gates agree on 2 % for throughput; a change of one is a commit of its own.
METRICS: dict[str, Metric] = {
    "tok/s": Metric("tok/s", "up", "text tokens of successful requests ÷ window", 0.02),
    "RTFx": Metric("×", "up", "seconds of input audio of successful requests ÷ window", 0.02),
    "audio-s/s": Metric("s/s", "up", "seconds of output audio of successful requests ÷ window", 0.02),
    "TTFT p50": Metric("ms", "down", "sending to the first event that carries a text token", 0.05),
    "TTFT p99": Metric("ms", "down", "the same, 99th percentile", 0.10),
    "TTFA p50": Metric("ms", "down", "sending to the first event that carries a PCM sample", 0.05),
    "TTFA p99": Metric("ms", "down", "the same, 99th percentile", 0.10),
    "ITL p50": Metric("ms", "down", "median over requests of (e2e − TTFT) ÷ (tokens − 1)", 0.02),
    "gap p50": Metric("ms", "down", "between neighbouring token events, all requests pooled", 0.02),
    "gap p99": Metric("ms", "down", "the same, 99th percentile", 0.10),
    "gap max": Metric("ms", "down", "the longest of them", 0.10),
    "gaps > 150 ms": Metric("count", "down", "how many of them were longer than 150 ms"),
    "e2e p50": Metric("ms", "down", "sending to the last event", 0.05),
    "e2e p99": Metric("ms", "down", "the same, 99th percentile", 0.10),
    "RTF p50": Metric(
        "s/s", "down", "e2e ÷ seconds of output audio, per request; under 1 is faster than playback", 0.05
    ),
    "RTF p95": Metric("s/s", "down", "the same, 95th percentile", 0.10),
    "failed": Metric(
        "requests", "down", "requests that failed; they enter no other number but `issued` and the window"
    ),
    "issued": Metric("requests", "none", "measured requests"),
    "ITL undefined": Metric("requests", "none", "successful requests of fewer than two tokens, left out of ITL"),
    "tokens out": Metric("tokens", "none", "text tokens of successful requests"),
    "audio out": Metric("s", "none", "seconds of output audio of successful requests"),
    "audio in": Metric("s", "none", "seconds of input audio of successful requests"),
    "tokens per chunk": Metric("tokens", "none", "text tokens ÷ events that carried any; not 1: gaps are per chunk"),
    "window": Metric("s", "none", "first send to last event of the measured section"),
    "identity residual": Metric("ratio", "none", "tok/s ÷ (c·n ÷ (TTFT + (n − 1)·ITL)) − 1, per-request means"),
}


class Cell(msgspec.Struct, frozen=True, omit_defaults=True):
    """A task at a concurrency (closed-loop clients), with what each of its requests asks for.

    `requests` are measured, after `warm_waves` × `concurrency` that are not. `max_frames` caps speech (None: the model does).
    `prompt_tokens` and `ids_below` are those of the workload `ids`, and None elsewhere.
    """

    name: str
    task: str
    concurrency: int
    requests: int
    warm_waves: int
    max_tokens: int
    ignore_eos: bool
    max_frames: int | None
    primary: str
    workload: str
    greedy: bool
    prompt_tokens: int | None = None
    ids_below: int | None = None

    @property
    def source(self) -> str:
        """The name of the workload that its items come from; prompts of random ids are each cell's own."""
        return f"{IDS} {self.name}" if self.workload == IDS else self.workload


class CellSet(msgspec.Struct, frozen=True):
    """A named selection of cells, in the order in which a session runs them."""

    name: str
    cells: tuple[Cell, ...]
    about: str = ""


_KINDS: dict[str, type] = {
    "task": str,
    "concurrency": int,
    "requests": int,
    "warm_waves": int,
    "max_tokens": int,
    "ignore_eos": bool,
    "max_frames": int,
    "primary": str,
    "workload": str,
    "greedy": bool,
    "prompt_tokens": int,
    "ids_below": int,
}
_LEAST = {
    "concurrency": 1,
    "requests": 1,
    "warm_waves": 0,
    "max_tokens": 1,
    "max_frames": 1,
    "prompt_tokens": 1,
    "ids_below": 2,
}
# Past every model's context and vocabulary: a slip of the keyboard is to end at once, not to draw ids for minutes.
_MOST = {"prompt_tokens": 131_072, "ids_below": 1 << 20}


def parse_cells(toml_text: str) -> dict[str, CellSet]:
    """The cell sets of a cells.toml by name; ValueError names the key, the table and the fix."""
    try:
        top = tomllib.loads(toml_text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"not TOML: {error}") from error
    _known(top, {"version", "defaults", "sets"}, "the file")
    if top.get("version") != 1:
        raise ValueError(f"version is {top.get('version')!r}; this gate reads version = 1")
    defaults = _defaults(_table(top, "defaults"))
    sets = _table(top, "sets")
    if not sets:
        raise ValueError("no [sets.NAME] table; a cells file defines at least one set")
    return {name: _cell_set(name, _table(sets, name, "sets"), defaults) for name in sets}


def _table(parent: Mapping[str, object], key: str, where: str = "") -> dict[str, object]:
    found = parent.get(key, {})
    if not isinstance(found, dict):
        raise ValueError(f"[{where + '.' if where else ''}{key}] is not a table")
    return found


def _known(table: Mapping[str, object], known: set[str], where: str) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"unknown key {key!r} in {where}; known are {', '.join(sorted(known))}")


def _defaults(tables: dict[str, object]) -> dict[str, dict[str, object]]:
    _known(tables, set(TASKS), "[defaults]")
    defaults = {task: _table(tables, task, "defaults") for task in tables}
    for task, table in defaults.items():
        _checked(table, set(_KINDS) - {"task", "concurrency"}, f"[defaults.{task}]")
    return defaults


def _cell_set(name: str, table: dict[str, object], defaults: dict[str, dict[str, object]]) -> CellSet:
    _known(table, {"about", "cells"}, f"[sets.{name}]")
    rows, about = table.get("cells"), table.get("about", "")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"[sets.{name}] needs cells = [{{ task = …, concurrency = …, requests = … }}, …]")
    if not isinstance(about, str):
        raise ValueError(f"about = {about!r} in [sets.{name}] is not text")
    cells = tuple(_cell(row, f"[sets.{name}], cell {number}", defaults) for number, row in enumerate(rows, 1))
    names = [cell.name for cell in cells]
    twice = next((cell for cell in names if names.count(cell) > 1), None)
    if twice:
        raise ValueError(f"[sets.{name}] has {twice} twice; a set holds one cell per task and concurrency")
    return CellSet(name, cells, about)


def _checked(row: Mapping[str, object], known: set[str], where: str) -> None:
    _known(row, known, where)
    for key, value in row.items():
        kind = _KINDS[key]
        if type(value) is not kind:  # not isinstance: TOML's true is no count
            raise ValueError(f"{key} = {value!r} in {where} must be {kind.__name__}")
        if isinstance(value, int) and value < _LEAST.get(key, value):
            raise ValueError(f"{key} = {value} in {where} must be at least {_LEAST[key]}")
        if isinstance(value, int) and value > _MOST.get(key, value):
            raise ValueError(f"{key} = {value} in {where} must be at most {_MOST[key]}")


def _choice(value: object, allowed: tuple[str, ...], key: str, where: str) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{key} = {value!r} in {where} must be one of {', '.join(allowed)}")
    return value


def _cell(row: dict[str, object], where: str, defaults: dict[str, dict[str, object]]) -> Cell:
    _checked(row, set(_KINDS), where)
    task = _choice(row.get("task"), TASKS, "task", where)
    full: dict[str, object] = {
        "warm_waves": 0,
        "max_tokens": 256,
        "ignore_eos": False,
        "max_frames": None,
        "greedy": False,
        "primary": _USUAL_PRIMARY[task],
        "workload": "clips" if task in AUDIO_IN_TASKS else "prompts",
        **defaults.get(task, {}),
        **row,
    }
    for key in ("concurrency", "requests"):
        if key not in full:
            raise ValueError(f"{key} is missing in {where}")
    _choice(full["workload"], WORKLOADS, "workload", where)
    _fits(task, full, where)
    if full["workload"] == IDS:
        full.setdefault("ids_below", BYTE_IDS)
    return msgspec.convert({"name": f"{task}@{full['concurrency']}", **full}, Cell)


def _fits(task: str, full: Mapping[str, object], where: str) -> None:
    """Refuse what a task cannot give: a metric of audio it has not, frames without speech, clips where no audio goes in."""
    primary = _choice(full["primary"], tuple(METRICS), "primary", where)
    if METRICS[primary].better == "none" or METRICS[primary].floor is None:
        raise ValueError(
            f"primary = {primary!r} in {where} is a plain fact; a primary metric has a direction and a floor"
        )
    if primary in _SPEECH_ONLY_METRICS and task not in SPEECH_TASKS:
        raise ValueError(f"primary = {primary!r} in {where} needs output audio, and {task} has none")
    if primary == "RTFx" and task not in AUDIO_IN_TASKS:
        raise ValueError(f"primary = 'RTFx' in {where} needs input audio, and {task} has none")
    if full["max_frames"] is not None and task not in SPEECH_TASKS:
        raise ValueError(f"max_frames in {where} is for speech tasks, and {task} is not one")
    if (full["workload"] in ("prompts", "questions", IDS)) == (task in AUDIO_IN_TASKS) or (
        full["workload"] == IDS and task != "T2T"
    ):
        raise ValueError(f"workload = {full['workload']!r} in {where} does not fit {task}")
    _fits_ids(full, where)


def _fits_ids(full: Mapping[str, object], where: str) -> None:
    """Refuse random ids without a length, and a length without random ids."""
    given = [key for key in ("prompt_tokens", "ids_below") if full.get(key) is not None]
    if full["workload"] == IDS and "prompt_tokens" not in given:
        raise ValueError(f"prompt_tokens is missing in {where}; workload = 'ids' needs it")
    if full["workload"] != IDS and given:
        raise ValueError(f"{given[0]} in {where} is for workload = 'ids', and this is {full['workload']!r}")
