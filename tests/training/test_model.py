"""What is done to a model before training."""

from __future__ import annotations

import pytest
from torch import nn

from rankwise.errors import ConfigError
from rankwise.training.model import check_synced


def test_batch_statistics_of_all_ranks_need_a_sample_on_each() -> None:
    synced = nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(1))
    check_synced(synced, fewest=4, parts=4)
    check_synced(nn.Linear(1, 1), fewest=1, parts=4)
    with pytest.raises(ConfigError, match=r"SyncBatchNorm needs a sample on every rank.*may have 3 "):
        check_synced(synced, fewest=3, parts=4)
