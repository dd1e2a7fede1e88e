"""The model card: a README.md in the model folder, with curves and spectrograms, from what a training left behind.

Everything in it is read from the training's own files. What they don't say, such as the device of a stage that was logged
without one, the card leaves open.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import soundfile
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from engine.model.clips import log_mel
from engine.model.config import OmniConfig
from engine.tiny import judge, shards, speech, tasks, voices
from engine.tiny.mels import at_16_khz
from engine.tiny.score import HEARD_WER, MOST_LENGTHS, TRAINED_REFERENCES, UNHEARD_REFERENCES, Row
from engine.tiny.shapes import CODES, MAX_BYTES, VOCAB, parameters
from engine.tiny.voices import HELD_OUT_VOICE, MAIN_VOICE, SAMPLE_RATE, Floats, Line

CARD, CURVES, SPECTROGRAMS = "README.md", "curves.png", "spectrograms.png"
# The folder of another training with the same settings, in that of this one.
RERUN = "rerun"
# What was done by hand, or otherwise than this program does it today: Markdown, for whoever reads the card.
NOTES = "notes.md"
MOST_PICTURE_BYTES = 150_000
# Clips that are shown: the first of this part of the score.
SHOWN_PART, SHOWN = "t2s_sentences", 5
# The part whose answers are told apart by kind.
QUESTIONS_PART = "t2t_questions"
# Where so many per cent of the words are heard otherwise than they were meant, a listener can't follow.
UNCLEAR = 50.0

_MEL_BINS, _FRAMES_A_COLUMN, _LEVELS = 48, 2, 12
# By stage: the file of its curve, the losses that are drawn, and what the axis says.
_CURVES = {
    "codec": ("log.jsonl", ("spectral",), "spectral distance"),
    "thinker": ("curve.jsonl", ("text", "letters"), "cross entropy"),
    "talker": ("curve.jsonl", ("first", "rest"), "cross entropy"),
    "decoder": ("curve.jsonl", ("loss",), "spectral distance"),
}
_STAGES = {
    "texts": "texts and tokenizer",
    "spoken": "speech to speak",
    "codec": "codec",
    "codes": "codes of that speech",
    "heard": "speech to listen to",
    "mels": "its log-mel frames, clean and in rooms with noise",
    "thinker": "Thinker and audio encoder",
    "talker": "Talker and code predictor",
    "decoder": "decoder of foreseen codes",
    "export": "model folder",
    "score": "scores",
}
_PARTS = {
    "a2t_sentences": f"transcribe held-out sentences ({MAIN_VOICE})",
    "a2t_templates": f"transcribe sentences of templates and with words that were held out ({MAIN_VOICE})",
    "a2t_librispeech": f"transcribe LibriSpeech texts never heard ({MAIN_VOICE})",
    "a2t_unseen_voice": f"transcribe held-out sentences in a voice never heard ({HELD_OUT_VOICE})",
    "t2t_questions": "answer held-out questions",
    "t2s_sentences": "say held-out sentences, greedy",
    "t2s_sampled": "say held-out sentences, sampled",
    "a2s_questions": "hear a question, say the answer",
}
_UNTIMED = "It was not kept how long it took."
_COLUMNS = {
    "count": "requests",
    "wer": "WER of the text",
    "exact": "exact text",
    "ended": "text ended",
    "speech_ended": "speech ended",
    "too_long": "over twice natural length",
    HEARD_WER: "WER heard against own text",
    "heard_reference_wer": "WER heard against reference",
    "natural_wer": f"WER heard of {MAIN_VOICE}",
    "heard_whole": "heard without a fault",
    "natural_whole": f"{MAIN_VOICE} heard without a fault",
}


class _Scores(msgspec.Struct, frozen=True):
    """What is read of `scores.json`."""

    device: str
    scores: dict[str, dict[str, float]]
    skipped: dict[str, str]


class LogLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of `log.jsonl`: a sitting of a stage, whether the stage was over then, where it ran, hours of speech by voice."""

    stage: str
    seconds: float
    done: bool
    device: str | None = None
    hours: dict[str, float] | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the plan says: whether LibriSpeech's texts were among the data, copies of a clip, examples that are read, and
    for how many minutes each part is trained.
    """

    librispeech: bool
    copies: int
    read: int
    minutes: Mapping[str, float]


def hours(corpus: Path) -> dict[str, float]:
    """Hours of speech by voice in the folder of a corpus."""
    found: dict[str, float] = {}
    for clip in speech.manifest(corpus):
        found[clip.line.voice] = found.get(clip.line.voice, 0.0) + clip.seconds / 3600
    return {voice: round(found[voice], 4) for voice in sorted(found, key=lambda voice: -found[voice])}


def write(folder: Path, out: Path, recipe: Recipe) -> int:
    """Write the card of the model in `folder`, trained and scored in `out`, into that folder; returns the folder's bytes.

    ValueError when pictures or folder would be too large, the score lacks the part that is shown, or the main voice is
    missing here.
    """
    if (reason := voices.missing(MAIN_VOICE)) is not None:
        raise ValueError(f"the card needs the voice {MAIN_VOICE}: {reason}")
    shown = _shown(out / "score")
    pictures = {CURVES: curves(out), SPECTROGRAMS: spectrograms(shown)}
    if (size := sum(map(len, pictures.values()))) > MOST_PICTURE_BYTES:
        raise ValueError(f"the pictures have {size} bytes, at most {MOST_PICTURE_BYTES} may be shipped")
    for name, content in pictures.items():
        (folder / name).write_bytes(content)
    (folder / CARD).write_text(text(folder, out, recipe, [said for said, _, _ in shown]), encoding="utf-8")
    whole = sum(path.stat().st_size for path in folder.iterdir())
    if whole > MAX_BYTES:
        raise ValueError(f"{folder} has {whole} bytes, at most {MAX_BYTES} may be shipped")
    return whole


def _shown(score: Path) -> list[tuple[str, Floats, Floats]]:
    """Sentences, and each as the main voice and as the model says it, [n] and [m] at 24 kHz; silence where it says nothing."""
    rows = [row for row in shards.read_list(score / "rows.jsonl", Row) if row.part == SHOWN_PART][:SHOWN]
    if not rows:
        raise ValueError(f"{score} has no part {SHOWN_PART}; score the model again")
    natural = voices.speak([Line(row.reference, MAIN_VOICE, 0) for row in rows])
    silence = np.zeros(SAMPLE_RATE // 10, dtype=np.float32)
    made = [_read(score / str(row.wav)) if row.seconds else silence for row in rows]
    return [(row.reference, said, again) for row, said, again in zip(rows, natural, made, strict=True)]


def _read(path: Path) -> Floats:
    try:
        samples, _ = soundfile.read(path, dtype="float32")
    except soundfile.LibsndfileError as error:
        raise ValueError(f"{path} can't be read ({error}); score the model again") from None
    return np.asarray(samples)


def curves(out: Path) -> bytes:
    """Losses over steps of the three parts that are trained in `out`, as PNG."""
    figure = Figure(figsize=(9.6, 2.4), dpi=80, layout="constrained")
    for axes, (stage, (name, losses, label)) in zip(figure.subplots(1, len(_CURVES)), _CURVES.items(), strict=True):
        lines = _log(out / stage / name)
        for loss in losses:
            points = {line["step"]: line[loss] for line in lines if loss in line}
            axes.plot(list(points), list(points.values()), linewidth=1, label=loss)
        axes.set_title(_STAGES[stage], fontsize=9)
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylabel(label, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.legend(fontsize=7, frameon=False)
    return _png(figure)


def spectrograms(shown: Sequence[tuple[str, Floats, Floats]]) -> bytes:
    """Log-mel spectrograms as PNG of sentences, as the main voice [n] and as the model [m] says them at 24 kHz."""
    figure = Figure(figsize=(9.6, 1.25 * len(shown) + 0.2), dpi=80, layout="constrained")
    for row, (said, *waves) in zip(figure.subplots(len(shown), 2, squeeze=False), shown, strict=True):
        pictures = [_picture(wave) for wave in waves]
        longest = max(picture.shape[1] for picture in pictures)
        for axes, picture, name in zip(row, pictures, (MAIN_VOICE, "this model"), strict=True):
            # One scale for both, so that lengths can be compared.
            whole = np.pad(picture, ((0, 0), (0, longest - picture.shape[1])))
            axes.imshow(whole, origin="lower", aspect="auto", interpolation="nearest", cmap="Greys", vmin=0, vmax=1)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_title(f"{name}: {said}" if name == MAIN_VOICE else name, fontsize=7, loc="left")
    return _png(figure)


def _picture(samples: Floats) -> Floats:
    """A coarse log-mel spectrogram [bins, columns], from 0 to 1 in few levels, of `samples` [n] at 24 kHz."""
    # A window of the spectrogram is 25 ms long.
    heard = np.pad(at_16_khz(samples), (0, 400))
    mel = log_mel(heard, _MEL_BINS)
    columns = mel.shape[1] // _FRAMES_A_COLUMN
    coarse = mel[:, : columns * _FRAMES_A_COLUMN].reshape(_MEL_BINS, columns, _FRAMES_A_COLUMN).mean(axis=2)
    scaled = (coarse - coarse.min()) / max(float(np.ptp(coarse)), 1e-6)
    return np.asarray(np.rint(scaled * (_LEVELS - 1)) / (_LEVELS - 1), dtype=np.float32)


def _png(figure: Figure) -> bytes:
    # The canvas by its class: pyplot would keep every figure, and look for a screen.
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None}, pil_kwargs={"optimize": True})
    return buffer.getvalue()


def _log(path: Path) -> list[dict[str, Any]]:
    """The lines of a curve; none of a training that ended before its first."""
    lines = shards.read_list(path, dict[str, Any]) if path.exists() else []
    if any("step" not in line for line in lines):
        raise ValueError(f"{path} is damaged: a line lacks its step; fetch it again, or delete it")
    return lines


def text(folder: Path, out: Path, recipe: Recipe, shown: Sequence[str]) -> str:
    """The card of the model in `folder`; `shown` are the sentences of the spectrograms."""
    log = _logged(out)
    found = _found(out)
    parts = [
        _introduction(folder.name),
        _sizes(OmniConfig.load(folder)),
        _data(out, log, recipe),
        _training(out, log, recipe),
        _scores(found),
        *_kinds(out / "score"),
        *([_rerun(out / RERUN)] if (out / RERUN).exists() else []),
        _pictures(shown),
        _limits(found),
        _LICENCE,
    ]
    return "\n".join(parts)


def _introduction(name: str) -> str:
    spelled, opposites = len(tasks.SPELLING_WORDS), len(tasks.OPPOSITES)
    return f"""---
