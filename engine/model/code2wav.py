"""Code2Wav: frames of 16 codes to a 24 kHz waveform, statefully, one stream and one fixed chunk shape at a time.

The network is causal but for its strided transposed convolutions, each of which looks one column ahead. So a stream's
state holds what the next chunk still needs: rotated keys and values of the attention window, the left inputs of each
convolution, and the last input column of each strided one. Chunks then join without a seam.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import CheckpointError
from engine.kernels import Ops
from engine.model.config import Code2WavConfig, OmniConfig
from engine.model.weights import Weights

NORM_EPS = 1e-6  # of the layer norm inside the ConvNeXt blocks; no config key (spec section 8.1)
DILATIONS = (1, 3, 9)  # of the three residual units of a decoder block; no config key (spec section 8.1)


@dataclass(slots=True)
class Code2WavState:
    """What one stream carries from chunk to chunk; owned by the stream, changed by `Code2Wav.step` only.

    `frames` counts the frames taken so far. `keys` and `values` hold, a layer, the attention window's past frames
    [1, window-1, heads, d], the keys already rotated; `columns` the last inputs [1, C, k] of each convolution.
    """

    frames: int
    keys: list[Tensor] = field(repr=False)
    values: list[Tensor] = field(repr=False)
    columns: list[Tensor] = field(repr=False)

    def elements(self) -> int:
        """Count the numbers held, keys and values of the window included (no tensors)."""
        return sum(held.numel() for group in (self.keys, self.values, self.columns) for held in group)


@dataclass(frozen=True, slots=True)
class _Columns:
    """A chunk between two stages: `x` [1, C, L] of the chunk's fixed length L, its first `valid` columns real."""

    x: Tensor
    valid: int


class _CausalConv:
    """A convolution that sees its own column and those before it; keeps (k-1)*dilation columns in its `slot`."""

    def __init__(self, weights: Weights, name: str, ops: Ops, slots: list[tuple[int, int]], dilation: int = 1) -> None:
        self.weight, self.bias = _pair(weights, name)
        self.ops, self.dilation = ops, dilation
        self.groups = 1
        self.past = (self.weight.shape[2] - 1) * dilation
        self.slot = len(slots)
        slots.append((self.weight.shape[1], self.past))

    def forward(self, x: Tensor, valid: int, state: Code2WavState) -> Tensor:
        """Convolve `x` [1, C, L], of which `valid` columns are real, behind the stream's past; returns [1, D, L]."""
        joined = torch.cat([state.columns[self.slot], x], dim=-1)
        state.columns[self.slot] = joined[..., valid : valid + self.past].clone()
        return self.ops.conv1d(joined, self.weight, self.bias, self.dilation, self.groups)


class _DepthwiseConv(_CausalConv):
    """A causal convolution of each channel by itself."""

    def __init__(self, weights: Weights, name: str, ops: Ops, slots: list[tuple[int, int]]) -> None:
        super().__init__(weights, name, ops, slots)
        self.groups = self.weight.shape[0]
        slots[self.slot] = (self.groups, self.past)


class _Stretch:
    """A transposed convolution of kernel 2r and stride r, cropped by r on both ends: one column of look-ahead.

    Output block m needs inputs m and m+1, so the last real column is held back for the next chunk.
    """

    def __init__(self, weights: Weights, name: str, ops: Ops, slots: list[tuple[int, int]], rate: int) -> None:
        self.weight, self.bias = _pair(weights, name)
        self.ops, self.rate = ops, rate
        self.slot = len(slots)
        slots.append((self.weight.shape[0], 1))

    def forward(self, part: _Columns, state: Code2WavState) -> _Columns:
        """Stretch `part.x` [1, C, L] to [1, D, L*r]; the stream's very first column has no block before it."""
        joined = torch.cat([state.columns[self.slot], part.x], dim=-1)
        state.columns[self.slot] = joined[..., part.valid : part.valid + 1].clone()
        out = self.ops.conv_transpose1d(joined, self.weight, self.bias, self.rate)[..., self.rate : -self.rate]
        if state.frames:
            return _Columns(out, part.valid * self.rate)
        return _Columns(F.pad(out[..., self.rate :], (0, self.rate)), (part.valid - 1) * self.rate)


