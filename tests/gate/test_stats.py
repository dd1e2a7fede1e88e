"""Statistics against numbers computed elsewhere; the seven cells are session values that a person once compared by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.stats import (
    Contrast,
    contrast,
    holm,
    is_equivalent,
    percent,
    pooled_spread,
    sessions_to_settle,
    smallest_detectable,
)

CELLS = [
    # base, head, change %, spread %, interval with the spread floored at 0.5 %
    # (by plain means the first cell's change is 5.2 %; the estimate is the one the interval is built around)
    ([282, 311, 312], [318, 317], 5.4, 4.69, -8.1, 20.8),
    ([1719, 1799, 1793], [1789, 1790], 1.1, 2.07, -4.8, 7.4),
    ([2955, 2955], [3079, 3077], 4.2, 0.03, 1.9, 6.4),
    ([58.3, 58.2], [60.3, 60.2], 3.4, 0.12, 1.2, 5.7),
    ([249.1, 247.1, 248.6], [277.4, 269.8], 10.2, 1.18, 6.5, 14.1),
    ([17.13, 16.46], [17.46, 17.40], 3.8, 2.00, -4.8, 13.1),
    ([14.77, 14.44], [15.30, 15.09], 4.0, 1.32, -1.7, 10.1),
]
VALUES = st.lists(st.floats(1.0, 1e4), min_size=2, max_size=6)


def made(base: list[float], head: list[float], s_min: float = 0.005) -> Contrast:
    found = contrast(base, head, s_min)
    assert found is not None
    return found


def bound(value: float | None) -> float:
    assert value is not None
    return percent(value)


@pytest.mark.parametrize(("base", "head", "change", "spread", "low", "high"), CELLS)
def test_intervals_of_known_sessions(
    base: list[float], head: list[float], change: float, spread: float, low: float, high: float
) -> None:
    found = made(base, head)

    assert percent(found.estimate) == pytest.approx(change, abs=0.06)
    assert 100 * pooled_spread(base, head) == pytest.approx(spread, abs=0.006)
    assert bound(found.low) == pytest.approx(low, abs=0.06)
    assert bound(found.high) == pytest.approx(high, abs=0.06)


def test_without_a_floor_two_lucky_sessions_make_a_narrow_interval() -> None:
    found = made([2955, 2955], [3079, 3077], s_min=0.0)

    assert (round(bound(found.low), 1), round(bound(found.high), 1)) == (4.0, 4.3)


def test_the_seven_cells_give_three_raw_verdicts() -> None:
    decided = [made(base, head) for base, head, *_ in CELLS]

    assert [found.p is not None and found.p < 0.05 for found in decided] == [
        False,
        False,
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(("sessions", "half_width"), [(2, 4.3), (3, 2.3), (4, 2.25), (6, 1.48), (8, 1.18)])
def test_half_widths_of_the_interval_at_one_percent(sessions: int, half_width: float) -> None:
    found = made([100.0] * sessions, [100.0] * sessions, s_min=0.01)

    assert found.high is not None
    assert 100 * found.high == pytest.approx(half_width, abs=0.06)


@given(VALUES, VALUES)
def test_swapping_the_arms_mirrors_the_interval(base: list[float], head: list[float]) -> None:
    there, back = made(base, head), made(head, base)

    assert there.estimate == pytest.approx(-back.estimate, abs=1e-9)
    assert there.low == pytest.approx(-(back.high or 0.0), abs=1e-9)
    assert there.p == pytest.approx(back.p)


@given(VALUES, VALUES, st.floats(0.01, 100.0))
def test_a_unit_changes_nothing(base: list[float], head: list[float], unit: float) -> None:
    plain, scaled = made(base, head), made([value * unit for value in base], [value * unit for value in head])

    assert scaled.estimate == pytest.approx(plain.estimate, abs=1e-9)
    assert scaled.p == pytest.approx(plain.p, abs=1e-6)


@given(VALUES, VALUES)
def test_p_and_the_interval_agree(base: list[float], head: list[float]) -> None:
    found = made(base, head)

    assert found.low is not None and found.high is not None and found.p is not None
    if abs(found.p - 0.05) > 1e-6:
        assert (found.p < 0.05) == (found.low > 0 or found.high < 0)


def test_one_session_an_arm_has_no_interval() -> None:
    found = made([100.0], [90.0])

    assert (found.low, found.high, found.p, found.df) == (None, None, None, 0)
    assert percent(found.estimate) == pytest.approx(-10.0)
    assert not is_equivalent(found, 0.02)


@pytest.mark.parametrize(("base", "head"), [([], [1.0]), ([1.0], []), ([0.0, 1.0], [1.0])])
def test_values_without_a_logarithm_are_not_compared(base: list[float], head: list[float]) -> None:
    assert contrast(base, head, 0.005) is None


def test_holm_by_hand() -> None:
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}, 4) == pytest.approx(
        {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}
    )
    assert holm({"a": 0.6, "b": 0.7}, 2) == {"a": 1.0, "b": 1.0}
    assert holm({}, 0) == {}


def test_holm_counts_a_planned_test_without_a_p_value() -> None:
    assert holm({"a": 0.01, "b": 0.03}, 4) == pytest.approx({"a": 0.04, "b": 0.09})


@given(st.dictionaries(st.text(max_size=3), st.floats(0.0, 1.0), max_size=9))
def test_holm_never_makes_p_smaller_and_keeps_the_order(p_values: dict[str, float]) -> None:
    adjusted = holm(p_values, len(p_values))

    assert all(p_values[name] <= adjusted[name] <= 1.0 for name in p_values)
    ranked = sorted(p_values, key=lambda name: (p_values[name], name))
    assert [adjusted[name] for name in ranked] == sorted(adjusted.values())


def test_equivalence_needs_the_ninety_percent_interval_inside_the_floor() -> None:
    # s = 0.5 %, 3+3: t(0.95, 4) = 2.132, error = 0.005·√(2/3), half width 0.870 %
    same, near, far = (made([100.0] * 3, [100.0 * factor] * 3) for factor in (1.0, 1.011, 1.012))

    assert bound(same.high90) == pytest.approx(0.874, abs=0.001)
    assert [is_equivalent(found, 0.02) for found in (same, near, far)] == [True, True, False]


def test_sessions_that_would_settle() -> None:
    # s = 2 %, nothing changed: equivalence within 2 % from t(0.95, n − 1)·0.02·√(2/n) < ln 1.02, first true at n = 8
    spread = 0.02 * math.sqrt(0.5)
    values = [100 * math.exp(spread), 100 * math.exp(-spread)]
    undecided = made(values, values)

    assert undecided.s == pytest.approx(0.02)
    assert sessions_to_settle(undecided, 0.02) == 8
    assert sessions_to_settle(made([100.0, 200.0], [100.0, 200.0]), 0.02) is None
    assert sessions_to_settle(made([282, 311, 312], [318, 317]), 0.02) == 9


def test_the_smallest_change_that_would_be_found() -> None:
    # (t(0.975, 4) + t(0.8, 4))·0.01·√(2/3) = (2.776 + 0.941)·0.008165 = 3.035 % on the log scale
    found = made([100.0] * 3, [100.0] * 3, s_min=0.01)

    assert smallest_detectable(found, 0.02) == pytest.approx(0.03082, abs=2e-5)
    assert smallest_detectable(made([100.0] * 8, [100.0] * 8), 0.02) == 0.02
    assert smallest_detectable(made([100.0], [100.0]), 0.02) is None


def test_from_four_sessions_an_arm_a_drift_of_the_machine_counts_for_nothing() -> None:
    drift = [1.0, 0.95, 0.90, 0.85, 0.80]
    base, head = (
        [300 * at for at in drift],
        [270 * at * wobble for at, wobble in zip(drift, (1.01, 1, 0.99, 1, 1), strict=True)],
    )
    found = made(base, head)
    assert found.blocked and found.df == 4
    assert percent(found.estimate) == pytest.approx(-10.0, abs=0.05)
    # Differences within blocks: ln(0.9) + (+0.00995, 0, -0.01005, 0, 0); their deviation is 0.00707, a session's 0.005.
    assert found.s == pytest.approx(0.005, abs=2e-5)
    # 2.776 * 0.005 * sqrt(2 / 5) = 0.00878 on the log scale.
    assert bound(found.low) == pytest.approx(-10.79, abs=0.02)
    assert bound(found.high) == pytest.approx(-9.21, abs=0.02)
    three = made(base[:3], head[:3])
    assert not three.blocked and three.df == 4 and bound(three.high) > 0


def test_a_session_that_is_missing_ends_the_blocks() -> None:
    assert not made([100, 99, 98, 97, 96], [100, 99, 98, 97]).blocked
