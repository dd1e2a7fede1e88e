from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gate.greedy import (
    TokenMove,
    agreed_steps,
    first_divergence,
    greedy_pairs,
    is_near_tie,
    pcm_pairs,
    token_moves,
)
from gate.record import Record, RunData
from tests.gate.runs import T2S, T2T, make_run

TOKENS = st.lists(st.integers(0, 2), max_size=6)


def decoded(answers: Mapping[str, Sequence[int]], base: int = 2, head: int = 2) -> RunData:
    """A run in which the named sessions decoded the given tokens for request 2; all others keep theirs."""

    def change(record: Record) -> Record:
        if record.warm or record.index != 2 or record.session not in answers:
            return record
        return msgspec.structs.replace(record, token_ids=list(answers[record.session]))

    return make_run({"base": [2000] * base, "head": [2000] * head}, change=change)


USUAL = list(range(120, 131))


def with_token(step: int, token: int) -> list[int]:
    return [*USUAL[:step], token, *USUAL[step + 1 :]]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], (1, "token")),
        ([1, 2, 3], [1, 2], (2, "length")),
        ([], [1], (0, "length")),
        ([], [], None),
    ],
)
def test_where_two_sequences_part(a: list[int], b: list[int], expected: tuple[int, str] | None) -> None:
    assert first_divergence(a, b) == expected


@given(TOKENS, TOKENS)
def test_everything_before_the_divergence_is_equal_and_the_order_of_arms_does_not_matter(
    a: list[int], b: list[int]
) -> None:
    found = first_divergence(a, b)

    assert found == first_divergence(b, a)
    assert (found is None) == (a == b)
    if found is not None:
        assert a[: found[0]] == b[: found[0]]
        assert a[: found[0] + 1] != b[: found[0] + 1]


def test_pairs_of_all_kinds_are_counted_base_first() -> None:
    pairs = greedy_pairs(make_run({"base": [2000, 2000], "head": [2000, 2000]}))

    assert [(pair.kind, pair.a, pair.b) for pair in pairs] == [
        ("base–base", "01-base", "04-base"),
        ("head–base", "02-head", "01-base"),
        ("head–base", "03-head", "01-base"),
        ("head–base", "02-head", "04-base"),
        ("head–base", "03-head", "04-base"),
        ("head–head", "02-head", "03-head"),
    ]
    assert {(pair.exact, pair.of, pair.matched, pair.of_steps) for pair in pairs} == {(4, 4, 44, 44)}


def test_steps_are_matched_up_to_the_first_difference_of_each_prompt() -> None:
    pairs = greedy_pairs(decoded({"02-head": with_token(5, 7)}))

    pair = next(pair for pair in pairs if (pair.a, pair.b) == ("02-head", "01-base"))
    assert (pair.exact, pair.of, pair.matched, pair.of_steps) == (3, 4, 38, 44)
    assert pair.first is not None
    assert (pair.first.item, pair.first.step, pair.first.reason) == ("p02", 5, "token")
    assert (pair.first.token_a, pair.first.token_b) == (7, 125)
    assert pair.first.margin == pytest.approx(1.5)


def test_a_shorter_sequence_counts_its_own_length_and_parts_by_length() -> None:
    pairs = greedy_pairs(decoded({"02-head": USUAL[:8]}))

    pair = next(pair for pair in pairs if (pair.a, pair.b) == ("02-head", "01-base"))
    assert (pair.exact, pair.matched, pair.of_steps, pair.steps_a, pair.steps_b) == (3, 41, 41, 41, 44)
    assert pair.first is not None
    assert (pair.first.reason, pair.first.step, pair.first.token_a, pair.first.token_b) == ("length", 8, None, 128)


def test_the_first_difference_is_the_earliest_step_not_the_earliest_prompt() -> None:
    def change(record: Record) -> Record:
        moved = {1: 9, 3: 2}.get(record.index) if record.session == "02-head" and not record.warm else None
        if moved is None:
            return record
        return msgspec.structs.replace(record, token_ids=[*record.token_ids[:moved], 0, *record.token_ids[moved + 1 :]])

    pair = greedy_pairs(make_run({"base": [2000], "head": [2000]}, change=change))[0]

    assert pair.first is not None
    assert (pair.first.item, pair.first.step) == ("p03", 2)


