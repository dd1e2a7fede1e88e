"""Runners that make what a script says, over the real walk table, scheduler, pools, lanes and loop."""

from collections.abc import Callable
from functools import partial

import numpy as np

from engine.kv.pages import PagePool, pages_for
from engine.lane import Lane
from engine.loop import Loop, settle
from engine.loopback import SlotPool
from engine.model.walks import TALKER_DECODE, THINKER_DECODE_WALKS, next_walk, row_span, text_index, walk_table
from engine.request import Clip, Event, Request, Sampling, Speech
from engine.runner import Launched, Made
from engine.scheduler import Need, Policy, Pools, Scheduler
from engine.step import Component, Row, Step
from engine.stop import LENGTH, STOP, StopRow, finish_reasons
from engine.track import Track

END_OF_TEXT, CODEC_END = 9, 2150
TALKER_PROMPT = 9
TABLE = walk_table(frozenset({END_OF_TEXT}), CODEC_END)


class Scripted:
    """Keeps the live tracks and a log of launches; `fails` names requests whose rows raise, alone and in company."""

    component: Component

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        self.live: dict[str, tuple[Request, Track]] = {}
        self.launches: list[list[str]] = []
        self.fails: set[str] = set()
        self.refuses: set[str] = set()
        self.during_launch: Callable[[Step], None] = lambda step: None

    def open(self, request: Request, track: Track) -> None:
        if request.id in self.refuses:
            raise ValueError(f"{request.id} can't be opened")
        assert request.id not in self.live
        self.live[request.id] = (request, track)

    def close(self, request_id: str) -> None:
        self.live.pop(request_id, None)

    def launch(self, step: Step) -> Launched:
        ids = [row.request_id for row in step.rows]
        self.launches.append(ids)
        self.during_launch(step)
        for request_id in ids:
            assert self.live[request_id][1].in_flight >= 1
            if request_id in self.fails:
                raise ValueError(f"{request_id} is broken")
        return Launched(step, len(step.rows))

    def finish(self, launched: Launched) -> list[Made]:
        made = []
        for row in launched.step.rows:
            request, track = self.live[row.request_id]
            if not track.finished and _index(row, track) >= 0:
                made.append(self.make(row, request, track))
        return made

    def make(self, row: Row, request: Request, track: Track) -> Made:
        raise AssertionError(f"{type(self).__name__} has no script")


def _index(row: Row, track: Track) -> int:
    """Which token or frame a row makes, from 0; below 0 for a chunk inside a prompt."""
    return row.start + row.length - track.prompt_length


def _progress(track: Track, row: Row) -> None:
    assert row.walk.endswith("prefill") == (row.start < track.prompt_length)
    track.generated += 1


class AudioScript(Scripted):
    """Encodes all clips of a request at once."""

    component = Component.AUDIO_ENCODER

    def make(self, row: Row, request: Request, track: Track) -> Made:
        track.generated = row.length
        track.finish_reason = STOP
        return Made(row.request_id, row.walk)


class ThinkerScript(Scripted):
    """Makes the token ids that `texts` lists for a request, one a row."""

    component = Component.THINKER

    def __init__(self, texts: dict[str, list[int]]) -> None:
        super().__init__()
        self.texts = texts

    def make(self, row: Row, request: Request, track: Track) -> Made:
        token = self.texts[request.id][track.generated]
        stop = StopRow(row.walk, track.generated, track.limit, request.ignore_eos)
        [track.finish_reason] = finish_reasons(TABLE.stops[0], [stop], np.array([token]))
        _progress(track, row)
        return Made(row.request_id, row.walk, token_ids=[token])


class TalkerScript(Scripted):
    """Makes `frames[request]` frames and then the end; notes which text id each frame was given."""

    component = Component.TALKER

    def __init__(self, frames: dict[str, int]) -> None:
        super().__init__()
        self.frames = frames
        self.spoken: dict[str, list[int | None]] = {}

    def launch(self, step: Step) -> Launched:
        launched = super().launch(step)
        for row in step.rows:
            _, track = self.live[row.request_id]
            if _index(row, track) < 0:
                continue
            text = text_index(_index(row, track), track.arrived, track.source_ended)
            self.spoken.setdefault(row.request_id, []).append(text)
        return launched

    def make(self, row: Row, request: Request, track: Track) -> Made:
        if track.generated == self.frames[request.id]:
            track.finish_reason = STOP
            return Made(row.request_id, row.walk)
        codes = [[track.generated] * 16] if request.speech is not None and request.speech.codes else []
        _progress(track, row)
        track.finish_reason = LENGTH if track.generated >= track.limit else None
        return Made(row.request_id, row.walk, codes=codes, frames=1)


class Code2WavScript(Scripted):
    """Turns frame number n into one sample of value n; notes where its chunks end."""

    component = Component.CODE2WAV

    def __init__(self) -> None:
        super().__init__()
        self.boundaries: dict[str, list[int]] = {}

    def make(self, row: Row, request: Request, track: Track) -> Made:
        assert row.start == track.generated and row.start + row.length <= track.arrived
        track.generated += row.length
        self.boundaries.setdefault(request.id, []).append(track.generated)
        samples = np.arange(row.start, row.start + row.length, dtype="<i2")
        return Made(row.request_id, row.walk, pcm=samples.tobytes(), frames=row.length)


