"""Training by the clock: AdamW with warm-up and cosine, averaged weights, and a state that resumes from small files."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.swa_utils import get_ema_multi_avg_fn

from engine.tiny import workdir

Module = TypeVar("Module", bound=nn.Module)

SHARD_BYTES = 15_000_000
# Not cuDNN's: it plans for every new shape anew, which takes longer than a step.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# Vectors, embeddings and heads are not pulled towards zero: rare ids would fade.
KEPT = ("embed_tokens", "codec_embedding", "lm_head", "codec_head")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to train. `minutes` are those of the whole training, over all its pieces.

    The rate rises to `peak` over `warmup` steps and falls along a cosine to `floor` of it. `clip` bounds the gradient's norm,
    `average` is the decay of the averaged weights. A line is logged every `log_every` steps, the state saved every `save_s`
    seconds.
    """

    minutes: float
    peak: float = 2e-3
    floor: float = 0.02
    warmup: int = 500
    weight_decay: float = 0.05
    clip: float = 1.0
    average: float = 0.999
    seed: int = 0
    log_every: int = 50
    save_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Moment:
    """Where training stands: steps done, and the `progress` from 0 to 1 of its time."""

    step: int
    progress: float


Loss = Callable[[Moment], Mapping[str, Tensor]]
"""Gives the losses of one step, scalars by name; "loss" is the one that is minimised, the others are logged."""


@contextmanager
def rounded_products() -> Iterator[None]:
    """Let a GPU round the operands of float32 products to TF32.

    These models are so small that a step waits for launches: autocast, which adds a cast to every product, takes longer.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def compiled(modules: Iterable[nn.Module], device: torch.device, *, dynamic: bool) -> None:
    """Let PyTorch compile `modules`, which are of few kinds, on a GPU alone; `dynamic` says that shapes of inputs vary.

    A step of such small models waits for the launches of its many small kernels; compiled, a module has few.
    """
    if device.type == "cuda":
        for module in modules:
            module.compile(dynamic=dynamic)


def rate(settings: Settings, moment: Moment) -> float:
    """The learning rate at `moment`."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(moment.progress, 1.0)))
    return (
        settings.peak * min(1.0, (moment.step + 1) / settings.warmup) * (settings.floor + (1 - settings.floor) * cosine)
    )


