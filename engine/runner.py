"""One step of one component: plan -> inputs -> forward -> sample -> leave for the next pass. `launch` runs it on the device,
`finish` reads its one host copy and says what each row made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.capture import Capture, Inputs
from engine.kernels import MEDIA, HostCopy, Ints, Ops, Plan
from engine.kv.pages import KVCache
from engine.kv.plan_cache import PlanCache
from engine.loopback import Slots
from engine.model.audio_batch import BatchedAudioEncoder
from engine.model.audio_encoder import AudioEncoder
from engine.model.code2wav import Code2Wav, Code2WavState
from engine.model.config import OmniConfig
from engine.model.positions import prompt_positions
from engine.model.talker import Talker
from engine.model.thinker import Thinker
from engine.model.walks import TALKER_DECODE, text_index
from engine.phases import Phases
from engine.request import Clip, Request, Speech, StepLogprobs, StepTrace
from engine.sampler import TALKER_STREAM, THINKER_STREAM, Sampler, SamplingRows, step_logprobs
from engine.step import Component, Row, Step
from engine.stop import STOP, StopCheck, StopRow
from engine.stream import DeviceQueue
from engine.track import Track

# Spec section 7.3: what the code predictor samples with whenever the Talker samples.
PREDICTOR_TOP_K, PREDICTOR_TOP_P = 50, 0.8
CODE_GROUPS = 16


@dataclass(slots=True)
class Made:
    """What one row of a step made. `error` says that the row failed and made nothing."""

    request_id: str
    walk: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[StepLogprobs] = field(default_factory=list)
    trace: list[StepTrace] = field(default_factory=list)
    codes: list[list[int]] = field(default_factory=list)
    pcm: bytes = b""
    frames: int = 0
    error: str | None = None


@dataclass(slots=True)
class Launched:
    """A step in flight: what is on its way to the host, for those of its `rows` that make something."""

    step: Step
    bucket: int
    rows: list[Row] = field(default_factory=list)
    tokens: HostCopy | None = None
    logprobs: tuple[HostCopy, HostCopy, HostCopy] | None = None
    pcm: list[Tensor] = field(default_factory=list)


class Runner(Protocol):
    """Runs the steps of one component and keeps what its tracks need between steps."""

    component: Component
    counters: dict[str, int]

    def open(self, request: Request, track: Track) -> None:
        """Take a track in."""

    def close(self, request_id: str) -> None:
        """Forget a request; unknown ones are fine."""

    def launch(self, step: Step) -> Launched:
        """Run `step` on the device. Nothing that a second launch of the same rows would not repeat is kept on an error."""

    def finish(self, launched: Launched) -> list[Made]:
        """Read the host copy, note progress on the tracks, and return what each row made, in the step's order."""


@dataclass(slots=True)
class _Live:
    """A request in one component."""

    request: Request
    track: Track
    positions: npt.NDArray[np.float32] | None = None
    prompt_ids: npt.NDArray[np.int32] | None = None
    audio_at: Ints | None = None
    prompt: Tensor | None = None
    last_token: int = 0
    stop_ids: frozenset[int] = frozenset()

    def prefills(self, row: Row) -> bool:
        """Whether `row` is a part of the track's prompt."""
        return row.start < self.track.prompt_length

    @property
    def speaks_of_media(self) -> bool:
        """Whether the Talker will ask for the Thinker's states at this request's audio."""
        return self.audio_at is not None and self.track.audio_output

    def index(self, row: Row) -> int:
        """Which of its track's tokens or frames `row` makes, from 0; below 0 for a chunk of the prompt that makes none."""
        return row.start + row.length - self.track.prompt_length


