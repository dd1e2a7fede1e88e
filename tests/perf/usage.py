"""What the programs of this folder refuse before they measure: wrong usage, and a machine that can't run them. No torch.

Each refusal is one line that names the fix. Exit codes are those of sysexits.h, as 1 says that a measurement found a fault.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import NoReturn

EXIT_USAGE, EXIT_CANNOT_RUN = 64, 69
DEVICES = ("cuda", "cpu")
_ADVICE = "docs/gpu.md says how to set a GPU up"


class Parser(argparse.ArgumentParser):
    """The command line of the program `name`; says what is wrong with one in one line."""

    def __init__(self, name: str, description: str | None) -> None:
        super().__init__(f"python -m tests.perf.{name}", description=description, allow_abbrev=False)
        self.name = name

    def error(self, message: str) -> NoReturn:
        """End the process with the exit code of wrong usage."""
        self.exit(EXIT_USAGE, f"{self.name}: {message}\n")


def folder_to_write(text: str) -> Path:
    """A folder, or where one can be made."""
    path = Path(text)
    parent = next((one for one in (path, *path.parents) if one.exists()), path)
    if not text or not parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no folder; name one, which need not exist yet")
    return path


def checkpoint(text: str) -> Path:
    """A folder with a model's configuration in it."""
    path = Path(text)
    if not (path / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} has no config.json; name a checkpoint folder")
    return path


def count(text: str) -> int:
    """A whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    """Seconds, more than 0, with or without the unit `s`."""
    try:
        found = float(text.removesuffix("s"))
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0, such as 90")
    return found


def require_torch(name: str) -> None:
    """End the process if there is no PyTorch here. Call before what imports it, which would end it with many lines."""
    try:
        import torch  # noqa: F401 - importing is the test
    except (ImportError, OSError) as error:
        _refuse(name, f"{error}; run it with a Python that has PyTorch")


def require_gpu(name: str, device: str) -> None:
    """End the process if `device` is a GPU and there is none, or no Triton for it."""
    import torch

    if device == "cpu":
        return
    if not torch.cuda.is_available():
        _refuse(name, f"PyTorch {torch.__version__} sees no CUDA GPU; run it on a machine with one")
    if importlib.util.find_spec("triton") is None:
        _refuse(name, "there is no Triton; pip install 'walkgate[cuda]'")


def _refuse(name: str, text: str) -> NoReturn:
    print(f"{name}: {sys.executable}: {text} (docs/gpu.md)", file=sys.stderr)
    sys.exit(EXIT_CANNOT_RUN)
