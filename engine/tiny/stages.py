"""The training of the small model from nothing, as stages that resume. Everything a stage makes lies in a folder of its name.

    texts    what is said, read and answered, and the tokenizer
    spoken   a corpus in the main voice, each sound of whole frames, for speaking
    codec    the codec, trained on `spoken`
    codes    the codes of `spoken`, which the Talker learns
    heard    a corpus in all voices and paces, for listening
    mels     log-mel frames of `heard`, clean and in rooms with noise
    thinker  Thinker and audio encoder
    talker   Talker and code predictor, over the same text embeddings
    decoder  the codec's decoder, trained on with the codes that the Talker foresees
    export   the model folder, in export/omni-tiny
    score    what the engine makes of that folder
    card     the model card, in that folder; of a whole other training in the folder `rerun` it tells what that gave

A file `done` in a folder says that its stage is over, and what it was made from; such a stage is skipped, and one without it
goes on where it stands. A file `from` says what a stage that was begun is made from. So stages can be moved between machines
folder by folder: spoken, heard and mels are large and quickly made anew, the others are small. No file is larger than 16 MB.
What decides data and training is kept in plan.json, and a run that asks for something else is refused, as is one that would
mix what was made of one thing with what was made of another. Processes may share the folder as long as each works on a stage
of its own.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from engine.config import SettingError
from engine.errors import WalkgateError
from engine.model.chat import ChatTemplate, load_tokenizer
from engine.model.config import Code2WavConfig, OmniConfig, TalkerConfig
from engine.model.positions import audio_tokens
from engine.model.tiny import tokenizer_config, write_texts
from engine.tiny import (
    card,
    codec_train,
    decoder_train,
    mels,
    optim,
    score,
    shards,
    speech,
    tasks,
    tokenizer,
    voices,
    workdir,
)
from engine.tiny.batches import Conversation, Mixture
from engine.tiny.codec import Axes, Codec, Decoder
from engine.tiny.export import write_trained
from engine.tiny.letters import letters, sounds, spelled
from engine.tiny.optim import Module
from engine.tiny.score import TRAINED_REFERENCES, UNHEARD_REFERENCES, VOICE, Sizes
from engine.tiny.shapes import config
from engine.tiny.talker import Talker, Utterance, foreseen
from engine.tiny.talker import train as train_talker
from engine.tiny.tasks import Example, Line
from engine.tiny.text import apart, corpus, references, sentences, words
from engine.tiny.thinker import Thinker
from engine.tiny.thinker import train as train_thinker
from engine.tiny.voices import MAIN_VOICE
from engine.tiny.workdir import PlanRecord

DONE, FROM = "done", "from"
# Files that hold times.
TIMED = ("log.jsonl", "curve.jsonl", "meta.json")
HEARD, SPOKEN = "heard", "spoken"
MODEL = "omni-tiny"
# Shares of a batch of the Thinker, by cost.
LISTENING_SHARE, READING_SHARE = 0.75, 0.25
# The share of its time that what is spoken would take at the voice's own pace.
PACE = 0.75
# Of what is spoken, so much answers questions: answers are much alike, and there is more to learn of other texts.
ANSWERS_SHARE = 0.2
# Clips that the codec is judged by and never trained on: one in so many.
JUDGED_EVERY = 50
# Clips that the axes of the codes are fitted to: one in so many.
FITTED_EVERY = 10
AXES = "axes.safetensors"
FORESEEN = "foreseen.npy"
# Processes that encode, at the most.
ENCODERS = 6
SOUNDS, SOUNDS_AT_ONCE = "sounds.jsonl", 256
# The Talker leaves one answer in so many, where there are many, to the decoder; so many are foreseen in one batch.
LEFT_EVERY, MANY, FORESEEN_AT_ONCE = 8, 1000, 100
# Without LibriSpeech's texts so many sentences of the grammar stand in for them.
STAND_INS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is made and how long each part is trained; `name` is what the command calls it.

    `heard_hours` of speech in `copies` copies each are for listening, `spoken_hours` for speaking, and `read` examples have no
    audio. A batch of the Thinker costs `thinker_cost` (`batches.cost`), one of the Talker holds `talker_frames` frames. Minutes
    are those of the whole training of a part, whatever the number of sittings. `librispeech` is a folder of LibriSpeech's
    reference texts, `dev-clean.trans.txt` to train on and `test-clean.trans.txt` for the score; without it the grammar's
    sentences stand in, and the score has no such part.
    """

    name: str
    heard_hours: float
    spoken_hours: float
    copies: int
    read: int
    codec_minutes: float
    thinker_minutes: float
    talker_minutes: float
    decoder_minutes: float
    thinker_cost: int
    talker_frames: int
    codec: codec_train.Settings
    sizes: Sizes
    workers: int
    device: str
    librispeech: Path | None = None
    seed: int = 0

    @classmethod
    def h200(cls, librispeech: Path | None = None, seed: int = 0) -> Plan:
        """For one H200 with 16 cores, under an hour in all: 39 minutes of training, then data, starts and the score."""
        return cls(
            name="h200",
            heard_hours=40.0,
            spoken_hours=30.0,
            copies=2,
            read=100_000,
            codec_minutes=5.0,
            thinker_minutes=17.0,
            talker_minutes=12.0,
            decoder_minutes=5.0,
            thinker_cost=48_000,
            talker_frames=12_000,
            codec=codec_train.Settings(seed=seed),
            sizes=Sizes(),
            workers=16,
            device="cuda",
            librispeech=librispeech,
            seed=seed,
        )

    @classmethod
    def small(cls, librispeech: Path | None = None, seed: int = 0) -> Plan:
        """For a laptop: every stage in a minute altogether. What comes out has learned next to nothing."""
        return cls(
            name="small",
            heard_hours=0.01,
            spoken_hours=0.01,
            copies=2,
            read=100,
            codec_minutes=0.04,
            thinker_minutes=0.04,
            talker_minutes=0.04,
            decoder_minutes=0.02,
            thinker_cost=800,
            talker_frames=100,
            codec=codec_train.Settings(batch=1, frames=8, width=16, seed=seed),
            sizes=Sizes(sentences=1, unheard=1, questions=2, aloud=1),
            workers=1,
            device="cpu",
            librispeech=librispeech,
            seed=seed,
        )


