"""The grammar of sentences: repeatable, varied, split for training and test; and LibriSpeech's texts in the same form."""

import re
from pathlib import Path
from random import Random

import pytest

from engine.tiny import text
from engine.tiny.text import (
    KINDS,
    capitalised,
    corpus,
    draw,
    fillers,
    number_words,
    pieces,
    references,
    sentence,
    sentence_case,
    sentences,
    unheard_texts,
    unseen_sentences,
    vocabulary,
    with_article,
    withheld,
    word_lists,
    words,
)
from tests.shared import shared


@pytest.fixture(scope="module")
def trained() -> list[str]:
    return sentences(0, 20_000)


@pytest.fixture(scope="module")
def held_out() -> list[str]:
    return sentences(0, 5_000, held_out=True)


def test_the_same_seed_gives_the_same_sentences_on_every_machine():
    assert sentences(0, 4) == [
        "Twenty onions cost thirty one cents.",
        "Good morning, Samuel, how are you?",
        "That makes seventy six pounds, please.",
        "Bring me a long chair from the cellar, please.",
    ]
    assert sentences(0, 100)[:10] == sentences(0, 10)
    assert sentences(1, 10) != sentences(0, 10)


def test_another_seed_has_hardly_any_of_the_same_sentences(trained):
    # Of N equally likely sentences, the other seed meets 20,000 / N again: 11 % as it is, mostly the shortest templates.
    assert len(set(trained)) == 20_000
    assert len(set(trained) & set(sentences(1, 20_000))) < 0.15 * 20_000


def test_sentences_have_3_to_20_words_a_capital_and_an_end(trained, held_out):
    for line in (*trained, *held_out):
        assert 3 <= len(line.split()) <= 20, line
        assert re.fullmatch(r"[A-Z][A-Za-z',? .]*[.?]", line), line
        assert not re.search(r"\ba [aeiou]|\ban (?!hour)[^aeiou]|  | [,.?]", line), line


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_sentence_is_made_for_training_and_for_test(kind):
    rng = Random(0)
    assert len({sentence(kind, rng) for _ in range(50)}) > 40
    assert len({sentence(kind, rng, held_out=True) for _ in range(50)}) > 40


def test_unseen_sentences_have_templates_and_words_of_training_and_are_never_trained(trained):
    unseen = unseen_sentences(0, 2_000)
    assert set(unseen).isdisjoint(trained) and not any(map(withheld, trained)) and all(map(withheld, unseen))
    assert unseen[:10] == unseen_sentences(0, 10) != unseen_sentences(1, 10)
    assert {word for line in unseen for word in words(line)} <= vocabulary(held_out=False)


def test_training_and_held_out_sentences_share_no_template_and_no_sentence(trained, held_out):
    assert set(trained) & set(held_out) == set()
    lines = {line for kind in KINDS for line in text._TRAINED_LINES[kind]}
    assert lines & {line for kind in KINDS for line in text._HELD_OUT_LINES[kind]} == set()
    assert sum(map(len, text._HELD_OUT_LINES.values())) == 23


def test_training_sentences_have_no_held_out_filler_and_held_out_ones_have(trained, held_out):
    only_held_out = vocabulary() - vocabulary(held_out=False)
    assert {"harbour", "parlour", "rachel", "venice", "eagle", "sword", "mist"} <= only_held_out
    assert {word for line in trained for word in words(line)} & only_held_out == set()
    found = [line for line in held_out if set(words(line)) & only_held_out]
    assert 0.2 < len(found) / len(held_out) < 0.7


def test_no_filler_stands_on_both_sides_of_the_bar_or_twice():
    for slot in text._FILLERS:
        every = [filler for filler in fillers(slot, held_out=True) if "{" not in filler]
        assert len(set(every)) == len(every), slot
        assert all(every), slot


def test_the_vocabulary_holds_every_word_of_every_sentence(trained, held_out):
    assert {word for line in trained for word in words(line)} <= vocabulary(held_out=False)
    assert {word for line in held_out for word in words(line)} <= vocabulary()
    # Nothing stands in it for show: all but a few rare fillers are met.
    met = {word for line in (*trained, *held_out) for word in words(line)}
    assert len(vocabulary() - met) < 30 < 900 < len(vocabulary())


