"""What the front process holds and what its routes ask of it. Not here: routes (app.py), how it starts and ends (life.py)."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import psutil

from engine.client import BootError, EngineClient, EngineProcess, Hello
from engine.config import POOL_NAME, ServerSettings
from engine.errors import RequestError
from engine.metrics import FrontCounters
from engine.model.config import OmniConfig
from engine.model.processor import Processor
from engine.request import Request
from engine.server.describe import identity, model_summary, resident_bytes, tasks
from engine.server.exposition import prometheus_text
from engine.server.generate import prepare
from engine.server.guard import Admission
from engine.server.protocol import GenerateFields
from engine.server.source import package_folder
from engine.server.wedge import WedgeWatch

T = TypeVar("T")

STARTING, OK, WEDGED, DRAINING, STOPPING, DEAD = "starting", "ok", "wedged", "draining", "stopping", "dead"
_UNREADY = {
    STARTING: "the server is starting; wait for /health to say ok",
    WEDGED: "the engine is not getting on with what it holds; wait for /health to say ok, or restart the server",
    DRAINING: "the server is draining: it finishes what it has begun and takes nothing new; ask another server",
    STOPPING: "the server is stopping; ask another server",
    DEAD: "the engine process has ended and the server with it; restart the server",
}
_COUNTERS_S = 2.0
_POOL_THREADS = 2


@dataclass(slots=True)
class Front:
    """Everything that the routes need. `processor` and `hello` are None until the server is ready.

    `stage` is STARTING, OK, DRAINING, DEAD or STOPPING, set by `boot` and life.py alone.
    """

    model: Path
    config: OmniConfig
    settings: ServerSettings
    engine: EngineProcess
    client: EngineClient
    stage: str = STARTING
    processor: Processor | None = None
    hello: Hello | None = None
    boot_seconds: float = 0.0
    counters: FrontCounters = field(default_factory=FrontCounters)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_POOL_THREADS, POOL_NAME))
    admission: Admission = field(init=False)
    watch: WedgeWatch = field(init=False)
    _info: dict[str, object] = field(default_factory=dict)
    _engine_counters: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.admission = Admission(self.settings.max_open, self.settings.engine.max_batch)
        self.watch = WedgeWatch(self.client, self.engine.process.pid, self.settings.wedge_seconds)

    @property
    def model_name(self) -> str:
        """The name that clients call the model by."""
        return self.settings.served_model_name or self.model.name

    @property
    def status(self) -> str:
        """What `/health` says: the stage, or WEDGED while the engine of a server that is OK makes no progress."""
        return WEDGED if self.stage == OK and self.watch.wedged else self.stage

    def health(self) -> dict[str, object]:
        """The body of `/health`; of a wedge it says how many requests are open and for how long nothing came of them."""
        found: dict[str, object] = {"status": self.status}
        if self.status == WEDGED:
            silent = round(self.client.silent_seconds, 1)
            found |= {"open_requests": self.client.open_requests, "silent_seconds": silent}
        return found

    def unready(self) -> RequestError | None:
        """Why no new request is taken now; None when one is."""
        status = self.status
        return None if status == OK else RequestError(_UNREADY[status], code=status, status=503)

    async def boot(self) -> None:
        """Load the processor while the engine loads its model; ready when both are. Raises WalkgateError."""
        loop = asyncio.get_running_loop()
        source = loop.run_in_executor(self.pool, identity)
        limit = min(self.settings.engine.max_model_len or sys.maxsize, self.config.thinker.max_positions)
        processor = await loop.run_in_executor(
            self.pool, Processor.load, self.model, self.config, limit, self.settings.max_audio_seconds
        )
        hello = await self.client.hello()
        self.engine.remove_folder()
        ours = package_folder() / "__init__.py"
        if Path(hello.engine_file).resolve() != ours:
            raise BootError(f"the engine process imported {hello.engine_file}, this process {ours}; unset PYTHONPATH")
        # Measured from the start of this process, imports included.
        self.boot_seconds = round(time.time() - psutil.Process().create_time(), 3)
        self.processor, self.hello = replace(processor, kv_positions=_kv_positions(hello)), hello
        self._info = self._describe(await source, processor, hello)
        self.stage = OK

    def _describe(self, source: dict[str, object], processor: Processor, hello: Hello) -> dict[str, object]:
        limits = hello.info.get("limits")
        settings = self.settings
        own = {
            "max_audio_seconds": processor.max_audio_seconds,
            "max_body_bytes": settings.max_body_bytes,
            "max_queue": settings.max_queue,
        }
        return {
            **source,
            **hello.info,
            "api": ["generate/1", "openai/1"],
            "tasks": tasks(self.config),
            "weights_digest": hello.weights_digest,
            "model_name": self.model_name,
            "model": model_summary(self.model, self.config) | {"served_dtype": settings.engine.dtype},
            "boot_seconds": self.boot_seconds,
            "engine_boot_seconds": round(hello.boot_seconds, 3),
            "device": settings.engine.device,
            "threads": settings.engine.threads,
            "limits": (limits if isinstance(limits, dict) else {}) | own,
        }

    def info(self) -> dict[str, object]:
        """What `/info` shows; RequestError (503) until the server is ready."""
        if not self._info:
            raise self._not_ready()
        return self._info

    def _not_ready(self) -> RequestError:
        return RequestError(_UNREADY[self.status], code=self.status, status=503)

    async def off_loop(self, work: Callable[[Processor, Callable[[], bool]], T]) -> T:
        """Run `work(processor, unwanted)` in the pool; `unwanted()` turns true once the caller is cancelled.

        RequestError (503) until the server is ready.
        """
        if self.processor is None:
            raise self._not_ready()
        unwanted = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, work, self.processor, unwanted.is_set)
        finally:
            unwanted.set()

    @property
    def max_body_bytes(self) -> int:
        """How many bytes a request's body may have."""
        return self.settings.max_body_bytes

    async def prepare(self, content_type: str, data: bytes) -> tuple[GenerateFields, Request]:
        """Check a body of /generate and make its Request, off the event loop; RequestError names the field and the fix."""
        return await self.off_loop(lambda processor, unwanted: prepare(processor, content_type, data, unwanted))

    async def metrics(self) -> str:
        """Prometheus text; when the engine is too busy to answer, its last known values and `walkgate_engine_answered` 0."""
        found = await self.client.counters(_COUNTERS_S) if self.hello is not None else None
        self._engine_counters = found or self._engine_counters
        memory = {
            "front_resident_bytes": resident_bytes(None),
            "engine_resident_bytes": resident_bytes(self.engine.process.pid),
        }
        load = {"engine_open": self.client.open_requests, "open_limit": self.settings.max_open}
        own = {"engine_answered": float(found is not None), **memory, **load}
        return prometheus_text(self._engine_counters | self.counters.values() | own, self.client.histograms.by_name())


def _kv_positions(hello: Hello) -> int:
    """How many positions the engine's KV pages hold of each component."""
    limits = msgspec.convert(hello.info["limits"], dict[str, int])
    return limits["kv_pages"] * limits["page_size"]
