from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.order import session_order

COUNTS = st.integers(1, 12)
SEEDS = st.integers(0, 10_000)


def bias(order: list[str], effect: list[float]) -> float:
    """The difference of arm means that an effect of the slot alone would make."""
    means = [[value for arm, value in zip(order, effect, strict=True) if arm == name] for name in ("head", "base")]
    return sum(means[0]) / len(means[0]) - sum(means[1]) / len(means[1])


@given(COUNTS, SEEDS)
def test_both_arms_get_as_many_sessions_as_asked(sessions: int, seed: int) -> None:
    order = session_order(sessions, seed)

    assert (order.count("base"), order.count("head"), len(order)) == (sessions, sessions, 2 * sessions)


@given(COUNTS, SEEDS)
def test_one_seed_gives_one_order(sessions: int, seed: int) -> None:
    assert session_order(sessions, seed) == session_order(sessions, seed)


@given(COUNTS.filter(lambda count: count % 2 == 0), SEEDS)
def test_a_linear_drift_cancels_for_even_counts(sessions: int, seed: int) -> None:
    order = session_order(sessions, seed)

    assert bias(order, [float(slot) for slot in range(len(order))]) == pytest.approx(0.0, abs=1e-9)


@given(COUNTS.filter(lambda count: count % 2 == 1), SEEDS)
def test_a_linear_drift_leaves_the_least_possible_bias_for_odd_counts(sessions: int, seed: int) -> None:
    order = session_order(sessions, seed)

    assert abs(bias(order, [float(slot) for slot in range(len(order))])) == pytest.approx(1 / sessions)


@given(COUNTS.filter(lambda count: count % 4 == 0), SEEDS)
def test_a_quadratic_drift_cancels_for_multiples_of_four(sessions: int, seed: int) -> None:
    order = session_order(sessions, seed)

    assert bias(order, [float(slot * slot) for slot in range(len(order))]) == pytest.approx(0.0, abs=1e-6)


def test_either_arm_comes_first_about_as_often() -> None:
    firsts = [session_order(2, seed)[0] for seed in range(200)]

    assert 80 <= firsts.count("base") <= 120


def test_orders_written_out() -> None:
    assert session_order(2, 1) == ["base", "head", "head", "base"]
    assert session_order(3, 0) == ["head", "base", "base", "head", "base", "head"]


def test_no_session_is_no_comparison() -> None:
    with pytest.raises(ValueError, match="sessions_per_arm is 0"):
        session_order(0, 0)
