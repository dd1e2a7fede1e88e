"""Reads an Nsight Systems export (`nsys export --type sqlite`) to a timeline. Knows the export's tables; judges nothing."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from gate.kernels import Activity, Call, StepRange, Timeline, TraceError, short_name

KERNELS = "CUPTI_ACTIVITY_KIND_KERNEL"
CALLS = "CUPTI_ACTIVITY_KIND_RUNTIME"
COPIES = "CUPTI_ACTIVITY_KIND_MEMCPY"
FILLS = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPHS = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
RANGES = "NVTX_EVENTS"
META = "META_DATA_EXPORT"
EXPORT = "nsys export --type sqlite"

# Names as the torch profiler spells them; the numbers are CUPTI's.
COPY_NAMES = {1: "Memcpy HtoD", 2: "Memcpy DtoH", 8: "Memcpy DtoD", 10: "Memcpy PtoP"}

# A process is all of a global thread id but its low 24 bits, the thread.
SELECT_KERNELS = f"""
    SELECT globalPid >> 24, deviceId, correlationId, value, start, end
    FROM {KERNELS} LEFT JOIN StringIds ON id = demangledName"""
SELECT_COPIES = f"SELECT globalPid >> 24, deviceId, correlationId, copyKind, start, end FROM {COPIES}"
SELECT_FILLS = f"SELECT globalPid >> 24, deviceId, correlationId, start, end FROM {FILLS}"
SELECT_CALLS = f"SELECT globalTid >> 24, globalTid, correlationId, start FROM {CALLS}"
# 59 is a range that was pushed and popped, 60 one that was started and ended; without an end it was cut by the capture's.
SELECT_RANGES = f"""
    SELECT globalTid >> 24, globalTid, COALESCE(text, value), start, end
    FROM {RANGES} LEFT JOIN StringIds ON id = textId
    WHERE eventType IN (59, 60) AND end IS NOT NULL AND COALESCE(text, value) IS NOT NULL"""

# The columns of each query; SQLite itself holds a column to no type.
KernelRow = tuple[int, int, int, str | None, int, int]
CopyRow = tuple[int, int, int, int, int, int]
FillRow = tuple[int, int, int, int, int]
CallRow = tuple[int, int, int, int]
RangeRow = tuple[int, int, str, int, int]
MetaRow = tuple[str, str | None]


def read(path: Path) -> Timeline:
    """The timeline of an export; TraceError where it is none, or was captured without the kernels of graphs."""
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as export:
            return _timeline(export, path)
    except sqlite3.DatabaseError as error:
        raise TraceError(
            f"{path} is no Nsight export that can be read (or a Git LFS pointer to one): {error}; export it again: {EXPORT}"
        ) from error


def _timeline(export: sqlite3.Connection, path: Path) -> Timeline:
    # Tables without rows are not exported.
    there = {name for (name,) in export.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "StringIds" not in there:
        raise TraceError(f"{path} is an SQLite file without Nsight's tables; export the report again: {EXPORT}")
    if GRAPHS in there and export.execute(f"SELECT COUNT(*) FROM {GRAPHS}").fetchone()[0]:
        raise TraceError(
            f"{path} holds graph launches without their kernels; capture again with --cuda-graph-trace=node"
        )

    def rows(table: str, query: str, columns: Any) -> Iterator[tuple[Any, ...]]:
        for row in export.execute(query) if table in there else ():
            try:
                yield msgspec.convert(row, columns)
            except msgspec.ValidationError as error:
                raise TraceError(f"{path} has a damaged row in {table}: {error}; export it again: {EXPORT}") from error

    return Timeline(
        _source(dict(rows(META, f"SELECT name, value FROM {META}", MetaRow)), path),
        [
            StepRange(process, str(thread), text, *times)
            for process, thread, text, *times in rows(RANGES, SELECT_RANGES, RangeRow)
        ],
        [Call(process, str(thread), *rest) for process, thread, *rest in rows(CALLS, SELECT_CALLS, CallRow)],
        [
            *(_kernel(*row) for row in rows(KERNELS, SELECT_KERNELS, KernelRow)),
            *(_copy(*row) for row in rows(COPIES, SELECT_COPIES, CopyRow)),
            *(_fill(*row) for row in rows(FILLS, SELECT_FILLS, FillRow)),
        ],
    )


def _source(meta: dict[str, str | None], path: Path) -> str:
    versions = [meta.get(f"EXPORT_{name}_VERSION") or "unknown" for name in ("PRODUCT", "SCHEMA")]
    return f"Nsight Systems {versions[0]}, schema {versions[1]}, {path.name}"


def _kernel(process: int, device: int, correlation: int, name: str | None, start_ns: int, end_ns: int) -> Activity:
    name = name or "(no name)"
    return Activity(process, device, correlation, name, short_name(name), start_ns, end_ns)


def _copy(process: int, device: int, correlation: int, kind: int, start_ns: int, end_ns: int) -> Activity:
    name = COPY_NAMES.get(kind, f"Memcpy of kind {kind}")
    return Activity(process, device, correlation, name, name, start_ns, end_ns)


def _fill(process: int, device: int, correlation: int, start_ns: int, end_ns: int) -> Activity:
    return Activity(process, device, correlation, "Memset", "Memset", start_ns, end_ns)