class ScriptedEngine:
    """A loop over scripted runners: what `texts` and `frames` say is made, everything between is real."""

    def __init__(
        self,
        texts: dict[str, list[int]],
        frames: dict[str, int] | None = None,
        *,
        pages: int = 100,
        slots: int = 8,
        max_rows: int = 8,
        depth: int = 1,
        chunk_frames: int = 4,
        text_walk: bool = True,
        prefill_positions: int = 1000,
        chunked: bool = False,
        mixed: bool = False,
    ) -> None:
        self.audio, self.thinker = AudioScript(), ThinkerScript(texts)
        self.talker, self.code2wav = TalkerScript(frames or {}), Code2WavScript()
        self.pages = {Component.THINKER: PagePool(pages), Component.TALKER: PagePool(pages)}
        self.slots = SlotPool(slots)
        self.scheduler = Scheduler(
            pools=Pools(
                page_size=4,
                total_pages={component: pool.total for component, pool in self.pages.items()},
                free_pages=lambda component: self.pages[component].free,
                take_pages=lambda component, count: self.pages[component].take(count) if count else (),
                release_pages=lambda component, taken: self.pages[component].release(taken) if taken else None,
                free_slots=lambda: self.slots.free,
                take_slot=self.slots.take,
                release_slot=self.slots.release,
            ),
            policy=Policy(
                max_rows=dict.fromkeys(Component, max_rows),
                prefill_positions=prefill_positions,
                chunked=frozenset({Component.THINKER, Component.TALKER}) if chunked else frozenset(),
                mixed=mixed,
                decode_walks=THINKER_DECODE_WALKS | {TALKER_DECODE},
                row_span=partial(row_span, chunk_frames=chunk_frames),
            ),
            next_walk=partial(next_walk, text_walk=text_walk),
        )
        self.lanes = [Lane(runner, depth) for runner in (self.audio, self.thinker, self.talker, self.code2wav)]
        self.loop = Loop(TABLE, self.lanes, self.scheduler, settle)

    def add(
        self,
        request_id: str,
        *,
        prompt: int = 4,
        max_tokens: int = 20,
        max_frames: int = 0,
        clips: int = 0,
        emit_text: bool = True,
        ignore_eos: bool = False,
    ) -> None:
        """Queue a request; `max_frames` above 0 asks for speech, with its codes."""
        request = Request(
            id=request_id,
            prompt_ids=[1] * prompt,
            max_tokens=max_tokens,
            clips=[Clip(mel=b"", mel_bins=128, frames=100, tokens=13, seconds=1.0)] * clips,
            speech=Speech(voice="ethan", max_frames=max_frames, sampling=Sampling(), codes=True)
            if max_frames
            else None,
            emit_text=emit_text,
            ignore_eos=ignore_eos,
        )
        needs = [Need(Component.THINKER, prompt + max_tokens, prompt, max_tokens, waits_for_source=clips > 0)]
        if clips:
            needs.append(Need(Component.AUDIO_ENCODER, 0, clips, clips))
        if max_frames:
            needs.append(Need(Component.TALKER, TALKER_PROMPT + max_frames, TALKER_PROMPT, max_frames))
            needs.append(Need(Component.CODE2WAV, 0, 0, max_frames))
        self.scheduler.add(request_id, needs)
        self.loop.add(request)

    @property
    def held(self) -> tuple[int, int, int]:
        """Slots, Thinker pages and Talker pages that are held."""
        return (
            self.slots.total - self.slots.free,
            *(pool.total - pool.free for pool in self.pages.values()),
        )  # type: ignore[return-value]

    def run(self, most: int = 200) -> list[list[Event]]:
        """Take turns until nothing is open; returns each turn's events. Every request holds nothing afterwards."""
        turns: list[list[Event]] = []
        while self.loop.waiting or self.loop.admitted:
            assert len(turns) < most, "the loop does not come to an end"
            turns.append(self.loop.turn())
        assert self.held == (0, 0, 0)
        assert all(not runner.live for runner in (self.audio, self.thinker, self.talker, self.code2wav))
        return turns


def pages_of(positions: int) -> int:
    """Pages of four positions that a request of `positions` positions holds."""
    return pages_for(positions, 4)


def merged(turns: list[list[Event]]) -> dict[str, Event]:
    """What each request got over all turns, as one event; at most one event a turn and none after `done`."""
    whole: dict[str, Event] = {}
    for events in turns:
        assert len({event.request_id for event in events}) == len(events), "two events of one request in one turn"
        for event in events:
            total = whole.setdefault(event.request_id, Event(request_id=event.request_id))
            assert not total.done, f"{event.request_id} got an event after its last"
            _join(total, event)
    return whole


def _join(total: Event, event: Event) -> None:
    total.token_ids += event.token_ids
    total.codes += event.codes
    total.pcm += event.pcm
    total.frames += event.frames
    for name in ("finish_reason", "audio_finish_reason", "usage", "error"):
        told = getattr(event, name)
        assert told is None or getattr(total, name) is None, f"{name} was told twice"
        setattr(total, name, getattr(total, name) if told is None else told)
    total.done = event.done
