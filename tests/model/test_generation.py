"""Sampling defaults of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from engine.errors import CheckpointError
from engine.model.generation import Generation
from engine.request import Sampling


def written(folder: Path, content: object) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_without_a_file_or_a_key_text_is_sampled_as_it_is(tmp_path: Path, tiny_checkpoint: Path):
    plain = Generation(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0, max_new_tokens=2048)
    assert Generation.load(tmp_path) == Generation.load(tiny_checkpoint) == plain


def test_keys_of_the_file_hold_and_null_and_unknown_ones_do_not_count(tmp_path: Path):
    content = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "talker_top_k": None, "do_sample": True}
    assert Generation.load(written(tmp_path, content)) == Generation(temperature=0.6, top_k=20, top_p=0.95)


def test_speech_is_drawn_as_released_checkpoints_draw_it_where_the_file_says_nothing(tmp_path: Path):
    drawn = Sampling(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05, seed=3)
    assert Generation.load(tmp_path).speech(3) == Generation.load(written(tmp_path, {"top_k": 7})).speech(3) == drawn


def test_text_is_greedy_where_the_file_says_not_to_draw(tmp_path: Path):
    assert Generation.load(written(tmp_path, {"temperature": 0.6})).text_temperature == 0.6
    assert Generation.load(written(tmp_path, {"temperature": 0.6, "do_sample": False})).text_temperature == 0


def test_a_top_k_of_minus_one_is_off(tmp_path: Path):
    found = Generation.load(written(tmp_path, {"top_k": -1, "talker_top_k": -1}))
    assert (found.top_k, found.speech(0).top_k) == (0, 0)


def test_speech_is_drawn_as_the_file_says(tmp_path: Path):
    content = {"talker_temperature": 0.4, "talker_top_k": 9, "talker_top_p": 0.5, "talker_repetition_penalty": 1.2}
    drawn = Sampling(temperature=0.4, top_k=9, top_p=0.5, repetition_penalty=1.2, seed=3)
    assert Generation.load(written(tmp_path, content)).speech(3) == drawn
    greedy = Generation.load(written(tmp_path, content | {"talker_do_sample": False})).speech(3)
    assert greedy == msgspec.structs.replace(drawn, temperature=0.0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": 2.5}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"top_p": 0}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"repetition_penalty": 0.001}, "repetition_penalty"),
        ({"do_sample": 0}, "do_sample"),
        ({"talker_do_sample": 1}, "talker_do_sample"),
        ({"talker_repetition_penalty": 1e-300}, "talker_repetition_penalty"),
        ({"talker_max_new_tokens": 0}, "talker_max_new_tokens"),
        ({"talker_temperature": -1}, "talker_temperature"),
        ([], "object"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(tmp_path: Path, content: object, words: str):
    with pytest.raises(CheckpointError, match=words) as refused:
        Generation.load(written(tmp_path, content))
    assert "generation_config.json" in str(refused.value)


def test_a_broken_file_is_named(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        Generation.load(tmp_path)


def test_what_is_no_file_or_nested_too_deep_is_named(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"generation_config\.json.*take the file away"):
        Generation.load(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"generation_config\.json can't be read: Is a directory"):
        Generation.load(tmp_path)