class OutOfTime(Exception):
    """The sitting is over before the stage is. What was made stays."""


@dataclass(frozen=True, slots=True)
class Sitting:
    """A stretch of work that ends at `end` on the `clock`, in seconds; `listener` hears of progress."""

    listener: Callable[[str], None]
    end: float = math.inf
    clock: Callable[[], float] = time.monotonic

    @property
    def minutes(self) -> float:
        """What is left; OutOfTime when nothing is."""
        left = (self.end - self.clock()) / 60
        if left <= 0:
            raise OutOfTime
        return left

    def tell(self, line: str) -> None:
        """Tell of progress; OutOfTime when nothing is left, which ends what works in small parts and tells of each."""
        self.listener(line)
        if self.clock() >= self.end:
            raise OutOfTime


@dataclass(frozen=True, slots=True)
class Coded:
    """Codes of a clip: `frames` rows of the file `shard` from row `start` on, a row with a code of each codebook."""

    shard: str
    start: int
    frames: int


@dataclass(frozen=True, slots=True)
class Language:
    """Tokenizer and template of the stage `texts`, which make ids as the server makes them."""

    tokenizer: Tokenizer
    template: ChatTemplate
    config: OmniConfig = field(default_factory=lambda: OmniConfig.parse(config()))

    @classmethod
    def load(cls, out: Path) -> Language:
        """Read what the stage `texts` wrote."""
        return cls(load_tokenizer(out / "texts"), ChatTemplate.load(out / "texts"))

    def encode(self, example: Example, clip_tokens: Sequence[int] = ()) -> tasks.Encoded:
        """Ids of `example`, whose clips take `clip_tokens` rows."""
        return tasks.encode(example, self.tokenizer, self.template, self.config.ids, clip_tokens)

    def text_embedding(self, seed: int) -> Tensor:
        """The table [V, H] float32 that Thinker and Talker share."""
        text = self.config.thinker
        return spelled([self.tokenizer.id_to_token(index) or "" for index in range(text.vocab)], text.hidden, seed)


def make_texts(out: Path, plan: Plan, sitting: Sitting) -> None:
    """Write the tokenizer, the references and the lines of both corpora."""
    folder, known = out / "texts", _references(plan)
    content = tokenizer.train(tokenizer.training_texts(plan.seed, known))
    write_texts(folder, {"tokenizer.json": content, "tokenizer_config.json": tokenizer_config()})
    heard = _lines_to_hear(plan, known)
    said = speech.enough(
        lambda seed, count: [example.answer for example in spoken(seed, count, known)],
        PACE * plan.spoken_hours,
        plan.seed,
    )
    shards.write_list(folder / "references.jsonl", known)
    shards.write_list(folder / f"{HEARD}.jsonl", heard)
    shards.write_list(folder / f"{SPOKEN}.jsonl", spoken(plan.seed, len(said), known))
    sitting.listener(f"texts: {len(heard)} lines to hear, {len(said)} to speak")


def _lines_to_hear(plan: Plan, known: Sequence[str]) -> list[Line]:
    texts = speech.enough(
        lambda seed, count: [line.text for line in tasks.lines(seed, count, known)], plan.heard_hours, plan.seed
    )
    return list(tasks.lines(plan.seed, len(texts), known))


