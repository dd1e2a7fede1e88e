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

ROOT = Path(__file__).resolve().parents[2]


def test_a_program_ends_with_its_own_code_output_and_signal(tmp_path: Path) -> None:
    words = ["sh", "-c", "pwd; echo $TOLD; echo wrong >&2; exit 7"]
    done = process.run(words, cwd=tmp_path, env={"TOLD": "this", "PATH": "/usr/bin:/bin"})
    assert (done.returncode, done.stdout, done.stderr) == (7, f"{tmp_path}\nthis\n", "wrong\n")
    assert process.run(["sh", "-c", "kill -TERM $$"]).returncode == -15
    assert process.run(["sh", "-c", "kill -KILL $$"]).returncode == -9


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
