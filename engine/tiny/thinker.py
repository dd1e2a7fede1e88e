"""The Thinker with its audio encoder for training: next-token loss on mixed text and speech, greedy answers, export.

An encoder that only hears through the text model's loss finds a way to tell the training's texts apart, from which the text
model recites them. So a head asks the encoder's rows for letters, and answers are learned after words that were not said: both
leave little to recite from. Neither is part of the export.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.model.config import OmniConfig
from engine.tiny.audio import AudioEncoder, spec_augment
from engine.tiny.batches import Batch, Mixture, collate, growing
from engine.tiny.letters import LettersHead
from engine.tiny.optim import Moment, Settings, Training, compiled
from engine.tiny.stack import Stack, Weighting, initialise, tensors


class _Text(Stack):
    """The text model: a stack with its table of embeddings."""

    def __init__(self, config: OmniConfig, dropout: float) -> None:
        super().__init__(config.thinker, dropout)
        self.embed_tokens = nn.Embedding(config.thinker.vocab, config.thinker.hidden)


class Thinker(nn.Module):
    """Text model, over a table of embeddings that stays as it is, audio encoder and the head that asks for letters."""

    def __init__(self, config: OmniConfig, text_embedding: Tensor, *, dropout: float = 0.0, seed: int = 0) -> None:
        """`text_embedding` is [V, H]."""
        super().__init__()
        self.config = config
        self.model = _Text(config, dropout)
        self.lm_head = nn.Linear(config.thinker.hidden, config.thinker.vocab, bias=False)
        self.audio_tower = AudioEncoder(config.audio, dropout)
        self.letters_head = LettersHead(config.audio.out)
        initialise(self, config.thinker.layers, seed)
        with torch.no_grad():
            self.model.embed_tokens.weight.copy_(text_embedding)
        self.model.embed_tokens.requires_grad_(False)

    def embed(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Input rows [B, L, H] of `batch`, and the encoder's rows [C, R, H] (None without clips)."""
        x = self.model.embed_tokens(batch.ids)
        if batch.mels is None:
            return x, None
        heard = self.audio_tower(batch.mels, batch.frames)
        picked = heard.flatten(0, 1).index_select(0, batch.rows)
        flat = x.flatten(0, 1).index_copy(0, batch.places, picked)
        return flat.view(x.shape), heard

    def forward(self, batch: Batch) -> Tensor:
        """Logits [m, V] float32 of the rows that `batch` asks for."""
        x, _ = self.embed(batch)
        hidden, _ = self.model(x, batch.valid)
        return self._scores(hidden, batch.asked)

    def loss(self, batch: Batch, weighting: Weighting) -> dict[str, Tensor]:
        """Losses of `batch`, scalars: `loss` in all, `text`, `right` (the share of right tokens), `balance`, and `letters`."""
        x, heard = self.embed(batch)
        hidden, uneven = self.model(x, batch.valid)
        scores = self._scores(hidden, batch.asked)
        text = F.cross_entropy(scores, batch.labels)
        found = {"text": text, "right": (scores.argmax(-1) == batch.labels).float().mean(), "balance": uneven}
        total = text + weighting.balance * uneven
        if heard is not None:
            found["letters"] = self.letters_head(heard, batch.transcripts, batch.heard, batch.spoken)
            total = total + weighting.letters * found["letters"]
        return {"loss": total, **found}

    def _scores(self, hidden: Tensor, at: Tensor) -> Tensor:
        scores: Tensor = self.lm_head(hidden.flatten(0, 1).index_select(0, at))
        return scores

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
            token = self.lm_head(hidden[rows, lengths - 1]).argmax(-1)
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


def misled(batch: Batch, most: float, generator: torch.Generator | None = None) -> Batch:
    """`batch` with answers' ids [B, L] replaced by other answers' where they are read; what is to be predicted stays.

    In half of the conversations nothing is replaced, in the others any share up to `most`. A `generator` is on the same device.
    """
    flat, asked = batch.ids.flatten(), batch.asked
    share = (torch.rand(len(batch.ids), generator=generator, device=flat.device) * 2 - 1).clamp(min=0) * most
    draw = torch.rand(len(asked), generator=generator, device=flat.device)
    # The row before an answer is the prompt's last one.
    said = torch.zeros_like(asked, dtype=torch.bool)
    said[1:] = asked[1:] == asked[:-1] + 1
    other = torch.randint(len(asked), asked.shape, generator=generator, device=flat.device)
    replaced = said & (draw < share[asked // batch.ids.shape[1]])
    ids = flat.index_copy(0, asked, torch.where(replaced, batch.labels[other], flat[asked]))
    return replace(batch, ids=ids.view_as(batch.ids))


def train(
    config: OmniConfig,
    mixture: Mixture,
    folder: Path,
    *,
    settings: Settings,
    minutes: float,
    device: torch.device,
    text_embedding: Tensor,
    weighting: Weighting = Weighting(letters=1.0),  # noqa: B008 - a frozen value
    mislead: float = 0.5,
    dropout: float = 0.1,
    augment: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Thinker, bool]:
    """Train for up to `minutes` from where `folder` stands; returns the averaged model and whether training is over.

    `text_embedding` is [V, H]; `mislead` is the largest share of an answer that is replaced where it is read (see `misled`),
    `dropout` that of what layers add that is left out; `augment` blanks bands and stretches of the clips; `clock` counts
    seconds. Progress is logged to `folder`/curve.jsonl. Tensors as in `Thinker`.
    """
    training = Training(
        Thinker(config, text_embedding, dropout=dropout, seed=settings.seed), settings, folder, device, clock
    )
    model = training.module
    assert isinstance(model, Thinker)
    compiled([*model.model.layers, *model.audio_tower.layers], device, dynamic=True)

    def losses(moment: Moment) -> dict[str, Tensor]:
        batch = collate(mixture.draw(moment.step, growing(moment.progress)), config.ids.audio).to(device)
        batch = misled(batch, mislead)
        if augment and batch.mels is not None:
            batch = replace(batch, mels=spec_augment(batch.mels, batch.frames))
        return model.loss(batch, weighting)

    over = training.run(losses, minutes)
    averaged = training.averaged()
    assert isinstance(averaged, Thinker)
    return averaged, over
