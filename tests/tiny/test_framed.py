"""The main voice in whole frames: how its sounds are told apart, how many frames they take, and what is heard."""

from __future__ import annotations

import numpy as np
import pytest

from engine.tiny import voices
from engine.tiny.framed import FRAME, LEAD, MOST, MOST_LAST, TAIL, UNITS, Sound, counted, grouped, stretched
from engine.tiny.voices import MAIN_VOICE, Line
from tests.tiny.test_speech import needs

SENTENCES = ("The gardener sold the brown mirror for sixty dollars.", "What is seven plus five?", "No. Yes!")


def test_a_sound_has_the_space_and_the_stress_before_it():
    assert grouped("ə dˈɑɡ.") == [
        Sound("ə", 0, 0),
        Sound("d", 1, 2),
        Sound("ɑ", 3, 4),
        Sound("ɡ", 5, 5),
        Sound(".", 6, 6),
    ]
    assert grouped("ə ") == [Sound("ə", 0, 0), Sound(" ", 1, 1)]


def test_a_sound_takes_the_whole_frames_next_to_its_own_length_within_bounds():
    sounds = grouped("ə dˈɑɡ.")
    natural = [0.4, 1.0, 1.0, 2.0, 4.0, 99.0, 20.0]
    assert counted(sounds, natural) == [1, 1, 2, MOST_LAST, MOST_LAST]
    assert counted(sounds, [99.0] * 7) == [MOST, MOST, MOST, MOST_LAST, MOST_LAST]


def test_units_of_sounds_end_where_their_frames_do():
    sounds = grouped("ə dˈɑɡ.")
    natural = [0.4, 1.0, 1.0, 2.0, 4.0, 1.0, 6.0]
    frames = counted(sounds, natural)
    units = stretched(sounds, frames, natural)
    assert len(units) == 7 + 2 and min(units) >= 1
    assert units[0] == round(UNITS * LEAD)
    ends = np.cumsum(units)
    for one, end in zip(sounds, LEAD + np.cumsum(frames), strict=True):
        assert ends[1 + one.last] == round(UNITS * end)
    assert ends[-1] == round(UNITS * (LEAD + sum(frames) + TAIL))
    # A stressed vowel's share is as natural as whole units can be.
    assert units[4:6] == [2, 4]


@pytest.fixture(scope="module")
def spoken() -> list[voices.Floats]:
    needs(MAIN_VOICE)
    return voices.speak([Line(text, MAIN_VOICE, 0, framed=True) for text in SENTENCES])


def test_a_framed_line_is_whole_frames_a_sound_each(spoken):
    for text, wave in zip(SENTENCES, spoken, strict=True):
        signs = voices.frame_sounds(text)
        assert len(wave) == FRAME * len(signs) and signs[0] == signs[-1] == " "
        energy = np.square(wave.reshape(-1, FRAME)).mean(1)
        assert energy[-1] < 1e-3 * energy.max()
    assert [len(part) > 2 for part in voices.frame_sounds(SENTENCES[2]).split("  ")] == [True, True]


def test_a_framed_line_is_the_same_for_a_seed_and_as_long_for_another(spoken):
    again, other = (voices.speak([Line(SENTENCES[1], MAIN_VOICE, seed, framed=True)])[0] for seed in (0, 1))
    assert np.array_equal(spoken[1], again) and len(other) == len(again) and not np.array_equal(other, again)


def test_a_framed_line_takes_longer_than_the_voice_would_but_not_by_half(spoken):
    plain = voices.speak([Line(text, MAIN_VOICE, 0) for text in SENTENCES[:2]])
    ratio = sum(map(len, spoken[:2])) / sum(map(len, plain))
    assert 1.1 < ratio < 1.5


def test_nothing_to_say_is_an_error(spoken):
    with pytest.raises(ValueError, match="there is nothing to say in ''"):
        voices.speak([Line("", MAIN_VOICE, 0, framed=True)])
