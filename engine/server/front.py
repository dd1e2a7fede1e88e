"""The front process: its parts, how they start together, and how they end. Not here: routes (app.py), flags (cli.py)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
import uvicorn

from engine.client import BootError, EngineClient, EngineProcess, Hello, start_engine
from engine.config import MAX_BODY_BYTES, EngineSettings
from engine.errors import RequestError, WalkgateError
from engine.metrics import FrontCounters, prometheus_text
from engine.model.config import OmniConfig
from engine.model.processor import Inputs, Processor
from engine.request import Request, Sampling, Speech
from engine.server.protocol import GenerateFields, SpeechFields, parse
from engine.server.source import git_commit, package_folder, source_digest, source_root, versions

T = TypeVar("T")

EXIT_OK, EXIT_CANNOT_SERVE, EXIT_ENGINE_DIED = 0, 1, 70
STARTING, OK, STOPPING, DEAD = "starting", "ok", "stopping", "dead"
_COUNTERS_S = 2.0
_POOL_THREADS = 2
_DEAD_SHOWN_S = 0.7  # how long /health still answers after the engine died, so that watchers see why
_STOP_S = 2.0  # how long an engine may take to end the step that it is in
_LAST_NEWS_S = 0.2  # how long the last message of a process may take to arrive after its end was seen


@dataclass(slots=True)
class Front:
    """Everything that the routes need. `processor` and `hello` are None until the server is ready."""

    model: Path
    config: OmniConfig
    settings: EngineSettings
    engine: EngineProcess
    client: EngineClient
    status: str = STARTING
    processor: Processor | None = None
    hello: Hello | None = None
    boot_seconds: float = 0.0
    counters: FrontCounters = field(default_factory=FrontCounters)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_POOL_THREADS, "processor"))
    _info: dict[str, object] = field(default_factory=dict)
    _engine_counters: dict[str, float] = field(default_factory=dict)

    async def boot(self) -> None:
        """Load the processor while the engine loads its model; ready when both are. Raises WalkgateError."""
        loop = asyncio.get_running_loop()
        identity = loop.run_in_executor(self.pool, _identity)
        limit = min(self.settings.max_model_len or sys.maxsize, self.config.thinker.max_positions)
        processor = await loop.run_in_executor(self.pool, Processor.load, self.model, self.config, limit)
        hello = await self.client.hello()
        self.engine.remove_folder()
        ours = package_folder() / "__init__.py"
        if Path(hello.engine_file).resolve() != ours:
            raise BootError(f"the engine process imported {hello.engine_file}, this process {ours}; unset PYTHONPATH")
        # Measured from the start of this process, imports included.
        self.boot_seconds = round(time.time() - psutil.Process().create_time(), 3)
        self.processor, self.hello = processor, hello
        self._info = self._describe(await identity, processor, hello)
        self.status = OK

    def _describe(self, identity: dict[str, object], processor: Processor, hello: Hello) -> dict[str, object]:
        limits = hello.info.get("limits")
        own = {"max_audio_seconds": processor.max_audio_seconds, "max_body_bytes": MAX_BODY_BYTES}
        return {
            **identity,
            **hello.info,
            "api": ["generate/1"],
            "tasks": tasks(self.config),
            "weights_digest": hello.weights_digest,
            "model": model_summary(self.model, self.config) | {"served_dtype": self.settings.dtype},
            "boot_seconds": self.boot_seconds,
            "engine_boot_seconds": round(hello.boot_seconds, 3),
            "device": self.settings.device,
            "threads": self.settings.threads,
            "limits": (limits if isinstance(limits, dict) else {}) | own,
        }

    def info(self) -> dict[str, object]:
        """What `/info` shows; RequestError (503) until the server is ready."""
        if not self._info:
            raise self._not_ready()
        return self._info

    def _not_ready(self) -> RequestError:
        return RequestError(f"the server is {self.status}; wait for /health to say ok", code=self.status, status=503)

    async def off_loop(self, work: Callable[[Processor, Callable[[], bool]], T]) -> T:
        """Run `work(processor, unwanted)` in the pool; `unwanted()` turns true once the caller is cancelled.

        RequestError (503) until the server is ready.
        """
        if self.status != OK or self.processor is None:
            raise self._not_ready()
        unwanted = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, work, self.processor, unwanted.is_set)
        finally:
            unwanted.set()

    async def prepare(self, content_type: str, data: bytes) -> tuple[GenerateFields, Request]:
        """Check a body of /generate and make its Request, off the event loop; RequestError names the field and the fix."""
        return await self.off_loop(lambda processor, unwanted: _prepare(processor, content_type, data, unwanted))

    async def metrics(self) -> str:
        """Prometheus text; when the engine is too busy to answer, its last known values and `walkgate_engine_answered` 0."""
        found = await self.client.counters(_COUNTERS_S) if self.hello is not None else None
        self._engine_counters = found or self._engine_counters
        memory = {"front_resident_bytes": _resident(None), "engine_resident_bytes": _resident(self.engine.process.pid)}
        own = {"engine_answered": float(found is not None), **memory}
        return prometheus_text(self._engine_counters | self.counters.values() | own)


def _resident(pid: int | None) -> float:
    try:
        return float(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0.0


def _identity() -> dict[str, object]:
    root = source_root()
    commit = git_commit(root)
    return {
        "source_root": str(root),
        "source_digest": source_digest(package_folder()),
        "commit": commit.commit,
        "dirty": commit.dirty,
        "versions": versions(),
    }


def tasks(config: OmniConfig) -> list[str]:
    """The tasks that a model serves: from text or audio to text, and to speech if it has a Talker."""
    return ["T2T", "A2T", "T2S", "A2S"] if config.has_talker else ["T2T", "A2T"]


def model_summary(folder: Path, config: OmniConfig) -> dict[str, object]:
    """The sizes of a model that one asks for first, by component."""
    thinker, talker = config.thinker, config.talker
    summary: dict[str, object] = {
        "folder": str(folder),
        "dtype": config.dtype,
        "thinker": {
            "layers": thinker.layers,
            "hidden": thinker.hidden,
            "experts": thinker.experts,
            "top_k": thinker.top_k,
            "vocab": thinker.vocab,
            "max_positions": thinker.max_positions,
        },
        "audio_encoder": {"layers": config.audio.layers, "hidden": config.audio.hidden},
    }
    if talker is None:
        return summary
    return summary | {
        "talker": {
            "layers": talker.stack.layers,
            "hidden": talker.stack.hidden,
            "experts": talker.stack.experts,
            "max_positions": talker.stack.max_positions,
        },
        "voices": sorted(talker.speakers),
    }


def _prepare(
    processor: Processor, content_type: str, data: bytes, unwanted: Callable[[], bool]
) -> tuple[GenerateFields, Request]:
    body = parse(content_type, data)
    fields = body.fields
    draft = Request(
        id=uuid.uuid4().hex,
        prompt_ids=[],
        max_tokens=fields.max_tokens,
        sampling=_sampling(fields),
        speech=_speech(fields.speech or SpeechFields()) if "audio" in fields.output else None,
        emit_text="text" in fields.output,
        ignore_eos=fields.ignore_eos,
        logprobs=fields.top_logprobs or None,
        trace=fields.trace,
    )
    inputs = Inputs(
        text=fields.text,
        system=fields.system,
        prompt_token_ids=fields.prompt_token_ids,
        audio=body.audio,
        clamp_tokens="max_tokens" not in fields.model_fields_set,
        clamp_frames=fields.speech is None or "max_frames" not in fields.speech.model_fields_set,
    )
    return fields, processor.complete(draft, inputs, unwanted)


def _sampling(fields: GenerateFields | SpeechFields) -> Sampling:
    return Sampling(
        temperature=fields.temperature,
        top_k=fields.top_k,
        top_p=fields.top_p,
        repetition_penalty=fields.repetition_penalty,
        seed=fields.seed,
    )


def _speech(fields: SpeechFields) -> Speech:
    return Speech(
        voice=fields.voice,
        max_frames=fields.max_frames,
        sampling=_sampling(fields),
        ignore_eos=fields.ignore_eos,
        codes=fields.codes,
    )


class _Server(uvicorn.Server):
    """Uvicorn without its own signal handling, which would end the process by the signal instead of with a code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `serve`."""
        yield


def _http_server(front: Front) -> _Server:
    from engine.server.app import create_app

    return _Server(
        uvicorn.Config(
            create_app(front),
            loop="asyncio",
            lifespan="off",
            ws="none",
            access_log=False,
            log_level="warning",
            timeout_keep_alive=75,  # longer than load clients keep an idle connection
            timeout_graceful_shutdown=1,
        )
    )


async def serve(
    model: Path, config: OmniConfig, settings: EngineSettings, listener: socket.socket, ready: Callable[[Front], None]
) -> int:
    """Serve until a signal or the engine's end; returns the exit code. `ready` is called once, when the server is.

    Raises WalkgateError when the server can't come up. No process outlives this call.
    """
    engine = start_engine(model, settings, source_root())
    client = EngineClient(engine.address)
    front = Front(model, config, settings, engine, client)
    server = _http_server(front)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        return await _live(front, serving, ready)
    finally:
        client.shut_down()
        server.should_exit = True
        # An engine that still loads its model hears nothing, and there is nothing that it could spoil.
        stopped = engine.stop(_STOP_S if front.hello is not None else 0.0)
        # How the HTTP side ended is `_live`'s to say; here it must not keep the rest from being closed.
        await asyncio.gather(serving, stopped, return_exceptions=True)
        client.close()
        front.pool.shutdown(wait=False, cancel_futures=True)


async def _live(front: Front, serving: asyncio.Task[None], ready: Callable[[Front], None]) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    died = asyncio.create_task(front.engine.exit_code())
    booted = asyncio.create_task(front.boot())
    await asyncio.wait({stopped, died, booted, serving}, return_when=asyncio.FIRST_COMPLETED)
    if died.done() and not booted.done():
        # What the engine said before it ended may still be on its way, and says more than an exit code.
        await asyncio.wait({booted}, timeout=_LAST_NEWS_S)
    if booted.done():
        booted.result()
        if not serving.done():
            ready(front)
            await asyncio.wait({stopped, died, serving}, return_when=asyncio.FIRST_COMPLETED)
    booted.cancel()
    if serving.done() and not stopped.done():
        raise WalkgateError(f"the HTTP server ended: {serving.exception() or 'it stopped by itself'}")
    if not stopped.done():
        await _mourn(front, died.result(), stopped)
    front.status = STOPPING
    return EXIT_OK if stopped.done() else EXIT_ENGINE_DIED


async def _mourn(front: Front, code: int, stopped: asyncio.Task[bool]) -> None:
    """End every stream with an error and say so on /health for a moment; a signal to the whole group ends that early."""
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    front.status = DEAD
    front.client.fail(f"the engine process ended {how}")
    print(f"omni: the engine process ended {how}; see its messages above", file=sys.stderr, flush=True)
    await asyncio.wait({stopped}, timeout=_DEAD_SHOWN_S)
