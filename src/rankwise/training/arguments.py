"""Arguments of a script for a training: combined, or refused before anything is created.

loader = as_loader(train_data, max_epochs=3, batch_size=16);  check_length(loader.max_epochs, max_steps)
"""

from __future__ import annotations

from typing import Any

from rankwise.data import Loader
from rankwise.errors import ConfigError


def check_length(max_epochs: int | None, max_steps: int | None) -> None:
    if max_epochs is None and max_steps is None:
        raise ConfigError("say how long to train: max_epochs=... or max_steps=...")


def as_loader(train_data: Any, max_epochs: int | None, **given: Any) -> Loader:
    """The given Loader, or a new one for the dataset. Raises ConfigError if the Trainer and the Loader get the same
    argument."""
    given = {name: value for name, value in given.items() if value is not None}
    if not isinstance(train_data, Loader):
        return Loader(train_data, max_epochs=max_epochs, **given)
    for name in given:
        raise ConfigError(f"Trainer({name}={given[name]}), but the Loader decides this: give {name} to the Loader only")
    if max_epochs is not None:
        if train_data.max_epochs is not None:
            raise ConfigError(
                f"Trainer(max_epochs={max_epochs}) and Loader(max_epochs={train_data.max_epochs}) say the same: remove one"
            )
        train_data.max_epochs = max_epochs
    return train_data