license: apache-2.0
language:
- en
tags:
- text
- audio
- speech
---
# {name}

A model of the Qwen3-Omni architecture that is small enough for a laptop and was trained from nothing. It reads English text or
listens to English speech, and answers with text or with text and speech. It is there to show and to test a serving engine
with numbers that mean something; it is no assistant.

What it was trained to do: transcribe speech; repeat a text; answer questions about sums and differences up to twenty, the
spelling of {spelled} words and the opposites of {opposites} that it knows by heart, days and months, a name that was given a
turn before, and stories of two sentences; say all of this aloud. To short questions of other kinds it mostly answers "I do not
know that."; what is unlike its training (most greetings, instructions, long prompts) gets nonsense.

With audio, the text of the turn says what to do: "{tasks.TRANSCRIBE[0]}" or "{tasks.ANSWER_ALOUD[0]}" (to a spoken question).
A turn that is only audio means: write what is said.

The folder is laid out as released checkpoints are: Hugging Face's classes load it, and `omni serve` does.
"""


def _sizes(config: OmniConfig) -> str:
    talker, code2wav, thinker, audio = config.talker, config.code2wav, config.thinker, config.audio
    assert talker is not None and code2wav is not None
    counts = parameters()
    rows = [
        ("Thinker", counts["text"], _layers(thinker.layers, thinker.hidden, thinker.experts, thinker.top_k)),
        ("audio encoder", counts["audio"], f"{_layers_of(audio.layers, audio.hidden)}, {audio.mel_bins} mel bins"),
        (
            "Talker",
            counts["talker"],
            _layers(talker.stack.layers, talker.stack.hidden, talker.stack.experts, talker.stack.top_k),
        ),
        (
            "code predictor",
            counts["predictor"],
            _layers_of(talker.predictor.layers, talker.predictor.hidden),
        ),
        (
            "Code2Wav",
            counts["code2wav"],
            f"{_layers_of(code2wav.layers, code2wav.hidden)}, then convolutions from width {code2wav.decoder_dim}",
        ),
        ("vision tower", counts["vision"], "untrained, there for the layout only"),
    ]
    return f"""## Architecture and sizes

