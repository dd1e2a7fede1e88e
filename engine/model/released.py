"""A folder with the released 30B-A3B shapes and no tensors, for `--load-format dummy`: everything but what was trained.

Its tokenizer knows single bytes, the role words and the special tokens, at their released ids, so prompts and markers mean what
they mean to the released model; the other 151,000 ids have no text.
"""

from __future__ import annotations

from pathlib import Path

from engine.model.tiny import (
    SPECIALS,
    WHOLE_WORDS,
    byte_letters,
    generation,
    plain_layers,
    preprocessor,
    role_merges,
    tokenizer_config,
    tokenizer_json,
    write_texts,
)

# Ids of the released tokenizer: the special tokens, and the words that name a turn's speaker.
SPECIAL_IDS = dict(zip(SPECIALS, [151643, 151644, 151645, *range(151652, 151657), *range(151667, 151676)], strict=True))
WORD_IDS = {"system": 8948, "user": 872, "assistant": 77091}
# Parts of the role words; the released ids of single letters and pairs are others, and nothing asks for them.
_PARTS_FROM = 1000


def _vocab() -> dict[str, int]:
    """Bytes in the order of the released tokenizer (those that print first), then what the role words are merged from."""
    letters = byte_letters()
    printing = [byte for byte in range(256) if letters[byte] == chr(byte)]
    others = [byte for byte in range(256) if letters[byte] != chr(byte)]
    vocab = {letters[byte]: index for index, byte in enumerate([*printing, *others])}
    for place, (left, right) in enumerate(role_merges()):
        word = left + right
        vocab.setdefault(word, WORD_IDS[word] if word in WHOLE_WORDS else _PARTS_FROM + place)
    return vocab


def _experts(heads: int, kv_heads: int) -> dict[str, object]:
    return {
        **plain_layers(heads, kv_heads, 1000000.0),
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "max_position_embeddings": 65536,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_experts": 128,
        "rope_scaling": {
            "rope_type": "default",
            "type": "default",
            "interleaved": True,
            "mrope_section": [24, 20, 20],
        },
    }


_MEDIA: dict[str, object] = {
    "audio_token_id": 151675,
    "audio_start_token_id": 151669,
    "audio_end_token_id": 151670,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "position_id_per_seconds": 13,
    "seconds_per_chunk": 2,
}


def _thinker() -> dict[str, object]:
    text = {
        **_experts(32, 4),
        "model_type": "qwen3_omni_moe_text",
        "vocab_size": 152064,
        "hidden_size": 2048,
        "intermediate_size": 768,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_experts_per_tok": 8,
        "shared_expert_intermediate_size": 0,
        "use_qk_norm": True,
    }
    audio = {
        "model_type": "qwen3_omni_moe_audio_encoder",
        "activation_function": "gelu",
        "conv_chunksize": 500,
        "d_model": 1280,
        "downsample_hidden_size": 480,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "encoder_layers": 32,
        "max_source_positions": 1500,
        "n_window": 50,
        "n_window_infer": 800,
        "num_mel_bins": 128,
        "output_dim": 2048,
        "scale_embedding": False,
    }
    vision = {
        "model_type": "qwen3_omni_moe_vision_encoder",
        "deepstack_visual_indexes": [8, 16, 24],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    return {
        **_MEDIA,
        "model_type": "qwen3_omni_moe_thinker",
        "user_token_id": WORD_IDS["user"],
        "audio_config": audio,
        "text_config": text,
        "vision_config": vision,
    }


def _talker() -> dict[str, object]:
    text = {
        **_experts(16, 2),
        "model_type": "qwen3_omni_moe_talker_text",
        "vocab_size": 3072,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 20,
        "num_experts_per_tok": 6,
        "shared_expert_intermediate_size": 768,
    }
    predictor = {
        **plain_layers(16, 8, 1000000.0),
        "model_type": "qwen3_omni_moe_talker_code_predictor",
        "head_dim": 128,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 32768,
        "num_code_groups": 16,
        "num_hidden_layers": 5,
        "sliding_window": None,
        "vocab_size": 2048,
    }
    return {
        **_MEDIA,
        "accept_hidden_layer": 24,
        "codec_pad_id": 2148,
        "codec_bos_id": 2149,
        "codec_eos_token_id": 2150,
        "codec_nothink_id": 2155,
        "codec_think_bos_id": 2156,
        "codec_think_eos_id": 2157,
        "num_code_groups": 16,
        "output_router_logits": False,
        "spatial_merge_size": 2,
        "speaker_id": {"chelsie": 2301, "ethan": 2302, "aiden": 2303},
        "thinker_hidden_size": 2048,
        "code_predictor_config": predictor,
        "text_config": text,
    }


def _code2wav() -> dict[str, object]:
    return {
        **plain_layers(16, 16, 10000.0),
        "codebook_size": 2048,
        "decoder_dim": 1536,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "layer_scale_initial_scale": 0.01,
        "max_position_embeddings": 8000,
        "num_hidden_layers": 8,
        "num_quantizers": 16,
        "rms_norm_eps": 1e-5,
        "sliding_window": 72,
        "upsample_rates": [8, 5, 4, 3],
        "upsampling_ratios": [2, 2],
    }


def released_config() -> dict[str, object]:
    """The content of the released `config.json`, as far as the engine reads it."""
    return {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
        "model_type": "qwen3_omni_moe",
        "dtype": "bfloat16",
        "enable_audio_output": True,
        "im_start_token_id": SPECIAL_IDS["<|im_start|>"],
        "im_end_token_id": SPECIAL_IDS["<|im_end|>"],
        "system_token_id": WORD_IDS["system"],
        "user_token_id": WORD_IDS["user"],
        "assistant_token_id": WORD_IDS["assistant"],
        "tts_pad_token_id": SPECIAL_IDS["<tts_pad>"],
        "tts_bos_token_id": SPECIAL_IDS["<tts_text_bos>"],
        "tts_eos_token_id": SPECIAL_IDS["<tts_text_eod>"],
        "thinker_config": _thinker(),
        "talker_config": _talker(),
        "code2wav_config": _code2wav(),
    }


def write_released(folder: Path) -> None:
    """Write config, tokenizer, template and audio settings into `folder`, which is made if need be."""
    write_texts(
        folder,
        {
            "config.json": released_config(),
            "tokenizer.json": tokenizer_json(_vocab() | SPECIAL_IDS, role_merges(), SPECIAL_IDS),
            "tokenizer_config.json": tokenizer_config(),
            "preprocessor_config.json": preprocessor(),
            "generation_config.json": generation(SPECIAL_IDS),
        },
    )
