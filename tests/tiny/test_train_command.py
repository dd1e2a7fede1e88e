"""`omni tiny train` and its siblings: what a wrong call is told, in one line, and with which exit code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.server import cli
from engine.tiny import shards, stages


def omni(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of a call."""
    monkeypatch.setattr("sys.argv", ["omni", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    code = ended.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--out", "", "--plan", "small"], "the name is empty; name a folder"),
        (["--out", "{file}", "--plan", "small"], "{file} is not a folder; name another"),
        (["--out", "{file}/below", "--plan", "small"], "--out {file}/below can't be made: Not a directory"),
        (["--out", "/proc/x", "--plan", "small"], "--out /proc/x can't be made"),
        (["--out", "a" * 300, "--plan", "small"], "File name too long"),
        (["--out", "{out}", "--plan", "small", "--only", ","], "--only: there is no stage ''"),
        (["--out", "{out}", "--plan", "small", "--only", ""], "--only: there is no stage ''"),
        (["--out", "{out}", "--plan", "tiny"], "--plan must be one of h200, small, is 'tiny'"),
        (["--out", "{out}", "--librispeech", "{folder}", "--plan", "small"], "has no file dev-clean.trans.txt"),
        (["--out", "{out}", "--plan", "small", "--seed", "99999999999999999999"], "--seed"),
    ],
)
def test_wrong_calls_are_told_in_a_line_and_make_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    told: str,
):
    places = {"file": tmp_path / "file", "folder": tmp_path / "folder", "out": tmp_path / "out"}
    places["file"].touch()
    places["folder"].mkdir()
    code, error = omni(monkeypatch, capsys, "tiny", "train", *(one.format(**places) for one in arguments))
    assert code == cli.EXIT_USAGE
    assert told.format(**places) in error and error.count("\n") == 1
    assert not places["out"].exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_plan_for_a_gpu_names_the_small_one_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    code, error = omni(monkeypatch, capsys, "tiny", "train", "--out", str(tmp_path / "out"))
    assert code == cli.EXIT_USAGE
    assert "--plan h200 needs a GPU" in error and "--plan small" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flag", "value", "command"), [("--seed", "0", "train"), ("--seed", "3", "score"), ("--out", "z", "train")]
)
def test_a_flag_before_the_command_is_refused_since_the_command_would_not_read_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flag: str, value: str, command: str
):
    code, error = omni(monkeypatch, capsys, "tiny", flag, value, command, "--out", "unused")
    assert code == cli.EXIT_USAGE
    assert f"{flag} {value} stands before {command}" in error


def test_a_stage_that_fails_is_told_in_a_line_that_begins_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    for name in ("texts", "mels"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "done").touch()
    known = [" ".join(stages.words(text)).upper() for text in stages.sentences(0, stages.STAND_INS)]
    shards.write_list(tmp_path / "texts" / "references.jsonl", known)
    shards.write_list(tmp_path / "texts" / "heard.jsonl", stages._lines_to_hear(stages.Plan.small(), known))
    arguments = ("tiny", "train", "--out", str(tmp_path), "--plan", "small", "--only", "thinker")
    code, error = omni(monkeypatch, capsys, *arguments)
    assert code == cli.EXIT_FAILED
    assert error.startswith(f"omni: thinker: {tmp_path}/texts: the tokenizer can't be read") and error.count("\n") == 1


def test_the_score_checks_its_folders_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    code, error = omni(monkeypatch, capsys, "tiny", "score", str(tmp_path), "--out", "")
    assert code == cli.EXIT_USAGE and "the name is empty" in error
    arguments = ("--out", str(tmp_path / "out"), "--librispeech", str(tmp_path))
    code, error = omni(monkeypatch, capsys, "tiny", "score", str(tmp_path), *arguments)
    assert code == cli.EXIT_USAGE and "has no file dev-clean.trans.txt" in error
