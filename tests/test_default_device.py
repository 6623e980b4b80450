"""Scripts that call `torch.set_default_device`: what rankwise itself computes on the CPU stays there."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F

import rankwise
from rankwise.dist import comm
from rankwise.sync import AllReduce, LocalSGD

STRATEGIES: dict[str, Any] = {
    "exact": AllReduce, "int8": lambda: AllReduce(compress="int8"), "powersgd": lambda: AllReduce(compress="powersgd:2"),
    "local": lambda: LocalSGD(3),
}  # fmt: skip


class Samples:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return np.full(8, index, np.float32) / 32, np.array(index % 3)


class Still(Samples):
    draws_nothing = True  # so that a thread may read ahead


def step(model: nn.Module, batch: Any) -> Any:
    x, y = batch
    return F.cross_entropy(model(x.cpu()), y.cpu(), reduction="sum"), len(y)


def trained(folder: Path, device: str | None, names: tuple[str, ...], **of_loader: Any) -> dict[str, list[float]]:
    """The weights, by strategy: of runs that are stopped after 6 of 9 steps, and resumed."""
    found = {}
    data = Still() if "prefetch_factor" in of_loader else Samples()
    for name in names:
        for steps in (6, 9):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 3))
            torch.set_default_device(device)  # what torch itself makes later is there, and of no use: `meta` has no memory
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    rankwise.Trainer(
                        model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), step,
                        rankwise.Loader(data, global_batch_size=8, device="cpu", **of_loader), max_steps=steps,
                        sync=STRATEGIES[name](), run_dir=folder / name, evaluate=Samples(),
                        checkpoints=rankwise.Checkpoints(every_steps=2),
                    ).fit()  # fmt: skip
                meters = rankwise.Meters("mine")
                meters.add(mine=(1.0, 2))
                assert meters.reduce()["mine"].mean == 0.5
                assert comm.all_gather_object(comm.rank()) == list(range(comm.world_size()))
            finally:
                torch.set_default_device(None)
        found[name] = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return found


@pytest.mark.stress
@pytest.mark.parametrize(
    ("names", "of_loader"), [(tuple(STRATEGIES), {}), (("exact",), {"num_workers": 1}), (("exact",), {"prefetch_factor": 2})],
    ids=["here", "worker", "thread"],
)  # fmt: skip
def test_a_default_device_changes_nothing_of_a_training(names: Any, of_loader: dict[str, int], tmp_path: Path) -> None:
    plain = on_ranks(2, trained, tmp_path / "plain", None, names, **of_loader)
    assert on_ranks(2, trained, tmp_path / "meta", "meta", names, **of_loader) == plain