class _Tracks:
    """The live requests of a runner, and the plans over them."""

    def __init__(self, plans: PlanCache, phases: Phases, ops: Ops) -> None:
        self.plans = plans
        self.phases = phases
        self.ops = ops
        self.live: dict[str, _Live] = {}

    def of(self, rows: Sequence[Row]) -> list[_Live]:
        return [self.live[row.request_id] for row in rows]

    def making(self, step: Step) -> Ints:
        """The places [M] of the rows that make a token or a frame: all but chunks inside a prompt."""
        makes = (self.live[row.request_id].index(row) >= 0 for row in step.rows)
        return np.flatnonzero(np.fromiter(makes, bool, len(step.rows)))

    def slots(self, rows: Sequence[Row]) -> Tensor:
        return self.put([row.slot for row in rows])

    def put(self, values: Sequence[int]) -> Tensor:
        return self.ops.put(np.array(values, dtype=np.int64))

    def to_host(self, values: HostCopy) -> npt.NDArray[np.int64]:
        """The step's one copy to the host; waits for the device."""
        with self.phases("wait"):
            found: npt.NDArray[np.int64] = values.wait()
            return found

    def plan(self, step: Step) -> Plan:
        with self.phases("plan"):
            return self.plans.plan(step, self._positions)

    def _positions(self, row: Row) -> npt.NDArray[np.float32]:
        places = self.live[row.request_id].positions
        assert places is not None
        prompt = places.shape[1]
        if row.start + row.length <= prompt:
            return places[:, row.start : row.start + row.length]
        after = places.max() + 1 + np.arange(row.start - prompt, row.start - prompt + row.length, dtype=np.float32)
        return np.broadcast_to(after, (3, row.length))


class AudioRunner:
    """The audio encoder: all clips of a request in one row."""

    component = Component.AUDIO_ENCODER

    def __init__(self, encoder: AudioEncoder | BatchedAudioEncoder, states: dict[str, Tensor]) -> None:
        self._encoder = encoder
        self._states = states
        self._live: dict[str, _Live] = {}
        self.counters = {"clips_encoded": 0}

    def open(self, request: Request, track: Track) -> None:
        """Take a track in."""
        self._live[request.id] = _Live(request, track)

    def close(self, request_id: str) -> None:
        """Forget a request and its encoded clips."""
        self._live.pop(request_id, None)
        self._states.pop(request_id, None)

    def launch(self, step: Step) -> Launched:
        """Encode the clips of each row; the states of all its clips lie joined, [tokens, H], under the request's id."""
        mels = [[_mel(clip) for clip in self._live[row.request_id].request.clips] for row in step.rows]
        self.counters["clips_encoded"] += sum(map(len, mels))
        for row, states in zip(step.rows, self._encoder.encode(mels), strict=True):
            self._states[row.request_id] = states
        return Launched(step, len(step.rows))

    def finish(self, launched: Launched) -> list[Made]:
        """Mark the rows' tracks as done."""
        for row in launched.step.rows:
            track = self._live[row.request_id].track
            track.generated = row.length
            track.finish_reason = STOP
        return [Made(row.request_id, row.walk) for row in launched.step.rows]


def _mel(clip: Clip) -> npt.NDArray[np.float32]:
    return np.frombuffer(clip.mel, dtype=np.float32).reshape(clip.mel_bins, clip.frames)


