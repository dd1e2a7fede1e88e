"""Markdown pieces of the report: numbers, tables, folds. What a number means is decided elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

NOT_TRACED = "not traced"
DASH = "–"


def number(value: float | None, digits: int | None = None) -> str:
    """A value with about four significant digits (or `digits` decimals), thousands separated, with a true minus sign."""
    if value is None:
        return DASH
    if digits is None:
        size = abs(value)
        digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 10 else 3
        digits = 0 if round(value, digits) == round(value) else digits
    text = f"{value:,.{digits}f}"
    zero = text.strip("-0.,") == ""
    return text.lstrip("-") if zero else text.replace("-", "−")


def signed(value: float | None, digits: int = 1) -> str:
    """A change with its sign: +4.2, −0.5, 0.0."""
    text = number(value, digits)
    return text if value is None or text.startswith("−") or text.strip("0.") == "" else f"+{text}"


def interval(low: float | None, high: float | None, digits: int = 1) -> str:
    """An interval: −1.7 … +10.1, or a dash where there is none."""
    return DASH if low is None or high is None else f"{signed(low, digits)} … {signed(high, digits)}"


def listed(values: Iterable[float]) -> str:
    """Raw session values side by side, or a dash."""
    return " ".join(number(value) for value in values) or DASH


def counted(values: Iterable[float]) -> str:
    """Values in ascending order with repeats counted: 20 21 32 ×4."""
    groups = [(number(value), len(list(same))) for value, same in groupby(sorted(values))]
    return " ".join(text if count == 1 else f"{text} ×{count}" for text, count in groups) or DASH


def ranged(values: Sequence[float]) -> str:
    """One value, or the least and the greatest: 6,196 … 6,537."""
    if not values:
        return DASH
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} … {high}"


def plural(count: int, noun: str, nouns: str | None = None) -> str:
    """A count with its noun: 1 cell, 2 cells."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def inline(text: str, longest: int | None = 300) -> str:
    """Foreign text made safe for a table cell: one line, no column marks, no HTML, cut when long (`longest` None: never)."""
    flat = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return flat if longest is None or len(flat) <= longest else flat[: longest - 1] + "…"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """A table as lines, followed by an empty one; `right` numbers the right-aligned columns."""
    aligned = set(right)
    rule = ["---:" if column in aligned else "---" for column in range(len(head))]
    return [f"| {' | '.join(row)} |" if row is not rule else f"|{'|'.join(rule)}|" for row in (head, rule, *rows)] + [
        ""
    ]


def fold(title: str, lines: Sequence[str]) -> list[str]:
    """Lines behind a click; GitHub wants an empty line after the summary."""
    return [f"<details><summary>{title}</summary>", "", *lines, "</details>", ""]
