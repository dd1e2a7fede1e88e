"""The comparison with Hugging Face over an exported folder: all answers are the same, and one that is not is told."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.config import OFF_BY_DEFAULT
from engine.model.config import OmniConfig
from engine.model.weights import expected_tensors
from engine.server.source import trained_model
from engine.tiny import tasks, tokenizer, voices
from engine.tiny.export import VISION, write_trained
from engine.tiny.score import Served
from engine.tiny.shapes import config
from engine.tiny.voices import Floats
from tests.perf import hugging_face
from tests.perf.hugging_face import (
    UNITS,
    Answer,
    Row,
    asked,
    compare,
    difference,
    load_hugging_face,
    report,
    request,
    summaries,
)

SPOKEN = {"T2S", "A2S"}


def noise(texts: Sequence[str]) -> list[Floats]:
    """A clip for each text, as long as it is: what is heard is the same for both, speech or not."""
    draw = np.random.default_rng(0)
    return [draw.normal(0, 0.1, 1200 * len(text)).astype(np.float32) for text in texts]


def drawn(name: str, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    """Values that matter: no norm of ones, no bias of zeros, and matrices that keep what goes through them large."""
    values = torch.randn(shape, generator=draw)
    if len(shape) == 1:
        return 0.1 * values + (0.0 if name.endswith("bias") else 1.0)
    return values if "embed" in name else 1.5 * values / np.prod(shape[1:]) ** 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the training exports it, with its tokenizer and shapes."""
    path, draw = tmp_path_factory.mktemp("omni-tiny"), torch.Generator().manual_seed(0)
    shapes = expected_tensors(OmniConfig.parse(config()))
    tensors = {name: drawn(name, shape, draw) for name, shape in shapes.items() if not name.startswith(VISION)}
    write_trained(path, tensors, tokenizer.train(tokenizer.training_texts(0, [])))
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Served:
    return Served(folder, "cpu")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load_hugging_face(folder)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a drawn model ends by itself."""
    monkeypatch.setattr(hugging_face, "MOST_TOKENS", 12)
    monkeypatch.setattr(hugging_face, "MOST_FRAMES", 8)


@pytest.mark.hf
def test_both_give_the_same_text_and_codes_in_all_tasks(served: Served, model: Any, short: None, tmp_path: Path):
    told: list[str] = []
    rows = compare(served, model, asked(8, noise), told.append)
    assert [row.difference for row in rows] == [None] * 8
    assert [row.cell for row in rows] == [*UNITS, *UNITS]
    # Enough was compared.
    assert len({row.text for row in rows}) == 8
    assert all(row.tokens > 3 and (row.frames > 0) == (row.cell in SPOKEN) for row in rows)
    assert sum(row.frames for row in rows) > 16
    assert all((row.first_audio_s is None) != (row.cell in SPOKEN) for row in rows)
    assert told[1] == "2 of 8: A2T transcribe: the same"
    assert report(rows, {"threads": 1}, tmp_path) == 0
    kept = json.loads((tmp_path / "hugging_face.json").read_text(encoding="utf-8"))
    assert [row["cell"] for row in kept["rows"]] == [row.cell for row in rows]
    assert [(one["cell"], one["equal"]) for one in kept["cells"]] == [(cell, 2) for cell in UNITS]
    assert "8 of 8 greedy answers are the same" in (tmp_path / "hugging_face.md").read_text(encoding="utf-8")


@pytest.mark.hf
def test_a_tensor_that_differs_is_told_at_its_first_token_and_ends_with_1(
    served: Served, model: Any, short: None, tmp_path: Path
):
    wanted = asked(3, noise)
    head = model.talker.code_predictor.lm_head[4].weight
    with torch.no_grad():
        head.neg_()
        rows = compare(served, model, wanted)
        head.neg_()
    assert [row.difference is None for row in rows] == [True, True, False]
    assert rows[2].difference is not None and rows[2].difference.startswith("code 5 of frame 0 is ")
    assert report(rows, {"threads": 1}, tmp_path) == 1
    assert "2 of 3 greedy answers are the same" in (tmp_path / "hugging_face.md").read_text(encoding="utf-8")


@pytest.mark.hf
def test_both_give_the_same_text_and_codes_from_the_model_of_the_package(short: None):
    folder = trained_model()
    rows = compare(Served(folder, "cpu"), load_hugging_face(folder), asked(8, noise))
    assert [row.difference for row in rows] == [None] * 8
    assert all((row.frames > 3) == (row.cell in SPOKEN) for row in rows)


def test_the_engine_runs_with_the_switches_of_a_server_on_a_cpu(served: Served):
    switches = served.engine.info()["switches"]
    assert isinstance(switches, dict)
    assert [name for name, on in switches.items() if not on] == sorted(OFF_BY_DEFAULT["cpu"])


def test_prompts_are_of_all_tasks_and_none_comes_twice(served: Served):
    wanted = asked(50, noise)
    assert Counter(one.part for one in wanted) == {"T2T": 13, "A2T": 13, "T2S": 12, "A2S": 12}
    for cell, other in (("A2T", "transcribe"), ("T2S", "repeat")):
        kinds = [one.example.kind for one in wanted if one.part == cell]
        assert set(kinds[::2]) == {other} and other not in kinds[1::2]
    assert {one.example.kind for one in wanted if one.part == "T2T"} == set(tasks.KINDS)
    assert all((one.heard is not None) == one.part.startswith("A") for one in wanted)
    assert len({(json.dumps(one.example.messages), one.example.clips) for one in wanted}) == 50
    wishes = [request(served.processor, "0", one) for one in wanted]
    assert [wish.speech is not None for wish in wishes] == [one.part in SPOKEN for one in wanted]
    assert all(len(wish.clips) == (one.heard is not None) for wish, one in zip(wishes, wanted, strict=True))


def test_the_first_difference_is_of_text_then_of_codes_and_an_answer_that_ends_early_differs():
    whole = Answer([5, 6, 7], [[1, 2], [3, 4]], 1.0)
    assert difference(whole, Answer([5, 6, 7], [[1, 2], [3, 4]], 2.0)) is None
    assert difference(whole, Answer([5, 9, 7], [[0, 0]], 1.0)) == "text token 1 is 6, Hugging Face's 9"
    assert difference(whole, Answer([5, 6], [[1, 2]], 1.0)) == "text token 2 is 7, Hugging Face's None"
    assert difference(whole, Answer([5, 6, 7], [[1, 2], [3, 0]], 1.0)) == "code 1 of frame 1 is 4, Hugging Face's 0"
    assert difference(Answer([5], [], 1.0), Answer([5], [[8, 9]], 1.0)) == "code 0 of frame 0 is None, Hugging Face's 8"


def row(cell: str, work: float, engine_s: float, hugging_face_s: float, **changes: Any) -> Row:
    """A row of a cell: what its speeds are made of."""
    values = {"task": "repeat", "text": "Ten.", "tokens": 2, "frames": 0, "first_audio_s": None, "difference": None}
    return Row(cell=cell, work=work, engine_s=engine_s, hugging_face_s=hugging_face_s, **(values | changes))


def test_speeds_are_of_all_prompts_and_the_ratio_is_the_median_of_them():
    rows = [
        row("A2T", 6.0, 0.1, 0.2),
        row("T2S", 2.0, 1.0, 1.5, first_audio_s=0.25),
        row("T2S", 4.0, 1.0, 4.0, first_audio_s=0.75),
        row("T2S", 3.0, 2.0, 3.5, first_audio_s=0.5, difference="code 1 of frame 0 is 4, Hugging Face's 5"),
    ]
    heard, said = summaries(rows)
    assert (heard.cell, heard.unit, heard.first_audio_ms) == ("A2T", "RTFx", None)
    assert (heard.engine, heard.hugging_face, heard.ratio) == pytest.approx((60.0, 30.0, 2.0))
    assert (said.prompts, said.equal, said.unit) == (3, 2, "audio-s/s")
    assert (said.engine, said.hugging_face, said.ratio) == pytest.approx((2.25, 1.0, 1.75))
    assert (said.first_audio_ms, said.slowest_first_audio_ms) == (500.0, 750.0)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "the following arguments are required: folder, --out"),
        (["/none", "--out", "x"], "argument folder: '/none' has no config.json; name a checkpoint folder"),
        (["{folder}", "--out", ""], "argument --out: '' is no folder"),
        (["{folder}", "--out", "x", "--prompts", "0"], "argument --prompts: '0' is no whole number from 1 on"),
        (["{empty}", "--out", "x"], "config.json lacks thinker_config"),
    ],
)
def test_wrong_usage_is_refused_in_a_line(
    words: list[str],
    told: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    (tmp_path / "config.json").write_text("{}")
    places = {"folder": folder, "empty": tmp_path}
    monkeypatch.setattr(voices, "missing", lambda voice: None)
    assert ended(words, places, monkeypatch) == 64
    err = capsys.readouterr().err
    assert err.startswith("hugging_face: ") and told.format(**places) in err and err.count("\n") == 1


def test_without_the_main_voice_nothing_is_compared(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(voices, "missing", lambda voice: f"no {voice} here")
    assert ended(["{folder}", "--out", "x"], {"folder": folder}, monkeypatch) == 69
    assert capsys.readouterr().err == "hugging_face: the clips need the voice hibari: no hibari here\n"


def ended(words: list[str], places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of a call that is refused."""
    monkeypatch.setattr(sys, "argv", ["hugging_face", *(word.format(**places) for word in words)])
    with pytest.raises(SystemExit) as caught:
        hugging_face.main()
    return caught.value.code
