"""The trained model as a folder in the released layout: tensors in bfloat16, tokenizer, template and generation defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from engine.model.config import OmniConfig
from engine.model.tiny import generation, preprocessor, tokenizer_config, write_texts
from engine.model.weights import expected_tensors
from engine.tiny.shapes import MAX_BYTES, config, token_ids

VISION = "thinker.visual."
# Its likeliest answer is its best one. A draw adds noise to speech, which is a mean, and a penalty on codes shifts it.
GREEDY = {"do_sample": False, "talker_do_sample": False, "talker_repetition_penalty": 1.0}


def write_trained(folder: Path, tensors: Mapping[str, Tensor], tokenizer: dict[str, object]) -> int:
    """Write the model of these trained `tensors`, by released name, into `folder`; returns the bytes of all its files.

    The vision tower, which nothing trains or reads, is filled with small numbers. ValueError for a tensor that is missing, of
    another shape or of no name that there is, and for a folder that would be larger than MAX_BYTES.
    """
    data = config()
    shapes = expected_tensors(OmniConfig.parse(data))
    wanted = {name for name in shapes if not name.startswith(VISION)}
    if faults := sorted(wanted ^ tensors.keys()):
        raise ValueError(f"{len(faults)} tensors are missing or unknown, such as {faults[0]}")
    for name in sorted(wanted):
        if tuple(tensors[name].shape) != shapes[name]:
            raise ValueError(f"{name} is {list(tensors[name].shape)}, must be {list(shapes[name])}")
    files: dict[str, dict[str, object]] = {
        "config.json": data,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": tokenizer_config(),
        "preprocessor_config.json": preprocessor(),
        "generation_config.json": generation(token_ids()) | GREEDY,
    }
    write_texts(folder, files)
    whole = {**_vision(shapes), **tensors}
    rounded = {name: whole[name].detach().to("cpu", torch.bfloat16).contiguous() for name in sorted(whole)}
    # What `save_file` writes nobody else may read.
    (folder / "model.safetensors").write_bytes(save(rounded, metadata={"format": "pt"}))
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MAX_BYTES:
        raise ValueError(f"{folder} has {size} bytes, at most {MAX_BYTES} may be shipped")
    return size


def _vision(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=draw) * 0.02 if len(shape) > 1 else torch.ones(shape)
        for name, shape in shapes.items()
        if name.startswith(VISION)
    }
