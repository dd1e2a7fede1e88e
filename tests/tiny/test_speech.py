"""Voices and corpora of speech. What a machine can't speak is skipped with the reason."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.tiny import shards, speech, voices
from engine.tiny.speech import Clip
from engine.tiny.voices import FESTIVAL, FLITE, HELD_OUT_VOICE, MAIN_VOICE, Floats, Line

RATE = 24000
SENTENCE = "The train to London leaves at half past nine."
TEXTS = ["What is seven plus five?", SENTENCE, "How do you spell the word bridge?", "Anna walks to the river."]


def tone(seconds: float, hertz: float = 300.0, height: float = 0.5) -> Floats:
    return (height * np.sin(2 * np.pi * hertz * np.arange(round(seconds * RATE)) / RATE)).astype(np.float32)


def silence(seconds: float) -> Floats:
    return np.zeros(round(seconds * RATE), np.float32)


def needs(voice: str) -> None:
    reason = voices.missing(voice)
    if reason is not None:
        pytest.skip(reason)


def centre(samples: Floats) -> float:
    """The frequency in Hz with half of the power below it."""
    power = np.cumsum(np.abs(np.fft.rfft(samples)) ** 2)
    return float(np.fft.rfftfreq(len(samples), 1 / RATE)[np.searchsorted(power, power[-1] / 2)])


def test_silence_at_the_ends_is_cut_to_a_tenth_of_a_second_and_faded():
    cut = voices.trimmed(np.concatenate([silence(0.5), tone(0.3), silence(0.02), tone(0.1), silence(0.9)]))
    assert len(cut) == round(0.62 * RATE)
    assert np.abs(cut[: round(0.1 * RATE)]).max() == 0
    assert np.abs(cut[round(0.11 * RATE) : round(0.4 * RATE)]).max() == pytest.approx(0.5, abs=1e-3)


def test_a_sound_without_silence_keeps_its_length_and_starts_at_zero():
    cut = voices.trimmed(tone(0.5) + np.float32(0.2))
    assert (len(cut), cut[0], cut[-1]) == (RATE // 2, 0.0, 0.0)


def test_levels_are_equal_whatever_the_loudness_and_the_pauses():
    quiet = voices.levelled(np.concatenate([tone(0.5, height=0.01), silence(2.0), tone(0.5, height=0.01)]))
    assert np.sqrt(np.mean(np.square(quiet[: RATE // 2]))) == pytest.approx(0.07, rel=1e-3)
    click = silence(1.0)
    click[1000] = 0.3
    assert np.abs(voices.levelled(click + tone(1.0, height=1e-4))).max() == pytest.approx(0.95)


def test_a_plan_has_its_shares_and_is_the_same_for_a_seed():
    names = [MAIN_VOICE, "flite-slt", "festival-kal"]
    lines = speech.plan([f"text {number}" for number in range(2000)], names, seed=3)
    assert [line.text for line in lines[:2]] == ["text 0", "text 1"]
    assert sum(line.voice == MAIN_VOICE for line in lines) == pytest.approx(1400, abs=80)
    assert sum(line.voice == "flite-slt" for line in lines) == pytest.approx(300, abs=60)
    changed = [line for line in lines if (line.speed, line.pitch) != (1.0, 1.0)]
    assert len(changed) == pytest.approx(1000, abs=90)
    assert all(0.85 <= value <= 1.2 for line in changed for value in (line.speed, line.pitch))
    assert len({line.seed for line in lines}) == 2000
    assert lines == speech.plan([f"text {number}" for number in range(2000)], names, seed=3)
    assert lines != speech.plan([f"text {number}" for number in range(2000)], names, seed=4)


def test_a_plan_for_one_voice_uses_it_alone():
    assert {line.voice for line in speech.plan(TEXTS * 9, [MAIN_VOICE], 0)} == {MAIN_VOICE}
    assert {line.voice for line in speech.plan(TEXTS * 9, ["flite-slt"], 0)} == {"flite-slt"}


def test_the_held_out_voice_is_never_one_for_training():
    assert HELD_OUT_VOICE == "flite-rms"
    assert HELD_OUT_VOICE not in voices.usable()[0]


def test_a_command_that_is_not_there_is_a_reason_that_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    usable, reasons = voices.usable()
    assert set(usable) <= {MAIN_VOICE}
    assert reasons["flite-slt"] == "there is no command flite on PATH; Debian's package flite has that command"
    assert reasons["festival-kal"].startswith("there is no command festival on PATH")


def test_a_command_that_does_not_run_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "festival").write_text("#!/bin/sh\nexit 255\n")
    (tmp_path / "festival").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    voices._festival_voices.cache_clear()
    assert voices.missing("festival-kal") == "festival does not run here: it ends with 255"


def test_a_voice_that_its_command_lacks_is_a_reason_that_names_its_package(tmp_path, monkeypatch):
    (tmp_path / "festival").write_text("#!/bin/sh\necho '()'\n")
    (tmp_path / "festival").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(voices, "_festival_voices", lambda: frozenset({"voice_other"}))
    wanted = "festival has no voice voice_kal_diphone; Debian's package festvox-kallpc16k has it"
    assert voices.missing("festival-kal") == wanted


def test_as_many_sentences_are_taken_as_the_hours_need():
    def sentences(seed: int, count: int) -> list[str]:
        return [f"{seed} " + "a" * 48] * count

    # 50 characters of 0.058 s are 2.9 s.
    assert len(speech.enough(sentences, hours=0.25, seed=7)) == 311
    assert speech.enough(sentences, hours=0.001, seed=7) == ["7 " + "a" * 48] * 2


def test_a_generator_that_runs_dry_is_an_error():
    with pytest.raises(ValueError, match="128 sentences were asked for and 100 came"):
        speech.enough(lambda seed, count: ["a sentence"] * min(count, 100), hours=1.0, seed=0)


def test_an_unknown_voice_is_refused():
    with pytest.raises(ValueError, match=r"unknown voices \['nobody'\]"):
        voices.synthesise(["Hello."], "nobody", 0)


def test_hibari_says_the_same_for_a_seed_and_another_noise_for_another():
    needs(MAIN_VOICE)
    first, second = voices.synthesise([SENTENCE, SENTENCE], MAIN_VOICE, seed=5)
    assert (first.dtype, first.ndim) == (np.float32, 1)
    assert 2.0 < len(first) / RATE < 3.5
    assert np.array_equal(first, voices.synthesise([SENTENCE], MAIN_VOICE, seed=5)[0])
    assert len(first) == len(second)
    assert not np.array_equal(first, second)


def test_a_text_without_a_sound_is_an_error_that_names_it():
    needs(MAIN_VOICE)
    with pytest.raises(ValueError, match="hibari made no sound of ' '"):
        voices.synthesise([" "], MAIN_VOICE, 0)


@pytest.mark.parametrize("voice", [MAIN_VOICE, *FLITE, *FESTIVAL])
def test_a_voice_follows_speed_and_pitch(voice: str):
    needs(voice)
    plain = voices.synthesise([SENTENCE], voice, 0)[0]
    slow = voices.synthesise([SENTENCE], voice, 0, speed=0.8)[0]
    assert len(slow) / len(plain) == pytest.approx(1.25, rel=0.05)
    # At a pitch equal to the speed the voice speaks at its own pace, and resampling alone makes it faster and higher.
    high = voices.synthesise([SENTENCE], voice, 0, speed=1.2, pitch=1.2)[0]
    assert len(plain) / len(high) == pytest.approx(1.2, rel=0.03)
    assert centre(high) / centre(plain) == pytest.approx(1.2, rel=0.05)


def test_voices_mixed_in_one_call_come_back_in_order():
    names = [MAIN_VOICE, "festival-kal", "flite-slt"]
    for voice in names:
        needs(voice)
    lines = [Line(text, voice, 0) for text in TEXTS for voice in names]
    for line, samples in zip(lines, voices.speak(lines), strict=True):
        assert np.array_equal(samples, voices.speak([line])[0])


@pytest.fixture
def three_shards(monkeypatch: pytest.MonkeyPatch) -> list[Line]:
    """Lines that fill three shards."""
    needs(MAIN_VOICE)
    monkeypatch.setattr(speech, "SHARD_SECONDS", 2.5)
    return [Line(text, MAIN_VOICE, seed) for seed, text in enumerate(TEXTS + TEXTS[:1])]


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_corpus_is_the_same_from_any_number_of_processes_and_goes_on(three_shards: list[Line], tmp_path: Path):
    one, two, told = tmp_path / "one", tmp_path / "two", []
    clips = speech.record(three_shards, one, workers=1, tell=told.append)
    assert told[0] == "one: 3 shards, 3 of them to make"
    assert {clip.shard for clip in clips} == {"00000.npy", "00001.npy", "00002.npy"}
    assert speech.manifest(one) == clips
    for clip, spoken in zip(clips, voices.speak(three_shards), strict=True):
        assert np.abs(speech.read(one, clip) - spoken).max() <= 0.5 / 32768 + 1e-9
    assert sum(clip.seconds for clip in clips) == pytest.approx(
        sum(len(np.load(path)) for path in one.glob("*.npy")) / RATE
    )

    speech.record(three_shards, two, workers=2, tell=told.append)
    assert folder_bytes(one) == folder_bytes(two)
    # Broken off: one shard was never made, of another the samples are there and the list is not.
    for name in ("00000.npy", "00000.jsonl", "00002.jsonl", shards.MANIFEST):
        (two / name).unlink()
    untouched = (two / "00001.npy").stat().st_mtime_ns
    speech.record(three_shards, two, workers=1, tell=told.append)
    assert told[-3] == "two: 3 shards, 2 of them to make"
    assert folder_bytes(one) == folder_bytes(two)
    assert (two / "00001.npy").stat().st_mtime_ns == untouched


def test_a_folder_with_other_lines_is_refused(three_shards: list[Line], tmp_path: Path):
    speech.record(three_shards[:1], tmp_path, workers=1, tell=lambda _: None)
    with pytest.raises(ValueError, match="holds a corpus of other lines"):
        speech.record([Line("Hello.", MAIN_VOICE, 0)], tmp_path, workers=1, tell=lambda _: None)


def test_a_line_that_can_not_be_spoken_ends_the_work(tmp_path: Path):
    needs(MAIN_VOICE)
    with pytest.raises(ValueError, match="made no sound of ' '"):
        speech.record([Line(" ", MAIN_VOICE, 0)], tmp_path, workers=1, tell=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_that_is_too_big_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="shard 00000 has 16000002 bytes; 16000000 is the most"):
        shards.save(tmp_path, "00000", [np.zeros(8_000_001, np.int16)])


def test_a_corpus_of_the_generators_sentences_lasts_about_as_long_as_asked(tmp_path: Path):
    text = pytest.importorskip("engine.tiny.text")
    needs(MAIN_VOICE)
    clips = speech.corpus(tmp_path, 0.02, 1, 1, text.sentences, [MAIN_VOICE], tell=lambda _: None)
    assert sum(clip.seconds for clip in clips) == pytest.approx(72, rel=0.15)
    assert [clip.line.text for clip in clips] == list(text.sentences(1, 64))[: len(clips)]
    assert isinstance(clips[0], Clip)
