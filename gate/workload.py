"""Workloads: the prompts and clips that requests are made of, their hash, and the order in which they are asked.

They come from the gate's own checkout (or from a LibriSpeech folder or the hub) and never from an arm, so both arms get the
same bytes.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import soundfile

from gate.cell import Cell, CellSet, parse_cells
from gate.record import Item

# The text that goes with a clip: one sentence for all, so that the audio alone decides the answer.
CLIP_INSTRUCTION = "Transcribe the speech."
HUB_DATASET = "openslr/librispeech_asr"
HUB_SPLIT = "test.clean"

_Row = TypeVar("_Row", bound=msgspec.Struct)


class WorkloadError(ValueError):
    """A workload that is absent or malformed; the message names the file and the fix."""


@dataclass(frozen=True)
class Workload:
    """A named set of items, with the folder its audio paths are relative to and a label for the report."""

    name: str
    label: str
    items: tuple[Item, ...]
    root: Path


class _Prompt(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    text: str


class _Clip(msgspec.Struct):
    id: str
    audio: str
    text: str
    seconds: float
    speaker: str = ""


def default_root() -> Path:
    """The `workloads` folder of the gate's own checkout."""
    return Path(__file__).resolve().parent.parent / "workloads"


def load_cells(root: Path) -> dict[str, CellSet]:
    """The cell sets of `root`/cells.toml by name."""
    path = root / "cells.toml"
    try:
        return parse_cells(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read ({error.strerror}); run the gate from a checkout") from error
    except ValueError as error:
        raise WorkloadError(f"{path}: {error}") from error


def load_prompts(root: Path) -> Workload:
    """The written prompts of `root`/prompts.jsonl."""
    return _texts(root, "prompts")


def load_questions(root: Path) -> Workload:
    """The questions of `root`/questions.jsonl, of the kinds that the small trained model answers."""
    return _texts(root, "questions")


def _texts(root: Path, name: str) -> Workload:
    rows = _rows(root / f"{name}.jsonl", _Prompt)
    items = [
        Item(id=row.id, text=row.text, audio=None, audio_seconds=0.0, reference=None, speaker=None) for row in rows
    ]
    return _checked(Workload(name, f"{len(items)} {name}", tuple(items), root))


def load_clips(root: Path) -> Workload:
    """The spoken clips of `root`/clips/manifest.jsonl; every file must be there."""
    rows = _rows(root / "clips" / "manifest.jsonl", _Clip)
    items = tuple(_clip(row) for row in rows)
    for item in items:
        if item.audio is None or not (root / item.audio).is_file():
            raise WorkloadError(f"{root / 'clips' / 'manifest.jsonl'} names {item.audio}, which is not under {root}")
    return _checked(Workload("clips", f"{len(items)} clips", items, root))


def _clip(row: _Clip) -> Item:
    return Item(
        id=row.id,
        text=CLIP_INSTRUCTION,
        audio=row.audio,
        audio_seconds=row.seconds,
        reference=row.text,
        speaker=row.speaker or None,
    )


def _rows(path: Path, kind: type[_Row]) -> list[_Row]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read ({error.strerror}); run the gate from a checkout") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [msgspec.json.decode(line, type=kind)] if line.strip() else []
        except msgspec.MsgspecError as error:
            raise WorkloadError(f"{path}, line {number}: {error}") from error
    return rows


def _checked(workload: Workload) -> Workload:
    ids = [item.id for item in workload.items]
    if not ids:
        raise WorkloadError(f"the workload {workload.name!r} in {workload.root} is empty")
    twice = next((name for name in ids if ids.count(name) > 1), None)
    if twice is not None:
        raise WorkloadError(f"the workload {workload.name!r} in {workload.root} has the id {twice!r} twice")
    return workload


def make_ids(cell: Cell, seed: int, root: Path) -> Workload:
    """The prompts of a cell of random ids, one for each of its requests, warm ones included: all different.

    They are a function of the run's `seed`, the cell's name and the prompt's number.
    """
    length, below = cell.prompt_tokens, cell.ids_below
    assert length is not None and below is not None, f"{cell.name} is no cell of random ids"
    count = cell.requests + cell.warm_waves * cell.concurrency
    # At two ids and more, a prompt as long as 2 * count has bits is long enough: no large power is worked out.
    if below ** min(length, (2 * count).bit_length()) < 2 * count:
        raise WorkloadError(
            f"{cell.name} wants {count} different prompts of {length} ids below {below}; raise prompt_tokens or ids_below"
        )
    found: dict[tuple[int, ...], Item] = {}
    for number in range(count):
        draw = random.Random(f"{seed}/{cell.name}/{number}")
        while (ids := tuple(draw.randrange(below) for _ in range(length))) in found:
            pass
        found[ids] = Item(f"{cell.name}-{number:04d}", None, None, 0.0, None, None, list(ids))
    label = f"{count} prompts of {length} random ids below {below}"
    return Workload(cell.source, label, tuple(found.values()), root)


def load_librispeech(folder: Path) -> Workload:
    """Every clip under a folder in LibriSpeech's layout (SUBSET/SPEAKER/CHAPTER, or SPEAKER/CHAPTER for a subset itself)."""
    folder = folder.resolve()
    if not folder.is_dir():
        raise WorkloadError(f"--librispeech {folder} is not a folder; name one in LibriSpeech's layout, or `hub`")
    items = [_utterance(path) for path in sorted(folder.rglob("*.flac"))]
    if not items:
        raise WorkloadError(f"--librispeech {folder} holds no SPEAKER/CHAPTER/*.flac")
    for path in sorted(folder.rglob("*.trans.txt")):
        _check_audio(path, {item.id for item in items})
    return _checked(Workload("librispeech", f"{folder.name}, {len(items)} clips", tuple(items), folder))


def _check_audio(transcripts: Path, clips: Collection[str]) -> None:
    """Refuse a transcript whose clip is not there: a set that lost clips would be judged as if it were whole."""
    names = (line.partition(" ")[0] for line in _text_lines(transcripts))
    lost = next((name for name in names if name and name not in clips), None)
    if lost is not None:
        raise WorkloadError(
            f"{transcripts} has a line for {lost}, but there is no {lost}.flac; fetch it, or drop the line"
        )


def _utterance(path: Path) -> Item:
    parts = path.stem.split("-")
    transcripts = path.with_name(f"{'-'.join(parts[:2])}.trans.txt")
    reference = _transcript(transcripts, path.stem)
    try:
        seconds = float(soundfile.info(str(path)).duration)
    except (soundfile.LibsndfileError, OSError) as error:
        raise WorkloadError(f"{path} is not readable audio: {error}") from error
    return Item(
        id=path.stem,
        text=CLIP_INSTRUCTION,
        audio=str(path),
        audio_seconds=round(seconds, 6),
        reference=reference,
        speaker=parts[0],
    )


def _transcript(path: Path, utterance: str) -> str:
    lines = _text_lines(path, f"; it holds the transcript of {utterance}")
    found = next((words for name, _, words in (line.partition(" ") for line in lines) if name == utterance), None)
    if found is None:
        raise WorkloadError(f"{path} has no line for {utterance}")
    if not found.strip():
        raise WorkloadError(f"{path} has no words for {utterance}; write them, or remove the clip and its line")
    return found


def _text_lines(path: Path, why: str = "") -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read ({error.strerror}){why}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path} is not UTF-8 at byte {error.start}; write it again as UTF-8") from error


