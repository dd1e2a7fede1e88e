"""Letters of texts, embeddings that show them, and the loss that asks for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from engine.tiny import voices
from engine.tiny.letters import LETTERS, SLOTS, SOUNDS, LettersHead, letters, sounds, spelled
from engine.tiny.text import sentences
from engine.tiny.voices import MAIN_VOICE


def test_letters_are_what_is_heard_of_a_text():
    assert [LETTERS[index] for index in letters("It's 9, Zoë!")] == list("it's  zo")
    assert letters("...") == []


def test_sounds_are_the_signs_that_a_voice_writes_and_others_are_left_out():
    assert [SOUNDS[index] for index in sounds("wˈʌn, θɹˈi – §")] == list("wˈʌn, θɹˈi  ")
    assert len(set(SOUNDS)) == len(SOUNDS)


def test_the_main_voice_writes_nothing_that_is_no_sound():
    if (reason := voices.missing(MAIN_VOICE)) is not None:
        pytest.skip(reason)
    written = "".join(map(voices.phonemes, sentences(0, 300)))
    assert set(written) <= set(SOUNDS)
    assert voices.phonemes("Four minus three is one.") == "fˈɔɹ mˈInəs θɹˈi ɪz wˈʌn."


def test_a_head_of_another_alphabet_has_its_scores():
    assert LettersHead(8, SOUNDS).scores(torch.zeros(1, 2, 8)).shape == (1, 2 * SLOTS, len(SOUNDS) + 1)


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
