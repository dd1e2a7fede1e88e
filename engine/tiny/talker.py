"""The Talker and its code predictor for training: teacher-forced loss on the frames that speak a text, and export.

An answer is spoken from its token ids alone. What the Talker is given of an audio prompt are states of the Thinker, through
`hidden_projection`. Here that projection gives one learned row whatever the state: the Talker can be trained without the
Thinker, and an answer sounds the same to a spoken question as to a written one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from engine.model.config import OmniConfig, PredictorConfig, TalkerConfig
from engine.model.talker import HEADER, OPENING, speaker_id, spoken_positions
from engine.tiny.batches import Alike, growing
from engine.tiny.letters import AHEAD, IGNORED, SoundsHead
from engine.tiny.optim import Moment, Settings, Training, compiled
from engine.tiny.stack import DenseLayer, RmsNorm, Stack, Weighting, initialise, rope_tables, tensors

NONE = -1  # no code here
# How many powers of a code's value, from 0 on, its embedding is made of, and its score; and how far from 0 the values reach.
EMBEDDED, SCORED = (4, 1.0), (3, 3.0)
# The loss of all groups but the first counts so often.
REST_SHARE = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Utterance:
    """A prompt, ids that end with an open assistant turn; the `text` that answers it, ids without the end of the turn; the
    `codes` [G, F] of the frames that speak it; and the `sounds` of these, F indices (`letters.sounds`).
    """

    prompt: Sequence[int]
    text: Sequence[int]
    codes: NDArray[np.int64]
    sounds: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class SpeechBatch:
    """B utterances padded on the right to L rows.

    A row's input is a text row and the sum of its codes: `text` [B, L] are ids of the Thinker, `media` [B, L] says where the
    row of a medium stands instead, `codes` [B, L, G] holds a frame, a special id in group 0, or NONE. `first` [B, L] is the
    code of group 0 to predict from a row, or IGNORED. The flat rows `spoken` [n] predict whole frames, `frames` [n, G], whose
    `sounds` [n, AHEAD] are those of a frame and the next ones, or IGNORED. Integers are int64.
    """

    text: Tensor
    media: Tensor
    codes: Tensor
    first: Tensor
    spoken: Tensor
    frames: Tensor
    sounds: Tensor
    lengths: Tensor

    @property
    def valid(self) -> Tensor:
        """Which rows are no padding, [B, L] bool."""
        return torch.arange(self.text.shape[1], device=self.text.device) < self.lengths[:, None]


class Layout:
    """Utterances as the engine's Talker sees them, spoken by one voice: laid out once, their rows one after the other.

    Batches are gathered from there, on the device that it lies on.
    """

    def __init__(
        self, utterances: Sequence[Utterance], config: OmniConfig, voice: str, device: torch.device | str = "cpu"
    ) -> None:
        """Lay `utterances` out, arrays in as `Utterance` has them.

        RequestError for a prompt that can't be spoken to or an unknown voice, ValueError for a text or frames that are empty.
        """
        rows = [_laid_out(one, config, voice) for one in utterances]
        self.frames = np.array([one.codes.shape[1] for one in utterances])
        """How many frames speak each utterance, [U] int64."""
        self._lengths = np.array([len(text) for text, _ in rows])
        self._begins, self._frames_begin = _begins(self._lengths), _begins(self.frames)
        text = np.concatenate([text for text, _ in rows])
        media = np.isin(text, [config.ids.audio, config.ids.image, config.ids.video])
        codes = np.concatenate([codes for _, codes in rows])
        sounds = np.concatenate([_ahead(one.sounds) for one in utterances])
        assert config.talker is not None
        self._eos, self._device = config.talker.codec.eos, torch.device(device)
        self._text, self._media, self._codes, self._sounds = (
            torch.from_numpy(part).to(device) for part in (text, media, codes, sounds)
        )

    def batch(self, places: Sequence[int]) -> SpeechBatch:
        """The utterances at `places` side by side, on the device (tensors as in `SpeechBatch`)."""
        chosen = np.asarray(places, dtype=np.int64)
        lengths, counts = self._lengths[chosen], self.frames[chosen]
        steps = torch.arange(int(lengths.max()), device=self._device)
        there = steps < self._moved(lengths)[:, None]
        rows = (self._moved(self._begins[chosen])[:, None] + steps).masked_fill(~there, 0)
        text = self._text[rows].long().masked_fill(~there, 0)
        codes = self._codes[rows].long().masked_fill(~there[..., None], NONE)
        # An utterance's last rows speak it, and the one before them opens.
        opening = lengths - counts - 1 + int(lengths.max()) * np.arange(len(chosen))
        spoken = self._moved(_counted_from(opening, counts))
        frames = codes.flatten(0, 1).index_select(0, spoken + 1)
        first = torch.full_like(text, IGNORED).flatten().index_copy(0, spoken, frames[:, 0])
        return SpeechBatch(
            text=text,
            media=self._media[rows] & there,
            codes=codes,
            first=first.index_fill(0, self._moved(opening + counts), self._eos).view_as(text),
            spoken=spoken,
            frames=frames,
            sounds=self._sounds[self._moved(_counted_from(self._frames_begin[chosen], counts))].long(),
            lengths=self._moved(lengths),
        )

    def _moved(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


def _begins(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of what has `lengths` [n] begins, laid one after the other: [n]."""
    return np.cumsum(lengths) - lengths