def test_failed_requests_and_cells_that_are_not_greedy_are_left_out() -> None:
    def change(record: Record) -> Record:
        return msgspec.structs.replace(record, ok=False) if record.index == 0 and record.arm == "head" else record

    sampled = msgspec.structs.replace(T2T, name="T2T@4", greedy=False)
    pairs = greedy_pairs(make_run({"base": [2000], "head": [2000]}, [T2T, sampled], change=change))

    assert [(pair.cell, pair.of, pair.left_out) for pair in pairs] == [("T2T@1", 3, 1)]


def test_a_flipped_token_has_moved_and_is_named() -> None:
    moves = token_moves(decoded({"02-head": with_token(5, 7), "03-head": with_token(5, 7)}))

    assert moves == [TokenMove("T2T@1", "p02", 2, 5, "token", 125, 7, pytest.approx(1.5), ["02-head", "03-head"], 2, 1)]


def test_one_head_session_of_two_is_enough() -> None:
    (move,) = token_moves(decoded({"03-head": with_token(0, 7)}))

    assert (move.step, move.sessions, move.of_sessions) == (0, ["03-head"], 2)


def test_a_token_that_base_itself_moves_has_not_moved() -> None:
    assert token_moves(decoded({"04-base": with_token(5, 9), "02-head": with_token(5, 7)})) == []
    assert token_moves(decoded({"04-base": with_token(5, 9), "02-head": with_token(8, 7)})) == []


def test_a_step_before_base_disagrees_with_itself_has_moved() -> None:
    (move,) = token_moves(decoded({"04-base": with_token(5, 9), "02-head": with_token(4, 7)}))

    assert (move.step, move.base_token, move.head_token) == (4, 124, 7)


def test_an_early_end_has_moved() -> None:
    (move,) = token_moves(decoded({"02-head": USUAL[:8]}))

    assert (move.reason, move.step, move.base_token, move.head_token) == ("length", 8, 128, None)


def test_base_sessions_that_end_at_different_lengths_agree_only_up_to_the_shorter() -> None:
    run = decoded({"04-base": USUAL[:8], "02-head": USUAL[:8], "03-head": with_token(9, 7)})

    assert token_moves(run) == []
    assert [move.step for move in token_moves(decoded({"04-base": USUAL[:8], "02-head": USUAL[:6]}))] == [6]


def test_with_one_base_session_there_is_no_floor_and_the_move_says_so() -> None:
    (move,) = token_moves(decoded({"02-head": with_token(5, 7)}, base=1, head=1))

    assert (move.step, move.floor_pairs) == (5, 0)


@given(st.lists(TOKENS, min_size=1, max_size=3))
def test_identical_base_sessions_agree_everywhere_and_others_up_to_their_first_difference(
    lists: list[list[int]],
) -> None:
    records = [_with(tokens) for tokens in lists]

    agreed = agreed_steps(records)

    if agreed is None:
        assert all(tokens == lists[0] for tokens in lists)
    else:
        assert len({tuple(tokens[:agreed]) for tokens in lists}) == 1
        assert len({tuple(tokens[: agreed + 1]) for tokens in lists}) > 1


def _with(tokens: list[int]) -> Record:
    (record, *_) = make_run({"base": [2000]}).records
    return msgspec.structs.replace(record, token_ids=tokens)


def test_near_ties_are_told_from_hard_choices() -> None:
    assert [is_near_tie(margin) for margin in (0.0, 0.124, 0.125, 2.0, None)] == [True, True, False, False, None]


def test_equal_pcm_bytes_are_counted_by_hash() -> None:
    def change(record: Record) -> Record:
        noisy = record.session == "02-head" and record.index < 3
        return msgspec.structs.replace(record, pcm_sha256="f" * 64) if noisy else record

    pairs = pcm_pairs(make_run({"base": [2000, 2000], "head": [2000]}, [T2T, T2S], change=change))

    assert [(pair.cell, pair.kind, pair.equal, pair.of) for pair in pairs] == [
        ("T2S@1", "base–base", 4, 4),
        ("T2S@1", "head–base", 1, 4),
        ("T2S@1", "head–base", 1, 4),
    ]
