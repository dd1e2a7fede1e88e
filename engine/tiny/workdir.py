"""The folder of a training: the plan that it was begun with, locks, logs, and what goes wrong in it as one line. No torch."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

import msgspec
from safetensors import SafetensorError
from soundfile import LibsndfileError

from engine.config import SettingError
from engine.errors import WalkgateError
from engine.tiny.shards import read_list, write_list

PLAN, LOCK = "plan.json", "lock"
LONGEST_LINE = 1 << 16  # of a log


class PlanRecord(msgspec.Struct, frozen=True):
    """What decides the data and the training of a folder. `librispeech` says whether its texts are among the data."""

    plan: str
    seed: int
    heard_hours: float
    spoken_hours: float
    copies: int
    read: int
    librispeech: bool


def make(out: Path) -> None:
    """Make the folder `out` unless it is there; SettingError where that can't be or nothing can be written into it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"--out {out} can't be made: {error.strerror or error}; name another folder") from None
    if not os.access(out, os.W_OK | os.X_OK):
        raise SettingError(f"--out {out} is not writable; name another folder")


def begin(out: Path, record: PlanRecord) -> None:
    """Keep `record` in `out`."""
    write_list(out / PLAN, [record])


def begun(out: Path) -> PlanRecord | None:
    """What `out` was begun with, None where nothing is kept; WalkgateError where that can't be read."""
    path = out / PLAN
    if not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=PlanRecord)
    except (OSError, msgspec.DecodeError) as error:
        raise WalkgateError(
            f"{path} can't be read: {error}; delete it, and the next run keeps the plan that it is called with"
        ) from None


def compare(out: Path, asked: PlanRecord, kept: PlanRecord) -> None:
    """SettingError names the first field in which `asked` is not what `out` was begun with, `kept`."""
    for field in PlanRecord.__struct_fields__:
        new, old = getattr(asked, field), getattr(kept, field)
        if new != old:
            raise SettingError(
                f"--out {out} was begun with {field} {json.dumps(old)}, not {json.dumps(new)}; "
                f"ask for that again, or name another folder"
            )


@contextmanager
def locked(folder: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold `folder`, made if need be, against other processes while inside.

    WalkgateError names the one that holds it, unless this one is to `wait` for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="ascii") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            file.seek(0)
            raise WalkgateError(
                f"process {file.read() or 'of another run'} works in {folder}; wait for it to end"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def tidy(folder: Path) -> None:
    """Remove what a run that was broken off left half-written in `folder`, which the caller holds."""
    for path in folder.glob("*.part*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def append(path: Path, line: bytes) -> None:
    """Append `line` and a line's end to a log, or nothing where the disk is full: OSError, which names the log.

    What stands behind the last line's end was not written whole, and goes.
    """
    whole = line + b"\n"
    with path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LONGEST_LINE))
        tail = file.read() if size else b""
        before = size - len(tail) + tail.rfind(b"\n") + 1
        if before < size:
            file.truncate(before)
        try:
            written = file.write(whole)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None
        if written != len(whole):
            file.truncate(before)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def cut(path: Path, step: int) -> None:
    """Drop what stands in the log `path`, if there is one, of steps after `step`: those are done again."""
    if path.exists():
        lines = read_list(path, msgspec.Raw)
        write_list(path, [line for line in lines if json.loads(bytes(line))["step"] <= step])


@contextmanager
def told(stage: str, folder: Path) -> Iterator[None]:
    """Tell of faults in one line: a WalkgateError that begins with `stage` and names the file, or else the stage's `folder`."""
    try:
        yield
    except SettingError:
        raise
    except FileNotFoundError as error:
        where = error.filename or folder
        raise WalkgateError(f"{stage}: {where} is missing; fetch it from where it was made, or make it again") from None
    except OSError as error:
        # NumPy says how much it could not write, but not why.
        reason = error.strerror or f"{error} (is the disk full?)"
        raise WalkgateError(f"{stage}: {error.filename or folder}: {reason}") from None
    except (SafetensorError, LibsndfileError) as error:
        # What is read is checked where it is read, so this is a file that can't be written.
        raise WalkgateError(f"{stage}: {folder} can't be written: {error}") from None
    except BrokenProcessPool:
        reason = "one of its processes was ended from outside (was there too little memory?); the same command goes on"
        raise WalkgateError(f"{stage}: {reason}") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or b"").decode("utf-8", "replace").strip().splitlines() or ["it says nothing"]
        raise WalkgateError(f"{stage}: the command {error.cmd[0]} ended with {error.returncode}: {said[-1]}") from None
    except ImportError as error:
        raise WalkgateError(f"{stage}: a package can't be loaded: {error}; install it again") from None
    except KeyError as error:
        raise WalkgateError(
            f"{stage}: {folder}, or what it is made from, lacks {error}; make or fetch that again"
        ) from None
    except (ValueError, EOFError, FloatingPointError, msgspec.DecodeError, WalkgateError) as error:
        raise WalkgateError(f"{stage}: {error}") from None