{_table(("part", "parameters", "shape"), [(name, f"{count:,}", shape) for name, count, shape in rows])}

{sum(counts.values()):,} parameters in bfloat16. {VOCAB} tokens, a byte-level BPE of its own; up to {thinker.max_positions:,}
positions. Speech has 12.5 frames a second of {code2wav.quantizers} codes, each one of {CODES}, and is 24 kHz mono.
The codec's encoder, which made the codes to learn from, is no part of the folder.
"""


def _layers(layers: int, hidden: int, experts: int, top_k: int) -> str:
    return f"{_layers_of(layers, hidden)}, {top_k} of {experts} experts for a token"


def _layers_of(layers: int, hidden: int) -> str:
    return f"{layers} layer{'s' if layers > 1 else ''} of width {hidden}"


def _data(out: Path, log: Sequence[LogLine], recipe: Recipe) -> str:
    texts = out / "texts"
    heard, spoken = (len((texts / f"{name}.jsonl").read_bytes().splitlines()) for name in ("heard", "spoken"))
    known = (
        f"LibriSpeech's reference texts ({_subset(TRAINED_REFERENCES)}; texts only, no recording) for variety"
        if recipe.librispeech
        else "no texts of others"
    )
    return f"""## Training data

All of it is made. A grammar writes sentences, questions and answers, with {known}.
Synthetic voices speak them.

