"""The table that `gate run` prints: one arm's metrics, a column a session. Pure; judges nothing."""

from __future__ import annotations

from gate.cell import METRICS
from gate.metrics import session_metrics
from gate.record import RunData

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
