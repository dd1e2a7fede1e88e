"""A cold start: several processes compile the GPU's kernels into Triton's cache on disk before the engine's own needs them.

Compiling holds the interpreter's lock, so threads would take turns. Each process captures its share of the buckets over a model
of one layer, whose kernels are those of the whole. A mark in the cache says what was compiled there, so that a warm start
costs nothing. Started as `python -m engine.precompile FOLDER SETTINGS SHARE SHARES`, or with `flash` for FlashInfer's own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from engine.config import EngineSettings, child_environment
from engine.parent import die_with_parent

log = logging.getLogger("walkgate.engine")

MOST_PROCESSES = 8
FLASH = "flash"
_KERNELS = Path(__file__).parent / "kernels"


def mark_name(folder: Path, settings: EngineSettings, about: tuple[str, ...]) -> str:
    """The name of the mark of a folder, settings and what `about` says of the machine: what changes a kernel changes it."""
    total = hashlib.sha256()
    for source in (_KERNELS, *([Path(settings.tiles)] if settings.tiles is not None else [])):
        for path in sorted(source.rglob("*")):
            if path.suffix in (".py", ".json"):
                total.update(path.name.encode() + path.read_bytes())
    total.update((folder / "config.json").read_bytes())
    total.update(msgspec.json.encode(settings, order="deterministic"))
    total.update("\0".join(about).encode())
    return f"walkgate-{total.hexdigest()[:32]}"


def prepare(folder: Path, settings: EngineSettings) -> None:
    """Compile what an engine with `settings` will run, unless the cache has it; returns when all but FlashInfer is there.

    FlashInfer's compiler takes longer than all of ours, and the engine waits for it where it needs it; the process that runs
    it holds next to no GPU memory, and the others are over before weights are there. A process that fails costs time, not the
    start: the engine compiles what it does not find.
    """
    import torch
    import triton

    cache = Path(triton.knobs.cache.dir)
    mark = cache / mark_name(folder, settings, (torch.__version__, triton.__version__, torch.cuda.get_device_name()))
    shares = min(MOST_PROCESSES, (os.cpu_count() or 1) - 1)
    if mark.is_file() or shares < 2:
        return
    log.info("compiling kernels in %d processes", shares)
    with TemporaryDirectory(prefix="walkgate-") as place:
        _start(folder, settings, [FLASH], Path(place) / f"{FLASH}.log")
        errors = [Path(place) / f"{share}.log" for share in range(shares)]
        started = [_start(folder, settings, [str(share), str(shares)], errors[share]) for share in range(shares)]
        failed = [share for share in range(shares) if started[share].wait()]
        if failed:
            words = errors[failed[0]].read_text(errors="replace").strip().splitlines() or ["no message"]
            log.warning(
                "%d of %d processes that compile kernels failed (%s); what is missing is compiled later",
                len(failed),
                shares,
                words[-1],
            )
            return
    cache.mkdir(parents=True, exist_ok=True)
    mark.touch()


def _start(folder: Path, settings: EngineSettings, what: Sequence[str], errors: Path) -> subprocess.Popen[bytes]:
    words = [str(folder), msgspec.json.encode(settings).decode(), *what]
    with errors.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "engine.precompile", *words],
            env=child_environment(Path(__file__).resolve().parent.parent),
            stdout=subprocess.DEVNULL,
            stderr=file,
        )


def compile_share(folder: Path, settings: EngineSettings, share: int, shares: int) -> None:
    """Compile one share of what the engine will run: share 0 what it runs eagerly, the others some of the buckets each."""
    import torch

    from engine.capture import Eager
    from engine.engine import kernel_options
    from engine.graphs import graphs_of
    from engine.kernels import ops_for
    from engine.kv.pages import KVCache, pages_for
    from engine.loopback import Slots
    from engine.model.config import OmniConfig
    from engine.model.thinker import Thinker
    from engine.model.weights import dummy_weights

    # FlashInfer has a process of its own.
    settings = replace(settings, disabled=settings.disabled | {"flashinfer"})
    whole = OmniConfig.load(folder)
    config = replace(whole, thinker=replace(whole.thinker, layers=1), talker=None, code2wav=None)
    dtype = getattr(torch, settings.dtype)
    ops = ops_for(settings.device, kernel_options(settings))
    thinker = Thinker(config, dummy_weights(config, dtype, settings.device), ops)
    size, most = settings.page_size, settings.max_batch + settings.prefill_chunk
    cache = KVCache.allocate(
        1, pages_for(most, size) + most, size, thinker.kv_heads, thinker.head_dim, dtype=dtype, device=ops.device
    )
    eager = Eager(thinker, cache, Slots(settings.max_batch, (), torch.int64, ops.device), ops, size)
    length = min(settings.max_model_len or config.thinker.max_positions, config.thinker.max_positions)
    part = slice(0, 0) if share == 0 else slice(share - 1, None, shares - 1)
    graphs = graphs_of(eager, settings, pages_for(length, size), part)
    graphs.capture()
    if share == 0:
        graphs.warm(settings)


def compile_flash(folder: Path, settings: EngineSettings) -> None:
    """Have FlashInfer compile its attention, if the engine will use it: it does so where a step first asks for it."""
    import numpy as np
    import torch

    from engine.kernels.flash import FlashPrefill, available
    from engine.model.config import OmniConfig

    part, device = OmniConfig.load(folder).thinker, torch.device(settings.device)
    dtype: torch.dtype = getattr(torch, settings.dtype)
    unused = "flashinfer" in settings.disabled or settings.batch_invariant
    if unused or available(device, dtype, part.head_dim) is not None:
        return
    flash = FlashPrefill(device)
    start, length, page = np.zeros(1, np.int64), np.ones(1, np.int64), np.zeros((1, 1), np.int64)
    flash.plan(start, length, page, settings.page_size, part.heads, part.kv_heads, part.head_dim, dtype)
    cache = torch.zeros(1, settings.page_size, part.kv_heads, part.head_dim, dtype=dtype, device=device)
    flash.run(torch.zeros(1, part.heads, part.head_dim, dtype=dtype, device=device), cache, cache)


def main(folder: str, settings_json: str, *what: str) -> None:
    """Compile share number `what[0]` of `what[1]`, or FlashInfer's attention (no tensors in)."""
    die_with_parent()
    settings = msgspec.json.decode(settings_json, type=EngineSettings)
    if what == (FLASH,):
        compile_flash(Path(folder), settings)
    else:
        compile_share(Path(folder), settings, *map(int, what))


if __name__ == "__main__":
    main(*sys.argv[1:])
