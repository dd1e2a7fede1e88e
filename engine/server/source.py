"""Which source this process runs: the imported package's folder, its digest, and what git and the installer say of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path

import engine

SOURCE_SUFFIXES = frozenset({".py", ".json", ".jinja", ".toml"})
TRAINED_MODEL = "omni-tiny"
_GIT_SECONDS = 5.0
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "pyzmq", "msgspec", "fastapi", "uvicorn")


@dataclass(frozen=True, slots=True)
class Commit:
    """What git says about a tree: the commit that is checked out, and whether `engine/` differs from it. Labels only."""

    commit: str | None
    dirty: bool | None


def package_folder() -> Path:
    """The folder of the `engine` package that this process imported."""
    assert engine.__file__ is not None
    return Path(engine.__file__).resolve().parent


def source_root() -> Path:
    """The folder that contains the imported `engine/`."""
    return package_folder().parent


def trained_model() -> Path:
    """The folder of the small trained model that comes with the package; whether it is there is not asked."""
    return package_folder() / "assets" / TRAINED_MODEL


def source_digest(package: Path) -> str:
    """SHA-256 hex over a package's source files: each one's path inside it and its bytes, NUL after both, in path order."""
    found = {
        path.relative_to(package).as_posix(): path
        for path in package.rglob("*")
        if path.suffix in SOURCE_SUFFIXES and "__pycache__" not in path.parts and path.is_file()
    }
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + b"\0" + found[name].read_bytes() + b"\0")
    return digest.hexdigest()


def _git(root: Path, *words: str) -> str | None:
    # Without the optional lock a server that starts never disturbs a git command running in the same tree.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=_GIT_SECONDS, env=environment
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def git_commit(root: Path) -> Commit:
    """Return the commit of the tree at `root`; both None where git is absent or does not track `engine/` there."""
    if not _git(root, "ls-files", "--", "engine/__init__.py"):
        return Commit(None, None)
    head, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--", "engine")
    return Commit(head.strip() if head else None, None if changes is None else bool(changes.strip()))


def _own_version(root: Path) -> str:
    """The tree's own version: an installed distribution of that name may be another tree."""
    project = root / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"])
    return _installed("walkgate")


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Versions of Python, of Walkgate and of the libraries that decide results, without importing them."""
    own = {"python": platform.python_version(), "walkgate": _own_version(source_root())}
    return own | {name: _installed(name) for name in _PACKAGES}
