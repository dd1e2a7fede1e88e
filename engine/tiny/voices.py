"""The voices that speak for training: hibari (a Python package), some of flite and festival (commands on PATH). No torch.

hibari is the voice that the small model learns to speak with; the others bring variety to what it hears.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from engine.tiny.framed import FramedVoice

if TYPE_CHECKING:
    from hibari import Hibari

SAMPLE_RATE = 24000
MAIN_VOICE = "hibari"
# Names inside the programs. flite's own kal has 8 kHz, the sound of a telephone; its kal16 is the same speaker.
FLITE = {"flite-slt": "slt", "flite-rms": "rms", "flite-awb": "awb", "flite-kal": "kal16"}
FESTIVAL = {"festival-slt": "voice_cmu_us_slt_arctic_hts", "festival-kal": "voice_kal_diphone"}
# flite's voices come with its command.
VOICE_PACKAGES = {"festival-slt": "festvox-us-slt-hts", "festival-kal": "festvox-kallpc16k"}
VOICES = (MAIN_VOICE, *FLITE, *FESTIVAL)
HELD_OUT_VOICE = "flite-rms"
# A voice made of hidden Markov models does not look at festival's own parameter.
_FESTIVAL_PACE = {
    "festival-slt": '(set! hts_engine_params (append hts_engine_params \'(("-r" {pace:.4f}))))',
    "festival-kal": "(Parameter.set 'Duration_Stretch {stretch:.4f})",
}

# What the main voice needs, by the modules' names.
PACKAGES = {"hibari": "hibari-tts", "onnx": "onnx"}

EDGE_SECONDS = 0.1
_FADE_SECONDS = 0.01
_FRAME = SAMPLE_RATE // 100
# A frame is silence when it lies this far below the loudest: hibari's pauses lie below -70 dB, its softest consonants at -40.
_SILENCE_DB = -45.0
_LEVEL, _PEAK = 0.07, 0.95

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Line:
    """What is to be spoken and how: `speed` 1 is the voice's own, `pitch` is a factor on all frequencies, formants too.

    hibari follows `speed` in steps, within about 15 %. `seed` is of its noise; the other voices have no choice to make. What
    is `framed`, which hibari alone can be, has neither speed nor pitch: each sound takes whole frames (`framed`).
    """

    text: str
    voice: str
    seed: int
    speed: float = 1.0
    pitch: float = 1.0
    framed: bool = False


def missing(voice: str) -> str | None:
    """Why `voice` can't speak on this machine and what would help, or None when it can."""
    if voice == MAIN_VOICE:
        absent = [name for module, name in PACKAGES.items() if importlib.util.find_spec(module) is None]
        return f"not installed: {', '.join(absent)}; the extra `tiny` brings it" if absent else None
    command, known = ("flite", _flite_voices) if voice in FLITE else ("festival", _festival_voices)
    if shutil.which(command) is None:
        return f"there is no command {command} on PATH; Debian's package {command} has that command"
    name = (FLITE | FESTIVAL)[voice]
    try:
        if name in known():
            return None
        package = f"; Debian's package {VOICE_PACKAGES[voice]} has it" if voice in VOICE_PACKAGES else ""
        return f"{command} has no voice {name}{package}"
    except subprocess.CalledProcessError as error:
        return f"{command} does not run here: it ends with {error.returncode}"
    except OSError as error:
        return f"{command} does not run here: {error.strerror}"


def usable() -> tuple[list[str], dict[str, str]]:
    """The voices for training that can speak here, and for each other one the reason why not."""
    reasons = {voice: reason for voice in VOICES if (reason := missing(voice)) is not None}
    return [voice for voice in VOICES if voice not in reasons and voice != HELD_OUT_VOICE], reasons


def synthesise(texts: Sequence[str], voice: str, seed: int, speed: float = 1.0, pitch: float = 1.0) -> list[Floats]:
    """Return `texts` spoken by `voice`, each float32 [n] at 24 kHz; text i has seed `seed` + i."""
    return speak([Line(text, voice, seed + place, speed, pitch) for place, text in enumerate(texts)])


def speak(lines: Sequence[Line]) -> list[Floats]:
    """Return each line spoken, float32 [n] at 24 kHz, at one level and with at most EDGE_SECONDS of silence at its ends.

    A framed line is whole frames instead, the last of them silent.

    ValueError names a voice that is not known, or a line that gave no sound.
    """
    strangers = {line.voice for line in lines} - set(VOICES)
    if strangers:
        raise ValueError(f"unknown voices {sorted(strangers)}; known are {', '.join(VOICES)}")
    spoken: dict[int, Floats] = {}
    for names, say in ((FLITE, _flite), (FESTIVAL, _festival), ((MAIN_VOICE,), _hibari)):
        places = [place for place, line in enumerate(lines) if line.voice in names]
        for place, (samples, rate) in zip(places, say([lines[place] for place in places]), strict=True):
            spoken[place] = _finished(lines[place], samples, rate)
    return [spoken[place] for place in range(len(lines))]


def frame_sounds(text: str) -> str:
    """The sign of the sound in every frame of a framed line of `text`."""
    return _framed_voice().sounds(text)


