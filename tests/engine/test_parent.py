"""A process that is tied to its parent ends with it, whenever that dies. All ends are seen by the end of a shared pipe."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.shared import REPOSITORY

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal is Linux's")

TIED = """
import os, sys, time
from engine.parent import die_with_parent
parent = int(sys.argv[1])
while {orphan} and os.getppid() == parent:
    time.sleep(0.01)
die_with_parent(parent)
print("tied", flush=True)
time.sleep(60)
"""
# Starts the child and waits for a line, which never comes, or ends at once.
PARENT = """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())], stdin=subprocess.DEVNULL)
if {stays}:
    sys.stdin.readline()
"""


def started(*, orphan: bool) -> subprocess.Popen[str]:
    """A process with a child that ties itself to it: after its death (`orphan`) or while it lives."""
    words = [sys.executable, "-c", PARENT.format(stays=not orphan), TIED.format(orphan=orphan)]
    return subprocess.Popen(
        words, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_a_child_is_killed_with_its_parent():
    with started(orphan=False) as process:
        assert process.stdout is not None and process.stdout.readline() == "tied\n"
        process.kill()
        assert process.communicate(timeout=20)[0] == ""


def test_a_child_whose_parent_was_dead_before_it_could_be_tied_ends_at_once():
    with started(orphan=True) as process:
        assert process.communicate(timeout=20)[0] == ""
