"""The sizes of the small trained model, as a `config.json` in the released spelling. No torch, no tensors of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping

from engine.model.config import OmniConfig
from engine.model.tiny import NUM_BYTES, SPECIALS, WHOLE_WORDS, config_json
from engine.model.weights import expected_tensors

VOCAB = 2048
CODES = 64
# The Thinker's width, which the encoders' outputs and the Talker's projections share.
HIDDEN = 192
MAX_BYTES = 12_000_000
# What tokenizer, card and the other text files may take of it.
TEXT_BYTES = 300_000

# Where this model differs from the one with random weights, by the place in `config.json`.
_SIZES: dict[str, object] = {
    "dtype": "bfloat16",
    "thinker_config": {
        "text_config": {
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "num_attention_heads": 6,
            "num_hidden_layers": 5,
            "num_experts": 8,
            # Half of the narrow experts run for a token: few parameters are to spare, and arithmetic is not what is short.
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 48,
        },
        "audio_config": {
            "d_model": 192,
            "downsample_hidden_size": 32,
            "encoder_ffn_dim": 320,
            "encoder_layers": 4,
            "n_window_infer": 800,
            "output_dim": HIDDEN,
        },
        # Nothing trains it and the engine takes no images yet, so it is as small as its parts allow.
        "vision_config": {
            "depth": 3,
            "hidden_size": 8,
            "intermediate_size": 16,
            "num_heads": 1,
            "num_position_embeddings": 16,
            "out_hidden_size": HIDDEN,
        },
    },
    "talker_config": {
        "accept_hidden_layer": 3,
        "thinker_hidden_size": HIDDEN,
        "text_config": {
            "vocab_size": CODES + 1024,
            "hidden_size": 128,
            "intermediate_size": 128,
            "moe_intermediate_size": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 5,
            "shared_expert_intermediate_size": 32,
        },
        # The groups are foreseen one by one from the Talker's row, so what is hard is the Talker's work.
        "code_predictor_config": {
            "hidden_size": 128,
            "intermediate_size": 160,
            "num_hidden_layers": 1,
            "vocab_size": CODES,
        },
    },
    "code2wav_config": {"codebook_size": CODES, "decoder_dim": 160, "hidden_size": 64, "intermediate_size": 128},
}


def token_ids() -> dict[str, int]:
    """Ids by token of the role words, which follow the bytes, and of the special tokens, which end the vocabulary."""
    roles = {word: NUM_BYTES + index for index, word in enumerate(WHOLE_WORDS)}
    first = VOCAB - len(SPECIALS)
    return roles | {content: first + index for index, content in enumerate(SPECIALS)}


def config() -> dict[str, object]:
    """The content of `config.json`; a new object on every call."""
    return _changed(config_json(token_ids()), _SIZES)


def parameters() -> dict[str, int]:
    """Count the parameters of each component: text, audio, vision, talker, predictor, code2wav."""
    counts: dict[str, int] = {}
    for name, shape in expected_tensors(OmniConfig.parse(config())).items():
        component = _component(name)
        counts[component] = counts.get(component, 0) + math.prod(shape)
    return counts


def _component(name: str) -> str:
    """Which component a tensor on disk belongs to."""
    inner = {
        "thinker.audio_tower": "audio",
        "thinker.visual": "vision",
        "thinker": "text",
        "talker.code_predictor": "predictor",
        "talker": "talker",
        "code2wav": "code2wav",
    }
    return next(component for prefix, component in inner.items() if name.startswith(f"{prefix}."))


def _changed(base: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """`base` with the values that `changes` names put in place; KeyError for a name that `base` lacks."""
    changed = dict(base)
    for key, value in changes.items():
        old = changed[key]
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            changed[key] = _changed(old, value)
        else:
            changed[key] = value
    return changed