# Each of the three below speaks lines at the pace that, once the pitch is changed by resampling, is the speed asked for.
def _hibari(lines: Sequence[Line]) -> Iterator[tuple[Floats, int]]:
    for line in lines:
        if line.framed:
            yield _framed_voice()(line.text, line.seed), SAMPLE_RATE
        else:
            yield _hibari_voice()(line.text, speed=line.speed / line.pitch, seed=line.seed), SAMPLE_RATE


@functools.cache
def _hibari_voice() -> Hibari:
    from hibari import Hibari

    return Hibari()


@functools.cache
def _framed_voice() -> FramedVoice:
    return FramedVoice(_hibari_voice())


def _flite(lines: Sequence[Line]) -> Iterator[tuple[Floats, int]]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "spoken.wav")
        for line in lines:
            stretch = f"duration_stretch={line.pitch / line.speed:.4f}"
            command = ["flite", "-voice", FLITE[line.voice], "--setf", stretch, "-t", line.text, "-o", path]
            subprocess.run(command, check=True, capture_output=True)
            yield _spoken(path, line)


def _festival(lines: Sequence[Line]) -> Iterator[tuple[Floats, int]]:
    """One start of the command for all lines, since it takes longer than a line."""
    if not lines:
        return
    with tempfile.TemporaryDirectory() as folder:
        paths = [os.path.join(folder, f"{place}.wav") for place in range(len(lines))]
        script = Path(folder) / "lines.scm"
        script.write_text("".join(map(_festival_call, lines, paths)), encoding="utf-8")
        subprocess.run(["festival", "-b", script], check=True, capture_output=True)
        yield from map(_spoken, paths, lines)


def _spoken(path: str, line: Line) -> tuple[Floats, int]:
    """What a command wrote: samples [n] and their rate."""
    try:
        samples, rate = soundfile.read(path, dtype="float32")
    except soundfile.LibsndfileError:
        raise ValueError(f"{line.voice} wrote no speech of {line.text!r}; is the disk of {path} full?") from None
    return samples, rate


def _festival_call(line: Line, path: str) -> str:
    text = line.text.replace("\\", " ").replace('"', " ")
    pace = _FESTIVAL_PACE[line.voice].format(pace=line.speed / line.pitch, stretch=line.pitch / line.speed)
    return f'({FESTIVAL[line.voice]})\n{pace}\n(utt.save.wave (utt.synth (Utterance Text "{text}")) "{path}" \'riff)\n'


@functools.cache
def _flite_voices() -> frozenset[str]:
    done = subprocess.run(["flite", "-lv"], check=True, capture_output=True, text=True)
    return frozenset(done.stdout.partition(":")[2].split())


@functools.cache
def _festival_voices() -> frozenset[str]:
    command = ["festival", "-b", '(mapcar (lambda (voice) (format t "voice_%s\\n" voice)) (voice.list))']
    return frozenset(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())


def _finished(line: Line, samples: Floats, rate: int) -> Floats:
    if rate * line.pitch != SAMPLE_RATE and len(samples):
        samples = soxr.resample(samples, rate * line.pitch, SAMPLE_RATE)
    if not np.abs(samples).max(initial=0.0) > 0:
        raise ValueError(f"{line.voice} made no sound of {line.text!r}")
    return levelled(samples if line.framed else trimmed(samples))


def trimmed(samples: Floats) -> Floats:
    """Cut silence at both ends of `samples` [n] at 24 kHz to at most EDGE_SECONDS, and fade the cuts: [m], m <= n."""
    loud = np.flatnonzero(_decibels(samples) > _SILENCE_DB)
    edge, fade = round(EDGE_SECONDS * SAMPLE_RATE), round(_FADE_SECONDS * SAMPLE_RATE)
    start = max(0, int(loud[0]) * _FRAME - edge)
    end = min(len(samples), (int(loud[-1]) + 1) * _FRAME + edge)
    cut = samples[start:end].copy()
    ramp = np.linspace(0.0, 1.0, min(fade, len(cut)), dtype=np.float32)
    cut[: len(ramp)] *= ramp
    cut[len(cut) - len(ramp) :] *= ramp[::-1]
    return cut


def levelled(samples: Floats) -> Floats:
    """Scale `samples` [n] at 24 kHz to a root mean square of 0.07 where it is not silence, and no peak over 0.95: [n]."""
    loud = np.repeat(_decibels(samples) > _SILENCE_DB, _FRAME)[: len(samples)]
    level = math.sqrt(float(np.mean(np.square(samples[loud]), dtype=np.float64)))
    gain = min(_LEVEL / level, _PEAK / float(np.abs(samples).max()))
    return np.asarray(samples * np.float32(gain), dtype=np.float32)


def _decibels(samples: Floats) -> Floats:
    """Energy of frames of 10 ms against the loudest of them: [ceil(n / 240)]."""
    frames = np.pad(samples, (0, -len(samples) % _FRAME)).reshape(-1, _FRAME)
    energy = np.square(frames).mean(axis=1) + 1e-12
    return np.asarray(10 * np.log10(energy / energy.max()), dtype=np.float32)
