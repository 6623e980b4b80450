"""Every strategy with a name x all that a training may have: a new strategy is tested automatically."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F

import rankwise
from rankwise.dist import comm
from rankwise.errors import ConfigError, Stopped
from rankwise.sync import StepResult, SyncStrategy, named
from rankwise.sync.names import EXAMPLES
from rankwise.training.precision import LossScale

SHORTER = {"16": "3", "32": "3", "1000": "2", "30s": "0.001s"}
NAMES = [re.sub(r"(?<=:)(16|32|1000|30s)\b", lambda found: SHORTER[found[0]], name) for name in EXAMPLES]
STEPS = 8


class Training:
    """Eight steps of a strategy on this rank; the last one is in the middle of a period."""

    steps = STEPS
    clip_norm: float | None = None
    loss_scale: LossScale | None = None
    dtype: torch.dtype | None = None
    sizes: Sequence[Sequence[int]] = ((3,), (3,))
    """The sizes of the micro-batches in a step, by rank."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(5)
        self.model = self.make_model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.prepare()
        self.before = {key: value.clone() for key, value in self.model.state_dict().items()}
        given: Any = {"clip_norm": self.clip_norm, "loss_scale": self.loss_scale, "typical_count": 4.0}
        self.sync: SyncStrategy = named(name).attach(self.model, self.optimizer, **given)
        self.results: list[StepResult] = []

    def make_model(self) -> nn.Sequential:
        return nn.Sequential(
            nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
        )

    def prepare(self) -> None: ...

    def before_step(self, step: int) -> None: ...

    def inputs(self, n: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(n, 8, generator=generator)

    def loss(self, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
        with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
            logits = self.model(x)
        return F.cross_entropy(logits.float(), y, reduction="sum")

    def run(self) -> None:
        sizes = self.sizes[comm.rank()]
        for step in range(self.steps):
            self.before_step(step)
            generator = torch.Generator().manual_seed(100 * step + comm.rank())
            batches = [(self.inputs(n, generator), torch.randint(0, 4, (n,), generator=generator)) for n in sizes]
            for i, (x, y) in enumerate(batches, start=1):
                self.sync.backward(self.loss(x, y, step), len(y), last=i == len(batches))
            self.results.append(self.sync.step())
        self.sync.finish()

    def check(self) -> None:
        assert self.moved()

    def moved(self, name: str = "") -> bool:
        now = self.model.state_dict()
        return any(not torch.equal(now[key], value) for key, value in self.before.items() if key.startswith(name))


class UnderBf16(Training):
    dtype = torch.bfloat16


class UnderFp16WithALossScale(Training):
    dtype = torch.float16

    def prepare(self) -> None:
        self.loss_scale = LossScale()


class Clipped(Training):
    clip_norm = 1e-3

    def check(self) -> None:
        far = [(p.detach() - self.before[name]).norm() for name, p in self.model.named_parameters()]
        # Momentum doubles a step of 0.05, and an outer momentum of 0.9 makes it ten times as long.
        assert 0 < float(torch.stack(far).norm()) < 1e-3 * 0.05 * self.steps * 2 * 10


class NotFiniteOnOneRank(Training):
    def loss(self, x: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
        loss_sum = super().loss(x, y, step)
        return loss_sum * torch.nan if step == 4 and comm.rank() == 1 else loss_sum

    def check(self) -> None:
        super().check()
        on_main, on_other = comm.all_gather_object([result.mine.stepped for result in self.results])
        assert not on_other[4]
        assert sum(on_other) == STEPS - 1
        assert sum(on_main) >= STEPS - 1  # the other ranks also skip the step only if all ranks take one step


class Frozen(Training):
    def prepare(self) -> None:
        self.model[0].requires_grad_(False)

    def check(self) -> None:
        assert self.moved("2.")
        assert not self.moved("0.")


class LaterUnfrozen(Frozen):
    def before_step(self, step: int) -> None:
        if step == 4:
            assert not self.moved("0.")
            self.model[0].requires_grad_(True)
            self.sync.follow()

    def check(self) -> None:
        assert self.moved("0.")


class Unused(Training):
    def make_model(self) -> nn.Sequential:
        model = super().make_model()
        model[0].spare = nn.Linear(16, 16)  # no forward pass uses it
        return model

    def check(self) -> None:
        assert self.moved("2.")
        assert torch.allclose(self.model.state_dict()["0.spare.weight"], self.before["0.spare.weight"], rtol=1e-6)


class BatchNorm(Training):
    def make_model(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4))

    def check(self) -> None:
        assert self.moved("1.running_mean")


class Tied(Training):
    def prepare(self) -> None:
        first, second = self.model[2], self.model[4]
        assert isinstance(first, nn.Linear)
        second.weight = first.weight
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def check(self) -> None:
        assert self.moved("2.weight")
        assert self.model[4].weight is self.model[2].weight


class ChannelsLast(Training):
    def make_model(self) -> nn.Sequential:
        layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 4))
        return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]

    def inputs(self, n: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(n, 3, 6, 6, generator=generator).contiguous(memory_format=torch.channels_last)

    def check(self) -> None:
        super().check()
        weight: Any = self.model[2].weight
        assert weight.is_contiguous(memory_format=torch.channels_last)


class Accumulated(Training):
    sizes = ((2, 3), (1, 4))


class NoSampleOnOneRank(Training):
    sizes = ((3,), ())


class LookedAt(Training):
    def before_step(self, step: int) -> None:
        own = [value.clone() for value in self.model.state_dict().values()]
        with self.sync.averaged():
            seen = [value.tolist() for value in self.model.state_dict().values()]
        assert all(told == seen for told in comm.all_gather_object(seen))
        assert all(map(torch.equal, own, self.model.state_dict().values()))


CONDITIONS: list[type[Training]] = [
    UnderBf16, UnderFp16WithALossScale, Clipped, NotFiniteOnOneRank, Frozen, LaterUnfrozen, Unused, BatchNorm, Tied,
    ChannelsLast, Accumulated, NoSampleOnOneRank, LookedAt,
]  # fmt: skip


def wrong(name: str) -> list[str]:
    """The conditions in which this strategy does not do what it should."""
    found = []
    for condition in CONDITIONS:
        training = condition(name)
        training.run()
        state = training.model.state_dict()
        told = comm.all_gather_object({key: value.tolist() for key, value in state.items()})
        try:
            training.check()
            assert all(other == told[0] for other in told), "the replicas differ"
            assert all(bool(value.isfinite().all()) for value in state.values()), "not finite"
        except AssertionError as error:
            found.append(f"{condition.__name__}: {error!r}")
    return found


BEFORE_ATTACH = {
    "backward": lambda sync: sync.backward(torch.ones(()), 1),
    "step": lambda sync: sync.step(), "finish": lambda sync: sync.finish(),
    "averaged": lambda sync: sync.averaged().__enter__(), "follow": lambda sync: sync.follow(),
    "wait_s": lambda sync: sync.wait_s,
    "state_dict": lambda sync: sync.state_dict(),
}  # fmt: skip


@pytest.mark.parametrize("method", BEFORE_ATTACH)
@pytest.mark.parametrize("name", NAMES)
def test_before_attach_a_method_says_that_it_is_missing(name: str, method: str) -> None:
    with pytest.raises(ConfigError, match=r"^this strategy has no model yet; call attach before its other methods: sync = "):
        BEFORE_ATTACH[method](named(name))


@pytest.mark.parametrize("name", NAMES)
def test_attach_refuses_what_is_no_model_and_no_optimizer(name: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigError, match=r"^attach\(optimizer=None\): give an optimizer: torch\.optim"):
        named(name).attach(model, None)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match=r"^attach\(model=SGD.*\): give a torch\.nn\.Module; the order of the arg"):
        named(name).attach(optimizer, model)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(2)
