"""Speaks the clips of the workload: transcripts below -> 16 kHz mono FLAC files and their manifest.

Run from the repository root with the extra `tiny` installed: `python workloads/make_clips.py`. It rewrites
workloads/clips/. The committed files are the workload; another version of the voice, of onnxruntime or of libsndfile may
give other bytes, hence another workload hash, so run it only to change the clips on purpose.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr
from hibari import Hibari
from numpy.typing import NDArray

SAMPLE_RATE = 16_000
SEED = 20_000  # clip k is spoken with seed SEED + k
PEAK = 0.35  # of full scale: loud enough for a recogniser, and FLAC needs fewer bits for quiet speech
PAUSE_S = 0.12  # silence kept before and after the words
SILENCE = 0.01  # of the peak; below it a sample counts as silence


@dataclass(frozen=True)
class Speaker:
    """A way to speak with the one voice of the package: `pitch` scales its pitch and formants, `speed` its pace."""

    name: str
    pitch: float
    speed: float


SPEAKERS = (
    Speaker("heart", 1.0, 1.0),
    Speaker("heart-low", 0.86, 0.95),
    Speaker("heart-deep", 0.93, 1.1),
    Speaker("heart-high", 1.08, 1.05),
)

# Clip k is spoken by SPEAKERS[k % 4].
TRANSCRIPTS = (
    "The kettle is on the stove and the cups are in the sink.",
    "She walked seven miles before breakfast.",
    "Please turn left after the second bridge.",
    "My sister keeps twelve hens behind the barn.",
    "The slow train to the coast leaves at half past nine, and the fast one leaves an hour later.",
    "Nobody answered the door, so we left the parcel with the baker next door.",
    "Can you tell me where the nearest pharmacy is?",
    "It rained for three days, and then the river came up.",
    "The museum is closed on Mondays.",
    "He painted the fence green, but his wife wanted it white.",
    "There are twenty four chairs and only six tables, so some of us will have to eat in the garden.",
    "Open the window a little, it is warm in here.",
    "The baker sells out of rye bread by eight in the morning.",
    "I left my umbrella on the bus again.",
    "Two small boats were waiting outside the port.",
    "Put the butter and the milk back in the fridge.",
    "Our meeting moved to Thursday at a quarter to four, because the large room is taken in the morning.",
    "The old dog slept under the piano all afternoon.",
    "Write your name and your room number on this card.",
    "They planted forty apple trees along the road.",
    "What time does the library close on Saturday?",
    "The ladder is too short to reach the roof.",
    "A cold wind blew the leaves across the empty square, and the last stall packed up its flowers.",
    "We need five more plates and a sharp knife.",
    "The doctor told him to rest for ten days.",
    "Someone has moved the keys from the kitchen table.",
    "Her first car was yellow and had no radio.",
    "The price went up from thirty to thirty five dollars.",
    "Children under 6 ride for free on the number 14 bus.",
    "I would like a table for two near the window.",
    "The bridge was built in nineteen hundred and eleven.",
    "Good night, and do not forget to lock the back door.",
)


def speak(voice: Hibari, text: str, speaker: Speaker, seed: int) -> NDArray[np.float32]:
    """Speak `text` at 16 kHz: samples [n] in [-PEAK, PEAK], trimmed to PAUSE_S of silence on both sides."""
    # The samples are taken to lie at 24 kHz * pitch, which shifts the voice; the pace asked of it undoes the change of tempo.
    spoken = voice(text, speed=speaker.speed / speaker.pitch, seed=seed)
    audio = soxr.resample(spoken, voice.sample_rate * speaker.pitch, SAMPLE_RATE, quality="VHQ")
    audio = audio * (PEAK / np.abs(audio).max())
    loud = np.flatnonzero(np.abs(audio) > SILENCE * PEAK)
    pause = round(PAUSE_S * SAMPLE_RATE)
    trimmed = audio[max(loud[0] - pause, 0) : loud[-1] + pause]
    return trimmed.astype(np.float32)


def check(audio: NDArray[np.float32], name: str) -> None:
    """Refuse samples [n] that cannot be a spoken sentence: a length outside 1.5 to 6 s, or hardly any energy."""
    seconds = len(audio) / SAMPLE_RATE
    if not 1.5 <= seconds <= 6.0:
        raise ValueError(f"{name} lasts {seconds:.2f} s, not 1.5 to 6 s: change its sentence")
    level = float(np.sqrt(np.mean(np.square(audio))))
    if level < 0.02:
        raise ValueError(f"{name} has a level of {level:.4f} of full scale: the voice said next to nothing")


def write_clips(root: Path) -> None:
    """Write every clip and the manifest under `root`/clips."""
    voice = Hibari()
    folder = root / "clips"
    folder.mkdir(exist_ok=True)
    lines = []
    for k, text in enumerate(TRANSCRIPTS):
        speaker = SPEAKERS[k % len(SPEAKERS)]
        name = f"c{k:02d}"
        audio = speak(voice, text, speaker, SEED + k)
        check(audio, name)
        soundfile.write(folder / f"{name}.flac", audio, SAMPLE_RATE, subtype="PCM_16")
        seconds = round(len(audio) / SAMPLE_RATE, 4)
        line = {
            "id": name,
            "audio": f"clips/{name}.flac",
            "text": text,
            "seconds": seconds,
            "speaker": speaker.name,
        }
        lines.append(json.dumps(line, ensure_ascii=False))
    (folder / "manifest.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_clips(Path(__file__).resolve().parent)
