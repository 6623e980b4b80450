"""Compares a training on several ranks, after each step, with the same one in plain torch on one device, in float64.

problem = run(Cell("Adam", "fused", "convolutions", "channels_last", "unfreeze", True, 2), folder)     # None, or a text
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrizations

from rankwise.checkpoint import Checkpoints
from rankwise.dist import comm
from rankwise.errors import ConfigError
from rankwise.sync import AllReduce

TOLERANCE = 1e-12
SIZES = (7, 5, 1, 8, 6)
"""The number of samples in each global batch."""

EVENT_AT = 2
CLIP_NORM = 0.5
REFUSED = ("LBFGS", "SparseAdam")


class Cell(NamedTuple):
    optimizer: str
    kernel: str
    kind: str
    layout: str
    event: str
    overlap: bool | None
    accumulate: int


# --- the axes

KERNELS = {"plain": {"foreach": False, "fused": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}

SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "ASGD": {"lr": 0.05},
    "Rprop": {"lr": 0.01},
    "Muon": {"lr": 0.02},
    "Adafactor": {"lr": 0.02},
    "Adadelta": {"lr": 0.5},
}


def optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Every class of torch.optim, by name."""
    found = inspect.getmembers(torch.optim, inspect.isclass)
    return {name: kind for name, kind in found if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer}


def kernels(optimizer: str) -> list[str]:
    known = inspect.signature(optimizers()[optimizer].__init__).parameters
    return [name for name, choice in KERNELS.items() if name == "plain" or choice.keys() <= known.keys()]


class Branches(nn.Module):
    """A trunk that may be frozen, a head, and a part that the optimizer may get later."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 5, bias=bias), nn.Tanh())
        self.late = nn.Linear(5, 5, bias=bias)
        self.head = nn.Linear(5, 3, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.trunk(x)
        out: torch.Tensor = self.head(h + torch.tanh(self.late(h)))
        return out


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, (2, 3)), nn.Tanh())
        self.late = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.trunk(x.view(-1, 1, 2, 3))
        out: torch.Tensor = self.head((h + torch.tanh(self.late(h))).flatten(1))
        return out


class Tied(Branches):
    """The head uses the trunk's weight, and a layer normalises in evaluation mode, which is intended."""

    def __init__(self) -> None:
        super().__init__(True)
        self.norm = nn.BatchNorm1d(5).eval()
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(5, 6, bias=False)
        self.head.weight = nn.Parameter(torch.randn(6, 5))
        self.trunk[0].weight = nn.Parameter(self.head.weight.detach().t().clone())
        self.tied = self.late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.trunk(x))
        out: torch.Tensor = self.head(self.tied(h) * self.scale + self.late(h))
        return out


class WithLoss(nn.ModuleDict):
    """The loss has its own weights."""

    def __init__(self) -> None:
        super().__init__({"net": Branches(True), "loss": nn.Bilinear(3, 3, 2)})

    def __getattr__(self, name: str) -> Any:
        return getattr(self["net"], name) if name in ("trunk", "late", "head") else super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self["net"](x)
        out: torch.Tensor = self["loss"](h, h)
        return out


def spectral() -> nn.Module:
    model = Branches(True)
    parametrizations.spectral_norm(model.late)
    parametrizations.weight_norm(model.trunk[0])
    return model


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: Branches(True),
    "matrices": lambda: Branches(False),
    "convolutions": Convolutions,
    "tied": Tied,
    "with loss": WithLoss,
    "parametrized": spectral,
}


def _set_data(model: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for parameter in model.parameters():
        values = parameter.detach().clone()
        parameter.data = change(parameter.data)
        assert torch.equal(parameter.detach(), values)


def _transposed(data: torch.Tensor) -> torch.Tensor:
    return data.transpose(0, -1).contiguous().transpose(0, -1) if data.dim() > 1 else data


def _gapped(data: torch.Tensor) -> torch.Tensor:
    if data.dim() == 0:
        return data
    wide = torch.zeros(*data.shape[:-1], 2 * data.shape[-1], dtype=data.dtype)
    wide[..., ::2] = data
    return wide[..., ::2]


LAYOUTS: dict[str, Callable[[nn.Module], Any]] = {
    "rows": lambda model: None,
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),
    "transposed": lambda model: _set_data(model, _transposed),
    "gapped": lambda model: _set_data(model, _gapped),
}

EVENTS = ("nothing", "unfreeze", "freeze", "add a group", "replace a layer", "other layout", "evaluate", "save", "resume")


