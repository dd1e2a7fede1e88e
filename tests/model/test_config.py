"""config.json: what is read, both spellings, and what is refused."""

import copy
import json
from pathlib import Path

import pytest

from engine.errors import CheckpointError
from engine.model.config import OmniConfig, SpecialIds
from engine.model.released import released_config
from tests.shared import shared


@pytest.fixture
def data(tiny_checkpoint: Path) -> dict:
    return json.loads((tiny_checkpoint / "config.json").read_text())


def without(data: dict, dotted: str) -> dict:
    changed = copy.deepcopy(data)
    *path, key = dotted.split(".")
    place = changed
    for name in path:
        place = place[name]
    del place[key]
    return changed


def with_value(data: dict, dotted: str, value: object) -> dict:
    changed = copy.deepcopy(data)
    *path, key = dotted.split(".")
    place = changed
    for name in path:
        place = place[name]
    place[key] = value
    return changed


def test_the_released_config_gives_the_published_sizes():
    config = OmniConfig.load(shared("data", "qwen3omni", "config.json").parent)
    stack, talker, wave = config.thinker, config.talker, config.code2wav
    assert (stack.layers, stack.hidden, stack.heads, stack.kv_heads, stack.head_dim) == (48, 2048, 32, 4, 128)
    assert (stack.experts, stack.top_k, stack.moe_inter, stack.shared_inter, stack.norm_topk) == (128, 8, 768, 0, True)
    assert (stack.rope_theta, stack.mrope_section, stack.max_positions) == (1e6, (24, 20, 20), 65536)
    assert talker is not None and wave is not None
    assert (talker.stack.vocab, talker.stack.top_k, talker.stack.shared_inter) == (3072, 6, 768)
    assert (talker.accept_layer, talker.groups, talker.codec.eos) == (24, 16, 2150)
    assert (talker.predictor.layers, talker.predictor.kv_heads, talker.predictor.inter) == (5, 8, 3072)
    assert config.speakers == {"chelsie": 2301, "ethan": 2302, "aiden": 2303}
    assert (wave.window, wave.head_dim, wave.rates, wave.eps) == (72, 64, (8, 5, 4, 3), 1e-5)
    assert (config.positions_per_second, config.dtype, config.has_talker) == (13, "bfloat16", True)
    assert config.ids == SpecialIds(
        im_start=151644,
        im_end=151645,
        tts_pad=151671,
        tts_bos=151672,
        tts_eos=151673,
        system=8948,
        user=872,
        assistant=77091,
        audio=151675,
        audio_start=151669,
        audio_end=151670,
        image=151655,
        video=151656,
        vision_start=151652,
        vision_end=151653,
    )


def test_both_rope_spellings_and_both_names_of_the_expert_count_read_alike(data):
    config = OmniConfig.parse(data)
    other = copy.deepcopy(data)
    for place in (other["thinker_config"]["text_config"], other["talker_config"]["text_config"]):
        place["rope_parameters"] = {**place.pop("rope_scaling"), "rope_theta": place.pop("rope_theta")}
    for place in (other["talker_config"]["code_predictor_config"], other["code2wav_config"]):
        place["rope_parameters"] = {"rope_type": "default", "rope_theta": place.pop("rope_theta")}
    text = other["talker_config"]["text_config"]
    text["num_local_experts"] = text.pop("num_experts")
    assert OmniConfig.parse(other) == config


def test_two_expert_counts_that_differ_are_refused(data):
    with pytest.raises(CheckpointError, match=r"talker_config\.text_config says both"):
        OmniConfig.parse(with_value(data, "talker_config.text_config.num_local_experts", 9))