def _counted_from(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """As many whole numbers as `counts` [n] says from each of `firsts` [n] on, one after the other."""
    return np.repeat(firsts - _begins(counts), counts) + np.arange(counts.sum())


def _ahead(sounds: Sequence[int]) -> NDArray[np.int16]:
    """Of each frame the sounds [F, AHEAD] from it on, IGNORED after the last."""
    padded = np.array([*sounds, *[IGNORED] * (AHEAD - 1)], dtype=np.int16)
    return np.lib.stride_tricks.sliding_window_view(padded, AHEAD)


def collate(
    utterances: Sequence[Utterance], config: OmniConfig, voice: str, device: torch.device | str = "cpu"
) -> SpeechBatch:
    """All of `utterances` in one batch on `device`, errors and tensors as in `Layout`."""
    return Layout(utterances, config, voice, device).batch(range(len(utterances)))


def _laid_out(one: Utterance, config: OmniConfig, voice: str) -> tuple[NDArray[np.int32], NDArray[np.int16]]:
    """Text ids [L] and input codes [L, G]; the last F rows have the frames."""
    talker, ids = config.talker, config.ids
    assert talker is not None
    groups, frames = one.codes.shape
    if not one.text or not frames or groups != talker.groups or len(one.sounds) != frames:
        raise ValueError(
            f"an utterance needs text and frames of {talker.groups} codes and a sound each, has {len(one.text)} ids, "
            f"{len(one.sounds)} sounds and {one.codes.shape}"
        )
    user = [one.prompt[position] for position in spoken_positions(one.prompt, ids)]
    said = [*one.text, ids.tts_eos, *[ids.tts_pad] * frames][: frames + 1]
    text = [*user, *one.prompt[-HEADER:], *[ids.tts_pad] * 4, ids.tts_bos, *said]
    codec = talker.codec
    special = [
        codec.nothink,
        codec.think_bos,
        codec.think_eos,
        speaker_id(talker.speakers, voice),
        codec.pad,
        codec.bos,
    ]
    codes = np.full((len(text), groups), NONE, dtype=np.int16)
    start = len(user) + OPENING
    codes[start - len(special) : start, 0] = special
    codes[start:] = one.codes.T
    return np.array(text, dtype=np.int32), codes


def _spoken(rows: Tensor, batch: SpeechBatch) -> Tensor:
    """Those of `rows` [B, L, W] that predict whole frames: [n, W]."""
    # `index_select`, since a GPU takes much longer for the gradient of brackets.
    return rows.flatten(0, 1).index_select(0, batch.spoken)


class _Projection(nn.Module):
    """Two linear layers with a SiLU between them, from the Thinker's width to the Talker's."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.thinker_hidden, config.proj_inter)
        self.linear_fc2 = nn.Linear(config.proj_inter, config.stack.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Project `x` [..., Hthinker]; returns [..., H]."""
        out: Tensor = self.linear_fc2(F.silu(self.linear_fc1(x)))
        return out


class Scale(nn.Module):
    """A table of rows for codes, smooth in the value that a code stands for, and of free rows for special ids after them.

    A code's row is a sum of powers of its value, each with a factor that is learned: what is learned of one code holds for
    those beside it. Scores by up to the second power are those of a normal distribution, whose likeliest code is its mean.
    """

    values: Tensor

    def __init__(
        self, codes: int, form: tuple[int, float], width: int, *, tables: int | None = None, special: int = 0
    ) -> None:
        """Rows [codes + special, width], or `tables` of them; `form` is how many powers, and of values up to what."""
        super().__init__()
        powers, reach = form
        self.powers = nn.Parameter(torch.empty(*([] if tables is None else [tables]), powers, width))
        self.special = nn.Parameter(torch.empty(special, width)) if special else None
        value = torch.linspace(-reach, reach, codes)
        self.register_buffer("values", value[:, None] ** torch.arange(powers), persistent=False)

    def forward(self) -> Tensor:
        """The table, [codes + special, width] or [tables, codes, width]."""
        rows = self.values @ self.powers
        return rows if self.special is None else torch.cat([rows, self.special])

    def centred(self) -> Tensor:
        """The table [tables, codes, width] less the row of the value 0, which adds the same to the scores of all codes.

        Nothing in training holds that row back. Where it is large, bfloat16 keeps little of what rows differ by, and scores in
        float32 are so coarse that the order of additions decides one code in ten thousand.
        """
        assert self.special is None, "special ids would need the same taken off"
        rows: Tensor = self.values[:, 1:] @ self.powers[..., 1:, :]
        return rows


class _Codec(Stack):
    """The Talker's stack with its table of codes and special ids."""

    def __init__(self, config: TalkerConfig, dropout: float) -> None:
        super().__init__(config.stack, dropout)
        self.codec_embedding = _own_scale(config, EMBEDDED)


def _own_scale(config: TalkerConfig, form: tuple[int, float]) -> Scale:
    codes = config.predictor.vocab
    return Scale(codes, form, config.stack.hidden, special=config.stack.vocab - codes)


def _predictor_scale(config: PredictorConfig, form: tuple[int, float]) -> Scale:
    return Scale(config.vocab, form, config.hidden, tables=config.groups - 1)


class _Dense(nn.Module):
    """The predictor's layers, its tables of codes [G-1, V, H], and the norm at the end."""

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__()
        self.codec_embedding = _predictor_scale(config, EMBEDDED)
        self.layers = nn.ModuleList(DenseLayer(config) for _ in range(config.layers))
        self.norm = RmsNorm(config.hidden, config.eps)


class CodePredictor(nn.Module):
    """Groups 1…G-1 of a frame from the Talker's row and the groups before."""

    def __init__(self, config: PredictorConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Dense(config)
        self.lm_head = _predictor_scale(config, SCORED)

    def forward(self, y: Tensor, first: Tensor, frames: Tensor) -> Tensor:
        """Logits [n, G-1, V] float32 of groups 1…G-1 after the groups before in `frames` [n, G].

        `y` [n, H] are the Talker's rows, `first` [n, H] the embeddings of group 0.
        """
        tables = self.model.codec_embedding()[:-1]
        # A product, as in `Talker._sums`.
        chosen = F.one_hot(frames[:, 1:-1], tables.shape[1]).to(tables.dtype)
        x = torch.cat([y[:, None], first[:, None], torch.einsum("ngv,gvh->ngh", chosen, tables)], dim=1)
        rope = rope_tables(x.shape[1], self.config.rope_theta, self.config.head_dim, x.device)
        for layer in self.model.layers:
            x = layer(x, rope)
        return torch.einsum("ngh,gvh->ngv", self.model.norm(x)[:, 1:], self.lm_head())


class Talker(nn.Module):
    """The Talker with its predictor, over the Thinker's table of text embeddings, which stays as it is."""

    text_embedding: Tensor
    barred: Tensor

    def __init__(self, config: OmniConfig, text_embedding: Tensor, *, dropout: float = 0.0, seed: int = 0) -> None:
        """`text_embedding` is the Thinker's [V, Hthinker]."""
        super().__init__()
        assert config.talker is not None
        self.config, self.part = config, config.talker
        self.model = _Codec(config.talker, dropout)
        self.codec_head = _own_scale(config.talker, SCORED)
        self.text_projection, self.hidden_projection = _Projection(config.talker), _Projection(config.talker)
        self.code_predictor = CodePredictor(config.talker.predictor)
        self.sounds_head = SoundsHead(config.talker.stack.hidden)
        self.register_buffer("text_embedding", text_embedding.detach().clone().float(), persistent=False)
        initialise(self, config.talker.stack.layers, seed)
        # One row for every medium: the bias alone is learned.
        nn.init.zeros_(self.hidden_projection.linear_fc2.weight)
        for name, parameter in self.hidden_projection.named_parameters():
            parameter.requires_grad_(name == "linear_fc2.bias")
        codes = config.talker.predictor.vocab
        barred = torch.arange(config.talker.stack.vocab) >= codes
        barred[config.talker.codec.eos] = False
        self.register_buffer("barred", barred, persistent=False)

    def embed(self, batch: SpeechBatch) -> Tensor:
        """Input rows [B, L, H] of `batch`: text or medium, plus the codes' embeddings."""
        text = self.text_projection(F.embedding(batch.text, self.text_embedding))
        medium = self.hidden_projection.linear_fc2.bias
        return torch.where(batch.media[..., None], medium, text) + self._sums(batch.codes)

    def _sums(self, codes: Tensor) -> Tensor:
        """Summed embeddings [B, L, H] of `codes` [B, L, G], nothing where there is none."""
        own, others = self.model.codec_embedding(), self.code_predictor.model.codec_embedding()
        table = torch.cat([own.new_zeros(1, own.shape[1]), own, others.flatten(0, 1)])
        starts = torch.arange(codes.shape[2], device=codes.device).sub(1).clamp(min=0) * others.shape[1]
        starts[1:] += own.shape[0]
        places = torch.where(codes == NONE, 0, codes + starts + 1).flatten(0, 1)
        # A product, since a GPU takes much longer for the gradient of a table that is looked up.
        chosen = table.new_zeros(len(places), len(table)).scatter_(1, places, 1.0)
        return (chosen @ table).view(*codes.shape[:2], -1)

    def forward(self, batch: SpeechBatch) -> tuple[Tensor, Tensor]:
        """Logits of group 0 [B, L, V] and of the others [n, G-1, V'], float32."""
        y = self.model(self.embed(batch), batch.valid)[0]
        return self._scores(y, _spoken(y, batch), batch.frames)

    def _scores(self, y: Tensor, rows: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Logits as `forward` gives them, of `y` [B, L, H] and of those `rows` [n, H] of it that predict `frames` [n, G]."""
        first = F.linear(y, self.codec_head()).masked_fill(self.barred, float("-inf"))
        return first, self.code_predictor(rows, F.embedding(frames[:, 0], self.model.codec_embedding()), frames)

    def loss(self, batch: SpeechBatch, weighting: Weighting) -> dict[str, Tensor]:
        """Losses of `batch`, scalars: `loss` in all; `first` and `rest`, and the shares of codes right; `balance`; `sounds`.

        The sounds of the frame that a row is about to speak, and of the next ones, are asked for as well. It makes the Talker
        keep its place in the text, which arrives faster than it is spoken, and learn how it sounds.
        """
        y, uneven = self.model(self.embed(batch), batch.valid)
        # Told the true groups before, the predictor would lean on them; served, it is told what was likeliest, which says
        # nothing that the row does not, and every group would add to the faults of those before. So it learns without.
        count = len(batch.frames)
        heard = batch.frames[torch.randperm(count, device=batch.frames.device)] if self.training else batch.frames
        rows = _spoken(y, batch)
        scores, rest_scores = self._scores(y, rows, heard)
        scores, wanted = scores.flatten(0, 1), batch.first.flatten()
        first = F.cross_entropy(scores, wanted, ignore_index=IGNORED)
        rest = F.cross_entropy(rest_scores.flatten(0, 1), batch.frames[:, 1:].flatten())
        counted = wanted != IGNORED
        sounds = self.sounds_head(rows, batch.sounds)
        return {
            "loss": first + REST_SHARE * rest + weighting.balance * uneven + weighting.letters * sounds,
            "first": first,
            "rest": rest,
            "first_right": ((scores.argmax(-1) == wanted) & counted).sum() / counted.sum(),
            "rest_right": (rest_scores.argmax(-1) == batch.frames[:, 1:]).float().mean(),
            "balance": uneven,
            "sounds": sounds,
        }

    @torch.no_grad()
    def retold(self, batch: SpeechBatch) -> SpeechBatch:
        """`batch` with frames that are given, of an utterance any share, become what is foreseen for them; tensors as before.

        That is what the Talker hears when it is served, but for faults that build on each other.
        """
        y = self.model(self.embed(batch), batch.valid)[0]
        # The predictor does not look at the groups before: the frames of others will do, and all groups are scored at once.
        others = batch.frames[torch.randperm(len(batch.frames), device=y.device)]
        first, rest = self._scores(y, _spoken(y, batch), others)
        codes = self.part.predictor.vocab
        likeliest = _spoken(first, batch)[:, :codes].argmax(-1)
        frames = torch.cat([likeliest[:, None], rest.argmax(-1)], dim=1)
        told = batch.codes.flatten(0, 1).index_copy(0, batch.spoken + 1, frames).view_as(batch.codes)
        utterances, rows = batch.text.shape
        chosen = torch.rand(utterances, rows, 1, device=y.device) < torch.rand(utterances, 1, 1, device=y.device)
        return replace(batch, codes=torch.where(chosen, told, batch.codes))

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of Talker and predictor under their released names, in their released shapes."""
        parameters, tables = dict(self.named_parameters()), dict[str, Tensor]()
        for name, module in self.named_modules():
            if isinstance(module, Scale):
                del parameters[f"{name}.powers"]
                whole = parameters.pop(f"{name}.special", None) is not None
                scores = module is self.code_predictor.lm_head
                tables[f"{name}.weight" if whole else name] = module.centred() if scores else module()
        return tensors({**parameters, **tables}, "talker.")


def corrupted(batch: SpeechBatch, most: float, codes: int, generator: torch.Generator | None = None) -> SpeechBatch:
    """`batch` with frames' input codes [B, L, G] below `codes` changed; what is to be predicted stays.

    Of an utterance any share of the frames up to `most` is misheard: half of those become any frame of the batch, the others
    are blurred, drawn to the middle and off by chance, as a frame is that the Talker is not sure of. Half of the remaining
    frames are off by a code or so. Served, the Talker hears its own mistakes; trained on true frames alone, it would know an
    utterance by them and recite it.
    """
    given = batch.codes
    held = (given >= 0) & (given < codes)

    def chance(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=given.device)

    def normal() -> Tensor:
        return torch.randn(given.shape, generator=generator, device=given.device)

    utterances, rows = given.shape[:2]
    middle, value = (codes - 1) / 2, given.to(torch.float32)
    frames = batch.frames
    spread = frames.float().std(0, correction=0)
    blur = chance(utterances, 1, 1)
    blurred = middle + (value - middle) * (1 - 0.4 * blur) + 0.7 * blur * spread * normal()
    picks = torch.randint(len(frames), (utterances, rows), generator=generator, device=given.device)
    misheard = torch.where(chance(utterances, rows, 1) < 0.5, frames[picks].to(torch.float32), blurred)
    near = torch.where(chance(utterances, rows, 1) < 0.5, value + normal(), value)
    drawn = torch.where(chance(utterances, rows, 1) < chance(utterances, 1, 1) * most, misheard, near)
    return replace(batch, codes=torch.where(held, drawn.round().clamp(0, codes - 1).long(), given))


@torch.inference_mode()
def foreseen(model: Talker, utterances: Sequence[Utterance], voice: str) -> list[NDArray[np.int64]]:
    """The codes [G, F] that `model` foresees greedily of each utterance, told the frames before.

    Those are the true frames at first and then, in a second round, what the first one foresaw: as smooth as what the Talker
    hears when it is served, and in time with the true ones.
    """
    device = model.text_embedding.device
    for _ in range(2):
        batch = collate(utterances, model.config, voice, device)
        frames = _greedy(model, _spoken(model.model(model.embed(batch), batch.valid)[0], batch))
        ends = np.cumsum([one.codes.shape[1] for one in utterances])[:-1]
        split = np.split(frames.t().cpu().numpy(), ends, axis=1)
        utterances = [replace(one, codes=codes) for one, codes in zip(utterances, split, strict=True)]
    return [one.codes for one in utterances]


def _greedy(model: Talker, y: Tensor) -> Tensor:
    """Frames [n, G], group after group, from the Talker's rows `y` [n, H]."""
    codes, groups = model.part.predictor.vocab, model.part.groups
    table = model.model.codec_embedding()
    frames = y.new_zeros(len(y), groups, dtype=torch.int64)
    frames[:, 0] = (y @ model.codec_head()[:codes].t()).argmax(-1)
    first = F.embedding(frames[:, 0], table)
    for group in range(1, groups):
        frames[:, group] = model.code_predictor(y, first, frames)[:, group - 1].argmax(-1)
    return frames


class Lots:
    """Draws utterances of like length for a step; what a step draws depends on the seed and the step alone."""

    def __init__(self, frames: NDArray[np.int64], budget: int, seed: int) -> None:
        """`frames` [U] are those of each utterance, a batch holds about `budget`. ValueError without utterances."""
        self._alike = Alike(range(len(frames)), lambda place: int(frames[place]))
        self._budget, self._seed = budget, seed

    def draw(self, step: int, share: float) -> list[int]:
        """The places of the utterances of `step`, from the shortest `share` (above 0, up to 1) of all; at least one."""
        return self._alike.draw(self._budget, share, np.random.default_rng((self._seed, step)))


def train(
    config: OmniConfig,
    text_embedding: Tensor,
    utterances: Sequence[Utterance],
    folder: Path,
    *,
    voice: str,
    frames: int,
    settings: Settings,
    minutes: float,
    device: torch.device,
    weighting: Weighting = Weighting(letters=0.5),  # noqa: B008 - a frozen value
    corrupt: float = 0.7,
    own: float = 0.5,
    dropout: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Talker, bool]:
    """Train on batches of about `frames` frames, for up to `minutes` from where `folder` stands.

    Returns the averaged model and whether training is over. `text_embedding` [V, Hthinker] is the Thinker's; `corrupt` is the
    largest share of frames that are misheard, 0 to leave all as they are (see `corrupted`); `own` the share of batches that
    are told what the Talker itself foresees (see `Talker.retold`); `dropout` that of what the Talker's layers add that is left
    out; `clock` counts seconds. ValueError without utterances.
    """
    training = Training(
        Talker(config, text_embedding, dropout=dropout, seed=settings.seed), settings, folder, device, clock
    )
    layout = Layout(utterances, config, voice, device)
    lots = Lots(layout.frames, frames, settings.seed)
    model = training.module
    assert isinstance(model, Talker)
    compiled([*model.model.layers, *model.code_predictor.model.layers], device, dynamic=True)

    def losses(moment: Moment) -> dict[str, Tensor]:
        batch = layout.batch(lots.draw(moment.step, growing(moment.progress)))
        if corrupt:
            batch = corrupted(batch, corrupt, model.part.predictor.vocab)
        if np.random.default_rng((settings.seed, moment.step, 1)).random() < own:
            batch = model.retold(batch)
        return model.loss(batch, weighting)

    over = training.run(losses, minutes)
    averaged = training.averaged()
    assert isinstance(averaged, Talker)
    return averaged, over
