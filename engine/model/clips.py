"""Audio files to clips: bytes -> mono samples at 16 kHz -> log-mel frames. No torch; runs in the front process.

Every fault of a file is a RequestError on the field `audio` that says which clip and what would work.
"""

from __future__ import annotations

import functools
import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import soundfile
import soxr
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from engine.errors import RequestError

SAMPLE_RATE = 16000
WINDOW, HOP = 400, 160
# Reflection at the ends needs more samples than half a window, and a clip of less than one window says nothing.
SHORTEST_SAMPLES = WINDOW
SAMPLE_RATES = (1000, 192_000)
MOST_CHANNELS = 32
_READ_FRAMES = 65_536
_MEL_BLOCK = 4096  # frames; bounds the memory of the spectrum of a long clip

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sound:
    """Mono samples at 16 kHz, float32 [n], and the seconds that the file lasts at its own rate."""

    samples: Floats
    seconds: float


def decode(data: bytes, place: int, max_seconds: float, used: float = 0.0) -> Sound:
    """Decode clip number `place`; RequestError when it is empty, broken, too short, too long or not finite.

    All clips of a request share `max_seconds`, of which those before this one take `used`. No more than is left is read.
    """
    if not data:
        raise _fault(place, "is empty (0 bytes)", "empty_audio")
    _check_riff(data, place)
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_header(file, place)
            samples, read = _resampled(file, place, max_seconds, used)
            seconds = read / file.samplerate
            if file.format == "FLAC" and read < file.frames:
                raise _fault(place, f"is cut off after {read} of {file.frames} samples", "truncated_audio")
    except soundfile.LibsndfileError as error:
        reason = str(error.error_string).rstrip(".")
        raise _fault(place, f"can't be decoded ({reason}); send WAV, FLAC, OGG or MP3", "invalid_audio") from None
    if not read:
        raise _fault(place, "holds no samples, or is cut off before the first", "empty_audio")
    if len(samples) < SHORTEST_SAMPLES:
        least = 1000 * SHORTEST_SAMPLES / SAMPLE_RATE
        raise _fault(place, f"lasts {1000 * seconds:g} ms, shorter than one window of {least:g} ms", "audio_too_short")
    if not np.isfinite(samples).all():
        raise _fault(place, "holds NaN or infinite samples", "invalid_audio")
    return Sound(samples, seconds)


def _fault(place: int, what: str, code: str) -> RequestError:
    return RequestError(f"audio[{place}] {what}", field="audio", code=code)


def _check_header(file: soundfile.SoundFile, place: int) -> None:
    low, high = SAMPLE_RATES
    if not low <= file.samplerate <= high:
        raise _fault(place, f"has a sample rate of {file.samplerate} Hz; {low} to {high} Hz is served", "invalid_audio")
    if not 1 <= file.channels <= MOST_CHANNELS:
        raise _fault(place, f"has {file.channels} channels; 1 to {MOST_CHANNELS} is served", "invalid_audio")


def _mono(file: soundfile.SoundFile) -> Iterator[Floats]:
    """Blocks of mono samples; a file of many channels or of silence packed small never stands whole in memory."""
    while len(block := file.read(_READ_FRAMES, dtype="float32", always_2d=True)):
        yield block[:, 0] if block.shape[1] == 1 else block.mean(axis=1, dtype=np.float32)


def _resampled(file: soundfile.SoundFile, place: int, max_seconds: float, used: float) -> tuple[Floats, int]:
    """Return the samples at 16 kHz and the count read at the file's own rate."""
    stream = None if file.samplerate == SAMPLE_RATE else soxr.ResampleStream(file.samplerate, SAMPLE_RATE, 1, "float32")
    parts: list[Floats] = []
    read, most = 0, round((max_seconds - used) * file.samplerate)
    for block in _mono(file):
        read += len(block)
        if read > most:
            seconds = max(read, file.frames) / file.samplerate
            sooner = f" and the clips before it {used:.1f} s" if used else ""
            what = f"lasts {seconds:.1f} s{sooner}; this server takes at most {max_seconds:g} s"
            raise _fault(place, what + (" of audio in all" if used else ""), "audio_too_long")
        parts.append(block if stream is None else stream.resample_chunk(block))
    if stream is not None:
        parts.append(stream.resample_chunk(np.zeros(0, np.float32), last=True))
    return np.concatenate(parts) if parts else np.zeros(0, np.float32), read


def _check_riff(data: bytes, place: int) -> None:
    """Refuse a WAV whose data chunk promises more bytes than came: libsndfile would serve what is there, silently."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return
    start = 12
    while start + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, start)
        # Writers that stream don't know the length and leave a placeholder: 0 or close to the field's largest value.
        if name == b"data" and 0 < size < 0x7FFF_0000 and start + 8 + size > len(data):
            raise _fault(place, f"is cut off: {len(data) - start - 8} of {size} data bytes came", "truncated_audio")
        start += 8 + size + size % 2


def log_mel(samples: Floats, mel_bins: int) -> Floats:
    """Return the log-mel spectrogram [mel_bins, n // 160], float32, of `samples` [n] at 16 kHz, n >= 400.

    Windows of 25 ms every 10 ms, centred, reflected at the ends; the last frame is dropped. Values lie within 2 of the
    loudest, as the checkpoint was trained on.
    """
    padded = np.pad(samples.astype(np.float64), WINDOW // 2, mode="reflect")
    frames = sliding_window_view(padded, WINDOW)[::HOP][: len(samples) // HOP]
    filters, window = mel_filters(mel_bins), np.hanning(WINDOW + 1)[:-1]
    power = np.empty((mel_bins, len(frames)))
    for start in range(0, len(frames), _MEL_BLOCK):
        spectrum = np.fft.rfft(frames[start : start + _MEL_BLOCK] * window, axis=1)
        power[:, start : start + len(spectrum)] = filters @ (spectrum.real**2 + spectrum.imag**2).T
    logs = np.log10(np.maximum(power, 1e-10))
    return np.asarray((np.maximum(logs, logs.max() - 8.0) + 4.0) / 4.0, dtype=np.float32)


@functools.cache
def mel_filters(mel_bins: int) -> NDArray[np.float64]:
    """Triangles on Slaney's mel scale, 0 to 8000 Hz, each of area 2 over its width in Hz: [mel_bins, 201]."""
    top = _hz_to_mel(SAMPLE_RATE / 2)
    edges = np.array([_mel_to_hz(mel) for mel in np.linspace(0.0, top, mel_bins + 2)])
    low, mid, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    bins = np.linspace(0.0, SAMPLE_RATE / 2, WINDOW // 2 + 1)[None, :]
    triangles = np.maximum(0.0, np.minimum((bins - low) / (mid - low), (high - bins) / (high - mid)))
    return np.asarray(triangles * (2.0 / (high - low)))


# Slaney's scale: 3 mels every 200 Hz up to 1 kHz, then 27 mels for each factor of 6.4.
def _hz_to_mel(hertz: float) -> float:
    return float(hertz * 3 / 200 if hertz < 1000 else 15 + 27 * np.log(hertz / 1000) / np.log(6.4))


def _mel_to_hz(mel: float) -> float:
    return float(mel * 200 / 3 if mel < 15 else 1000 * 6.4 ** ((mel - 15) / 27))
