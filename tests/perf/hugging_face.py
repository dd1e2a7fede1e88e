"""A small model's folder asked through Hugging Face's own classes and through the engine: the same answers, and how fast.

`python -m tests.perf.hugging_face FOLDER --out DIR` asks both the same prompts of all tasks that the model is trained for, one
prompt at a time, in float32 on the same CPU threads, greedy text and greedy speech, and writes hugging_face.md and
hugging_face.json into DIR. Both are given the same token ids and log-mel values, so making those is in neither's time.
It ends with 1 when an answer differs, with 64 on wrong usage, with 69 where something that it needs is not installed.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from tests.perf.usage import EXIT_CANNOT_RUN, Parser, checkpoint, count, folder_to_write, require_torch

# Before the imports that fail without it.
if __name__ == "__main__":
    require_torch("hugging_face")

import torch
from torch import Tensor

from engine.config import EngineSettings
from engine.engine import Engine
from engine.errors import WalkgateError
from engine.model.processor import Inputs, Processor
from engine.request import Request, Sampling, Speech
from engine.tiny import tasks, voices
from engine.tiny.score import FRAMES_PER_SECOND, MOST_TOKENS, VOICE, Asked, Served, wav
from engine.tiny.text import sentences
from engine.tiny.voices import MAIN_VOICE, SAMPLE_RATE, Floats
from tests.hf import hf_generate

# What a second of work is, by cell. Each cell has two tasks, which take turns.
UNITS = {"T2T": "tok/s", "A2T": "RTFx", "T2S": "audio-s/s", "A2S": "audio-s/s"}
# The repetition penalty of Hugging Face's Talker where `generate` is told nothing else.
SAMPLING = Sampling(repetition_penalty=1.05)
# Ten seconds, for a Talker that does not end by itself.
MOST_FRAMES = 125

Say = Callable[[Sequence[str]], list[Floats]]
"""Texts to samples, each float32 [n] at 24 kHz."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Text ids with the one that ended them, frames of 16 codes, and seconds: of all of it, and to the first samples.

    Hugging Face has no sample before the end.
    """

    token_ids: list[int]
    frames: list[list[int]]
    seconds: float
    first_audio_s: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt and what came of it. `work` is in the cell's unit times seconds; `difference` is the first one there is."""

    cell: str
    task: str
    text: str
    tokens: int
    frames: int
    work: float
    engine_s: float
    hugging_face_s: float
    first_audio_s: float | None
    difference: str | None

    @property
    def ratio(self) -> float:
        """How many times faster the engine is."""
        return self.hugging_face_s / self.engine_s


@dataclass(frozen=True, slots=True)
class Summary:
    """What the rows of a cell come to: speeds over all of them, the median of their ratios, and of the first audio's ms."""

    cell: str
    unit: str
    prompts: int
    equal: int
    engine: float
    hugging_face: float
    ratio: float
    first_audio_ms: float | None
    slowest_first_audio_ms: float | None


def main_voice(texts: Sequence[str]) -> list[Floats]:
    """`texts` as the main voice says them, each float32 [n] at 24 kHz."""
    return voices.synthesise(texts, MAIN_VOICE, seed=0)


