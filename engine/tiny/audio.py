"""The audio encoder for training: the rows that the engine's makes of each clip by itself, batched; and SpecAugment."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.audio_encoder import NORM_EPS, sinusoids
from engine.model.audio_windows import rows_of
from engine.model.config import AudioConfig


def halved(frames: Tensor) -> Tensor:
    """Columns [n] left of `frames` [n] by one convolution of stride 2."""
    return (frames + 1) // 2


def clip_rows(frames: Tensor, chunk: int) -> Tensor:
    """Rows [C] that clips of `frames` [C] mel frames become, in chunks of `chunk` frames."""
    return rows_of(chunk) * (frames // chunk) + halved(halved(halved(frames % chunk)))


class _Attention(nn.Module):
    """Bidirectional attention inside windows."""

    def __init__(self, config: AudioConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(config.hidden, config.hidden) for _ in range(4)
        )

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Attend over `x` [W, R, D], where every row sees the `visible` ones [W, R]; returns [W, R, D]."""
        q, k, v = (
            proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None].expand(-1, -1, x.shape[1], -1))
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(-2))
        return out


class _Layer(nn.Module):
    """One layer: attention, then a GELU feed-forward, both after a layer norm."""

    def __init__(self, config: AudioConfig, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden, eps=NORM_EPS)
        self.self_attn = _Attention(config)
        self.final_layer_norm = nn.LayerNorm(config.hidden, eps=NORM_EPS)
        self.fc1 = nn.Linear(config.hidden, config.inter)
        self.fc2 = nn.Linear(config.inter, config.hidden)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        """Run over `x` [W, R, D] with the `visible` rows [W, R]; returns [W, R, D]."""
        x = x + self.dropout(self.self_attn(self.self_attn_layer_norm(x), visible))
        out: Tensor = x + self.dropout(self.fc2(F.gelu(self.fc1(self.final_layer_norm(x)))))
        return out


class AudioEncoder(nn.Module):
    """Log-mel clips to rows of the Thinker's input, each clip as a request of its own."""

    positions: Tensor

    def __init__(self, config: AudioConfig, dropout: float = 0.0) -> None:
        super().__init__()
        self.chunk = 2 * config.window
        self.window = config.window_infer // self.chunk  # chunks
        self.conv2d1 = nn.Conv2d(1, config.channels, 3, 2, 1)
        self.conv2d2 = nn.Conv2d(config.channels, config.channels, 3, 2, 1)
        self.conv2d3 = nn.Conv2d(config.channels, config.channels, 3, 2, 1)
        self.conv_out = nn.Linear(config.channels * rows_of(config.mel_bins), config.hidden, bias=False)
        self.layers = nn.ModuleList(_Layer(config, dropout) for _ in range(config.layers))
        self.ln_post = nn.LayerNorm(config.hidden, eps=NORM_EPS)
        self.proj1 = nn.Linear(config.hidden, config.hidden)
        self.proj2 = nn.Linear(config.hidden, config.out)
        self.register_buffer("positions", sinusoids(rows_of(self.chunk), config.hidden), persistent=False)

    def forward(self, mels: Tensor, frames: Tensor) -> Tensor:
        """Encode clips `mels` [C, bins, T], zero beyond their `frames` [C]; returns [C, R, out], whole chunks of the longest.

        Of a clip's R rows the first `clip_rows` are its own; the rest mean nothing.
        """
        chunks = -(-mels.shape[2] // self.chunk)
        kept = chunks * len(self.positions)
        # A clip of one window has one shorter window, a longer one whole windows.
        span = min(chunks, self.window)
        chunks = -(-chunks // span) * span
        rows = self._convolve(F.pad(mels.float(), (0, chunks * self.chunk - mels.shape[2])), frames)
        own = torch.arange(rows.shape[1], device=rows.device) < clip_rows(frames, self.chunk)[:, None]
        size = span * len(self.positions)
        x, own = rows.reshape(-1, size, rows.shape[2]), own.view(-1, size)
        # A window of padding alone sees all of itself: without anything to see, attention is not a number.
        visible = own | ~own.any(1, keepdim=True)
        for layer in self.layers:
            x = layer(x, visible)
        out: Tensor = self.proj2(F.gelu(self.proj1(self.ln_post(x))))
        return out.view(len(mels), -1, out.shape[2])[:, :kept]

    def _convolve(self, mels: Tensor, frames: Tensor) -> Tensor:
        """Convolve `mels` [C, bins, chunks * chunk frames] chunk by chunk; returns [C, chunks * rows, D]."""
        clips, bins, length = mels.shape
        count = length // self.chunk
        x = mels.view(clips, bins, count, self.chunk).transpose(1, 2).reshape(-1, 1, bins, self.chunk)
        # Alone, a clip shorter than a chunk is as wide as it is long: beyond that its convolutions see zeros.
        width = frames.clamp(max=self.chunk).repeat_interleave(count)
        for conv in (self.conv2d1, self.conv2d2, self.conv2d3):
            width = halved(width)
            x = F.gelu(conv(x))
            inside = torch.arange(x.shape[3], device=x.device) < width[:, None]
            x = x * inside[:, None, None].to(x.dtype)
        rows: Tensor = self.conv_out(x.permute(0, 3, 1, 2).flatten(2)) + self.positions
        return rows.reshape(clips, -1, rows.shape[2])


def spec_augment(mels: Tensor, frames: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Blank two bands of up to 24 bins and two stretches of up to a tenth of each clip `mels` [C, bins, T], long `frames` [C].

    Returns [C, bins, T]. A `generator` lives on the same device.
    """
    clips, bins, length = mels.shape
    device = mels.device
    kept = torch.ones(clips, bins, length, dtype=torch.bool, device=device)
    for _ in range(2):
        low, high = _stretch(torch.full((clips,), bins, device=device), torch.tensor(24, device=device), generator)
        at = torch.arange(bins, device=device)
        kept &= ~((at >= low[:, None]) & (at < high[:, None]))[:, :, None]
        low, high = _stretch(frames, frames // 10, generator)
        at = torch.arange(length, device=device)
        kept &= ~((at >= low[:, None]) & (at < high[:, None]))[:, None, :]
    return mels * kept.to(mels.dtype)


def _stretch(total: Tensor, most: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Where a random stretch of up to `most` of `total` [C] starts and ends, each [C]."""
    size, place = torch.rand(2, len(total), generator=generator, device=total.device)
    width = size * (most + 1)
    start = place * (total - width).clamp(min=0)
    return start.floor(), (start + width).floor()
