"""The run directory: the plan, sessions, records, tables and reports of one run on disk, written so that nothing is lost.

Layout: wish.json (what was asked, written first), plan.json, items.json, arms/, sessions/NN-arm/{session.json, server.log,
client.log, records.jsonl}, speech/{NAME.wav, heard.json}, tables/, report.md and report.json. A folder with wish.json and no
plan.json was never planned.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import wave
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pandas
from numpy.typing import NDArray

from gate.record import Item, Plan, Record, RunData, SessionInfo

LEAST_FREE_BYTES = 100 * 2**20  # two trees, a tiny model and a day's records fit; less is a disk about to be full


class RunDirError(ValueError):
    """A run directory that cannot be used; the message names it and the fix."""


@dataclass(frozen=True)
class RunDir:
    """One run's directory; methods read and write its files and nothing else."""

    path: Path

    @property
    def report(self) -> Path:
        """The markdown report's path."""
        return self.path / "report.md"

    def session(self, name: str) -> Path:
        """The folder of one session, such as `sessions/01-base`."""
        return self.path / "sessions" / name

    @property
    def is_planned(self) -> bool:
        """Whether plan.json is there; it comes last, so with it everything else that a plan needs is."""
        return (self.path / "plan.json").is_file()

    def write_plan(self, plan: Plan, items: Mapping[str, Item]) -> None:
        """Write items.json and then plan.json, before anything is measured."""
        _write(self.path / "items.json", _pretty(dict(sorted(items.items()))))
        _write(self.path / "plan.json", _pretty(plan))

    def write_wish(self, content: bytes) -> None:
        """Write wish.json: what was asked, for a run that is resumed."""
        _write(self.path / "wish.json", content)

    def read_wish(self) -> bytes:
        """The content of wish.json; RunDirError where there is none."""
        try:
            return (self.path / "wish.json").read_bytes()
        except OSError as error:
            raise RunDirError(f"{self.path / 'wish.json'} cannot be read: {error.strerror}") from error

    def clear(self) -> None:
        """Remove everything that a run left which never came to its plan, but its wish: that says what the folder is."""
        for inside in list(self.path.iterdir()):
            if inside.name == "wish.json":
                continue
            if inside.is_dir() and not inside.is_symlink():
                shutil.rmtree(inside)
            else:
                inside.unlink()
        (self.path / "sessions").mkdir()

    def begun(self, session: str) -> SessionInfo | None:
        """What an interrupted session wrote about itself; None when it did not come to that."""
        path = self.session(session) / "session.json"
        return _read(path, SessionInfo) if path.is_file() else None

    def keep_records(self, session: str, cells: Collection[str]) -> None:
        """Leave only the records of these cells in a session: those of a cell cut short by a crash are measured again."""
        path = self.session(session) / "records.jsonl"
        if path.is_file():
            _write(path, _lines(record for record in _read_records(path) if record.cell in cells))

    def write_session(self, info: SessionInfo) -> None:
        """Write a session's session.json, replacing what was there in one step."""
        self.session(info.id).mkdir(parents=True, exist_ok=True)
        _write(self.session(info.id) / "session.json", _pretty(info))

    def append_records(self, session: str, records: Iterable[Record]) -> None:
        """Append records to a session's records.jsonl and wait until they are on disk."""
        text = _lines(records)
        self.session(session).mkdir(parents=True, exist_ok=True)
        with (self.session(session) / "records.jsonl").open("ab") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def keep_speech(self, speech: Mapping[str, bytes]) -> None:
        """Write speech/NAME.wav for each name (`Record.speech`) that is not there yet: equal sound is kept once."""
        for name, pcm in speech.items():
            path = self._speech(name)
            if not path.is_file():
                path.parent.mkdir(exist_ok=True)
                _write(path, _wav(pcm, int(name.rpartition("-")[2])))

    def read_speech(self, name: str) -> tuple[NDArray[np.int16], int]:
        """The samples [n] of a kept speech and their rate; RunDirError where it can't be read."""
        path = self._speech(name)
        try:
            with wave.open(str(path)) as file:
                return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2"), file.getframerate()
        except (OSError, EOFError, wave.Error) as error:
            raise RunDirError(f"{path} cannot be read as speech: {error}") from error

    def write_heard(self, heard: Mapping[str, str]) -> None:
        """Write speech/heard.json: what the recogniser heard, by the names of the speech."""
        _write(self.path / "speech" / "heard.json", _pretty(dict(heard)))

    def _speech(self, name: str) -> Path:
        return self.path / "speech" / f"{name}.wav"

    def write_tables(self, frames: Mapping[str, pandas.DataFrame]) -> None:
        """Write each frame as tables/NAME.parquet and tables/NAME.csv."""
        folder = self.path / "tables"
        folder.mkdir(exist_ok=True)
        for name, frame in frames.items():
            frame.to_parquet(folder / f"{name}.parquet", index=False)
            frame.to_csv(folder / f"{name}.csv", index=False)

    def write_reports(self, markdown: str, json_text: str) -> None:
        """Write report.md and report.json."""
        _write(self.report, markdown.encode())
        _write(self.path / "report.json", json_text.encode())

    def load(self) -> RunData:
        """Everything measured so far; a last line cut short by a crash is left out, any other fault is a RunDirError."""
        plan = _read(self.path / "plan.json", Plan)
        items = _read(self.path / "items.json", dict[str, Item])
        folders = sorted(path.parent for path in self.path.glob("sessions/*/session.json"))
        sessions = [_read_session(folder, plan) for folder in folders]
        _check_slots(folders, sessions)
        records = [record for folder in folders for record in _read_records(folder / "records.jsonl")]
        path = self.path / "speech" / "heard.json"
        heard = _read(path, dict[str, str]) if path.is_file() else {}
        return RunData(plan=plan, sessions=sessions, records=records, items=items, heard=heard)


