"""A small model folder made from a seed: the released layout in every file, random weights, the same bytes everywhere.

The released structure is kept whole (expert layers, shared expert, three-axis rope, both encoders, code predictor,
vocoder); only the sizes are small. Each tensor is drawn from a Philox generator keyed by the seed and the tensor's name, by
integer arithmetic and single float32 roundings, so that no library version changes a byte.

The usual initialisation (standard deviation 0.02) makes a model of this depth repeat one token for ever. The scales here keep
activations near 1, spread the router, and give output rows unequal lengths, so that greedy text varies and stays printable.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.model.config import OmniConfig
from engine.model.weights import expected_tensors

VOCAB = 512
CODES = 64
NUM_BYTES = 256
WHOLE_WORDS = ("system", "user", "assistant")
# Byte pairs, left|right with _ for a space, that LibriSpeech's development and test transcripts merge most often, in order.
PAIRS = """
_|t h|e _|a i|n _t|he _|s _|w _|o r|e n|d e|r _|h _|b _|m o|u i|s _|c a|t _|f i|t e|d e|n _a|nd _o|f o|n _t|o _|p in|g
_|d o|r _t|h e|s _|l a|n l|l _|in a|r _|n _|he _|g o|m _b|e l|e _|i _|e a|d o|t u|t o|w i|c v|e l|y _|y s|e s|t l|d
_w|h _w|as _th|at en|t _|it i|d g|h _|re _o|n i|m _|u a|l c|e i|on _y|ou e|t v|er i|r _h|is it|h a|y _f|or _|r _w|ith
_s|t _a|s u|r _w|e _|is t|er T|he gh|t _n|ot he|r a|c _h|a _a|n _h|ad o|o _he|r a|m ou|ld _m|e _a|t _s|e _|k r|i _s|h
a|in c|h _h|im '|s _s|u re|d r|o i|l i|ll c|t k|e i|ght a|ll es|s _b|ut _s|o _d|e _s|he _s|a _m|y _a|ll _c|h o|re p|p
_f|r _l|i _c|on q|u om|e ic|h _u|p u|l _n|e g|e _o|r _d|o _ha|ve es|t _|v _b|y _th|is _wh|ich ar|d a|nd t|h _e|x is|t
_the|y an|t _a|l _on|e _we|re b|le _w|he _|j ou|s _wh|o _fr|om er|s u|st re|s at|ion as|t _n|o _in|t f|e p|e ou|r _f|e
n|t _sa|id _m|an ver|y _a|re se|l _g|o _the|m ou|t _l|e oo|d at|e ar|t r|a H|e _o|ut o|l i|e _k|n _c|om in|d on|g m|p
_the|ir a|k _w|or _the|re _w|ill am|e o|s on|e _a|b _w|ould _be|en it|t
"""
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
# What a word is to the tokenizer: the split of Qwen2's tokenizers, as the released tokenizer.json spells it.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = """\
{%- macro part(item) -%}
{%- if item.type == 'text' -%}{{ item.text }}
{%- elif item.type == 'audio' -%}<|audio_start|><|audio_pad|><|audio_end|>
{%- elif item.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif item.type == 'video' -%}<|vision_start|><|video_pad|><|vision_end|>
{%- else -%}{{ raise_exception('a content part must be text, audio, image or video, not ' ~ item.type) }}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' }}
{%- if message.content is string -%}{{ message.content }}
{%- else -%}{%- for item in message.content -%}{{ part(item) }}{%- endfor -%}
{%- endif -%}
{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

# First match wins: pattern of the name on disk, mean, deviation, and whether the deviation shrinks with the root of fan-in.
SCALES: tuple[tuple[str, float, float, bool], ...] = (
    (r"(embed_tokens|codec_embedding(\.\d+)?|code_embedding|pos_embed)\.weight$", 0.0, 1.0, False),
    (r"mlp\.(gate|shared_expert_gate)\.weight$", 0.0, 3.0, True),
    (r"\.experts\.", 0.0, 1.5, True),
    (r"(norm|norm1|norm2|layernorm|_norm|ln_post|ln_q)\.weight$", 1.0, 0.1, False),
    (r"(\.scale|\.gamma)$", 0.3, 0.05, False),
    (r"(\.bias|\.alpha|\.beta)$", 0.0, 0.1, False),
    (r"(lm_head|codec_head|lm_head\.\d+)\.weight$", 0.0, 2.4, True),
    # Keeps the waveform off the clamp.
    (r"^code2wav\.decoder\..*conv\.weight$", 0.0, 0.66, True),
    (r"\.weight$", 0.0, 1.2, True),
)
# Rows of the text head that should hardly ever win: bytes that print nothing, roles, special tokens, rows without a token.
QUIET = 0.1
# One byte at a time reads worse than a merged pair, so single letters win less often.
SINGLE_BYTE = 0.6
# Length of the end-of-speech row: with it an utterance ends after a hundred frames or so.
CODEC_EOS = 0.9


def byte_letters() -> list[str]:
    """The printable stand-in of each byte in byte-level BPE: itself where it prints, else the next letter from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(spare)) for byte in range(NUM_BYTES)]


def role_merges() -> list[tuple[str, str]]:
    """The pairs that build the role words up, letter by letter."""
    return [(word[:end], word[end]) for word in WHOLE_WORDS for end in range(1, len(word))]


def _merges() -> list[tuple[str, str]]:
    """Pairs in order of rank. The role words come first, so that nothing can break them up."""
    space = byte_letters()[0x20]
    learned = []
    for pair in PAIRS.replace("_", space).split():
        left, right = pair.split("|")
        learned.append((left, right))
    return role_merges() + learned


def _tokens() -> list[str]:
    """Every token by id: bytes, merged pairs, special tokens."""
    return [*byte_letters(), *(left + right for left, right in _merges()), *SPECIALS]


def _tokenizer() -> dict[str, object]:
    """`tokenizer.json`: byte-level BPE whose first 256 ids are the bytes."""
    tokens = _tokens()
    base = len(tokens) - len(SPECIALS)
    specials = {content: base + index for index, content in enumerate(SPECIALS)}
    return tokenizer_json({token: index for index, token in enumerate(tokens[:base])}, _merges(), specials)


def tokenizer_json(vocab: dict[str, int], merges: list[tuple[str, str]], specials: dict[str, int]) -> dict[str, object]:
    """The content of `tokenizer.json` of a byte-level BPE: ids of tokens, pairs in order of rank, ids of special tokens."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": content, **plain, "special": "think" not in content}
            for content, index in specials.items()
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }


