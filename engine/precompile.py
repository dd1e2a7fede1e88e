"""A cold start: several processes compile the GPU's kernels into Triton's cache on disk before the engine's own needs them.

Compiling holds the interpreter's lock, so threads would take turns. Each process captures its share of the buckets over a model
of one layer, whose kernels are those of the whole. A mark in the cache says what was compiled there, so that a warm start
costs nothing. Started as `python -m engine.precompile PARENT FOLDER SETTINGS SHARE SHARES`, or with `flash` for FlashInfer's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import msgspec

from engine.config import EngineSettings, child_environment
from engine.parent import die_with_parent

log = logging.getLogger("walkgate.engine")

MOST_PROCESSES = 8
LONGEST_S = 300.0  # cold starts of an H200 took 45 s in all; what takes this long may hang
FLASH = "flash"
_KERNELS = Path(__file__).parent / "kernels"
_KILL_S = 10.0  # what a killed process may take to give its GPU memory back
_TAIL_BYTES, _MOST_LETTERS = 1 << 16, 200
_POINTERS = re.compile(r"[\s^~]*")  # a line that only points at the one above


def mark_name(folder: Path, settings: EngineSettings, about: tuple[str, ...]) -> str:
    """The name of the mark of a folder, settings and what `about` says of the machine: what changes a kernel changes it."""
    total = hashlib.sha256()
    for source in (_KERNELS, *([Path(settings.tiles)] if settings.tiles is not None else [])):
        for path in sorted(source.rglob("*")):
            if path.suffix in (".py", ".json") and path.is_file():
                total.update(path.name.encode() + path.read_bytes())
    total.update((folder / "config.json").read_bytes())
    total.update(msgspec.json.encode(settings, order="deterministic"))
    total.update("\0".join(about).encode())
    return f"walkgate-{total.hexdigest()[:32]}"


def prepare(folder: Path, settings: EngineSettings) -> None:
    """Compile what an engine with `settings` will run, unless the cache has it; returns when all but FlashInfer is there.

    FlashInfer's compiler takes longer than all of ours, and the engine waits for it where it needs it; the process that runs
    it holds next to no GPU memory, and the others are over before weights are there. Nothing is raised: what fails costs time
    and a warning, since the engine compiles what it does not find. FlashInfer's process dies with the thread that calls this.
    """
    try:
        _prepare(folder, settings)
    except Exception as error:  # of what the engine can't do without it fails itself, and says so better
        why = f"{type(error).__name__}: {error}"[:_MOST_LETTERS]
        log.warning("compiling kernels in several processes failed (%s); what is missing is compiled later", why)


def _prepare(folder: Path, settings: EngineSettings) -> None:
    import torch
    import triton

    cache = Path(triton.knobs.cache.dir)
    mark = cache / mark_name(folder, settings, (torch.__version__, triton.__version__, torch.cuda.get_device_name()))
    shares = min(MOST_PROCESSES, _cores() - 1)
    if mark.is_file() or shares < 2:
        return
    cache.mkdir(parents=True, exist_ok=True)
    log.info("compiling kernels in %d processes", shares)
    flash = _start(folder, settings, [FLASH])
    threading.Thread(target=_tell_of_flash, args=(flash,), daemon=True).start()
    failures = _compile(folder, settings, shares)
    if failures:
        log.warning(
            "%d of %d processes that compile kernels failed (%s); what is missing is compiled later",
            len(failures),
            shares,
            failures[0],
        )
        return
    mark.touch()


def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class _Child:
    """A process that compiles, and the file without a name that it writes its errors to."""

    process: subprocess.Popen[bytes]
    errors: IO[bytes]

    def failure(self) -> str | None:
        """Why the process failed, in one short line, once it has ended; None if it did not."""
        code = self.process.returncode
        if code == 0:
            return None
        words = self._last_line()[:_MOST_LETTERS]
        if code > 0:
            return words or f"exit code {code}"
        return f"ended by signal {-code}" + (f": {words}" if words else "")

    def _last_line(self) -> str:
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - _TAIL_BYTES))
        lines = self.errors.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if not _POINTERS.fullmatch(line)), "")


def _start(folder: Path, settings: EngineSettings, what: Sequence[str]) -> _Child:
    words = [str(os.getpid()), str(folder), msgspec.json.encode(settings).decode(), *what]
    errors = TemporaryFile()  # noqa: SIM115 - read once the process has ended
    # -P keeps the working folder off the child's path: a folder called engine/ there must not be imported.
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "engine.precompile", *words],
        env=child_environment(Path(__file__).resolve().parent.parent),
        stdout=subprocess.DEVNULL,
        stderr=errors,
    )
    return _Child(process, errors)


@contextmanager
def _running(folder: Path, settings: EngineSettings, what: Sequence[str]) -> Iterator[_Child]:
    """A process that compiles and is over when the context is."""
    child = _start(folder, settings, what)
    try:
        yield child
    finally:
        child.process.kill()
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(_KILL_S)


def _compile(folder: Path, settings: EngineSettings, shares: int) -> list[str]:
    """Run all shares to their ends, for LONGEST_S seconds at the most, and say of each that failed why."""
    with ExitStack() as stack:
        asked = ([str(share), str(shares)] for share in range(shares))
        return _ended([stack.enter_context(_running(folder, settings, what)) for what in asked])


def _ended(children: Sequence[_Child]) -> list[str]:
    """Wait for the children and say of each that failed, or that takes too long, why."""
    until, failures = time.monotonic() + LONGEST_S, list[str | None]()
    for child in children:
        try:
            child.process.wait(max(0.0, until - time.monotonic()))
            failures.append(child.failure())
        except subprocess.TimeoutExpired:
            failures.append(f"took more than {LONGEST_S:g} s")
    return [failure for failure in failures if failure is not None]


def _tell_of_flash(child: _Child) -> None:
    """Wait for FlashInfer's process and warn if it failed."""
    child.process.wait()
    failure = child.failure()
    if failure is not None:
        log.warning("the process that compiles FlashInfer's attention failed (%s); the engine tries again", failure)


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


def main(parent: str, folder: str, settings_json: str, *what: str) -> None:
    """Compile share number `what[0]` of `what[1]`, or FlashInfer's attention, for the process `parent`."""
    die_with_parent(int(parent))
    settings = msgspec.json.decode(settings_json, type=EngineSettings)
    if what == (FLASH,):
        compile_flash(Path(folder), settings)
    else:
        compile_share(Path(folder), settings, *map(int, what))


if __name__ == "__main__":
    main(*sys.argv[1:])
