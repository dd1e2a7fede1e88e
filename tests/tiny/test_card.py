"""The model card: what is told of a training, what is left open, and what is too large."""

import io
import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
import soundfile
from matplotlib.image import imread

from engine.model.tiny import write_texts
from engine.tiny import card, shards, voices
from engine.tiny.card import CARD, CURVES, SPECTROGRAMS, LogLine, Recipe
from engine.tiny.score import Row
from engine.tiny.shapes import config, parameters
from engine.tiny.speech import Clip
from engine.tiny.voices import MAIN_VOICE, SAMPLE_RATE, Line
from tests.tiny.test_speech import needs

MINUTES = {"codec": 5.0, "thinker": 17.5, "decoder": 1.0}
RECIPE = Recipe(librispeech=True, copies=2, read=1234, minutes=MINUTES)
SAID = ["One red cat sleeps.", "Two birds sing in the garden."]
SCORES = {
    "t2t_questions": {"count": 200, "wer": 1.5, "exact": 96.5, "ended": 100.0},
    "t2s_sentences": {"count": 2, "wer": 2.0, "exact": 90.0, "ended": 100.0, "heard_wer": 12.25},
}
LOG = [
    LogLine("texts", 30.0, True),
    LogLine("heard", 120.0, True, "Some GPU", {"hibari": 16.8, "flite-slt": 7.2}),
    LogLine("thinker", 300.0, False, "Some GPU"),
    LogLine("thinker", 600.0, True, "Another GPU"),
]


def lines(*entries: dict[str, float]) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """What a training leaves that a card is made of; its corpus to speak is there, that to hear is not."""
    texts = {"texts/heard.jsonl": "1\n2\n3\n", "texts/spoken.jsonl": "1\n2\n"}
    curves = {
        "codec/log.jsonl": lines(
            {"step": 100, "spectral": 2.0}, {"step": 200, "spectral": 1.0}, {"step": 200, "db": 3}
        ),
        "thinker/curve.jsonl": lines({"step": 50, "text": 5.0, "letters": 6.0}, {"step": 100, "text": 1.0}),
        "talker/curve.jsonl": lines({"step": 50, "first": 4.0, "rest": 4.0}, {"step": 4000, "first": 2.0, "rest": 3.0}),
    }
    scores = {"device": "cpu", "seed": 0, "scores": SCORES, "skipped": {"a2t_unseen_voice": "there is no flite"}}
    for name, text in {**texts, **curves, "score/scores.json": json.dumps(scores)}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "log.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in LOG))
    (tmp_path / "spoken").mkdir()
    clip = Clip(Line(SAID[0], MAIN_VOICE, 0), "00000.npy", 0, SAMPLE_RATE * 5400)
    shards.write_list(tmp_path / "spoken" / shards.MANIFEST, [clip])
    said(tmp_path / "score", SAID)
    (tmp_path / "model").mkdir()
    write_texts(tmp_path / "model", {"config.json": config()})
    return tmp_path


def test_the_card_says_when_speech_is_unclear(out: Path):
    path = out / "score" / "scores.json"
    path.write_text(path.read_text(encoding="utf-8").replace("12.25", "112.25"), encoding="utf-8")
    text = card.text(out / "model", out, RECIPE, SAID)
    assert "## Limits\n\n- Its speech has" in text and "a third more time" not in text


def test_the_card_tells_the_kinds_of_questions_apart(out: Path):
    assert "by kind" not in card.text(out / "model", out, RECIPE, SAID)
    asked = [("story", "Maria."), ("story", "Market."), ("spelling", "Maria."), ("story", "Maria.")]
    rows = [Row("t2t_questions", "Maria.", text, True, kind=kind) for kind, text in asked]
    shards.write_list(out / "score" / "rows.jsonl", [*rows, Row("t2s_sentences", "a", "b", True, kind="repeat")])
    text = card.text(out / "model", out, RECIPE, SAID)
    assert (
        "| kind | questions | answered exactly |\n| --- | --- | --- |\n| spelling | 1 | 1 |\n| story | 3 | 2 |\n\n##"
        in text
    )


def said(score: Path, texts: list[str]) -> None:
    """Rows and speech of a score: a second of noise each."""
    rows = [Row("t2s_sentences", text, text, True, True, 1.0, 1.0, f"{place}.wav") for place, text in enumerate(texts)]
    noise = np.random.default_rng(0).normal(0, 0.1, (len(rows), SAMPLE_RATE)).astype(np.float32)
    for row, samples in zip(rows, noise, strict=True):
        soundfile.write(score / str(row.wav), samples, SAMPLE_RATE)
    shards.write_list(score / "rows.jsonl", [Row("t2t_questions", "Ten.", "Ten.", True), *rows])


