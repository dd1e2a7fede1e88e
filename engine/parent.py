"""A process that ends with the one that started it, however that ends. No torch."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies (Linux only), or end at once if it is dead already.

    `parent` is the process id of the one that started this process, handed over by it. The kernel means the thread that did:
    start children in a thread that lives for as long as they may.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Of a parent that died before the call the kernel says nothing; whoever adopts orphans has another id.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