def cells(overlaps: tuple[bool | None, ...]) -> Iterator[Cell]:
    """All combinations that make sense."""
    for name in optimizers():
        for kernel, kind, layout, event, overlap, accumulate in itertools.product(
            kernels(name), KINDS, LAYOUTS, EVENTS, overlaps, (1, 3)
        ):
            if name in REFUSED and (kind, layout, event, accumulate) != ("linear", "rows", "nothing", 1):
                continue
            if name == "Muon" and kind != "matrices":  # Muon accepts nothing else
                continue
            if kind == "parametrized" and accumulate > 1:  # one power iteration per pass, and their number differs
                continue
            if layout == "gapped" and kernel == "fused":  # torch's own kernel also writes to the gaps
                continue
            if (name, kernel, event) == ("SGD", "fused", "unfreeze"):  # it needs momenta for all parameters or for none
                continue
            if event in ("add a group", "replace a layer") and name not in REFUSED and not _takes_another_group(name):
                continue
            yield Cell(name, kernel, kind, layout, event, overlap, accumulate)


@functools.cache
def _takes_another_group(name: str) -> bool:
    """Up to torch 2.11, Adagrad creates no state for a group that is added later, and fails at the next step."""
    first, second = (nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = optimizers()[name]([first], **{"lr": 0.01, **SETTINGS.get(name, {})})
    optimizer.add_param_group({"params": [second]})
    for parameter in (first, second):
        parameter.grad = torch.ones(2, 2)
    try:
        optimizer.step()
    except KeyError:
        return False
    return True


# --- one cell


class Side:
    """A model and its optimizer: on ranks, or in plain torch."""

    def __init__(self, cell: Cell) -> None:
        torch.manual_seed(1)
        self.cell = cell
        self.model = KINDS[cell.kind]().double()
        LAYOUTS[cell.layout](self.model)
        if cell.event == "unfreeze":
            self.model.trunk.requires_grad_(False)
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> torch.optim.Optimizer:
        late = {id(p) for p in self.model.late.parameters()} if self.cell.event == "add a group" else set()
        parameters = [p for p in self.model.parameters() if id(p) not in late]
        known = inspect.signature(optimizers()[self.cell.optimizer].__init__).parameters
        kernel = {k: v for k, v in KERNELS[self.cell.kernel].items() if k in known}
        return optimizers()[self.cell.optimizer](parameters, **{"lr": 0.01, **SETTINGS.get(self.cell.optimizer, {}), **kernel})

    def change(self, seed: int) -> None:
        """Cause the event, if it is one of the model or the optimizer."""
        event = self.cell.event
        if event in ("unfreeze", "freeze"):
            self.model.trunk.requires_grad_(event == "unfreeze")
        elif event == "add a group":
            self.optimizer.add_param_group({"params": list(self.model.late.parameters()), "lr": 0.02})
        elif event == "other layout":
            _set_data(self.model, _transposed if self.cell.layout != "transposed" else lambda data: data.contiguous())
        elif event == "replace a layer":
            torch.manual_seed(seed)
            net = self.model["net"] if self.cell.kind == "with loss" else self.model
            fresh = KINDS[self.cell.kind]().double()
            net.late = fresh.late
            self.optimizer.add_param_group({"params": list(net.late.parameters())})
        elif event == "resume":
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # load_state_dict converts NAdam's product to float64


def loss_of(model: nn.Module, positions: range) -> tuple[torch.Tensor, int]:
    """(sum, count) over these samples, each with its own count, in one pass."""
    rows = [torch.randn(1 + p % 3, 6, generator=torch.Generator().manual_seed(p), dtype=torch.float64) for p in positions]
    x = torch.cat(rows)
    return model(x).square().sum(), len(x)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def run(cell: Cell, folder: Path) -> str | None:
    """Collective. What is wrong, as a text; None if nothing is. "sign": only steps along a gradient of zero, which is rounding,
    differ."""
    try:
        return _compared(cell, folder)
    except ConfigError as error:
        if cell.optimizer in REFUSED and cell.optimizer in str(error):
            return None
        return f"refused: {error}"


def _compared(cell: Cell, folder: Path) -> str | None:
    rank, ranks = comm.rank(), comm.world_size()
    # torch's own fused kernel pairs the state with other elements after such a change; its other kernels are right.
    is_wrong = cell.kernel == "fused" and cell.event == "other layout"
    ours, plain = Side(cell), Side(cell._replace(kernel="plain") if is_wrong else cell)
    same = copy.deepcopy(plain)  # takes the same gradients as ours
    given: dict[str, torch.Tensor] = {}
    sync = _attached(ours, given)
    signs = False
    start = 0
    for step, size in enumerate(SIZES):
        if step == EVENT_AT:
            ours.change(100 + rank)
            plain.change(100)
            same.change(100)
            if cell.event == "replace a layer":
                sync.follow()
            ours, sync = _looked(cell, ours, sync, given, folder)
        mine = range(start + size * rank // ranks, start + size * (rank + 1) // ranks)
        parts = [part for part in _parts(mine, cell.accumulate) if len(part)]
        for i, part in enumerate(parts, start=1):
            sync.backward(*loss_of(ours.model, part), last=i == len(parts))
        if not parts and cell.kind == "parametrized":  # each pass does a power iteration, so this rank needs one too
            loss_of(ours.model, range(start, start + 1))
        given.clear()
        sync.step()
        total, count = loss_of(plain.model, range(start, start + size))
        start += size
        plain.model.zero_grad()  # also of parameters that the optimizer gets later
        (total / count).backward()
        nn.utils.clip_grad_norm_(plain.model.parameters(), CLIP_NORM)
        expected = gradients(plain.model)
        for name, p in same.model.named_parameters():
            p.grad = given[name].clone() if name in given else None
        plain.optimizer.step()
        same.optimizer.step()
        largest = max(float(g.abs().max()) for g in expected.values())
        for name, _ in plain.model.named_parameters():
            here, there = given.get(name), expected.get(name)
            if (here is None) != (there is None):
                return f"step {step + 1}: {name} has a gradient on one side alone"
            if not signs and here is not None and float((here - there).abs().max()) > TOLERANCE * max(largest, 1.0):
                return f"step {step + 1}: the gradient of {name} differs by {float((here - there).abs().max()):.1e}"
        for name, p in ours.model.named_parameters():
            apart = float((p - same.model.get_parameter(name)).detach().abs().max())
            if not apart <= TOLERANCE * max(float(p.detach().abs().max()), 1.0):
                return f"step {step + 1}: {name} differs by {apart:.1e} after the same gradient"
            reference = plain.model.get_parameter(name)
            far = (p - reference).abs() > TOLERANCE * max(float(p.detach().abs().max()), 1.0)
            if far.any() and not signs:
                gradient = expected.get(name)
                if gradient is None or float(gradient[far].abs().max()) > TOLERANCE * max(largest, 1.0):
                    return f"step {step + 1}: {name} differs by {float((p - reference).abs().max()):.1e}"
                signs = True
    return "sign" if signs else None


def _parts(positions: range, parts: int) -> list[range]:
    n = len(positions)
    return [positions[n * k // parts : n * (k + 1) // parts] for k in range(parts)]


def _attached(side: Side, given: dict[str, torch.Tensor]) -> AllReduce:
    if comm.rank() > 0:
        with torch.no_grad():
            for parameter in side.model.parameters():
                parameter.mul_(1 + comm.rank())
    side.optimizer.register_step_pre_hook(lambda *_: given.update(gradients(side.model)))
    return AllReduce(overlap=side.cell.overlap).attach(side.model, side.optimizer, clip_norm=CLIP_NORM, typical_count=16)


def _looked(cell: Cell, ours: Side, sync: AllReduce, given: dict[str, torch.Tensor], folder: Path) -> tuple[Side, AllReduce]:
    """Evaluate, save, or resume in new objects."""
    parts = {"sync": sync, "model": ours.model, "optimizer": ours.optimizer}
    if cell.event == "evaluate":
        with sync.averaged(), torch.no_grad():
            training = [module for module in ours.model.modules() if module.training]
            ours.model.eval()
            loss_of(ours.model, range(3))
            for module in training:
                module.training = True
    if cell.event in ("save", "resume"):
        checkpoints = Checkpoints(folder, background=False)
        checkpoints.save(parts, EVENT_AT)
        if cell.event == "resume":
            ours = Side(cell)
            sync = _attached(ours, given)
            checkpoints.load_latest({"sync": sync, "model": ours.model, "optimizer": ours.optimizer})
        comm.barrier()
        if comm.rank() == 0:
            shutil.rmtree(folder)
        comm.barrier()
    return ours, sync


def run_all(chosen: list[Cell], folder: str) -> list[str | None]:
    """Collective. What is wrong with each cell."""
    comm.init()
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()):  # thousands of models print that a parameter is not used
        return [run(cell, Path(folder, str(number))) for number, cell in enumerate(chosen)]
