"""What an optimizer trains of a model. It is compared at every step, because it may change.

trained = Trained(model, optimizer)
if trained.changed(): ...            # unfrozen, added, replaced, another layout in memory
trained.look();  trained.parameters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from rankwise.dist import log, private_names
from rankwise.dist.divided import is_partitioned
from rankwise.errors import ConfigError
from rankwise.host.text import listed
from rankwise.training.optimizer import named_parameters, outside

_REFUSED = {
    LBFGS: "evaluates the loss several times per step, by a function that it is given; one reduction per step is not enough",
    SparseAdam: "requires sparse gradients, and gradients are summed over ranks as dense ones",
}
_NAMED = 4  # a message lists this many names, and counts the others
_requires_grad = attrgetter("requires_grad")
_strides = torch.Tensor.stride
_params = itemgetter("params")
_values: Any = dict.values


class Trait(NamedTuple):
    """What all ranks must agree on for one parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    strides: tuple[int, ...]
    """Strides of axes with more than one element: gradients are laid out in memory like their parameters."""

    groups: tuple[int, ...]
    """The optimizer's parameter groups that hold it."""


class Trained:
    """All parameters of `model` that require a gradient, and the other parameters of `optimizer`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        for kind, why in _REFUSED.items():
            if isinstance(optimizer, kind):
                raise ConfigError(f"{kind.__name__} {why}; choose another optimizer, for example AdamW or SGD")
        self.model = model
        self.optimizer = optimizer
        self._loaded: list[list[nn.Parameter]] = []
        """The parameters of each group that a load has added; the optimizer may make new groups, but keeps these lists."""
        self.look()

    def look(self) -> None:
        """Remember what is trained now. Raises ConfigError if it cannot be trained on several ranks."""
        self._refuse()
        self._modules = list(self.model.modules())
        self._homes = [home for module in self._modules for home in private_names.homes(module)]
        self._home_sizes = list(map(len, self._homes))
        self._filled = list(filter(None, self._homes))  # half are empty: the parameters of containers, and children of layers
        self._in_homes = list(chain.from_iterable(map(_values, self._filled)))
        self._named = self.named()
        self._all = list(self._named.values())
        self._known = {*map(id, self._all), *map(id, self._modules)}  # they are referenced here, so that no id is used again
        self._flags = list(map(_requires_grad, self._all))
        self._grouped = list(chain.from_iterable(group["params"] for group in self.optimizer.param_groups))
        self._sizes = [len(group["params"]) for group in self.optimizer.param_groups]
        self.parameters = [p for p in self._all if p.requires_grad]
        """The parameters that require a gradient, each once, in the order of the model."""

        self._strides = list(map(_strides, self.parameters))
        self._warn_of_those_in_no_group()
        if not self.parameters:
            raise ConfigError("the model has no parameter that requires a gradient: there is nothing to train")

    def _warn_of_those_in_no_group(self) -> None:
        grouped = set(map(id, self._grouped))
        names = [name for name, p in self._named.items() if p.requires_grad and id(p) not in grouped]
        if names:
            log.warning_once(
                f"{len(names)} parameters require a gradient but are in no group of the optimizer, so they do not change: "
                f"{some(names)}; add them (optimizer.add_param_group), or freeze them (requires_grad_(False))"
            )

    def changed(self) -> bool:
        """Whether what is trained has changed since the last look, in its parameters or their layout. Local, and cheap: each
        step calls it, for up to a thousand parameters, so it uses only maps."""
        if list(map(_requires_grad, self._all)) != self._flags or list(map(_strides, self.parameters)) != self._strides:
            return True
        groups = list(map(_params, self.optimizer.param_groups))
        if list(map(len, groups)) != self._sizes or not all(map(is_, chain.from_iterable(groups), self._grouped)):
            return True
        now = chain.from_iterable(map(_values, self._filled))
        if self._homes and list(map(len, self._homes)) == self._home_sizes and all(map(is_, now, self._in_homes)):
            return False
        return not self._is_as_it_was()

    def _is_as_it_was(self) -> bool:
        """Whether the parameters are still the same. For layers that were replaced, or that each pass creates again."""
        now = list(self.named().values())
        if len(now) != len(self._all) or not all(map(is_, now, self._all)):
            return False
        self.look()
        return True

    def new(self) -> dict[str, torch.Tensor]:
        """The new parameters, and the buffers of new modules, since the last look, by name."""
        found: dict[str, torch.Tensor] = {n: p for n, p in self.named().items() if id(p) not in self._known}
        for prefix, module in self.model.named_modules():
            if id(module) not in self._known:
                found |= module.named_buffers(prefix, recurse=False)
        return found

    def named(self) -> dict[str, nn.Parameter]:
        """The current parameters of the model, also frozen ones, and what else the optimizer trains."""
        return named_parameters(self.model, self.optimizer)

    def name(self, parameter: torch.Tensor) -> str:
        return next((name for name, p in self._named.items() if p is parameter), "a parameter")

    def traits(self) -> list[Trait]:
        """The current traits, which must be the same on all ranks."""
        groups: dict[int, list[int]] = {}
        for number, group in enumerate(self.optimizer.param_groups):
            for p in group["params"]:
                groups.setdefault(id(p), []).append(number)
        return [
            Trait(
                name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad,
                tuple(stride for stride, n in zip(p.stride(), p.shape, strict=True) if n > 1), tuple(groups.get(id(p), ())),
            )
            for name, p in self.named().items()
        ]  # fmt: skip

    def _refuse(self) -> None:
        if is_partitioned(self.optimizer):
            raise ConfigError(
                "each rank of a ZeroRedundancyOptimizer has the state of some parameters, but here each rank updates all of "
                "them; give the optimizer itself, such as torch.optim.Adam(model.parameters()), or train in your own loop with "
                "DDP, as with torchrun"
            )
        names = self.named()
        for name, p in names.items():
            if isinstance(p, nn.parameter.UninitializedParameter):
                raise ConfigError(
                    f"{name} has no shape yet (a lazy module): run one batch through the model first, model(batch), so that "
                    "all ranks can start with the same values"
                )
            if p.is_complex():
                raise ConfigError(
                    f"{name} is complex ({p.dtype}): gradients are summed as real numbers; keep two real parameters, and "
                    "join them with torch.view_as_complex in forward"
                )
        mine = set(map(id, self.model.parameters()))
        if not any(id(p) in mine for group in self.optimizer.param_groups for p in group["params"]):
            raise ConfigError("the optimizer has no parameter of the model; create it from model.parameters(), after the model")

    # --- what is saved of it

    def state_dict(self) -> dict[str, Any]:
        """What each group holds, what is frozen, which modules are in evaluation mode, all by name; and the values of
        parameters that are not in the model."""
        named = self.named()
        names = {id(p): name for name, p in named.items()}
        return {
            "groups": [[names[id(p)] for p in group["params"]] for group in self.optimizer.param_groups],
            "frozen": [name for name, p in named.items() if not p.requires_grad],
            "evaluating": [name for name, module in self.model.named_modules() if not module.training],
            "outside": {name: p.detach() for name, p in outside(self.model, self.optimizer).items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Freeze, unfreeze and set modes as saved, and add the groups that the run had added. Raises ConfigError if the
        optimizer had other parameters."""
        self._remove_loaded_groups()  # of a newer checkpoint, which turned out to be corrupted
        self._add_groups(state["groups"])
        now = self.state_dict()
        if state["groups"] != now["groups"]:
            raise ConfigError(_other_groups(state["groups"], now["groups"]))
        frozen, evaluating = set(state["frozen"]), set(state["evaluating"])
        if frozen ^ set(now["frozen"]):
            told = _changes(now["frozen"], state["frozen"])
            log.say(f"from the checkpoint, and not as in the script: {told}")
        for name, parameter in self.named().items():
            parameter.requires_grad_(name not in frozen)
            if name in state["outside"]:
                parameter.data.copy_(state["outside"][name])
        modules = dict(self.model.named_modules())
        if not evaluating >= modules.keys():  # saved during an evaluation: all modes stay as in the script
            for name, module in modules.items():
                module.training = name not in evaluating

    def _remove_loaded_groups(self) -> None:
        loaded, self._loaded = set(map(id, self._loaded)), []
        self.optimizer.param_groups[:] = [g for g in self.optimizer.param_groups if id(g["params"]) not in loaded]

    def _add_groups(self, saved: Sequence[Sequence[str]]) -> None:
        """Add the groups that follow the script's, if the model has all their parameters. The optimizer's state sets their
        options."""
        now, named = self.state_dict()["groups"], self.named()
        new = saved[len(now) :]
        held = set(chain.from_iterable(now))
        if list(saved[: len(now)]) != now or not all(name in named and name not in held for names in new for name in names):
            return
        for names in new:
            self.optimizer.add_param_group({"params": [named[name] for name in names]})
            self._loaded.append(self.optimizer.param_groups[-1]["params"])
            log.say(f"from the checkpoint: the optimizer has one more group ({some(names)})")


