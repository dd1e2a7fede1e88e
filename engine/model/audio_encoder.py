"""The audio encoder: log-mel frames of one request's clips to rows of the Thinker's input.

A clip is encoded by itself and as a whole, so its bits are its own without the blocks of rows that `Ops.linear` works in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from engine.kernels import Ops
from engine.model.audio_windows import rows_of
from engine.model.config import OmniConfig
from engine.model.weights import Weights

NORM_EPS = 1e-5  # of every layer norm here; no config key (spec section 1.2)
MAX_TIMESCALE = 10000.0  # of the sinusoid table; no config key (spec section 4.2)


def sinusoids(rows: int, width: int) -> Tensor:
    """Position table [rows, width] float32: sines, then cosines, of geometric time scales."""
    half = width // 2
    scales = torch.exp(-math.log(MAX_TIMESCALE) / (half - 1) * torch.arange(half).float())
    angles = torch.arange(rows).float()[:, None] * scales
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def pair(weights: Weights, name: str) -> tuple[Tensor, Tensor]:
    """The weight [out, ...] and the bias [out] called `name`."""
    return weights[f"{name}.weight"], weights[f"{name}.bias"]


class _Layer:
    """One encoder layer: attention inside windows, then a GELU feed-forward, both after a layer norm."""

    def __init__(self, weights: Weights, index: int, heads: int, ops: Ops) -> None:
        name = f"audio.layers.{index}"
        self.ops, self.heads = ops, heads
        self.norm1 = pair(weights, f"{name}.attn_norm")
        self.norm2 = pair(weights, f"{name}.mlp_norm")
        self.qkv, self.out = pair(weights, f"{name}.qkv"), pair(weights, f"{name}.o")
        self.fc1, self.fc2 = pair(weights, f"{name}.fc1"), pair(weights, f"{name}.fc2")

    def forward(self, x: Tensor, window: int) -> Tensor:
        """Run over one clip's rows `x` [n, D], attending inside blocks of `window` rows; returns [n, D]."""
        ops = self.ops
        x = x + F.linear(self._attend(ops.layer_norm(x, *self.norm1, NORM_EPS), window), *self.out)
        inner = ops.gelu(F.linear(ops.layer_norm(x, *self.norm2, NORM_EPS), *self.fc1))
        return x + F.linear(inner, *self.fc2)

    def _attend(self, x: Tensor, window: int) -> Tensor:
        q, k, v = F.linear(x, *self.qkv).view(x.shape[0], 3, self.heads, -1).unbind(1)
        blocks = zip(*(torch.split(rows, window) for rows in (q, k, v)), strict=True)
        return torch.cat([self.ops.attention(a[None], b[None], c[None], None)[0] for a, b, c in blocks])


class AudioEncoder:
    """The encoder of log-mel clips. Stateless: a request's rows depend on that request's clips alone."""

    def __init__(self, config: OmniConfig, weights: Weights, ops: Ops) -> None:
        part = config.audio
        self.ops, self.config = ops, part
        self.chunk_frames = 2 * part.window
        self.convolutions = [pair(weights, f"audio.conv{index}") for index in (1, 2, 3)]
        self.conv_out = weights["audio.conv_out"]
        rows = rows_of(self.chunk_frames)
        self.positions = sinusoids(rows, part.hidden).to(self.conv_out)
        self.layers = [_Layer(weights, index, part.heads, ops) for index in range(part.layers)]
        self.norm = pair(weights, "audio.ln_post")
        self.proj1, self.proj2 = pair(weights, "audio.proj1"), pair(weights, "audio.proj2")

    def forward(self, mels: list[Tensor]) -> list[Tensor]:
        """Encode the clips of one request, `mels` each [mel_bins, T] float32 with T >= 1, into rows [N(T), out].

        N(T) is spec section 4.4's count, 13 rows a second. All clips of a request belong in one call: a short chunk is
        padded to the longest chunk of the request, which its last rows can see. Raises ValueError for a clip of no frames.
        """
        if any(mel.shape[1] == 0 for mel in mels):
            raise ValueError("an audio clip has no mel frames; every clip needs at least one")
        if not mels:
            return []
        width = min(self.chunk_frames, max(mel.shape[1] for mel in mels))
        window = rows_of(width) * (self.config.window_infer // self.chunk_frames)
        return [self._clip(mel, width, window) for mel in mels]

    def encode(self, mels: Sequence[Sequence[NDArray[np.float32]]]) -> list[Tensor]:
        """Encode several requests one by one, `mels` each [mel_bins, T]; per request the rows of its clips, [N, out].

        Raises ValueError for a request without clips and for a clip of no frames.
        """
        if not all(mels):
            raise ValueError("a request has no audio clips")
        device = self.conv_out.device
        return [torch.cat(self.forward([torch.tensor(mel, device=device) for mel in clips])) for clips in mels]

    def _clip(self, mel: Tensor, width: int, window: int) -> Tensor:
        chunks = torch.split(mel.to(self.conv_out.dtype), self.chunk_frames, dim=1)
        parts = [self._chunk(chunk, width) for chunk in chunks]
        places = torch.cat([self.positions[: part.shape[0]] for part in parts])
        x = F.linear(torch.cat(parts), self.conv_out) + places
        for layer in self.layers:
            x = layer.forward(x, window)
        ops = self.ops
        x = ops.layer_norm(x, *self.norm, NORM_EPS)
        return F.linear(ops.gelu(F.linear(x, *self.proj1)), *self.proj2)

    def _chunk(self, chunk: Tensor, width: int) -> Tensor:
        """Convolve one `chunk` [mel_bins, T <= width] padded to `width` frames; returns its valid rows [n, C * F]."""
        x = F.pad(chunk, (0, width - chunk.shape[1]))[None, None]
        for weight, bias in self.convolutions:
            x = self.ops.gelu(self.ops.conv2d(x, weight, bias, stride=2, padding=1))
        rows = x[0].permute(2, 0, 1).flatten(1)  # time, then channel-major over frequency
        return rows[: rows_of(chunk.shape[1])]