def test_the_card_tells_what_the_files_say_and_leaves_open_what_they_do_not(out: Path):
    text = card.text(out / "model", out, RECIPE, SAID)
    counts = parameters()
    assert f"| Thinker | {counts['text']:,} | 5 layers of width 192, 4 of 8 experts for a token |" in text
    assert f"{sum(counts.values()):,} parameters in bfloat16" in text
    assert "- Listening: 3 lines, 24.0 hours (hibari 16.8, flite-slt 7.2);\n  2 copies of each" in text
    assert "- Speaking: 2 answers, 1.5 hours (hibari 1.5)" in text
    assert "- Reading: 1,234 conversations" in text
    assert "LibriSpeech's reference texts (dev-clean; texts only" in text
    assert "| texts and tokenizer | 0.5 | 1 | – | not kept |" in text
    assert "| Thinker and audio encoder | 15.0 | 2 | 100 | Some GPU, Another GPU |" in text
    assert "| Talker" in text and "| Talker and code predictor | " not in text
    assert "17.5 minutes in all stages" in text
    assert "| answer held-out questions | 200 | 1.5 | 96.5 | 100 | – |" in text
    assert "| say held-out sentences, greedy | 2 | 2 | 90 | 100 | 12.25 |" in text
    assert (
        "Its plan trains\ncodec for 5, Thinker and audio encoder for 17.5 and decoder of foreseen codes for 1 minutes."
        in text
    )
    assert "can't be made out" not in text
    assert "Not measured: `a2t_unseen_voice`, since there is no flite." in text
    assert "through the engine, float32 on a CPU," in text
    assert "1. One red cat sleeps.\n2. Two birds sing in the garden.\n" in text
    assert str(out) not in text


def test_the_card_says_what_a_rerun_gave(out: Path):
    assert "## A rerun" not in card.text(out / "model", out, RECIPE, SAID)
    rerun = out / card.RERUN
    (rerun / "score").mkdir(parents=True)
    scores = {"device": "cpu", "scores": {"t2t_questions": {"count": 200, "exact": 94.5}}, "skipped": {}}
    (rerun / "score" / "scores.json").write_text(json.dumps(scores), encoding="utf-8")
    (rerun / "log.jsonl").write_bytes(msgspec.json.encode(LogLine("thinker", 600.0, True, "Another GPU")) + b"\n")
    (rerun / "thinker").mkdir()
    (rerun / "thinker" / "curve.jsonl").write_text('{"step": 50}\n', encoding="utf-8")
    told = card.text(out / "model", out, RECIPE, SAID)
    told = told[told.index("## A rerun") : told.index("## What it sounds like")]
    assert "This one took 10.0 minutes in all stages:" in told
    assert "| Thinker and audio encoder | 10.0 | 1 | 50 | Another GPU |" in told
    assert "| answer held-out questions | 200 | 94.5 |" in told


def test_a_rerun_without_its_log_leaves_its_time_open(out: Path):
    (out / card.RERUN / "score").mkdir(parents=True)
    shutil.copy(out / "score" / "scores.json", out / card.RERUN / "score")
    told = card.text(out / "model", out, RECIPE, SAID)
    assert "no two make the same weights. It was not kept how long it took.\n\nIts model scored:" in told


def test_a_log_that_is_damaged_may_be_deleted_alone(out: Path):
    (out / "log.jsonl").write_text("x\n", encoding="utf-8")
    with pytest.raises(
        ValueError, match=r"log\.jsonl, line 1, is damaged \(.*\); mend it, or delete it: the card then"
    ):
        card.text(out / "model", out, RECIPE, SAID)


def test_what_somebody_noted_stands_beside_the_data(out: Path):
    plain = card.text(out / "model", out, RECIPE, SAID)
    (out / card.NOTES).write_text("\nThe codec had other minutes.\n\n", encoding="utf-8")
    noted = card.text(out / "model", out, RECIPE, SAID)
    assert noted == plain.replace("\n## Training\n", "\nThe codec had other minutes.\n\n## Training\n")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("thinker/curve.jsonl", "x\n"),
        ("thinker/curve.jsonl", "[]\n"),
        ("thinker/curve.jsonl", '{"text": 1.0}\n'),
        ("score/scores.json", '{"device": "cpu", "scores": [], "skipped": {}}'),
        ("score/scores.json", '{"device": "cpu", "scores": {"t2t_questions": 1}, "skipped": {}}'),
        ("score/scores.json", '{"device": "cpu", "scores": {"zz": {"count": 1}}, "skipped": {}}'),
    ],
)
def test_what_a_card_can_not_be_made_of_is_named(out: Path, name: str, content: str):
    (out / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"{out / name}.* damaged"):
        card.text(out / "model", out, RECIPE, SAID)


