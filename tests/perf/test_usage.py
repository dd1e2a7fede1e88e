"""What the programs refuse before they measure: one line with the fix, and an exit code that says which kind it is."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.perf import ablate, boots, h200
from tests.perf.usage import count, folder_to_write, seconds
from tests.shared import REPOSITORY

MAINS = {"ablate": ablate.main, "boots": boots.main, "h200": h200.main}


def started(name: str, *words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own that sees no GPU, with `path` before what it could import."""
    places = [str(place) for place in (path, REPOSITORY) if place is not None]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-P", "-m", f"tests.perf.{name}", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def refused(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which a program refuses its usage."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit) as caught:
        MAINS[name]()
    err = capsys.readouterr().err
    assert caught.value.code == 64 and err.startswith(f"{name}: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize("name", ["ceiling", "ablate", "boots", "h200"])
def test_without_pytorch_or_a_gpu_a_program_says_so_in_one_line(name: str, tmp_path: Path):
    out = [] if name == "ceiling" else ["--out", str(tmp_path / "out")]
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    audio = ["--sets", "h200"] if name == "h200" else []
    for path, told in ((None, "sees no CUDA GPU; run it on"), (tmp_path, "no torch here; run it with a Python that")):
        done = started(name, *out, *audio, path=path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (69, "", 1), done.stderr
        assert done.stderr.startswith(f"{name}: {sys.executable}: ") and told in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_ceiling_takes_no_argument():
    done = started("ceiling", "--gibibytes", "4")
    assert (done.returncode, done.stderr) == (64, "ceiling: unrecognized arguments: --gibibytes 4\n")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu' (choose from "),
        (["--model", "/none"], "argument --model: '/none' has no config.json; name a checkpoint folder"),
        (["--out", ""], "argument --out: '' is no folder; name one, which need not exist yet"),
        (["--out", __file__], f"argument --out: '{__file__}' is no folder;"),
        (["--out", f"{__file__}/out"], f"argument --out: '{__file__}/out' is no folder;"),
        (["--devic", "cpu"], "unrecognized arguments: --devic cpu"),
    ],
)
@pytest.mark.parametrize("name", MAINS)
def test_wrong_usage_is_refused_alike(
    name: str, words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert told in refused(name, ["--out", "x", *words], monkeypatch, capsys)


def test_a_switch_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    told = refused("ablate", ["--out", "x", "--device", "cpu", "--only", "gemv"], monkeypatch, capsys)
    assert told.startswith("ablate: --only: 'gemv' is no switch of text on cpu; there are ")


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (count, {"1": 1, "12": 12}, ["0", "-1", "1.5", "", "x"]),
        (seconds, {"90": 90.0, "0.5s": 0.5}, ["0", "-1", "nan", "inf", "9m", ""]),
    ],
)
def test_numbers_are_taken_only_where_they_mean_something(
    kind: Callable[[str], float], right: dict[str, float], wrong: list[str]
):
    assert {text: kind(text) for text in right} == right
    for text in wrong:
        with pytest.raises(ArgumentTypeError, match=f"{text!r} is no "):
            kind(text)


def test_a_folder_may_be_one_that_is_still_to_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for text in ("a/b", ".", str(tmp_path), str(tmp_path / "a")):
        assert folder_to_write(text) == Path(text)
