"""The trained tokenizer: whole in 2,048 entries, the same bytes on every run, and read alike by the engine and Hugging Face."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from engine.model.chat import load_tokenizer
from engine.model.tiny import SPECIALS, WHOLE_WORDS, tokenizer_config, write_texts
from engine.tiny.shapes import token_ids
from engine.tiny.speech import SECONDS_PER_CHARACTER
from engine.tiny.text import references, sentence_case, sentences
from engine.tiny.tokenizer import train, training_texts
from tests.shared import shared


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return training_texts(0, ["THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG"])


@pytest.fixture(scope="module")
def content(texts: list[str]) -> dict[str, object]:
    return train(texts)


@pytest.fixture(scope="module")
def folder(content: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_texts(folder, {"tokenizer.json": content, "tokenizer_config.json": tokenizer_config()})
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def test_training_twice_and_in_another_order_gives_the_same_bytes(texts, content):
    assert json.dumps(train(texts[::-1])) == json.dumps(content)


def test_it_has_2048_entries_that_all_can_be_made(tokenizer, content):
    assert tokenizer.get_vocab_size() == 2048
    assert sorted(tokenizer.get_vocab().values()) == list(range(2048))
    model = content["model"]
    assert isinstance(model, dict)
    made = {left + right for left, right in model["merges"]}
    assert len(made) == len(model["merges"]) == 2048 - 256 - len(SPECIALS)
    assert made == {token for token, index in model["vocab"].items() if index >= 256}


def test_bytes_roles_and_special_tokens_have_the_ids_of_the_config(tokenizer):
    assert tokenizer.encode("\n~").ids == [10, 126]
    for token, index in token_ids().items():
        assert tokenizer.encode(token).ids == [index], token
    assert tokenizer.encode("<|im_start|>user\n<|audio_pad|>").ids == [2032, 257, 10, 2047]


def test_hugging_face_reads_the_same_folder_alike(folder, tokenizer):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    lines = [
        *sentences(9, 50, held_out=True),
        "  two\n\n\ttabs",
        "naïve 123 – 漢字 🙂",
        "<|im_start|>user\nHi<|im_end|>",
    ]
    assert [theirs(line)["input_ids"] for line in lines] == [tokenizer.encode(line).ids for line in lines]
    assert (theirs.eos_token_id, theirs.pad_token_id) == (2033, 2031)
    turns = [{"role": "user", "content": "Hi."}]
    assert theirs.apply_chat_template(turns, add_generation_prompt=True, tokenize=False).endswith("assistant\n")


@given(st.text(st.characters(codec="utf-8")))
def test_any_text_comes_back_from_its_ids(tokenizer, text):
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.normalizer.normalize_str(text)


def test_tokens_are_short_and_come_about_half_as_fast_as_frames_of_speech(tokenizer):
    lines = sentences(9, 500, held_out=True)
    letters = sum(map(len, lines)) / sum(len(tokenizer.encode(line).ids) for line in lines)
    assert 1 / letters / SECONDS_PER_CHARACTER == pytest.approx(6.25, abs=1.5)


def test_too_few_texts_for_the_vocabulary_are_refused():
    with pytest.raises(ValueError, match="give more texts"):
        train(["Hello there."])


def test_tokens_of_the_references_are_short_and_unheard_texts_take_few_more():
    folder = shared("data", "librispeech", "refs")
    content = train(training_texts(0, references(folder / "dev-clean.trans.txt")))
    tokenizer = Tokenizer.from_str(json.dumps(content))
    assert max(len(token) for token in tokenizer.get_vocab() if "<" not in token and token not in WHOLE_WORDS) <= 7
    lines = [sentence_case(line) for line in references(folder / "test-clean.trans.txt")[:500]]
    assert sum(map(len, lines)) / sum(len(tokenizer.encode(line).ids) for line in lines) > 2.3