def librispeech_from_hub(target: Path) -> Workload:
    """LibriSpeech test-clean through `datasets`, its clips written under `target` in LibriSpeech's layout."""
    import datasets  # takes seconds to import, and only this path needs it

    try:
        rows = datasets.load_dataset(HUB_DATASET, "all", split=HUB_SPLIT)
        rows = rows.cast_column("audio", datasets.Audio(decode=False))
    except Exception as error:  # the library raises whatever its many transports raise; each means "not there"
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise WorkloadError(
            f"{HUB_DATASET} cannot be had from the hub ({first}); name a folder: --librispeech PATH"
        ) from error
    folder = target / "test-clean"
    shutil.rmtree(folder, ignore_errors=True)  # a resumed run writes it again, and lines are appended
    for row in rows:
        _write_utterance(folder, str(row["id"]), str(row["text"]), row["audio"])
    return load_librispeech(folder)


def _write_utterance(folder: Path, name: str, text: str, audio: dict[str, object]) -> None:
    speaker, chapter = name.split("-")[:2]
    place = folder / speaker / chapter
    place.mkdir(parents=True, exist_ok=True)
    content = audio.get("bytes")
    data = content if isinstance(content, bytes) else Path(str(audio["path"])).read_bytes()
    (place / f"{name}.flac").write_bytes(data)
    with (place / f"{speaker}-{chapter}.trans.txt").open("a", encoding="utf-8") as file:
        file.write(f"{name} {text}\n")


def workload_hash(workloads: Iterable[Workload]) -> str:
    """SHA-256 hex over every item's id, text, reference and audio bytes, in the order given."""
    total = hashlib.sha256()
    for workload in workloads:
        for item in workload.items:
            for part in _parts(item, workload.root):
                total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def _parts(item: Item, root: Path) -> Iterator[bytes]:
    yield item.id.encode()
    yield (item.text or "").encode() if item.token_ids is None else " ".join(map(str, item.token_ids)).encode()
    yield (item.reference or "").encode()
    yield (root / item.audio).read_bytes() if item.audio is not None else b""


def ordered(items: Sequence[Item], count: int, seed: int, name: str) -> list[Item]:
    """`count` items in the order the seed gives to the workload `name`; the order repeats where items run out."""
    shuffled = sorted(items, key=lambda item: item.id)
    random.Random(f"{seed}/{name}").shuffle(shuffled)
    return [shuffled[index % len(shuffled)] for index in range(count)]


def warm_items(items: Sequence[Item], count: int, seed: int, name: str) -> list[Item]:
    """`count` items for the warm waves, from the far end of the same order, so that they seldom are the measured ones."""
    backwards = ordered(items, len(items), seed, name)[::-1]
    return [backwards[index % len(backwards)] for index in range(count)]