def test_how_long_a_training_took_is_left_open_without_its_log(out: Path):
    (out / "log.jsonl").unlink()
    assert "It was not kept how long it took." in card.text(out / "model", out, RECIPE, SAID)


def test_without_texts_of_others_and_a_length_that_nobody_kept_it_says_so(out: Path):
    (out / "log.jsonl").write_bytes(msgspec.json.encode(LogLine("heard", 60.0, True)) + b"\n")
    text = card.text(out / "model", out, Recipe(librispeech=False, copies=1, read=0, minutes=MINUTES), SAID)
    assert "with no texts of others." in text
    assert "- Listening: 3 lines, of a length that was not kept;" in text


def test_a_training_too_short_for_a_curve_has_none(out: Path):
    (out / "thinker" / "curve.jsonl").unlink()
    assert "| Thinker and audio encoder | 15.0 | 2 | – | Some GPU, Another GPU |" in card.text(
        out / "model", out, RECIPE, SAID
    )
    assert imread(io.BytesIO(card.curves(out))).std() > 0.01


def test_a_card_is_written_with_its_pictures_and_says_how_large_the_folder_is(out: Path):
    needs(MAIN_VOICE)
    size = card.write(out / "model", out, RECIPE)
    names = {path.name for path in (out / "model").iterdir()}
    assert names >= {CARD, CURVES, SPECTROGRAMS}
    assert size == sum(path.stat().st_size for path in (out / "model").iterdir())
    text = (out / "model" / CARD).read_text(encoding="utf-8")
    assert f"]({CURVES})" in text and f"]({SPECTROGRAMS})" in text


def test_pictures_are_the_same_every_time_and_small_for_five_long_sentences(out: Path):
    draw = np.random.default_rng(0)
    shown = [(SAID[0], *draw.normal(0, 0.1, (2, 6 * SAMPLE_RATE)).astype(np.float32)) for _ in range(card.SHOWN)]
    made, lines = card.spectrograms(shown), card.curves(out)
    assert (made, lines) == (card.spectrograms(shown), card.curves(out))
    assert len(made) + len(lines) <= card.MOST_PICTURE_BYTES
    assert imread(io.BytesIO(made)).std() > 0.01 and imread(io.BytesIO(lines)).std() > 0.01


def test_a_folder_or_pictures_too_large_and_a_score_without_the_part_are_refused(
    out: Path, monkeypatch: pytest.MonkeyPatch
):
    needs(MAIN_VOICE)
    monkeypatch.setattr(card, "MAX_BYTES", 10_000)
    with pytest.raises(ValueError, match=r"bytes, at most 10000 may be shipped"):
        card.write(out / "model", out, RECIPE)
    monkeypatch.setattr(card, "MOST_PICTURE_BYTES", 1000)
    with pytest.raises(ValueError, match=r"the pictures have \d+ bytes, at most 1000"):
        card.write(out / "model", out, RECIPE)
    said(out / "score", [])
    with pytest.raises(ValueError, match="score has no part t2s_sentences; score the model again"):
        card.write(out / "model", out, RECIPE)


def test_of_a_model_that_says_nothing_silence_is_shown(out: Path):
    needs(MAIN_VOICE)
    row = Row("t2s_sentences", SAID[0], "", True, False, 0.0, 1.0, "nothing.wav")
    soundfile.write(out / "score" / "nothing.wav", np.zeros(0, dtype=np.float32), SAMPLE_RATE)
    shards.write_list(out / "score" / "rows.jsonl", [row])
    assert card.write(out / "model", out, RECIPE) > 0
    assert SAID[0] in (out / "model" / CARD).read_text(encoding="utf-8")


def test_without_the_main_voice_there_is_no_card(monkeypatch: pytest.MonkeyPatch, out: Path):
    monkeypatch.setattr(voices, "missing", lambda voice: f"no {voice} here")
    with pytest.raises(ValueError, match="the card needs the voice hibari: no hibari here"):
        card.write(out / "model", out, RECIPE)
