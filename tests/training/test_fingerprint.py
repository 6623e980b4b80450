"""What identifies a training: settings that must be the same, settings that are kept, and what changes only the last bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from rankwise.errors import ConfigError
from rankwise.training.fingerprint import Fingerprint, numerics


def sgd() -> SGD:
    return SGD(nn.Linear(1, 1).parameters(), lr=0.1)


def test_the_kind_of_scheduler_must_stay_and_what_it_is_set_to_does(capsys: pytest.CaptureFixture[str]) -> None:
    made = Fingerprint.of({"clip_norm": 1.0}, StepLR(sgd(), step_size=3))
    assert made.fixed == {"clip_norm": 1.0, "scheduler": "StepLR"}
    later = Fingerprint.of({"clip_norm": 1.0}, StepLR(sgd(), step_size=5))
    later.load_state_dict(made.state_dict())
    assert "StepLR's step_size stays 3" in capsys.readouterr().out
    assert later.state_dict()["kept"]["StepLR's step_size"] == 3
    with pytest.raises(ConfigError, match="started with scheduler StepLR, and the script now has scheduler None"):
        Fingerprint.of({"clip_norm": 1.0}, None).load_state_dict(made.state_dict())


def test_numerics_are_no_settings_of_the_training() -> None:
    found = numerics("bf16", "cpu", sgd(), "flat")
    assert found == {
        "torch": torch.__version__, "threads": torch.get_num_threads(), "device": "cpu", "precision": "bf16", "fused": False,
        "reduction": "flat",
    }  # fmt: skip
