"""What a step function may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rankwise.errors import StepError
from rankwise.training.step import loss_and_count


@pytest.mark.parametrize("count", [3, 3.0, np.int64(3), np.float32(3), torch.tensor(3), torch.tensor([3.0])])
def test_a_count_is_a_number_of_python_numpy_or_torch(count: Any) -> None:
    loss = torch.ones(())
    assert loss_and_count((loss, count)) == (loss, count)


@pytest.mark.parametrize("count", ["3", None, [3], np.array([1, 2])])
def test_anything_else_is_refused_by_its_type(count: Any) -> None:
    with pytest.raises(StepError, match=rf"a tuple of 2 \(Tensor of shape \(\), {type(count).__name__}\)"):
        loss_and_count((torch.ones(()), count))
