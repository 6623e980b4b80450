"""Arguments of a training that contradict each other: one line for each, before anything is created."""

from __future__ import annotations

import pytest

from rankwise.data import Loader
from rankwise.errors import ConfigError
from rankwise.training.arguments import as_loader, check_length


def test_a_training_without_a_length_is_an_error() -> None:
    check_length(None, 5)
    check_length(5, None)
    with pytest.raises(ConfigError, match="say how long to train"):
        check_length(None, None)


def test_a_loader_stays_itself_and_gets_the_length_that_the_trainer_was_given() -> None:
    loader = Loader([1, 2, 3], batch_size=1)
    assert as_loader(loader, 4, batch_size=None, seed=None) is loader
    assert loader.max_epochs == 4
    made = as_loader([1, 2, 3], 2, batch_size=3, seed=None)
    assert (made.global_batch_size, made.max_epochs, made.seed) == (3, 2, 0)
    with pytest.raises(ConfigError, match=r"Trainer\(seed=0\), but the Loader decides this: give seed to the Loader"):
        as_loader(loader, None, seed=0)
