"""The command `omni`: serve a model, make or train a small one, say what a model folder holds."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer
from rich.console import Console

from engine.config import (
    API_KEY_VARIABLE,
    DEVICES,
    GPU_SWITCHES,
    POOL_NAME,
    PREFILL_CHUNKS,
    SWITCHES,
    EngineSettings,
    ServerSettings,
    SettingError,
    api_keys,
    cache_folder,
    default_dtype,
    switches_of,
    switches_off,
)
from engine.errors import CheckpointError, WalkgateError
from engine.model.config import OmniConfig
from engine.server.source import TRAINED_MODEL, package_folder, source_digest, source_root, trained_model

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from engine.server.front import Front

EXIT_FAILED, EXIT_USAGE = 1, 64
_BACKLOG = 2048
_THREAD_S = 0.2
SHAPES_NAME = "qwen3-omni-30b-a3b"
# Typer keeps the class of usage errors to itself; it is the base of the one that it exports.
_UsageError = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="omni",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Serve models that read text and audio and answer with text and speech, over OpenAI's HTTP interface and /generate.",
)

Model = Annotated[
    Path | None,
    typer.Argument(
        help=f"A checkpoint folder, or {TRAINED_MODEL}, the small trained model of the package, which no name means too. "
        f"{SHAPES_NAME} names the released shapes, for --load-format dummy."
    ),
]


def _writable_folder(name: str) -> Path:
    """The folder called `name`. Without a name a path would be the working folder, which nobody asked for."""
    if not name:
        raise typer.BadParameter("the name is empty; name an existing folder")
    folder = Path(name).resolve()
    if not folder.is_dir():
        wrong = "is not a folder" if folder.exists() else "does not exist"
        raise typer.BadParameter(f"{name} {wrong}; name an existing folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise typer.BadParameter(f"{name} is not writable; name another folder")
    return folder


def _folder_to_make(name: str) -> Path:
    """The folder called `name`, there or not. Without a name a path would be the working folder, which nobody asked for."""
    if not name:
        raise typer.BadParameter("the name is empty; name a folder")
    folder = Path(name)
    try:
        taken = folder.exists() and not folder.is_dir()
    except OSError as error:
        raise typer.BadParameter(f"{name}: {error.strerror}; name another folder") from None
    if taken:
        raise typer.BadParameter(f"{name} is not a folder; name another")
    return folder


tiny_app = typer.Typer(rich_markup_mode="rich")
app.add_typer(
    tiny_app, name="tiny", short_help="Small checkpoints: random weights for tests; `train` and `score` a trained one."
)


@app.command(
    epilog="Examples:  [b]omni serve[/b]  ·  [b]omni serve /models/Qwen3-Omni --dtype bfloat16 --port 9000[/b]  ·  "
    "[b]omni serve --disable batching,text_walk[/b]  ·  "
    f"[b]{API_KEY_VARIABLE}=KEY omni serve --host 0.0.0.0 --max-queue 1000[/b]"
)
def serve(
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 8000,
    device: Annotated[str, typer.Option(help=f"Where the model runs: {', '.join(DEVICES)}.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; auto suits the device.")] = "auto",
    load_format: Annotated[
        str, typer.Option(help="auto reads the folder's tensors; dummy draws them, so the folder needs none.")
    ] = "auto",
    disable: Annotated[
        str,
        typer.Option(
            help=f"Switches to turn off, comma-separated: {', '.join(SWITCHES)}; "
            f"on a GPU also {', '.join(GPU_SWITCHES)}."
        ),
    ] = "",
    enable: Annotated[
        str, typer.Option(help="Switches to turn on that are off on this device: launch_ahead on a CPU.")
    ] = "",
    model_len: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of one request, prompt and answer. (default: the model's)")
    ] = None,
    kv_pages: Annotated[
        int | None, typer.Option(min=1, help="KV pages per component. (default: enough for 8 long requests)")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the engine.")] = 1,
    max_batch: Annotated[int, typer.Option(min=1, help="Most requests that run at once.")] = 64,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most prompt positions of a step; what decodes waits no longer than one such step. "
            f"(default: {PREFILL_CHUNKS['cpu']} on a CPU, {PREFILL_CHUNKS['cuda']} on a GPU)",
        ),
    ] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="On a GPU: the same tokens for a request in any company, more slowly."),
    ] = False,
    tiles: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            resolve_path=True,
            help="On a GPU: a folder of tile tables, as omni tune writes them; they go before the packaged ones.",
        ),
    ] = None,
    phase_timing: Annotated[
        bool, typer.Option("--phase-timing", help="Measure where a step's time goes, into /metrics.")
    ] = False,
    max_queue: Annotated[
        int, typer.Option(min=0, help="Most requests that wait beyond those; more are refused with 429.")
    ] = 256,
    max_body_mb: Annotated[int, typer.Option(min=1, help="Largest body of a request, in MiB.")] = 64,
    max_audio_seconds: Annotated[
        int | None, typer.Option(min=1, help="Most seconds of audio in one request. (default: what the model holds)")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="What clients call the model. (default: the folder's name)")
    ] = None,
    profile_dir: Annotated[
        Path | None,
        typer.Option(
            parser=_writable_folder,
            metavar="DIRECTORY",
            help="A folder for the traces of POST /profile, which is refused without one.",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A key that every request but /health must show; repeatable. {API_KEY_VARIABLE} names keys out of sight."
        ),
    ] = None,
    wedge_seconds: Annotated[
        float, typer.Option(help="How long the engine may hold work without a step before /health says wedged.")
    ] = 30.0,
    drain_seconds: Annotated[
        float, typer.Option(help="How long open requests may go on after SIGTERM; a second signal ends them at once.")
    ] = 30.0,
) -> None:
    """Serve a model over HTTP until SIGINT or SIGTERM.

    OpenAI's routes: POST /v1/chat/completions, /v1/completions, /v1/audio/speech, /v1/audio/transcriptions, GET /v1/models.
    Its own: POST /generate, /profile, GET /health, /info, /metrics, /openapi.json.
    """
    _end_at_signals()
    engine = EngineSettings(
        max_model_len=model_len,
        kv_pages=kv_pages,
        disabled=switches_off(device, disable, enable),
        device=device,
        dtype=default_dtype(device) if dtype == "auto" else dtype,
        threads=threads,
        max_batch=max_batch,
        prefill_chunk=prefill_chunk or PREFILL_CHUNKS.get(device, PREFILL_CHUNKS["cpu"]),
        batch_invariant=batch_invariant,
        tiles=str(tiles) if tiles is not None else None,
        phase_timing=phase_timing,
        load_format=load_format,
    )
    settings = ServerSettings(
        engine=engine,
        max_queue=max_queue,
        wedge_seconds=wedge_seconds,
        drain_seconds=drain_seconds,
        max_body_mb=max_body_mb,
        max_audio_seconds=max_audio_seconds,
        served_model_name=served_model_name or _built_in_name(model),
        profile_dir=profile_dir,
        api_keys=api_keys(api_key or ()),
    )
    if str(model) == SHAPES_NAME and load_format != "dummy":
        raise SettingError(f"{SHAPES_NAME} has no weights; add --load-format dummy, or name a checkpoint folder")
    listener = _listen(host, port)
    folder = _model_folder(model)
    config = _checked(folder, settings)
    raise typer.Exit(_serve(folder, config, settings, listener))


@tiny_app.callback(
    invoke_without_command=True, epilog="Example:  [b]omni tiny --out /tmp/tiny && omni serve /tmp/tiny[/b]"
)
def tiny(
    context: typer.Context,
    out: Annotated[
        Path | None,
        typer.Option(
            parser=_folder_to_make, metavar="DIRECTORY", help="The folder to make; it must not hold anything yet."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Other seeds give other weights. (default: 0)")] = None,
) -> None:
    """Make a small checkpoint for tests: the released layout in every file, random weights, the same bytes on every machine."""
    if (command := context.invoked_subcommand) is not None:
        for flag, value in {"--out": out, "--seed": seed}.items():
            if value is not None:
                raise SettingError(
                    f"{flag} {value} stands before {command}, which does not read it; write it after {command}"
                )
        return
    if out is None:
        raise SettingError("--out is missing: name the folder to make")
    if out.exists() and any(out.iterdir()):
        raise SettingError(f"--out {out} exists and is not an empty folder; name another")
    _make_tiny(out, seed or 0)
    typer.echo(f"made {out}")


@tiny_app.command(
    epilog="Examples:  [b]omni tiny train --out runs/tiny --plan small[/b]  ·  "
    "[b]omni tiny train --out runs/tiny --minutes 8[/b] (again, to go on)"
)
def train(
    out: Annotated[
        Path,
        typer.Option(
            parser=_folder_to_make,
            metavar="DIRECTORY",
            help="The folder of all stages; one that holds some goes on with the rest.",
        ),
    ],
    plan: Annotated[
        str, typer.Option(help="h200: an hour on one GPU; small: a minute on a laptop, learns next to nothing.")
    ] = "h200",
    only: Annotated[str | None, typer.Option(help="Only these stages, comma-separated. (default: all)")] = None,
    minutes: Annotated[float | None, typer.Option(min=0.0, help="Stop after so long, to go on another time.")] = None,
    librispeech: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A folder with LibriSpeech's reference texts.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of data and training.")] = 0,
) -> None:
    """Train the small speaking model: data, codec, Thinker, Talker, export, scores. Exits with 2 when time ran out."""
    from engine.tiny import stages

    plans = {"h200": stages.Plan.h200, "small": stages.Plan.small}
    if plan not in plans:
        raise SettingError(f"--plan must be one of {', '.join(plans)}, is {plan!r}")
    names = [] if only is None else [name.strip() for name in only.split(",")]
    if not stages.run(out, plans[plan](librispeech, seed), names, minutes, typer.echo):
        typer.echo("time ran out; the same command goes on")
        raise typer.Exit(2)
    typer.echo(f"{', '.join(names) or 'all stages'}: over; what they made lies in {out}")


@tiny_app.command(epilog="Example:  [b]omni tiny score runs/tiny/export/omni-tiny --out runs/scores[/b]")
def score(
    folder: Annotated[Path, typer.Argument(help="The folder of a trained model.")],
    out: Annotated[
        Path,
        typer.Option(
            parser=_folder_to_make, metavar="DIRECTORY", help="The folder for scores, answers and what was said."
        ),
    ],
    librispeech: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="A folder with LibriSpeech's reference texts.")
    ] = None,
    device: Annotated[str, typer.Option(help=f"Where the model runs: {', '.join(DEVICES)}.")] = "cpu",
) -> None:
    """Score a small speaking model: what it hears, answers and says, on texts that training never saw.

    It needs the extra `tiny`, and for what is heard in its speech the extra `judge`.
    """
    from engine.tiny import score as scoring
    from engine.tiny import workdir

    with workdir.told("score", out):
        scoring.score(folder, out, librispeech=librispeech, device=device, tell=typer.echo)


@app.command(epilog="Examples:  [b]omni info[/b]  ·  [b]omni info /models/Qwen3-Omni --device cuda --json[/b]")
def info(
    model: Model = None,
    device: Annotated[str, typer.Option(help=f"Whose switches to show: {', '.join(DEVICES)}.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model folder holds, the server's limits, the device and its switches by default, and which source this is."""
    from engine.model.processor import max_audio_seconds
    from engine.server.describe import model_summary, tasks

    settings = EngineSettings(
        device=device, dtype=default_dtype(device), disabled=switches_off(device, disable="", enable="")
    )
    switches = {name: name not in settings.disabled for name in switches_of(device)}
    folder = _model_folder(model)
    config = OmniConfig.load(folder)
    longest, summary = config.thinker.max_positions, model_summary(folder, config)
    gpu = _gpu() if device == "cuda" else None
    found = {
        "model": summary,
        "tasks": tasks(config),
        "limits": {"max_model_len": longest, "max_audio_seconds": max_audio_seconds(longest)},
        "device": device,
        "gpu": gpu,
        "dtype": settings.dtype,
        "switches": switches,
        "source_root": str(source_root()),
        "source_digest": source_digest(package_folder()),
    }
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    shown = found | {
        "model": {"checkpoint dtype" if key == "dtype" else key: value for key, value in summary.items()},
        "dtype": f"{settings.dtype}, in which {device} computes unless --dtype names another",
        "switches": _on_and_off(switches),
    }
    if device == "cuda":
        shown["gpu"] = gpu or "none: PyTorch sees no CUDA GPU on this machine"
    for name, value in shown.items():
        if value is not None:
            typer.echo(f"{name:14} {_plain(value)}")