@pytest.mark.parametrize(
    "key",
    [
        "enable_audio_output",
        "assistant_token_id",
        "thinker_config.audio_token_id",
        "thinker_config.position_id_per_seconds",
        "thinker_config.text_config.norm_topk_prob",
        "thinker_config.text_config.shared_expert_intermediate_size",
        "thinker_config.text_config.rope_theta",
        "thinker_config.text_config.rope_scaling.mrope_section",
        "thinker_config.text_config.num_experts",
        "thinker_config.audio_config.n_window_infer",
        "thinker_config.vision_config.deepstack_visual_indexes",
        "talker_config.accept_hidden_layer",
        "talker_config.speaker_id",
        "talker_config.code_predictor_config.num_code_groups",
        "code2wav_config.sliding_window",
        "code2wav_config",
    ],
)
def test_an_absent_key_is_named_and_has_no_default(data, key):
    with pytest.raises(CheckpointError) as error:
        OmniConfig.parse(without(data, key))
    # An absent mrope_section is looked for in the object that rope_scaling is.
    assert f"lacks {key};" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("thinker_config.text_config.hidden_size", "64", "hidden_size must be a whole number, is '64'"),
        ("thinker_config.text_config.hidden_size", True, "hidden_size must be a whole number, is True"),
        ("thinker_config.text_config.norm_topk_prob", 1, "norm_topk_prob must be true or false, is 1"),
        ("thinker_config.text_config.attention_bias", True, "attention_bias is True; only False is served"),
        ("thinker_config.text_config.mlp_only_layers", [0], r"mlp_only_layers is \[0\]; only \[\] is served"),
        ("talker_config.text_config.hidden_act", "gelu", "hidden_act is 'gelu'; only 'silu' is served"),
        ("thinker_config.text_config.rope_scaling.mrope_section", [6, 5, 4], "must be three numbers that sum to 16"),
        ("thinker_config.text_config.rope_scaling.rope_type", "yarn", "rope_type is 'yarn'; only 'default' is served"),
        ("talker_config.accept_hidden_layer", 6, "accept_hidden_layer must be between 1 and 5, is 6"),
        ("model_type", "qwen2_5_omni", "model_type is 'qwen2_5_omni'; only 'qwen3_omni_moe' is served"),
        ("dtype", "int8", "dtype is 'int8'; only 'float32', 'bfloat16' and 'float16' are served"),
        ("thinker_config.audio_config.n_window", 0, "n_window is 0; only 50 is served"),
        ("thinker_config.audio_config.n_window", 100, "n_window is 100; only 50 is served"),
        ("thinker_config.text_config.rope_scaling.mrope_section", [-1, 9, 8], "must be three numbers that sum to 16"),
        ("talker_config.num_code_groups", 8, "talker_config.num_code_groups is 8, .*; make them equal"),
        ("talker_config.code_predictor_config.num_code_groups", 8, "num_code_groups is 8, .*; make them equal"),
        ("code2wav_config.num_quantizers", 8, "code2wav_config.num_quantizers is 8; make them equal"),
        (
            "talker_config.speaker_id",
            {"Ethan": 5, "ethan": 6},
            r"talker_config\.speaker_id has 'Ethan' and 'ethan'; names must differ in lower case too",
        ),
    ],
)
def test_a_value_that_cannot_be_served_is_named(data, key, value, message):
    with pytest.raises(CheckpointError, match=message):
        OmniConfig.parse(with_value(data, key, value))


THINKER, TALKER = "thinker_config.text_config", "talker_config.text_config"
AUDIO, PREDICTOR = "thinker_config.audio_config", "talker_config.code_predictor_config"


@pytest.mark.parametrize(
    ("key", "value", "bounds"),
    [
        (f"{THINKER}.num_hidden_layers", 0, "be at least 1"),
        (f"{THINKER}.num_hidden_layers", 1, "be at least 2 where there is a talker"),
        (f"{THINKER}.vocab_size", 0, "be at least 1"),
        (f"{THINKER}.num_attention_heads", 0, "be at least 1"),
        (f"{THINKER}.num_key_value_heads", 3, "divide num_attention_heads (4)"),
        (f"{THINKER}.max_position_embeddings", 0, "be at least 1"),
        (f"{TALKER}.max_position_embeddings", -5, "be at least 1"),
        (f"{TALKER}.shared_expert_intermediate_size", -1, "be at least 0"),
        (f"{THINKER}.num_experts", 0, "be at least 1"),
        (f"{THINKER}.num_experts_per_tok", 0, "be from 1 to 16"),
        (f"{THINKER}.num_experts_per_tok", 17, "be from 1 to 16"),
        (f"{TALKER}.num_experts_per_tok", 9, "be from 1 to 8"),
        (f"{THINKER}.rope_theta", 0.0, "be above 0"),
        (f"{PREDICTOR}.rope_theta", -1.0, "be above 0"),
        ("code2wav_config.rope_theta", 0.0, "be above 0"),
        (f"{THINKER}.rope_theta", float("inf"), "be a finite number"),
        (f"{THINKER}.rms_norm_eps", float("nan"), "be a finite number"),
        (f"{THINKER}.rms_norm_eps", -1e-6, "be at least 0"),
        (f"{TALKER}.rms_norm_eps", -1e-6, "be at least 0"),
        (f"{PREDICTOR}.rms_norm_eps", -1e-6, "be at least 0"),
        ("code2wav_config.rms_norm_eps", -1e-5, "be at least 0"),
        (f"{AUDIO}.n_window_infer", 0, "be at least 100"),
        (f"{AUDIO}.n_window_infer", 99, "be at least 100"),
        (f"{AUDIO}.encoder_attention_heads", 0, "be at least 1"),
        (f"{AUDIO}.encoder_attention_heads", 5, "divide d_model (48)"),
        (f"{PREDICTOR}.num_code_groups", 1, "be at least 2"),
        ("code2wav_config.num_attention_heads", 0, "be at least 1"),
        ("code2wav_config.num_attention_heads", 5, "divide half of hidden_size (16)"),
        ("code2wav_config.num_attention_heads", 32, "divide half of hidden_size (16)"),
        ("code2wav_config.sliding_window", 0, "be at least 1"),
        ("code2wav_config.sliding_window", -8, "be at least 1"),
        ("code2wav_config.upsample_rates", [8, 0], "be whole numbers of at least 1"),
        ("code2wav_config.upsample_rates", [8, 10**25], "be whole numbers of at most 2147483647"),
        (f"{THINKER}.num_hidden_layers", 2**31, "be at most 512"),
        (f"{TALKER}.num_hidden_layers", 513, "be at most 512"),
        (f"{PREDICTOR}.num_hidden_layers", 513, "be at most 512"),
        ("code2wav_config.num_hidden_layers", 513, "be at most 512"),
        (f"{AUDIO}.encoder_layers", 513, "be at most 512"),
        ("thinker_config.vision_config.depth", 513, "be at most 512"),
        ("thinker_config.vision_config.depth", -1, "be at least 0"),
        (f"{THINKER}.num_experts", 1025, "be at most 1024"),
        (f"{TALKER}.num_experts", 1025, "be at most 1024"),
        (f"{PREDICTOR}.num_code_groups", 257, "be at most 256"),
        ("code2wav_config.sliding_window", 10**11, "be at most 4096"),
        (f"{THINKER}.max_position_embeddings", 2**24 + 1, "be at most 16777216"),
        (f"{TALKER}.max_position_embeddings", 2**24 + 1, "be at most 16777216"),
        (f"{THINKER}.max_position_embeddings", 10**25, "be at most 16777216"),
        (f"{AUDIO}.n_window_infer", 10**25, "be at most 2147483647"),
        (f"{THINKER}.vocab_size", 2**31, "be at most 2147483647"),
    ],
)
def test_a_number_out_of_bounds_is_named_with_them(data: dict, key: str, value: object, bounds: str):
    with pytest.raises(CheckpointError) as refused:
        OmniConfig.parse(with_value(data, key, value))
    assert str(refused.value) == f"config.json: {key} must {bounds}, is {value}"


