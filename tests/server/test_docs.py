"""The examples of the README and of docs/api.md, run as they stand against a real server, and what the two leave out."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.server import fields, front, openai
from engine.server.protocol import GenerateFields, SpeechFields
from tests.server.serving import Server, environment, serving
from tests.shared import REPOSITORY

API = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
CLIP_TOKENS = 33  # of workloads/clips/c01.flac


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


CURLS = [*blocks(API, "bash"), *(block for block in blocks(README, "sh") if block.startswith("curl"))]
SNIPPETS = blocks(API, "python")


@pytest.fixture(scope="module")
def server(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose model has the name that the examples use."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(tiny_checkpoint, log, "--served-model-name", "omni-tiny") as running:
        yield running


def run(server: Server, folder: Path, words: list[str], script: str) -> str:
    """What an example prints; it runs in a folder that looks like the repository, at the server's own port."""
    (folder / "workloads").symlink_to(REPOSITORY / "workloads")
    at_port = re.sub(r"(127\.0\.0\.1|localhost):8000", f"127.0.0.1:{server.port}", script)
    assert at_port != script
    done = subprocess.run([*words, at_port], cwd=folder, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_examples_of_both_kinds():
    assert (len(CURLS), len(SNIPPETS)) == (10, 4)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples use curl")
@pytest.mark.parametrize("place", range(len(CURLS)))
def test_a_curl_example_works(server: Server, tmp_path: Path, place: int):
    script = CURLS[place]
    # `-f`, which an example may lack, makes an HTTP error a failure of curl.
    printed = run(server, tmp_path, ["bash", "-euo", "pipefail", "-c"], script.replace("curl -s", "curl -fs"))
    if "/generate" in script:
        last = json.loads(printed.splitlines()[-1])
        assert last["finish_reason"] in ("stop", "length")
        assert last["usage"]["audio_tokens_in"] == (CLIP_TOKENS if "c01.flac" in script else 0)
    elif "/v1/chat" in script:
        *_, usage, done = [line.removeprefix("data: ") for line in printed.splitlines() if line]
        assert done == "[DONE]" and json.loads(usage)["usage"]["completion_tokens"] > 0
    elif "/v1/completions" in script:
        assert len(json.loads(printed)["choices"][0]["logprobs"]["tokens"]) > 0
    elif "/v1/audio/speech" in script:
        assert (tmp_path / "speech.wav").read_bytes()[:4] == b"RIFF"
    elif "/v1/audio/transcriptions" in script:
        assert json.loads(printed)["usage"]["input_token_details"]["audio_tokens"] == CLIP_TOKENS
    else:
        assert "walkgate_http_requests_total" in printed


@pytest.mark.parametrize("place", range(len(SNIPPETS)))
def test_a_python_example_works(server: Server, tmp_path: Path, place: int):
    script = SNIPPETS[place]
    printed = run(server, tmp_path, [sys.executable, "-c"], script)
    assert printed.strip()
    if "answer.wav" in script:
        assert (tmp_path / "answer.wav").read_bytes()[:4] == b"RIFF"
    if "samples" in script:
        assert int(printed.split()[-2]) > 1365


def test_every_field_of_generate_is_in_the_manual():
    table = API[API.index("### Fields") : API.index("### Answers")]
    for name in [*GenerateFields.model_fields, *SpeechFields.model_fields]:
        assert f"`{name}`" in table, name


# Codes of RequestErrors that never reach a client.
UNSEEN = {"duplicate_id": "the server chooses the ids of requests, each another"}


def words_in(node: ast.AST) -> set[str]:
    """Every text in an expression that may be a code, whichever way a condition in it goes."""
    found = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return {word for word in found if re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", word)}


def codes_of(source: str) -> set[str]:
    """What stands as `code` in a call, in an assignment or as a default, and what clips.py says its faults are."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            found |= {word for one in node.keywords if one.arg == "code" for word in words_in(one.value)}
            if isinstance(node.func, ast.Name) and node.func.id == "_fault":
                found |= {word for one in node.args[2:3] for word in words_in(one)}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code" and "(" not in ast.unparse(node):
            found |= words_in(node.value)
        elif isinstance(node, ast.arguments):
            defaults = zip(node.kwonlyargs, node.kw_defaults, strict=True)
            found |= {word for one, value in defaults if one.arg == "code" and value for word in words_in(value)}
    return found


def test_every_code_of_an_error_is_in_the_manual_and_no_other():
    sources = [path.read_text(encoding="utf-8") for path in (REPOSITORY / "engine").rglob("*.py")]
    codes = set().union(*map(codes_of, sources))
    assert {"empty_audio", "audio_too_short", "audio_too_long", "duplicate_id", "missing", "not_found"} <= codes
    codes |= {"invalid_value", fields.NOT_SERVED, fields.UNKNOWN_FIELD, *front._UNREADY} - {front.OK}
    table = API[API.index("### Errors") : API.index("## POST /profile")]
    cells = "".join(line for line in table.splitlines() if line.startswith("|"))
    assert sorted(codes - UNSEEN.keys() - set(re.findall(r"`(\w+)`", cells))) == []
    of_400 = re.findall(r"^\| (`[^|]*)", table, flags=re.MULTILINE)
    told = {code for cell in of_400 for code in re.findall(r"`(\w+)`", cell)} - {"code"}
    assert sorted(told - codes) == []


def test_the_package_of_the_python_examples_is_named_before_the_first():
    start = API[: API.index("```python")]
    assert "from openai import OpenAI" in SNIPPETS[0]
    assert ".venv/bin/pip install openai" in start and "`make .venv`" in start


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [
        ("Chat", (openai.ChatFields, openai.TalkerFields, openai.AudioOut, openai.StreamOptions)),
        ("Completions", ()),
        ("Speech", (openai.SpeechFields,)),
        ("Transcriptions", (openai.TranscriptionFields,)),
    ],
)
def test_every_field_of_the_openai_routes_is_in_the_manual(heading: str, kinds: tuple):
    start = API.index(f"### {heading}: POST")
    part = API[start : API.index("\n### ", start + 1)]
    for kind in kinds:
        for name in kind.model_fields.keys() - {"model", "messages", "stream"}:
            assert f"`{name}`" in part, name


def test_the_openapi_document_has_every_body_and_needs_nothing_else(server: Server):
    status, document = server.get("/openapi.json")
    assert status == 200
    assert "$ref" not in json.dumps(document)
    posts = {path: item["post"] for path, item in document["paths"].items() if "post" in item}
    assert posts.keys() == {
        "/generate",
        "/profile",
        *(f"/v1/{path}" for path in ("chat/completions", "completions", "audio/speech", "audio/transcriptions")),
    }
    for path, post in posts.items():
        assert {"200", "400", "413", "415", "429", "500", "503"} <= post["responses"].keys()
        error = post["responses"]["400"]["content"]["application/json"]["schema"]["properties"]["error"]
        assert ("param" in error["properties"]) == path.startswith("/v1/")
    content = posts["/generate"]["requestBody"]["content"]
    assert content.keys() == {"application/json", "multipart/form-data"}
    properties = content["application/json"]["schema"]["properties"]
    assert properties["speech"]["anyOf"][0]["properties"]["voice"]["default"] == "ethan"
    chat = posts["/v1/chat/completions"]["requestBody"]["content"]["application/json"]["schema"]
    assert chat["properties"]["model"]["enum"] == ["omni-tiny"]
    assert chat["required"] == ["model", "messages"]
