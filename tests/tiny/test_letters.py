"""Letters of texts, embeddings that show them, and the loss that asks for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.tiny import voices
from engine.tiny.letters import (
    AHEAD,
    IGNORED,
    LETTERS,
    SLOTS,
    SOUNDS,
    LettersHead,
    SoundsHead,
    letters,
    sounds,
    spelled,
)
from engine.tiny.text import sentences
from engine.tiny.voices import MAIN_VOICE
from tests.tiny.test_speech import needs


def test_letters_are_what_is_heard_of_a_text():
    assert [LETTERS[index] for index in letters("It's 9, Zoë!")] == list("it's  zo")
    assert letters("...") == []


def test_every_frame_has_the_index_of_its_sound_and_one_that_is_not_known_is_silence():
    assert [SOUNDS[index] for index in sounds(" wʌʌn, §")] == list(" wʌʌn,  ")
    assert len(set(SOUNDS)) == len(SOUNDS)


def test_the_main_voice_says_nothing_that_is_no_sound():
    needs(MAIN_VOICE)
    assert set("".join(map(voices.frame_sounds, sentences(0, 300)))) <= set(SOUNDS)


def test_a_row_is_asked_for_its_sound_and_the_next_ones():
    head = SoundsHead(8)
    with torch.no_grad():
        head.out.weight.zero_()
        head.out.bias.zero_()
        head.out.bias.view(AHEAD, -1)[range(AHEAD), [3, 4, 5]] = 50.0
    rows = torch.zeros(2, 8)
    assert head(rows, torch.tensor([[3, 4, 5], [3, 4, IGNORED]])).item() == pytest.approx(0, abs=1e-6)
    assert head(rows, torch.tensor([[3, 4, 5], [3, 5, IGNORED]])).item() == pytest.approx(10, abs=1e-3)


def test_a_token_shows_its_letters_in_any_case_and_the_rest_of_its_row_is_its_own():
    table = spelled(["The", "the", "Ġthe", "theatre", "<|im_end|>", ""], 192, seed=0)
    assert table.shape == (6, 192) and torch.equal(table, table.bfloat16().float())
    assert torch.equal(table[0, :124], table[1, :124]) and not torch.equal(table[0, 124:], table[1, 124:])
    assert int((table[1, :124] != 0).sum()) == 3 and int((table[2, :124] != 0).sum()) == 4
    assert (table[2, 31:124] != 0).nonzero().flatten().tolist() == (table[1, :93] != 0).nonzero().flatten().tolist()
    # What is too long or no word is drawn at random, as long as the others.
    assert (table[3:] != 0).all()
    lengths = table.square().mean(1).sqrt()
    assert lengths.min() > 0.24 and lengths.max() < 0.36
    assert torch.equal(table, spelled(["The", "the", "Ġthe", "theatre", "<|im_end|>", ""], 192, seed=0))
    assert not torch.equal(table[3], spelled(["The", "the", "Ġthe", "theatre", "<|im_end|>", ""], 192, seed=1)[3])


def test_a_row_without_room_for_letters_is_refused():
    with pytest.raises(ValueError, match="a row of 124 values can't show letters, which take 124"):
        spelled(["a"], 124, seed=0)


def test_a_row_may_spell_several_letters_and_a_row_too_many_counts_nothing():
    head = LettersHead(8)
    rows = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([letters("omni"), letters("talk")])
    counts, lengths = torch.tensor([2, 4]), torch.tensor([4, 4])
    loss = head(rows, targets, counts, lengths)
    scores = head.scores(rows)
    assert scores.shape == (2, 4 * SLOTS, len(LETTERS) + 1)
    own = [
        nn.functional.ctc_loss(
            score.log_softmax(-1)[: SLOTS * int(count), None],
            target[None],
            SLOTS * count[None],
            length[None],
            len(LETTERS),
        )
        for score, target, count, length in zip(scores, targets, counts, lengths, strict=True)
    ]
    torch.testing.assert_close(loss, torch.stack(own).mean())


def test_rows_learn_to_spell():
    torch.manual_seed(0)
    head, rows = LettersHead(8), nn.Parameter(torch.randn(1, 3, 8))
    optimizer = torch.optim.Adam([*head.parameters(), rows], lr=0.05)
    target = torch.tensor([letters("hello")])
    for _ in range(100):
        loss = head(rows, target, torch.tensor([3]), torch.tensor([5]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    chosen = head.scores(rows).argmax(-1)[0].tolist()
    said = [
        index for place, index in enumerate(chosen) if index < len(LETTERS) and chosen[place - 1 : place] != [index]
    ]
    assert "".join(LETTERS[index] for index in said) == "hello"
