"""Word error rate of the audio-to-text cells: corpus totals per session, and the paired change between arms.

Spoken answers are added up and compared by the same functions (gate/spoken.py).

Scorer: jiwer on text normalised as Whisper's English evaluation does it. Its spelling map (British to American) is a separate
file that is not part of the library; without it the map is empty, and such pairs count as errors on both arms alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import jiwer
import msgspec
import numpy as np

from gate.metrics import measured
from gate.record import Item, Record, RunData

SCORER = (
    "jiwer over Whisper's EnglishTextNormalizer with an empty spelling map "
    "(British and American spellings count as different words)"
)
RESAMPLES = 5000
FEW_BLOCKS = 10  # under about this many, a bootstrap over blocks is known to give too narrow intervals


class ClipErrors(msgspec.Struct, frozen=True):
    """One clip: substitutions, deletions, insertions, words of the reference; and whether the output was empty or cut off.

    `ended` says of speech that it ended by itself; None of text, and where the server does not say.
    """

    item: str
    block: str
    s: int
    d: int
    i: int
    n: int
    empty: bool
    truncated: bool
    ended: bool | None = None

    @property
    def errors(self) -> int:
        """S + D + I."""
        return self.s + self.d + self.i


class WerTotals(msgspec.Struct, frozen=True):
    """A session's corpus totals in one cell; `wer` is 100·(S+D+I)/N in percent.

    `ended` counts speech that ended by itself, None where that is not known of every answer.
    """

    session: str
    arm: str
    cell: str
    s: int
    d: int
    i: int
    n: int
    clips: int
    over_half: int
    empty: int
    truncated: int
    ended: int | None = None

    @property
    def wer(self) -> float:
        """The word error rate of the corpus in percent."""
        return 100.0 * (self.s + self.d + self.i) / self.n if self.n else 0.0


class WerComparison(msgspec.Struct, frozen=True):
    """Both arms' WER in one cell; change and interval in percentage points, None where an arm has no text.

    `verdict` is `WER worse`, `not worse`, `identical` (equal text on every clip), `no verdict`, `measured` (the only arm of a
    run), or `not judged` with a `reason`. `spoken` marks the round trip: what was heard in an answer's speech against its
    text; `clips` are then answers.
    """

    cell: str
    base: list[WerTotals]
    head: list[WerTotals]
    change: float | None
    low: float | None
    high: float | None
    clips: int
    blocks: int
    verdict: str
    spoken: bool = False
    reason: str = ""


@lru_cache(maxsize=1)
def _normaliser() -> Callable[[str], str]:
    # Imported late: it costs seconds, and runs without audio-to-text cells never need it.
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    whisper: Callable[[str], str] = EnglishTextNormalizer({})
    return whisper


@lru_cache(maxsize=65536)
def word_errors(reference: str, hypothesis: str) -> tuple[int, int, int, int]:
    """(S, D, I, N) of a normalised hypothesis against a normalised reference; N = 0 for a reference without words."""
    expected, heard = _normaliser()(reference).strip(), _normaliser()(hypothesis).strip()
    if not expected:
        return 0, 0, len(heard.split()), 0
    if not heard:
        return 0, len(expected.split()), 0, len(expected.split())
    found = jiwer.process_words(expected, heard)
    words = int(found.hits + found.substitutions + found.deletions)
    return int(found.substitutions), int(found.deletions), int(found.insertions), words


def clip_errors(records: Sequence[Record], items: Mapping[str, Item]) -> list[ClipErrors]:
    """The errors of each successful record whose item has a reference with words, in the order given."""
    found = []
    for record in records:
        item = items.get(record.item)
        if not record.ok or item is None or not item.reference:
            continue
        s, d, i, n = word_errors(item.reference, record.text)
        if n:
            truncated = record.finish_reason == "length"
            found.append(ClipErrors(item.id, item.speaker or item.id, s, d, i, n, not record.text.strip(), truncated))
    return found


def totals(session: str, arm: str, cell: str, clips: Sequence[ClipErrors]) -> WerTotals:
    """A session's clips added up."""
    return WerTotals(
        session=session,
        arm=arm,
        cell=cell,
        s=sum(clip.s for clip in clips),
        d=sum(clip.d for clip in clips),
        i=sum(clip.i for clip in clips),
        n=sum(clip.n for clip in clips),
        clips=len(clips),
        over_half=sum(2 * clip.errors > clip.n for clip in clips),
        empty=sum(clip.empty for clip in clips),
        truncated=sum(clip.truncated for clip in clips),
        ended=None if any(clip.ended is None for clip in clips) else sum(bool(clip.ended) for clip in clips),
    )


