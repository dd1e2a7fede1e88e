"""What the gate starts ends as its program does, and with the gate: also when that is killed outright."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from gate import process
from gate.process import Child, tail
from gate.warden import LOG_FIRST, LOG_MARK, LOG_MOST

ROOT = Path(__file__).resolve().parents[2]


def test_a_program_ends_with_its_own_code_output_and_signal(tmp_path: Path) -> None:
    words = ["sh", "-c", "pwd; echo $TOLD; echo wrong >&2; exit 7"]
    done = process.run(words, cwd=tmp_path, env={"TOLD": "this", "PATH": "/usr/bin:/bin"})
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{tmp_path}\nthis\n", "wrong\n")
    assert process.run(["sh", "-c", "kill -TERM $$"]).returncode == -15
    assert process.run(["sh", "-c", "kill -KILL $$"]).returncode == -9


def test_a_child_is_not_told_which_repository_git_started_the_gate_in(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = subprocess.run(["git", "rev-parse", "--local-env-vars"], capture_output=True, text=True, check=True)
    names = {*listed.stdout.split(), *process.GIT_PLACES} - {"GIT_CONFIG_COUNT", "GIT_CONFIG_PARAMETERS"}
    for name in names:
        monkeypatch.setenv(name, "elsewhere")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "0")
    there = {line.partition("=")[0] for line in process.run(["env"]).stdout.splitlines()}
    assert "GIT_DIR" in names and not names & there
    assert {"GIT_CONFIG_COUNT", "PATH"} <= there
    assert "GIT_DIR=asked" in process.run(["env"], env={**process.environment(), "GIT_DIR": "asked"}).stdout


def test_a_program_that_does_not_exist_is_the_shells_127_and_a_sentence() -> None:
    done = process.run(["/no/such/program"])
    assert (done.returncode, done.stderr) == (127, "/no/such/program: No such file or directory\n")


def test_a_program_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        process.run(["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60"], timeout_s=1.0)
    assert time.monotonic() - began < 5
    wait_gone([int((tmp_path / "pid").read_text())])


def test_a_politely_stopped_program_may_end_by_itself_and_its_helpers_end_with_it(tmp_path: Path) -> None:
    script = (
        f"sleep 60 & echo $! > {tmp_path}/helper; trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.05; done"
    )
    child = Child(["sh", "-c", script])
    assert child.process.stdout is not None
    out = child.process.stdout
    assert out.readline() == b"up\n"
    child._signal(15)  # type: ignore[arg-type]
    assert (out.readline(), child.process.wait(5)) == (b"bye\n", 3)
    child.stop(1.0)
    wait_gone([int((tmp_path / "helper").read_text())])


LEAVER = "setsid sh -c 'sleep 60 & echo $! > {0}/far; echo $$ > {0}/near; wait' & sleep 0.3; "


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux")
@pytest.mark.parametrize("ending", ["exit 4", "trap '' TERM; sleep 60", "sleep 60"])
def test_a_process_that_left_the_group_for_a_session_of_its_own_ends_with_the_program(
    tmp_path: Path, ending: str
) -> None:
    child = Child(["sh", "-c", LEAVER.format(tmp_path) + ending])
    pids = far_pids(tmp_path)
    if ending == "exit 4":
        assert child.process.wait(10) == 4
        wait_gone(pids, 1.0)
    child.stop(0.5)
    wait_gone([child.process.pid, *pids], 1.0)


def test_a_process_that_left_the_group_ends_also_when_the_gate_is_killed_outright(tmp_path: Path) -> None:
    words = [sys.executable, "-c", STARTER, LEAVER.format(tmp_path) + "sleep 60"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as gate:
        pids = far_pids(tmp_path)
        gate.kill()
    wait_gone(pids)


def far_pids(folder: Path) -> list[int]:
    end = time.monotonic() + 10
    while not all((folder / name).exists() and (folder / name).read_text() for name in ("near", "far")):
        assert time.monotonic() < end
        time.sleep(0.02)
    return [int((folder / name).read_text()) for name in ("near", "far")]


def test_a_stop_without_a_warden_still_ends_the_group(tmp_path: Path) -> None:
    child = Child(["sh", "-c", f"echo $$ > {tmp_path}/near; echo $$ > {tmp_path}/far; sleep 60"])
    pids = far_pids(tmp_path)
    child.process.kill()
    child.process.wait()
    child.stop()
    wait_gone(pids, 1.0)


STARTER = """
import sys, time
from gate.process import Child
child = Child(["sh", "-c", sys.argv[1]])
print(child.process.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("ending", ["", "trap '' TERM; "], ids=["polite", "deaf to SIGTERM"])
def test_a_gate_that_is_killed_outright_takes_everything_it_started_along(tmp_path: Path, ending: str) -> None:
    script = (
        f"{ending}sleep 60 & echo $$ $! > {tmp_path}/pids.part; mv {tmp_path}/pids.part {tmp_path}/pids; wait; sleep 60"
    )
    with subprocess.Popen([sys.executable, "-c", STARTER, script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as gate:
        assert gate.stdout is not None
        warden = int(gate.stdout.readline())
        end = time.monotonic() + 10
        while not (tmp_path / "pids").exists() and time.monotonic() < end:
            time.sleep(0.02)
        gate.kill()
    wait_gone([warden, *map(int, (tmp_path / "pids").read_text().split())])


def wait_gone(pids: Sequence[int], limit_s: float = 15.0) -> None:
    end = time.monotonic() + limit_s
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < end, [pid for pid in pids if _runs(pid)]
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # a container without an init reaps nobody
    except psutil.NoSuchProcess:
        return False


def test_the_tail_of_a_log_is_its_last_lines_and_says_where_there_is_none(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    assert tail(log) == f"  (no log at {log})"
    log.write_text("")
    assert tail(log) == f"  ({log} is empty)"
    log.write_text("one\ntwo\nthree\n")
    assert tail(log, 2) == f"  last lines of {log}:\n  | two\n  | three"


def test_the_tail_of_a_huge_log_reads_its_end_alone(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with log.open("wb") as file:
        file.truncate(2**40)  # a hole of a TiB: nothing could read it whole
        file.seek(0, 2)
        file.write(b"\nlast words\n")
    assert tail(log, 1) == f"  last lines of {log}:\n  | last words"


def test_a_log_that_would_fill_the_disk_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    script = f"echo first; head -c {LOG_MOST} /dev/zero; sleep 1; echo last words; echo bad >&2; sleep 60"
    with log.open("ab") as output:
        child = Child(["sh", "-c", script], stdout=output, stderr=output)
    end = time.monotonic() + 20
    while not (log.exists() and log.read_bytes().endswith(b"bad\n")):
        assert time.monotonic() < end
        time.sleep(0.1)
    child.stop()
    assert log.read_bytes() == b"first\n" + bytes(LOG_FIRST - 6) + LOG_MARK + b"last words\nbad\n"
