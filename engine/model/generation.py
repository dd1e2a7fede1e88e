"""How a checkpoint wants its text to be sampled, from `generation_config.json`. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.errors import CheckpointError


class Generation(msgspec.Struct, frozen=True):
    """What holds for a request that doesn't say otherwise; a key that the file lacks leaves these values as they are.

    `max_new_tokens` bounds the default only: who asks for more gets more.
    """

    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1, lt=2**31)] = 2048

    @classmethod
    def load(cls, folder: Path) -> Generation:
        """Read the file of a model folder, if there is one; CheckpointError names a value that can't be used."""
        path = folder / "generation_config.json"
        if not path.is_file():
            return cls()
        try:
            found = msgspec.json.decode(path.read_bytes(), type=dict[str, object])
            # Files that list every key write null for those that they leave open.
            return msgspec.convert({key: value for key, value in found.items() if value is not None}, cls)
        except msgspec.MsgspecError as error:
            raise CheckpointError(f"{path}: {error}") from None
