"""The run directory: what it takes for its own, and the copies that it refuses instead of counting them."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from gate import rundir
from gate.rundir import RunDir, RunDirError
from tests.gate.runs import make_run


def write_run(path: Path) -> RunDir:
    run = make_run({"base": [2000, 2002], "head": [2001, 2003]})
    folder = rundir.create(path)
    folder.write_plan(run.plan, run.items)
    for session in run.sessions:
        folder.write_session(session)
        folder.append_records(session.id, [record for record in run.records if record.session == session.id])
    assert folder.load() == run
    return folder


def copy_of(folder: RunDir, name: str, **changes: object) -> Path:
    """A copy of 01-base under another name, with changes to its session.json."""
    copy = folder.session(name)
    shutil.copytree(folder.session("01-base"), copy)
    info = msgspec.json.decode((copy / "session.json").read_bytes())
    (copy / "session.json").write_bytes(msgspec.json.encode(info | changes))
    return copy


def test_a_copied_session_folder_is_refused_by_name_and_not_counted_as_another_session(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    copy = copy_of(folder, "99-zzz")
    with pytest.raises(RunDirError, match=rf"^{copy} holds the session 01-base, so it is a copy; take it out of the"):
        folder.load()


@pytest.mark.parametrize("slot", [-1, 2, 4])
def test_a_session_that_the_plan_has_no_slot_for_is_refused(tmp_path: Path, slot: int) -> None:
    folder = write_run(tmp_path / "run")
    copy = copy_of(folder, "99-base", id="99-base", slot=slot)
    with pytest.raises(RunDirError, match=rf"^{copy} is no session of the plan \(slot {slot}, base\)"):
        folder.load()


def test_two_sessions_of_one_slot_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    copy = copy_of(folder, "99-base", id="99-base")
    with pytest.raises(RunDirError, match=rf"^{copy} has the slot of 01-base"):
        folder.load()


def test_records_of_another_session_are_refused_by_their_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    source, target = (folder.session(name) / "records.jsonl" for name in ("01-base", "04-base"))
    shutil.copy(source, target)
    with pytest.raises(RunDirError, match=rf"^{target}, line 1: a record of the session 01-base, not of this one$"):
        folder.load()
