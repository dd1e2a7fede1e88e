"""Who may import whom, what is packaged, what lies at the top, and that public tensor functions state their shapes.

A file that does not exist yet breaks no rule; the rule holds from the commit that adds it.
"""

from __future__ import annotations

import ast
import fnmatch
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# A module imports its own layer and lower ones. A package stands for all its modules.
LAYERS = (
    (
        "engine.errors",
        "engine.request",
        "engine.step",
        "engine.track",
        "engine.metrics",
        "engine.config",
        "engine.phases",
        "engine.parent",
        "engine.source",
    ),
    (
        *("engine.walk", "engine.scheduler", "engine.routing", "engine.detokenize", "engine.stop_strings"),
        "engine.kernels",
    ),
    ("engine.kv", "engine.loopback", "engine.stream"),
    ("engine.model",),
    ("engine.sampler", "engine.stop", "engine.capture", "engine.graphs"),
    ("engine.lane", "engine.runner", "engine.profiling"),
    ("engine.loop",),
    ("engine.engine", "engine.client", "engine.precompile", "engine.tiny"),
    ("engine.server",),
)

NO_TORCH = (
    *("engine.scheduler", "engine.stop", "engine.stop_strings", "engine.routing", "engine.walk"),
    *("engine.step", "engine.track", "engine.phases"),
)

PURE_GATE = (
    *("cell", "order", "record", "metrics", "wer", "spoken", "greedy", "stats", "verdict"),
    *("report", "appendix", "markdown", "summary", "frames", "kernels"),
)
# `random` is not among them: a generator made from a seed is pure, and the test below lets nothing else of it pass.
# fmt: off
IMPURE_IMPORTS = frozenset({
    "aiohttp", "asyncio", "concurrent", "datasets", "glob", "http", "io", "logging", "multiprocessing", "os", "pathlib",
    "psutil", "requests", "secrets", "select", "shutil", "signal", "socket", "soundfile", "sqlite3", "ssl", "subprocess",
    "sys", "tempfile", "threading", "time", "torch", "urllib", "uuid", "zmq",
})
# fmt: on
IMPURE_CALLS = frozenset({"open", "print", "input", "exec", "eval", "__import__"})

# fmt: off
TOP_LEVEL = frozenset({
    ".ci", ".github", ".gitignore", ".pre-commit-config.yaml", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md",
    "docs", "engine", "gate",
    "pyproject.toml", "reports", "tests", "traces", "workloads",
})
# fmt: on

# Spelled in pieces, so that this file does not hold what it looks for.
FORBIDDEN = ("../" + "shared", "/" + "work/", "/tmp/" + "ve", "cl" + "aude", "chat" + "gpt", "llm" + "-generated")
MAY_HOLD = {"../" + "shared": {"tests/shared.py"}}


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_name(path): path
    for package in ("engine", "gate")
    for path in sorted((REPOSITORY / package).rglob("*.py"))
    if "__pycache__" not in path.parts
}
ENGINE = [name for name in MODULES if name == "engine" or name.startswith("engine.")]
GATE = [name for name in MODULES if name == "gate" or name.startswith("gate.")]


