"""The main voice with every sound on whole frames of the codec.

In natural speech a sound begins anywhere in a frame of 80 ms, so what a frame holds depends on milliseconds that nobody can
foresee, and a guess at the mean of it is a blur. Here each sound takes one frame or a few, and what a frame holds follows from
the sounds around it. hibari's network stretches each sign of what it is to say over as many units as it foresees; this module
looks at what it foresees and has it take whole frames instead.

`grouped`, `counted` and `stretched` are the policy. `FramedVoice` runs the network, whose graph it changes for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from hibari import Hibari

FRAME = 1920  # samples of a frame
# The network counts in units of 25 ms: 3.2 of them are a frame, so what is given to a sound begins within 10 ms of one.
UNITS = 3.2
STRESS = "ˈˌ"
# Frames that a sound may take, and the last one of a sentence and its mark.
MOST, MOST_LAST = 3, 4
# Frames that are given to the silence before a sentence and after it. A first sound may begin a little earlier.
LEAD = TAIL = 1
SILENCE = " "
_NATURAL, _GIVEN = "natural", "given"


@dataclass(frozen=True, slots=True)
class Sound:
    """A sound or a mark, `sign`, with the space and the stress before it: signs `first` to `last` of a sentence."""

    sign: str
    first: int
    last: int


def grouped(signs: str) -> list[Sound]:
    """The sounds of a sentence as the voice writes it down (no tensors); what follows the last sound is a sound of its own."""
    found, first = [], 0
    for place, sign in enumerate(signs):
        if place == len(signs) - 1 or (sign not in STRESS and sign != SILENCE):
            found.append(Sound(sign, first, place))
            first = place + 1
    return found


def counted(sounds: Sequence[Sound], natural: Sequence[float]) -> list[int]:
    """How many frames each of `sounds` takes, one at least, where its signs would take `natural` units (no tensors)."""
    frames = [round(sum(natural[one.first : one.last + 1]) / UNITS) for one in sounds]
    most = [MOST] * len(frames)
    most[-2:] = [MOST_LAST] * len(most[-2:])
    return [min(max(1, count), limit) for count, limit in zip(frames, most, strict=True)]


def stretched(sounds: Sequence[Sound], frames: Sequence[int], natural: Sequence[float]) -> list[int]:
    """Units for each sign of a sentence, and for the silence before and after it: [signs + 2] (no tensors).

    The units of a sound are those of its `frames`, shared out among its signs as `natural` is, one at least to each.
    """
    place = LEAD
    units = [_unit(place)]
    for one, count in zip(sounds, frames, strict=True):
        units += _shared(_unit(place + count) - _unit(place), natural[one.first : one.last + 1])
        place += count
    return [*units, _unit(place + TAIL) - _unit(place)]


def _unit(frame: int) -> int:
    return round(UNITS * frame)


def _shared(units: int, natural: Sequence[float]) -> list[int]:
    """`units` shared out in the shares of `natural`, one at least to each."""
    shares = [1] * len(natural)
    total = sum(natural)
    for _ in range(units - len(natural)):
        short = [units * wanted / total - share for wanted, share in zip(natural, shares, strict=True)]
        shares[short.index(max(short))] += 1
    return shares


class FramedVoice:
    """A hibari voice that speaks in whole frames."""

    def __init__(self, voice: Hibari) -> None:
        """ModuleNotFoundError without the package onnx; ValueError for a network that is built otherwise."""
        self._voice = voice
        self._foresee, self._speak = _networks(voice.model_path)

    def sounds(self, text: str) -> str:
        """The sign of every frame of what is said of `text`, [F] signs; a silence is a space."""
        return "".join(
            SILENCE * LEAD
            + "".join(one.sign * count for one, count in zip(sounds, frames, strict=True))
            + SILENCE * TAIL
            for _, sounds, frames, _ in map(self._planned, self._sentences(text))
        )

    def __call__(self, text: str, seed: int) -> NDArray[np.float32]:
        """Say `text`: samples [F * 1920] float32 at 24 kHz. `seed` is of the noise in it; ValueError for nothing to say."""
        rng = np.random.default_rng(seed)
        said = [self._said(signs, rng) for signs in self._sentences(text)]
        if not said:
            raise ValueError(f"there is nothing to say in {text!r}")
        return np.concatenate(said)

    def _sentences(self, text: str) -> list[str]:
        known = self._voice.vocab
        written = ["".join(sign for sign in one if sign in known) for one in self._voice.phonemize(text)]
        return [signs for signs in written if signs]

    def _planned(self, signs: str) -> tuple[NDArray[np.int64], list[Sound], list[int], list[float]]:
        """Ids [1, signs + 2], sounds, their frames, and the units that are natural to each sign."""
        ids = np.array([self._voice.ids(signs)], np.int64)
        [natural] = self._foresee.run([_NATURAL], {"ids": ids, "speed": np.ones(1, np.float32)})
        units = np.maximum(np.ravel(natural)[1:-1], 0.3).tolist()
        sounds = grouped(signs)
        return ids, sounds, counted(sounds, units), units

    def _said(self, signs: str, rng: np.random.Generator) -> NDArray[np.float32]:
        from hibari import dsp

        ids, sounds, frames, natural = self._planned(signs)
        given = np.array(stretched(sounds, frames, natural), np.float32)
        parts = self._speak.run(None, {"ids": ids, "speed": np.ones(1, np.float32), _GIVEN: given})
        samples = np.asarray(dsp.synth(*(part[0] for part in parts), rng), dtype=np.float32)
        # The last frame ends within a unit of where the network does.
        wanted = FRAME * (LEAD + sum(frames) + TAIL)
        return np.pad(samples, (0, max(0, wanted - len(samples))))[:wanted]


def _networks(path: str) -> tuple[Any, Any]:
    """Two sessions of the network at `path`: one says how many units are natural, the other takes units that are given."""
    import onnx
    import onnxruntime

    model = onnx.load(path)
    rounded = [node for node in model.graph.node if node.op_type == "Round"]
    clipped = [
        node for node in model.graph.node if rounded and node.op_type == "Clip" and rounded[0].output[0] in node.input
    ]
    if len(rounded) != 1 or len(clipped) != 1:
        raise ValueError(f"{path} is not built as hibari 0.2 is: it does not round and clip its durations in one place")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3

    def session(changed: onnx.ModelProto) -> Any:
        return onnxruntime.InferenceSession(changed.SerializeToString(), options, providers=["CPUExecutionProvider"])

    number = onnx.TensorProto.FLOAT
    natural, given = onnx.ModelProto(), onnx.ModelProto()
    natural.CopyFrom(model)
    del natural.graph.output[:]
    natural.graph.node.append(onnx.helper.make_node("Identity", [rounded[0].input[0]], [_NATURAL]))
    natural.graph.output.append(onnx.helper.make_tensor_value_info(_NATURAL, number, None))
    given.CopyFrom(model)
    for node in given.graph.node:
        for place, name in enumerate(node.input):
            if name == clipped[0].output[0]:
                node.input[place] = _GIVEN
    given.graph.input.append(onnx.helper.make_tensor_value_info(_GIVEN, number, ["signs"]))
    return session(natural), session(given)
