"""Processes that make shards: what is there stays, and none outlives the one that started them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from engine.config import THREADS_VARIABLE, child_environment
from engine.tiny import shards
from tests.shared import REPOSITORY

ENDLESS = """
import time
from pathlib import Path
from engine.tiny import shards

def sleep(folder, name):
    print("began", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    shards.make(Path("made"), sleep, {"a": ()}, 1, lambda text: None)
"""


def write(folder: Path, name: str, value: int) -> None:
    shards.write_list(shards.list_of(folder, name), [value, *shards.save(folder, name, [np.full(3, value)])])


def test_each_shard_without_its_list_or_array_is_made_and_the_others_stay(tmp_path: Path):
    shards.write_list(shards.list_of(tmp_path, "b"), [7])
    shards.save(tmp_path, "b", [np.full(3, 7)])
    # A list alone is no shard.
    shards.write_list(shards.list_of(tmp_path, "c"), [7])
    told: list[str] = []
    shards.make(tmp_path, write, {"a": (1,), "b": (2,), "c": (3,)}, 2, told.append)
    assert [shards.read_list(shards.list_of(tmp_path, name), int) for name in "abc"] == [[1, 0], [7], [3, 0]]
    assert shards.read(tmp_path, "c.npy", 1, 2).tolist() == [3, 3]
    assert told[0].endswith("3 shards, 2 of them to make") and len(told) == 3


def test_a_shard_is_opened_once_for_all_that_is_read_of_it(tmp_path: Path):
    shards.save(tmp_path, "a", [np.arange(50)])
    process = psutil.Process()
    kept = [shards.read(tmp_path, "a.npy", 0, 1)]
    opened = process.num_fds()
    kept += [shards.read(tmp_path, "a.npy", row, 1) for row in range(50)]
    assert process.num_fds() == opened
    assert [part.item() for part in kept] == [0, *range(50)]


def threads(_: int) -> int:
    return torch.get_num_threads()


@pytest.mark.parametrize("before", [None, "3"])
def test_a_process_of_a_pool_computes_with_one_thread(before: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(THREADS_VARIABLE, before)
    with shards.pool(1) as processes:
        assert list(processes.map(threads, range(2))) == [1, 1]
    assert os.environ.get(THREADS_VARIABLE) == before


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")
def test_a_process_at_work_ends_when_the_one_that_started_it_is_killed(tmp_path: Path):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    # Whoever lives on holds the pipe open.
    with subprocess.Popen(
        [sys.executable, script.name],
        cwd=tmp_path,
        env=child_environment(REPOSITORY),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "began\n"
        process.kill()
        assert process.communicate(timeout=20)[0] == ""


def test_a_whole_shard_holds_no_file_open(tmp_path: Path):
    shards.save(tmp_path, "a", [np.arange(1000)])
    before = len(os.listdir("/proc/self/fd"))
    held = shards.whole(tmp_path, "a.npy")
    assert held.tolist() == list(range(1000)) and len(os.listdir("/proc/self/fd")) == before


def test_a_damaged_list_or_array_is_named(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("1\n[")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2, is damaged"):
        shards.read_list(tmp_path / "a.jsonl", int)
    shards.save(tmp_path, "a", [np.arange(1000)])
    with (tmp_path / "a.npy").open("r+b") as file:
        file.truncate(500)
    (tmp_path / "b.npy").touch()
    for name in ("a.npy", "b.npy"):
        with pytest.raises(ValueError, match=rf"{name} is damaged"):
            shards.read(tmp_path, name, 0, 1)
