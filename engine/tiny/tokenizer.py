"""Trains the small model's tokenizer: byte-level BPE of 2,048 entries. Files go through `write_texts`; no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from engine.model.tiny import NUM_BYTES, SPECIALS, SPLIT, WHOLE_WORDS, byte_letters, tokenizer_json
from engine.tiny.shapes import VOCAB, token_ids
from engine.tiny.tasks import questions
from engine.tiny.text import sentence_case, sentences


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
        vocab_size=VOCAB - len(SPECIALS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_with_roles(texts), trainer)
    return _content(tokenizer)


def _with_roles(texts: Sequence[str]) -> Iterator[str]:
    """The texts, and the role words as often: so each of them becomes one token."""
    yield from texts
    yield from ["\n".join(WHOLE_WORDS)] * len(texts)


def _content(tokenizer: Tokenizer) -> dict[str, object]:
    learned = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    fixed = token_ids()
    ranked = [token for token, _ in learned if len(token) > 1 and token not in WHOLE_WORDS]
    ordered = [*byte_letters(), *WHOLE_WORDS, *ranked]
    if len(ordered) != VOCAB - len(SPECIALS) or len(learned) != len(ordered):
        raise ValueError(f"the texts give {len(learned)} tokens, {VOCAB - len(SPECIALS)} are needed; give more texts")
    vocab = {token: index for index, token in enumerate(ordered)}
    assert all(vocab[word] == fixed[word] for word in WHOLE_WORDS) and vocab[ordered[NUM_BYTES - 1]] == NUM_BYTES - 1
    return tokenizer_json(vocab, _merges(tokenizer), {content: fixed[content] for content in SPECIALS})


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """The learned pairs in order of rank."""
    found = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(left, right) for left, right in found]


def training_texts(seed: int, references: Sequence[str]) -> list[str]:
    """What the tokenizer learns from: the `references`, 5,000 sentences, and 2,000 questions and their answers.

    The references are most of it. Their words are many, and the more pieces one takes, the harder it is to hear.
    """
    asked = [text for question in questions(seed, 2_000) for text in (question.text, question.answer)]
    return [*sentences(seed, 5_000), *asked, *map(sentence_case, references)]
