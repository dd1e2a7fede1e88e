"""What a cold start compiles in several processes. That it compiles what the engine runs is for a GPU to show (tests/gpu)."""

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from engine import precompile
from engine.capture import decode_buckets, prompt_buckets
from engine.config import EngineSettings
from tests.shared import REPOSITORY

SETTINGS = EngineSettings(device="cuda", dtype="bfloat16", prefill_chunk=512)
ABOUT = ("2.11", "3.6", "NVIDIA H200")


def test_the_mark_changes_with_whatever_changes_a_kernel(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    first = precompile.mark_name(tmp_path, SETTINGS, ABOUT)
    assert first == precompile.mark_name(tmp_path, SETTINGS, ABOUT)
    others = [
        precompile.mark_name(tmp_path, replace(SETTINGS, max_batch=32), ABOUT),
        precompile.mark_name(tmp_path, replace(SETTINGS, disabled=frozenset({"gemv"})), ABOUT),
        precompile.mark_name(tmp_path, SETTINGS, ("2.11", "3.6", "NVIDIA H100")),
    ]
    tiles = tmp_path / "tiles"
    tiles.mkdir()
    own = replace(SETTINGS, tiles=str(tiles))
    others.append(precompile.mark_name(tmp_path, own, ABOUT))
    (tiles / "gemv.json").write_text("{}")
    others.append(precompile.mark_name(tmp_path, own, ABOUT))
    (tmp_path / "config.json").write_text('{"a": 1}')
    others.append(precompile.mark_name(tmp_path, SETTINGS, ABOUT))
    assert len({first, *others}) == 7


@pytest.mark.parametrize("shares", [2, 3, 8])
def test_the_shares_together_are_every_bucket_once(shares: int):
    for buckets in (decode_buckets(64), prompt_buckets(576)):
        parts = [buckets[share - 1 :: shares - 1] for share in range(1, shares)]
        assert sorted(size for part in parts for size in part) == list(buckets)


@pytest.fixture
def cold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without marks, a GPU by name, and a folder that is looked at."""
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(precompile, "_cores", lambda: 4)
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


class Program:
    """Stands in for the interpreter, so that a process runs `code` with the words of a share in sys.argv."""

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
        self.log = place / "started"
        path = place / "program"
        path.write_text(f"#!{sys.executable}\nimport os, sys, time\n")
        with path.open("a") as file:
            file.write(f"what = sys.argv[7:]\nopen({str(self.log)!r}, 'a').write(what[0] + ' ')\n{code}\n")
        path.chmod(0o755)
        monkeypatch.setattr(precompile.sys, "executable", str(path))

    def started(self) -> list[str]:
        """The shares that were started so far, sorted."""
        return sorted(self.log.read_text().split()) if self.log.exists() else []


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


def test_a_cold_start_compiles_once_and_a_warm_one_nothing(cold: Path, monkeypatch: pytest.MonkeyPatch):
    program = Program(cold, monkeypatch, "")
    precompile.prepare(cold, SETTINGS)
    precompile.prepare(cold, SETTINGS)
    wait_for(lambda: program.started() == ["0", "1", "2", "flash"])
    precompile.prepare(cold, replace(SETTINGS, max_batch=8))
    wait_for(lambda: len(program.started()) == 8)


FLASH_ENDS = "if what[0] == 'flash': sys.exit()\n"


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ValueError('no room')", "3 of 3 processes that compile kernels failed (ValueError: no room)"),
        ("sys.exit('    x = \\n    ^~~~\\n  ')", "failed (x =)"),
        ("sys.exit('long' * 5000)", f"failed ({'long' * 50});"),
        ("os.kill(os.getpid(), 9)", "failed (ended by signal 9);"),
        ("os.write(2, b'said before'); os.kill(os.getpid(), 9)", "failed (ended by signal 9: said before);"),
        ("if what[0] == '1': sys.exit(3)", "1 of 3 processes that compile kernels failed (exit code 3);"),
    ],
)
def test_a_share_that_fails_says_why_in_a_short_line_leaves_no_mark_and_stops_nothing(
    code: str, told: str, cold: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    program = Program(cold, monkeypatch, FLASH_ENDS + code)
    precompile.prepare(cold, SETTINGS)
    assert told in caplog.text and len(warnings(caplog)) == 1
    precompile.prepare(cold, SETTINGS)
    wait_for(lambda: program.started() == sorted(["0", "1", "2", "flash"] * 2))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_shares_that_take_too_long_are_killed_and_the_start_goes_on(
    cold: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    pids = cold / "pids"
    note = f"open({str(pids)!r}, 'a').write(str(os.getpid()) + ' ')"
    Program(cold, monkeypatch, f"{FLASH_ENDS}if what[0] == '1': {note}; time.sleep(60)")
    monkeypatch.setattr(precompile, "LONGEST_S", 2.0)
    precompile.prepare(cold, SETTINGS)
    assert "1 of 3 processes that compile kernels failed (took more than 2 s);" in caplog.text
    assert not any(psutil.pid_exists(int(pid)) for pid in pids.read_text().split())


def test_a_failure_of_flashinfers_process_is_told_once_it_is_known(
    cold: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    go_on = cold / "go on"
    wait = f"while what[0] == 'flash' and not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n"
    Program(cold, monkeypatch, f"{wait}if what[0] == 'flash': raise ValueError('no nvcc')")
    precompile.prepare(cold, SETTINGS)
    assert warnings(caplog) == []
    go_on.touch()
    wait_for(lambda: len(warnings(caplog)) == 1)
    assert "FlashInfer's attention failed (ValueError: no nvcc); the engine tries again" in caplog.text


def cache_is_a_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "cache").touch()


def cache_is_below_a_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "cache").touch()
    monkeypatch.setattr(sys.modules["triton"].knobs.cache, "dir", str(place / "cache" / "triton"))


def no_place_for_temporary_files(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place / "absent"))


def no_configuration(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "config.json").unlink()


def no_process_can_start(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile.sys, "executable", str(place / "absent"))


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (cache_is_a_file, "FileExistsError"),
        (cache_is_below_a_file, "NotADirectoryError"),
        (no_place_for_temporary_files, "FileNotFoundError"),
        (no_configuration, "FileNotFoundError"),
        (no_process_can_start, "FileNotFoundError"),
    ],
)
def test_whatever_is_in_the_way_is_one_warning_and_the_start_goes_on(
    fault: Callable[[Path, pytest.MonkeyPatch], None],
    told: str,
    cold: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    program = Program(cold, monkeypatch, "")
    fault(cold, monkeypatch)
    precompile.prepare(cold, SETTINGS)
    [warning] = warnings(caplog)
    assert warning.startswith(f"compiling kernels in several processes failed ({told}: ")
    assert warning.endswith("; what is missing is compiled later") and program.started() == []


def test_a_share_that_can_not_be_started_takes_the_others_with_it(
    cold: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    start, children = precompile._start, list[precompile._Child]()

    def second_fails(folder: Path, settings: EngineSettings, what: Sequence[str]) -> precompile._Child:
        if what[0] == "1":
            raise BlockingIOError("no more processes")
        children.append(start(folder, settings, what))
        return children[-1]

    Program(cold, monkeypatch, f"{FLASH_ENDS}time.sleep(60)")
    monkeypatch.setattr(precompile, "_start", second_fails)
    precompile.prepare(cold, SETTINGS)
    assert "(BlockingIOError: no more processes)" in caplog.text
    assert [child.process.returncode for child in children[1:]] == [-9]


def test_a_folder_with_the_name_of_a_table_is_no_fault(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tiles" / "x.json").mkdir(parents=True)
    assert precompile.mark_name(tmp_path, replace(SETTINGS, tiles=str(tmp_path / "tiles")), ABOUT)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity call on this platform")
def test_a_process_that_is_bound_to_one_core_compiles_alone():
    bound = "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); from engine import precompile"
    done = subprocess.run([sys.executable, "-c", f"{bound}; sys.exit(precompile._cores())"], cwd=REPOSITORY)
    assert done.returncode == 1


def test_a_process_runs_this_tree_whatever_lies_in_the_working_folder(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("raise ImportError('a decoy')")
    monkeypatch.chdir(tmp_path)
    # Without FlashInfer to compile a process has nothing to do, on a CPU too.
    child = precompile._start(tiny_checkpoint, replace(SETTINGS, batch_invariant=True), [precompile.FLASH])
    child.process.wait(120)
    assert child.failure() is None
