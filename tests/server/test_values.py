"""Settings, source labels, metrics text and imports of the front: the values around a server, without one."""

from __future__ import annotations

import hashlib
import math
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import typer

from engine.config import (
    GPU_SWITCHES,
    SWITCHES,
    EngineSettings,
    ServerSettings,
    SettingError,
    api_keys,
    cache_folder,
    child_environment,
    default_dtype,
    switches_off,
)
from engine.metrics import FrontCounters
from engine.server import cli, front
from engine.server.exposition import prometheus_text
from engine.server.source import git_commit, source_digest, versions
from tests.server.serving import environment
from tests.shared import REPOSITORY


def test_switch_names_are_split_and_an_unknown_one_is_told_with_the_list():
    assert switches_off("gpu", " batching , text_walk,", "") == {"batching", "text_walk"}
    assert switches_off("gpu", "", "") == frozenset()
    with pytest.raises(SettingError, match=r"--disable: no switch is called 'bat'; there are text_walk, .*batching"):
        switches_off("gpu", "batching,bat", "")
    with pytest.raises(SettingError, match="--enable: no switch is called 'ahead'"):
        switches_off("gpu", "", "ahead")
    with pytest.raises(SettingError, match="no switch is called 'x'"):
        EngineSettings(disabled=frozenset({"x"}))


def test_a_cpu_runs_nothing_ahead_unless_told_so():
    assert switches_off("cpu", "", "") == {"launch_ahead"}
    assert switches_off("cpu", "batching", "launch_ahead") == {"batching"}
    with pytest.raises(SettingError, match="--enable and --disable both name launch_ahead"):
        switches_off("cpu", "launch_ahead", "launch_ahead")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_model_len": 0}, "--model-len must be at least 1, is 0"),
        ({"kv_pages": -1}, "--kv-pages must be at least 1, is -1"),
        ({"threads": 0}, "--threads must be at least 1, is 0"),
        ({"max_batch": 0}, "--max-batch must be at least 1, is 0"),
        ({"max_batch": 4097}, "--max-batch must be at most 4096, is 4097"),
        ({"dtype": "int8"}, "--dtype must be one of float32, bfloat16, float16, is 'int8'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(wrong: dict, words: str):
    with pytest.raises(SettingError, match=words):
        EngineSettings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_queue": -1}, "--max-queue must be at least 0, is -1"),
        ({"max_body_mb": 0}, "--max-body-mb must be 1 to 4096, is 0"),
        ({"max_body_mb": 5000}, "--max-body-mb must be 1 to 4096, is 5000"),
        ({"max_audio_seconds": 0}, "--max-audio-seconds must be at least 1, is 0"),
        ({"wedge_seconds": 0.0}, "--wedge-seconds must be above 0 and finite, is 0"),
        ({"wedge_seconds": math.nan}, "--wedge-seconds must be above 0 and finite, is nan"),
        ({"wedge_seconds": math.inf}, "--wedge-seconds must be above 0 and finite, is inf"),
        ({"drain_seconds": -0.5}, "--drain-seconds must be at least 0 and finite, is -0.5"),
        ({"drain_seconds": math.inf}, "--drain-seconds must be at least 0 and finite, is inf"),
        ({"served_model_name": " "}, "--served-model-name is empty"),
        ({"api_keys": ("good", "")}, "a key of --api-key or WALKGATE_API_KEY is empty"),
        ({"api_keys": ("two\nlines",)}, "a key of --api-key or WALKGATE_API_KEY is empty"),
        ({"api_keys": (" spaced",)}, "a key of --api-key or WALKGATE_API_KEY is empty"),
    ],
)
def test_a_setting_of_the_front_that_cannot_be_is_refused(wrong: dict, words: str):
    with pytest.raises(SettingError, match=words) as caught:
        ServerSettings(**wrong)
    assert "two" not in str(caught.value)


def test_the_limits_of_a_server_follow_from_its_settings():
    settings = ServerSettings(engine=EngineSettings(max_batch=8), max_queue=3, max_body_mb=2)
    assert (settings.max_open, settings.max_body_bytes) == (11, 2 * 1024 * 1024)