def _references(plan: Plan) -> list[str]:
    if plan.librispeech is None:
        return _stand_ins(plan.seed)
    # The two have texts in common, and those of the second are kept for the score.
    trained, kept = (references(plan.librispeech / name) for name in (TRAINED_REFERENCES, UNHEARD_REFERENCES))
    return apart(trained, kept)


def _stand_ins(seed: int) -> list[str]:
    return [" ".join(words(text)).upper() for text in sentences(seed, STAND_INS)]


def spoken(seed: int, count: int, known: Sequence[str]) -> list[Example]:
    """Make `count` examples whose answers are to be spoken: one in five answers a question, the others say a text again.

    Some of either kind ask by a clip. `known` are reference texts; a smaller count gives the first of them.
    """
    rng = Random(f"spoken {seed}")
    # Other texts than those that are heard.
    asked, said = iter(tasks.questions(seed + 1, count)), iter(corpus(seed + 1, count, known))
    made: list[Example] = []
    for _ in range(count):
        by_clip = rng.random() < 0.4
        if rng.random() < ANSWERS_SHARE:
            question = next(asked)
            aloud = by_clip and question.sayable
            made.append(tasks.ask_aloud(question, rng.choice(tasks.ANSWER_ALOUD)) if aloud else tasks.ask(question))
        else:
            text = next(said)
            made.append(
                tasks.transcribe(text, rng.choice(tasks.TRANSCRIBE))
                if by_clip
                else tasks.repeat(text, rng.choice(tasks.REPEAT))
            )
    return made


def make_spoken(out: Path, plan: Plan, sitting: Sitting) -> None:
    """Speak what the Talker learns to say; ValueError when the main voice can't speak here."""
    _usable()
    # One seed for all: the same words then sound the same, and there is less to learn.
    said = [voices.Line(one.answer, MAIN_VOICE, plan.seed, framed=True) for one in _to_speak(out)]
    speech.record(said, out / SPOKEN, plan.workers, sitting.tell)
    with shards.pool(plan.workers) as processes:
        written = processes.map(voices.frame_sounds, [line.text for line in said], chunksize=SOUNDS_AT_ONCE)
        shards.write_list(out / SPOKEN / SOUNDS, list(written))


def make_heard(out: Path, plan: Plan, sitting: Sitting) -> None:
    """Speak what the Thinker listens to; ValueError when the main voice can't speak here."""
    usable, reasons = _usable()
    for voice, reason in reasons.items():
        sitting.listener(f"{HEARD}: without {voice}: {reason}")
    texts = [line.text for line in _to_hear(out)]
    speech.record(speech.plan(texts, usable, plan.seed), out / HEARD, plan.workers, sitting.tell)


def _clips(out: Path, corpus: str) -> list[speech.Clip]:
    """The clips of `corpus`; ValueError unless they say what the stage `texts` wrote for it."""
    found = speech.manifest(out / corpus)
    texts = [one.answer for one in _to_speak(out)] if corpus == SPOKEN else [line.text for line in _to_hear(out)]
    if [clip.line.text for clip in found] != texts:
        raise ValueError(
            f"{out / corpus} says other texts than {out / 'texts'} has; fetch both from one place, or delete {out / corpus}"
        )
    return found


def _usable() -> tuple[list[str], dict[str, str]]:
    usable, reasons = voices.usable()
    if MAIN_VOICE in reasons:
        raise ValueError(f"training needs the voice {MAIN_VOICE}: {reasons[MAIN_VOICE]}")
    return usable, reasons


def _to_hear(out: Path) -> list[Line]:
    return shards.read_list(out / "texts" / f"{HEARD}.jsonl", Line)


def _to_speak(out: Path) -> list[Example]:
    return shards.read_list(out / "texts" / f"{SPOKEN}.jsonl", Example)


def train_codec(out: Path, plan: Plan, sitting: Sitting) -> None:
    """Train the codec on what the main voice says."""
    _clips(out, SPOKEN)
    waves = codec_train.utterances(out / SPOKEN)
    codec_train.train(
        [wave for place, wave in enumerate(waves) if place % JUDGED_EVERY],
        out / "codec",
        plan.codec_minutes,
        plan.device,
        config=_code2wav(),
        settings=plan.codec,
        held_out=waves[::JUDGED_EVERY],
        sitting=sitting.minutes,
    )
    if codec_train.seconds(out / "codec") < 60 * plan.codec_minutes:
        raise OutOfTime


def _codec(out: Path, plan: Plan) -> Codec:
    return codec_train.load(_trained(out, "codec", "codec-*.safetensors"), _code2wav(), plan.codec.width)


