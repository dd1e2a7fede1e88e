"""Settings of a server, as frozen values: the only reader of flags and environment variables. No torch."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import WalkgateError

SWITCHES = (
    *("text_walk", "device_loopback", "vectorised_stop", "batching", "stateful_code2wav"),
    *("launch_ahead", "chunked_prefill", "mixed_steps", "plan_cache"),
)
# What a GPU has beside them: how steps are captured, and which kernels may run.
GPU_SWITCHES = (
    *("captures", "prompt_captures", "shared_captures", "in_graph_tables", "audio_captures"),
    *("fused_routing", "route_align", "per_pair", "grouped_gemm", "tuned_tiles"),
    *("gemv", "decode_kernel", "flashinfer", "dependent_launch"),
)
# A CPU has finished a step when its launch returns: there a step launched ahead only delays the token of the one before.
OFF_BY_DEFAULT = {"cpu": frozenset({"launch_ahead"})}
DTYPES = ("float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
# Devices that the operations of engine/kernels exist for.
DEVICES = ("cpu", "cuda")
# Prompt positions of a step: two or three decode steps long on a CPU with the small model; on a GPU, where a step reads all
# experts from 64 rows on, about as long as one of 64 rows.
PREFILL_CHUNKS = {"cpu": 64, "cuda": 512}
MOST_THREADS = 1024
MOST_KV_PAGES = 1 << 22  # 67 million positions of 16 a page
MOST_BATCH = 4096
MOST_BODY_MB = 4096
# Libraries read it when they are loaded.
THREADS_VARIABLE = "OMP_NUM_THREADS"
API_KEY_VARIABLE = "WALKGATE_API_KEY"
POOL_NAME = "processor"  # the threads that prepare a server's requests


class SettingError(WalkgateError):
    """A flag or an environment variable that can't be served; the message names it and says what would do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How the engine runs. `max_model_len` and `kv_pages` None leave the choice to the model and the engine.

    `max_model_len` counts prompt and generated tokens of one request, `page_size` positions of a KV page, `max_batch`
    requests at once, `prefill_chunk` prompt positions of a step, `chunk_frames` the frames of one pass of Code2Wav, `threads`
    the engine's threads on a CPU. `batch_invariant` makes a GPU give a request the same tokens in any company.
    `tiles` is a folder of tile tables that go before the packaged ones.
    `load_format` "dummy" draws the weights instead of reading them. `disabled` names switches (of `switches_of` the device)
    that are off. Raises SettingError.
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
    prefill_chunk: int = PREFILL_CHUNKS["cpu"]
    batch_invariant: bool = False
    phase_timing: bool = False
    load_format: str = "auto"
    tiles: str | None = None

    def __post_init__(self) -> None:
        wanted = {
            "--model-len": self.max_model_len,
            "--kv-pages": self.kv_pages,
            "page_size": self.page_size,
            "--max-batch": self.max_batch,
            "--threads": self.threads,
            "chunk_frames": self.chunk_frames,
            "--prefill-chunk": self.prefill_chunk,
        }
        for name, value in wanted.items():
            if value is not None and value < 1:
                raise SettingError(f"{name} must be at least 1, is {value}")
        most = {
            "--threads": (self.threads, MOST_THREADS),
            "--kv-pages": (self.kv_pages or 1, MOST_KV_PAGES),
            "--max-batch": (self.max_batch, MOST_BATCH),
        }
        for name, (value, limit) in most.items():
            if value > limit:
                raise SettingError(f"{name} must be at most {limit}, is {value}")
        if self.device not in DEVICES:
            raise SettingError(f"--device {self.device!r} is not served yet; there is {', '.join(DEVICES)}")
        if self.dtype not in DTYPES:
            raise SettingError(f"--dtype must be one of {', '.join(DTYPES)}, is {self.dtype!r}")
        if self.batch_invariant and self.device == "cpu":
            raise SettingError(
                "--batch-invariant is for a GPU; a CPU gives a request the same bits in any company anyway"
            )
        if self.tiles is not None and self.device == "cpu":
            raise SettingError("--tiles is for a GPU; a CPU's operations have no tiles")
        if self.load_format not in LOAD_FORMATS:
            raise SettingError(f"--load-format must be one of {', '.join(LOAD_FORMATS)}, is {self.load_format!r}")
        check_switches(self.disabled, self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server is served: the engine's settings, and those that the front process keeps to itself.

    `max_queue` counts requests that may wait beyond the engine's `max_batch`. `wedge_seconds` is how long the engine may hold
    work without finishing a step, `drain_seconds` how long open requests may go on after SIGTERM. `max_audio_seconds` None
    leaves the choice to the model, `served_model_name` None takes the folder's name. Without a `profile_dir`, where traces go,
    nothing is profiled; without `api_keys` everybody may ask. Raises SettingError.
    """

    engine: EngineSettings = field(default_factory=EngineSettings)
    max_queue: int = 256
    wedge_seconds: float = 30.0
    drain_seconds: float = 30.0
    max_body_mb: int = 64
    max_audio_seconds: int | None = None
    served_model_name: str | None = None
    profile_dir: Path | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.max_queue < 0:
            raise SettingError(f"--max-queue must be at least 0, is {self.max_queue}")
        if not 1 <= self.max_body_mb <= MOST_BODY_MB:
            raise SettingError(f"--max-body-mb must be 1 to {MOST_BODY_MB}, is {self.max_body_mb}")
        if self.max_audio_seconds is not None and self.max_audio_seconds < 1:
            raise SettingError(f"--max-audio-seconds must be at least 1, is {self.max_audio_seconds}")
        if not (self.wedge_seconds > 0 and math.isfinite(self.wedge_seconds)):
            raise SettingError(f"--wedge-seconds must be above 0 and finite, is {self.wedge_seconds:g}")
        if not (self.drain_seconds >= 0 and math.isfinite(self.drain_seconds)):
            raise SettingError(f"--drain-seconds must be at least 0 and finite, is {self.drain_seconds:g}")
        if self.served_model_name is not None and not self.served_model_name.strip():
            raise SettingError("--served-model-name is empty")
        # Which key is at fault is not said: a message ends in a log.
        if any(not (key.isascii() and key.isprintable() and key.strip() == key != "") for key in self.api_keys):
            raise SettingError(
                f"a key of --api-key or {API_KEY_VARIABLE} is empty, has spaces at its ends or isn't ASCII"
            )

    @property
    def max_open(self) -> int:
        """How many requests may be open at once, running and waiting."""
        return self.engine.max_batch + self.max_queue

    @property
    def max_body_bytes(self) -> int:
        """How many bytes a request's body may have."""
        return self.max_body_mb << 20


def switches_of(device: str) -> tuple[str, ...]:
    """The switches that an engine on `device` has."""
    return SWITCHES if device == "cpu" else SWITCHES + GPU_SWITCHES


def check_switches(names: Iterable[str], device: str) -> None:
    """Raise SettingError unless every name is a switch of an engine on `device`."""
    switches = switches_of(device)
    for name in sorted(names):
        if name in switches:
            continue
        what = f"{name} is a switch of GPUs" if name in GPU_SWITCHES else f"no switch is called {name!r}"
        raise SettingError(f"{what}; there are {', '.join(switches)}")


def switches_off(device: str, disable: str, enable: str) -> frozenset[str]:
    """The switches that are off on `device`, given lists `a,b` of those to turn off and on; SettingError for an unknown one."""
    off, on = _names("--disable", disable, device), _names("--enable", enable, device)
    if both := sorted(off & on):
        raise SettingError(f"--enable and --disable both name {', '.join(both)}")
    return (OFF_BY_DEFAULT.get(device, frozenset()) | off) - on


def _names(flag: str, text: str, device: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    try:
        check_switches(names, device)
    except SettingError as error:
        raise SettingError(f"{flag}: {error}") from None
    return names


def default_dtype(device: str) -> str:
    """The dtype to compute in when none is asked for: a CPU is exact in float32 and slow in anything else."""
    return "float32" if device == "cpu" else "bfloat16"


def api_keys(flags: Iterable[str]) -> tuple[str, ...]:
    """The keys that open the server: those of the flags and those of WALKGATE_API_KEY, which separates its keys by commas."""
    named = os.environ.get(API_KEY_VARIABLE, "")
    keys = [key.strip() for key in named.split(",") if key.strip()]
    if named and not keys:
        raise SettingError(f"{API_KEY_VARIABLE} is set but holds no key; unset it to serve everybody")
    return (*flags, *keys)


def cache_folder() -> Path:
    """The user's cache folder for Walkgate, which need not exist: XDG_CACHE_HOME, or the platform's own place."""
    asked = os.environ.get("XDG_CACHE_HOME", "")
    if Path(asked).is_absolute():
        return Path(asked) / "walkgate"
    library = Path.home() / "Library" / "Caches"
    return (library if sys.platform == "darwin" else Path.home() / ".cache") / "walkgate"


def child_environment(source_root: Path) -> dict[str, str]:
    """The environment of a child process that must import the same tree as this one: this tree comes first, no key is in it."""
    rest = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(source_root)]
    kept = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(source_root), *rest])}


@contextmanager
def children_with_one_thread() -> Iterator[None]:
    """Let the libraries of child processes that are started meanwhile (NumPy's BLAS, PyTorch) compute with one thread."""
    before = os.environ.get(THREADS_VARIABLE)
    os.environ[THREADS_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[THREADS_VARIABLE]
        else:
            os.environ[THREADS_VARIABLE] = before
