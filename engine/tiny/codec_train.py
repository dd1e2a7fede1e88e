"""Training of the codec: segments of speech, spectral losses, critics for the last part, and state that resumes.

Length is given in minutes, and the learning rate follows the share of them that is gone, so a run ends where it should on any
machine. A step's segments are a function of (seed, step). No autocast but in the critics: a float32 step of so small a network
waits for kernel launches, and bfloat16's noise would drown the quiet half of the spectrum.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.model.config import Code2WavConfig
from engine.tiny import shards, speech, workdir
from engine.tiny.codec import MEL_BINS, MEL_HOP, MEL_WINDOW, QUIET, Codec, LogMel, magnitudes
from engine.tiny.framed import FRAME
from engine.tiny.optim import rounded_products
from engine.tiny.voices import MAIN_VOICE

WINDOWS = (128, 256, 512, 1024, 2048)
CRITIC_WINDOWS = (512, 1024, 2048)
PERIODS = (2, 3, 5, 7, 11)
# Nepers to decibels.
DECIBELS = 20.0 / math.log(10.0)
LEAD = FRAME  # samples of silence that a segment may begin or end with
FEW_BOOKS_SHARE = 0.25  # share of the segments that hear fewer than all books


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run may vary. `critics_from` is the share of the time after which the critics join, 1 for never.

    `width` is the encoder's; `batch` segments of `frames` frames make a step. The learning rate rises to `rate` over
    `warm_up_steps` and falls along a cosine to `last_rate`. `commitment`, `adversarial` and `matching` weigh those losses
    against the spectral one; `memory` is the share that the averaged weights keep in a step.
    """

    width: int = 128
    batch: int = 48
    frames: int = 24
    rate: float = 1e-3
    last_rate: float = 2e-5
    warm_up_steps: int = 200
    commitment: float = 0.25
    critics_from: float = 0.4
    adversarial: float = 0.07
    matching: float = 0.15
    memory: float = 0.999
    log_steps: int = 100
    save_seconds: float = 120.0
    seed: int = 0


DEFAULTS = Settings()


class Pool:
    """Utterances on a device as one row of 16-bit samples; segments of them by lot."""

    def __init__(self, waves: Iterable[NDArray[np.int16]], device: torch.device) -> None:
        held = [wave for wave in waves if len(wave)]
        if not held:
            raise ValueError("there is no speech to train on: every wave is empty")
        lengths = np.array([len(wave) for wave in held])
        self.samples = torch.from_numpy(np.concatenate(held)).to(device)
        self.lengths = torch.from_numpy(lengths).to(device)
        self.starts = self.lengths.cumsum(0) - self.lengths

    def segments(self, count: int, length: int, generator: torch.Generator, step: int = 1) -> Tensor:
        """`count` segments as [count, length] float32; an utterance's chance is its length, and around it is silence.

        A segment begins a multiple of `step` samples from where its utterance does, or before it.
        """
        device = self.samples.device
        place = torch.rand(count, generator=generator, device=device, dtype=torch.float64) * len(self.samples)
        chosen = torch.searchsorted(self.starts, place.long(), right=True) - 1
        own = self.lengths[chosen]
        room = ((own - length).clamp(min=0) + 2 * LEAD) // step + 1
        offset = (torch.rand(count, generator=generator, device=device) * room).long() * step - LEAD // step * step
        within = offset[:, None] + torch.arange(length, device=device)
        sounding = (within >= 0) & (within < own[:, None])
        index = (self.starts[chosen][:, None] + within).clamp(0, len(self.samples) - 1)
        segments: Tensor = self.samples[index].float() / 32768.0 * sounding
        return segments


def utterances(corpus: Path) -> list[NDArray[np.int16]]:
    """What the main voice says at its own pitch in a corpus that `engine.tiny.speech` made, in order: int16 [n] at 24 kHz.

    The Talker speaks with that voice alone, so the codec spends nothing on others.
    """
    return [
        np.asarray(shards.read(corpus, clip.shard, clip.start, clip.samples), dtype=np.int16)
        for clip in speech.manifest(corpus)
        if clip.line.voice == MAIN_VOICE and clip.line.pitch == 1.0
    ]


