"""Processes that the gate starts: each in a group of its own under a warden, so that it ends with the gate whatever happens.

Also here: reading the end of a log.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_WARDEN = str(Path(__file__).with_name("warden.py"))
_KILL_S = 5.0  # for the warden to end all that its child started; it takes milliseconds
_TAIL_BYTES = 8192

# How git tells the programs that it starts (hooks, aliases, `rebase -x`) which repository, index and objects are meant: what
# `git rev-parse --local-env-vars` lists, and where a push's objects wait for its hooks. With these a git that the gate runs
# elsewhere would write into that repository. Not among them are settings (GIT_CONFIG_PARAMETERS, GIT_CONFIG_COUNT), which git
# hands to its own submodules too: a safe.directory may have to be there.
GIT_PLACES = frozenset(
    {
        "GIT_ALTERNATE_OBJECT_DIRECTORIES",
        "GIT_COMMON_DIR",
        "GIT_CONFIG",
        "GIT_DIR",
        "GIT_GRAFT_FILE",
        "GIT_IMPLICIT_WORK_TREE",
        "GIT_INDEX_FILE",
        "GIT_INTERNAL_SUPER_PREFIX",
        "GIT_NO_REPLACE_OBJECTS",
        "GIT_OBJECT_DIRECTORY",
        "GIT_PREFIX",
        "GIT_QUARANTINE_PATH",
        "GIT_REPLACE_REF_BASE",
        "GIT_SHALLOW_FILE",
        "GIT_WORK_TREE",
    }
)


def environment() -> dict[str, str]:
    """The caller's environment for a child, without what git says in it of a repository that may be another one."""
    return {key: value for key, value in os.environ.items() if key not in GIT_PLACES}


class Child:
    """A running process group: the warden leads it and ends with the code of the program that was asked for.

    The group is not the terminal's, so Ctrl-C reaches the gate alone. `stdin`, `stdout` and `stderr` are those of subprocess; a
    file must be open for appending, since the warden cuts it when it gets long. Without `env` it gets `environment()`.
    """

    def __init__(
        self,
        words: Sequence[str],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.PIPE,
    ) -> None:
        reader, self._lifeline = os.pipe()
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [sys.executable, "-I", "-S", _WARDEN, str(reader), *words],
                cwd=cwd,
                env=environment() if env is None else env,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(reader,),
                start_new_session=True,
            )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(reader)

    def stop(self, patience_s: float = 0.0) -> None:
        """End all that the program started: SIGTERM to the group, `patience_s` seconds, then SIGKILL for whatever is left."""
        try:
            if patience_s:
                self._signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(patience_s)
        finally:
            self._kill()  # also after a second Ctrl-C

    def _kill(self) -> None:
        try:
            # By the warden, which finds processes that left the group too.
            with suppress(OSError):
                os.write(self._lifeline, b"k")
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_KILL_S)
        finally:
            self._signal(signal.SIGKILL)
            self.process.wait()
            self._close()

    def _signal(self, number: signal.Signals) -> None:
        # The warden leads the group, so its id is the group's even after it has ended.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def _close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                with suppress(OSError):  # bytes that the program never read
                    pipe.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


def run(words: Sequence[str], timeout_s: float | None = None, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end as a Child and return its code and output; subprocess.TimeoutExpired after `timeout_s`."""
    child = Child(words, **options)
    try:
        out, err = child.process.communicate(timeout=timeout_s)
    finally:
        child.stop()
    code = child.process.returncode
    return subprocess.CompletedProcess(list(words), code, out.decode(errors="replace"), err.decode(errors="replace"))


def tail(log: Path, lines: int = 12) -> str:
    """The last lines of a log, indented for a message."""
    try:
        kept = last_lines(log)[-lines:]
    except OSError:
        return f"  (no log at {log})"
    return "\n".join([f"  last lines of {log}:", *(f"  | {line}" for line in kept)]) if kept else f"  ({log} is empty)"


def last_lines(log: Path) -> list[str]:
    """The lines in the last 8 KiB of a log, whose first may be cut; OSError where it can't be read."""
    with log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
        # No more than that: a server that still runs writes meanwhile.
        return file.read(_TAIL_BYTES).decode("utf-8", errors="replace").splitlines()
