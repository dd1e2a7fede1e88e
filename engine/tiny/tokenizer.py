"""Trains the small model's tokenizer: byte-level BPE of 2,048 entries. Files go through `write_texts`; no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from engine.model.tiny import NUM_BYTES, SPECIALS, SPLIT, WHOLE_WORDS, byte_letters, tokenizer_json
from engine.tiny.shapes import VOCAB, token_ids
from engine.tiny.tasks import questions
from engine.tiny.text import sentence_case, sentences

# Entries that are learned, of which the shortest are kept. Short tokens come up often, so that each is learned well, are
# spelled much as they sound, and come nearly as fast as frames of speech.
TRIED = 32_000


def train(texts: Sequence[str]) -> dict[str, object]:
    """Learn the content of `tokenizer.json` from `texts`; the same texts in any order give the same content.

    Ids are the bytes in order, the role words, the learned tokens in order of rank, the special tokens. ValueError when the
    texts are too few for as many tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    # The split above decides where words end, so the byte-level step must not split or pad again.
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=TRIED, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_with_roles(texts), trainer)
    return _content(_shortest(_merges(tokenizer)))


def _with_roles(texts: Sequence[str]) -> Iterator[str]:
    """The texts, and the role words as often: so each of them becomes one token."""
    yield from texts
    yield from ["\n".join(WHOLE_WORDS)] * len(texts)


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The learned pairs in order of rank."""
    found = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(left, right) for left, right in found]


def _shortest(merges: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs that make role words, and of the others those of the shortest tokens; ValueError where all are too few."""
    made = {left + right: (left, right) for left, right in merges}
    roles = set[str]().union(*(_made_of(word, made) for word in WHOLE_WORDS))
    room = VOCAB - len(SPECIALS) - NUM_BYTES - len(roles)
    # A stable sort: among tokens as long the first that were learned. What a token is made of is shorter, so it is there too.
    others = sorted((token for token in made if token not in roles), key=len)
    if len(others) < room:
        raise ValueError(f"the texts give {room - len(others)} tokens too few; give more texts")
    kept = roles | set(others[:room])
    return [pair for token, pair in made.items() if token in kept]


def _made_of(token: str, merges: Mapping[str, tuple[str, str]]) -> set[str]:
    """`token` and the tokens that it is made of, down to single letters."""
    if len(token) == 1:
        return set()
    return {token}.union(*(_made_of(part, merges) for part in merges[token]))


def _content(merges: list[tuple[str, str]]) -> dict[str, object]:
    fixed = token_ids()
    ranked = [left + right for left, right in merges if left + right not in WHOLE_WORDS]
    vocab = {token: index for index, token in enumerate([*byte_letters(), *WHOLE_WORDS, *ranked])}
    assert len(vocab) == VOCAB - len(SPECIALS) and all(vocab[word] == fixed[word] for word in WHOLE_WORDS)
    return tokenizer_json(vocab, merges, {content: fixed[content] for content in SPECIALS})


def training_texts(seed: int, references: Sequence[str]) -> list[str]:
    """What the tokenizer learns from: the `references`, 5,000 sentences, and 2,000 questions and their answers.

    The references are most of it. Their words are many, and the more pieces one takes, the harder it is to hear.
    """
    asked = [text for question in questions(seed, 2_000) for text in (question.text, question.answer)]
    return [*sentences(seed, 5_000), *asked, *map(sentence_case, references)]
