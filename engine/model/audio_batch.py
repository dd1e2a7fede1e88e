"""The audio encoder in batches of windows, captured at fixed batch sizes on a GPU.

`engine/model/audio_encoder.py` is its definition: clip by clip, chunk by chunk. Here the clips of several requests become
windows of 8 s, which see nothing of each other, and a batch of windows is one forward in plain torch. A clip's rows then
equal the definition's but for rounding, and their bits depend on the size of the batch that the clip ran in: capture batches
of one window only where company must not move a bit.

The forward depends on no setting that other threads share: cuDNN is called with its flags as arguments, and chooses by its
rules, never by timing candidates, so that two boots choose alike. Only `sdpa_kernel` sets flags of the process; the engine
thread, the only one that attends, holds it around the layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.model.audio_encoder import NORM_EPS, pair, sinusoids
from engine.model.audio_windows import WindowShape, batches, cut, rows_of, shape_for
from engine.model.config import OmniConfig
from engine.model.weights import Weights

# A batch that is not captured holds as many windows at most, which bounds its memory: 50 MB a window at released shapes.
MOST_EAGER = 16
# cuDNN's attention compiles for each new shape, and flash attention takes no mask.
ATTENTION = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

Mel = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Piece:
    """The mel frames of one window, [mel_bins, n], which become its first `rows` rows."""

    mel: Mel
    rows: int


@dataclass(frozen=True, slots=True)
class _Graph:
    """A captured forward: replayed, it reads `packed` and writes `rows` [W, R, out], which the next replay overwrites."""

    graph: torch.cuda.CUDAGraph
    packed: Tensor
    rows: Tensor

    def run(self, packed: Tensor) -> Tensor:
        self.packed.copy_(packed, non_blocking=True)
        self.graph.replay()
        return self.rows


class _Layer:
    """One encoder layer over a batch of windows."""

    def __init__(self, weights: Weights, index: int, heads: int) -> None:
        name = f"audio.layers.{index}"
        self.heads = heads
        self.norm1, self.norm2 = pair(weights, f"{name}.attn_norm"), pair(weights, f"{name}.mlp_norm")
        self.qkv, self.out = pair(weights, f"{name}.qkv"), pair(weights, f"{name}.o")
        self.fc1, self.fc2 = pair(weights, f"{name}.fc1"), pair(weights, f"{name}.fc2")

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Run over `x` [W, R, D] with `mask` [W, 1, 1, R], minus infinity at keys that are not seen; returns [W, R, D]."""
        x = x + F.linear(self._attend(_layer_norm(x, self.norm1), mask), *self.out)
        return x + F.linear(F.gelu(F.linear(_layer_norm(x, self.norm2), *self.fc1)), *self.fc2)

    def _attend(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = F.linear(x, *self.qkv).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class BatchedAudioEncoder:
    """The encoder of log-mel clips of several requests at once. Stateless but for what it captured and counted."""

    def __init__(self, config: OmniConfig, weights: Weights) -> None:
        part = config.audio
        self.bins = part.mel_bins
        self.full = WindowShape(2 * part.window, part.window_infer // (2 * part.window))
        self.conv_out = weights["audio.conv_out"]
        self.device = self.conv_out.device
        convolutions = [pair(weights, f"audio.conv{index}") for index in (1, 2, 3)]
        self.convolutions = [(_channels_last(weight), bias) for weight, bias in convolutions]
        self.positions = sinusoids(rows_of(self.full.width), part.hidden).to(self.conv_out)
        self.layers = [_Layer(weights, index, part.heads) for index in range(part.layers)]
        self.norm = pair(weights, "audio.ln_post")
        self.proj1, self.proj2 = pair(weights, "audio.proj1"), pair(weights, "audio.proj2")
        self.counters = {"windows_captured": 0, "windows_eager": 0, "windows_padded": 0}
        self._graphs: dict[int, _Graph] = {}

    @torch.inference_mode()
    def capture(self, buckets: Sequence[int]) -> None:
        """Capture batches of each number of windows in `buckets` (no tensors); the largest is the most that run at once.

        Raises ValueError on a CPU, where there is nothing to capture, and for a bucket below 1.
        """
        if self.device.type != "cuda":
            raise ValueError(f"nothing is captured on device {self.device.type!r}; leave it out there")
        if min(buckets) < 1:
            raise ValueError(f"a batch holds at least one window, not {min(buckets)}")
        pool = torch.cuda.graph_pool_handle()
        for bucket in sorted(set(buckets), reverse=True):  # the largest first: its memory serves the others too
            # This also leaves a block of pinned memory for the bucket, which serving would else wait for.
            packed = self._pack([], self.full, bucket).to(self.device)
            self._warm_up(packed)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                rows = self._forward(packed, self.full)
            self._graphs[bucket] = _Graph(graph, packed, rows)

    @torch.inference_mode()
    def encode(self, mels: Sequence[Sequence[Mel]]) -> list[Tensor]:
        """Encode the clips of several requests, each [mel_bins, T]; per request the rows of its clips in order, [N, out].

        Nothing here waits for the device: the rows are there for whatever follows on the current stream. Raises ValueError
        for a request without clips and for a clip of no frames or other bins.
        """
        alike: dict[WindowShape, list[int]] = {}
        for request, clips in enumerate(mels):
            self._check(clips)
            alike.setdefault(shape_for([mel.shape[1] for mel in clips], self.full), []).append(request)
        found: dict[int, Tensor] = {}
        for shape, requests in alike.items():
            found.update(zip(requests, self._encode([mels[request] for request in requests], shape), strict=True))
        return [found[request] for request in range(len(mels))]

    def _check(self, clips: Sequence[Mel]) -> None:
        if not clips:
            raise ValueError("a request has no audio clips")
        for mel in clips:
            if mel.shape[0] != self.bins or not mel.shape[1]:
                raise ValueError(f"an audio clip is {list(mel.shape)}, must be [{self.bins}, T] with mel frames T >= 1")

    def _encode(self, requests: list[Sequence[Mel]], shape: WindowShape) -> list[Tensor]:
        """The rows of requests whose windows have the same shape."""
        pieces = [self._pieces(clips, shape) for clips in requests]
        every = [piece for one in pieces for piece in one]
        made = [
            self._run(every[batch.start : batch.stop], shape, batch.bucket)
            for batch in batches(len(every), self._buckets(shape))
        ]
        rows = made[0] if len(made) == 1 else torch.cat(made)
        return list(torch.split(rows, [sum(piece.rows for piece in one) for one in pieces]))

    def _pieces(self, clips: Sequence[Mel], shape: WindowShape) -> list[_Piece]:
        return [_Piece(mel[:, w.start : w.stop], w.rows) for mel in clips for w in cut(mel.shape[1], shape)]

    def _buckets(self, shape: WindowShape) -> Sequence[int]:
        if self._graphs and shape == self.full:
            return sorted(self._graphs)
        return range(1, max(self._graphs, default=MOST_EAGER) + 1)

    def _run(self, pieces: list[_Piece], shape: WindowShape, bucket: int) -> Tensor:
        """The rows of `pieces`, one after the other, from one forward of `bucket` windows."""
        packed = self._pack(pieces, shape, bucket)
        graph = self._graphs.get(bucket) if shape == self.full else None
        self.counters["windows_eager" if graph is None else "windows_captured"] += len(pieces)
        self.counters["windows_padded"] += bucket - len(pieces)
        if graph is None:
            rows = self._forward(packed.to(self.device, non_blocking=True), shape)
        else:
            rows = graph.run(packed)
        return torch.cat([rows[place, : piece.rows] for place, piece in enumerate(pieces)])

    def _pack(self, pieces: list[_Piece], shape: WindowShape, bucket: int) -> Tensor:
        """What a forward reads, as one tensor on the host that one copy brings to the device: mels, then counts of rows.

        Pinned memory: torch gives its place to nobody else before the copy is done, so nothing has to wait here.
        """
        size = shape.chunks * self.bins * shape.width
        packed = torch.empty(bucket * (size + 1), dtype=torch.float32, pin_memory=self.device.type == "cuda")
        host: NDArray[np.float32] = packed.numpy()
        mels = host[: bucket * size].reshape(bucket, shape.chunks, self.bins, shape.width)
        counts = host[bucket * size :]
        for place, piece in enumerate(pieces):
            _fill(mels[place], piece.mel)
            counts[place] = piece.rows
        mels[len(pieces) :] = 0
        counts[len(pieces) :] = 1  # attention to no key at all is undefined, and kernels differ in what they give
        return packed

    def _warm_up(self, packed: Tensor) -> None:
        """Run once uncaptured: libraries load their kernels and reserve memory then, which no capture may hold."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._forward(packed, self.full)
        torch.cuda.current_stream().wait_stream(stream)

    def _forward(self, packed: Tensor, shape: WindowShape) -> Tensor:
        """Rows [W, R, out] of what `_pack` packed; those past a window's count are of no use."""
        windows = packed.shape[0] // (shape.chunks * self.bins * shape.width + 1)
        mels = packed[:-windows].view(-1, 1, self.bins, shape.width)
        x = self._convolve(mels.to(self.conv_out.dtype)).view(windows, shape.rows, -1)
        mask = _mask(packed[-windows:], shape.rows, x.dtype)
        with sdpa_kernel(ATTENTION):
            for layer in self.layers:
                x = layer.forward(x, mask)
        return F.linear(F.gelu(F.linear(_layer_norm(x, self.norm), *self.proj1)), *self.proj2)

    def _convolve(self, x: Tensor) -> Tensor:
        """Chunks `x` [n, 1, mel_bins, width] to rows with positions, [n, rows of a chunk, D]."""
        for weight, bias in self.convolutions:
            x = F.gelu(_convolution(x, weight, bias))
        rows = F.linear(x.permute(0, 3, 1, 2).flatten(2), self.conv_out)  # time, then channel-major over frequency
        return rows + self.positions[: rows.shape[1]]


def _fill(window: Mel, mel: Mel) -> None:
    """Lay `mel` [mel_bins, n] into the chunks of `window` [chunks, mel_bins, width], zeros behind it."""
    chunks, bins, width = window.shape
    whole, tail = divmod(mel.shape[1], width)
    window[:whole] = mel[:, : whole * width].reshape(bins, whole, width).transpose(1, 0, 2)
    if whole < chunks:
        window[whole, :, :tail] = mel[:, whole * width :]
        window[whole, :, tail:] = 0
        window[whole + 1 :] = 0


def _mask(counts: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """What is added to attention scores, [W, 1, 1, rows]: nothing at the first of `counts` [W] keys, else minus infinity."""
    unseen = torch.arange(rows, device=counts.device) >= counts[:, None]
    return torch.zeros(unseen.shape, dtype=dtype, device=counts.device).masked_fill_(unseen, -math.inf)[:, None, None]


def _channels_last(weight: Tensor) -> Tensor:
    """`weight` [D, C, 3, 3] with C innermost in memory, which makes whatever it convolves so too.

    torch's own conversion leaves a weight of one channel as it is, and the first convolution would write the other layout.
    """
    laid = weight.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)
    return laid.permute(0, 3, 1, 2)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolution of images `x` [n, C, A, B] with `weight` [D, C, 3, 3], stride 2 and padding 1; returns [n, D, A', B']."""
    if not x.is_cuda:
        return F.conv2d(x, weight, bias, stride=2, padding=1)
    out = torch.cudnn_convolution(
        x, weight, (1, 1), (2, 2), (1, 1), groups=1, benchmark=False, deterministic=True, allow_tf32=False
    )
    return out.add_(bias[:, None, None])


def _layer_norm(x: Tensor, weight_and_bias: tuple[Tensor, Tensor]) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), *weight_and_bias, NORM_EPS)