def _changes(before: Sequence[str], after: Sequence[str]) -> str:
    thawed = [name for name in before if name not in after]
    frozen = [name for name in after if name not in before]
    told = [
        f"{len(names)} parameters {how} ({some(names)})" for names, how in ((thawed, "unfrozen"), (frozen, "frozen")) if names
    ]
    return ", ".join(told)


def _other_groups(before: Sequence[Sequence[str]], now: Sequence[Sequence[str]]) -> str:
    """Why the saved groups are not the groups of the script."""
    had, has = list(chain.from_iterable(before)), list(chain.from_iterable(now))
    gone, new = [n for n in had if n not in set(has)], [n for n in has if n not in set(had)]
    if gone or new:
        told = [
            f"{some(gone)}, which the script's optimizer does not train" if gone else "",
            f"not {some(new)}, which the script's optimizer trains" if new else "",
        ]
        what = f"the optimizer of the checkpoint trains {' and '.join(filter(None, told))}"
    else:
        counts = [", ".join(str(len(group)) for group in groups) for groups in (before, now)]
        what = (
            f"the optimizer of the checkpoint has its parameters in another order or in other groups (sizes {counts[0]}; in "
            f"the script {counts[1]})"
        )
    return (
        f"{what}; if the run changed this during training (a layer replaced, a group added), make the same change in the "
        "script before resuming, or start a new run with --fresh or --name NAME"
    )


def some(names: Sequence[str]) -> str:
    return listed(names, _NAMED)


def first_apart(ranks: Sequence[Sequence[Trait]]) -> str | None:
    """The first difference between a rank and rank 0, in words; None if all agree."""
    for rank, traits in enumerate(ranks):
        theirs = {trait.name: trait for trait in traits}
        own = {trait.name: trait for trait in ranks[0]}
        for name in chain(own, theirs):
            a, b = own.get(name), theirs.get(name)
            if a == b:
                continue
            if a is None or b is None:
                return (
                    f"only rank {0 if b is None else rank} has the parameter {name}, rank {rank if b is None else 0} does not"
                )
            field, here, there = next((f, x, y) for f, x, y in zip(Trait._fields, a, b, strict=True) if x != y)
            words = {"requires_grad": ("trained", "frozen")}.get(field)
            if words is not None:
                here, there = (words[0] if here else words[1]), (words[0] if there else words[1])
                return f"{name} is {here} on rank 0 and {there} on rank {rank}"
            return f"{name} has {field} {here} on rank 0 and {there} on rank {rank}"
    return None