class SpectralLoss(nn.Module):
    """How far a wave's spectra are from the wanted one's: linear and logarithmic magnitudes at five windows, and mel."""

    def __init__(self) -> None:
        super().__init__()
        for width in WINDOWS:
            self.register_buffer(f"window{width}", torch.hann_window(width), persistent=False)
        self.mel = LogMel(MEL_BINS, MEL_WINDOW, MEL_HOP)

    def forward(self, got: Tensor, want: Tensor) -> Tensor:
        """A scalar for `got` and `want` [B, n]."""
        total: Tensor = (self.mel(got) - self.mel(want)).abs().mean()
        for width in WINDOWS:
            window = self.get_buffer(f"window{width}")
            ours, theirs = magnitudes(got, window, width // 4), magnitudes(want, window, width // 4)
            logs = (ours.clamp(min=QUIET).log() - theirs.clamp(min=QUIET).log()).abs().mean()
            linear = (ours - theirs).abs().mean() / theirs.mean().clamp(min=QUIET)
            total = total + (logs + linear) / len(WINDOWS)
        return total


class _SpectrumCritic(nn.Module):
    """Judges a wave by its complex spectrum under one window."""

    def __init__(self, window: int, width: int = 24) -> None:
        super().__init__()
        self.hop = window // 4
        self.register_buffer("window", torch.hann_window(window), persistent=False)
        inputs = (2, width, width, width)
        self.stages = nn.ModuleList(
            nn.Conv2d(n, width, (3, 7), stride=(1, 2 if place else 1), padding=(1, 3)) for place, n in enumerate(inputs)
        )
        self.last = nn.Conv2d(width, 1, (3, 3), padding=1)

    def forward(self, wave: Tensor) -> list[Tensor]:
        window = self.get_buffer("window")
        spectrum = (
            torch.stft(wave, len(window), self.hop, window=window, return_complex=True) / window.square().sum().sqrt()
        )
        return _judged(torch.view_as_real(spectrum).permute(0, 3, 2, 1), self.stages, self.last)


class _PeriodCritic(nn.Module):
    """Judges a wave folded at one period."""

    def __init__(self, period: int) -> None:
        super().__init__()
        self.period = period
        widths = (1, 16, 32, 64, 96)
        self.stages = nn.ModuleList(
            nn.Conv2d(inputs, outputs, (5, 1), stride=(3, 1), padding=(2, 0))
            for inputs, outputs in itertools.pairwise(widths)
        )
        self.last = nn.Conv2d(widths[-1], 1, (3, 1), padding=(1, 0))

    def forward(self, wave: Tensor) -> list[Tensor]:
        folded = F.pad(wave, (0, -wave.shape[1] % self.period))
        return _judged(folded.view(len(wave), 1, -1, self.period), self.stages, self.last)


def _judged(x: Tensor, stages: nn.ModuleList, last: nn.Module) -> list[Tensor]:
    """What each of `stages` made of `x` [B, C, A, D], and at the end the judgement."""
    found = []
    with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
        for stage in stages:
            x = F.leaky_relu(stage(x), 0.1)
            found.append(x)
        found.append(last(x))
    return found


class Critics(nn.Module):
    """Networks that learn to tell speech (1) from what the decoder makes (0), by least squares."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(
            [*(_SpectrumCritic(window) for window in CRITIC_WINDOWS), *(_PeriodCritic(period) for period in PERIODS)]
        )

    def mistakes(self, real: Tensor, made: Tensor) -> Tensor:
        """How wrong the critics are about `real` and `made` [B, n]: a scalar to train them by."""
        total = real.new_zeros(())
        for critic in self.each:
            yes, no = critic(real)[-1].float(), critic(made.detach())[-1].float()
            total = total + (1.0 - yes).square().mean() + no.square().mean()
        return total / len(self.each)

    def against(self, real: Tensor, made: Tensor) -> tuple[Tensor, Tensor]:
        """Two scalars to train the codec by: how far `made` [B, n] is from passing, and from `real` in what critics see."""
        passing, matching = real.new_zeros(()), real.new_zeros(())
        for critic in self.each:
            with torch.no_grad():
                wanted = critic(real)
            found = critic(made)
            passing = passing + (1.0 - found[-1].float()).square().mean()
            for ours, theirs in zip(found[:-1], wanted[:-1], strict=True):
                theirs = theirs.float()
                matching = matching + (ours.float() - theirs).abs().mean() / theirs.abs().mean().clamp(min=QUIET)
        return passing / len(self.each), matching / len(self.each)


@dataclass(slots=True)
class _Progress:
    step: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Trainer:
    """A run: the codec, its running average, the critics, their optimizers, and how far it is."""

    codec: Codec
    settings: Settings
    device: torch.device
    progress: _Progress = field(default_factory=_Progress)
    average: Codec = field(init=False)
    critics: Critics = field(init=False)
    loss: SpectralLoss = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    critics_optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.codec.to(self.device)
        self.average = copy.deepcopy(self.codec).requires_grad_(False)
        self.critics, self.loss = Critics().to(self.device), SpectralLoss().to(self.device)
        self.optimizer = _adam(self.codec, self.settings.rate)
        self.critics_optimizer = _adam(self.critics, self.settings.rate)

    def step(self, pool: Pool, share: float) -> dict[str, Tensor]:
        """Train on the next batch, `share` of the run's time being gone; returns the losses as scalars on the device."""
        settings = self.settings
        generator = torch.Generator(self.device).manual_seed(settings.seed * 1_000_003 + self.progress.step)
        wave = self._segments(pool, generator)
        if self.progress.step == 0:
            self.codec.quantizer.start(self.codec.encoder(wave), self.codec.table, generator)
        made, seen = self.codec(wave, self._active(generator))
        want = wave[:, : made.shape[1]]
        spectral = self.loss(made, want)
        total = spectral + settings.commitment * seen.commitment
        losses = {"spectral": spectral, "commitment": seen.commitment}
        self._set_rate(share)
        if share >= settings.critics_from:
            losses["critics"] = self.critics.mistakes(want, made)
            _descend(losses["critics"], self.critics, self.critics_optimizer)
            passing, matching = self.critics.requires_grad_(False).against(want, made)
            self.critics.requires_grad_(True)
            total = total + settings.adversarial * passing + settings.matching * matching
            losses |= {"passing": passing, "matching": matching}
        _descend(total, self.codec, self.optimizer)
        self.codec.quantizer.learn(seen, self.codec.table, generator)
        self._average()
        self.progress.step += 1
        return {name: value.detach() for name, value in losses.items()}

    @torch.no_grad()
    def judge(self, pool: Pool) -> float:
        """The averaged codec's `distance` over a batch of `pool`, the same one every time (no tensors)."""
        wave = self._segments(pool, torch.Generator(self.device).manual_seed(self.settings.seed))
        books = torch.full((len(wave),), self.codec.quantizer.books, device=self.device)
        return distance(self.average(wave, books)[0], wave)

    def _segments(self, pool: Pool, generator: torch.Generator) -> Tensor:
        frame = self.codec.decoder.frame
        return pool.segments(self.settings.batch, self.settings.frames * frame, generator, frame)

    def _active(self, generator: torch.Generator) -> Tensor:
        """How many books each clip of the batch hears: all, or by lot any number that says something of every part."""
        quantizer, batch = self.codec.quantizer, self.settings.batch
        counts = torch.randint(quantizer.parts, quantizer.books + 1, (batch,), generator=generator, device=self.device)
        few = torch.rand(batch, generator=generator, device=self.device) < FEW_BOOKS_SHARE
        return torch.where(few, counts, quantizer.books)

    def _set_rate(self, share: float) -> None:
        settings = self.settings
        low = settings.last_rate
        rate = low + (settings.rate - low) * 0.5 * (1.0 + math.cos(math.pi * min(share, 1.0)))
        warm = min(1.0, (self.progress.step + 1) / settings.warm_up_steps)
        for optimizer in (self.optimizer, self.critics_optimizer):
            for group in optimizer.param_groups:
                group["lr"] = rate * warm

    @torch.no_grad()
    def _average(self) -> None:
        """Move the average; early on its memory is shorter, so that it holds nothing of the first weights for long."""
        memory = min(self.settings.memory, (self.progress.step + 1) / (self.progress.step + 10))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.codec.parameters()), 1.0 - memory)

    def save(self, folder: Path) -> None:
        """Write the state into `folder`: two files named by the step, in place of those of an earlier step.

        Weights and their average are kept whole; the optimizers' moments as bfloat16, which is as much as their use shows.
        """
        folder.mkdir(parents=True, exist_ok=True)
        weights = _named("codec", self.codec.state_dict()) | _named("average", dict(self.average.named_parameters()))
        moments = _named("critics.weight", self.critics.state_dict())
        moments |= _named("codec.moment", _moments(self.optimizer))
        moments |= _named("critics.moment", _moments(self.critics_optimizer))
        note = {"step": str(self.progress.step), "seconds": repr(self.progress.seconds)}
        for kind, tensors in (("moments", moments), ("codec", weights)):
            path = folder / f"{kind}-{self.progress.step:07d}.safetensors"
            partial = path.with_suffix(".partial")
            save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, partial, metadata=note)
            partial.replace(path)
        for path in folder.glob("*-*.safetensors"):
            if _step_of(path) < self.progress.step:
                path.unlink()

    def resume(self, folder: Path) -> bool:
        """Take the newest state in `folder` up; False when there is none.

        ValueError when a file of it is missing, damaged or of other shapes.
        """
        # The weights are written last, so where they are the moments are too.
        path = _newest(folder)
        if path is None:
            return False
        weights, self.progress = _read(path)
        moments, _ = _read(path.with_name(path.name.replace("codec", "moments")))
        with _of_this_model(path):
            self.codec.load_state_dict(_under("codec", weights))
            self.average.load_state_dict(_under("average", weights), strict=False)
            self.critics.load_state_dict(_under("critics.weight", moments))
        _restore(self.optimizer, _under("codec.moment", moments))
        _restore(self.critics_optimizer, _under("critics.moment", moments))
        return True


