"""A cold start: several processes compile the GPU's kernels into Triton's cache on disk before the engine's own needs them.

Compiling holds the interpreter's lock, so threads would take turns. Each process captures its share of the buckets over a model
of one layer, whose kernels are those of the whole. A mark in the cache says what was compiled there, so that a warm start
costs nothing. Started as `python -m engine.precompile FOLDER SETTINGS SHARE SHARES`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from engine.config import EngineSettings, child_environment
from engine.parent import die_with_parent

log = logging.getLogger("walkgate.engine")

MOST_PROCESSES = 8
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

    FlashInfer's compiler takes longer than all of ours, and the engine waits for it where it needs it. A process that fails
    costs time, not the start: the engine compiles what it does not find.
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
        errors = [Path(place) / f"{share}.log" for share in range(shares)]
        started = [_start(folder, settings, share, shares, errors[share]) for share in range(shares)]
        failed = [share for share in range(1, shares) if started[share].wait()]
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


def _start(folder: Path, settings: EngineSettings, share: int, shares: int, errors: Path) -> subprocess.Popen[bytes]:
    words = [str(folder), msgspec.json.encode(settings).decode(), str(share), str(shares)]
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


def main(folder: str, settings_json: str, share: str, shares: str) -> None:
    """Compile share number `share` of `shares` (no tensors in)."""
    die_with_parent()
    settings = msgspec.json.decode(settings_json, type=EngineSettings)
    compile_share(Path(folder), settings, int(share), int(shares))


if __name__ == "__main__":
    main(*sys.argv[1:])
