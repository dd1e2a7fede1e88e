"""How many kernels Triton has made ready in this process: a step that waits for one is as slow as hundreds of others."""

from __future__ import annotations

from typing import Any

from triton import knobs

_made: list[str] = []


def _note(**about: Any) -> None:
    _made.append(str(about["repr"]))


def watch() -> None:
    """Count from now on; Triton has one such hook, and this takes it."""
    knobs.runtime.jit_post_compile_hook = _note


def compiled() -> int:
    """How many kernels were compiled, or loaded from the cache on disk, since `watch` (no tensors)."""
    return len(_made)
