"""Where tests find data that this repository may not hold (real speech, released tokenizer files)."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def shared(*parts: str) -> Path:
    """A file or folder of the data folder: WALKGATE_SHARED, else `shared` beside the repository. Skips where it is absent."""
    root = Path(os.environ.get("WALKGATE_SHARED") or REPOSITORY.parent / "shared")
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is not there; WALKGATE_SHARED names the folder that holds {'/'.join(parts)}")
    return path
