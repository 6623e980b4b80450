"""The demo's loss on several numbers of ranks: stress/same_curve."""

from __future__ import annotations

import pytest
from runners import right

pytestmark = pytest.mark.stress

DOSES = {"small": ["10", "1", "3", "--batch", "8"], "whole": ["60", "1", "2", "3"]}


def test_the_loss_curve_is_the_same_on_any_number_of_ranks(dose: str) -> None:
    text = right("stress/same_curve/run.py", *DOSES[dose])
    assert "largest relative difference" in text
