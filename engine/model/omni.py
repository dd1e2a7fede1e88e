"""A whole model, loaded: every component over one table of operations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.kernels import Ops, ops_for
from engine.model.audio_encoder import AudioEncoder
from engine.model.code2wav import Code2Wav
from engine.model.config import OmniConfig
from engine.model.talker import Talker
from engine.model.thinker import Thinker
from engine.model.weights import dummy_digest, dummy_weights, load_weights, weights_digest

# Frames of 80 ms that the vocoder takes at once: the size of its one compiled or tuned shape.
CHUNK_FRAMES = 4


@dataclass(frozen=True)
class OmniModel:
    """The components of a checkpoint. `talker` and `code2wav` are None when it makes text only."""

    config: OmniConfig
    ops: Ops
    thinker: Thinker
    audio_encoder: AudioEncoder
    talker: Talker | None
    code2wav: Code2Wav | None
    weights_digest: str


def load_model(
    folder: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    chunk_frames: int = CHUNK_FRAMES,
    dummy: bool = False,
) -> OmniModel:
    """Load a model folder in `dtype` on `device`; the vocoder works `chunk_frames` frames at a time.

    `dummy` draws the weights instead of reading them, so that the folder needs no tensors.

    Raises CheckpointError when config or tensors do not fit, ValueError for a device without operations. Tensors keep the
    shapes that `engine.model.weights` lists.
    """
    config = OmniConfig.load(folder)
    ops = ops_for(device)
    weights = dummy_weights(config, dtype, device) if dummy else load_weights(folder, config, dtype, device)
    thinker = Thinker(config, weights, ops)
    speaks = config.has_talker
    return OmniModel(
        config=config,
        ops=ops,
        thinker=thinker,
        audio_encoder=AudioEncoder(config, weights, ops),
        talker=Talker(config, weights, ops, thinker.embedding) if speaks else None,
        code2wav=Code2Wav(config, weights, ops, chunk_frames) if speaks else None,
        weights_digest=dummy_digest(folder) if dummy else weights_digest(folder),
    )