class _Snake:
    """SnakeBeta with its per-channel log-parameters."""

    def __init__(self, weights: Weights, name: str, ops: Ops) -> None:
        self.alpha, self.beta, self.ops = weights[f"{name}.alpha"], weights[f"{name}.beta"], ops

    def forward(self, x: Tensor) -> Tensor:
        """Apply to `x` [1, C, L]; returns [1, C, L]."""
        return self.ops.snake(x, self.alpha, self.beta)


class _Layer:
    """One layer of the pre-transformer: attention over the last `window` frames and SwiGLU, each branch scaled."""

    def __init__(self, config: Code2WavConfig, weights: Weights, index: int, ops: Ops) -> None:
        name = f"code2wav.layers.{index}"
        self.ops, self.index, self.eps = ops, index, config.eps
        self.heads = config.heads
        self.norm1, self.norm2 = weights[f"{name}.input_norm"], weights[f"{name}.post_norm"]
        self.qkv, self.out = weights[f"{name}.qkv"], weights[f"{name}.o"]
        self.gate_up, self.down = weights[f"{name}.gate_up"], weights[f"{name}.down"]
        self.scale1, self.scale2 = weights[f"{name}.attn_scale"], weights[f"{name}.mlp_scale"]

    def forward(self, x: Tensor, valid: int, rope: tuple[Tensor, Tensor], mask: Tensor, state: Code2WavState) -> Tensor:
        """Run over `x` [chunk, H], `mask` [chunk, window-1+chunk]; returns [chunk, H]."""
        ops = self.ops
        x = x + self.scale1 * self._attend(ops.rms_norm(x, self.norm1, self.eps), valid, rope, mask, state)
        inner = ops.silu_mul(ops.linear(ops.rms_norm(x, self.norm2, self.eps), self.gate_up))
        return x + self.scale2 * ops.linear(inner, self.down)

    def _attend(self, x: Tensor, valid: int, rope: tuple[Tensor, Tensor], mask: Tensor, state: Code2WavState) -> Tensor:
        q, k, v = self.ops.linear(x, self.qkv).view(x.shape[0], 3, self.heads, -1).unbind(1)
        keys = torch.cat([state.keys[self.index], self.ops.rotate(k, *rope)[None]], dim=1)
        values = torch.cat([state.values[self.index], v[None]], dim=1)
        past = state.keys[self.index].shape[1]
        state.keys[self.index] = keys[:, valid : valid + past].clone()
        state.values[self.index] = values[:, valid : valid + past].clone()
        mixed = self.ops.attention(self.ops.rotate(q, *rope)[None], keys, values, mask)
        return self.ops.linear(mixed[0], self.out)


class _Upsample:
    """An exact transposed convolution (kernel = stride) and a ConvNeXt block."""

    def __init__(self, weights: Weights, index: int, rate: int, ops: Ops, slots: list[tuple[int, int]]) -> None:
        name = f"code2wav.upsample.{index}"
        self.ops, self.rate = ops, rate
        self.conv, self.norm = _pair(weights, f"{name}.conv"), _pair(weights, f"{name}.norm")
        self.depthwise = _DepthwiseConv(weights, f"{name}.dwconv", ops, slots)
        self.widen, self.narrow = _pair(weights, f"{name}.fc1"), _pair(weights, f"{name}.fc2")
        self.gamma = weights[f"{name}.gamma"]

    def forward(self, part: _Columns, state: Code2WavState) -> _Columns:
        """Stretch `part.x` [1, C, L] to [1, C, L*rate]."""
        ops = self.ops
        x = ops.conv_transpose1d(part.x, *self.conv, self.rate)
        valid = part.valid * self.rate
        rows = self.depthwise.forward(x, valid, state)[0].t().contiguous()
        rows = ops.gelu(ops.linear(ops.layer_norm(rows, *self.norm, NORM_EPS), *self.widen))
        rows = ops.linear(rows, *self.narrow) * self.gamma
        return _Columns(x + rows.t()[None], valid)


