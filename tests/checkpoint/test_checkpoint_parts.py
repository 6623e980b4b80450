"""What may be a part of a checkpoint. Everything else is refused before any work is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from boxes import Box

from rankwise.checkpoint import Checkpoints
from rankwise.errors import ConfigError


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"model": Box().state_dict()}, "the part 'model' is {'value': None}, which has no state_dict and load_state_dict"),
        ({"model": Box}, "the part 'model' is <class"),
        ({"model": Box(), "step": 3}, "the part 'step' is 3, which has no state_dict"),
        ({"a/b": Box()}, "a part of a checkpoint cannot be named 'a/b': the name becomes a file's name"),
        ({"../model": Box()}, "a part of a checkpoint cannot be named '../model'"),
        ({"": Box()}, "a part of a checkpoint cannot be named ''"),
        (
            {"rng": Box()},
            "a part of a checkpoint cannot be named 'rng': the name becomes a file's name, and rng and ranks are taken",
        ),
        ({"ranks": Box()}, "a part of a checkpoint cannot be named 'ranks'"),
        ({1: Box()}, "a part of a checkpoint cannot be named 1"),
    ],
)
def test_what_cannot_be_a_part_is_refused_by_save_and_resume_and_nothing_is_left(
    parts: dict[Any, Any], said: str, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", background=False)
    for call in (checkpoints.resume, lambda given: checkpoints.save(given, 1)):
        with pytest.raises(ConfigError) as caught:
            call(parts)
        assert said in str(caught.value)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("name", ["model", "ema_2", "été", "my.model", "head-1"])
def test_a_word_is_a_name(name: str, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, background=False)
    assert checkpoints.resume({name: Box()}) == 0
    checkpoints.save({name: Box(7)}, 3)
    box = Box()
    assert checkpoints.resume({name: box}) == 3
    assert box.state == {"value": 7}
