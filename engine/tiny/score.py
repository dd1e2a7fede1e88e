"""Scores of a trained folder, asked through the engine: what it hears, answers and says, on texts that training never saw.

Texts are greedy and so is speech, but for the part `t2s_sampled`, whose speech is drawn as released checkpoints draw it, with
fixed seeds. Words that were written are compared in lower case without marks. What was said is written down by a recogniser,
where there is one, and compared as `judge` does it, three ways in per cent of words:

    heard_wer            what is heard in the speech, against the answer's own text: the Talker's and the recogniser's faults
    heard_reference_wer  the same against the reference: the Thinker's faults too
    natural_wer          what is heard when the main voice says the references: the recogniser's own share

and the shares of answers that are heard without a fault, `heard_whole`, and of the main voice's speech, `natural_whole`.

`rows.jsonl` keeps every reference, answer and what was heard, `wav/` what was said.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import jiwer
import numpy as np
import soundfile
import torch

from engine.config import EngineSettings, SettingError, switches_off
from engine.engine import Engine, kernel_options
from engine.model.generation import Generation
from engine.model.omni import load_model
from engine.model.processor import Inputs, Processor
from engine.request import Event, Request, Sampling, Speech
from engine.stop import STOP
from engine.tiny import judge, shards, tasks, voices, workdir
from engine.tiny.judge import error_rate, normalised
from engine.tiny.tasks import Example
from engine.tiny.text import references, sentence_case, sentences, unheard_texts, unseen_sentences
from engine.tiny.voices import HELD_OUT_VOICE, MAIN_VOICE, SAMPLE_RATE, Floats, Line

# The name that a request gets which names no voice.
VOICE = "ethan"
TRAINED_REFERENCES, UNHEARD_REFERENCES = "dev-clean.trans.txt", "test-clean.trans.txt"
FRAMES_PER_SECOND = 12.5
MOST_TOKENS = 128
# Progress is told after so many answers, and recordings that were recognised.
TOLD_EVERY = 50
_WRITTEN = re.compile(r"[^\W_]+(?:'[^\W_]+)?")
# Speech is cut off here, in lengths of the main voice's own rendering; over `TOO_LONG` it counts as a fault.
MOST_LENGTHS, TOO_LONG = 3.0, 2.0
HEARD_WER = "heard_wer"
COLUMNS = (
    *("count", "wer", "exact", "ended", "speech_ended", "too_long"),
    *(HEARD_WER, "heard_reference_wer", "natural_wer", "heard_whole", "natural_whole"),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many of each are asked: `sentences` (heard, heard with unseen templates and words, heard in an unseen voice, said,
    said by chance), `unheard` LibriSpeech texts, held-out `questions` in text, and questions `aloud`.
    """

    sentences: int = 50
    unheard: int = 50
    questions: int = 200
    aloud: int = 50


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of a part of the score: an example, the samples [n] at 24 kHz that its audio part holds, and whether the
    answer is to be spoken. Speech is greedy without a `draw`, which is the seed of one that is sampled.
    """

    part: str
    example: Example
    heard: Floats | None = None
    aloud: bool = False
    draw: int | None = None


@dataclass(slots=True)
class Answer:
    """What came of a request: text, 16-bit samples at 24 kHz, and whether text and speech ended by themselves."""

    text: str = ""
    pcm: bytearray = field(default_factory=bytearray)
    ended: bool = False
    speech_ended: bool = False

    @property
    def seconds(self) -> float:
        """How long the speech lasts."""
        return len(self.pcm) / 2 / SAMPLE_RATE


@dataclass(frozen=True, slots=True)
class Row:
    """One request and its answer. What begins at `speech_ended` is of speech; the main voice takes `natural_seconds` to say
    the reference. A recogniser heard `heard` in the speech and `natural_heard` in the main voice's. `kind` is the task's.
    """

    part: str
    reference: str
    text: str
    ended: bool
    speech_ended: bool | None = None
    seconds: float | None = None
    natural_seconds: float | None = None
    wav: str | None = None
    heard: str | None = None
    natural_heard: str | None = None
    kind: str | None = None


def score(
    folder: Path,
    out: Path,
    *,
    sizes: Sizes = Sizes(),
    librispeech: Path | None = None,
    trained: Collection[str] = (),
    device: str = "cpu",
    seed: int = 0,
    tell: Callable[[str], None] = print,
    held: bool = False,
) -> dict[str, dict[str, float]]:
    """Ask the model in `folder` and write `scores.json`, `rows.jsonl` and `wav/` into `out`; returns the scores by part.

    `librispeech` is a folder of reference texts; sentences among the texts `trained` are not asked. A part that can't be asked
    here is left out, and `scores.json` says why. Runs in float32 on a CPU and in bfloat16 on a GPU. Who has locked `out` says
    that it is `held`. ValueError when the main voice can't speak here, CheckpointError for a folder that can't be served,
    WalkgateError when another process works in `out`.
    """
    if librispeech is not None:
        check_references(librispeech)
    if (reason := voices.missing(MAIN_VOICE)) is not None:
        raise ValueError(f"the score needs the voice {MAIN_VOICE}: {reason}")
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingError(f"--device {device}: PyTorch finds no CUDA GPU on this machine; use --device cpu")
    workdir.make(out)
    served = Served(folder, device)
    asked, skipped = wanted(sizes, librispeech, seed, trained)
    with nullcontext() if held else workdir.locked(out):
        rows, natural = _asked(served, asked, out, tell)
        if (reason := judge.missing()) is not None:
            skipped[HEARD_WER] = reason
        else:
            tell(f"score: {sum(one.aloud for one in asked)} answers and {len(natural)} recordings to recognise")
            rows = _recognised(rows, out, natural, tell)
        shards.write_list(out / "rows.jsonl", rows)
        parts = dict.fromkeys(row.part for row in rows)
        scores = {part: summary([row for row in rows if row.part == part]) for part in parts}
        text = json.dumps({"device": device, "seed": seed, "scores": scores, "skipped": skipped}, indent=2)
        (out / "scores.json").write_text(text + "\n", encoding="utf-8")
    for part, reason in skipped.items():
        tell(f"score: without {part}: {reason}")
    for line in table(scores):
        tell(line)
    return scores


def _asked(
    served: Served, asked: Sequence[Asked], out: Path, tell: Callable[[str], None]
) -> tuple[list[Row], dict[str, Floats]]:
    """Ask everything and keep what was said in `out`; also what the main voice says of each reference, [n] at 24 kHz."""
    tell(f"score: {len(asked)} requests")
    said = list(dict.fromkeys(one.example.answer for one in asked if one.aloud))
    natural = dict(zip(said, _said(said, MAIN_VOICE), strict=True))
    seconds = [len(natural[one.example.answer]) / SAMPLE_RATE if one.aloud else 0.0 for one in asked]
    answers = served.answers(asked, seconds, tell)
    rows = [_row(out, place, *found) for place, found in enumerate(zip(asked, answers, seconds, strict=True))]
    return rows, natural


def check_references(librispeech: Path) -> None:
    """SettingError unless both files of reference texts lie in the folder `librispeech` and can be read."""
    for name in (TRAINED_REFERENCES, UNHEARD_REFERENCES):
        if not (librispeech / name).is_file():
            raise SettingError(f"--librispeech {librispeech} has no file {name}; name the folder that has it")
        try:
            references(librispeech / name)
        except (OSError, ValueError) as error:
            raise SettingError(f"--librispeech: {error}") from None


def wanted(
    sizes: Sizes, librispeech: Path | None, seed: int, trained: Collection[str] = ()
) -> tuple[list[Asked], dict[str, str]]:
    """The requests of all parts, and the reason for each part that can't be asked here."""
    skipped: dict[str, str] = {}
    told = _untrained(seed, sizes.sentences, frozenset(trained))
    asked = list(_transcribed("a2t_sentences", told, MAIN_VOICE))
    asked += _transcribed("a2t_templates", sentences(seed, sizes.sentences, held_out=True), MAIN_VOICE)
    if librispeech is None:
        skipped["a2t_librispeech"] = "no folder of reference texts was named"
    else:
        trained = references(librispeech / TRAINED_REFERENCES)
        chosen = unheard_texts(references(librispeech / UNHEARD_REFERENCES), trained, seed, sizes.unheard)
        asked += _transcribed("a2t_librispeech", [sentence_case(text) for text in chosen], MAIN_VOICE)
    if (reason := voices.missing(HELD_OUT_VOICE)) is not None:
        skipped["a2t_unseen_voice"] = reason
    else:
        asked += _transcribed("a2t_unseen_voice", told, HELD_OUT_VOICE)
    asked += [Asked("t2t_questions", tasks.ask(one)) for one in tasks.held_out_questions(seed, sizes.questions)]
    asked += [Asked("t2s_sentences", tasks.repeat(text), aloud=True) for text in told]
    asked += [
        Asked("t2s_sampled", tasks.repeat(text), aloud=True, draw=seed * len(told) + place)
        for place, text in enumerate(told)
    ]
    return [*asked, *_questions_aloud(sizes.aloud, seed)], skipped


