"""Text in pieces is the text at once, up to where it may be shown, and no piece ends inside a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from engine.detokenize import Detokenizer, TokenBytes
from engine.stop_strings import StopStrings
from tests.naive import cut_at


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


def pieces(tokenizer: Tokenizer, chunks: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(TokenBytes(tokenizer))
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.finish()]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chunks=st.lists(st.lists(st.integers(0, 511), max_size=6), max_size=12))
def test_random_tokens_in_random_chunks_join_to_the_full_decode(tokenizer: Tokenizer, chunks: list[list[int]]):
    ids = [token for chunk in chunks for token in chunk]
    assert "".join(pieces(tokenizer, chunks)) == tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=24))
def test_real_text_a_token_at_a_time_never_shows_a_broken_character(tokenizer: Tokenizer, text: str):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    got = pieces(tokenizer, [[token] for token in ids])
    whole = tokenizer.decode(ids)
    assert "".join(got) == whole
    assert "\ufffd" in whole or not any("\ufffd" in piece for piece in got)


def test_a_character_of_four_bytes_appears_with_its_last_byte(tokenizer: Tokenizer):
    ids = tokenizer.encode("🌊").ids
    assert len(ids) == 4
    assert pieces(tokenizer, [[token] for token in ids]) == ["", "", "", "🌊", ""]


def test_a_character_that_never_completes_is_flushed_once_as_a_replacement(tokenizer: Tokenizer):
    ids = tokenizer.encode("a🌊").ids[:-1]
    assert pieces(tokenizer, [ids]) == ["a", "\ufffd"]


def test_special_tokens_and_ids_without_a_token_stand_for_nothing(tokenizer: Tokenizer):
    end = tokenizer.token_to_id("<|im_end|>")
    (letter,) = tokenizer.encode("a").ids
    assert pieces(tokenizer, [[letter, end, 100_000, letter]]) == ["aa", ""]


def test_an_added_token_that_is_not_special_is_written_as_it_is(tokenizer: Tokenizer):
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_tokens([AddedToken("≤step two≥", special=False)])
    token = own.token_to_id("≤step two≥")
    assert pieces(own, [[token]]) == ["≤step two≥", ""]
    assert own.decode([token]) == "≤step two≥"


def shown(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> tuple[list[str], int]:
    """The pieces of a request with stop strings that made `ids` at the most, and how many tokens it made."""
    token_bytes, search = TokenBytes(tokenizer), StopStrings(stops)
    detokenizer, pieces = Detokenizer(token_bytes), []
    for count, token in enumerate(ids, start=1):
        ended = search.push(token_bytes.of(token))
        if ended or count == len(ids):
            search.finish()
        pieces.append(detokenizer.push([token], search.shown))
        if ended:
            break
    return [*pieces, detokenizer.finish()], len(pieces)


TEXTS = st.text(alphabet="abc é🌊🌋", max_size=12)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=TEXTS,
    more=st.lists(st.integers(0, 511), max_size=4),
    stops=st.lists(TEXTS.filter(bool), min_size=1, max_size=3),
)
def test_a_text_with_stop_strings_is_shown_up_to_the_first(
    tokenizer: Tokenizer, text: str, more: list[int], stops: list[str]
):
    ids = [*tokenizer.encode(text, add_special_tokens=False).ids, *more]
    of = TokenBytes(tokenizer).of
    data = b"".join(map(of, ids))
    pieces, made = shown(tokenizer, ids, stops)
    assert "".join(pieces) == data[: cut_at(data, stops)].decode(errors="replace")
    before = b"".join(map(of, ids[: made - 1]))
    assert made == len(ids) or cut_at(before, stops) is None  # no token too many


@pytest.mark.parametrize("edge", ["stop", "length"])
def test_a_stop_string_over_three_tokens_is_cut_exactly_and_flushed_when_it_stays_incomplete(
    tokenizer: Tokenizer, edge: str
):
    ids = [tokenizer.token_to_id(one) for one in ("a", "X", "Y", "Z")]
    assert None not in ids
    made = ids if edge == "stop" else ids[:3]
    pieces, _ = shown(tokenizer, made, ["XYZ"])
    assert pieces == (["a", "", "", "", ""] if edge == "stop" else ["a", "", "XY", ""])


def test_a_stop_string_inside_a_token_is_cut_inside_it(tokenizer: Tokenizer):
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_tokens([AddedToken("one END two", special=False)])
    (letter,) = own.encode("a").ids
    assert shown(own, [letter, own.token_to_id("one END two"), letter], ["END"])[0] == ["a", "one ", ""]


def test_a_stop_string_of_a_character_of_four_bytes_is_cut_exactly(tokenizer: Tokenizer):
    assert "".join(shown(tokenizer, tokenizer.encode("a🌊b").ids, ["🌊"])[0]) == "a"
    assert "".join(shown(tokenizer, tokenizer.encode("a🌋b").ids, ["🌊"])[0]) == "a🌋b"


def test_bytes_that_wait_come_with_a_later_call_and_what_is_never_shown_is_dropped(tokenizer: Tokenizer):
    ids = [tokenizer.token_to_id(one) for one in "abcd"]
    detokenizer = Detokenizer(TokenBytes(tokenizer))
    assert [detokenizer.push(ids[:2], 1), detokenizer.push(ids[2:3], 1), detokenizer.push([], 3)] == ["a", "", "bc"]
    assert [detokenizer.push(ids[3:], 3), detokenizer.finish()] == ["", ""]


def test_a_token_that_ends_the_text_by_its_id_is_no_part_of_it(tokenizer: Tokenizer):
    ids = [tokenizer.token_to_id(one) for one in "abc"]
    detokenizer = Detokenizer(TokenBytes(tokenizer), stop_ids=ids[2:])
    assert [detokenizer.push(ids[:2]), detokenizer.push(ids[2:]), detokenizer.finish()] == ["ab", "", ""]