class Training:
    """One module in training. Its state lives in `folder`: `state-STEP/` with shards, and the curve in `curve.jsonl`."""

    def __init__(
        self,
        module: nn.Module,
        settings: Settings,
        folder: Path,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Move `module` to `device` and resume from `folder` if it holds a state; `clock` counts seconds.

        ValueError for a state that is damaged or of another module.
        """
        self.module, self.settings, self.folder, self.device = module.to(device), settings, folder, device
        self._clock = clock
        self._learned = {name: value for name, value in module.named_parameters() if value.requires_grad}
        self._average = {name: value.detach().clone() for name, value in self._learned.items()}
        self._optimizer = torch.optim.AdamW(self._groups(), lr=0.0, betas=(0.9, 0.98), fused=device.type == "cuda")
        self.step, self.seconds = 0, 0.0
        folder.mkdir(parents=True, exist_ok=True)
        if (state := _latest(folder)) is not None:
            self._resume(state)
        # A run that was broken off may have gone on after its last state, or have ended before its first.
        workdir.cut(self._curve, self.step)

    @property
    def _curve(self) -> Path:
        return self.folder / "curve.jsonl"

    @property
    def moment(self) -> Moment:
        """Where training stands."""
        return Moment(self.step, self.seconds / (60 * self.settings.minutes))

    def run(self, loss: Loss, minutes: float) -> bool:
        """Train for up to `minutes` and save; True when the whole training is over. FloatingPointError when it diverges."""
        started, before = self._clock(), self.seconds
        end, saved = min(before + 60 * minutes, 60 * self.settings.minutes), before
        self.module.train()
        while self.seconds < end:
            with sdpa_kernel(ATTENTION), rounded_products():
                self._step(loss)
            self.seconds = before + self._clock() - started
            if self.seconds - saved >= self.settings.save_s:
                self.save()
                saved = self.seconds
        self.save()
        return self.seconds >= 60 * self.settings.minutes

    def averaged(self) -> nn.Module:
        """A copy of the module with the averaged weights, ready to evaluate; tensors as in the module."""
        module = copy.deepcopy(self.module).eval()
        with torch.no_grad():
            for name, value in module.named_parameters():
                if name in self._average:
                    value.copy_(self._average[name])
        return module

    def _groups(self) -> list[dict[str, object]]:
        """Parameters with and without weight decay."""
        faded = [v for name, v in self._learned.items() if v.dim() > 1 and not any(part in name for part in KEPT)]
        chosen = {id(value) for value in faded}
        kept = [value for value in self._learned.values() if id(value) not in chosen]
        decay = self.settings.weight_decay
        groups = ((faded, decay), (kept, 0.0))
        return [{"params": values, "weight_decay": amount} for values, amount in groups if values]

    def _step(self, loss: Loss) -> None:
        moment = self.moment
        # What a step draws depends on the seed and the step alone, so that a resumed training draws what an unbroken one would.
        torch.manual_seed((self.settings.seed << 32) + self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate(self.settings, moment)
        losses = loss(moment)
        self._optimizer.zero_grad(set_to_none=True)
        losses["loss"].backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(list(self._learned.values()), self.settings.clip)
        self._optimizer.step()
        # Early on, an average over many steps would remember the first weights for too long.
        decay = min(self.settings.average, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
            average(list(self._average.values()), list(self._learned.values()), 0)
        self.step += 1
        if self.step % self.settings.log_every == 0:
            self._log(moment, {**losses, "gradient": norm})

    def _log(self, moment: Moment, values: Mapping[str, Tensor]) -> None:
        line = {name: round(float(value.detach()), 5) for name, value in values.items()}
        head = {"step": self.step, "seconds": round(self.seconds, 2), "rate": round(rate(self.settings, moment), 7)}
        workdir.append(self._curve, json.dumps(head | line).encode())
        if not math.isfinite(line["loss"]):
            raise FloatingPointError(
                f"training diverged before step {self.step}: lower the peak rate, or resume earlier"
            )

    def save(self) -> None:
        """Write the state as files of 15 MB at most, and drop the one before it once they are all there.

        Weights go in float32; averages and the optimizer's moments, which bear it, in bfloat16.
        """
        target = self.folder / f"state-{self.step:08d}"
        if target.exists():
            # It was resumed from and no step was made since.
            return
        held = {f"weight.{name}": value.detach() for name, value in self._learned.items()}
        held |= {f"average.{name}": value.bfloat16() for name, value in self._average.items()}
        for name, value in self._learned.items():
            for key in ("exp_avg", "exp_avg_sq"):
                if value in self._optimizer.state:
                    held[f"{key}.{name}"] = self._optimizer.state[value][key].bfloat16()
        part = self.folder / "state.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        files = list(shards(held, SHARD_BYTES))
        for index, shard in enumerate(files):
            save_file({name: value.cpu().contiguous() for name, value in shard.items()}, part / f"{index}.safetensors")
        meta = _Meta(self.step, self.seconds, len(files))
        (part / "meta.json").write_bytes(msgspec.json.encode(meta) + b"\n")
        before = list(self.folder.glob("state-[0-9]*"))
        os.replace(part, target)
        for path in before:
            shutil.rmtree(path)

    def _resume(self, state: Path) -> None:
        meta, held = _read(state)
        self.step, self.seconds = meta.step, meta.seconds
        with torch.no_grad():
            for name, value in self._learned.items():
                value.copy_(_taken(held, f"weight.{name}", value, state))
                self._average[name].copy_(_taken(held, f"average.{name}", value, state))
                if f"exp_avg.{name}" in held:
                    self._optimizer.state[value] = {
                        # The fused optimizer keeps its count on the device, the plain one on the host.
                        "step": torch.tensor(float(self.step), device=self.device),
                        **{
                            key: _taken(held, f"{key}.{name}", value, state).to(self.device, value.dtype)
                            for key in ("exp_avg", "exp_avg_sq")
                        },
                    }


class _Meta(msgspec.Struct, frozen=True):
    """How far a state is, and how many shards it has; older states don't say how many."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    files: int | None = None


def averaged(module: Module, folder: Path) -> Module:
    """Give `module` the averaged weights of the newest state in `folder`, ready to evaluate; tensors as in the module.

    ValueError where there is no state, or one that is damaged or of another module.
    """
    if (state := _latest(folder)) is None:
        raise ValueError(f"{folder} holds no state-*; train into it first")
    _, held = _read(state)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if value.requires_grad:
                value.copy_(_taken(held, f"average.{name}", value, state))
    return module.eval()


def _latest(folder: Path) -> Path | None:
    return max(folder.glob("state-[0-9]*"), default=None)


def _read(state: Path) -> tuple[_Meta, dict[str, Tensor]]:
    """What a state says of itself, and its tensors; ValueError names a file that is missing or damaged."""
    path, held = state / "meta.json", dict[str, Tensor]()
    try:
        meta = msgspec.json.decode(path.read_bytes(), type=_Meta)
        count = len(list(state.glob("*.safetensors"))) if meta.files is None else meta.files
        for index in range(count):
            path = state / f"{index}.safetensors"
            held |= load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; {_way_out(state)}") from None
    except (msgspec.DecodeError, SafetensorError) as error:
        raise ValueError(f"{path} is damaged ({error}); {_way_out(state)}") from None
    return meta, held


def _taken(held: Mapping[str, Tensor], name: str, like: Tensor, state: Path) -> Tensor:
    """The tensor `name` of a state, of the shape of `like`."""
    if name not in held:
        raise ValueError(f"{state} has no {name}; {_way_out(state)}")
    if held[name].shape != like.shape:
        raise ValueError(
            f"{state} is of another model: {name} is {list(held[name].shape)}, must be {list(like.shape)}; "
            f"train into another folder"
        )
    return held[name]


def _way_out(state: Path) -> str:
    return f"fetch it again, or delete {state} to go on from the state before it, and without one from nothing"


def shards(held: Mapping[str, Tensor], most: int) -> Iterator[dict[str, Tensor]]:
    """Split `held`, tensors of any shape, into dictionaries of at most `most` bytes; ValueError for a larger tensor."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, value in held.items():
        if value.nbytes > most:
            raise ValueError(f"{name} has {value.nbytes} bytes, a shard holds {most}")
        if size + value.nbytes > most:
            yield shard
            shard, size = {}, 0
        shard[name] = value
        size += value.nbytes
    if shard:
        yield shard
