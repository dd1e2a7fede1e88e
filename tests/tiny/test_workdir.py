"""The folder of a training: locks, logs on a full disk, and faults as one line."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.config import SettingError
from engine.errors import WalkgateError
from engine.tiny import workdir

RECORD = workdir.PlanRecord("small", 0, 1.0, 2.0, 2, 10, False)


def test_a_plan_that_is_kept_is_read_again_and_one_that_is_damaged_is_named(tmp_path: Path):
    assert workdir.begun(tmp_path) is None
    workdir.begin(tmp_path, RECORD)
    assert workdir.begun(tmp_path) == RECORD
    (tmp_path / "plan.json").write_text('{"plan": "small"}')
    with pytest.raises(WalkgateError, match=r"plan.json can't be read: .*seed.*; delete it"):
        workdir.begun(tmp_path)


def test_a_lock_of_another_process_names_it_and_ends_with_it(tmp_path: Path):
    folder = tmp_path / "codec"
    code = (
        "import sys\nfrom pathlib import Path\nfrom engine.tiny import workdir\n"
        "with workdir.locked(Path(sys.argv[1])):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(WalkgateError, match=f"process {other.pid} works in {folder}"), workdir.locked(folder):
            pass
        other.kill()
    with workdir.locked(folder):
        assert (folder / "lock").read_text() == str(os.getpid())


def test_a_log_gets_whole_lines(tmp_path: Path):
    for line in (b"one", b"two"):
        workdir.append(tmp_path / "log.jsonl", line)
    assert (tmp_path / "log.jsonl").read_bytes() == b"one\ntwo\n"


LIMITED = """
import resource, sys
from pathlib import Path
from engine.tiny import workdir
log = Path(sys.argv[1])
workdir.append(log, b"first")
resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
try:
    workdir.append(log, b"a line that does not fit")
except OSError as error:
    print(error.filename)
"""


def test_a_log_that_can_grow_no_further_keeps_no_half_line(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    told = subprocess.run([sys.executable, "-c", LIMITED, str(log)], capture_output=True, text=True, check=True)
    assert told.stdout == f"{log}\n"
    assert log.read_bytes() == b"first\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk_is_told_with_the_file_that_it_struck():
    struck = pytest.raises(WalkgateError, match=r"^codec: /dev/full: No space left on device$")
    with struck, workdir.told("codec", Path("out/codec")):
        workdir.append(Path("/dev/full"), b"line")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "heard: out/heard: No space left on device"),
        (
            OSError("100 requested and 0 written"),
            r"heard: out/heard: 100 requested and 0 written \(is the disk full\?\)",
        ),
        (FileNotFoundError(errno.ENOENT, "No such file", "out/texts/a"), "heard: out/texts/a is missing; fetch it"),
        (ValueError("of other lines"), "heard: of other lines"),
        (FloatingPointError("diverged"), "heard: diverged"),
        (
            BrokenProcessPool("gone"),
            r"heard: one of its processes was ended from outside \(was there too little memory\?\)",
        ),
        (
            subprocess.CalledProcessError(255, ["festival", "-b"], stderr=b"a\nfull disk\n"),
            "heard: the command festival ended with 255: full disk",
        ),
        (ImportError("no onnx"), "heard: a package can't be loaded: no onnx; install it again"),
        (KeyError("step"), "heard: out/heard, or what it is made from, lacks 'step'"),
    ],
)
def test_faults_are_one_line_that_begins_with_the_stage(fault: Exception, told: str):
    with pytest.raises(WalkgateError, match=f"^{told}"), workdir.told("heard", Path("out/heard")):
        raise fault


def test_tensors_that_can_not_be_written_are_told_with_the_folder(tmp_path: Path):
    unwritten = pytest.raises(WalkgateError, match=rf"^thinker: {tmp_path} can't be written: ")
    with unwritten, workdir.told("thinker", tmp_path):
        save_file({"a": torch.zeros(1)}, tmp_path)


def test_a_wrong_setting_stays_one():
    with pytest.raises(SettingError, match=r"^--out is wrong$"), workdir.told("heard", Path("out")):
        raise SettingError("--out is wrong")


def test_a_line_that_was_not_written_whole_goes_with_the_next_one(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    for before, kept in ((b"", b""), (b'{"a":1}', b""), (b'{"a":1}\n{"b":', b'{"a":1}\n'), (b"1\n", b"1\n")):
        log.write_bytes(before)
        workdir.append(log, b"2")
        assert log.read_bytes() == kept + b"2\n"


def test_who_waits_for_a_folder_gets_it_and_who_does_not_is_told(tmp_path: Path):
    def wait() -> bool:
        with workdir.locked(tmp_path, wait=True):
            return True

    with ThreadPoolExecutor(1) as other:
        with workdir.locked(tmp_path):
            with pytest.raises(WalkgateError, match=f"process {os.getpid()} works in"), workdir.locked(tmp_path):
                pass
            waiting = other.submit(wait)
            time.sleep(0.1)
            assert not waiting.done()
        assert waiting.result(10)