class ThinkerRunner:
    """Prompts and decode rows of the Thinker, in any mixture, through one forward."""

    component = Component.THINKER

    def __init__(
        self,
        thinker: Thinker,
        stop: StopCheck,
        *,
        capture: Capture,
        ops: Ops,
        config: OmniConfig,
        tokens: Slots,
        audio_states: dict[str, Tensor],
        media_rows: dict[str, Tensor],
        text_queue: DeviceQueue | None,
        slots: int,
        plans: PlanCache,
        phases: Phases,
        device_loopback: bool,
    ) -> None:
        self._config = config
        self._stop = stop
        self._audio_states = audio_states
        self._media_rows = media_rows
        self._text_queue = text_queue
        self._tracks = _Tracks(plans, phases, ops)
        self._tokens = tokens
        self.sampler = Sampler(slots, thinker.vocab, stream=THINKER_STREAM, codebooks=1, ops=ops)
        self._device_loopback = device_loopback
        self.capture = capture
        self.counters = {
            "loopback_rows_device": 0,
            "loopback_rows_host": 0,
            "logprob_rows": 0,
            "thinker_rows_overrun": 0,
        }

    def open(self, request: Request, track: Track) -> None:
        """Take a track in: its positions are laid out."""
        prompt = np.array(request.prompt_ids, dtype=np.int32)
        positions, _ = prompt_positions(request.prompt_ids, self._config)
        self._tracks.live[request.id] = _Live(
            request,
            track,
            positions=positions,
            prompt_ids=prompt,
            audio_at=np.flatnonzero(prompt == self._config.ids.audio) if request.clips else None,
            stop_ids=frozenset(request.stop_ids),
        )
        self.sampler.open(track.slot, request.sampling, prompt)

    def close(self, request_id: str) -> None:
        """Forget a request and the states kept for its Talker."""
        self._tracks.live.pop(request_id, None)
        self._media_rows.pop(request_id, None)

    def launch(self, step: Step) -> Launched:
        """Run the step's rows and leave each row's token in its slot and, for speech, in the text queue."""
        live = self._tracks.of(step.rows)
        making = self._tracks.making(step)
        inputs = self._inputs(step, live, self._tracks.plan(step), making)
        forwarded = self.capture.run(inputs)
        if forwarded.accept is not None:
            self._keep_media_rows(step, live, forwarded.accept)
        launched = Launched(step, self.capture.bucket(inputs), [step.rows[place] for place in making])
        if forwarded.logits is not None:
            self._choose(launched, forwarded.logits)
        return launched

    def _choose(self, launched: Launched, logits: Tensor) -> None:
        """Choose a token from `logits` [M, V] for each of the step's M rows that make one."""
        some = self._tracks.of(launched.rows)
        steps = [one.index(row) for row, one in zip(launched.rows, some, strict=True)]
        slots = self._tracks.slots(launched.rows)
        wishes = self.sampler.rows([one.request.sampling for one in some], slots, steps)
        tokens = self.sampler.choose(logits, wishes)
        fetch = self._tracks.ops.fetch
        asked = [one.request.logprobs for one in some if one.request.logprobs is not None]
        if asked:
            chosen, ids, logprobs = step_logprobs(logits, tokens, max(asked))
            launched.logprobs = fetch(chosen), fetch(ids), fetch(logprobs)
        self._leave(some, steps, slots, tokens)
        self.sampler.note(wishes, tokens)
        launched.tokens = fetch(tokens)

    def _inputs(self, step: Step, live: list[_Live], plan: Plan, making: Ints) -> Inputs:
        """What the step's n token rows read: prompt ids, what the slots hold and, at audio pads, the encoder's states."""
        last = plan.last.numpy()[making]
        walks = {row.walk for row in step.rows}
        if not any(one.prefills(row) for row, one in zip(step.rows, live, strict=True)):
            return Inputs(ids=self._looped_back(step.rows, live), plan=plan, last=last, walk="+".join(sorted(walks)))
        parts, media = [], []
        offset = 0
        for row, one in zip(step.rows, live, strict=True):
            if not one.prefills(row):
                parts.append(self._looped_back([row], [one]))
            else:
                assert one.prompt_ids is not None
                ids = one.prompt_ids[row.start : row.start + row.length]
                if one.audio_at is not None:
                    first, end = np.searchsorted(one.audio_at, [row.start, row.start + row.length])
                    places = one.audio_at[first:end] - row.start
                    ids = ids.copy()
                    ids[places] = MEDIA
                    media.append((places + offset, self._audio_states[row.request_id][first:end]))
                parts.append(ids)
            offset += row.length
        return Inputs(
            ids=np.concatenate(parts),
            plan=plan,
            last=last,
            media=[(places, states) for places, states in media if len(places)],
            states=any(one.prefills(row) and one.speaks_of_media for row, one in zip(step.rows, live, strict=True)),
        )

    def _looped_back(self, rows: Sequence[Row], live: Sequence[_Live]) -> npt.NDArray[np.int32]:
        """The ids [R] of decode rows: their tokens, or -1 - slot for a token that is on the device only."""
        if self._device_loopback:
            self.counters["loopback_rows_device"] += len(rows)
            return np.fromiter((-1 - row.slot for row in rows), np.int32, len(rows))
        self.counters["loopback_rows_host"] += len(rows)
        return np.fromiter((one.last_token for one in live), np.int32, len(rows))

    def _leave(self, live: list[_Live], steps: list[int], slots: Tensor, tokens: Tensor) -> None:
        self._tokens.write(slots, tokens)
        speaking = [index for index, one in enumerate(live) if one.track.audio_output]
        if speaking and self._text_queue is not None:
            chosen, made = self._tracks.put(speaking), self._tracks.put([steps[index] for index in speaking])
            self._text_queue.push(slots[chosen], made, tokens[chosen][:, None])

    def _keep_media_rows(self, step: Step, live: list[_Live], accept: Tensor) -> None:
        """Keep the Talker's view of the audio: the accept layer's rows at audio pads, [tokens, H] per request."""
        offset = 0
        for row, one in zip(step.rows, live, strict=True):
            if one.speaks_of_media and one.prefills(row):
                assert one.audio_at is not None
                first, end = np.searchsorted(one.audio_at, [row.start, row.start + row.length])
                kept = self._media_rows.get(row.request_id)
                if kept is None:
                    kept = accept.new_zeros((len(one.audio_at), accept.shape[1]))
                    self._media_rows[row.request_id] = kept
                kept[first:end] = accept[self._tracks.put((one.audio_at[first:end] - row.start + offset).tolist())]
            offset += row.length

    def finish(self, launched: Launched) -> list[Made]:
        """Read the tokens once, note progress and ends. A row of a track that had ended by then is dropped."""
        if launched.tokens is None:
            return []
        step, rows, live = launched.step, launched.rows, self._tracks.of(launched.rows)
        tokens = self._tracks.to_host(launched.tokens)
        reasons = self._stop(_stop_rows(rows, live), tokens)
        made = []
        for index, (row, one) in enumerate(zip(rows, live, strict=True)):
            if one.track.finished:
                self.counters["thinker_rows_overrun"] += 1
                continue
            one.track.generated += 1
            one.last_token = int(tokens[index])
            one.track.finish_reason = reasons[index]
            result = Made(row.request_id, row.walk, token_ids=[one.last_token])
            if one.request.trace:
                result.trace = [StepTrace(step.number, launched.bucket, len(step.rows))]
            if one.request.logprobs is not None:
                result.logprobs = [self._logprobs(launched, index, one.request.logprobs)]
            made.append(result)
        return made

    def _logprobs(self, launched: Launched, index: int, count: int) -> StepLogprobs:
        assert launched.logprobs is not None
        self.counters["logprob_rows"] += 1
        chosen, ids, logprobs = (values.wait()[index] for values in launched.logprobs)
        return StepLogprobs(float(chosen), ids[:count].tolist(), logprobs[:count].tolist())


