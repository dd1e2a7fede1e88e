"""The examples of docs/api.md, run as they stand against a real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.server.protocol import GenerateFields, SpeechFields
from tests.server.serving import Server
from tests.shared import REPOSITORY

API = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
CLIP_TOKENS = 35  # of workloads/clips/c00.flac
EXAMPLES = re.findall(r"```bash\n(.*?)```", API, flags=re.DOTALL)


def test_there_are_five_examples():
    assert len(EXAMPLES) == 5


@pytest.mark.skipif(shutil.which("curl") is None, reason="the examples use curl")
@pytest.mark.parametrize("place", range(5))
def test_an_example_of_the_manual_works(server: Server, tmp_path: Path, place: int):
    (tmp_path / "workloads").symlink_to(REPOSITORY / "workloads")
    script = EXAMPLES[place].replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    assert script != EXAMPLES[place]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "/generate" in script:
        last = json.loads(done.stdout.splitlines()[-1])
        assert last["finish_reason"] in ("stop", "length")
        assert last["usage"]["audio_tokens_in"] == (CLIP_TOKENS if "c00.flac" in script else 0)


def test_every_field_is_in_the_manual():
    table = API[API.index("### Fields") : API.index("### Answers")]
    for name in [*GenerateFields.model_fields, *SpeechFields.model_fields]:
        assert f"`{name}`" in table, name


def test_the_openapi_document_has_the_body_of_both_kinds(server: Server):
    status, document = server.get("/openapi.json")
    assert status == 200
    content = document["paths"]["/generate"]["post"]["requestBody"]["content"]
    assert content.keys() == {"application/json", "multipart/form-data"}
    properties = content["application/json"]["schema"]["properties"]
    assert properties["speech"]["properties"]["voice"]["default"] == "ethan"
    assert "$ref" not in json.dumps(content)