def test_every_strategy_trains_under_every_condition(name: str) -> None:
    for found in on_ranks(2, wrong, name):
        assert found == []


# --- stopped between two averages, by a signal


class Numbers:
    """A dataset of ten samples."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(8, generator=torch.Generator().manual_seed(index)), index % 4


def fitted(name: str, folder: Path, stop_after: int) -> tuple[int, list[list[float]]]:
    """(the step after which it ended, the weights). `stop_after`: rank 1 gets SIGTERM in this step; 0 for no stop."""
    torch.manual_seed(5)
    model = Training.make_model(Training.__new__(Training))

    def step(model: nn.Module, batch: Any) -> tuple[torch.Tensor, int]:
        x, y = batch
        return F.cross_entropy(model(x), y, reduction="sum"), len(y)

    def asked(state: Any) -> None:
        if state.step == stop_after and comm.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if 0 < stop_after <= state.step:
            time.sleep(0.1)  # the ranks need some milliseconds to agree; without this they would be done by then

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    given: Any = {"batch_size": 2, "max_steps": 12, "sync": name, "run_dir": folder, "actions": [asked]}
    trainer = rankwise.Trainer(model, optimizer, step, Numbers(), **given)
    try:
        trainer.fit()
    except Stopped:
        assert stop_after
    return trainer.state.step, [p.flatten().tolist() for p in model.parameters()]


def stopped_and_resumed(names: Sequence[str], folder: Path) -> list[str]:
    """The strategies that do not reach the weights of the unbroken training."""
    found = []
    for name in names:
        step, _ = fitted(name, folder / name / "stopped", stop_after=4)
        assert 4 <= step < 12, f"{name}: ended after step {step}"
        resumed = fitted(name, folder / name / "stopped", stop_after=0)
        if resumed != fitted(name, folder / name / "unbroken", stop_after=0):
            found.append(name)
    return found


STEADY = [name for name in NAMES if not name.endswith("s")]  # the others average by the clock
FIRST = ["all-reduce:int8", "local-sgd:3", "diloco:3:int8"]


@pytest.mark.parametrize(
    "names",
    [FIRST, pytest.param([name for name in STEADY if name not in FIRST], marks=pytest.mark.stress)],
    ids=["three of them", "the others"],
)
def test_every_strategy_is_stopped_by_a_signal_in_mid_period_and_resumed_to_the_same_bits(
    names: list[str], tmp_path: Path
) -> None:
    for found in on_ranks(2, stopped_and_resumed, names, tmp_path):
        assert found == []


def attached_apart(name: str, given: dict[str, Any]) -> str:
    model = nn.Linear(2, 1)
    try:
        named(name).attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **(given if comm.rank() else {}))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["all-reduce", "local-sgd:3", "diloco:3"])
@pytest.mark.parametrize("given", [{"clip_norm": 1.0}, {"typical_count": 50}, {"loss_scale": LossScale()}])
@pytest.mark.one_in(3)
def test_other_arguments_of_attach_on_a_rank_are_an_error_on_all(name: str, given: dict[str, Any]) -> None:
    for told in on_ranks(2, attached_apart, name, given):
        assert f"'s {next(iter(given))} is" in told