class _Residual:
    """A residual unit: two snakes, a dilated convolution of width 7 and one of width 1."""

    def __init__(self, weights: Weights, name: str, dilation: int, ops: Ops, slots: list[tuple[int, int]]) -> None:
        self.snake1, self.snake2 = _Snake(weights, f"{name}.act1", ops), _Snake(weights, f"{name}.act2", ops)
        self.wide = _CausalConv(weights, f"{name}.conv1", ops, slots, dilation)
        self.point = _pair(weights, f"{name}.conv2")
        self.ops = ops

    def forward(self, x: Tensor, valid: int, state: Code2WavState) -> Tensor:
        """Run over `x` [1, C, L], of which `valid` columns are real; returns [1, C, L]."""
        hidden = self.snake2.forward(self.wide.forward(self.snake1.forward(x), valid, state))
        return x + self.ops.conv1d(hidden, *self.point)


class _Block:
    """A decoder block: snake, stretch by `rate`, three residual units."""

    def __init__(self, weights: Weights, index: int, rate: int, ops: Ops, slots: list[tuple[int, int]]) -> None:
        name = f"code2wav.blocks.{index}"
        self.snake = _Snake(weights, f"{name}.act", ops)
        self.stretch = _Stretch(weights, f"{name}.up", ops, slots, rate)
        self.units = [
            _Residual(weights, f"{name}.units.{place}", dilation, ops, slots)
            for place, dilation in enumerate(DILATIONS)
        ]

    def forward(self, part: _Columns, state: Code2WavState) -> _Columns:
        """Stretch `part.x` [1, C, L] to [1, D, L*rate]."""
        part = self.stretch.forward(_Columns(self.snake.forward(part.x), part.valid), state)
        x = part.x
        for unit in self.units:
            x = unit.forward(x, part.valid, state)
        return _Columns(x, part.valid)


