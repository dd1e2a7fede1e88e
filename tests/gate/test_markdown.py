from __future__ import annotations

import pytest

from gate.markdown import counted, inline, interval, number, ranged, signed, table


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "–"),
        (0.0, "0"),
        (1e-12, "0"),
        (-1e-12, "0"),
        (3.44, "3.440"),
        (17.13, "17.13"),
        (249.1, "249.1"),
        (2955.4, "2,955"),
        (282.0, "282"),
        (-0.5, "−0.500"),
        (1234567.0, "1,234,567"),
    ],
)
def test_numbers_have_about_four_digits(value: float | None, expected: str) -> None:
    assert number(value) == expected


def test_changes_carry_their_sign_and_nothing_has_none() -> None:
    assert [signed(value) for value in (4.23, -0.51, 0.0, -0.04, 0.04)] == ["+4.2", "−0.5", "0.0", "0.0", "0.0"]
    assert interval(-8.14, 20.8) == "−8.1 … +20.8"
    assert interval(None, 1.0) == "–"


def test_repeated_values_are_counted_and_ranges_have_two_ends() -> None:
    assert counted([32, 20, 21, 20, 32, 32]) == "20 ×2 21 32 ×3"
    assert (ranged([7340, 6196]), ranged([4, 4]), ranged([])) == ("6,196 … 7,340", "4", "–")


def test_foreign_text_cannot_break_a_table() -> None:
    assert inline("a|b\n<script>  c") == "a\\|b &lt;script> c"
    assert inline("x" * 400) == "x" * 299 + "…"
    assert inline("x" * 400, None) == "x" * 400


def test_a_table_is_lines_of_github_markdown() -> None:
    assert table(("a", "b"), [("1", "2")], right=(1,)) == ["| a | b |", "|---|---:|", "| 1 | 2 |", ""]
