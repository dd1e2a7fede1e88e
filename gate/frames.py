"""Tables: a run as pandas frames, one row a record, a session's metric, a comparison, a pair of sessions, a WER.

Columns are fixed: a run without a single pair has a frame without rows, not without columns. Units stand in the names.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas

from gate.cell import METRICS
from gate.greedy import GreedyPair, is_near_tie
from gate.metrics import SessionMetric, audio_out_s, itl_ms, ttfa_us, ttft_us
from gate.record import Record, RunData
from gate.stats import percent
from gate.verdict import CellComparison, Comparisons, compare
from gate.wer import WerComparison

_KINDS = {"text": "string", "count": "Int64", "number": "Float64", "flag": "boolean"}
_COLUMNS: dict[str, dict[str, str]] = {
    "records": {
        **dict.fromkeys(("session", "arm", "cell", "task", "item"), "text"),
        **dict.fromkeys(("index", "client"), "count"),
        **dict.fromkeys(("warm", "ok"), "flag"),
        **dict.fromkeys(("error", "finish_reason", "audio_finish_reason"), "text"),
        **dict.fromkeys(("t0_s", "ttft_ms", "ttfa_ms", "itl_ms", "e2e_ms"), "number"),
        **dict.fromkeys(("prompt_tokens", "tokens"), "count"),
        **dict.fromkeys(("audio_in_s", "audio_out_s"), "number"),
        **dict.fromkeys(("pcm_sha256", "text"), "text"),
    },
    "sessions": {
        **dict.fromkeys(("session", "arm"), "text"),
        "slot": "count",
        **dict.fromkeys(("cell", "metric", "unit", "better"), "text"),
        "value": "number",
    },
    "comparisons": {
        **dict.fromkeys(("cell", "task", "metric"), "text"),
        **dict.fromkeys(("sessions_base", "sessions_head"), "count"),
        **dict.fromkeys(
            (
                "mean_base",
                "mean_head",
                "change_percent",
                "low_percent",
                "high_percent",
                "low90_percent",
                "high90_percent",
            ),
            "number",
        ),
        "spread_percent": "number",
        "df": "count",
        **dict.fromkeys(("p", "p_holm"), "number"),
        **dict.fromkeys(("floor_percent", "loss_not_excluded_percent", "detectable_percent"), "number"),
        "settle_sessions": "count",
        **dict.fromkeys(("verdict", "reasons"), "text"),
    },
    "greedy": {
        **dict.fromkeys(("cell", "kind", "a", "b"), "text"),
        **dict.fromkeys(("exact", "of", "matched", "of_steps", "steps_a", "steps_b", "left_out"), "count"),
        "first_item": "text",
        "first_step": "count",
        "first_reason": "text",
        **dict.fromkeys(("first_token_a", "first_token_b"), "count"),
        "first_margin": "number",
        "first_near_tie": "flag",
    },
    "wer": {
        **dict.fromkeys(("cell", "session", "arm"), "text"),
        "wer_percent": "number",
        **dict.fromkeys(
            ("substitutions", "deletions", "insertions", "words", "clips", "clips_over_half", "empty", "truncated"),
            "count",
        ),
        "ended_by_themselves": "count",
        **dict.fromkeys(("change_points", "low_points", "high_points"), "number"),
        "verdict": "text",
        "round_trip": "flag",
    },
}

Row = dict[str, object]


def build_frames(run: RunData, comparisons: Comparisons | None = None) -> dict[str, pandas.DataFrame]:
    """The tables records, sessions, comparisons, greedy and wer of a run; `comparisons` saves deriving them again."""
    found = comparisons if comparisons is not None else compare(run)
    return {
        "records": _frame("records", [_record(record) for record in run.records]),
        "sessions": _frame("sessions", [_session(row) for row in found.metrics]),
        "comparisons": _frame("comparisons", [_comparison(row) for row in found.cells]),
        "greedy": _frame("greedy", [_pair(pair) for pair in found.greedy]),
        "wer": _frame("wer", [row for cell in found.wer for row in _wer(cell)]),
    }


def _frame(name: str, rows: Sequence[Row]) -> pandas.DataFrame:
    columns = _COLUMNS[name]
    return pandas.DataFrame(
        {key: pandas.array([row[key] for row in rows], dtype=_KINDS[kind]) for key, kind in columns.items()}  # type: ignore[call-overload]
    )


def _ms(us: int | None) -> float | None:
    return None if us is None else us / 1e3


def _record(record: Record) -> Row:
    return {
        **{
            key: getattr(record, key)
            for key in ("session", "arm", "cell", "task", "item", "index", "client", "warm", "ok")
        },
        **{
            key: getattr(record, key)
            for key in ("error", "finish_reason", "audio_finish_reason", "prompt_tokens", "text")
        },
        "t0_s": record.t0_ns / 1e9,
        "ttft_ms": _ms(ttft_us(record)),
        "ttfa_ms": _ms(ttfa_us(record)),
        "itl_ms": itl_ms(record),
        "e2e_ms": record.e2e_us / 1e3,
        "tokens": record.completion_tokens,
        "audio_in_s": record.audio_in_s,
        "audio_out_s": audio_out_s(record),
        "pcm_sha256": record.pcm_sha256,
    }


def _session(row: SessionMetric) -> Row:
    metric = METRICS[row.metric]
    place: Row = {"session": row.session, "arm": row.arm, "slot": row.slot, "cell": row.cell, "metric": row.metric}
    return {**place, "unit": metric.unit, "better": metric.better, "value": row.value}


def _mean(rows: Sequence[SessionMetric]) -> float | None:
    return sum(row.value for row in rows) / len(rows) if rows else None


def _percent(log_ratio: float | None) -> float | None:
    return None if log_ratio is None else percent(log_ratio)


def _hundred(ratio: float | None) -> float | None:
    return None if ratio is None else 100.0 * ratio


def _comparison(row: CellComparison) -> Row:
    found = row.contrast
    return {
        "cell": row.cell,
        "task": row.task,
        "metric": row.metric,
        "sessions_base": len(row.base),
        "sessions_head": len(row.head),
        "mean_base": _mean(row.base),
        "mean_head": _mean(row.head),
        "change_percent": _percent(found.estimate) if found else None,
        "low_percent": _percent(found.low) if found else None,
        "high_percent": _percent(found.high) if found else None,
        "low90_percent": _percent(found.low90) if found else None,
        "high90_percent": _percent(found.high90) if found else None,
        "spread_percent": 100.0 * found.s if found else None,
        "df": found.df if found else None,
        "p": found.p if found else None,
        "p_holm": row.p_holm,
        "floor_percent": 100.0 * row.floor,
        "loss_not_excluded_percent": _hundred(row.loss_not_excluded),
        "detectable_percent": _hundred(row.detectable),
        "settle_sessions": row.settle_sessions,
        "verdict": row.verdict,
        "reasons": "; ".join(row.reasons),
    }


def _pair(pair: GreedyPair) -> Row:
    first = pair.first
    counts = ("exact", "of", "matched", "of_steps", "steps_a", "steps_b", "left_out")
    return {
        **{key: getattr(pair, key) for key in ("cell", "kind", "a", "b", *counts)},
        "first_item": first.item if first else None,
        "first_step": first.step if first else None,
        "first_reason": first.reason if first else None,
        "first_token_a": first.token_a if first else None,
        "first_token_b": first.token_b if first else None,
        "first_margin": first.margin if first else None,
        "first_near_tie": is_near_tie(first.margin) if first else None,
    }


def _wer(cell: WerComparison) -> list[Row]:
    """A row a session, and one for the change between the arms."""
    rows: list[Row] = []
    for row in [*cell.base, *cell.head]:
        counts: Row = {
            "substitutions": row.s,
            "deletions": row.d,
            "insertions": row.i,
            "words": row.n,
            "clips": row.clips,
        }
        tails: Row = {"clips_over_half": row.over_half, "empty": row.empty, "truncated": row.truncated}
        tails["ended_by_themselves"] = row.ended
        place: Row = {"cell": cell.cell, "session": row.session, "arm": row.arm, "wer_percent": row.wer}
        rows.append({**_NO_WER, **place, **counts, **tails, "round_trip": cell.spoken})
    change: Row = {"change_points": cell.change, "low_points": cell.low, "high_points": cell.high}
    whole: Row = {"cell": cell.cell, "clips": cell.clips, "verdict": cell.verdict, "round_trip": cell.spoken}
    return [*rows, {**_NO_WER, **change, **whole}]


_NO_WER: Row = dict.fromkeys(_COLUMNS["wer"])
