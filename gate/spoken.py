"""The round trip of spoken answers: what a recogniser heard in an answer's speech, against the answer's own text.

Which answers are judged, what is still to be heard, and the word error rate with the same scorer and statistics as that of
transcripts (gate/wer.py). Not here: the recogniser itself (gate/judge.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gate.cell import SPEECH_TASKS, Cell
from gate.markdown import plural
from gate.metrics import measured
from gate.record import Item, Record, RunData
from gate.wer import ClipErrors, WerComparison, compare_cell, is_identical, word_errors

NOT_JUDGED = "not judged"


def speaking(run: RunData) -> list[Cell]:
    """The cells whose answers are spoken, in the plan's order."""
    return [cell for cell in run.plan.cells if cell.task in SPEECH_TASKS]


def judged(run: RunData, session: str, cell: str) -> list[Record]:
    """The answers of a session's cell that are judged, by index."""
    return [record for record in measured(run.records, session, cell) if run.plan.judge.takes(record)]


def names_to_judge(run: RunData) -> list[str]:
    """The names of all speech that is judged, equal sound once, by slot and cell."""
    return list(
        dict.fromkeys(
            str(record.speech)
            for session in sorted(run.sessions, key=lambda session: session.slot)
            for cell in speaking(run)
            for record in judged(run, session.id, cell.name)
        )
    )


def unheard(run: RunData) -> list[str]:
    """The names of the speech that is still to be heard."""
    return [name for name in names_to_judge(run) if name not in run.heard]


def spoken_errors(records: Sequence[Record], items: Mapping[str, Item], heard: Mapping[str, str]) -> list[ClipErrors]:
    """The errors of what was heard of each answer that was, against its text; answers whose text has no words have none."""
    found = []
    for record in records:
        words = heard.get(str(record.speech))
        if words is None:
            continue
        s, d, i, n = word_errors(record.text, words)
        if not n:
            continue
        item, reason = items.get(record.item), record.audio_finish_reason
        block = (item.speaker if item is not None else None) or record.item
        ended = None if reason is None else reason == "stop"
        found.append(ClipErrors(record.item, block, s, d, i, n, not words.strip(), reason == "length", ended))
    return found


def compare_spoken(run: RunData) -> list[WerComparison]:
    """The round-trip WER of every speaking cell of a run, in the plan's order; no figure before all speech is heard."""
    return [_compare(run, cell) for cell in speaking(run)]


def _compare(run: RunData, cell: Cell) -> WerComparison:
    plan = run.plan.judge
    if not plan.requests:
        return _without_figure(cell, plan.why_not)
    if left := len(unheard(run)):
        return _without_figure(cell, f"{left} of {plural(len(names_to_judge(run)), 'recording')} still to be heard")
    found = compare_cell(
        run,
        cell.name,
        lambda records: spoken_errors([one for one in records if plan.takes(one)], run.items, run.heard),
        is_identical(run, cell.name, lambda record: (record.text, record.speech), plan.requests),
    )
    return msgspec.structs.replace(found, spoken=True)


def _without_figure(cell: Cell, reason: str) -> WerComparison:
    return WerComparison(cell.name, [], [], None, None, None, 0, 0, NOT_JUDGED, spoken=True, reason=reason)
