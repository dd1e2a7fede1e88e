"""How a checkpoint wants its text and speech to be sampled, from `generation_config.json`. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.errors import CheckpointError
from engine.request import Sampling

Temperature = Annotated[float, Meta(ge=0, le=100)]
TopK = Annotated[int, Meta(ge=0, lt=2**31)]
TopP = Annotated[float, Meta(gt=0, le=1)]
Penalty = Annotated[float, Meta(ge=0.01, le=100)]


class Generation(msgspec.Struct, frozen=True):
    """What holds for a request that doesn't say otherwise; a key that the file lacks leaves these values as they are.

    `max_new_tokens`, and frames of `talker_max_new_tokens`, bound the default only: who asks for more gets more. What begins
    with `talker_` is of speech.
    """

    do_sample: bool = True
    temperature: Temperature = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Penalty = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] = 2048
    talker_do_sample: bool = True
    talker_temperature: Temperature = 0.9
    talker_top_k: TopK = 50
    talker_top_p: TopP = 1.0
    talker_repetition_penalty: Penalty = 1.05
    talker_max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] = 4096

    @classmethod
    def load(cls, folder: Path) -> Generation:
        """Read the file of a model folder, if there is one; CheckpointError names a value that can't be used."""
        path = folder / "generation_config.json"
        try:
            found = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
            # Files that list every key write null for those that they leave open.
            given = {key: value for key, value in found.items() if value is not None}
            # -1 is vLLM's way to say off, as 0 is Hugging Face's.
            off: dict[str, object] = {key: 0 for key in ("top_k", "talker_top_k") if given.get(key) == -1}
            return msgspec.convert(given | off, cls)
        except FileNotFoundError:
            return cls()
        except OSError as error:
            raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from None
        except (msgspec.MsgspecError, RecursionError) as error:
            raise CheckpointError(f"{path}: {error}; mend it, or take the file away for the usual defaults") from None

    @property
    def text_temperature(self) -> float:
        """The temperature of text: 0, which is greedy, where the file says not to draw."""
        return self.temperature if self.do_sample else 0.0

    def speech(self, seed: int) -> Sampling:
        """How the Talker's codes are drawn with `seed`."""
        return Sampling(
            temperature=self.talker_temperature if self.talker_do_sample else 0.0,
            top_k=self.talker_top_k,
            top_p=self.talker_top_p,
            repetition_penalty=self.talker_repetition_penalty,
            seed=seed,
        )