def _stop_rows(rows: list[Row], live: list[_Live]) -> list[StopRow]:
    return [
        StopRow(
            walk=row.walk,
            generated=one.index(row),
            limit=one.track.limit,
            ignore_stop_ids=one.request.ignore_eos,
            extra_stop_ids=one.stop_ids,
        )
        for row, one in zip(rows, live, strict=True)
    ]


def _speech(request: Request) -> Speech:
    assert request.speech is not None, f"{request.id} has a Talker track and no speech"
    return request.speech


class TalkerRunner:
    """Prompts and decode rows of the Talker; each row makes one frame of 16 codes, the code predictor's passes included."""

    component = Component.TALKER

    def __init__(
        self,
        talker: Talker,
        cache: KVCache,
        stop: StopCheck,
        *,
        ops: Ops,
        media_rows: dict[str, Tensor],
        text_queue: DeviceQueue,
        frame_queue: DeviceQueue,
        slots: int,
        plans: PlanCache,
        phases: Phases,
        marker_ids: tuple[int, int],
    ) -> None:
        self._talker = talker
        self._cache = cache
        self._stop = stop
        self._media_rows = media_rows
        self._text_queue = text_queue
        self._frame_queue = frame_queue
        self._tracks = _Tracks(plans, phases, ops)
        self._frames = Slots(slots, (talker.hidden,), cache.keys.dtype, ops.device)
        self.sampler = Sampler(slots, talker.vocab, stream=TALKER_STREAM, codebooks=CODE_GROUPS, ops=ops)
        self._end_id, self._pad_id = marker_ids
        self.counters = {"talker_prompts": 0, "talker_rows_overrun": 0}

    def open(self, request: Request, track: Track) -> None:
        """Take a track in with its own positions, counted from 0 over its own prompt."""
        talker_ids = self._talker.prompt_ids(request.prompt_ids)
        positions, _ = prompt_positions(talker_ids, self._talker.config)
        self._tracks.live[request.id] = _Live(request, track, positions=positions)
        self.sampler.open(track.slot, _speech(request).sampling, None)

    def close(self, request_id: str) -> None:
        """Forget a request."""
        self._tracks.live.pop(request_id, None)

    def launch(self, step: Step) -> Launched:
        """Run the rows, choose layer-0 codes, let the predictor add the other 15, and stream the frames."""
        live = self._tracks.of(step.rows)
        prompts = any(row.walk != TALKER_DECODE for row in step.rows)
        plan = self._tracks.ops.upload(self._tracks.plan(step), prompts=prompts)
        x = self._inputs(step, live, self._tracks.slots(step.rows))
        y = self._talker.forward(x, plan, self._cache.keys, self._cache.values)
        making = self._tracks.making(step)
        launched = Launched(step, len(step.rows), [step.rows[place] for place in making])
        if launched.rows:
            last = plan.last if len(making) == len(step.rows) else plan.last[self._tracks.put(making.tolist())]
            self._frame(launched, self._tracks.slots(launched.rows), y.index_select(0, last))
        return launched

    def _frame(self, launched: Launched, slots: Tensor, y: Tensor) -> None:
        """Make the frame of each of the step's M rows that make one, in `slots` [M], from `y` [M, H]."""
        some = self._tracks.of(launched.rows)
        steps = [one.index(row) for row, one in zip(launched.rows, some, strict=True)]
        speech = [_speech(one.request) for one in some]
        logits = self._talker.logits(y).masked_fill(self._talker.suppressed, float("-inf"))
        for index, wish in enumerate(speech):
            if wish.ignore_eos:
                logits[index, self._talker.eos] = float("-inf")
        wishes = self.sampler.rows([wish.sampling for wish in speech], slots, steps)
        first = self.sampler.choose(logits, wishes)
        rest, total = self._predict(y, first, wishes)
        codes = torch.cat([first[:, None], rest], dim=1)
        self._frames.write(slots, total)
        self._frame_queue.push(slots, self._tracks.put(steps), codes)
        self.sampler.note(wishes, first)
        launched.tokens = self._tracks.ops.fetch(codes)

    def _predict(self, y: Tensor, first: Tensor, wishes: SamplingRows) -> tuple[Tensor, Tensor]:
        """Codes 1 … 15 of each row and the sum of its frame's embeddings: [R, 15] int64 and [R, H]."""
        rows = wishes.predictor(PREDICTOR_TOP_K, PREDICTOR_TOP_P)
        pick: Callable[[Tensor, int], Tensor] = lambda logits, group: self.sampler.choose(logits, rows, group)  # noqa: E731
        return self._talker.predictor.frame(y, first, self._talker.codec_embed(first), pick)

    def _inputs(self, step: Step, live: list[_Live], slots: Tensor) -> Tensor:
        """Prompt rows, or for decode rows the last frame's embeddings plus the text that goes with it; returns [n, H]."""
        decode = [not one.prefills(row) for row, one in zip(step.rows, live, strict=True)]
        looped = self._frames.read(slots) + self._text_rows(step, live, slots) if any(decode) else None
        if all(decode):
            assert looped is not None
            return looped
        parts = []
        for index, (row, one) in enumerate(zip(step.rows, live, strict=True)):
            if decode[index]:
                assert looped is not None
                parts.append(looped[index : index + 1])
            else:
                if one.prompt is None:
                    one.prompt = self._prompt_rows(one)
                parts.append(one.prompt[row.start : row.start + row.length])
        return torch.cat(parts)

    def _prompt_rows(self, one: _Live) -> Tensor:
        request, speech = one.request, _speech(one.request)
        slot = self._tracks.put([one.track.slot])
        first = int(self._text_queue.at(slot, torch.zeros_like(slot))[0, 0])
        self.counters["talker_prompts"] += 1
        media = self._media_rows.get(request.id)
        rows, _ = self._talker.prompt(request.prompt_ids, media, first, speech.voice)
        return rows

    def _text_rows(self, step: Step, live: list[_Live], slots: Tensor) -> Tensor:
        """What is to be spoken at each row's frame, as [R, H]: a text id, the end marker or padding."""
        index = [
            text_index(one.index(row), one.track.arrived, one.track.source_ended)
            for row, one in zip(step.rows, live, strict=True)
        ]
        at = self._tracks.put([max(one, 0) if one is not None else 0 for one in index])
        ids = self._text_queue.at(slots, at)[:, 0]
        marker = self._tracks.put([self._pad_id if one is None else self._end_id if one < 0 else -1 for one in index])
        return self._talker.text_rows(torch.where(marker < 0, ids, marker))

    def finish(self, launched: Launched) -> list[Made]:
        """Read the frames once; a row whose layer-0 code is the end makes none, and one of an ended track is dropped."""
        if launched.tokens is None:
            return []
        rows, live = launched.rows, self._tracks.of(launched.rows)
        codes = self._tracks.to_host(launched.tokens)
        reasons = self._stop(self._limits(rows, live), codes[:, 0])
        made = []
        for row, one, reason, frame in zip(rows, live, reasons, codes, strict=True):
            if one.track.finished:
                self.counters["talker_rows_overrun"] += 1
                continue
            one.track.finish_reason = reason
            result = Made(row.request_id, row.walk)
            if reason != STOP:
                one.track.generated += 1
                result.frames = 1
                if _speech(one.request).codes:
                    result.codes = [frame.tolist()]
            made.append(result)
        return made

    @staticmethod
    def _limits(rows: list[Row], live: list[_Live]) -> list[StopRow]:
        return [
            StopRow(walk=row.walk, generated=one.index(row), limit=one.track.limit)
            for row, one in zip(rows, live, strict=True)
        ]


