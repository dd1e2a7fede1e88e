"""Hugging Face's own model of a folder, loaded and driven as the tests that compare with it need."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.model.config import SpecialIds

NEWLINE = 10  # the byte; its id in the small checkpoint's tokenizer


@functools.lru_cache(maxsize=1)
def load_hf(folder: Path) -> Any:
    """Load the whole model of `folder` in float32 with eager attention, which has one defined order of operations."""
    from transformers import Qwen3OmniMoeForConditionalGeneration
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def chat(ids: SpecialIds, *turns: tuple[str, Sequence[int]]) -> list[int]:
    """Ids of a prompt in ChatML: each turn's role and content, then the header of the answer."""
    out: list[int] = []
    for role, content in turns:
        out += [ids.im_start, getattr(ids, role), NEWLINE, *content, ids.im_end, NEWLINE]
    return [*out, ids.im_start, ids.assistant, NEWLINE]


def clip(ids: SpecialIds, tokens: int) -> list[int]:
    """Ids of one audio clip of `tokens` rows inside a turn."""
    return [ids.audio_start, *[ids.audio] * tokens, ids.audio_end]


@dataclass(frozen=True, slots=True)
class Reference:
    """What `generate` of Hugging Face gave: text ids, layer-0 ids (with the one that ended them), frames, samples.

    `talker_inputs` are the arguments its Talker was called with.
    """

    token_ids: list[int]
    layer0: list[int]
    frames: list[list[int]]
    pcm: Tensor
    talker_inputs: dict[str, Any]


def hf_generate(
    model: Any, prompt_ids: Sequence[int], mels: Sequence[Tensor], max_tokens: int, max_frames: int
) -> Reference:
    """Run a greedy request with speech. The Talker's last token never becomes a frame, hence one more than `max_frames`."""
    inputs: dict[str, Tensor] = {"input_ids": torch.tensor([prompt_ids])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if mels:
        longest = max(mel.shape[1] for mel in mels)
        inputs["input_features"] = torch.stack(
            [torch.nn.functional.pad(mel, (0, longest - mel.shape[1])) for mel in mels]
        )
        inputs["feature_attention_mask"] = torch.tensor(
            [[int(at < mel.shape[1]) for at in range(longest)] for mel in mels]
        )
    model.talker.rope_deltas = model.thinker.model.rope_deltas = None
    with _spied(model.talker) as calls, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the penalty skips the prompt, which is what is wanted
        sequences, pcm = model.generate(
            **inputs,
            speaker="Ethan",
            thinker_max_new_tokens=max_tokens,
            thinker_eos_token_id=model.config.im_end_token_id,
            talker_max_new_tokens=max_frames + 1,
            talker_do_sample=False,
        )
    result = calls.result
    frames = [states[-1][0].tolist() for states in result.hidden_states if states[-1] is not None]
    return Reference(
        sequences[0, len(prompt_ids) :].tolist(), result.sequences[0].tolist(), frames, pcm[0, 0], calls.arguments
    )


class _spied:
    """Notes the arguments and the result of the Talker's `generate` while it is entered."""

    def __init__(self, talker: Any) -> None:
        self.talker, self.arguments, self.result = talker, {}, None

    def __enter__(self) -> _spied:
        original = self.talker.generate

        def generate(**arguments: Any) -> Any:
            self.arguments = arguments
            self.result = original(**arguments)
            return self.result

        self.talker.generate = generate
        return self

    def __exit__(self, *error: object) -> None:
        del self.talker.generate