def _trained(out: Path, name: str, state: str) -> Path:
    """The folder of a part that was trained; ValueError without its `state`, as in a folder that was moved in part."""
    folder = out / name
    if not any(folder.glob(state)):
        raise ValueError(
            f"{folder} holds no {state}; fetch that from where it was trained, or delete {folder / DONE} to train it again"
        )
    return folder


def _code2wav() -> Code2WavConfig:
    found = OmniConfig.parse(config()).code2wav
    assert found is not None
    return found


def make_codes(out: Path, plan: Plan, sitting: Sitting) -> None:
    """Encode what the main voice says, a shard of speech at a time, on axes that some of it decides."""
    folder = out / "codes"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / AXES).exists():
        _fit_axes(out, plan, folder / AXES)
    spoken = _clips(out, SPOKEN)
    grouped = itertools.groupby(spoken, key=lambda clip: clip.shard)
    clips = {Path(shard).stem: list(found) for shard, found in grouped}
    # A clip is soon encoded: on a GPU it is the launches that take time, and processes share them out.
    workers = min(plan.workers, ENCODERS)
    shards.make(folder, _encode, {name: (out, plan, found) for name, found in clips.items()}, workers, sitting.tell)
    coded = [one for name in clips for one in shards.read_list(shards.list_of(folder, name), Coded)]
    if len(coded) != len(spoken):
        raise ValueError(f"{folder} holds codes of {len(coded)} clips, and {len(spoken)} were spoken; delete it")
    shards.write_list(folder / shards.MANIFEST, coded)


def _encode(folder: Path, name: str, out: Path, plan: Plan, clips: Sequence[speech.Clip]) -> None:
    codec, axes = _encoder(out, plan)
    waves = [torch.from_numpy(speech.read(out / SPOKEN, clip)).to(plan.device) for clip in clips]
    parts = [axes.encode(codec.latents(wave)).cpu().numpy().astype(np.uint8) for wave in waves]
    starts = shards.save(folder, name, parts)
    made = [Coded(f"{name}.npy", *at) for at in zip(starts, map(len, parts), strict=True)]
    shards.write_list(shards.list_of(folder, name), made)


@functools.cache
def _encoder(out: Path, plan: Plan) -> tuple[Codec, Axes]:
    codec = _codec(out, plan).to(plan.device)
    return codec, _axes(out / "codes" / AXES, codec.decoder, plan.device)


def _fit_axes(out: Path, plan: Plan, path: Path) -> None:
    """Fit axes to some of what is spoken and write them to `path`."""
    codec, source = _codec(out, plan).to(plan.device), out / SPOKEN
    chosen = speech.manifest(source)[::FITTED_EVERY]
    latents = [codec.latents(torch.from_numpy(speech.read(source, clip)).to(plan.device)) for clip in chosen]
    config = codec.decoder.config
    axes = Axes.fit(torch.cat(latents).cpu(), config.quantizers, config.codebook)
    held = {"mean": axes.mean, "directions": axes.directions.contiguous(), "step": axes.step}
    partial = path.with_suffix(".partial")
    save_file(held, partial)
    partial.replace(path)


def _axes(path: Path, decoder: Decoder, device: str = "cpu") -> Axes:
    """The axes kept in `path`, for codes that `decoder` reads; ValueError for a file that holds others, or none."""
    config, width = decoder.config, decoder.code_embedding.weight.shape[1]
    try:
        axes = Axes(**load_file(path, device), codes=config.codebook)
    except (SafetensorError, TypeError) as error:
        raise shards.damaged(path, error) from None
    found = [tuple(part.shape) for part in (axes.mean, axes.directions, axes.step)]
    wanted = [(width,), (width, config.quantizers), ()]
    if found != wanted:
        raise shards.damaged(path, ValueError(f"its shapes are {found}, not {wanted}"))
    return axes


def make_mels(out: Path, plan: Plan, sitting: Sitting) -> None:
    """Write log-mel frames of everything that is heard."""
    bins = OmniConfig.parse(config()).audio.mel_bins
    _clips(out, HEARD)
    mels.extract(out / HEARD, out / "mels", bins, plan.copies, plan.seed, plan.workers, sitting.tell)


def train_the_thinker(out: Path, plan: Plan, sitting: Sitting) -> None:
    """Train on what is heard and what is read."""
    language = Language.load(out)
    known = shards.read_list(out / "texts" / "references.jsonl", str)
    kinds = [(LISTENING_SHARE, listening(out, plan, language)), (READING_SHARE, reading(plan, known, language))]
    sitting.tell(f"thinker: {len(kinds[0][1])} to hear, {len(kinds[1][1])} to read")
    _, over = train_thinker(
        language.config,
        Mixture(kinds, plan.thinker_cost, plan.seed),
        out / "thinker",
        settings=optim.Settings(minutes=plan.thinker_minutes, seed=plan.seed),
        minutes=sitting.minutes,
        device=torch.device(plan.device),
        text_embedding=language.text_embedding(plan.seed),
    )
    if not over:
        raise OutOfTime