def test_numbers_are_written_in_words():
    assert [number_words(number) for number in (0, 13, 20, 41, 100, 312, 999)] == [
        "zero",
        "thirteen",
        "twenty",
        "forty one",
        "one hundred",
        "three hundred and twelve",
        "nine hundred and ninety nine",
    ]
    rng = Random(5)
    assert {draw("year", rng) for _ in range(2000)} >= {
        "nineteen ninety nine",
        "two thousand and seven",
        "twenty twelve",
    }
    assert {draw("time", rng) for _ in range(3000)} >= {
        "half past nine",
        "three o'clock",
        "a quarter to one",
        "ten fifty nine",
    }
    assert {draw("date", rng) for _ in range(9000)} >= {"the first of May", "March the thirtieth"}
    assert "the thirtieth of February" not in {draw("date", rng) for _ in range(9000)}


def test_a_filler_is_not_drawn_twice_while_it_is_in_use():
    used: set[str] = set()
    assert sorted(draw("season", Random(1), used=used) for _ in range(4)) == ["autumn", "spring", "summer", "winter"]


def test_articles_and_capitals():
    assert (with_article("old key"), with_article("key")) == ("an old key", "a key")
    assert capitalised("the old McDonald") == "The old McDonald"


def test_a_reference_gets_the_form_of_a_sentence():
    assert sentence_case("I'M IN LONDON AND MARY MAY COME IN JUNE") == "I'm in London and Mary may come in June."


def test_a_transcript_file_is_read_in_order(tmp_path: Path):
    (tmp_path / "a.trans.txt").write_text("1-2-0000 MISTER QUILTER IS\n1-2-0001 NOR IS HE\n")
    assert references(tmp_path / "a.trans.txt") == ["MISTER QUILTER IS", "NOR IS HE"]


def test_long_references_are_cut_evenly():
    text_of_33 = " ".join(f"W{chr(65 + place % 26)}" for place in range(33))
    cut = pieces(text_of_33)
    assert [len(piece.split()) for piece in cut] == [11, 11, 11]
    assert " ".join(piece[:-1].lower() for piece in cut) == text_of_33.lower()
    assert pieces("NOR IS HE") == ["Nor is he."]


def test_word_lists_take_their_words_evenly_from_the_references():
    made = word_lists(["A RARE WORD", "A A A A B"], 0, 1000)
    assert all(3 <= len(line.split()) <= 9 for line in made)
    found = [word for line in made for word in words(line)]
    assert set(found) == {"a", "b", "rare", "word"}
    assert all(0.2 < found.count(word) / len(found) < 0.3 for word in set(found))


def test_the_corpus_mixes_its_sources_and_starts_alike_at_every_length():
    texts = ["THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG", "PACK MY BOX WITH FIVE DOZEN LIQUOR JUGS"]
    made = corpus(0, 2000, texts)
    cut = {piece for line in texts for piece in pieces(line)}
    own = set(sentences(0, 2000))
    assert 0.45 < sum(line in own for line in made) / 2000 < 0.55
    assert 0.26 < sum(line in cut for line in made) / 2000 < 0.34
    assert corpus(0, 50, texts) == made[:50]


def test_of_the_words_of_50_unheard_test_clean_texts_43_percent_are_not_the_generators():
    folder = shared("data", "librispeech", "refs")
    dev, test = (references(folder / f"{name}.trans.txt") for name in ("dev-clean", "test-clean"))
    chosen = unheard_texts(test, dev, 0, 50)
    assert len(set(chosen)) == 50 and all(5 <= len(line.split()) <= 20 for line in chosen)
    spoken = [word for line in chosen for word in words(line)]
    # 30 % at least are asked for.
    assert (sum(word not in vocabulary() for word in spoken), len(spoken)) == (246, 575)


def test_a_text_that_shares_five_words_in_a_row_with_a_trained_one_is_not_unheard():
    trained = ["HE SAID THAT IT WAS VERY COLD"]
    texts = ["SHE KNEW THAT IT WAS VERY COLD", "SHE KNEW IT WAS VERY COLD", "TOO SHORT"]
    assert unheard_texts(texts, trained, 0, 1) == ["SHE KNEW IT WAS VERY COLD"]
    with pytest.raises(ValueError, match="Sample larger"):
        unheard_texts(texts, trained, 0, 2)
