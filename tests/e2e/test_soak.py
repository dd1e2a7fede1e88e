"""The soak, small enough for every run of the tests; the long one is `python -m tests.e2e.soak`."""

from pathlib import Path

from tests.e2e.soak import soak
from tests.server.serving import serving


def test_of_200_requests_half_are_given_up_and_the_rest_get_their_solo_answers(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with serving(tiny_checkpoint, tmp_path / "log.txt") as server:
        figures = soak(server, 200, 16)
    assert figures["completed"] > 60 < figures["given_up"]
