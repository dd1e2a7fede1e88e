"""Random requests made from the server's own OpenAPI document: every answer is one that the document knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.serving import Server, environment

# These two want every body that fits the schema to be taken and every other to be refused, but a schema can't say that
# base64 must be audio, or that two fields exclude each other. The third wants a key, which this server doesn't ask for.
BEYOND_A_SCHEMA = "positive_data_acceptance,negative_data_rejection,ignored_auth"


@pytest.mark.slow
def test_random_requests_get_documented_answers_and_no_5xx(server: Server, tmp_path: Path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"http://127.0.0.1:{server.port}/openapi.json"),
            *("--phases", "fuzzing", "-n", "20", "--seed", "1", "--exclude-checks", BEYOND_A_SCHEMA),
        ],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "Tested: 11" in done.stdout
    assert server.metrics()["http_failed_total"] == 0
    assert "Traceback" not in server.text()
