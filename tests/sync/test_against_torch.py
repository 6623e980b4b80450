"""A training on ranks compared with plain torch on one device: a few cells of stress/against_torch, which has all of them."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
from ranks import on_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "stress" / "against_torch"))

import cells


@pytest.mark.parametrize("n", [2, 1, 3])
@pytest.mark.one_in(3)
def test_steps_are_those_of_plain_torch(n: int, tmp_path: Path) -> None:
    every = list(cells.cells((False, True) if n > 1 else (None,)))
    refused = [cell for cell in every if cell.optimizer in cells.REFUSED]
    chosen = [*refused[:2], *random.Random(n).sample(every, 30)]
    told = on_ranks(n, cells.run_all, chosen, str(tmp_path))
    for cell, problems in zip(chosen, zip(*told, strict=True), strict=True):
        assert set(problems) <= {None, "sign"}, cell


def test_every_optimizer_of_torch_is_in_the_product() -> None:
    assert {cell.optimizer for cell in cells.cells((False,))} == cells.optimizers().keys()
    assert {"SGD", "Adam", "AdamW", "RMSprop"} <= cells.optimizers().keys()