@app.command(
    epilog="Examples:  [b]omni tune[/b]  ·  [b]omni tune --quick --out tables[/b]  ·  [b]omni tune --ops gemv --rows 1,2[/b]"
)
def tune(
    out: Annotated[
        Path | None, typer.Option(help="The folder that the tables go to. (default: tiles in the cache folder)")
    ] = None,
    model: Annotated[
        str, typer.Option(help="The sizes to tune for: a checkpoint folder, or the released ones by name.")
    ] = SHAPES_NAME,
    ops: Annotated[str, typer.Option(help="Kernels to tune, comma-separated. (default: all)")] = "",
    rows: Annotated[str, typer.Option(help="Row counts to tune at, comma-separated. (default: 1 to 2048)")] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer rows, and only what is nearest to the defaults.")
    ] = False,
    budget_s: Annotated[float, typer.Option(help="Seconds to spend; what was found by then is written.")] = 300.0,
) -> None:
    """Measure which tiles the kernels run fastest with on this machine's GPU, and write them as tables."""
    from engine.server import tune as tuning

    asked = tuning.settings(out or cache_folder() / "tiles", Path(model).name, ops, rows, quick, budget_s)
    tuning.check_gpu()
    tuning.tune_gpu(asked, tuning.shapes(OmniConfig.load(_model_folder(Path(model))).thinker))


