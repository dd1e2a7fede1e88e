"""The small checkpoint: the same bytes everywhere, a tokenizer that works, and output that varies."""

import hashlib
import json
import math
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from engine.kernels import Segment, make_plan, ops_for
from engine.model import tiny
from engine.model.config import OmniConfig
from engine.model.thinker import Thinker
from engine.model.tiny import write_tiny
from engine.model.weights import expected_tensors, load_weights

QUESTIONS = (
    "What is rain?",
    "Tell me a story.",
    "Name three rivers.",
    "How far is the moon?",
    "Write a poem about bread.",
    "Why do cats purr?",
    "Explain gravity.",
    "List the planets.",
    "Who wrote Hamlet?",
    "Count to ten.",
    "Is water wet?",
    "Say hello.",
    "What time is it?",
    "Sing to me.",
    "Translate this into French.",
    "Describe a forest in autumn.",
)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


def chat(tokenizer, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return tokenizer(text)["input_ids"]


@torch.inference_mode()
def greedy(thinker: Thinker, prompt: list[int], count: int) -> list[int]:
    keys, values = torch.zeros(2, thinker.layers, 8, 16, thinker.kv_heads, thinker.head_dim)
    made: list[int] = []
    ids, at = prompt, 0
    while len(made) < count:
        places = torch.arange(at, at + len(ids)).float().expand(3, -1)
        plan = make_plan([Segment(0, len(ids), at, tuple(range(8)))], places, 16, "cpu")
        hidden, _ = thinker.forward(thinker.embed(torch.tensor(ids)), plan, keys, values, states=False)
        at += len(ids)
        ids = [int(thinker.logits(hidden[-1:]).argmax())]
        made += ids
    return made


def test_the_files_have_the_same_bytes_on_every_machine_and_version(tiny_checkpoint):
    # A change here moves every golden token: say why in the commit.
    digests = {
        name: hashlib.sha256((tiny_checkpoint / name).read_bytes()).hexdigest()
        for name in ("config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja")
    }
    assert digests == {
        "config.json": "143095f0fdd3ef551487eb0934f1f69e82e0faeae5433fc78a036888bf184396",
        "model.safetensors": "7977fa8c6fc37138afcf60850637314166a7b99620ff786ba671c761a5fe5746",
        "tokenizer.json": "ccc77a0cd58d18c8d6fc37e327523ec551196901a6b2044adab93b6b1b531e9d",
        "chat_template.jinja": "2b3e62e1c632e0c5da1f17a174a54e8892ab98ab6f24332d721b14a4c170dc8c",
    }


def test_the_folder_is_written_in_seconds_with_1868885_parameters_in_804_tensors(tmp_path):
    begin = time.monotonic()
    write_tiny(tmp_path / "new" / "folder")
    assert time.monotonic() - begin < 5
    shapes = expected_tensors(OmniConfig.load(tmp_path / "new" / "folder"))
    assert (len(shapes), sum(math.prod(shape) for shape in shapes.values())) == (804, 1_868_885)
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_another_seed_gives_other_weights_of_the_same_names_and_shapes(tiny_checkpoint, tmp_path):
    write_tiny(tmp_path, seed=1)
    first, second = (load_file(folder / "model.safetensors") for folder in (tiny_checkpoint, tmp_path))
    assert {name: tensor.shape for name, tensor in first.items()} == {name: t.shape for name, t in second.items()}
    assert [name for name, tensor in first.items() if torch.equal(tensor, second[name])] == []
    assert (tmp_path / "config.json").read_bytes() == (tiny_checkpoint / "config.json").read_bytes()


def test_a_tensor_depends_on_its_name_and_the_seed_only():
    first = tiny._normals("a.weight", 4, seed=0)
    assert first.tolist() == [-1.295257568359375, -1.1497802734375, -1.206573486328125, -1.3032379150390625]
    assert tiny._normals("a.weight", 1000, seed=0)[:4].tolist() == first.tolist()
    assert tiny._normals("b.weight", 4, seed=0).tolist() != first.tolist()
    many = tiny._normals("a.weight", 100_000, seed=0)
    assert many.dtype == np.float32
    assert abs(float(many.mean())) < 0.01
    assert abs(float(many.std()) - 1) < 0.01


def test_every_tensor_is_drawn_around_the_mean_that_its_kind_needs(tiny_checkpoint):
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    norms = [name for name in tensors if name.endswith(".weight") and ("norm" in name or "ln_" in name)]
    assert len(norms) > 40
    for name in norms:
        assert 0.9 < float(tensors[name].mean()) < 1.1, name
    assert 0.28 < float(tensors["code2wav.pre_transformer.layers.0.mlp_layer_scale.scale"].mean()) < 0.32
    assert 0.9 < float(tensors["thinker.model.embed_tokens.weight"].std()) < 1.1
    assert 0.17 < float(tensors["thinker.model.layers.0.mlp.experts.0.up_proj.weight"].std()) < 0.21
    assert float(tensors["thinker.lm_head.weight"][497:].std()) < 0.05


def test_bytes_are_the_first_256_tokens_and_roles_and_special_tokens_are_single_ones(tokenizer, tiny_checkpoint):
    ids = OmniConfig.load(tiny_checkpoint).ids
    assert tokenizer("\n~ ")["input_ids"] == [10, 126, 32]
    assert tokenizer("é")["input_ids"] == [0xC3, 0xA9]
    assert [tokenizer(word)["input_ids"] for word in ("system", "user", "assistant")] == [
        [ids.system],
        [ids.user],
        [ids.assistant],
    ]
    assert (ids.system, ids.user, ids.assistant) == (260, 263, 271)
    special = {
        "<|im_start|>": ids.im_start,
        "<|im_end|>": ids.im_end,
        "<|audio_start|>": ids.audio_start,
        "<|audio_pad|>": ids.audio,
        "<|audio_end|>": ids.audio_end,
        "<|vision_start|>": ids.vision_start,
        "<|image_pad|>": ids.image,
        "<|video_pad|>": ids.video,
        "<tts_pad>": ids.tts_pad,
        "<tts_text_bos>": ids.tts_bos,
        "<tts_text_eod>": ids.tts_eos,
    }
    for token, index in special.items():
        assert tokenizer(f"a{token}b")["input_ids"] == [97, index, 98], token
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (ids.im_end, tokenizer("<|endoftext|>")["input_ids"][0])
    assert max(tokenizer.get_vocab().values()) == 496 and len(tokenizer.get_vocab()) == 497


@pytest.mark.parametrize(
    "text", ["The rain is over.", "  two  spaces\n\n\ttab", "naïve 12345 – 漢字 🙂", "don't I'll\r\n"]
)
def test_any_text_comes_back_from_its_tokens(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert max(ids) < 480
    assert tokenizer.decode(ids) == text


def test_the_chat_template_lays_turns_and_media_out_in_order(tokenizer):
    turns = [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [
                {"type": "audio"},
                {"type": "image"},
                {"type": "video"},
                {"type": "text", "text": " What\nis it? "},
            ],
        },
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Sure?"},
    ]
    assert tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|vision_start|><|image_pad|><|vision_end|>"
        "<|vision_start|><|video_pad|><|vision_end|> What\nis it? <|im_end|>\n"
        "<|im_start|>assistant\nRain.<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.apply_chat_template(turns[3:], tokenize=False) == "<|im_start|>user\nSure?<|im_end|>\n"


def test_the_feature_extractor_is_the_released_one(tiny_checkpoint):
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor.from_pretrained(tiny_checkpoint)
    assert (extractor.feature_size, extractor.sampling_rate, extractor.hop_length, extractor.n_fft) == (
        128,
        16000,
        160,
        400,
    )


def test_greedy_text_varies_over_prompts_and_steps_is_printable_and_rarely_ends(tokenizer, tiny_checkpoint):
    config = OmniConfig.load(tiny_checkpoint)
    thinker = Thinker(config, load_weights(tiny_checkpoint, config), ops_for("cpu"))
    answers = [greedy(thinker, chat(tokenizer, question), 32) for question in QUESTIONS]
    assert len({answer[0] for answer in answers}) >= 12
    assert len({tuple(answer) for answer in answers}) == 16
    assert min(len(set(answer)) for answer in answers) >= 16
    tokens = [token for answer in answers for token in answer]
    assert tokens.count(config.ids.im_end) <= 16
    # It is reachable, though.
    assert greedy(thinker, chat(tokenizer, "List the planets"), 3)[-1] == config.ids.im_end
    assert [token for token in tokens if token >= 480 and token != config.ids.im_end] == []
    text = tokenizer.decode([token for token in tokens if token != config.ids.im_end])
    assert all(character.isprintable() or character == "\n" for character in text)


def test_the_header_of_the_tensor_file_is_sorted_and_holds_nothing_that_varies(tiny_checkpoint):
    raw = (tiny_checkpoint / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    assert header.pop("__metadata__") == {"format": "pt"}
    assert list(header) == sorted(header)
    assert size % 8 == 0 and len(raw) == 8 + size + 4 * 1_868_885
