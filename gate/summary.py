"""What `gate run` prints and how it ends: one arm's metrics, a column a session, what went wrong, the exit code. Pure."""

from __future__ import annotations

from gate.cell import METRICS
from gate.markdown import plural
from gate.metrics import session_metrics
from gate.record import Record, RunData
from gate.verdict import EXIT_OK, EXIT_UNDECIDED, EXIT_UNUSABLE, EXIT_WORSE, INVALID, Comparisons

MOST_REASONS = 5
SHOWN = ("tok/s", "RTFx", "audio-s/s", "TTFT p50", "TTFA p50", "ITL p50", "gap p99", "e2e p50", "failed", "issued")


def session_table(run: RunData) -> str:
    """A markdown table of the shown metrics by cell, with every session's value; cells that no session finished say so."""
    sessions = [session.id for session in run.sessions]
    values = {(row.cell, row.metric, row.session): row.value for row in session_metrics(run)}
    lines = [f"| cell | metric | {' | '.join(sessions)} |", f"|---|---|{'---:|' * len(sessions)}"]
    for cell in run.plan.cells:
        shown = [name for name in SHOWN if any((cell.name, name, session) in values for session in sessions)]
        if not shown:
            lines.append(f"| {cell.name} | not finished |{' |' * len(sessions)}")
        for name in shown:
            row = [_number(values.get((cell.name, name, session))) for session in sessions]
            lines.append(f"| {cell.name} | {name} ({METRICS[name].unit}) | {' | '.join(row)} |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def failures(run: RunData, found: Comparisons) -> str:
    """What went wrong in a run, a line each: its faults, and the first reasons of failed requests; empty for a sound run."""
    faults = [fault for fault in found.faults if fault.kind != "failed"]
    lines = [fault.words if fault.cell is None else f"{fault.cell}: {fault.words}" for fault in faults]
    reasons = _reasons(run)
    for reason, failed in list(reasons.items())[:MOST_REASONS]:
        cells = ", ".join(dict.fromkeys(record.cell for record in failed))
        lines.append(f"{cells}: {plural(len(failed), 'request')} failed: {reason}")
    more = len(reasons) - MOST_REASONS
    return "\n".join([*lines, f"{plural(more, 'other reason')} in sessions/*/records.jsonl"] if more > 0 else lines)


def _reasons(run: RunData) -> dict[str, list[Record]]:
    """The failed requests by the first line of their error, in the order of their records."""
    found: dict[str, list[Record]] = {}
    for record in run.records:
        if not record.warm and not record.ok:
            found.setdefault((record.error or "no reason given").splitlines()[0], []).append(record)
    return found


def one_arm_exit_code(found: Comparisons) -> int:
    """How a run of one arm ends, the first that holds.

    3 invalid evidence, or a cell of which no session brought one sound request · 1 any other fault · 2 stopped before its end ·
    0 every request sound.
    """
    cells = [row.cell for row in found.cells]
    if found.arm_verdict == INVALID or any(_was_tried(found, cell) and not _sound(found, cell) for cell in cells):
        return EXIT_UNUSABLE
    if found.faults:
        return EXIT_WORSE
    return EXIT_UNDECIDED if found.is_unfinished else EXIT_OK


def _was_tried(found: Comparisons, cell: str) -> bool:
    return cell in {row.cell for row in found.metrics} | {fault.cell for fault in found.faults}


def _sound(found: Comparisons, cell: str) -> int:
    """How many measured requests of a cell have no fault; a load client's end is none of theirs."""
    issued = sum(row.value for row in found.metrics if row.cell == cell and row.metric == "issued")
    return int(issued) - sum(fault.count for fault in found.faults if fault.cell == cell and fault.kind != "client")