def _gpu() -> str | None:
    """The name of the GPU that PyTorch computes on; None where it sees none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _on_and_off(switches: dict[str, bool]) -> dict[str, list[str]]:
    """The names of switches under "on" and "off"; a word without names is left out."""
    found: dict[str, list[str]] = {}
    for name, on in switches.items():
        found.setdefault("on" if on else "off", []).append(name)
    return found


def _plain(value: object) -> str:
    """A value as lines: one a key, the first beside the name, the others below it."""
    if not isinstance(value, dict):
        return _inner(value)
    return f"\n{'':15}".join(f"{key}: {_inner(one)}" for key, one in value.items())


def _inner(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _end_at_signals() -> None:
    """Let a signal end a server that only comes up yet: quietly, with exit code 0, as it does later."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit())


def _listen(host: str, port: int) -> socket.socket:
    """Listen before anything is loaded: a port in use is known at once, and /health answers while the model loads.

    Only listening claims a port: two sockets that are bound with SO_REUSEADDR can share one until then.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        hint = "; name another with --port" if error.errno == errno.EADDRINUSE else ""
        raise WalkgateError(f"can't listen on {host}:{port}: {error.strerror or error}{hint}") from None
    return listener


def _model_folder(model: Path | None) -> Path:
    """The absolute folder of the model that was named: a checkpoint, the trained one of the package, or released shapes."""
    if model is not None and model.is_dir():
        return model.resolve()
    name = _built_in_name(model)
    if name == TRAINED_MODEL:
        return _trained_folder()
    if name == SHAPES_NAME:
        return _shapes_folder()
    raise CheckpointError(
        f"{model} is not a folder; name a checkpoint folder, {TRAINED_MODEL} or nothing for the small trained model, or "
        f"{SHAPES_NAME} for its shapes without weights"
    )


def _built_in_name(model: Path | None) -> str | None:
    """What a built-in model is called; None for a folder, which has a name of its own."""
    if model is None:
        return TRAINED_MODEL
    return str(model) if str(model) in (TRAINED_MODEL, SHAPES_NAME) else None


def _trained_folder() -> Path:
    folder = trained_model()
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"this source has no {folder}; name a checkpoint folder: omni tiny --out DIR makes one with random weights, "
            f"omni tiny train a trained one"
        )
    return folder


def _shapes_folder() -> Path:
    """The folder of the released shapes in the cache, made on first use."""
    folder = cache_folder() / f"{SHAPES_NAME}-{_recipe('tiny.py', 'released.py')}"
    if not folder.is_dir():
        _make_shapes(folder)
    return folder


def _recipe(*sources: str) -> str:
    """A key of the sources that make the released shapes, so that a changed recipe never meets an old folder."""
    content = b"".join((package_folder() / "model" / source).read_bytes() for source in sources)
    return hashlib.sha256(content).hexdigest()[:12]


def _make_tiny(folder: Path, seed: int) -> None:
    from engine.model.tiny import write_tiny

    _make(folder, lambda draft: write_tiny(draft, seed=seed))


def _make_shapes(folder: Path) -> None:
    from engine.model.released import write_released

    _make(folder, write_released)


def _make(folder: Path, write: Callable[[Path], None]) -> None:
    """Make the folder whole or not at all: it is written beside its place and renamed."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise WalkgateError(f"can't write {folder}: {error.strerror or error}") from None
    try:
        write(draft)
        draft.chmod(0o755)
        os.rename(draft, folder)
    except OSError as error:
        # Another process may have put the same bytes there first.
        if not (folder / "config.json").is_file():
            raise WalkgateError(f"can't write {folder}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _checked(folder: Path, settings: ServerSettings) -> OmniConfig:
    """Read the config before a process is started for it, and hold the limits asked for against it."""
    from engine.model.processor import max_audio_seconds

    config = OmniConfig.load(folder)
    most, asked = config.thinker.max_positions, settings.engine.max_model_len
    if asked is not None and asked > most:
        raise SettingError(f"--model-len {asked} is more than the model's {most} positions")
    longest, wanted = max_audio_seconds(asked or most), settings.max_audio_seconds
    if wanted is not None and wanted > longest:
        raise SettingError(
            f"--max-audio-seconds {wanted} is more than the {longest} s that {asked or most} tokens hold"
        )
    return config


def _serve(folder: Path, config: OmniConfig, settings: ServerSettings, listener: socket.socket) -> int:
    from engine.server import life

    host, port = listener.getsockname()[:2]
    console = Console(stderr=True)
    progress = console.status(f"loading {folder} on {settings.engine.device} …")

    def ready(server: Front) -> None:
        progress.stop()
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        try:
            print(f"omni: serving {folder} at {address} (ready in {server.boot_seconds:.1f} s)", flush=True)
        except _OutputError as error:  # no reason not to serve
            _complain(f"{error}; serving at {address} all the same", 0)

    if console.is_terminal:
        progress.start()
    try:
        return asyncio.run(life.serve(folder, config, settings, listener, ready))
    finally:
        progress.stop()


def main() -> None:
    """Run `omni`. Exit codes: 0 done, 1 can't be done, 64 wrong usage, 70 the engine process died."""
    _open_streams()
    _guard_streams()
    try:
        code = app(prog_name="omni", standalone_mode=False)
        sys.stdout.flush()
    except typer.Exit as error:
        code = error.exit_code
    except typer.Abort:
        code = EXIT_FAILED
    except SettingError as error:
        code = _complain(str(error), EXIT_USAGE)
    except WalkgateError as error:
        code = _complain(str(error), EXIT_FAILED)
    except Exception as error:
        if not isinstance(error, _UsageError):
            raise
        code = _complain(f"{error.format_message()} (omni --help says more)", EXIT_USAGE)  # type: ignore[attr-defined]
    _leave(code or 0)


def _leave(code: int) -> NoReturn:
    """End the process. Python would wait for its threads, and those of a server may be at a chat template that never ends."""
    if any(thread.name.startswith(POOL_NAME) and _lasts(thread) for thread in threading.enumerate()):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)


