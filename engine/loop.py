"""The engine's turn: launch into every lane with room, finish what is in flight, route what was made. One thread calls it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.lane import Lane
from engine.phases import Phases
from engine.request import Event, Request, Usage
from engine.runner import Made
from engine.scheduler import Scheduler
from engine.step import Component, Step
from engine.stop import STOP
from engine.stop_strings import StopStrings
from engine.track import Track
from engine.walk import Destination, WalkTable

log = logging.getLogger("walkgate.engine")

BYTES_PER_SAMPLE = 2
CANCELLED, FAILED = "cancelled", "failed"


@dataclass(slots=True)
class _Open:
    """An admitted request: its tracks, and what it has produced so far."""

    request: Request
    tracks: dict[Component, Track]
    stops: StopStrings | None = None
    text_told: bool = False
    tokens: int = 0
    frames: int = 0
    samples: int = 0
    closing: bool = False


@dataclass(slots=True)
class Loop:
    """Owns the admitted requests. `settle` says why a track that can get no more input ends, if it does.

    `token_bytes` spells a token out; only requests with stop strings need it.
    """

    table: WalkTable
    lanes: Sequence[Lane]
    scheduler: Scheduler
    settle: Callable[[Track], str | None]
    phases: Phases = field(default_factory=lambda: Phases(enabled=False))
    token_bytes: Callable[[int], bytes] | None = None
    waiting: dict[str, Request] = field(default_factory=dict)
    admitted: dict[str, _Open] = field(default_factory=dict)
    counters: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            (
                "requests",
                "requests_done",
                "requests_cancelled",
                "requests_failed",
                "tokens",
                "frames",
                "samples",
                "streams_dropped",
            ),
            0,
        )
    )

    def turn(self) -> list[Event]:
        """Run one step in each lane that has work; returns the events of the requests that got on, one each."""
        events: dict[str, Event] = {}
        with self.phases("schedule"):
            self._admit(events)
        for lane in self.lanes:
            while lane.has_room and (step := self._next_step(lane)) is not None:
                with self.phases("launch"):
                    lane.launch(step)
        for lane in self.lanes:
            if lane.busy:
                with self.phases("read"):
                    step, made = lane.finish()
                with self.phases("emit"):
                    self.scheduler.retire(step)
                    for one in made:
                        self._apply(step, one, events)
        with self.phases("emit"):
            self._close_finished()
        return list(events.values())

    def _next_step(self, lane: Lane) -> Step | None:
        with self.phases("schedule"):
            return self.scheduler.next_step(lane.component)

    def add(self, request: Request) -> None:
        """Note a request that the scheduler has queued."""
        self.waiting[request.id] = request
        self.counters["requests"] += 1

    def cancel(self, request_id: str) -> None:
        """Drop a request; its slot and pages come back when no step in flight holds its rows. Unknown ids are fine."""
        if self.waiting.pop(request_id, None) is not None:
            self.scheduler.close(request_id)
            self.counters["requests_cancelled"] += 1
        elif (one := self.admitted.get(request_id)) is not None and not one.closing:
            self._end(one, CANCELLED)
            self.counters["requests_cancelled"] += 1
            self._close_finished()

    def _admit(self, events: dict[str, Event]) -> None:
        for request_id, tracks in self.scheduler.admit():
            request = self.waiting.pop(request_id)
            watched = self.token_bytes is not None and (request.stop or request.stop_ids)
            stops = StopStrings(request.stop) if watched else None
            one = self.admitted[request_id] = _Open(request, tracks, stops)
            try:
                self._open(one)
            except Exception as error:  # one request that can't be taken in must not stop the others
                log.error("request %s can't be opened", request_id, exc_info=error)
                self._fail(one, f"{type(error).__name__}: {error}", events)

    def _open(self, one: _Open) -> None:
        for lane in self.lanes:
            if lane.component in one.tracks:
                lane.runner.open(one.request, one.tracks[lane.component])

    def _fail(self, one: _Open, error: str, events: dict[str, Event]) -> None:
        event = events.setdefault(one.request.id, Event(request_id=one.request.id))
        event.error, event.done = error, True
        self._end(one, FAILED)
        self.counters["requests_failed"] += 1

    @staticmethod
    def _end(one: _Open, reason: str) -> None:
        one.closing = True
        for track in one.tracks.values():
            track.finish_reason = track.finish_reason or reason

    def _apply(self, step: Step, made: Made, events: dict[str, Event]) -> None:
        one = self.admitted.get(made.request_id)
        if one is None or one.closing:
            return
        if made.error is not None:
            self._fail(one, made.error, events)
            return
        event = events.setdefault(made.request_id, Event(request_id=made.request_id))
        if one.stops is not None and made.token_ids:
            self._match_stops(one, one.stops, made.token_ids, event)
        self._tell_client(one, made, event)
        self._stream_on(one, step.component, made)
        self._settle(one)
        self._tell_ends(one, event)

    def _match_stops(self, one: _Open, stops: StopStrings, token_ids: list[int], event: Event) -> None:
        """End the text at a stop string, whatever else would have ended it; say how much of it may be shown.

        The request's own stop ids end the text too, and are no part of it.
        """
        assert self.token_bytes is not None
        thinker = one.tracks[Component.THINKER]
        said = [token for token in token_ids if token not in one.request.stop_ids]
        if stops.push(b"".join(map(self.token_bytes, said))):
            thinker.finish_reason = STOP
        elif thinker.finished:
            stops.finish()
        event.shown_bytes = stops.shown

    def _tell_client(self, one: _Open, made: Made, event: Event) -> None:
        one.tokens += len(made.token_ids)
        self.counters["tokens"] += len(made.token_ids)
        if one.request.emit_text:
            event.token_ids += made.token_ids
            event.logprobs += made.logprobs
            event.trace += made.trace
        event.codes += made.codes
        if made.pcm:
            samples = len(made.pcm) // BYTES_PER_SAMPLE
            one.samples += samples
            event.pcm += made.pcm
            event.frames += made.frames
            self.counters["samples"] += samples

    def _stream_on(self, one: _Open, component: Component, made: Made) -> None:
        """Let the components that this walk streams to know what arrived, and whether more will."""
        ended = one.tracks[component].finished
        for emit in self.table.walk(made.walk).emits:
            if Destination.STREAM not in emit.to or emit.stream_to is None:
                continue
            target = one.tracks.get(emit.stream_to)
            if target is None:
                self.counters["streams_dropped"] += 1
                continue
            target.arrived += len(made.token_ids) or made.frames
            target.source_ended = target.source_ended or ended
        if component == Component.TALKER:
            one.frames += made.frames
            self.counters["frames"] += made.frames

    def _settle(self, one: _Open) -> None:
        """End tracks that nothing more can reach; a Talker that never starts ends Code2Wav too."""
        for component in (Component.TALKER, Component.CODE2WAV):
            track = one.tracks.get(component)
            if track is None or track.finished:
                continue
            track.finish_reason = self.settle(track)
            if track.finished and component == Component.TALKER:
                one.tracks[Component.CODE2WAV].source_ended = True
        wave = one.tracks.get(Component.CODE2WAV)
        if wave is not None and wave.finished and not one.request.emit_text:
            # Nobody is told the text: what speech has no room for would be written for nothing.
            thinker = one.tracks[Component.THINKER]
            thinker.finish_reason = thinker.finish_reason or one.tracks[Component.TALKER].finish_reason

    def _tell_ends(self, one: _Open, event: Event) -> None:
        thinker = one.tracks[Component.THINKER]
        if thinker.finished and not one.text_told:
            one.text_told = True
            event.finish_reason = thinker.finish_reason
        if all(track.finished for track in one.tracks.values()):
            talker = one.tracks.get(Component.TALKER)
            event.audio_finish_reason = talker.finish_reason if talker else None
            event.usage = self._usage(one)
            event.done = True
            one.closing = True
            self.counters["requests_done"] += 1

    @staticmethod
    def _usage(one: _Open) -> Usage:
        return Usage(
            prompt_tokens=len(one.request.prompt_ids),
            completion_tokens=one.tokens,
            audio_tokens_in=sum(clip.tokens for clip in one.request.clips),
            audio_seconds_in=sum(clip.seconds for clip in one.request.clips),
            audio_frames=one.frames,
            audio_samples=one.samples,
        )

    def _close_finished(self) -> None:
        for request_id, one in list(self.admitted.items()):
            if one.closing and all(track.in_flight == 0 for track in one.tracks.values()):
                for lane in self.lanes:
                    lane.runner.close(request_id)
                self.scheduler.close(request_id)
                del self.admitted[request_id]


def settle(track: Track) -> str | None:
    """Return why a Talker or Code2Wav track whose source has ended has nothing left to do, or None.

    A text of a single token is never spoken: the Talker ends before its first frame, and the answer is silence.
    """
    if not track.source_ended:
        return None
    if track.component == Component.TALKER:
        return STOP if track.prefilled == 0 and track.arrived < 2 else None
    return STOP if track.generated == track.arrived else None