def _block_sums(base: Sequence[ClipErrors], head: Sequence[ClipErrors]) -> tuple[np.ndarray, int]:
    """Per speaker block (base errors, base words, head errors, head words), [blocks, 4], and the count of clips.

    Only clips that both arms have count; a clip's errors and words are the means over the sessions of its arm.
    """
    ours, theirs = _means(base), _means(head)
    shared = sorted(set(ours) & set(theirs))
    blocks = {clip.item: clip.block for clip in base}
    sums: dict[str, np.ndarray] = {}
    for item in shared:
        row = np.concatenate([ours[item], theirs[item]])
        sums[blocks[item]] = sums.get(blocks[item], np.zeros(4)) + row
    return (np.stack([sums[block] for block in sorted(sums)]) if sums else np.zeros((0, 4))), len(shared)


def _means(clips: Sequence[ClipErrors]) -> dict[str, np.ndarray]:
    """The mean (errors, words) of each item, [2]."""
    by_item: dict[str, list[tuple[int, int]]] = {}
    for clip in clips:
        by_item.setdefault(clip.item, []).append((clip.errors, clip.n))
    return {item: np.mean(np.array(rows, dtype=np.float64), axis=0) for item, rows in by_item.items()}


def paired_interval(sums: np.ndarray, seed: int) -> tuple[float, float, float]:
    """(change, low, high) in percentage points from block sums [blocks, 4]; both arms' errors are resampled together."""
    change = _points(sums.sum(axis=0))
    draws = np.random.default_rng(seed).integers(0, len(sums), size=(RESAMPLES, len(sums)))
    changes = _points(sums[draws].sum(axis=1).T)
    low, high = np.percentile(changes, [2.5, 97.5])
    return float(change), float(low), float(high)


def _points(sums: np.ndarray) -> np.ndarray:
    points: np.ndarray = 100.0 * (sums[2] / sums[3] - sums[0] / sums[1])
    return points


def compare_wer(run: RunData) -> list[WerComparison]:
    """The WER of every A2T cell of a run, in the plan's order."""
    found = []
    for cell in run.plan.cells:
        if cell.task == "A2T":
            identical = is_identical(run, cell.name, lambda record: record.text)
            found.append(compare_cell(run, cell.name, lambda records: clip_errors(records, run.items), identical))
    return found


def compare_cell(
    run: RunData, cell: str, errors: Callable[[Sequence[Record]], list[ClipErrors]], identical: bool
) -> WerComparison:
    """One cell's sessions added up and its arms compared; `errors` are those of a session's measured records by index."""
    clips: dict[str, list[ClipErrors]] = {"base": [], "head": []}
    rows: dict[str, list[WerTotals]] = {"base": [], "head": []}
    for session in sorted(run.sessions, key=lambda session: session.slot):
        found = errors(measured(run.records, session.id, cell))
        side = "head" if session.arm == "head" else "base"  # a run of one arm stands in base's place
        if found:
            clips[side].extend(found)
            rows[side].append(totals(session.id, session.arm, cell, found))
    if len(set(run.plan.order)) < 2:
        return _alone(cell, rows, [*clips["base"], *clips["head"]])
    sums, count = _block_sums(clips["base"], clips["head"])
    if not count:
        return WerComparison(cell, rows["base"], rows["head"], None, None, None, 0, 0, "no verdict")
    change, low, high = paired_interval(sums, run.plan.seed)
    verdict = "not worse"
    if identical:
        verdict = "identical"
    elif low > 0 and change >= run.plan.thresholds.wer_points:
        verdict = "WER worse"
    return WerComparison(cell, rows["base"], rows["head"], change, low, high, count, len(sums), verdict)


def _alone(cell: str, rows: Mapping[str, list[WerTotals]], clips: Sequence[ClipErrors]) -> WerComparison:
    """The WER of a run of one arm: there is nothing to compare it with."""
    items, blocks = {clip.item for clip in clips}, {clip.block for clip in clips}
    verdict = "measured" if clips else "no verdict"
    return WerComparison(cell, rows["base"], rows["head"], None, None, None, len(items), len(blocks), verdict)


def is_identical(run: RunData, cell: str, answer: Callable[[Record], object], first: int | None = None) -> bool:
    """Whether every session gave the same answer to every request of a cell, none failed, and both arms are there.

    `first`: only so many requests count.
    """
    answers: dict[int, set[object]] = {}
    arms: set[str] = set()
    for record in run.records:
        if record.cell == cell and not record.warm and (first is None or record.index < first):
            if not record.ok:
                return False
            arms.add(record.arm)
            answers.setdefault(record.index, set()).add(answer(record))
    return len(arms) == 2 and all(len(found) == 1 for found in answers.values())
