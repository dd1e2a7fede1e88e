"""The Thinker with its audio encoder for training: next-token loss on mixed text and speech, greedy answers, export.

An encoder that only hears through the text model's loss is slow to find which rows belong to which word. For the first part of
training a CTC head on the encoder's rows says so directly; it is no part of the export.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import OmniConfig
from engine.tiny.audio import AudioEncoder, spec_augment
from engine.tiny.batches import Batch, Mixture, collate
from engine.tiny.optim import Moment, Settings, Training
from engine.tiny.stack import Stack, Weighting, ctc, initialise, tensors


class _Text(Stack):
    """The text model: a stack with its table of embeddings."""

    def __init__(self, config: OmniConfig) -> None:
        super().__init__(config.thinker)
        self.embed_tokens = nn.Embedding(config.thinker.vocab, config.thinker.hidden)


class Thinker(nn.Module):
    """Text model, audio encoder and CTC head."""

    def __init__(self, config: OmniConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = _Text(config)
        self.lm_head = nn.Linear(config.thinker.hidden, config.thinker.vocab, bias=False)
        self.audio_tower = AudioEncoder(config.audio)
        self.ctc_head = nn.Linear(config.audio.out, config.thinker.vocab + 1)
        initialise(self, config.thinker.layers, seed)

    def embed(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Input rows [B, L, H] of `batch`, and the encoder's rows [C, R, H] (None without clips)."""
        x = self.model.embed_tokens(batch.ids)
        if batch.mels is None:
            return x, None
        heard = self.audio_tower(batch.mels, batch.frames)
        picked = heard.flatten(0, 1).index_select(0, batch.rows)
        flat = x.flatten(0, 1).index_copy(0, batch.places, picked.to(x.dtype))
        return flat.view(x.shape), heard

    def forward(self, batch: Batch) -> Tensor:
        """Logits [m, V] float32 of the rows that `batch` asks for."""
        x, _ = self.embed(batch)
        hidden, _ = self.model(x, batch.valid)
        return self._scores(hidden, batch.asked)

    def loss(self, batch: Batch, weighting: Weighting) -> dict[str, Tensor]:
        """Losses of `batch`, scalars: `loss` in all, `text`, `right` (the share of right tokens), `balance`, and `ctc`."""
        x, heard = self.embed(batch)
        hidden, uneven = self.model(x, batch.valid)
        scores = self._scores(hidden, batch.asked)
        text = F.cross_entropy(scores, batch.labels)
        found = {"text": text, "right": (scores.argmax(-1) == batch.labels).float().mean(), "balance": uneven}
        total = text + weighting.balance * uneven
        if weighting.ctc > 0 and heard is not None:
            found["ctc"] = ctc(self.ctc_head(heard), batch.transcripts, batch.heard, batch.spoken)
            total = total + weighting.ctc * found["ctc"]
        return {"loss": total, **found}

    def _scores(self, hidden: Tensor, at: Tensor) -> Tensor:
        scores: Tensor = self.lm_head(hidden.flatten(0, 1).index_select(0, at))
        return scores.float()

    @torch.inference_mode()
    def generate(self, batch: Batch, max_tokens: int) -> list[list[int]]:
        """Greedy answers to the prompts of `batch`: up to `max_tokens` ids each, with the one that ends the turn if it came.

        No tensors out. Everything is computed anew for each token: fit for an evaluation, not for serving.
        """
        self.eval()
        x, _ = self.embed(batch)
        x = F.pad(x, (0, 0, 0, max_tokens))
        rows = torch.arange(len(x), device=x.device)
        lengths = batch.lengths.clone()
        made: list[Tensor] = []
        ended = torch.zeros(len(x), dtype=torch.bool, device=x.device)
        while len(made) < max_tokens and not bool(ended.all()):
            seen = x[:, : int(lengths.max())]
            hidden, _ = self.model(seen, torch.ones(seen.shape[:2], dtype=torch.bool, device=x.device))
            token = self.lm_head(hidden[rows, lengths - 1]).float().argmax(-1)
            x[rows, lengths] = self.model.embed_tokens(token)
            ended |= token == self.config.ids.im_end
            lengths += 1
            made.append(token)
        answers = torch.stack(made, dim=1).tolist()
        end = self.config.ids.im_end
        return [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of text model and audio encoder under their released names, in their released shapes."""
        return tensors(dict(self.named_parameters()), "thinker.")


@dataclass(frozen=True, slots=True)
class Curriculum:
    """What changes as training goes on, each until a share of its time.

    Until `short` the longest clips are held back, at first all but the shortest fifth. CTC counts `ctc` at first and fades out
    until `ctc_until`.
    """

    short: float = 0.15
    ctc: float = 1.0
    ctc_until: float = 0.5

    def share(self, progress: float) -> float:
        """The share of the conversations, shortest first, that may be drawn."""
        return min(1.0, 0.2 + 0.8 * progress / self.short) if self.short > 0 else 1.0

    def weighting(self, progress: float) -> Weighting:
        """How much each loss counts."""
        if self.ctc <= 0 or progress >= self.ctc_until:
            return Weighting()
        return Weighting(ctc=self.ctc * (1 - progress / self.ctc_until))


def train(
    config: OmniConfig,
    mixture: Mixture,
    folder: Path,
    *,
    settings: Settings,
    minutes: float,
    device: torch.device,
    curriculum: Curriculum = Curriculum(),
    augment: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Thinker, bool]:
    """Train for up to `minutes` from where `folder` stands; returns the averaged model and whether training is over.

    `augment` blanks bands and stretches of the clips; `clock` counts seconds. Progress is logged to
    `folder`/curve.jsonl. Tensors as in `Thinker`.
    """
    training = Training(Thinker(config, seed=settings.seed), settings, folder, device, clock)
    generator = torch.Generator(device)

    def losses(moment: Moment) -> dict[str, Tensor]:
        drawn = mixture.draw(moment.step, curriculum.share(moment.progress))
        batch = collate(drawn, config.ids.audio).to(device)
        if augment and batch.mels is not None:
            # Seeded by the step, so that a resumed training draws what an unbroken one would.
            generator.manual_seed((settings.seed << 32) + moment.step)
            batch = replace(batch, mels=spec_augment(batch.mels, batch.frames, generator))
        model = training.module
        assert isinstance(model, Thinker)
        return model.loss(batch, curriculum.weighting(moment.progress))

    over = training.run(losses, minutes)
    model = training.averaged()
    assert isinstance(model, Thinker)
    return model, over