def _adam(module: nn.Module, rate: float) -> torch.optim.Optimizer:
    trained = [tensor for tensor in module.parameters() if tensor.requires_grad]
    return torch.optim.AdamW(trained, lr=rate, betas=(0.8, 0.99), weight_decay=0.01, fused=trained[0].is_cuda)


def _descend(loss: Tensor, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, by the rest of their names."""
    return {name[len(prefix) + 1 :]: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}.")}


def _moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """An optimizer's state by `parameter.key`; counts of steps whole, the rest bfloat16."""
    state = optimizer.state_dict()["state"]
    return {
        f"{index}.{key}": value.to(torch.bfloat16) if value.dim() else value
        for index, held in state.items()
        for key, value in held.items()
    }


def _restore(optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in moments.items():
        index, key = name.split(".")
        state.setdefault(int(index), {})[key] = value
    # Loading widens them to the parameters' dtype and takes them to their device.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _step_of(path: Path) -> int:
    return int(path.stem.rpartition("-")[2])


def _newest(folder: Path) -> Path | None:
    """The weights of the newest state."""
    return max(folder.glob("codec-*.safetensors"), key=_step_of, default=None)


def _read(path: Path) -> tuple[dict[str, Tensor], _Progress]:
    """Tensors of a file of a state, and how far that was; ValueError where it is missing or damaged."""
    way_out = f"fetch it again, or delete all of step {_step_of(path)} in {path.parent} to begin from nothing"
    try:
        with safe_open(path, framework="pt") as file:
            note = file.metadata()
            return {name: file.get_tensor(name) for name in file.keys()}, _Progress(  # noqa: SIM118
                int(note["step"]), float(note["seconds"])
            )
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; {way_out}") from None
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); {way_out}") from None


@contextmanager
def _of_this_model(path: Path) -> Iterator[None]:
    """Say of tensors that don't fit that `path` is of another model."""
    try:
        yield
    except RuntimeError as error:
        raise ValueError(f"{path} is of another model: {error}; train into an empty folder") from None


def load(folder: Path, config: Code2WavConfig, width: int = DEFAULTS.width) -> Codec:
    """Return the averaged codec of the newest state in `folder`, on the CPU.

    It needs no moments, which are for going on with training. ValueError when there is no state, or one that is damaged or of
    other shapes.
    """
    path = _newest(folder)
    if path is None:
        raise ValueError(f"{folder} holds no codec-*.safetensors; train into it first")
    tensors, _ = _read(path)
    codec = Codec(config, width)
    with _of_this_model(path):
        # Counts and sums have no average.
        codec.load_state_dict(_under("codec", tensors) | _under("average", tensors))
    return codec.requires_grad_(False).eval()


def seconds(folder: Path) -> float:
    """For how long the newest state in `folder` was trained; 0 without one. ValueError when it is damaged."""
    path = _newest(folder)
    return 0.0 if path is None else _read(path)[1].seconds


@torch.no_grad()
def distance(got: Tensor, want: Tensor) -> float:
    """Mean difference of the log-mel spectra of `got` [B, n] and `want` [B, m] as far as both go, in decibels."""
    mel = LogMel(MEL_BINS, MEL_WINDOW, MEL_HOP).to(got.device)
    both = min(got.shape[1], want.shape[1])
    difference = mel(got[:, :both]) - mel(want[:, :both])
    return float(difference.abs().mean()) * DECIBELS


def train(
    waves: Sequence[NDArray[np.int16]],
    out: Path,
    minutes: float,
    device: str | torch.device,
    *,
    config: Code2WavConfig,
    settings: Settings = DEFAULTS,
    held_out: Sequence[NDArray[np.int16]] = (),
    sitting: float | None = None,
) -> Codec:
    """Train on `waves`, each [n] at 24 kHz, for `minutes` in all, or go on where `out` stands.

    It stops after `sitting` minutes of them, if that is sooner, and a later call goes on.

    `out` gets the state (two files, `Trainer.save`) and `log.jsonl`: losses, and at every save the distance in decibels
    over a batch of `held_out`. Returns the averaged codec. ValueError for waves without samples, a state of another model
    in `out`, or a loss that is no number.
    """
    place = torch.device(device)
    torch.manual_seed(settings.seed)
    trainer = Trainer(Codec(config, settings.width), settings, place)
    trainer.resume(out)
    out.mkdir(parents=True, exist_ok=True)
    workdir.cut(out / "log.jsonl", trainer.progress.step)
    pool, judged = Pool(waves, place), Pool(held_out, place) if held_out else None
    end = min(minutes * 60.0, trainer.progress.seconds + (minutes if sitting is None else sitting) * 60.0)
    log = out / "log.jsonl"
    with _fast_steps():
        while trainer.progress.seconds < end:
            _until_saved(trainer, pool, minutes * 60.0, end, log)
            trainer.save(out)
            if judged is not None:
                _write(log, trainer, {"held_out_db": trainer.judge(judged)})
    return trainer.average.eval()


@contextmanager
def _fast_steps() -> Iterator[None]:
    """Let a GPU look for each convolution's fastest way, since all steps have the same shapes, and round products' operands."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with rounded_products():
            yield
    finally:
        # Encoding a corpus, each clip of its own length, would look anew for each.
        torch.backends.cudnn.benchmark = before


def _until_saved(trainer: Trainer, pool: Pool, whole: float, end: float, log: Path) -> None:
    """Train until the next state is due, or until second `end` of the `whole` run's."""
    settings, progress = trainer.settings, trainer.progress
    before, began = progress.seconds, time.monotonic()
    due = min(end, before + settings.save_seconds)
    while progress.seconds < due:
        losses = trainer.step(pool, progress.seconds / whole)
        progress.seconds = before + time.monotonic() - began
        # A state is saved only after its losses have proved to be numbers.
        if progress.step % settings.log_steps == 0 or progress.seconds >= due:
            _write(log, trainer, {name: float(value) for name, value in losses.items()})


def _write(log: Path, trainer: Trainer, values: dict[str, float]) -> None:
    broken = [name for name, value in values.items() if not math.isfinite(value)]
    if broken:
        raise ValueError(f"{', '.join(broken)} is no number at step {trainer.progress.step}; lower Settings.rate")
    counts = trainer.codec.quantizer.counts
    shares = counts / counts.sum(1, keepdim=True)
    used = float(torch.special.entr(shares).sum(1).exp().mean())
    line = {"step": trainer.progress.step, "seconds": round(trainer.progress.seconds, 1), "codes_used": used, **values}
    workdir.append(log, json.dumps({name: round(value, 5) for name, value in line.items()}).encode())
