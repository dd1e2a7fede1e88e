"""A small process between the gate and what it starts: it ends its whole group when the gate is gone, even by kill -9.

Run by path with the standard library alone: `python -I -S warden.py LIFELINE WORDS...`. LIFELINE is the read
end of a pipe whose other end only the gate holds: once it closes, the gate has ended. Otherwise the warden ends as its child
did.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

PATIENCE_S = 5.0
EXIT_NOT_FOUND = 127  # the shell's code for a program that can't be started


def main() -> None:
    """Run WORDS, and end as it does."""
    lifeline, words = int(sys.argv[1]), sys.argv[2:]
    # A handler and not SIG_IGN, which the child would inherit: the group's SIGTERM is for the child, whose end ends this.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        child = subprocess.Popen(words)
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
        sys.exit(EXIT_NOT_FOUND)
    cut = threading.Event()
    threading.Thread(target=_end_the_group_when_cut, args=(lifeline, cut), daemon=True).start()
    code = child.wait()
    if cut.is_set():
        os.killpg(0, signal.SIGKILL)  # what the child left behind; nobody else is there to end it
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _end_the_group_when_cut(lifeline: int, cut: threading.Event) -> None:
    os.read(lifeline, 1)
    cut.set()
    os.killpg(0, signal.SIGTERM)
    time.sleep(PATIENCE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
