"""When a row ends its track: stop ids of the walks in the set, extra ids, limits; the same asked at once or row by row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.walks import THINKER_WALKS
from engine.step import Component
from engine.stop import StopRow, Stops, finish_reasons
from engine.walk import TokenStop

STOP = TokenStop(Component.THINKER, "token", frozenset({3, 5}), THINKER_WALKS)
BOTH_WAYS = pytest.mark.parametrize("vectorised", [True, False])


def reason(row: StopRow, token: int, vectorised: bool) -> str | None:
    [one] = finish_reasons(STOP, [row], np.array([token], dtype=np.int64), vectorised=vectorised)
    return one


def row(walk: str = "thinker_decode", generated: int = 0, limit: int = 10, **wishes: object) -> StopRow:
    return StopRow(walk, generated, limit, **wishes)  # type: ignore[arg-type]


@BOTH_WAYS
@pytest.mark.parametrize("walk", ["thinker_prefill", "thinker_decode", "thinker_text_decode"])
@pytest.mark.parametrize("token", [3, 5])
def test_a_stop_id_ends_rows_of_every_walk_in_the_set_prefill_included(walk: str, token: int, vectorised: bool) -> None:
    assert reason(row(walk), token, vectorised) == "stop"
    assert reason(row(walk), 4, vectorised) is None


@BOTH_WAYS
@pytest.mark.parametrize("walk", ["talker_decode", "code2wav", ""])
def test_a_walk_outside_the_set_never_stops_on_a_stop_id(walk: str, vectorised: bool) -> None:
    assert reason(row(walk), 3, vectorised) is None


@BOTH_WAYS
@pytest.mark.parametrize(("generated", "expected"), [(0, None), (7, None), (8, None), (9, "length"), (10, "length")])
def test_the_token_that_fills_the_limit_ends_the_row(generated: int, expected: str | None, vectorised: bool) -> None:
    assert reason(row(generated=generated), 1, vectorised) == expected


@BOTH_WAYS
def test_a_limit_of_one_ends_at_the_prefill_token(vectorised: bool) -> None:
    assert reason(row("thinker_prefill", 0, 1), 1, vectorised) == "length"


@BOTH_WAYS
def test_a_stop_id_on_the_last_allowed_token_counts_as_stop(vectorised: bool) -> None:
    assert reason(row(generated=9), 3, vectorised) == "stop"
    assert reason(row(generated=9, extra_stop_ids=frozenset({8})), 8, vectorised) == "stop"


@BOTH_WAYS
def test_ignoring_stop_ids_leaves_the_limit(vectorised: bool) -> None:
    assert reason(row(ignore_stop_ids=True), 3, vectorised) is None
    assert reason(row(generated=9, ignore_stop_ids=True), 3, vectorised) == "length"


@BOTH_WAYS
def test_a_request_may_add_stop_ids_of_its_own_and_they_hold_even_when_the_model_s_are_ignored(
    vectorised: bool,
) -> None:
    own = frozenset({8})
    assert reason(row(extra_stop_ids=own), 8, vectorised) == "stop"
    assert reason(row(extra_stop_ids=own, ignore_stop_ids=True), 8, vectorised) == "stop"
    assert reason(row(extra_stop_ids=own, ignore_stop_ids=True), 3, vectorised) is None
    assert reason(row(), 8, vectorised) is None


@BOTH_WAYS
def test_each_row_of_a_step_is_judged_by_its_own_wishes(vectorised: bool) -> None:
    rows = [
        row("thinker_prefill"),
        row("thinker_decode", generated=9),
        row("thinker_text_decode", ignore_stop_ids=True),
        row("talker_decode"),
        row("thinker_decode", extra_stop_ids=frozenset({1})),
        row("thinker_text_decode"),
    ]
    tokens = np.array([3, 4, 5, 3, 1, 1], dtype=np.int64)
    assert finish_reasons(STOP, rows, tokens, vectorised=vectorised) == ["stop", "length", None, None, "stop", None]


@BOTH_WAYS
def test_no_rows_give_no_reasons(vectorised: bool) -> None:
    assert finish_reasons(STOP, [], np.array([], dtype=np.int64), vectorised=vectorised) == []


@pytest.mark.parametrize(("vectorised", "counted"), [(True, (2, 0)), (False, (0, 2))])
def test_each_component_is_checked_by_its_own_stop_and_the_way_it_was_asked_is_counted(
    vectorised: bool, counted: tuple[int, int]
) -> None:
    speech = TokenStop(Component.TALKER, "frame", frozenset({7}), frozenset({"talker_decode"}))
    stops = Stops([STOP, speech], vectorised=vectorised)
    tokens = np.array([3, 7], dtype=np.int64)
    assert stops.of(Component.THINKER)([row(), row()], tokens) == ["stop", None]
    assert stops.of(Component.TALKER)([row("talker_decode"), row("talker_decode")], tokens) == [None, "stop"]
    assert (stops.counters["vectorised"], stops.counters["by_row"]) == counted


ROWS = st.builds(
    StopRow,
    walk=st.sampled_from([*sorted(THINKER_WALKS), "talker_decode", "code2wav"]),
    generated=st.integers(0, 4),
    limit=st.integers(1, 4),
    ignore_stop_ids=st.booleans(),
    extra_stop_ids=st.frozensets(st.integers(0, 6), max_size=2),
)
STOPS = st.builds(
    TokenStop,
    component=st.just(Component.THINKER),
    signal=st.just("token"),
    stop_ids=st.frozensets(st.integers(0, 6), min_size=1, max_size=3),
    walks=st.frozensets(st.sampled_from(sorted(THINKER_WALKS)), min_size=1),
)


@settings(max_examples=200, deadline=None)
@given(stop=STOPS, rows=st.lists(st.tuples(ROWS, st.integers(0, 6)), max_size=8))
def test_asking_for_all_rows_at_once_equals_asking_row_by_row(stop: TokenStop, rows: list[tuple[StopRow, int]]) -> None:
    wishes, tokens = [one for one, _ in rows], np.array([token for _, token in rows], dtype=np.int64)
    assert finish_reasons(stop, wishes, tokens) == finish_reasons(stop, wishes, tokens, vectorised=False)