def asked(prompts: int, say: Say) -> list[Asked]:
    """So many prompts that training never saw: the cells in turn, and in each its two tasks in turn."""
    each = -(-prompts // len(UNITS))
    told = sentences(0, 2 * each, held_out=True)
    read = tasks.held_out_questions(0, 2 * each)
    # Some can't be said, so more are made than are taken.
    heard = [one for one in tasks.held_out_questions(1, 6 * each + 12) if one.sayable][: 2 * each]
    clips = say([*told[:each], *(one.text for one in heard)])
    transcribed = [Asked("A2T", tasks.transcribe(text), wave) for text, wave in zip(told, clips[:each], strict=False)]
    repeated = [Asked("T2S", tasks.repeat(text), aloud=True) for text in told[each:]]
    answered = [tasks.ask_aloud(one) for one in heard]
    written = [Asked("A2T", one, wave) for one, wave in zip(answered[:each], clips[each:], strict=False)]
    spoken = [Asked("A2S", one, wave, aloud=True) for one, wave in zip(answered, clips[each:], strict=True)]
    cells = (
        [Asked("T2T", tasks.ask(one)) for one in read[:each]],
        _in_turn(transcribed, written),
        _in_turn(repeated, [Asked("T2S", tasks.ask(one), aloud=True) for one in read[each:]]),
        spoken[each:],
    )
    return [one for row in zip(*cells, strict=True) for one in row][:prompts]


def _in_turn(first: Sequence[Asked], second: Sequence[Asked]) -> list[Asked]:
    return [(first, second)[place % 2][place] for place in range(len(first))]


def request(processor: Processor, name: str, one: Asked) -> Request:
    """What the engine runs for a prompt; Hugging Face is given the ids and the log-mel values in it."""
    speech = Speech(voice=VOICE, max_frames=MOST_FRAMES, sampling=SAMPLING, codes=True) if one.aloud else None
    draft = Request(id=name, prompt_ids=[], max_tokens=MOST_TOKENS, speech=speech)
    audio = [] if one.heard is None else [wav(one.heard)]
    return processor.complete(draft, Inputs(messages=one.example.messages, audio=audio))


def load_hugging_face(folder: Path) -> Any:
    """Hugging Face's model of a folder in float32, in all else as it is loaded by default."""
    from transformers import Qwen3OmniMoeForConditionalGeneration
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


def ask_engine(engine: Engine, wish: Request) -> Answer:
    """What the engine answers to a request that has it for itself; RuntimeError when it fails."""
    token_ids, frames, first = list[int](), list[list[int]](), None
    began = time.perf_counter()
    engine.add(wish)
    while engine.has_work:
        for event in engine.step():
            if event.error is not None:
                raise RuntimeError(f"request {wish.id} failed: {event.error}")
            token_ids += event.token_ids
            frames += event.codes
            if event.pcm and first is None:
                first = time.perf_counter() - began
    return Answer(token_ids, frames, time.perf_counter() - began, first)


def ask_hugging_face(model: Any, wish: Request) -> Answer:
    """What `generate` of Hugging Face answers to the same request."""
    mels = [
        torch.frombuffer(bytearray(clip.mel), dtype=torch.float32).view(clip.mel_bins, clip.frames)
        for clip in wish.clips
    ]
    began = time.perf_counter()
    if wish.speech is None:
        token_ids, frames = _hugging_face_text(model, wish, mels), list[list[int]]()
    else:
        found = hf_generate(model, wish.prompt_ids, mels, wish.max_tokens, wish.speech.max_frames)
        token_ids, frames = found.token_ids, found.frames
    return Answer(token_ids, frames, time.perf_counter() - began)


def _hugging_face_text(model: Any, wish: Request, mels: Sequence[Tensor]) -> list[int]:
    inputs = {"input_ids": torch.tensor([wish.prompt_ids])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if mels:
        [mel] = mels
        inputs |= {"input_features": mel[None], "feature_attention_mask": torch.ones(1, mel.shape[1], dtype=torch.long)}
    # It keeps the positions of the prompt before.
    model.thinker.model.rope_deltas = None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        sequences = model.generate(
            **inputs,
            return_audio=False,
            thinker_max_new_tokens=wish.max_tokens,
            thinker_eos_token_id=model.config.im_end_token_id,
        )
    made: list[int] = sequences[0, len(wish.prompt_ids) :].tolist()
    return made


def compare(
    served: Served, model: Any, wanted: Sequence[Asked], tell: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """Ask both each prompt, one right after the other so that a busy machine slows both.

    RequestError for what this folder can't be asked.
    """
    wishes = [request(served.processor, str(place), one) for place, one in enumerate(wanted)]
    # The first calls of each kind are slower than all others.
    for wish in wishes[: len(UNITS)]:
        ask_engine(served.engine, wish)
        ask_hugging_face(model, wish)
    rows = list[Row]()
    for place, (one, wish) in enumerate(zip(wanted, wishes, strict=True)):
        row = _row(served, one, ask_engine(served.engine, wish), ask_hugging_face(model, wish))
        rows.append(row)
        tell(f"{place + 1} of {len(wanted)}: {row.cell} {row.task}: {row.difference or 'the same'}")
    return rows


def _row(served: Served, one: Asked, engine: Answer, hugging_face: Answer) -> Row:
    heard = 0.0 if one.heard is None else len(one.heard) / SAMPLE_RATE
    frames = len(engine.frames)
    work = {"tok/s": len(engine.token_ids), "RTFx": heard, "audio-s/s": frames / FRAMES_PER_SECOND}[UNITS[one.part]]
    return Row(
        cell=one.part,
        task=one.example.kind,
        text=served.processor.tokenizer.decode(engine.token_ids),
        tokens=len(engine.token_ids),
        frames=frames,
        work=work,
        engine_s=engine.seconds,
        hugging_face_s=hugging_face.seconds,
        first_audio_s=engine.first_audio_s,
        difference=difference(engine, hugging_face),
    )


def difference(engine: Answer, hugging_face: Answer) -> str | None:
    """Where two answers first differ, and the engine's value beside Hugging Face's (None behind an end); None where nowhere."""
    for step, (ours, theirs) in enumerate(zip_longest(engine.token_ids, hugging_face.token_ids)):
        if ours != theirs:
            return f"text token {step} is {ours}, Hugging Face's {theirs}"
    for frame, pair in enumerate(zip_longest(engine.frames, hugging_face.frames, fillvalue=list[int]())):
        for group, (ours, theirs) in enumerate(zip_longest(*pair)):
            if ours != theirs:
                return f"code {group} of frame {frame} is {ours}, Hugging Face's {theirs}"
    return None


def summaries(rows: Sequence[Row]) -> list[Summary]:
    """One for each cell that was asked."""
    return [_summary(cell, found) for cell in UNITS if (found := [row for row in rows if row.cell == cell])]


def _summary(cell: str, rows: Sequence[Row]) -> Summary:
    work = sum(row.work for row in rows)
    firsts = [1e3 * row.first_audio_s for row in rows if row.first_audio_s is not None]
    return Summary(
        cell=cell,
        unit=UNITS[cell],
        prompts=len(rows),
        equal=sum(row.difference is None for row in rows),
        engine=work / sum(row.engine_s for row in rows),
        hugging_face=work / sum(row.hugging_face_s for row in rows),
        ratio=median(row.ratio for row in rows),
        first_audio_ms=median(firsts) if firsts else None,
        slowest_first_audio_ms=max(firsts, default=None),
    )


def markdown(rows: Sequence[Row], setting: dict[str, str | int]) -> str:
    """Two tables: cells with their speeds, and every prompt."""
    equal = sum(row.difference is None for row in rows)
    lines = [
        "# The engine beside Hugging Face",
        "",
        f"{equal} of {len(rows)} greedy answers are the same in every text id and all 16 codes of every frame.",
        "",
        f"One prompt at a time, float32, {', '.join(f'{name} {value}' for name, value in setting.items())}.",
        "Speeds are over all prompts of a cell, the ratio is the median of its prompts. Neither's time holds the making of",
        "token ids and log-mel values. Hugging Face has no sample of speech before the last one.",
        "",
        "| cell | same | unit | engine | Hugging Face | ratio | first audio, ms: median | slowest |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    for one in summaries(rows):
        firsts = " | ".join(
            "–" if ms is None else f"{ms:.0f}" for ms in (one.first_audio_ms, one.slowest_first_audio_ms)
        )
        lines.append(
            f"| {one.cell} | {one.equal} of {one.prompts} | {one.unit} | {one.engine:.2f} | {one.hugging_face:.2f} "
            f"| {one.ratio:.2f} | {firsts} |"
        )
    lines += [
        "",
        "| cell | task | answer | tokens | frames | engine, s | Hugging Face, s | first difference |",
        "|---|---|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        text = " ".join(row.text.replace("|", "\\|").split())
        lines.append(
            f"| {row.cell} | {row.task} | {text} | {row.tokens} | {row.frames} | {row.engine_s:.3f} "
            f"| {row.hugging_face_s:.3f} | {row.difference or '–'} |"
        )
    return "\n".join([*lines, ""])


def report(rows: Sequence[Row], setting: dict[str, str | int], out: Path) -> int:
    """Write and print what came of the prompts; 1 when an answer differs, else 0."""
    out.mkdir(parents=True, exist_ok=True)
    text = markdown(rows, setting)
    (out / "hugging_face.md").write_text(text, encoding="utf-8")
    values = {
        "setting": setting,
        "cells": [asdict(one) for one in summaries(rows)],
        "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
    }
    (out / "hugging_face.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    print(text)
    return int(any(row.difference is not None for row in rows))


def setting() -> dict[str, str | int]:
    """What speeds depend on here."""
    import transformers

    return {
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count() or 0,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> int:
    """Compare and report; 1 when an answer differs, else 0."""
    parser = Parser("hugging_face", __doc__)
    parser.add_argument("folder", type=checkpoint, help="a model folder that `omni tiny train` made")
    parser.add_argument("--out", type=folder_to_write, required=True)
    parser.add_argument("--prompts", type=count, default=50)
    parser.add_argument("--threads", type=count, default=EngineSettings().threads)
    wish = parser.parse_args()
    if (reason := voices.missing(MAIN_VOICE)) is not None:
        parser.exit(EXIT_CANNOT_RUN, f"hugging_face: the clips need the voice {MAIN_VOICE}: {reason}\n")
    torch.set_num_threads(wish.threads)
    try:
        served = Served(wish.folder, "cpu")
        rows = compare(served, load_hugging_face(wish.folder), asked(wish.prompts, main_voice), print)
    except WalkgateError as error:
        parser.error(str(error))
    return report(rows, setting(), wish.out)


if __name__ == "__main__":
    sys.exit(main())