- Listening: {heard:,} lines, {_spoken_hours(out, log, "heard")};
  {recipe.copies} copies of each: the first clean, any further one in a room, with noise, at another level.
- Speaking: {spoken:,} answers, {_spoken_hours(out, log, "spoken")}, each sound of whole frames of 80 ms.
- Reading: {recipe.read:,} conversations without audio.

Held out of it: the sentences of the score; templates of the grammar that are kept for it, and words that no other template
gets (reference texts may have them); questions, one in eight of all wordings by a checksum, as an earlier turn too; the voice
{HELD_OUT_VOICE}; LibriSpeech's {_subset(UNHEARD_REFERENCES)} and test-other, whose texts and recordings are in no part of it.
{_notes(out)}"""


def _notes(out: Path) -> str:
    """What somebody noted of the training in `out`, as it stands."""
    path = out / NOTES
    return f"\n{path.read_text(encoding='utf-8').strip()}\n" if path.exists() else ""


def _subset(references: str) -> str:
    return references.partition(".")[0]


def _spoken_hours(out: Path, log: Sequence[LogLine], stage: str) -> str:
    """The hours of a corpus by voice. The corpus may have stayed where it was made, and then the log still has them."""
    if (out / stage / shards.MANIFEST).exists():
        found = hours(out / stage)
    else:
        logged = [line.hours for line in log if line.stage == stage and line.hours]
        if not logged:
            return "of a length that was not kept"
        found = logged[-1]
    each = ", ".join(f"{voice} {_figure(amount)}" for voice, amount in found.items())
    return f"{_figure(sum(found.values()))} hours ({each})"


def _figure(amount: float) -> str:
    return f"{amount:.1f}" if amount >= 1 else f"{amount:.2g}"


def _training(out: Path, log: Sequence[LogLine], recipe: Recipe) -> str:
    command = "omni tiny train --out DIR" + (" --librispeech TEXTS" if recipe.librispeech else "")
    took = (
        f"{_minutes(log)} minutes in all stages, with all starts; less by the clock where stages ran side by side."
        if log
        else _UNTIMED
    )
    return f"""## Training

{_stage_table(out, log)}

{took} The command is
`{command}`; its seeds are fixed, and other voices on
the machine than those above make other data. Its plan trains
{_planned(recipe.minutes)} minutes.

![losses over steps]({CURVES})
"""


def _planned(minutes: Mapping[str, float]) -> str:
    parts = [f"{_STAGES[stage]} for {count:g}" for stage, count in minutes.items()]
    return ", ".join(parts[:-1]) + f" and {parts[-1]}"


def _stage_table(out: Path, log: Sequence[LogLine]) -> str:
    rows = []
    for stage, what in _STAGES.items():
        lines = [line for line in log if line.stage == stage]
        if lines:
            devices = ", ".join(dict.fromkeys(line.device for line in lines if line.device))
            rows.append((what, _minutes(lines), str(len(lines)), _steps(out, stage), devices or "not kept"))
    return _table(("stage", "minutes", "sittings", "last step logged", "device"), rows)


def _minutes(lines: Sequence[LogLine]) -> str:
    return f"{sum(line.seconds for line in lines) / 60:.1f}"


def _steps(out: Path, stage: str) -> str:
    """The last step of a stage's curve, and a dash where it has none."""
    if stage not in _CURVES:
        return "–"
    name, _, _ = _CURVES[stage]
    lines = _log(out / stage / name)
    return f"{lines[-1]['step']:,}" if lines else "–"


def _logged(out: Path) -> list[LogLine]:
    """The stages that ran in `out`; none where their log was left behind."""
    path = out / "log.jsonl"
    way_out = "mend it, or delete it: the card then leaves open when and where stages ran"
    return shards.read_list(path, LogLine, way_out) if path.exists() else []