def listening(out: Path, plan: Plan, language: Language) -> list[Conversation]:
    """A conversation about every copy of every clip, its mel [bins, T] float16 on the plan's device."""
    lines = {line.text: line for line in _to_hear(out)}
    rng = Random(f"listening {plan.seed}")
    made: list[Conversation] = []
    for shard, clips in itertools.groupby(mels.manifest(out / "mels"), key=lambda clip: clip.shard):
        # A shard goes to the device whole, and the clips are views of it.
        frames = torch.from_numpy(shards.whole(out / "mels", shard)).to(plan.device)
        for clip in clips:
            example = tasks.listening(lines[clip.line.text], rng)
            encoded = language.encode(example, [audio_tokens(clip.frames)])
            mel = frames[clip.start : clip.start + clip.frames].t()
            made.append(Conversation(encoded.ids, encoded.prompt, mel, letters(clip.line.text)))
    return made


def reading(plan: Plan, known: Sequence[str], language: Language) -> list[Conversation]:
    """The conversations without audio (no tensors in them)."""
    encoded = map(language.encode, tasks.reading(plan.seed, plan.read, known))
    return [Conversation(one.ids, one.prompt) for one in encoded]


def train_the_talker(out: Path, plan: Plan, sitting: Sitting) -> None:
    """Train on the codes of what is spoken, but for what is left to the decoder."""
    language = Language.load(out)
    utterances = list(spoken_utterances(out, language))
    every = _left_every(len(utterances))
    _, over = train_talker(
        language.config,
        language.text_embedding(plan.seed),
        [one for place, one in enumerate(utterances) if every == 1 or place % every],
        out / "talker",
        voice=VOICE,
        frames=plan.talker_frames,
        settings=optim.Settings(minutes=plan.talker_minutes, seed=plan.seed),
        minutes=sitting.minutes,
        device=torch.device(plan.device),
    )
    if not over:
        raise OutOfTime


def _left_every(answers: int) -> int:
    """One in so many of `answers` answers is left to the decoder (no tensors); of a few, all are learned and decoded."""
    return LEFT_EVERY if answers >= MANY else 1


def spoken_utterances(out: Path, language: Language, every: int = 1) -> Iterator[Utterance]:
    """One example in `every` of those that are spoken, with its codes [G, F] int64.

    Clips in prompts are as long as their text would take.
    """
    coded = shards.read_list(out / "codes" / shards.MANIFEST, Coded)
    known = shards.read_list(out / SPOKEN / SOUNDS, str)
    said = _to_speak(out)
    if not len(said) == len(coded) == len(known):
        raise ValueError(
            f"{out} has {len(said)} texts to speak, codes of {len(coded)} and the sounds of {len(known)}; "
            f"fetch texts, spoken and codes from one place, or make them again"
        )
    whole = zip(said, coded, known, strict=True)
    for example, one, written in itertools.islice(whole, 0, None, every):
        seconds = [len(text) * speech.SECONDS_PER_CHARACTER for text in example.clips]
        encoded = language.encode(example, [audio_tokens(round(s * mels.FRAMES_PER_SECOND)) for s in seconds])
        codes = shards.read(out / "codes", one.shard, one.start, one.frames).T.astype(np.int64)
        prompt, answer = encoded.ids[: encoded.prompt], encoded.ids[encoded.prompt : -1]
        yield Utterance(prompt, answer, codes, sounds(written))


def train_the_decoder(out: Path, plan: Plan, sitting: Sitting) -> None:
    """Train the decoder on with what the Talker makes of answers that it has not learned, as of any that it will be asked."""
    device = torch.device(plan.device)
    language = Language.load(out)
    clips = speech.manifest(out / SPOKEN)
    every = _left_every(len(clips))
    pairs = zip(spoken_utterances(out, language, every), clips[::every], strict=True)
    # Of like length side by side, so that little is padded.
    chosen = sorted(pairs, key=lambda pair: pair[0].codes.shape[1])
    spoken: list[decoder_train.Spoken] = []
    made = _foreseen(out, plan, language, [utterance for utterance, _ in chosen])
    for codes, (utterance, clip) in zip(made, chosen, strict=True):
        wave = np.asarray(shards.read(out / SPOKEN, clip.shard, clip.start, clip.samples), dtype=np.int16)
        spoken.append(decoder_train.Spoken(codes, np.asarray(utterance.codes), wave))
    decoder = _decoder(out, plan)
    sitting.tell(f"decoder: {len(spoken)} utterances foreseen")
    _, over = decoder_train.train(
        decoder,
        decoder_train.Segments(spoken, decoder.frame, device),
        out / "decoder",
        settings=optim.Settings(minutes=plan.decoder_minutes, peak=5e-4, warmup=100, weight_decay=0.01, seed=plan.seed),
        minutes=sitting.minutes,
        device=device,
        batch=plan.codec.batch,
    )
    if not over:
        raise OutOfTime


