"""Speech as it is sent: 16-bit little-endian mono samples, bare or in a file. No torch."""

from __future__ import annotations

import io
import struct

import numpy as np
import soundfile

SAMPLE_RATE = 24000
BYTES_PER_SAMPLE = 2
_SILENCE_BYTES = SAMPLE_RATE * BYTES_PER_SAMPLE // 50
UNKNOWN_LENGTH = 0xFFFFFFFF
WAV, PCM = "wav", "pcm"
# Formats of whole files by name: libsndfile's format and subtype, and the media type.
_FILES = {
    WAV: ("WAV", "PCM_16", "audio/wav"),
    "flac": ("FLAC", "PCM_16", "audio/flac"),
    "mp3": ("MP3", "MPEG_LAYER_III", "audio/mpeg"),
    "opus": ("OGG", "OPUS", "audio/ogg"),
}
_MEDIA_TYPES = {name: media_type for name, (_, _, media_type) in _FILES.items()} | {PCM: "audio/pcm"}


def media_type(format_name: str) -> str:
    """The media type of wav, flac, mp3, opus or pcm."""
    return _MEDIA_TYPES[format_name]


def encoded(pcm: bytes, format_name: str) -> bytes:
    """`pcm` as a file: wav, flac, mp3 or opus (in Ogg); pcm stays as it is."""
    if format_name == PCM:
        return pcm
    if format_name == WAV:
        return wav_header(len(pcm)) + pcm
    kind, subtype, _ = _FILES[format_name]
    buffer = io.BytesIO()
    # Without any sample libsndfile writes no file at all, so what was never spoken is 20 ms of silence here.
    samples = np.frombuffer(pcm or bytes(_SILENCE_BYTES), "<i2")
    soundfile.write(buffer, samples, SAMPLE_RATE, format=kind, subtype=subtype)
    return buffer.getvalue()


def wav_header(data_bytes: int = UNKNOWN_LENGTH) -> bytes:
    """The 44 bytes before the samples of a WAV file; by default they say that the length is not known yet."""
    riff_bytes = min(36 + data_bytes, UNKNOWN_LENGTH)
    byte_rate = SAMPLE_RATE * BYTES_PER_SAMPLE
    kind = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, SAMPLE_RATE, byte_rate, BYTES_PER_SAMPLE, 16)
    return struct.pack("<4sI4s", b"RIFF", riff_bytes, b"WAVE") + kind + struct.pack("<4sI", b"data", data_bytes)
