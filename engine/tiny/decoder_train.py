"""The decoder trained on: from codes that the Talker foresees, where the codec's training gave it the true ones.

What a Talker foresees greedily is the mean of what it deems likely, so it is smoother than speech. A decoder that has heard
such codes beside the speech they were meant for says it clearly. Its table of codes stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.tiny.codec import Decoder
from engine.tiny.codec_train import SpectralLoss
from engine.tiny.optim import Moment, Settings, Training, compiled

# Frames of a segment, and segments of a step.
FRAMES, BATCH = 24, 48
# Segments that are decoded from the true codes: the decoder is to go on with them.
TRUE_SHARE = 0.15


@dataclass(frozen=True, slots=True, eq=False)
class Spoken:
    """An utterance for the decoder: `foreseen` and `true` codes [G, F], and its `wave`, int16 [n] for at most F frames."""

    foreseen: NDArray[np.int64]
    true: NDArray[np.int64]
    wave: NDArray[np.int16]


class Segments:
    """Segments of utterances by lot, on a device; an utterance shorter than a segment is left out."""

    def __init__(self, spoken: Sequence[Spoken], frame: int, device: torch.device) -> None:
        """`frame` is the samples of a frame. ValueError when no utterance is long enough."""
        long = [one for one in spoken if one.true.shape[1] >= FRAMES]
        if not long:
            raise ValueError(f"no utterance has {FRAMES} frames")
        codes = np.stack([np.concatenate([getattr(one, name) for one in long], 1) for name in ("foreseen", "true")])
        waves = [np.pad(one.wave, (0, one.true.shape[1] * frame - len(one.wave))) for one in long]
        counts = np.array([one.true.shape[1] - FRAMES + 1 for one in long])
        firsts = np.cumsum([0, *(one.true.shape[1] for one in long[:-1])])
        # Every frame that a segment may begin with.
        places = np.concatenate([first + np.arange(count) for first, count in zip(firsts, counts, strict=True)])
        self._codes, self._places = torch.from_numpy(codes).to(device), torch.from_numpy(places).to(device)
        self._wave, self._frame = torch.from_numpy(np.concatenate(waves)).to(device), frame

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Codes [count, G, FRAMES] int64, most of them foreseen, and the samples [count, FRAMES * frame] float32."""
        device = self._codes.device
        begin = self._places[torch.randint(len(self._places), (count,), device=device)]
        kind = (torch.rand(count, device=device) < TRUE_SHARE).long()
        frames = begin[:, None] + torch.arange(FRAMES, device=device)
        samples = begin[:, None] * self._frame + torch.arange(FRAMES * self._frame, device=device)
        codes = self._codes[kind[:, None], :, frames].transpose(1, 2)
        return codes, self._wave[samples].float() / 32768.0


def train(
    decoder: Decoder,
    segments: Segments,
    folder: Path,
    *,
    settings: Settings,
    minutes: float,
    device: torch.device,
    batch: int = BATCH,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Decoder, bool]:
    """Train `decoder`, but for what needs no gradient, for up to `minutes` from where `folder` stands.

    Returns the averaged decoder and whether training is over; no other tensors. Progress is logged to `folder`/curve.jsonl;
    `clock` counts seconds.
    """
    training, distance = Training(decoder, settings, folder, device, clock), SpectralLoss().to(device)
    compiled([training.module], device, dynamic=False)

    def losses(moment: Moment) -> dict[str, Tensor]:
        codes, wave = segments.draw(batch)
        made = training.module(codes)
        return {"loss": distance(made, wave[:, : made.shape[1]])}

    over = training.run(losses, minutes)
    averaged = training.averaged()
    assert isinstance(averaged, Decoder)
    return averaged, over
