"""The small trained model's sizes: what the engine and Hugging Face read in them, and that they fit the space they have."""

import json
from pathlib import Path

import pytest
import torch

from engine.model.config import OmniConfig
from engine.model.tiny import tokenizer_config, write_texts
from engine.model.weights import expected_tensors
from engine.tiny.shapes import MAX_BYTES, TEXT_BYTES, _changed, config, parameters, token_ids


def test_the_parameters_of_each_component_are_these():
    # Training and export are sized for them: say why in the commit that changes one.
    assert parameters() == {
        "text": 2_393_984,
        "audio": 1_281_152,
        "talker": 918_848,
        "predictor": 356_800,
        "code2wav": 755_909,
        "vision": 44_000,
    }


def test_the_weights_in_bfloat16_leave_room_for_tokenizer_and_card():
    tensors = expected_tensors(OmniConfig.parse(config()))
    header = len(
        json.dumps({name: {"dtype": "BF16", "shape": s, "data_offsets": [10**7] * 2} for name, s in tensors.items()})
    )
    assert 2 * sum(parameters().values()) + header <= MAX_BYTES - TEXT_BYTES


def test_the_engine_reads_the_sizes_that_training_relies_on():
    c = OmniConfig.parse(config())
    assert (c.thinker.vocab, c.thinker.hidden, c.thinker.layers, c.thinker.experts, c.thinker.top_k) == (
        2048,
        192,
        5,
        8,
        4,
    )
    assert (c.audio.hidden, c.audio.layers, c.audio.channels, c.audio.out, c.audio.window_infer) == (
        192,
        4,
        32,
        192,
        800,
    )
    assert c.talker is not None and c.code2wav is not None
    assert (c.talker.stack.vocab, c.talker.stack.hidden, c.talker.accept_layer, c.talker.thinker_hidden) == (
        1088,
        128,
        3,
        192,
    )
    assert (c.talker.predictor.vocab, c.talker.predictor.groups, c.talker.codec.eos) == (64, 16, 166)
    assert (c.code2wav.codebook, c.code2wav.quantizers, c.code2wav.rates, c.code2wav.ratios) == (
        64,
        16,
        (8, 5, 4, 3),
        (2, 2),
    )
    assert c.dtype == "bfloat16"


def test_special_tokens_end_the_vocabulary_and_role_words_follow_the_bytes():
    ids = token_ids()
    assert {word: ids[word] for word in ("system", "user", "assistant")} == {
        "system": 256,
        "user": 257,
        "assistant": 258,
    }
    assert (ids["<|endoftext|>"], ids["<|im_end|>"], ids["<|audio_pad|>"]) == (2031, 2033, 2047)
    assert len(set(ids.values())) == len(ids) == 20


def test_a_size_that_the_released_config_does_not_name_is_refused():
    with pytest.raises(KeyError, match="hiden"):
        _changed({"text": {"hidden": 1}}, {"text": {"hiden": 2}})


def test_a_change_of_one_size_leaves_its_neighbours_and_the_base_alone():
    base = {"text": {"hidden": 1, "layers": 2}, "dtype": "x"}
    assert _changed(base, {"text": {"layers": 3}}) == {"text": {"hidden": 1, "layers": 3}, "dtype": "x"}
    assert base == {"text": {"hidden": 1, "layers": 2}, "dtype": "x"}


@pytest.mark.hf
def test_hugging_face_builds_a_model_of_as_many_parameters(tmp_path: Path):
    from transformers import AutoConfig, Qwen3OmniMoeForConditionalGeneration

    write_texts(tmp_path, {"config.json": config(), "tokenizer_config.json": tokenizer_config()})
    with torch.device("meta"):
        model = Qwen3OmniMoeForConditionalGeneration(AutoConfig.from_pretrained(tmp_path))
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(parameters().values())
