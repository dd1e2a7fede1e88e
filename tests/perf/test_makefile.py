"""What `make gpu-bench` runs, by what `make` says that it would."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess

import pytest

from tests.shared import REPOSITORY

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def benchmark_words(*words: str) -> list[str]:
    """The words of the benchmark's command line, after its module."""
    # Without the variables of a `make test` around this.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-n", "gpu-bench", "OUT=out", *words]
    done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60, check=True)
    (line,) = [line for line in done.stdout.splitlines() if "tests.perf.h200" in line]
    return shlex.split(line.partition("tests.perf.h200")[2])


@pytest.mark.parametrize(
    ("given", "sets"),
    [
        ("", "h200"),
        ("--sessions 3", "h200"),
        ("--librispeech 'a folder'", "h200,h200-audio"),
        ("--sets h200-audio --librispeech=hub", "h200-audio"),
    ],
)
def test_options_in_args_leave_the_sets_that_can_be_measured(given: str, sets: str):
    words = benchmark_words(f"ARGS={given}")
    assert words[:2] == ["--out", "out"] and words[4:] == shlex.split(given)
    assert [words[place + 1] for place, word in enumerate(words) if word == "--sets"][-1] == sets
