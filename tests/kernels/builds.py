"""Builds every kernel for an H200 on a machine without a GPU, and measures what a program of each takes.

Steps of the Thinker run on tensors that have no memory, so that each launch gets the arguments, tiles and constants that it has
in serving; what Triton would compile for them is compiled. `python -m tests.kernels.builds`, without TRITON_INTERPRET, prints
JSON: a line on what there is, then a line a build.
"""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import engine.kernels
from engine.capture import decode_buckets, prompt_buckets
from engine.kernels import KernelOptions
from engine.kernels.cuda import CudaOps
from engine.kernels.pointwise import silu_mul
from engine.kernels.rows import Shape, views
from engine.kernels.tiles import Registry
from engine.model.config import OmniConfig, StackConfig
from engine.model.released import write_released
from engine.model.thinker import Thinker
from engine.model.weights import WHOLE, Weights

GPU = "NVIDIA H200"
META = torch.device("meta")
PAGE_SIZE = 16
PAGES = 64
MOST_LOGITS = 64


@dataclass(frozen=True)
class Build:
    """What became of a kernel: registers and bytes of stack of a thread, bytes of shared memory of a program, or an error."""

    kernel: str
    dtype: str
    step: str
    seconds: float
    warps: int = 0
    registers: int = 0
    stack: int = 0
    shared: int = 0
    error: str | None = None


@dataclass(frozen=True)
class Step:
    """A step of `rows` token rows: captured with padding and media, or eager with neither."""

    rows: int
    decode: bool
    captured: bool

    def __str__(self) -> str:
        kind = "decode rows" if self.decode else "rows of prompts"
        return f"{self.rows} {kind}, {'captured' if self.captured else 'eager'}"


@dataclass(frozen=True)
class Launch:
    """A launch that needs a kernel which none before it needed."""

    kernel: JITFunction
    step: Step
    compile: Callable[[], CompiledKernel]


class AbsentDriver:
    """The driver of a Hopper GPU that is not there."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def name_of(kernel: JITFunction) -> str:
    return f"{kernel.module.removeprefix('engine.kernels.')}.{kernel.fn.__name__}"


def kernels() -> dict[str, JITFunction]:
    """All kernels of the package, and the functions that they call, by name."""
    modules = [
        importlib.import_module(f"engine.kernels.{m.name}") for m in pkgutil.iter_modules(engine.kernels.__path__)
    ]
    values = [value for module in modules for value in vars(module).values()]
    return {name_of(value): value for value in values if isinstance(value, JITFunction)}


def launched_kernels() -> list[str]:
    """The names of all kernels but those that other kernels call."""
    found = kernels()
    called = {name_of(value) for kernel in found.values() for value in _called(kernel)}
    return sorted(found.keys() - called)


def defaults() -> list[str]:
    """The parameters of kernels that have a default, as kernel.parameter."""
    return [
        f"{name}.{parameter.name}"
        for name, kernel in kernels().items()
        for parameter in kernel.signature.parameters.values()
        if parameter.default is not parameter.empty
    ]


def _called(kernel: JITFunction) -> Iterator[JITFunction]:
    for node in ast.walk(kernel.parse()):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            value = kernel.fn.__globals__.get(node.func.id)
            if isinstance(value, JITFunction):
                yield value


def released_thinker() -> OmniConfig:
    """The released shapes, one layer of them."""
    with tempfile.TemporaryDirectory() as folder:
        write_released(Path(folder))
        config = OmniConfig.load(Path(folder))
    return replace(config, thinker=replace(config.thinker, layers=1), talker=None, code2wav=None)


def small_thinker(config: OmniConfig) -> OmniConfig:
    """A Thinker whose widths are no powers of two, so that every kernel masks."""
    thinker = replace(config.thinker, vocab=300, hidden=96, heads=6, kv_heads=2, experts=12, top_k=3, moe_inter=48)
    return replace(config, thinker=thinker)


def weights(config: StackConfig, dtype: torch.dtype) -> Weights:
    """The tensors of a Thinker of one layer."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    outer = {"embed": (config.vocab, config.hidden), "head": (config.vocab, config.hidden), "norm": (config.hidden,)}
    layer = {
        "input_norm": (config.hidden,),
        "qkv": (queries + 2 * keys, config.hidden),
        "q_norm": (config.head_dim,),
        "k_norm": (config.head_dim,),
        "o": (config.hidden, queries),
        "post_norm": (config.hidden,),
        "router": (config.experts, config.hidden),
        "gate_up": (config.experts, 2 * config.moe_inter, config.hidden),
        "down": (config.experts, config.hidden, config.moe_inter),
    }
    shapes = {f"thinker.{name}": shape for name, shape in outer.items()}
    shapes |= {f"thinker.layers.0.{name}": shape for name, shape in layer.items()}
    return Weights({name: _empty(*shape, dtype=dtype) for name, shape in shapes.items()}, WHOLE)


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def steps(decode: tuple[int, ...], prompts: tuple[int, ...], eager: tuple[int, ...]) -> list[Step]:
    captured = [Step(rows, True, True) for rows in decode] + [Step(rows, False, True) for rows in prompts]
    return captured + [Step(rows, False, False) for rows in eager]


