"""Settings of a server, as frozen values: the only reader of flags and environment variables. No torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import WalkgateError

SWITCHES = ("text_walk", "device_loopback", "vectorised_stop", "batching", "stateful_code2wav")
DTYPES = ("float32", "bfloat16", "float16")
# Devices that the operations of engine/kernels exist for.
DEVICES = ("cpu",)
MOST_THREADS = 1024
MOST_KV_PAGES = 1 << 22  # 67 million positions of 16 a page
MAX_BODY_BYTES = 64 * 1024 * 1024


class SettingError(WalkgateError):
    """A flag or an environment variable that can't be served; the message names it and says what would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the engine runs. `max_model_len` and `kv_pages` None leave the choice to the model and the engine.

    `max_model_len` counts prompt and generated tokens of one request, `page_size` positions of a KV page, `max_batch`
    requests at once, `chunk_frames` the frames of one pass of Code2Wav, `threads` the engine's threads on a CPU.
    `disabled` names switches (of SWITCHES) that are off. Raises SettingError.
    """

    max_model_len: int | None = None
    kv_pages: int | None = None
    page_size: int = 16
    max_batch: int = 64
    disabled: frozenset[str] = frozenset()
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    chunk_frames: int = 4

    def __post_init__(self) -> None:
        wanted = {
            "--model-len": self.max_model_len,
            "--kv-pages": self.kv_pages,
            "page_size": self.page_size,
            "max_batch": self.max_batch,
            "--threads": self.threads,
            "chunk_frames": self.chunk_frames,
        }
        for name, value in wanted.items():
            if value is not None and value < 1:
                raise SettingError(f"{name} must be at least 1, is {value}")
        most = {"--threads": (self.threads, MOST_THREADS), "--kv-pages": (self.kv_pages or 1, MOST_KV_PAGES)}
        for name, (value, limit) in most.items():
            if value > limit:
                raise SettingError(f"{name} must be at most {limit}, is {value}")
        if self.device not in DEVICES:
            raise SettingError(f"--device {self.device!r} is not served yet; there is {', '.join(DEVICES)}")
        if self.dtype not in DTYPES:
            raise SettingError(f"--dtype must be one of {', '.join(DTYPES)}, is {self.dtype!r}")
        check_switches(self.disabled)


def check_switches(names: Iterable[str]) -> None:
    """Raise SettingError unless every name is a switch."""
    for name in sorted(names):
        if name not in SWITCHES:
            raise SettingError(f"--disable: no switch is called {name!r}; there are {', '.join(SWITCHES)}")


def parse_switches(text: str) -> frozenset[str]:
    """Split `a,b` into switch names; SettingError for an unknown one."""
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    check_switches(names)
    return names


def default_dtype(device: str) -> str:
    """The dtype to compute in when none is asked for: a CPU is exact in float32 and slow in anything else."""
    return "float32" if device == "cpu" else "bfloat16"


def cache_folder() -> Path:
    """The user's cache folder for Walkgate, which need not exist: XDG_CACHE_HOME, or the platform's own place."""
    asked = os.environ.get("XDG_CACHE_HOME", "")
    if Path(asked).is_absolute():
        return Path(asked) / "walkgate"
    library = Path.home() / "Library" / "Caches"
    return (library if sys.platform == "darwin" else Path.home() / ".cache") / "walkgate"


def child_environment(source_root: Path) -> dict[str, str]:
    """The environment of a child process that must import the same tree as this one: this tree comes first."""
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(source_root)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(source_root), *rest])}