def _foreseen(out: Path, plan: Plan, language: Language, utterances: Sequence[Utterance]) -> list[NDArray[np.int64]]:
    """The codes [G, F] that the Talker foresees of each utterance; kept, so that a short sitting is not all spent on them."""
    path = out / "decoder" / FORESEEN
    if not path.exists():
        device = torch.device(plan.device)
        talker = _averaged(Talker(language.config, language.text_embedding(plan.seed)), out, "talker").to(device).eval()
        made: list[NDArray[np.int64]] = []
        for begin in range(0, len(utterances), FORESEEN_AT_ONCE):
            made += foreseen(talker, utterances[begin : begin + FORESEEN_AT_ONCE], VOICE)
        shards.save(path.parent, path.stem, [codes.T.astype(np.uint8) for codes in made])
    ends = np.cumsum([one.codes.shape[1] for one in utterances])
    kept = shards.whole(path.parent, path.name).T.astype(np.int64)
    if kept.shape[1] != ends[-1]:
        raise ValueError(f"{path} is of other utterances; delete it")
    return np.split(kept, ends[:-1], axis=1)


def _decoder(out: Path, plan: Plan) -> Decoder:
    """The codec's decoder with the axes' codes, all of it to be trained but these."""
    decoder = _codec(out, plan).decoder
    axes = _axes(_trained(out, "codes", AXES) / AXES, decoder)
    decoder.code_embedding.weight.copy_(axes.table())
    decoder.requires_grad_(True).code_embedding.requires_grad_(False)
    return decoder


def _averaged(module: Module, out: Path, name: str) -> Module:
    return optim.averaged(module, _trained(out, name, "state-*"))


def export(out: Path, plan: Plan, sitting: Sitting) -> None:
    """Write the model folder."""
    language = Language.load(out)
    part = language.config.talker
    assert part is not None
    table = language.text_embedding(plan.seed)
    thinker = _averaged(Thinker(language.config, table), out, "thinker")
    talker = _averaged(Talker(language.config, table), out, "talker")
    decoder = _averaged(_decoder(out, plan), out, "decoder")
    tensors = {**thinker.tensors(), **talker.tensors(), **decoder.tensors()}
    content = json.loads((out / "texts" / "tokenizer.json").read_text(encoding="utf-8"))
    size = write_trained(out / "export" / MODEL, one_voice(tensors, part), content)
    sitting.listener(f"export: {size} bytes")


def one_voice(tensors: dict[str, Tensor], config: TalkerConfig) -> dict[str, Tensor]:
    """`tensors` with every speaker's row, of the table [V, H], equal to that of the one voice that was trained."""
    name = "talker.model.codec_embedding.weight"
    table = tensors[name].clone()
    for row in config.speakers.values():
        table[row] = table[config.speakers[VOICE]]
    return {**tensors, name: table}


def rate(out: Path, plan: Plan, sitting: Sitting) -> None:
    """Score the model folder through the engine."""
    score.score(
        out / "export" / MODEL,
        out / "score",
        sizes=plan.sizes,
        librispeech=plan.librispeech,
        trained={line.text for line in _to_hear(out)} | {one.answer for one in _to_speak(out)},
        device=_device_here(plan),
        seed=plan.seed,
        tell=sitting.listener,
        held=True,
    )


def describe(out: Path, plan: Plan, sitting: Sitting) -> None:
    """Write the model card into the model folder.

    ValueError when that would be too large, the main voice can't speak, or a rerun was not by the same plan.
    """
    begun = workdir.begun(out)
    assert begun is not None
    rerun = out / card.RERUN
    if rerun.exists() and not _by_the_plan(rerun, begun):
        raise ValueError(f"{rerun} holds no training by the plan of {out}; take it away, or bring one that does")
    minutes = {
        "codec": plan.codec_minutes,
        "thinker": plan.thinker_minutes,
        "talker": plan.talker_minutes,
        "decoder": plan.decoder_minutes,
    }
    recipe = card.Recipe(librispeech=begun.librispeech, copies=begun.copies, read=begun.read, minutes=minutes)
    size = card.write(out / "export" / MODEL, out, recipe)
    sitting.listener(f"card: the model folder has {size} bytes")