def _lasts(thread: threading.Thread) -> bool:
    """Whether a thread that was told to end is at work still."""
    thread.join(_THREAD_S)
    return thread.is_alive()


def _open_streams() -> None:
    """Give standard streams that the caller closed somewhere to go, before a socket takes their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "r" if number == 0 else "w", encoding="utf-8"))  # noqa: SIM115 - for good


class _OutputError(WalkgateError):
    """Standard output can't be written."""


class _Stream(io.FileIO):
    """A standard stream of this process. Once a write has failed nothing more is tried, as Python itself would at the end."""

    lost = False

    def write(self, data: ReadableBuffer, /) -> int:
        """Write, or lose `data`: in silence where nobody reads any more, or where there is nowhere left to tell it."""
        if not self.lost:
            try:
                return super().write(data)
            except OSError as error:
                self.lost = True
                if self.fileno() == 1 and not isinstance(error, BrokenPipeError):
                    raise _OutputError(f"standard output can't be written: {error.strerror}") from None
        return memoryview(data).nbytes


def _guard_streams() -> None:
    """Put such streams in the place of this process's own; others, as tests put there, stay."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream is getattr(sys, f"__{name}__"):
            raw = io.BufferedWriter(_Stream(stream.fileno(), "wb", closefd=False))
            guarded = io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=stream.line_buffering)
            setattr(sys, name, guarded)


def _complain(message: str, code: int) -> int:
    print(f"omni: {' '.join(message.split())}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    main()