def _untrained(seed: int, count: int, trained: frozenset[str]) -> list[str]:
    """The first `count` unseen sentences that are not among `trained`, as those of a folder trained by other rules may be."""
    drawn = count
    while len(found := [text for text in unseen_sentences(seed, drawn) if text not in trained]) < count:
        drawn *= 2
    return found[:count]


def _transcribed(part: str, texts: Sequence[str], voice: str) -> Iterator[Asked]:
    for text, wave in zip(texts, _said(texts, voice), strict=True):
        yield Asked(part, tasks.transcribe(text), wave)


def _questions_aloud(count: int, seed: int) -> Iterator[Asked]:
    # Some can't be said, so more are made than are taken.
    made = [one for one in tasks.held_out_questions(seed + 1, 3 * count + 12) if one.sayable]
    chosen = Random(f"questions aloud {seed}").sample(made, count)
    for question, wave in zip(chosen, _said([one.text for one in chosen], MAIN_VOICE), strict=True):
        yield Asked("a2s_questions", tasks.ask_aloud(question), wave, aloud=True)


def _said(texts: Sequence[str], voice: str) -> list[Floats]:
    """`texts` spoken plainly, each float32 [n] at 24 kHz."""
    return voices.speak([Line(text, voice, 0) for text in texts])


class Served:
    """A model folder in an engine of this process, with the switches that a server has."""

    def __init__(self, folder: Path, device: str) -> None:
        settings = EngineSettings(
            device=device,
            dtype="float32" if device == "cpu" else "bfloat16",
            disabled=switches_off(device, disable="", enable=""),
        )
        options = kernel_options(settings)
        model = load_model(folder, device=device, dtype=options.dtype, options=options)
        self.engine = Engine(model, settings)
        self.processor = Processor.load(folder, model.config, self.engine.max_model_len)

    def answers(
        self, asked: Sequence[Asked], natural_seconds: Sequence[float], tell: Callable[[str], None] = lambda line: None
    ) -> list[Answer]:
        """Ask everything at once and return the answers in order; RuntimeError when the engine fails a request.

        `natural_seconds`, one for each request, bound its speech; `tell` hears how many are answered.
        """
        tokens: list[list[int]] = [[] for _ in asked]
        answers = [Answer() for _ in asked]
        over = 0
        for place, (one, seconds) in enumerate(zip(asked, natural_seconds, strict=True)):
            self.engine.add(self._request(str(place), one, seconds))
        while self.engine.has_work:
            for event in self.engine.step():
                place = int(event.request_id)
                tokens[place] += event.token_ids
                _take(answers[place], event)
                over += event.done
                if event.done and over % TOLD_EVERY == 0:
                    tell(f"score: {over} of {len(asked)} answered")
        for answer, ids in zip(answers, tokens, strict=True):
            answer.text = b"".join(map(self.processor.token_bytes.of, ids)).decode("utf-8", "replace")
        return answers

    def _request(self, name: str, one: Asked, seconds: float) -> Request:
        frames = math.ceil(MOST_LENGTHS * seconds * FRAMES_PER_SECOND)
        sampling = Sampling() if one.draw is None else Generation().speech(one.draw)
        speech = Speech(voice=VOICE, max_frames=frames, sampling=sampling) if one.aloud else None
        draft = Request(id=name, prompt_ids=[], max_tokens=MOST_TOKENS, speech=speech)
        audio = [] if one.heard is None else [wav(one.heard)]
        return self.processor.complete(draft, Inputs(messages=one.example.messages, audio=audio))


