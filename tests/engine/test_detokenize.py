"""Text in pieces is the text at once, and no piece ends inside a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from engine.detokenize import Detokenizer, TokenBytes


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
