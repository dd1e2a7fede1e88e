"""A model folder whose tensors are those of a module in training, for comparing the two; and a clock."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@torch.no_grad()
def scatter(module: nn.Module, seed: int = 0) -> None:
    """Give every parameter values that matter: no norm of ones, no bias of zeros, no router that can't decide."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in module.named_parameters():
        drawn = torch.randn(value.shape, generator=generator)
        if value.dim() > 1:
            value.copy_(drawn if "embed" in name else 1.5 * drawn / value.shape[-1] ** 0.5)
        else:
            value.copy_(0.1 * drawn + (0.0 if name.endswith("bias") else 1.0))


def write(folder: Path, base: Path, tensors: Mapping[str, Tensor]) -> None:
    """Copy the model folder `base` to `folder`, with `tensors` in place of those of the same names; others are refused."""
    shutil.copytree(base, folder)
    held = load_file(folder / "model.safetensors")
    assert {name: value.shape for name, value in tensors.items()}.items() <= {
        name: value.shape for name, value in held.items()
    }.items()
    save_file({**held, **{name: value.contiguous() for name, value in tensors.items()}}, folder / "model.safetensors")


class Ticks:
    """A clock that goes on by a second each time it is read, so that a training of a minute has sixty steps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1
        return self.now