def _take(answer: Answer, event: Event) -> None:
    if event.error is not None:
        raise RuntimeError(f"request {event.request_id} failed: {event.error}")
    answer.pcm += event.pcm
    answer.ended |= event.finish_reason == STOP
    answer.speech_ended |= event.audio_finish_reason == STOP


def wav(samples: Floats) -> bytes:
    """`samples` [n] at 24 kHz as a WAV file of 16 bits."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, SAMPLE_RATE, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def _row(out: Path, place: int, one: Asked, answer: Answer, natural_seconds: float) -> Row:
    reference = one.example.answer
    if not one.aloud:
        return Row(one.part, reference, answer.text, answer.ended, kind=one.example.kind)
    name = f"wav/{one.part}-{place:04d}.wav"
    (out / name).parent.mkdir(exist_ok=True)
    soundfile.write(out / name, np.frombuffer(bytes(answer.pcm), "<i2"), SAMPLE_RATE, subtype="PCM_16")
    seconds = round(answer.seconds, 3), round(natural_seconds, 3)
    return Row(
        one.part, reference, answer.text, answer.ended, answer.speech_ended, *seconds, name, kind=one.example.kind
    )


def _recognised(
    rows: Sequence[Row], out: Path, natural: Mapping[str, Floats], tell: Callable[[str], None]
) -> list[Row]:
    """`rows` with what is heard in their speech, and in `natural` [n], which the main voice says of a reference."""
    recogniser, count = judge.Recogniser(), itertools.count(1)

    def listened(samples: Floats) -> str:
        text = recogniser.heard(samples)
        if (done := next(count)) % TOLD_EVERY == 0:
            tell(f"score: {done} recognised")
        return text

    heard = {reference: listened(wave) for reference, wave in natural.items()}
    found = []
    for row in rows:
        if row.wav is not None:
            samples, _ = soundfile.read(out / row.wav, dtype="float32")
            row = replace(row, heard=listened(samples), natural_heard=heard[row.reference])
        found.append(row)
    return found


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Count, word error rate, exact answers and those that ended of `rows`, at least one, all but the count in per cent.

    Where they were spoken also how many ended and how many are over twice as long as is natural, and where they were
    recognised the rates of what was heard.
    """
    pairs = [(_plain(row.reference), _plain(row.text)) for row in rows]
    found: dict[str, float] = {
        "count": len(rows),
        "wer": 100 * float(jiwer.wer([reference for reference, _ in pairs], [text for _, text in pairs])),
        "exact": _share([row.text == row.reference for row in rows]),
        "ended": _share([row.ended for row in rows]),
    }
    spoken = [row for row in rows if row.speech_ended is not None]
    if spoken:
        found["speech_ended"] = _share([bool(row.speech_ended) for row in spoken])
        found["too_long"] = _share([(row.seconds or 0) > TOO_LONG * (row.natural_seconds or 0) for row in spoken])
    if all(row.heard is not None for row in rows):
        found |= _heard_rates(rows)
    return {name: round(value, 2) for name, value in found.items()}