def _by_the_plan(folder: Path, record: workdir.PlanRecord) -> bool:
    """Whether `folder` was begun with `record` but for the seed; a plan that can't be read is no such."""
    try:
        other = workdir.begun(folder)
    except WalkgateError:
        return False
    return other is not None and msgspec.structs.replace(other, seed=record.seed) == record


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage runs, the stages that it reads from, and whether it runs on the plan's device alone.

    Running raises OutOfTime when the sitting ends before it.
    """

    run: Callable[[Path, Plan, Sitting], None]
    needs: tuple[str, ...] = ()
    on_device: bool = False


STAGES = {
    "texts": Stage(make_texts),
    SPOKEN: Stage(make_spoken, ("texts",)),
    "codec": Stage(train_codec, ("texts", SPOKEN), on_device=True),
    "codes": Stage(make_codes, ("texts", SPOKEN, "codec"), on_device=True),
    HEARD: Stage(make_heard, ("texts",)),
    "mels": Stage(make_mels, ("texts", HEARD)),
    "thinker": Stage(train_the_thinker, ("texts", "mels"), on_device=True),
    "talker": Stage(train_the_talker, ("texts", SPOKEN, "codes"), on_device=True),
    "decoder": Stage(train_the_decoder, ("texts", SPOKEN, "codec", "codes", "talker"), on_device=True),
    "export": Stage(export, ("texts", "codec", "codes", "thinker", "talker", "decoder")),
    "score": Stage(rate, ("texts", "export")),
    "card": Stage(describe, ("texts", "codec", "thinker", "talker", "export", "score")),
}


def done(out: Path, name: str) -> bool:
    """Whether the stage `name` is over in `out`."""
    return (out / name / DONE).exists()


class _Finished(msgspec.Struct, frozen=True):
    """What `done` keeps of a stage: a digest of what it made, and the digests of what that was made from."""

    made: str
    of: dict[str, str]


def _finished(out: Path, name: str) -> _Finished | None:
    """What the stage `name` kept when it was over; None where it is not, or of folders made before that was kept."""
    path = out / name / DONE
    try:
        content = path.read_bytes() if path.exists() else b""
        return msgspec.json.decode(content, type=_Finished) if content.strip() else None
    except (OSError, msgspec.DecodeError) as error:
        raise WalkgateError(f"{path} is damaged ({error}); fetch it again, or delete it to make {name} again") from None


def _sources(out: Path, name: str) -> dict[str, str]:
    """The digests of what the stage `name` reads from, by stage, as far as they were kept."""
    return {need: kept.made for need in STAGES[name].needs if (kept := _finished(out, need)) is not None}


def _made_from(out: Path, name: str) -> dict[str, str]:
    """What `_sources` was when the stage `name` ended, or else when it began; nothing of one that never did."""
    if (kept := _finished(out, name)) is not None:
        return kept.of
    path = out / name / FROM
    with workdir.told(name, path):
        return shards.read_list(path, dict[str, str])[0] if path.exists() and not done(out, name) else {}


def _digest(folder: Path) -> str:
    """Of what a stage made, without what differs between runs that made the same: logs, and samples, which lists stand for."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".json", ".jsonl", ".safetensors") and path.name not in TIMED:
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _check_made_from(out: Path) -> None:
    """SettingError where a stage is over, or begun, that was made from something else than what is there now."""
    for name in STAGES:
        for source, made in _made_from(out, name).items():
            current = _finished(out, source)
            if current is not None and current.made != made:
                stale = [other for other in STAGES if other == name or name in _all_needs(other)]
                raise SettingError(
                    f"--out {out}: {name} was made from another {source} than is there now; bring that back, or delete what "
                    f"came of it: {', '.join(str(out / one) for one in stale if (out / one).exists())}"
                )


def _all_needs(name: str) -> set[str]:
    """What the stage `name` needs, and what that needs."""
    needs = set(STAGES[name].needs)
    return needs.union(*map(_all_needs, needs))


