"""A small process between the gate and what it starts: it ends all of that when the gate says so or is gone, even by kill -9.

Run by path with the standard library alone: `python -I -S warden.py LIFELINE WORDS...`. LIFELINE is the read end of a pipe
whose other end only the gate holds: a byte there says "end it now", and once it closes, the gate has ended. Otherwise the
warden ends as its child did. What the child leaves behind is ended then, also where it has a session of its own (Linux). A log
file that it writes to is kept from filling the disk.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress

PATIENCE_S = 5.0
EXIT_NOT_FOUND = 127  # the shell's code for a program that can't be started
LOG_MOST, LOG_FIRST = 64 * 2**20, 8 * 2**20  # bytes: a log over the first is cut down to the second, and grows again
LOG_LOOK_S = 0.2
LOG_MARK = b"\n[the gate cut this log here, which was over %d MiB; what follows came later]\n" % (LOG_MOST >> 20)
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main() -> None:
    """Run WORDS, and end as it does."""
    lifeline, words = int(sys.argv[1]), sys.argv[2:]
    # A handler and not SIG_IGN, which the child would inherit: the group's SIGTERM is for the child, whose end ends this.
    signal.signal(signal.SIGTERM, lambda *_: None)
    _adopt_orphans()
    try:
        child = subprocess.Popen(words)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_NOT_FOUND)
    cut = threading.Event()
    threading.Thread(target=_obey, args=(lifeline, child, cut), daemon=True).start()
    logs = [number for number in (1, 2) if stat.S_ISREG(os.fstat(number).st_mode)]
    if logs:
        threading.Thread(target=_keep_short, args=(logs,), daemon=True).start()
    code = _wait_for(child)
    _end_the_rest()
    if cut.is_set():
        os.killpg(0, signal.SIGKILL)  # where no orphan is adopted, this ends the child's; nobody else is there to do it
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """The exit code of the child, negative for a signal; adopted orphans that end before it are reaped."""
    while True:
        ended, status = os.wait()
        if ended == child.pid:
            child.returncode = os.waitstatus_to_exitcode(status)
            return child.returncode


def _end_the_rest() -> None:
    """Kill whatever the child left behind; what a killed process had started is adopted in turn, until nothing is left."""
    while True:
        for pid in _children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _children() -> list[int]:
    own = str(os.getpid())
    found = []
    for name in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else []):
        with suppress(OSError), open(f"/proc/{name}/stat") as file:
            # pid (name) state parent …, and the name may hold anything
            if file.read().rpartition(")")[2].split()[1] == own:
                found.append(int(name))
    return found


def _obey(lifeline: int, child: subprocess.Popen[bytes], cut: threading.Event) -> None:
    """Wait for the gate's word or its end, and end the child: at once, or politely first."""
    if not os.read(lifeline, 1):
        cut.set()
        os.killpg(0, signal.SIGTERM)
        time.sleep(PATIENCE_S)
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)  # not child.kill(), which may reap it before _wait_for does


def _keep_short(logs: list[int]) -> None:
    """Cut the middle out of a log that has grown too long; its writers append, so they go on where it then ends."""
    while True:
        for number in logs:
            if os.fstat(number).st_size > LOG_MOST:
                os.ftruncate(number, LOG_FIRST)
                os.write(number, LOG_MARK)
        time.sleep(LOG_LOOK_S)


if __name__ == "__main__":
    main()
