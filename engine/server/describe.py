"""What a server says of itself: its source, its model, its memory. Plain values for `/info`, `/metrics` and `omni info`."""

from __future__ import annotations

from pathlib import Path

import psutil

from engine.model.config import OmniConfig
from engine.server.source import git_commit, package_folder, source_digest, source_root, versions


def resident_bytes(pid: int | None) -> float:
    """The memory that a process holds, this one for None; 0 when it is gone."""
    try:
        return float(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0.0


def identity() -> dict[str, object]:
    """Which source this process runs, by folder, digest, commit and versions."""
    root = source_root()
    commit = git_commit(root)
    return {
        "source_root": str(root),
        "source_digest": source_digest(package_folder()),
        "commit": commit.commit,
        "dirty": commit.dirty,
        "versions": versions(),
    }


def tasks(config: OmniConfig) -> list[str]:
    """The tasks that a model serves: from text or audio to text, and to speech if it has a Talker."""
    return ["T2T", "A2T", "T2S", "A2S"] if config.has_talker else ["T2T", "A2T"]


def model_summary(folder: Path, config: OmniConfig) -> dict[str, object]:
    """The sizes of a model that one asks for first, by component."""
    thinker, talker = config.thinker, config.talker
    summary: dict[str, object] = {
        "folder": str(folder),
        "dtype": config.dtype,
        "thinker": {
            "layers": thinker.layers,
            "hidden": thinker.hidden,
            "experts": thinker.experts,
            "top_k": thinker.top_k,
            "vocab": thinker.vocab,
            "max_positions": thinker.max_positions,
        },
        "audio_encoder": {"layers": config.audio.layers, "hidden": config.audio.hidden},
    }
    if talker is None:
        return summary
    return summary | {
        "talker": {
            "layers": talker.stack.layers,
            "hidden": talker.stack.hidden,
            "experts": talker.stack.experts,
            "max_positions": talker.stack.max_positions,
        },
        "voices": sorted(talker.speakers),
    }