def test_keys_come_from_flags_and_the_environment_and_reach_no_child(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WALKGATE_API_KEY", " a1,b2 , ,")
    assert api_keys(["c3"]) == ("c3", "a1", "b2")
    assert "WALKGATE_API_KEY" not in child_environment(Path("/tree"))
    assert "c3" not in repr(ServerSettings(api_keys=("c3",)))
    monkeypatch.setenv("WALKGATE_API_KEY", " ,")
    with pytest.raises(SettingError, match="WALKGATE_API_KEY is set but holds no key"):
        api_keys([])
    monkeypatch.delenv("WALKGATE_API_KEY")
    assert api_keys([]) == ()


def rows(title: str) -> set[str]:
    """The names in the first column of the table under a heading of docs/configuration.md."""
    text = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)`", section, flags=re.MULTILINE))


def test_the_manual_has_every_flag_and_every_switch_and_no_other():
    serve = typer.main.get_command(cli.app).commands["serve"]
    flags = {name for one in serve.params for name in one.opts if name.startswith("--")}
    assert rows("Flags of `omni serve`") == flags
    assert rows("Switches") == set(SWITCHES)
    assert rows("GPU switches") == set(GPU_SWITCHES)


def test_the_manual_has_every_stage_of_health():
    assert rows("Health") == {front.STARTING, front.OK, front.WEDGED, front.DRAINING, front.STOPPING, front.DEAD}


def test_settings_survive_the_way_to_the_engine_process():
    sent = EngineSettings(max_model_len=100, disabled=frozenset({"batching"}), device="cpu", dtype="bfloat16")
    assert msgspec.json.decode(msgspec.json.encode(sent), type=EngineSettings) == sent


def test_a_cpu_computes_in_float32_and_a_gpu_in_bfloat16():
    assert (default_dtype("cpu"), default_dtype("cuda:0")) == ("float32", "bfloat16")


def test_the_cache_follows_xdg_and_a_relative_path_is_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "walkgate"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder().is_absolute()


def test_a_child_process_finds_this_tree_before_any_other(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", "/other:/tree:")
    assert child_environment(Path("/tree"))["PYTHONPATH"] == "/tree:/other"


def test_the_digest_is_over_names_and_bytes_of_source_files_in_path_order(tmp_path: Path):
    files = {"b.py": b"b", "a/x.json": b"{}", "a.py": b"", "t.jinja": b"j", "p.toml": b"", "note.txt": b"no"}
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "b.py").write_bytes(b"no")
    want = hashlib.sha256(b"a.py\0\0a/x.json\0{}\0b.py\0b\0p.toml\0\0t.jinja\0j\0").hexdigest()
    assert source_digest(tmp_path) == want


def test_git_labels_tell_the_commit_and_whether_the_engine_differs_from_it(tmp_path: Path):
    def git(*words: str) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        return subprocess.run(
            ["git", "-C", str(tmp_path), *who, *words], check=True, capture_output=True, text=True
        ).stdout

    assert git_commit(tmp_path).commit is None
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("")
    git("init", "-q")
    assert git_commit(tmp_path).commit is None
    git("add", ".")
    git("commit", "-qm", "one")
    (tmp_path / "notes").write_text("outside the package")
    clean = git_commit(tmp_path)
    assert (clean.commit, clean.dirty) == (git("rev-parse", "HEAD").strip(), False)
    (tmp_path / "engine" / "new.py").write_text("")
    assert git_commit(tmp_path).dirty is True


def test_versions_name_the_tree_and_the_libraries():
    found = versions()
    assert found["walkgate"] == "0.1.0"
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert all(found[name] != "not installed" for name in ("torch", "transformers", "pyzmq", "fastapi"))


def test_totals_are_counters_and_everything_else_is_a_gauge():
    counters = FrontCounters(http_requests=3, http_open=1).values()
    text = prometheus_text({**counters, "slots_free": 7.0}, {})
    assert "# TYPE walkgate_http_requests_total counter\nwalkgate_http_requests_total 3.0\n" in text
    assert "# TYPE walkgate_slots_free gauge\nwalkgate_slots_free 7.0\n" in text
    assert "walkgate_http_open 1.0\n" in text


@pytest.mark.parametrize("module", ["engine.server.app", "engine.server.life", "engine.server.cli", "engine.client"])
def test_the_front_never_imports_torch_or_transformers(module: str):
    code = f"import sys, {module}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), cwd=REPOSITORY
    )
    assert done.stdout == "[]\n", done.stderr
