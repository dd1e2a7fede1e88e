"""`kill -9` of the gate at any moment, and a full disk: nothing it started lives on, and --resume loses one cell at most."""

from __future__ import annotations

import os
import random
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil
import pytest

from gate.record import Record
from gate.run import plan_only, session_id
from gate.rundir import RunDir
from gate.verdict import compare
from tests.gate.test_process import wait_gone
from tests.gate.test_run import Notes, make_wish
from tests.gate.trees import make_repository, make_workloads

ROOT = Path(__file__).resolve().parents[2]
MOMENTS = 10
# What depends on times alone, whatever happens to a run.
VOLATILE = (
    "⚠️",
    "Requests issued",
    "Expect one false alarm",
    "| 0",
    "- prompt tokens",
    "| machine",
    "| plan",
    "| again",
)
VOLATILE_METRICS = re.compile(
    r"^\| (tok/s|RTFx|audio-s/s|TTF|ITL p|gap|e2e|RTF|window|identity|tokens per chunk|[TA]2[TS]@)"
)


@dataclass(frozen=True)
class Place:
    """A repository of two commits with workloads, the folder of an unbroken run, and the seconds that it took."""

    root: Path
    whole: RunDir
    seconds: float


def start(place: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gate", "compare", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (place / "gate.log").open("ab") as log:
        return subprocess.Popen(command, cwd=place / "repo", env=environment, stdout=log, stderr=log)


def compare_words(run: str) -> list[str]:
    return ["HEAD~1", "HEAD", "--workloads", "../workloads", "--sessions", "1", "--run", run]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    root = tmp_path_factory.mktemp("killed")
    make_workloads(root / "workloads")
    make_repository(root / "repo", {"token_ms": 5}, {"token_ms": 5, "flip": {"marker": "number", "step": 5}})
    began = time.monotonic()
    gate = start(root, *compare_words("../whole"))
    assert gate.wait(120) == 1, (root / "gate.log").read_text()  # the flip
    return Place(root, RunDir(root / "whole"), time.monotonic() - began)


@pytest.mark.parametrize("part", range(MOMENTS))
def test_a_gate_killed_at_any_moment_leaves_nobody_behind_and_is_resumed_with_one_cell_lost_at_most(
    place: Place, part: int
) -> None:
    run = place.root / f"run{part}"
    gate = start(place.root, *compare_words(str(run)))
    time.sleep(place.seconds * (part + random.Random(part).random()) / MOMENTS)
    started = family(gate)
    gate.kill()
    code = gate.wait()
    wait_gone([*started, *using(run)])
    kept = finished(run)

    again = ["--resume", str(run)] if (run / "wish.json").is_file() else compare_words(str(run))
    assert start(place.root, *again).wait(120) == 1, (place.root / "gate.log").read_text()
    assert lost(kept, finished(run)) == []
    assert code in (-9, 1)  # 1: it was faster than the unbroken run
    folder = RunDir(run)
    assert facts(folder) == facts(place.whole)
    assert report_shape(folder) == report_shape(place.whole)
    done = subprocess.run(["git", "-C", str(place.root / "repo"), "worktree", "list"], capture_output=True, text=True)
    assert str(run) not in done.stdout


def family(gate: subprocess.Popen[bytes]) -> list[int]:
    """Everything the gate has started, the children of its children included."""
    try:
        return [process.pid for process in psutil.Process(gate.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def using(run: Path) -> list[int]:
    """Everything whose command line names the run directory."""
    return [p.pid for p in psutil.process_iter(["cmdline"]) if str(run) in " ".join(p.info["cmdline"] or [])]


def finished(run: Path) -> dict[tuple[str, str], list[bytes]]:
    """The lines of every cell that has all its records on disk: four measured ones here."""
    cells: dict[tuple[str, str], list[bytes]] = {}
    for path in sorted(run.glob("sessions/*/records.jsonl")):
        for line in path.read_bytes().split(b"\n")[:-1]:
            record = msgspec.json.decode(line, type=Record)
            cells.setdefault((record.session, record.cell), []).append(line)
    return {name: lines for name, lines in cells.items() if len(lines) >= (5 if name[1] == "T2T@1" else 4)}


def lost(
    before: dict[tuple[str, str], list[bytes]], after: dict[tuple[str, str], list[bytes]]
) -> list[tuple[str, str]]:
    return [name for name, lines in before.items() if after.get(name) != lines]


def facts(folder: RunDir) -> dict[str, object]:
    """Everything of a run that no clock had a hand in."""
    run = folder.load()
    found = compare(run)
    exact = ("issued", "failed", "tokens out", "audio in", "audio out", "ITL undefined")
    plan = msgspec.to_builtins(run.plan)
    return {
        "plan": {key: value for key, value in plan.items() if key not in ("created", "command", "model_path")},
        "items": msgspec.to_builtins(run.items),
        "sessions": [(s.id, s.arm, s.slot, s.source_digest, s.weights_digest, s.problems) for s in run.sessions],
        "counters": [s.counters for s in run.sessions],
        "lag": [sorted(s.client_lag) for s in run.sessions],
        "records": [timeless(record) for record in run.records],
        "faults": found.faults,
        "moves": found.moves,
        "greedy": found.greedy,
        "unfinished": found.unfinished,
        "metrics": [row for row in found.metrics if row.metric in exact],
        "verdicts": [(row.cell, row.verdict, row.reasons) for row in found.cells],
    }


def timeless(record: Record) -> dict[str, object]:
    values = msgspec.to_builtins(record)
    events = [(event.tokens, event.chars, event.pcm_samples) for event in record.events]
    # The step numbers of a trace count from a server's boot.
    return {**values, "events": events, "trace": len(record.trace), "t0_ns": 0, "e2e_us": 0}


def report_shape(folder: RunDir) -> list[str]:
    """The report's lines but for those that times decide, without the place of the run."""
    lines = folder.report.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith(VOLATILE) and not VOLATILE_METRICS.match(line)]


def test_a_full_disk_is_a_sentence_and_70_and_the_run_goes_on_once_there_is_room(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {}, sessions=1, cells=("T2T@1", "T2T@2"))
    folder = plan_only(wish, Notes())
    second = folder.session(session_id(1, folder.load().plan.order[1])) / "records.jsonl"
    second.parent.mkdir()
    second.symlink_to("/dev/full")  # every byte written there is one that the disk has no room for
    gate = start(tmp_path, "--resume", str(folder.path))
    assert gate.wait(120) == 70
    kept = f"what was measured is kept: {shlex.quote(sys.executable)} -m gate report {folder.path}, or go on: "
    told = f"gate: the disk is full: {folder.path}; {kept}"
    log = (tmp_path / "gate.log").read_text()
    assert told in log and "Traceback" not in log
    assert {record.session for record in folder.load().records} == {session_id(0, folder.load().plan.order[0])}
    second.unlink()
    assert start(tmp_path, "--resume", str(folder.path)).wait(120) in (0, 2)
    assert len(folder.load().records) == 2 * 9


def test_a_line_that_was_cut_short_and_its_cell_are_measured_again_and_the_whole_cells_stay(tmp_path: Path) -> None:
    wish = make_wish(tmp_path, {}, {}, sessions=1)
    folder = plan_only(wish, Notes())
    assert start(tmp_path, "--resume", str(folder.path)).wait(120) in (0, 2)
    path = folder.session(session_id(0, folder.load().plan.order[0])) / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:7]) + lines[7][:40])  # the first cell's five, two of the second and a piece
    assert start(tmp_path, "--resume", str(folder.path)).wait(120) in (0, 2)
    again = path.read_bytes().splitlines(keepends=True)
    assert again[:5] == lines[:5] and len(again) == 9
    first, second = folder.load().sessions
    assert (first.boots, second.boots) == (2, 1)
    assert f"| {first.id} (2 boots) |" in folder.report.read_text()