def test_the_built_in_released_shapes_are_in_bounds():
    assert OmniConfig.parse(released_config()).has_talker


ROOT_IDS = [f"{word}_token_id" for word in ("im_start", "im_end", "tts_pad", "tts_bos", "tts_eos")]
ROOT_IDS += [f"{word}_token_id" for word in ("system", "user", "assistant")]
MEDIA_IDS = ("audio", "audio_start", "audio_end", "image", "video", "vision_start", "vision_end")


@pytest.mark.parametrize("key", [*ROOT_IDS, *(f"thinker_config.{word}_token_id" for word in MEDIA_IDS)])
@pytest.mark.parametrize("value", [-1, 512, 10**6])
def test_a_special_id_outside_the_thinkers_vocabulary_is_named_with_the_file(
    data: dict, tmp_path: Path, key: str, value: int
):
    (tmp_path / "config.json").write_text(json.dumps(with_value(data, key, value)))
    with pytest.raises(CheckpointError) as refused:
        OmniConfig.load(tmp_path)
    assert str(refused.value) == f"{tmp_path / 'config.json'}: {key} must be from 0 to 511, is {value}"


def test_a_model_that_makes_text_only_needs_no_talker(data):
    silent = {key: value for key, value in data.items() if key not in ("talker_config", "code2wav_config")}
    config = OmniConfig.parse({**silent, "enable_audio_output": False})
    assert (config.talker, config.predictor, config.code2wav, config.speakers) == (None, None, None, {})
    assert not config.has_talker


def test_voices_are_kept_in_lower_case(data):
    assert OmniConfig.parse(with_value(data, "talker_config.speaker_id", {"Ethan": 5})).speakers == {"ethan": 5}


def test_a_folder_without_config_and_a_config_that_is_no_json_are_told_apart(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        OmniConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        OmniConfig.load(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold an object"):
        OmniConfig.load(tmp_path)


def test_a_config_that_is_not_utf8_nested_too_deep_or_a_folder_is_named(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CheckpointError, match=r"config.json is not JSON: 'utf-8' codec"):
        OmniConfig.load(tmp_path)
    path.write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(CheckpointError, match=r"config.json can't be read: its brackets are nested too deep"):
        OmniConfig.load(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"config.json can't be read: Is a directory"):
        OmniConfig.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("codec_eos_token_id", -1, "must be from 0 to"),
        ("codec_bos_id", 999_999, "must be from 0 to"),
        ("speaker_id", {"zed": 99_999}, r"speaker_id\.zed must be from 0 to"),
        ("speaker_id", {}, "speaker_id is empty; name at least one"),
    ],
)
def test_a_special_id_outside_the_talkers_vocabulary_is_named_with_the_file(
    data: dict, tmp_path: Path, key: str, value: object, words: str
):
    (tmp_path / "config.json").write_text(json.dumps(with_value(data, f"talker_config.{key}", value)))
    with pytest.raises(CheckpointError, match=words) as refused:
        OmniConfig.load(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / 'config.json'}: talker_config.{key}")
