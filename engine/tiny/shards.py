"""Shards of training data: an array, and beside it a list that says what lies where in it. Processes make them; no torch.

A folder holds `NAME.npy` and `NAME.jsonl` for each shard and, once all are made, `manifest.jsonl`, all lists in order. The list
is written last, so a shard that has one is whole, and work that was broken off goes on with the shards that have none.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.config import children_with_one_thread
from engine.parent import die_with_parent

MANIFEST = "manifest.jsonl"
# Files of this size are easily moved between machines.
MOST_BYTES = 16_000_000

Entry = TypeVar("Entry")
Number = TypeVar("Number", bound=np.generic)


def list_of(folder: Path, name: str) -> Path:
    """The list of the shard `name`."""
    return folder / f"{name}.jsonl"


def save(folder: Path, name: str, parts: Sequence[NDArray[Number]]) -> list[int]:
    """Write `parts`, each [n, ...], as one array and return where each starts; ValueError when it is too big for a shard."""
    joined = np.concatenate(parts)
    if joined.nbytes > MOST_BYTES:
        raise ValueError(f"shard {name} has {joined.nbytes} bytes; {MOST_BYTES} is the most")
    unfinished = folder / f"{name}.part.npy"
    np.save(unfinished, joined)
    os.replace(unfinished, folder / f"{name}.npy")
    return [0, *np.cumsum([len(part) for part in parts[:-1]]).tolist()]


def write_list(path: Path, entries: Sequence[object]) -> None:
    """Write a whole list or none."""
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(b"".join(msgspec.json.encode(entry) + b"\n" for entry in entries))
    os.replace(unfinished, path)


def read_list(path: Path, kind: type[Entry], way_out: str = "") -> list[Entry]:
    """The entries of a list of a shard, or of the manifest; ValueError names a line that can't be read, and the `way_out`."""
    found: list[Entry] = []
    for number, row in enumerate(path.read_bytes().splitlines(), 1):
        try:
            found.append(msgspec.json.decode(row, type=kind))
        except msgspec.DecodeError as error:
            raise damaged(path, error, f", line {number},", way_out) from None
    return found


def damaged(path: Path, error: Exception, where: str = "", way_out: str = "") -> ValueError:
    """The error of a file that can't be read, with the way out: to make its folder again unless another is given."""
    advice = way_out or f"fetch it again, or delete {path.parent} to make it again"
    return ValueError(f"{path}{where} is damaged ({error}); {advice}")


def whole(folder: Path, shard: str) -> NDArray[Any]:
    """All rows [n, ...] of a shard, in memory; its file is closed again."""
    return _loaded(folder / shard)


def read(folder: Path, shard: str, start: int, length: int) -> NDArray[Any]:
    """`length` rows [length, ...] of a shard from row `start` on; nothing else of the file is read."""
    return np.asarray(_mapped(folder / shard)[start : start + length])


@cache
def _mapped(path: Path) -> NDArray[Any]:
    """The array of a whole shard. Mapped once: every mapping holds a file open, and a process may open only so many."""
    return _loaded(path, "r")


def _loaded(path: Path, mode: Literal["r"] | None = None) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode=mode)
    except (EOFError, ValueError) as error:
        raise damaged(path, error) from None
    return array


@contextmanager
def pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes of one thread each that end with this one, however it ends."""
    # Spawned, since the caller may hold a CUDA context or threads, which a fork would break.
    context = multiprocessing.get_context("spawn")
    # Processes that all use all cores wait for each other.
    with (
        children_with_one_thread(),
        ProcessPoolExecutor(workers, context, initializer=die_with_parent, initargs=(os.getpid(),)) as processes,
    ):
        yield processes


def _made(folder: Path, name: str) -> bool:
    return list_of(folder, name).exists() and (folder / f"{name}.npy").exists()


def make(
    folder: Path,
    job: Callable[..., None],
    shards: Mapping[str, tuple[object, ...]],
    workers: int,
    tell: Callable[[str], None],
) -> None:
    """Call `job(folder, name, *arguments)` in a pool of processes for each of `shards` that lacks its list or its array.

    The processes end with this one, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    waiting = {name: arguments for name, arguments in shards.items() if not _made(folder, name)}
    tell(f"{folder.name}: {len(shards)} shards, {len(waiting)} of them to make")
    with pool(workers) as processes:
        jobs = [processes.submit(job, folder, name, *arguments) for name, arguments in waiting.items()]
        try:
            for done, finished in enumerate(as_completed(jobs), 1):
                finished.result()
                tell(f"{folder.name}: {done} of {len(jobs)} made")
        except BaseException:
            processes.shutdown(cancel_futures=True)
            raise
