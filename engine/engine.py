"""The engine: wires model, caches, lanes and loop. It steps synchronously, in whichever thread or process calls it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor

from engine.capture import Capture, Eager
from engine.config import GPU_SWITCHES, EngineSettings, switches_of
from engine.errors import RequestError
from engine.kernels import KernelOptions
from engine.kv.pages import KVCache, PagePool, pages_for
from engine.kv.plan_cache import PlanCache
from engine.lane import Lane
from engine.loop import Loop, settle
from engine.loopback import SlotPool, Slots
from engine.model.audio_batch import BatchedAudioEncoder
from engine.model.config import OmniConfig
from engine.model.omni import OmniModel
from engine.model.talker import Talker
from engine.model.thinker import Thinker
from engine.model.walks import TALKER_DECODE, THINKER_DECODE_WALKS, next_walk, row_span, walk_table
from engine.phases import Phases
from engine.profiling import Profiler
from engine.request import Event, Request
from engine.runner import CODE_GROUPS, AudioRunner, Code2WavRunner, Runner, TalkerRunner, ThinkerRunner
from engine.scheduler import Need, Policy, Pools, Scheduler
from engine.step import Component
from engine.stop import Stops
from engine.stream import DeviceQueue
from engine.walk import WalkTable, check

# Prompt positions of a step when prompts are not cut; the first prompt may have more.
WHOLE_PROMPT_POSITIONS = 2048
AHEAD = 2
# Windows of eight seconds of sound that the audio encoder takes at once, each count captured.
AUDIO_WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16)
# Room for this many requests of the longest kind, when --kv-pages does not say; pages are touched only when used.
DEFAULT_FULL_REQUESTS = 8


def kernel_options(settings: EngineSettings) -> KernelOptions:
    """How the kernels of an engine with these settings run (no tensors)."""
    return KernelOptions(
        off=settings.disabled & frozenset(GPU_SWITCHES),
        batch_invariant=settings.batch_invariant,
        tables=Path(settings.tiles) if settings.tiles is not None else None,
        dtype=getattr(torch, settings.dtype),
    )


def model_len(config: OmniConfig, settings: EngineSettings) -> int:
    """How many positions a request may have."""
    positions = config.thinker.max_positions
    return min(settings.max_model_len or positions, positions)


def kv_pages(config: OmniConfig, settings: EngineSettings) -> int:
    """How many KV pages each component has."""
    longest = pages_for(model_len(config, settings), settings.page_size)
    return settings.kv_pages or DEFAULT_FULL_REQUESTS * longest


class Engine:
    """Serves requests: `add` them, call `step` while `has_work`, read the events."""

    def __init__(
        self, model: OmniModel, settings: EngineSettings, token_bytes: Callable[[int], bytes] | None = None
    ) -> None:
        self.model = model
        self.token_bytes = token_bytes
        self.phases = Phases(enabled=settings.phase_timing)
        self.plans: dict[Component, PlanCache] = {}
        self.settings = settings
        self.max_model_len = model_len(model.config, settings)
        self.slots = SlotPool(settings.max_batch)
        count = kv_pages(model.config, settings)
        self.pages = {Component.THINKER: PagePool(count)}
        if model.talker is not None:
            self.pages[Component.TALKER] = PagePool(count)
        self.table = self._table()
        self.stops = Stops(self.table.stops, vectorised=self._on("vectorised_stop"))
        self.scheduler = Scheduler(
            pools=self._pools(),
            policy=self._policy(),
            next_walk=partial(next_walk, text_walk=self._on("text_walk")),
        )
        lanes = [Lane(runner, self._depth(runner.component)) for runner in self._runners(count)]
        check(self.table, [lane.component for lane in lanes])
        self.loop = Loop(self.table, lanes, self.scheduler, settle, self.phases, token_bytes)

    def _on(self, switch: str) -> bool:
        return switch not in self.settings.disabled

    def _depth(self, component: Component) -> int:
        """Steps in flight: a step can't be launched ahead of the host when the host hands it its tokens."""
        waits_for_host = component == Component.THINKER and not self._on("device_loopback")
        return AHEAD if self._on("launch_ahead") and not waits_for_host else 1

    def _plan_cache(self, component: Component) -> PlanCache:
        walks = frozenset(walk.name for walk in self.table.of(component) if walk.decode)
        enabled = self._on("plan_cache")
        self.plans[component] = PlanCache(self.settings.page_size, self.model.ops, walks, enabled=enabled)
        return self.plans[component]

    def _table(self) -> WalkTable:
        eos = self.model.talker.eos if self.model.talker is not None else None
        return walk_table(frozenset({self.model.config.ids.im_end}), eos)

    def _policy(self) -> Policy:
        rows = dict.fromkeys(Component, self.settings.max_batch)
        rows[Component.CODE2WAV] = 1
        chunked = self._on("chunked_prefill")
        return Policy(
            max_rows=rows,
            prefill_positions=self.settings.prefill_chunk if chunked else WHOLE_PROMPT_POSITIONS,
            decode_walks=THINKER_DECODE_WALKS | {TALKER_DECODE},
            row_span=partial(row_span, chunk_frames=self.chunk_frames),
            batching=self._on("batching"),
            chunked=frozenset({Component.THINKER, Component.TALKER}) if chunked else frozenset(),
            # A row beside prompts attends with their kernel, which sums in another order than that of decode steps.
            mixed=self._on("mixed_steps") and not self.settings.batch_invariant,
        )

    def _pools(self) -> Pools:
        return Pools(
            page_size=self.settings.page_size,
            total_pages={component: pool.total for component, pool in self.pages.items()},
            free_pages=lambda component: self.pages[component].free,
            take_pages=lambda component, count: self.pages[component].take(count) if count else (),
            release_pages=lambda component, pages: self.pages[component].release(pages) if pages else None,
            free_slots=lambda: self.slots.free,
            take_slot=self.slots.take,
            release_slot=self.slots.release,
        )

    def _cache(self, part: Thinker | Talker, pages: int) -> KVCache:
        return KVCache.allocate(
            part.layers,
            pages,
            self.settings.page_size,
            part.kv_heads,
            part.head_dim,
            dtype=self.model.thinker.embedding.dtype,
            device=self.model.ops.device,
        )

    def _runners(self, pages: int) -> list[Runner]:
        model, settings, device = self.model, self.settings, self.model.ops.device
        audio_states: dict[str, Tensor] = {}
        media_rows: dict[str, Tensor] = {}
        speaks = model.talker is not None and model.code2wav is not None
        text_queue = DeviceQueue(settings.max_batch, self.max_model_len, 1, device) if speaks else None
        tokens = Slots(settings.max_batch, (), torch.int64, device)
        self.capture = self._capture(tokens, pages)
        thinker = ThinkerRunner(
            model.thinker,
            self.stops.of(Component.THINKER),
            capture=self.capture,
            ops=model.ops,
            config=model.config,
            tokens=tokens,
            audio_states=audio_states,
            media_rows=media_rows,
            text_queue=text_queue,
            slots=settings.max_batch,
            plans=self._plan_cache(Component.THINKER),
            phases=self.phases,
            device_loopback=self._on("device_loopback"),
        )
        runners: list[Runner] = [AudioRunner(model.audio_encoder, audio_states), thinker]
        if model.talker is None or model.code2wav is None or text_queue is None:
            return runners
        frame_queue = DeviceQueue(settings.max_batch, self.max_frames, CODE_GROUPS, device)
        talker = TalkerRunner(
            model.talker,
            self._cache(model.talker, pages),
            self.stops.of(Component.TALKER),
            ops=model.ops,
            media_rows=media_rows,
            text_queue=text_queue,
            frame_queue=frame_queue,
            slots=settings.max_batch,
            plans=self._plan_cache(Component.TALKER),
            phases=self.phases,
            marker_ids=(model.config.ids.tts_eos, model.config.ids.tts_pad),
        )
        code2wav = Code2WavRunner(model.code2wav, frame_queue, stateful=self._on("stateful_code2wav"))
        return [*runners, talker, code2wav]

    def _capture(self, tokens: Slots, pages: int) -> Capture:
        """What runs the Thinker's steps, warm: on a GPU every kernel is compiled and every bucket captured."""
        model, settings = self.model, self.settings
        eager = Eager(model.thinker, self._cache(model.thinker, pages), tokens, model.ops, settings.page_size)
        if model.ops.device.type != "cuda":
            return eager
        from engine.graphs import graphs_of

        graphs = graphs_of(eager, settings, pages_for(self.max_model_len, settings.page_size))
        if self._on("audio_captures") and isinstance(model.audio_encoder, BatchedAudioEncoder):
            model.audio_encoder.capture((1,) if settings.batch_invariant else AUDIO_WINDOWS)
        graphs.capture()
        graphs.warm(settings)
        return graphs

    @property
    def chunk_frames(self) -> int:
        """How many frames Code2Wav turns into sound at a time."""
        return self.model.code2wav.chunk_frames if self.model.code2wav is not None else self.settings.chunk_frames

    @property
    def max_frames(self) -> int:
        """The most frames that one request may ask for."""
        talker = self.model.config.talker
        return talker.stack.max_positions if talker is not None else 0

    @cached_property
    def profiler(self) -> Profiler:
        """Looks at windows of steps when it is asked to."""
        on_gpu = self.model.ops.device.type == "cuda"
        return Profiler(self.loop.lanes, self.capture.buckets, THINKER_DECODE_WALKS, on_gpu)

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or running."""
        return bool(self.loop.waiting or self.loop.admitted)

    def add(self, request: Request) -> None:
        """Queue a request. RequestError if it can never fit, or repeats the id of one that is open."""
        if request.id in self.loop.waiting or request.id in self.loop.admitted:
            raise RequestError(f"a request with id {request.id!r} is open", field="id", code="duplicate_id")
        if request.stop and self.token_bytes is None:
            raise RequestError("this engine has no tokenizer, so it can't match stop strings", field="stop")
        self.scheduler.add(request.id, self._needs(request))
        self.loop.add(request)

    def _needs(self, request: Request) -> list[Need]:
        length = len(request.prompt_ids)
        if length + request.max_tokens > self.max_model_len:
            raise RequestError(
                f"{length} prompt tokens and max_tokens {request.max_tokens} make {length + request.max_tokens}, "
                f"the limit is {self.max_model_len}",
                field="max_tokens",
                code="too_long",
            )
        needs = [
            Need(
                Component.THINKER,
                positions=length + request.max_tokens,
                prompt_length=length,
                limit=request.max_tokens,
                waits_for_source=bool(request.clips),
            )
        ]
        if request.clips:
            needs.append(Need(Component.AUDIO_ENCODER, 0, prompt_length=len(request.clips), limit=len(request.clips)))
        return needs + self._speech_needs(request)

    def _speech_needs(self, request: Request) -> list[Need]:
        if request.speech is None:
            return []
        if self.model.talker is None:
            raise RequestError("this model has no speech output", field="output", code="no_speech")
        length, frames = len(self.model.talker.prompt_ids(request.prompt_ids)), request.speech.max_frames
        if length + frames > self.max_frames:
            raise RequestError(
                f"{length} rows of speech prompt and max_frames {frames} make {length + frames}, "
                f"the limit is {self.max_frames}",
                field="speech.max_frames",
                code="too_long",
            )
        return [
            Need(Component.TALKER, positions=length + frames, prompt_length=length, limit=frames),
            Need(Component.CODE2WAV, positions=0, prompt_length=0, limit=frames),
        ]

    def cancel(self, request_id: str) -> None:
        """Drop a request, in whatever state; unknown ids are fine."""
        self.loop.cancel(request_id)

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Run what is ready once in each lane; [] when idle."""
        return self.loop.turn()

    def counters(self) -> dict[str, float]:
        """Every counter and gauge by its name."""
        found: dict[str, float] = {f"{name}_total": value for name, value in self.loop.counters.items()}
        found |= {f"stop_checks_{name}_total": value for name, value in self.stops.counters.items()}
        for lane in self.loop.lanes:
            found |= {f"{lane.component}_{name}_total": value for name, value in lane.counters.items()}
            found |= {f"{name}_total": value for name, value in lane.runner.counters.items()}
            if isinstance(lane.runner, ThinkerRunner | TalkerRunner):
                sampled = lane.runner.sampler.counters
                found |= {f"{lane.component}_sampling_{name}_total": value for name, value in sampled.items()}
            walks = [walk.name for walk in self.table.of(lane.component)]
            found |= {f"walk_{name}_rows_total": lane.walk_rows[name] for name in walks}
        for component, plans in self.plans.items():
            found |= {f"{component}_plan_cache_{name}_total": value for name, value in plans.counters.items()}
        found |= {f"{name}_total": value for name, value in self.capture.counters.items()}
        if isinstance(self.model.audio_encoder, BatchedAudioEncoder):
            found |= {f"audio_{name}_total": value for name, value in self.model.audio_encoder.counters.items()}
        found |= {f"kernels_{name}_total": value for name, value in self.capture.ways.items()}
        found |= self.phases.counters(int(found["thinker_steps_total"]))
        found |= {f"{component}_pages_free": pool.free for component, pool in self.pages.items()}
        found |= {f"{component}_pages": pool.total for component, pool in self.pages.items()}
        return found | {
            "slots": self.slots.total,
            "slots_free": self.slots.free,
            "requests_waiting": len(self.loop.waiting),
            "requests_running": len(self.loop.admitted),
        }

    def info(self) -> dict[str, object]:
        """Switches, captures and limits, as `/info` shows them."""
        return {
            "switches": {name: self._on(name) for name in switches_of(self.settings.device)},
            "captures": {"mode": self.capture.mode, "buckets": list(self.capture.buckets)},
            "limits": {
                "max_model_len": self.max_model_len,
                "max_frames": self.max_frames,
                "max_batch": self.settings.max_batch,
                "kv_pages": self.pages[Component.THINKER].total,
                "page_size": self.settings.page_size,
                "chunk_frames": self.chunk_frames,
                "prefill_chunk": self.settings.prefill_chunk,
            },
        }
