"""Reads a file to a timeline: a torch-profiler Chrome trace here, an Nsight export through `gate.nsys`."""

from __future__ import annotations

import gzip
import zlib
from decimal import Decimal
from pathlib import Path

import msgspec

from gate import nsys
from gate.kernels import Activity, Call, Interval, StepRange, Timeline, TraceError, short_name

COPIES = ("gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
RANGES = "user_annotation"
MOST_BYTES = 2 << 30  # of JSON, unpacked; a decoded trace takes several times its size
MOST_US = Decimal(2**63) / 1000  # 64 bits of nanoseconds, as the profiler holds them
# One trace is of one process, and only its host events name it.
PROCESS = 0


class _DamagedError(Exception):
    """A part of a trace that is JSON and yet can't be right."""


class _Event(msgspec.Struct, frozen=True):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    # Decimal, as a binary float can't hold nanoseconds of a machine that has been up for long.
    ts: Decimal = Decimal(0)
    dur: Decimal = Decimal(0)
    args: msgspec.Raw = msgspec.Raw(b"{}")

    @property
    def interval(self) -> Interval:
        if not all(us.is_finite() and -MOST_US < us < MOST_US for us in (self.ts, self.dur)):
            raise _DamagedError(f"the event {self.name[:80]!r} has ts {self.ts:.6g} and dur {self.dur:.6g}")
        return int(self.ts * 1000), int((self.ts + self.dur) * 1000)

    @property
    def thread(self) -> str:
        return f"{self.pid}/{self.tid}"


class _Launch(msgspec.Struct, frozen=True):
    correlation: int
    device: int = 0


class _Trace(msgspec.Struct, frozen=True):
    events: list[_Event] = msgspec.field(name="traceEvents")


def read(path: Path) -> Timeline:
    """The timeline of a file; TraceError where it is of no known kind or can't be read."""
    try:
        return _read(path)
    except MemoryError as error:
        raise TraceError(f"{path} takes more memory than there is; record fewer steps") from error


def _read(path: Path) -> Timeline:
    if path.name.endswith(".sqlite"):
        return nsys.read(path)
    if path.name.endswith((".json", ".json.gz")):
        return read_chrome(path)
    if path.name.endswith(".nsys-rep"):
        made = path.with_suffix(".sqlite")
        raise TraceError(f"{path} is not an export; make one: nsys export --type sqlite --output {made} {path}")
    raise TraceError(f"{path} is neither a torch-profiler trace (.json, .json.gz) nor an Nsight export (.sqlite)")


def read_chrome(path: Path) -> Timeline:
    """The timeline of a torch-profiler Chrome trace; TraceError where it is damaged, too large or something else."""
    try:
        trace = msgspec.json.decode(_json(path), type=_Trace)
        events = [event for event in trace.events if event.ph == "X"]
        return Timeline(
            f"torch profiler, {path.name}",
            [_range(event) for event in events if event.cat == RANGES],
            [_call(event) for event in events if event.cat in CALLS],
            [_activity(event) for event in events if event.cat == "kernel" or event.cat in COPIES],
        )
    except (EOFError, gzip.BadGzipFile, zlib.error, msgspec.DecodeError, RecursionError, _DamagedError) as error:
        raise TraceError(
            f"{path} is no whole torch-profiler trace (or a Git LFS pointer to one): {error}; is it complete? Copy it again, "
            f"or record it again"
        ) from error


def _json(path: Path) -> bytearray:
    """The JSON text of a trace, unpacked."""
    data = bytearray()
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while part := file.read(1 << 20):
            data += part
            if len(data) > MOST_BYTES:
                raise TraceError(f"{path} holds more than {MOST_BYTES:,} bytes of JSON; record fewer steps")
    return data


def _range(event: _Event) -> StepRange:
    return StepRange(PROCESS, event.thread, event.name, *event.interval)


def _call(event: _Event) -> Call:
    launch = msgspec.json.decode(event.args, type=_Launch)
    return Call(PROCESS, event.thread, launch.correlation, event.interval[0])


def _activity(event: _Event) -> Activity:
    launch = msgspec.json.decode(event.args, type=_Launch)
    row = event.name.partition("(")[0].strip() if event.cat in COPIES else short_name(event.name)
    return Activity(PROCESS, launch.device, launch.correlation, event.name, row, *event.interval)