def create(path: Path) -> RunDir:
    """Make a run directory, or take one that never came to its plan.

    RunDirError when it holds a run or anything else, cannot be written, or the disk is nearly full.
    """
    path = path.resolve()
    # A wish without a plan, or half a wish, is what a gate leaves that was killed before it measured anything.
    begun = path / "wish.json.part"
    unplanned = (path / "wish.json").is_file() and not (path / "plan.json").exists()
    if (
        path.exists()
        and not unplanned
        and (not path.is_dir() or any(not inside.is_dir() and inside != begun for inside in path.rglob("*")))
    ):
        raise RunDirError(f"--run {path} exists and is not an empty folder; name another one")
    _check_space(path)
    try:
        (path / "sessions").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunDirError(f"--run {path} cannot be written ({error.strerror}); name another folder") from error
    return RunDir(path)


@contextmanager
def claimed(folder: RunDir) -> Iterator[None]:
    """Hold a run directory for this process, until it ends in whatever way; RunDirError while another gate holds it."""
    number = os.open(folder.path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunDirError(f"another gate is at work in {folder.path}; wait for it, or end it first") from error
        yield
    finally:
        os.close(number)


def _check_space(path: Path) -> None:
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if free < LEAST_FREE_BYTES:
        raise RunDirError(
            f"--run {path} is on a disk with {free >> 20} MiB free, and a run wants {LEAST_FREE_BYTES >> 20}"
        )


def existing(path: Path) -> RunDir:
    """A run directory that holds a plan; RunDirError otherwise."""
    if not (path / "plan.json").is_file():
        raise RunDirError(
            f"{path} holds no plan.json, so it is not a run directory; name one that `gate compare` wrote"
        )
    return RunDir(path.resolve())


def begun(path: Path) -> RunDir:
    """A run directory that holds at least a wish; RunDirError otherwise."""
    if (path / "wish.json").is_file():
        return RunDir(path.resolve())
    return existing(path)


def _lines(records: Iterable[Record]) -> bytes:
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)


def _wav(pcm: bytes, rate: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(pcm[: len(pcm) // 2 * 2])
    return file.getvalue()


def _pretty(value: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=1) + b"\n"


def _write(path: Path, content: bytes) -> None:
    # Through a neighbour and a rename: a full disk or a crash leaves the old file, never half of the new one.
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Have a rename on disk too: the file's bytes alone don't outlive a power cut under the new name."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


_Value = TypeVar("_Value")


def _read(path: Path, kind: type[_Value]) -> _Value:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise RunDirError(f"{path} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise RunDirError(f"{path} is not what this gate writes: {error}") from error


def _read_session(folder: Path, plan: Plan) -> SessionInfo:
    info = _read(folder / "session.json", SessionInfo)
    if info.id != folder.name:
        raise RunDirError(f"{folder} holds the session {info.id}, so it is a copy; take it out of the run")
    if not 0 <= info.slot < len(plan.order) or plan.order[info.slot] != info.arm:
        raise RunDirError(f"{folder} is no session of the plan (slot {info.slot}, {info.arm}); take it out of the run")
    return info


def _check_slots(folders: Sequence[Path], sessions: Sequence[SessionInfo]) -> None:
    first: dict[int, Path] = {}
    for folder, info in zip(folders, sessions, strict=True):
        if first.setdefault(info.slot, folder) != folder:
            raise RunDirError(
                f"{folder} has the slot of {first[info.slot].name}; take the one that does not belong out of the run"
            )


def _read_records(path: Path) -> list[Record]:
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # after the last line break: nothing, or a line that a crash cut short
    records: list[Record] = []
    first: dict[tuple[str, str, int, bool], int] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = msgspec.json.decode(line, type=Record)
        except msgspec.MsgspecError as error:
            raise RunDirError(f"{path}, line {number}: {error}") from error
        if record.session != path.parent.name:
            raise RunDirError(f"{path}, line {number}: a record of the session {record.session}, not of this one")
        earlier = first.setdefault((record.session, record.cell, record.index, record.warm), number)
        if earlier != number:
            raise RunDirError(
                f"{path}, line {number}: request {record.index} of {record.cell} stands in line {earlier} already"
            )
        records.append(record)
    return records