class Recorder:
    """Runs steps and keeps the first launch of each kernel that Triton would compile, instead of compiling it."""

    def __init__(self, config: OmniConfig, dtype: torch.dtype) -> None:
        self._ops = CudaOps(META, KernelOptions(dtype=dtype))
        # What it finds out by itself where there is a GPU.
        self._ops.pdl, self._ops.registry = True, Registry(GPU)
        self._dtype = dtype
        self._thinker = Thinker(config, weights(config.thinker, dtype), self._ops)
        self._inter = config.thinker.moe_inter
        self.launches: dict[object, Launch] = {}

    @torch.inference_mode()
    def run(self, step: Step) -> None:
        original = JITFunction.run

        def take(kernel: JITFunction, *arguments: object, grid: object, warmup: bool, **options: object) -> None:
            compile_it = partial(original, kernel, *arguments, grid=grid, warmup=True, **options)
            launch = Launch(kernel, step, compile_it)
            with knobs.runtime.scope():
                knobs.runtime.jit_cache_hook = partial(self._keep, launch)
                compile_it()

        with patch.object(JITFunction, "run", take):
            self._forward(step)

    def _keep(self, launch: Launch, *, key: object, **about: object) -> bool:
        self.launches.setdefault((name_of(launch.kernel), key), launch)
        return True

    def _forward(self, step: Step) -> None:
        thinker, dtype = self._thinker, self._dtype
        shape = Shape(step.rows, 0 if step.decode else step.rows, step.decode)
        words = _empty(shape.words, dtype=torch.int32)
        table = _empty(step.rows, PAGES, dtype=torch.int32)
        cache = _empty(1, PAGES, PAGE_SIZE, thinker.kv_heads, thinker.head_dim, dtype=dtype)
        ids, plan = views(words, shape, table, PAGE_SIZE, padded=step.captured)
        media = _empty(step.rows, thinker.hidden, dtype=dtype) if step.captured else None
        x = thinker.embed_rows(ids, _empty(MOST_LOGITS, dtype=torch.int64), media)
        hidden, _ = thinker.forward(x, plan, cache, cache, states=False)
        self._ops.argmax(thinker.logits(hidden[:MOST_LOGITS]))
        # The one kernel that no step of the Thinker runs.
        silu_mul(_empty(step.rows, 2 * self._inter, dtype=dtype), pdl=True)


def build(launch: Launch, dtype: torch.dtype) -> Build:
    """Compile the kernel of a launch."""
    begun = time.monotonic()
    found = Build(name_of(launch.kernel), str(dtype).removeprefix("torch."), str(launch.step), 0.0)
    try:
        compiled = launch.compile()
    except Exception as error:  # a kernel that can't be compiled is a result, whatever the compiler raises
        return replace(found, error=f"{type(error).__name__}: {error}"[-2000:])
    used = resources(compiled.asm["cubin"])
    return replace(
        found,
        seconds=round(time.monotonic() - begun, 2),
        warps=compiled.metadata.num_warps,
        registers=used["REG"],
        stack=used["STACK"],
        shared=compiled.metadata.shared,
    )


def resources(binary: bytes) -> dict[str, int]:
    """What a thread of a compiled kernel takes: REG registers, STACK bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", said)}


def main() -> None:
    driver.set_active(AbsentDriver())
    released = released_thinker()
    most = 64 + 2048
    cases = (
        (released, torch.bfloat16, steps(decode_buckets(64), prompt_buckets(most), (16, most))),
        (small_thinker(released), torch.float32, steps((1, 2), (32,), (192,))),
    )
    print(json.dumps({"launched": launched_kernels(), "defaults": defaults()}), flush=True)
    for config, dtype, wanted in cases:
        recorder = Recorder(config, dtype)
        for step in wanted:
            recorder.run(step)
        for launch in recorder.launches.values():
            print(json.dumps(asdict(build(launch, dtype))), flush=True)


if __name__ == "__main__":
    main()