def _plain(text: str) -> str:
    """A text in lower case without marks; digits and letters of any script are words as they stand."""
    return " ".join(_WRITTEN.findall(text.lower()))


def _heard_rates(rows: Sequence[Row]) -> dict[str, float]:
    said = [(row.text, row.heard or "") for row in rows]
    wanted = [(row.reference, row.heard or "") for row in rows]
    natural = [(row.reference, row.natural_heard or "") for row in rows]
    columns = {HEARD_WER: said, "heard_reference_wer": wanted, "natural_wer": natural}
    compared = {name: [(normalised(one), normalised(heard)) for one, heard in pairs] for name, pairs in columns.items()}
    return {
        **{name: error_rate(pairs) for name, pairs in compared.items()},
        # Who says nothing is not heard without a fault.
        "heard_whole": _share([one == heard != "" for one, heard in compared[HEARD_WER]]),
        "natural_whole": _share([one == heard != "" for one, heard in compared["natural_wer"]]),
    }


def _share(held: Sequence[bool]) -> float:
    return 100 * sum(held) / len(held)


def table(scores: dict[str, dict[str, float]]) -> list[str]:
    """The lines of a table with a row for each part; a dash stands where a part has no such value."""
    lines = [f"{'part':17}" + "".join(f"{column:>{_width(column)}}" for column in COLUMNS)]
    for part, values in scores.items():
        cells = {column: f"{values[column]:g}" if column in values else "-" for column in COLUMNS}
        lines.append(f"{part:17}" + "".join(f"{cell:>{_width(column)}}" for column, cell in cells.items()))
    return lines


def _width(column: str) -> int:
    return max(8, len(column) + 2)
