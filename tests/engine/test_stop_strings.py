"""A text is cut at its stop string by its bytes alone, and nothing is shown that might be taken back."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.stop_strings import StopStrings

# Few letters, so that stop strings overlap each other, themselves and the text; two characters that share their first bytes.
LETTERS = st.text(alphabet="abé€₭", min_size=1, max_size=5)


def first_match(text: bytes, stops: list[str]) -> tuple[int, int] | None:
    """Where the match that ends first begins and ends, the longest of those that end there; None without a match."""
    for end in range(1, len(text) + 1):
        found = [len(stop.encode()) for stop in stops if text[:end].endswith(stop.encode())]
        if found:
            return end - max(found), end
    return None


def may_show(text: bytes, stops: list[str]) -> int:
    """All bytes but the longest tail that begins a stop string."""
    starts = {stop.encode()[:length] for stop in stops for length in range(1, len(stop.encode()))}
    return next(at for at in range(len(text) + 1) if at == len(text) or text[at:] in starts)


def pushed(stops: list[str], pieces: list[bytes]) -> StopStrings:
    found = StopStrings(stops)
    for piece in pieces:
        if found.push(piece):
            break
    return found


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:end] for start, end in pairwise(edges)]


@settings(max_examples=600, deadline=None)
@given(
    text=st.text(alphabet="abé€₭", max_size=24),
    stops=st.lists(LETTERS, min_size=1, max_size=4),
    places=st.lists(st.integers(0, 80), max_size=8),
)
@example(text="aab", stops=["aab", "ab", "b"], places=[])
@example(text="abab€a", stops=["abab€b", "b€"], places=[5])
@example(text="aaab", stops=["aab"], places=[1, 2, 3])
def test_however_a_text_is_cut_the_match_is_the_naive_one(text: str, stops: list[str], places: list[int]) -> None:
    data = text.encode()
    found = pushed(stops, cut(data, places))
    match = first_match(data, stops)
    assert found.matched == (match is not None)
    assert found.shown == (match[0] if match else may_show(data, stops))
    found.finish()
    assert found.shown == (match[0] if match else len(data))


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=24), stops=st.lists(LETTERS, min_size=1, max_size=3))
def test_what_may_be_shown_never_shrinks_and_never_passes_the_match(data: bytes, stops: list[str]) -> None:
    found = StopStrings(stops)
    shown = [0]
    match = first_match(data, stops)
    for end in range(len(data)):
        ended = found.push(data[end : end + 1])
        shown.append(found.shown)
        assert ended == (match is not None and end + 1 >= match[1])
    assert shown == sorted(shown)
    assert shown[-1] <= (match[0] if match else len(data))


def test_the_match_that_ends_first_wins_even_where_another_begins_before_it() -> None:
    assert pushed(["abcd", "bc"], [b"xabcd"]).shown == 2
    assert pushed(["bc", "abcd"], [b"xabcd"]).shown == 2


def test_of_matches_that_end_together_the_longest_is_cut() -> None:
    assert pushed(["c", "abc", "bc"], [b"xabc"]).shown == 1


@pytest.mark.parametrize("pieces", [[b"one S", b"TO", b"P two"], [b"one STOP two"], [b"one STO", b"P", b" two"]])
def test_a_stop_string_over_several_tokens_or_inside_one_is_cut_where_it_begins(pieces: list[bytes]) -> None:
    found = pushed(["STOP"], pieces)
    assert found.matched and found.shown == 4


def test_a_multibyte_character_is_matched_whole_over_any_cut() -> None:
    sea = "🌊".encode()
    assert pushed(["🌊"], [b"a" + sea[:1], sea[1:3], sea[3:] + b"b"]).shown == 1
    half = pushed(["🌊"], [b"a" + sea[:3]])
    assert (half.matched, half.shown) == (False, 1)
    half.finish()
    assert half.shown == 4


def test_characters_that_share_bytes_with_a_stop_string_are_not_its_match() -> None:
    found = pushed(["€"], ["₭".encode()])
    assert (found.matched, found.shown) == (False, 3)


def test_a_tail_is_held_back_only_while_it_may_become_a_stop_string() -> None:
    found = StopStrings(["END"])
    assert [(found.push(piece), found.shown) for piece in (b"a", b"EN", b"E", b"N", b"x")] == [
        (False, 1),
        (False, 1),
        (False, 3),
        (False, 3),
        (False, 6),
    ]


def test_a_text_that_ends_for_another_reason_is_shown_whole() -> None:
    found = pushed(["END"], [b"the EN"])
    assert found.shown == 4
    found.finish()
    assert (found.matched, found.shown) == (False, 6)


def test_nothing_after_a_match_changes_it() -> None:
    found = pushed(["\n\n"], [b"a\n\nb"])
    assert found.push(b"more \n\n") and found.shown == 1
    found.finish()
    assert found.shown == 1