class Code2WavRunner:
    """Frames to sound, one stream at a time, at one fixed chunk shape."""

    component = Component.CODE2WAV

    def __init__(self, code2wav: Code2Wav, frame_queue: DeviceQueue, *, stateful: bool) -> None:
        self._code2wav = code2wav
        self._queue = frame_queue
        self._stateful = stateful
        self._live: dict[str, _Live] = {}
        self._states: dict[str, Code2WavState] = {}
        self.counters = {"code2wav_chunks_stateful": 0, "code2wav_chunks_recomputed": 0}

    def open(self, request: Request, track: Track) -> None:
        """Take a track in, with silence before its first frame."""
        self._live[request.id] = _Live(request, track)
        self._states[request.id] = self._code2wav.new_state()

    def close(self, request_id: str) -> None:
        """Forget a stream and its state."""
        self._live.pop(request_id, None)
        self._states.pop(request_id, None)

    def launch(self, step: Step) -> Launched:
        """Decode each row's frames into samples."""
        return Launched(step, len(step.rows), pcm=[self._sound(row) for row in step.rows])

    def _sound(self, row: Row) -> Tensor:
        if self._stateful:
            self.counters["code2wav_chunks_stateful"] += 1
            codes = self._queue.span(row.slot, row.start, row.length)
            return self._code2wav.step(codes.t(), self._states[row.request_id])
        self.counters["code2wav_chunks_recomputed"] += 1
        everything = self._code2wav.decode(self._queue.span(row.slot, 0, row.start + row.length).t())
        return everything[self._code2wav.samples(row.start) :]

    def finish(self, launched: Launched) -> list[Made]:
        """Copy the samples out as little-endian 16-bit PCM."""
        made = []
        for row, samples in zip(launched.step.rows, launched.pcm, strict=True):
            self._live[row.request_id].track.generated += row.length
            pcm = (samples * 32767.0).round().clamp(-32768, 32767).to(torch.int16).cpu().numpy().astype("<i2").tobytes()
            made.append(Made(row.request_id, row.walk, pcm=pcm, frames=row.length))
        return made
