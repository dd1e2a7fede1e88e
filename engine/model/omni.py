"""A whole model, loaded: every component over one table of operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from engine.kernels import KernelOptions, Ops, ops_for
from engine.model.audio_batch import BatchedAudioEncoder
from engine.model.audio_encoder import AudioEncoder
from engine.model.code2wav import Code2Wav
from engine.model.config import OmniConfig
from engine.model.talker import Talker
from engine.model.thinker import Thinker
from engine.model.weights import Weights, dummy_digest, dummy_weights, load_weights, weights_digest

# Frames of 80 ms that the vocoder takes at once: the size of its one compiled or tuned shape.
CHUNK_FRAMES = 4


@dataclass(frozen=True)
class OmniModel:
    """The components of a checkpoint over its `weights`. `talker` and `code2wav` are None when it makes text only."""

    config: OmniConfig
    ops: Ops
    thinker: Thinker
    audio_encoder: AudioEncoder | BatchedAudioEncoder
    talker: Talker | None
    code2wav: Code2Wav | None
    weights_digest: str
    weights: Weights = field(repr=False)

    def with_options(self, options: KernelOptions) -> OmniModel:
        """This model with kernels that run by other `options`: the same tensors, no copy; on a CPU it makes no difference."""
        chunk_frames = self.code2wav.chunk_frames if self.code2wav is not None else CHUNK_FRAMES
        return _built(self.config, self.weights, ops_for(self.ops.device, options), chunk_frames, self.weights_digest)


def load_model(
    folder: Path,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    chunk_frames: int = CHUNK_FRAMES,
    dummy: bool = False,
    options: KernelOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> OmniModel:
    """Load a model folder in `dtype` on `device`; the vocoder works `chunk_frames` frames at a time.

    `dummy` draws the weights instead of reading them, so that the folder needs no tensors. `options` say how a GPU's kernels
    run, `progress` hears of the bytes loaded and of all.

    Raises CheckpointError when config or tensors do not fit, ValueError for a device without operations. Tensors keep the
    shapes that `engine.model.weights` lists.
    """
    config = OmniConfig.load(folder)
    ops = ops_for(device, options or KernelOptions(dtype=dtype))
    load = partial(load_weights, folder) if not dummy else dummy_weights
    weights = load(config, dtype, device, progress=progress)
    digest = dummy_digest(folder) if dummy else weights_digest(folder)
    return _built(config, weights, ops, chunk_frames, digest)


def _built(config: OmniConfig, weights: Weights, ops: Ops, chunk_frames: int, digest: str) -> OmniModel:
    thinker = Thinker(config, weights, ops)
    speaks, on_cpu = config.has_talker, ops.device.type == "cpu"
    return OmniModel(
        config=config,
        ops=ops,
        thinker=thinker,
        audio_encoder=AudioEncoder(config, weights, ops) if on_cpu else BatchedAudioEncoder(config, weights),
        talker=Talker(config, weights, ops, thinker.embedding) if speaks else None,
        code2wav=Code2Wav(config, weights, ops, chunk_frames) if speaks else None,
        weights_digest=digest,
        weights=weights,
    )