def _found(out: Path) -> _Scores:
    """What a training in `out` scored."""
    path = out / "score" / "scores.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_Scores)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is damaged ({error}); score the model again") from None
    if strangers := found.scores.keys() - _PARTS.keys():
        raise ValueError(f"{path} is damaged (there is no part {min(strangers)}); score the model again")
    return found


def _score_table(found: _Scores) -> str:
    columns = [column for column in _COLUMNS if any(column in values for values in found.scores.values())]
    rows = [
        (_PARTS[part], *(f"{values[column]:g}" if column in values else "–" for column in columns))
        for part, values in found.scores.items()
    ]
    return _table(("part", *(_COLUMNS[column] for column in columns)), rows)


def _rerun(out: Path) -> str:
    log = _logged(out)
    took = f"This one took {_minutes(log)} minutes in all stages:\n\n{_stage_table(out, log)}" if log else _UNTIMED
    return f"""## A rerun

Another training on the same data, from nothing. A training is planned in minutes, and how many steps those hold depends on
the machine and on what runs beside, so no two make the same weights. {took}

Its model scored:

{_score_table(_found(out))}
"""


def _kinds(score: Path) -> list[str]:
    """The table of held-out questions by kind, or nothing of a score that did not keep the kinds."""
    asked: dict[str, list[bool]] = {}
    for row in shards.read_list(score / "rows.jsonl", Row):
        if row.part == QUESTIONS_PART and row.kind is not None:
            asked.setdefault(row.kind, []).append(row.text == row.reference)
    rows = [(kind, str(len(right)), str(sum(right))) for kind, right in sorted(asked.items())]
    head = "Those questions by kind. Their wording was held out; people and things of stories and names may be new too:\n\n"
    return [head + _table(("kind", "questions", "answered exactly"), rows) + "\n"] if rows else []


def _scores(found: _Scores) -> str:
    skipped = "".join(f"\nNot measured: `{name}`, since {reason}.\n" for name, reason in found.skipped.items())
    dtype = "float32 on a CPU" if found.device == "cpu" else "bfloat16 on a GPU"
    return f"""## Scores

{_score_table(found)}

All but the number of requests are per cent.
{skipped}
How it was measured: `omni tiny score` asks the exported folder through the engine, {dtype}, on texts that
training never saw, text always greedy. WER of the text compares words in lower case without marks.

For speech, {judge.NAME} writes down what it hears, and words are compared after Whisper's own normaliser (numerals,
prices, spelling): against the answer's own text, which is what the Talker was to say; against the reference; and, as a
measure of the recogniser's own faults, its transcript of {MAIN_VOICE} saying the references. Speech that is not greedy is
drawn as released checkpoints draw it (temperature 0.9, top-k 50, repetition penalty 1.05), with fixed seeds; the folder's own
default is greedy, for text and for speech. Speech is cut off at {MOST_LENGTHS:g} times the natural length.
"""


def _pictures(shown: Sequence[str]) -> str:
    listed = "\n".join(f"{place}. {said}" for place, said in enumerate(shown, 1))
    return f"""## What it sounds like

{MAIN_VOICE} on the left, this model on the right, greedy, on one scale of time:

{listed}

![spectrograms of {len(shown)} sentences]({SPECTROGRAMS})
"""


def _limits(found: _Scores) -> str:
    heard = found.scores.get(SHOWN_PART, {}).get(HEARD_WER, 0.0)
    said = (
        "Its speech has the sounds of its voice, but its words can't be made out."
        if heard > UNCLEAR
        else f"Its speech takes a third more time than {MAIN_VOICE}'s own and ends in about half a second of silence."
    )
    return f"""## Limits

- {said}
- What it knows by heart it knows of those words alone: others it mostly spells wrongly.
- It knows nothing of the world beyond the kinds of questions above, and its arithmetic ends at twenty.
- English only, and trained on synthetic voices only: expect many errors with people, accents, music and street noise.
- One voice, {MAIN_VOICE}'s, whatever speaker is named.
- Of an earlier turn it knows its own wording only ("Nice to meet you, Ann.").
- Sentences of 3 to 20 words, one turn back. Longer texts, longer clips and longer conversations were not trained.
- No images and no video.
- What it says is not checked by anything. It is for tests and demonstrations.
"""


_LICENCE = f"""## Licence

Apache-2.0, as the project's. The voices it learned from are those of the programs hibari (Apache-2.0), flite and festival
(BSD-like licences), as far as the data above names them; so are the reference texts of LibriSpeech (CC BY 4.0; V. Panayotov,
G. Chen, D. Povey and S. Khudanpur, 2015). {judge.NAME} (MIT) takes part in the measurement only.
"""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