def imports(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported anywhere in `tree`; `from a import b` gives a, and a.b where that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports hide who imports whom"
            yield node.module
            yield from (name for alias in node.names if (name := f"{node.module}.{alias.name}") in MODULES)


def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def layer(name: str) -> int | None:
    return next(
        (rank for rank, row in enumerate(LAYERS) for top in row if name == top or name.startswith(f"{top}.")), None
    )


def upward(name: str, imported: list[str]) -> list[str]:
    own = layer(name)
    return [f"{name} imports {other}" for other in imported if own is not None and (layer(other) or 0) > own]


def torch_path(name: str, seen: set[str]) -> str | None:
    """How `name` comes to import torch ("a -> b -> torch"), or None; `seen` is what was looked at already."""
    seen.add(name)
    for other in imports(parsed(name)):
        if other.split(".")[0] == "torch":
            return f"{name} -> torch"
        parts = other.split(".")
        # Importing a.b.c runs the __init__ of a and of a.b too.
        for inner in (".".join(parts[:n]) for n in range(1, len(parts) + 1)):
            if inner in MODULES and inner not in seen and (found := torch_path(inner, seen)):
                return f"{name} -> {found}"
    return None


def git_files() -> list[Path]:
    """Every file of the working tree that git knows or would add."""
    command = ["git", "-C", str(REPOSITORY), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout, so nothing tells the repository's files from others")
    # A file that was deleted but is still in the index is listed too.
    return [REPOSITORY / name for name in sorted(set(listed.split("\0")) - {""}) if (REPOSITORY / name).is_file()]


def test_nothing_in_the_gate_imports_the_engine():
    assert [(name, other) for name in GATE for other in imports(parsed(name)) if other.split(".")[0] == "engine"] == []


def test_nothing_in_the_engine_imports_the_gate():
    assert [(name, other) for name in ENGINE for other in imports(parsed(name)) if other.split(".")[0] == "gate"] == []


def test_the_product_never_imports_the_tests():
    assert [
        (name, other) for name in MODULES for other in imports(parsed(name)) if other.split(".")[0] == "tests"
    ] == []


def test_every_engine_module_has_a_layer():
    assert [name for name in ENGINE if name != "engine" and layer(name) is None] == []


def test_no_engine_module_imports_a_higher_layer():
    assert [fault for name in ENGINE for fault in upward(name, list(imports(parsed(name))))] == []


def test_an_import_of_a_higher_layer_would_be_found():
    assert upward("engine.scheduler", ["engine.step", "engine.kernels", "engine.kv.pages"]) == [
        "engine.scheduler imports engine.kv.pages"
    ]


def test_the_engine_package_itself_imports_nothing():
    assert list(imports(parsed("engine"))) == []


@pytest.mark.parametrize("name", [name for name in NO_TORCH if name in MODULES])
def test_policy_reaches_no_torch_not_even_through_others(name: str):
    assert torch_path(name, set()) is None


def test_a_way_to_torch_through_a_package_file_would_be_found():
    assert torch_path("engine.kv.plan", set()) is not None


def reads_environment(tree: ast.AST) -> bool:
    """Whether a variable of the environment is looked up; handing the whole environment to a child process is no look-up."""
    found = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    looked_in = {ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
    return bool(found & {"os.environ.get", "os.getenv"}) or "os.environ" in looked_in


def test_only_config_and_the_server_read_the_environment():
    readers = [name for name in ENGINE if reads_environment(parsed(name))]
    assert [name for name in readers if name != "engine.config" and not name.startswith("engine.server")] == []


def test_a_look_up_in_the_environment_would_be_found():
    assert reads_environment(ast.parse("import os\nx = os.environ['A']"))
    assert reads_environment(ast.parse("import os\nx = os.environ.get('A')"))
    assert not reads_environment(ast.parse("import os\nx = {**os.environ, 'A': '1'}"))


@pytest.mark.parametrize("name", [name for name in PURE_GATE if f"gate.{name}" in MODULES])
def test_a_pure_gate_file_does_no_input_or_output(name: str):
    tree = parsed(f"gate.{name}")
    assert sorted({other for other in imports(tree) if other.split(".")[0] in IMPURE_IMPORTS}) == []
    assert (
        sorted({other for other in imports(tree) if other.startswith("gate.")} - {f"gate.{n}" for n in PURE_GATE}) == []
    )
    drawn = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert sorted(text for text in drawn if text.startswith("random.") and not text.startswith("random.Random")) == []
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert sorted(called & IMPURE_CALLS) == []


def test_only_engine_and_gate_are_packaged():
    table = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert table["packages"]["find"] == {"include": ["engine*", "gate*"]}
    assert [str(path) for path in MODULES.values() if not (path.parent / "__init__.py").is_file()] == []


def test_every_data_file_inside_a_package_is_packaged_with_it():
    table = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    data = [path.relative_to(REPOSITORY) for path in git_files() if path.suffix != ".py"]
    inside = [path for path in data if path.parts[0] in ("engine", "gate")]
    left_out = [
        path.as_posix()
        for path in inside
        if not any(
            fnmatch.fnmatch(path.relative_to(path.parts[0]).as_posix(), glob)
            for glob in table["package-data"][path.parts[0]]
        )
    ]
    assert left_out == []


def test_the_top_of_the_repository_holds_only_what_belongs_there():
    assert sorted({path.relative_to(REPOSITORY).parts[0] for path in git_files()} - TOP_LEVEL) == []


def test_no_text_of_the_repository_names_a_place_or_a_tool_of_its_making():
    found = []
    for path in git_files():
        try:
            text = path.read_text(encoding="utf-8").lower()
        except UnicodeDecodeError:
            continue
        name = path.relative_to(REPOSITORY).as_posix()
        found += [(name, word) for word in FORBIDDEN if word in text and name not in MAY_HOLD.get(word, set())]
    assert found == []


def test_the_map_in_the_docs_names_every_module_at_the_top_of_a_package():
    named = set(
        re.findall(r"`([a-z0-9_]+)(?:\.py)?`", (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8"))
    )
    tops = {
        name.split(".")[1]
        for name in MODULES
        if name.count(".") == 1 and not (REPOSITORY / name.replace(".", "/")).is_dir()
    }
    assert sorted(tops - named - {"__main__"}) == []


def public_functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Public functions and methods of public classes, by qualified name; functions inside functions are nobody's business."""

    def inside(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield from inside(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield f"{prefix}{node.name}", node

    return inside(tree.body, "")


def handles_tensors(function: ast.FunctionDef) -> bool:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    annotations = [argument.annotation for argument in every if argument is not None] + [function.returns]
    return any(
        re.search(r"\b(Tensor|NDArray|ndarray)\b", ast.unparse(node)) for node in annotations if node is not None
    )


SHAPE = re.compile(r"\[[^\[\]\n]+\]|\bscalars?\b|\bno tensors?\b|\bany shape\b", re.IGNORECASE)
TENSOR_FUNCTIONS = [
    (f"{name}.{function_name}", function)
    for name in ENGINE
    if name.startswith(("engine.model", "engine.kernels"))
    for function_name, function in public_functions(parsed(name))
    if handles_tensors(function)
]


def test_every_public_tensor_function_of_model_and_kernels_states_its_shapes():
    assert len(TENSOR_FUNCTIONS) >= 30
    assert [name for name, function in TENSOR_FUNCTIONS if not SHAPE.search(ast.get_docstring(function) or "")] == []


def test_a_docstring_without_a_shape_would_be_found():
    tree = ast.parse('def f(x: Tensor) -> Tensor:\n    """Add one to `x`."""\n\ndef _g(x: Tensor): ...\n')
    [(name, function)] = public_functions(tree)
    assert (name, handles_tensors(function), SHAPE.search(ast.get_docstring(function) or "")) == ("f", True, None)


@pytest.fixture
def decoy(tmp_path: Path) -> Path:
    """A folder with an `engine` that is not ours, complete enough to be started with `-m engine.server.cli`."""
    folder = tmp_path / "decoy"
    server = folder / "engine" / "server"
    server.mkdir(parents=True)
    (folder / "engine" / "__init__.py").write_text("")
    (server / "__init__.py").write_text("")
    (server / "cli.py").write_text("def main():\n    print('decoy')\n\nif __name__ == '__main__':\n    main()\n")
    return folder


@pytest.fixture
def omni(tmp_path: Path) -> Path:
    """The script that an installation puts on PATH for `omni`: it lies in a folder of its own, which heads sys.path."""
    script = tmp_path / "bin" / "omni"
    script.parent.mkdir()
    script.write_text("import sys\n\nfrom engine.server.cli import main\n\nsys.exit(main())\n")
    return script


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return {**kept, "PYTHONPATH": str(REPOSITORY)}


def output(command: list[str], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


HAS_SERVER = pytest.mark.skipif("engine.server.cli" not in MODULES, reason="there is no engine/server/cli.py yet")


def test_dash_m_beside_a_decoy_engine_runs_the_decoy_whatever_pythonpath_says(decoy: Path):
    # This is the trap, not a wish: `-m` puts the working directory first. So an arm's server gets cwd *and* PYTHONPATH
    # of its own tree, and its /info is checked against that tree's digest.
    assert output([sys.executable, "-m", "engine.server.cli", "--help"], decoy) == "decoy"


def test_safe_path_beside_a_decoy_engine_imports_the_tree_in_pythonpath(decoy: Path):
    found = output([sys.executable, "-P", "-c", "import engine; print(engine.__file__)"], decoy)
    assert found == str(REPOSITORY / "engine" / "__init__.py")


@HAS_SERVER
def test_the_omni_script_beside_a_decoy_engine_names_the_tree_in_pythonpath(
    decoy: Path, omni: Path, tiny_checkpoint: Path
):
    found = json.loads(output([sys.executable, str(omni), "info", str(tiny_checkpoint), "--json"], decoy))
    assert found["source_root"] == str(REPOSITORY)


@HAS_SERVER
def test_omni_serve_beside_a_decoy_engine_serves_the_tree_in_pythonpath(decoy: Path, omni: Path, tiny_checkpoint: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(omni), "serve", str(tiny_checkpoint), "--port", str(port)]
    log = decoy.parent / "server.log"
    with log.open("wb") as file:
        server = subprocess.Popen(
            command, cwd=decoy, env=environment(), stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_until_healthy(server, port, log)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/info", timeout=10) as reply:
            assert json.load(reply)["source_root"] == str(REPOSITORY)
    finally:
        # The front has an engine process under it; the session takes both.
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_until_healthy(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    pytest.fail(f"the server is not healthy:\n{log.read_text(errors='replace')[-2000:]}")
