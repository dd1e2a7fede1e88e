"""Scores through the engine: what is asked, how answers are bounded, and what the numbers say."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from engine.errors import WalkgateError
from engine.server import cli
from engine.tiny import judge, score, tasks, voices, workdir
from engine.tiny.score import Asked, Row, Served, Sizes, summary, table, wanted
from engine.tiny.text import sentence_case, sentences, unseen_sentences
from engine.tiny.voices import HELD_OUT_VOICE, MAIN_VOICE
from tests.shared import shared
from tests.tiny.test_speech import needs

SENTENCES = ("a2t_sentences", "t2s_sentences", "t2s_sampled")
SIZES = Sizes(sentences=2, unheard=3, questions=12, aloud=2)


def row(reference: str, text: str, **changes: object) -> Row:
    return Row(**{"part": "a", "reference": reference, "text": text, "ended": True} | changes)


def test_words_are_compared_without_case_and_marks_and_errors_are_of_all_words():
    rows = [row("It is nine o'clock.", "it is nine o'clock"), row("Anna sleeps, I think.", "Anna sleep, I think. So.")]
    # One word of eight wrong, one too many.
    assert summary(rows) == {"count": 2, "wer": 25.0, "exact": 0.0, "ended": 100.0}
    assert summary([row("Ten.", "Ten."), row("Ten.", "", ended=False)]) == {
        "count": 2,
        "wer": 50.0,
        "exact": 50.0,
        "ended": 50.0,
    }


def test_digits_and_letters_of_other_scripts_are_words_too():
    assert summary([row("You have coins.", "You have 99 日本 coins.")])["wer"] == 66.67
    assert summary([row("Peter's hat, please!", "peter's hat please")])["wer"] == 0


def test_who_says_nothing_is_not_heard_without_a_fault():
    said = [row("Ten.", text, heard="", natural_heard="ten") for text in ("", "(ten)")]
    assert [summary([one])["heard_whole"] for one in said] == [0, 0]


def test_speech_over_twice_its_natural_length_is_counted():
    said = [
        row("Ten.", "Ten.", speech_ended=ended, seconds=seconds, natural_seconds=1.0)
        for ended, seconds in ((True, 2.0), (True, 2.1), (False, 3.0), (True, 0.9))
    ]
    found = summary(said)
    assert (found["speech_ended"], found["too_long"]) == (75.0, 50.0)


def test_the_table_has_a_dash_where_a_part_has_no_speech():
    lines = table({"t2t": summary([row("Ten.", "Ten.")])})
    assert lines[0].split() == ["part", *score.COLUMNS]
    assert lines[1].split() == ["t2t", "1", "0", "100", "100", *["-"] * 7]


def test_what_is_heard_is_compared_with_the_answer_the_reference_and_what_is_heard_in_the_main_voice():
    said = [
        row("It costs ten dollars.", "It costs two dollars.", heard="it costs $2", natural_heard="It costs $10."),
        row("Anna has a cat.", "Anna has a cat.", heard="Anna has a hat", natural_heard="Anna has the hat."),
    ]
    found = summary(said)
    # Of seven words: "cat"; "$10" and "cat"; "a" and "cat".
    assert (found["heard_wer"], found["heard_reference_wer"], found["natural_wer"]) == (14.29, 28.57, 28.57)
    assert (found["heard_whole"], found["natural_whole"]) == (50.0, 50.0)
    assert "heard_wer" not in summary([row("Ten.", "Ten.")])


def test_what_is_asked_was_never_trained_and_what_can_not_be_asked_has_a_reason():
    needs(MAIN_VOICE)
    asked, skipped = wanted(SIZES, None, seed=0)
    parts = [one.part for one in asked]
    assert skipped["a2t_librispeech"] == "no folder of reference texts was named"
    counts = {"a2t_sentences": 2, "a2t_templates": 2, "t2t_questions": 12}
    counts |= {"t2s_sentences": 2, "t2s_sampled": 2, "a2s_questions": 2}
    if (reason := voices.missing(HELD_OUT_VOICE)) is not None:
        assert skipped["a2t_unseen_voice"] == reason
    else:
        counts["a2t_unseen_voice"] = 2
    assert {part: parts.count(part) for part in parts} == counts
    told = unseen_sentences(0, 2)
    assert [one.example.answer for one in asked if one.part == "a2t_templates"] == sentences(0, 2, held_out=True)
    assert [one.example.answer for one in asked if one.part in SENTENCES] == 3 * told
    assert [one.draw for one in asked if one.aloud] == [None, None, 0, 1, None, None]
    asked_questions = {one.example.messages[-1]["content"] for one in asked if one.part == "t2t_questions"}
    trained = {question.text for question in tasks.questions(0, 20_000) if not question.earlier}
    without_turns = {one.text for one in tasks.held_out_questions(0, 12) if not one.earlier}
    assert without_turns <= asked_questions and without_turns.isdisjoint(trained)
    aloud = [one for one in asked if one.part == "a2s_questions"]
    assert all(one.aloud and one.heard is not None and one.example.clips[0] not in trained for one in aloud)


def test_a_sentence_that_was_trained_is_not_asked():
    needs(MAIN_VOICE)
    first, second, third = unseen_sentences(0, 3)
    asked, _ = wanted(SIZES, None, 0, trained=[first, third])
    told = [one.example.answer for one in asked if one.part == "t2s_sentences"]
    assert len(told) == 2 and told[0] == second and third not in told


def test_unheard_texts_come_from_test_clean():
    needs(MAIN_VOICE)
    folder = shared("data", "librispeech", "refs")
    asked, skipped = wanted(Sizes(1, 3, 1, 1), folder, seed=0)
    texts = [one.example.answer for one in asked if one.part == "a2t_librispeech"]
    references = (folder / "test-clean.trans.txt").read_text(encoding="utf-8").splitlines()
    assert len(texts) == 3 and set(texts) <= {sentence_case(line.partition(" ")[2]) for line in references}
    assert "a2t_librispeech" not in skipped


def test_answers_come_in_order_and_speech_is_bounded(tiny_checkpoint: Path):
    wave = np.random.default_rng(0).normal(0, 0.05, 24000).astype(np.float32)
    asked = [
        Asked("t2t", tasks.ask(tasks.held_out_questions(0, 1)[0])),
        Asked("a2t", tasks.transcribe("Ten."), wave),
        Asked("t2s", tasks.repeat("Ten."), aloud=True),
        Asked("t2s", tasks.repeat("Ten."), aloud=True, draw=0),
        Asked("t2s", tasks.repeat("Ten."), aloud=True, draw=1),
    ]
    together = Served(tiny_checkpoint, "cpu").answers(asked, [0.0, 0.0, 0.4, 0.4, 0.4])
    alone = [Served(tiny_checkpoint, "cpu").answers([one], [0.4])[0] for one in asked]
    assert together == alone
    assert together[0].text != together[1].text and all(answer.text for answer in together)
    assert [len(answer.pcm) > 0 for answer in together] == [False, False, True, True, True]
    # The same words, said in three ways.
    assert len({answer.text for answer in together[2:]}) == 1
    assert len({bytes(answer.pcm) for answer in together[2:]}) == 3
    # Whole frames of 80 ms.
    assert together[2].seconds <= 3 * 0.4 + 0.08


def test_scores_are_of_the_rows_that_are_kept(tiny_checkpoint: Path, tmp_path: Path):
    needs(MAIN_VOICE)
    told: list[str] = []
    scores = score.score(tiny_checkpoint, tmp_path, sizes=Sizes(1, 1, 1, 1), tell=told.append)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    kept = json.loads((tmp_path / "scores.json").read_text(encoding="utf-8"))
    assert kept["scores"] == scores
    assert kept["skipped"].get("heard_wer") == judge.missing()
    assert [each["count"] for each in scores.values()] == [1] * len(rows)
    for one in rows:
        assert scores[one["part"]]["exact"] == 100 * (one["text"] == one["reference"])
        spoken = one["wav"] is not None
        assert (one["heard"] is not None) == (spoken and judge.missing() is None)
        assert ("natural_wer" in scores[one["part"]]) == (spoken and judge.missing() is None)
        if spoken:
            # Seconds are rounded to milliseconds, 48 bytes each.
            assert (tmp_path / one["wav"]).stat().st_size == pytest.approx(44 + one["seconds"] * 48000, abs=48)
    assert told[-len(scores) - 1 :] == table(scores)
    assert all(f"score: without {part}: {reason}" in told for part, reason in kept["skipped"].items())


def test_without_the_main_voice_there_is_no_score(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(voices, "missing", lambda voice: f"no {voice} here")
    with pytest.raises(ValueError, match="the score needs the voice hibari: no hibari here"):
        score.score(tmp_path, tmp_path)


def test_the_command_scores_a_folder(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path, tmp_path: Path):
    needs(MAIN_VOICE)
    # The size of a real score would take minutes.
    monkeypatch.setattr(score, "score", functools.partial(score.score, sizes=Sizes(1, 1, 1, 1)))
    refs = shared("data", "librispeech", "refs")
    words = ["tiny", "score", str(tiny_checkpoint), "--out", str(tmp_path / "scores"), "--librispeech", str(refs)]
    done = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    kept = json.loads((tmp_path / "scores" / "scores.json").read_text(encoding="utf-8"))
    assert done.exit_code == 0 and done.output.splitlines()[-len(kept["scores"]) :] == table(kept["scores"])[1:]
    assert "a2t_librispeech" in kept["scores"]


def test_two_scores_share_no_folder(tiny_checkpoint: Path, tmp_path: Path):
    needs(MAIN_VOICE)
    with workdir.locked(tmp_path), pytest.raises(WalkgateError, match=rf"process \d+ works in {tmp_path}"):
        score.score(tiny_checkpoint, tmp_path, sizes=Sizes(1, 1, 1, 1))


def test_the_command_names_a_folder_or_device_that_can_not_be_scored(tiny_checkpoint: Path, tmp_path: Path):
    needs(MAIN_VOICE)
    faults = {"nowhere has no config.json": ["nowhere"], "--device 'tpu'": [str(tiny_checkpoint), "--device", "tpu"]}
    for message, words in faults.items():
        done = CliRunner().invoke(cli.app, ["tiny", "score", *words, "--out", str(tmp_path)])
        assert isinstance(done.exception, WalkgateError) and message in str(done.exception)
    assert not any(tmp_path.iterdir())