def run(
    out: Path,
    plan: Plan,
    only: Sequence[str] = (),
    minutes: float | None = None,
    tell: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Run the stages that `only` names (all without it) in order, for up to `minutes`; True when all of them are over.

    Training stops within a step of the end and then saves, data within a shard, texts, export, score and card not at all:
    leave a minute to spare. `out`/log.jsonl gets a line for each stage that ran. SettingError, before anything is made, for a
    stage that is not known or needs another one first, a GPU that is not there, or a folder that was begun with another plan or
    mixes what was made of one thing with what was made of another, and after each stage for one that does so now; WalkgateError
    for what goes wrong in a stage, with its name.
    """
    waiting = _waiting(out, plan, only)
    workdir.make(out)
    # Another process may begin another stage just now.
    with workdir.told("plan", out), workdir.locked(out, wait=True):
        _keep_to_plan(out, plan)
    sitting = Sitting(tell, math.inf if minutes is None else clock() + 60 * minutes, clock)
    for name in waiting:
        over = _ran(name, out, plan, sitting)
        # Later stages may have been made, or begun, from what lay there before.
        _check_made_from(out)
        if not over:
            return False
    return True


def _waiting(out: Path, plan: Plan, only: Sequence[str]) -> list[str]:
    """The stages that are asked for and not over, in order, once they are known to have what they need."""
    if strangers := sorted(set(only) - STAGES.keys()):
        raise SettingError(
            f"--only: there is no stage {', '.join(map(repr, strangers))}; there are {', '.join(STAGES)}"
        )
    waiting = [name for name in STAGES if (not only or name in only) and not done(out, name)]
    for name in waiting:
        if missing := [need for need in STAGES[name].needs if need not in waiting and not done(out, need)]:
            raise SettingError(f"--only: stage {name} needs {', '.join(missing)}, which {out} has not; run that first")
    _check_made_from(out)
    bound = [name for name in waiting if STAGES[name].on_device]
    if bound and _device_here(plan) != plan.device:
        free = ", ".join(name for name, stage in STAGES.items() if not stage.on_device)
        raise SettingError(
            f"--plan {plan.name} needs a GPU for {', '.join(bound)}, and PyTorch finds none on this machine; "
            f"name --plan small, go to a machine with a GPU, or choose with --only from {free}"
        )
    if plan.librispeech is not None:
        score.check_references(plan.librispeech)
    return waiting


def _device_here(plan: Plan) -> str:
    """The plan's device, or the CPU where that is a GPU which is not there."""
    return "cpu" if torch.device(plan.device).type == "cuda" and not torch.cuda.is_available() else plan.device


def _keep_to_plan(out: Path, plan: Plan) -> None:
    """Keep in `out` what decides data and training, or hold it against what is kept there; SettingError where it differs."""
    asked = PlanRecord(
        plan=plan.name,
        seed=plan.seed,
        heard_hours=plan.heard_hours,
        spoken_hours=plan.spoken_hours,
        copies=plan.copies,
        read=plan.read,
        librispeech=plan.librispeech is not None,
    )
    texts = done(out, "texts")
    kept = workdir.begun(out)
    if kept is None:
        # Stages may have come from elsewhere without the file; of the texts alone it shows what they were made from.
        kept = msgspec.structs.replace(asked, librispeech=_with_librispeech(out, plan)) if texts else asked
        workdir.begin(out, kept)
    if texts and plan.librispeech is None:
        # What comes after the texts does without that folder.
        asked = msgspec.structs.replace(asked, librispeech=kept.librispeech)
    workdir.compare(out, asked, kept)


def _with_librispeech(out: Path, plan: Plan) -> bool:
    """Whether the texts that were made come from LibriSpeech's references; SettingError where the plan can't tell."""
    known = shards.read_list(out / "texts" / "references.jsonl", str)
    librispeech = plan.librispeech is not None and known == _references(plan)
    if (librispeech or known == _stand_ins(plan.seed)) and _to_hear(out) == _lines_to_hear(plan, known):
        return librispeech
    raise SettingError(
        f"--out {out} has no {workdir.PLAN} any more, and its texts are not those of --plan {plan.name} --seed {plan.seed}; "
        f"name the --plan, the --seed and the --librispeech that it was begun with"
    )


def _ran(name: str, out: Path, plan: Plan, sitting: Sitting) -> bool:
    """Run a stage and note it; False when the sitting ended first."""
    folder, began, over = out / name, sitting.clock(), True
    with workdir.told(name, folder), workdir.locked(folder):
        if done(out, name):
            # Another process made it since.
            return True
        workdir.tidy(folder)
        sources = _sources(out, name)
        try:
            sitting.tell(f"{name}: begins")
            shards.write_list(folder / FROM, [sources])
            STAGES[name].run(out, plan, sitting)
        except OutOfTime:
            over = False
        line = card.LogLine(
            name,
            round(sitting.clock() - began, 1),
            over,
            _device_name(_device_here(plan)),
            card.hours(folder) if over and name in (HEARD, SPOKEN) else None,
        )
        workdir.append(out / "log.jsonl", msgspec.json.encode(line))
        if over:
            shards.write_list(folder / DONE, [_Finished(_digest(folder), sources)])
        sitting.listener(f"{name}: {'over' if over else 'goes on in the next sitting'}")
    return over


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if torch.device(device).type == "cuda" else f"CPU, {os.cpu_count()} cores"
