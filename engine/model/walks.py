"""The walk table of the model, and which walk a track takes next. Data and pure rules; no torch."""

from __future__ import annotations

from engine.step import Component
from engine.stream import chunk_length
from engine.track import Track
from engine.walk import Destination, DeviceLoopback, Emit, TokenStop, Walk, WalkTable

AUDIO_ENCODER = "audio_encoder"
THINKER_PREFILL = "thinker_prefill"
THINKER_DECODE = "thinker_decode"
THINKER_TEXT_DECODE = "thinker_text_decode"
TALKER_PREFILL = "talker_prefill"
TALKER_DECODE = "talker_decode"
CODE2WAV = "code2wav"

THINKER_DECODE_WALKS = frozenset({THINKER_DECODE, THINKER_TEXT_DECODE})
THINKER_WALKS = THINKER_DECODE_WALKS | {THINKER_PREFILL}
TALKER_WALKS = frozenset({TALKER_PREFILL, TALKER_DECODE})

TOKEN, FRAME, AUDIO_STATES, PCM = "token", "frame", "audio_states", "pcm"

_TO_ALL = frozenset({Destination.CLIENT, Destination.DEVICE, Destination.STREAM})
_TEXT_AND_SPEECH = (Emit(TOKEN, _TO_ALL, Component.TALKER),)
_TEXT_ONLY = (Emit(TOKEN, frozenset({Destination.CLIENT, Destination.DEVICE})),)
_FRAMES = (Emit(FRAME, frozenset({Destination.DEVICE, Destination.STREAM}), Component.CODE2WAV),)


def walk_table(text_stop_ids: frozenset[int], codec_eos: int | None) -> WalkTable:
    """Return the table of a model whose text ends on `text_stop_ids` and whose speech ends on `codec_eos`.

    `codec_eos` None is a model without speech: no walk of its table makes speech or streams into it.
    """
    if codec_eos is None:
        return _text_table(text_stop_ids, _TEXT_ONLY)
    text = _text_table(text_stop_ids, _TEXT_AND_SPEECH)
    return WalkTable(
        walks=(
            *text.walks,
            Walk(TALKER_PREFILL, Component.TALKER, _FRAMES, needs_audio_output=True),
            Walk(TALKER_DECODE, Component.TALKER, _FRAMES, decode=True, needs_audio_output=True),
            Walk(
                CODE2WAV,
                Component.CODE2WAV,
                (Emit(PCM, frozenset({Destination.CLIENT})),),
                needs_audio_output=True,
            ),
        ),
        loopbacks=(
            *text.loopbacks,
            DeviceLoopback(Component.TALKER, FRAME, written_by=TALKER_WALKS, read_by=frozenset({TALKER_DECODE})),
        ),
        stops=(*text.stops, TokenStop(Component.TALKER, FRAME, frozenset({codec_eos}), TALKER_WALKS)),
    )


def _text_table(stop_ids: frozenset[int], emits: tuple[Emit, ...]) -> WalkTable:
    """The walks that lead to text; `emits` says where the text goes of those that serve speech too."""
    return WalkTable(
        walks=(
            Walk(
                AUDIO_ENCODER,
                Component.AUDIO_ENCODER,
                (Emit(AUDIO_STATES, frozenset({Destination.STREAM}), Component.THINKER),),
            ),
            Walk(THINKER_PREFILL, Component.THINKER, emits),
            Walk(THINKER_DECODE, Component.THINKER, emits, decode=True),
            Walk(THINKER_TEXT_DECODE, Component.THINKER, _TEXT_ONLY, decode=True),
        ),
        loopbacks=(DeviceLoopback(Component.THINKER, TOKEN, written_by=THINKER_WALKS, read_by=THINKER_DECODE_WALKS),),
        stops=(TokenStop(Component.THINKER, TOKEN, stop_ids, THINKER_WALKS),),
    )


def next_walk(track: Track, *, text_walk: bool = True) -> str | None:
    """Return the walk that `track` can launch now, or None: it is finished, all that it may make is launched, or it waits.

    With `text_walk` off, text-only requests decode through the walk that also serves speech.
    """
    if track.finished:
        return None
    if track.component == Component.AUDIO_ENCODER:
        return AUDIO_ENCODER if track.prefilled < track.prompt_length else None
    if track.component == Component.THINKER:
        return _thinker_walk(track, text_walk)
    if track.component == Component.TALKER:
        return _talker_walk(track)
    return CODE2WAV if track.arrived > track.launched else None


def _thinker_walk(track: Track, text_walk: bool) -> str | None:
    if track.waits_for_source and not track.source_ended:
        return None
    if track.prefilled < track.prompt_length:
        return THINKER_PREFILL
    if track.launched >= track.limit:
        return None
    return THINKER_DECODE if track.audio_output or not text_walk else THINKER_TEXT_DECODE


def _talker_walk(track: Track) -> str | None:
    """Prefill needs the first text id and the promise of a second; frame f+1 needs id f and to know whether it is the last."""
    if track.prefilled < track.prompt_length:
        return TALKER_PREFILL if track.arrived >= 2 else None
    if track.launched >= track.limit:
        return None
    return TALKER_DECODE if track.source_ended or track.arrived >= track.launched + 2 else None


def row_span(track: Track, chunk_frames: int) -> tuple[int, int]:
    """Return (start, length) of what a ready track runs: clips, positions or frames; length 0 for not yet."""
    if track.component == Component.CODE2WAV:
        return track.launched, chunk_length(track.launched, track.arrived, track.source_ended, chunk_frames)
    if track.prefilled < track.prompt_length:
        return track.prefilled, track.prompt_length - track.prefilled
    return track.prompt_length + track.launched - 1, 1


def text_index(frame: int, text_tokens: int, text_ended: bool) -> int | None:
    """Return which generated text id goes with the Talker's step after `frame` frames; None once only padding is left.

    Ids 0 … n-2 of n generated ones are spoken; the id n-1 ended the text and its place is taken by the end marker, which
    is returned as -1.
    """
    if not text_ended or frame <= text_tokens - 2:
        return frame
    return -1 if frame == text_tokens - 1 else None
