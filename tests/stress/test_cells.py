"""Trainings on ranks compared with plain torch: stress/against_torch. A few cells are in tests/sync/test_against_torch.py."""

from __future__ import annotations

import pytest
from runners import right

pytestmark = pytest.mark.stress

# The 15 have each kernel, model, layout and event, and 11 of the 15 optimizers.
DOSES = {"small": ["--cells", "15", "--ranks", "2", "5", "--seed", "9"], "whole": []}


def test_steps_are_those_of_plain_torch_for_every_optimizer_model_layout_and_event(dose: str) -> None:
    assert "WRONG" not in right("stress/against_torch/run.py", *DOSES[dose])
