"""One script, without a flag, in every place: each rank knows its number and connects, or an error says what to type."""

from __future__ import annotations

from pathlib import Path

import pytest
from clusters import hosts, mpich, openmpi, sge, slurm
from truth import PLACES, SCRIPT, Place, ask

__all__ = ["hosts", "mpich", "openmpi", "sge", "slurm"]  # fixtures

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("place", sorted(PLACES, key=lambda place: place.up), ids=lambda place: place.name)
def test_the_ranks_of_one_script_are_right_or_one_error_says_what_to_type(
    place: Place, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    for needed in {place.up, *(name for name in ("openmpi", "mpich") if f"mpirun.{name}" in place.command)} - {""}:
        request.getfixturevalue(needed)
    answer = ask(place, tmp_path / "there", SCRIPT)
    if place.ranks:
        assert answer.verdict(place) == "right", (answer.said, answer.text)
        return
    assert (answer.said, answer.status) == ([], 1), answer.text
    assert place.says in answer.text
    errors = [line for line in answer.text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, answer.text
    assert "Traceback" not in answer.text