class Code2Wav:
    """The vocoder at one chunk shape of `chunk_frames` frames. Holds no stream: see `Code2WavState`."""

    def __init__(self, config: OmniConfig, weights: Weights, ops: Ops, chunk_frames: int) -> None:
        if chunk_frames < 1:
            raise ValueError(f"chunk_frames must be at least 1, got {chunk_frames}")
        part = config.code2wav
        if part is None:
            raise CheckpointError("config.json: enable_audio_output is false, so there is no code2wav to load")
        if math.prod(part.ratios) < 2:
            raise CheckpointError(f"code2wav_config.upsampling_ratios: {part.ratios} must multiply to 2 or more")
        if part.kv_heads != part.heads:
            raise CheckpointError(f"code2wav_config.num_key_value_heads must be {part.heads}, is {part.kv_heads}")
        self.ops, self.config, self.chunk_frames = ops, part, chunk_frames
        self.table = weights["code2wav.embed"]
        self.offsets = torch.arange(part.quantizers, device=ops.device)[:, None] * part.codebook
        self.layers = [_Layer(part, weights, index, ops) for index in range(part.layers)]
        self.norm = weights["code2wav.norm"]
        self._slots: list[tuple[int, int]] = []
        self._build_convolutions(weights)
        self._prepare_attention()

    def _build_convolutions(self, weights: Weights) -> None:
        ops, part, slots = self.ops, self.config, self._slots
        self.upsample = [_Upsample(weights, index, rate, ops, slots) for index, rate in enumerate(part.ratios)]
        self.first = _CausalConv(weights, "code2wav.conv_in", ops, slots)
        self.blocks = [_Block(weights, index, rate, ops, slots) for index, rate in enumerate(part.rates)]
        self.snake = _Snake(weights, "code2wav.act_out", ops)
        self.last = _CausalConv(weights, "code2wav.conv_out", ops, slots)

    def _prepare_attention(self) -> None:
        part, device = self.config, self.ops.device
        dim = part.head_dim
        self.frequencies = 1.0 / part.rope_theta ** (torch.arange(0, dim, 2, device=device).float() / dim)
        self.steps = torch.arange(self.chunk_frames, device=device)
        self.places = torch.arange(part.window - 1 + self.chunk_frames, device=device)
        age = self.steps[:, None] + (part.window - 1) - self.places[None]
        self.in_window = (age >= 0) & (age < part.window)

    def samples(self, frames: int) -> int:
        """Return how many samples a stream's first `frames` frames give: all but what waits for the next frame. No tensors."""
        if frames == 0:
            return 0
        columns = frames * math.prod(self.config.ratios)
        for rate in self.config.rates:
            columns = (columns - 1) * rate
        return columns

    def new_state(self) -> Code2WavState:
        """Return the state of a stream that has seen no frame: zeros of [1, window-1, heads, d] and [1, C, k]."""
        part = self.config
        shape = (1, part.window - 1, part.heads, part.head_dim)
        return Code2WavState(
            frames=0,
            keys=[self.table.new_zeros(shape) for _ in self.layers],
            values=[self.table.new_zeros(shape) for _ in self.layers],
            columns=[self.table.new_zeros(1, channels, past) for channels, past in self._slots],
        )

    def step(self, codes: Tensor, state: Code2WavState) -> Tensor:
        """Turn the stream's next frames, `codes` [quantizers, n] int64 with 1 <= n <= chunk_frames, into samples.

        Returns float32 [m] in [-1, 1]: what `samples` says of the frames so far, less what was returned before.
        Raises ValueError for another n. The state moves on by n frames.
        """
        count = codes.shape[1]
        if not 1 <= count <= self.chunk_frames:
            raise ValueError(f"a step takes 1 to {self.chunk_frames} frames, got {count}")
        rows = self._transform(self._embed(codes), count, state)
        part = _Columns(rows.t()[None].contiguous(), count)
        for stage in self.upsample:
            part = stage.forward(part, state)
        part = _Columns(self.first.forward(part.x, part.valid, state), part.valid)
        for block in self.blocks:
            part = block.forward(part, state)
        wave = self.last.forward(self.snake.forward(part.x), part.valid, state)
        state.frames += count
        return wave[0, 0, : part.valid].float().clamp(-1.0, 1.0)

    def decode(self, codes: Tensor) -> Tensor:
        """Turn a whole stream, `codes` [quantizers, T] int64, into float32 samples [m] by chunks of `chunk_frames`."""
        state = self.new_state()
        chunks = [self.step(chunk, state) for chunk in torch.split(codes, self.chunk_frames, dim=1) if chunk.shape[1]]
        return torch.cat(chunks) if chunks else torch.zeros(0, device=self.ops.device)

    def _embed(self, codes: Tensor) -> Tensor:
        """Mean of the 16 code embeddings of each frame, padded to the chunk shape; returns [chunk, H]."""
        padded = F.pad(codes, (0, self.chunk_frames - codes.shape[1])) + self.offsets
        rows = self.ops.embedding(self.table, padded.reshape(-1))
        return rows.view(*padded.shape, -1).mean(0)

    def _transform(self, x: Tensor, count: int, state: Code2WavState) -> Tensor:
        """Run the pre-transformer over `x` [chunk, H], of which `count` rows are real; returns [chunk, H]."""
        angles = (state.frames + self.steps)[:, None] * self.frequencies
        rope = self.ops.rope_tables(angles, x.dtype)
        visible = self.in_window & (self.places >= self.config.window - 1 - state.frames)
        mask = torch.zeros(visible.shape, device=x.device).masked_fill_(~visible, float("-inf"))
        for layer in self.layers:
            x = layer.forward(x, count, rope, mask, state)
        return self.ops.rms_norm(x, self.norm, self.config.eps)


def _pair(weights: Weights, name: str) -> tuple[Tensor, Tensor]:
    """The weight and the bias called `name`."""
    return weights[f"{name}.weight"], weights[f"{name}.bias"]