def tokenizer_config() -> dict[str, object]:
    """The content of `tokenizer_config.json`."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "model_max_length": 4096,
        "audio_bos_token": "<|audio_start|>",
        "audio_token": "<|audio_pad|>",
        "audio_eos_token": "<|audio_end|>",
        "vision_bos_token": "<|vision_start|>",
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_eos_token": "<|vision_end|>",
    }


def preprocessor() -> dict[str, object]:
    """The content of `preprocessor_config.json`."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "Qwen3OmniMoeProcessor",
        "feature_size": 128,
        "sampling_rate": 16000,
        "n_fft": 400,
        "hop_length": 160,
        "chunk_length": 300,
        "n_samples": 4800000,
        "nb_max_frames": 30000,
        "dither": 0.0,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
    }


def generation(ids: Mapping[str, int]) -> dict[str, object]:
    """The content of `generation_config.json`, given the ids of the special tokens."""
    return {
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "talker_do_sample": True,
        "talker_max_new_tokens": 4096,
        "talker_repetition_penalty": 1.05,
        "talker_temperature": 0.9,
        "talker_top_k": 50,
        "talker_top_p": 1.0,
    }


def plain_layers(heads: int, kv_heads: int, theta: float) -> dict[str, object]:
    """The keys of `config.json` that every stack of layers has."""
    return {
        "attention_bias": False,
        "hidden_act": "silu",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": theta,
    }


def _expert_layers() -> dict[str, object]:
    rope = {"rope_type": "default", "type": "default", "interleaved": True, "mrope_section": [6, 5, 5]}
    return {
        **plain_layers(4, 2, 1000000.0),
        "decoder_sparse_step": 1,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "rope_scaling": rope,
    }


def _thinker(media: dict[str, object], ids: Mapping[str, int]) -> dict[str, object]:
    text = {
        **_expert_layers(),
        "model_type": "qwen3_omni_moe_text",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "shared_expert_intermediate_size": 0,
        "use_qk_norm": True,
    }
    audio = {
        "model_type": "qwen3_omni_moe_audio_encoder",
        "activation_function": "gelu",
        "conv_chunksize": 500,
        "d_model": 48,
        "downsample_hidden_size": 16,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "encoder_layers": 2,
        "max_source_positions": 1500,
        "n_window": 50,
        "n_window_infer": 200,
        "num_mel_bins": 128,
        "output_dim": 64,
        "scale_embedding": False,
    }
    return {
        **media,
        "model_type": "qwen3_omni_moe_thinker",
        "user_token_id": ids["user"],
        "audio_config": audio,
        "text_config": text,
        "vision_config": _vision(),
    }


def _vision() -> dict[str, object]:
    return {
        "model_type": "qwen3_omni_moe_vision_encoder",
        "deepstack_visual_indexes": [0, 1, 2],
        "depth": 4,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 32,
        "in_channels": 3,
        "intermediate_size": 48,
        "num_heads": 2,
        "num_position_embeddings": 64,
        "out_hidden_size": 64,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _talker(media: dict[str, object]) -> dict[str, object]:
    text = {
        **_expert_layers(),
        "model_type": "qwen3_omni_moe_talker_text",
        # The top 1,024 ids are never sampled, so the vocabulary is that much larger than the codes.
        "vocab_size": CODES + 1024,
        "hidden_size": 48,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "shared_expert_intermediate_size": 40,
    }
    predictor = {
        **plain_layers(4, 2, 1000000.0),
        "model_type": "qwen3_omni_moe_talker_code_predictor",
        "head_dim": 32,
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 4096,
        "num_code_groups": 16,
        "num_hidden_layers": 2,
        "sliding_window": None,
        "vocab_size": CODES,
    }
    return {
        **media,
        "accept_hidden_layer": 4,
        "codec_pad_id": CODES + 100,
        "codec_bos_id": CODES + 101,
        "codec_eos_token_id": CODES + 102,
        "codec_nothink_id": CODES + 107,
        "codec_think_bos_id": CODES + 108,
        "codec_think_eos_id": CODES + 109,
        "num_code_groups": 16,
        "output_router_logits": False,
        "spatial_merge_size": 2,
        "speaker_id": {"chelsie": CODES + 253, "ethan": CODES + 254, "aiden": CODES + 255},
        "thinker_hidden_size": 64,
        "code_predictor_config": predictor,
        "text_config": text,
    }


def _code2wav() -> dict[str, object]:
    return {
        **plain_layers(4, 4, 10000.0),
        "codebook_size": CODES,
        "decoder_dim": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "num_hidden_layers": 2,
        "num_quantizers": 16,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }


def config_json(ids: Mapping[str, int]) -> dict[str, object]:
    """The content of `config.json` in the released spelling, given the ids of the special tokens and the role words."""
    media: dict[str, object] = {
        "audio_token_id": ids["<|audio_pad|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": "float32",
        "enable_audio_output": True,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "system_token_id": ids["system"],
        "user_token_id": ids["user"],
        "assistant_token_id": ids["assistant"],
        "tts_pad_token_id": ids["<tts_pad>"],
        "tts_bos_token_id": ids["<tts_text_bos>"],
        "tts_eos_token_id": ids["<tts_text_eod>"],
        "thinker_config": _thinker(media, ids),
        "talker_config": _talker(media),
        "code2wav_config": _code2wav(),
    }


def _normals(name: str, count: int, seed: int) -> NDArray[np.float32]:
    """`count` values of mean 0 and deviation 1: sums of twelve 16-bit uniforms, exact in float32."""
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    raw = np.random.Philox(key=key).random_raw(3 * count)
    # Twelve uniforms have variance 1, and 12 * 65535 / 2 = 393210 centres their sum.
    total = raw.astype("<u8").view("<u2").reshape(count, 12).sum(axis=1, dtype=np.int64) - 393210
    values: NDArray[np.float32] = total.astype(np.float32) * np.float32(2**-16)
    return values


def _row_lengths(name: str, rows: int, config: OmniConfig) -> NDArray[np.float32] | None:
    """Factors on the rows of an output head, None where all rows are alike."""
    lengths = np.ones(rows, dtype=np.float32)
    if name == "thinker.lm_head.weight":
        lengths[: NUM_BYTES + len(role_merges())] = QUIET
        lengths[0x20:0x7F] = SINGLE_BYTE
        lengths[len(_tokens()) - len(SPECIALS) :] = QUIET
        lengths[config.ids.im_end] = 1.0
        return lengths
    if name == "talker.codec_head.weight" and config.talker is not None:
        lengths[config.talker.codec.eos] = CODEC_EOS
        return lengths
    return None


def _tensor(name: str, shape: tuple[int, ...], config: OmniConfig, seed: int) -> NDArray[np.float32]:
    mean, deviation, shrinks = next(rule[1:] for rule in SCALES if re.search(rule[0], name))
    if shrinks:
        deviation /= math.sqrt(math.prod(shape[1:]))
    values = _normals(name, math.prod(shape), seed).reshape(shape) * np.float32(deviation) + np.float32(mean)
    lengths = _row_lengths(name, shape[0], config)
    return values if lengths is None else values * lengths[:, None]


def _safetensors(tensors: dict[str, NDArray[np.float32]]) -> bytes:
    """The file format, written out here because a library may order or pad it differently in another version."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, values in sorted(tensors.items()):
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [offset, offset + values.nbytes]}
        offset += values.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(values.astype("<f4").tobytes() for _, values in sorted(tensors.items()))
    return len(text).to_bytes(8, "little") + text + body


def write_texts(folder: Path, files: dict[str, dict[str, object]]) -> None:
    """Write JSON files and the chat template into `folder`, which is made if need be; the same bytes on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8", newline="\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8", newline="\n")


def write_tiny(folder: Path, *, seed: int = 0) -> None:
    """Write the small model into `folder`, which is made if need be; another `seed` gives other weights of the same shapes."""
    ids = {token: index for index, token in enumerate(_tokens())}
    data = config_json(ids)
    config = OmniConfig.parse(data)
    tensors = {name: _tensor(name, shape, config, seed) for name, shape in expected_tensors(config).items()}
    files: dict[str, dict[str, object]] = {
        "config.json": data,
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": tokenizer_config(),
        "preprocessor_config.json": preprocessor(),
        "generation_config.json": generation(ids),
    }
    write_texts(folder, files)
    (folder / "model.safetensors").write_bytes(_safetensors(tensors))
