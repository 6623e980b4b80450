"""Watches a script while it takes its first steps, on one rank; changes almost nothing except how long it runs.

    with Instrument(settings) as instrument:
        run the script                       # Enough ends it after a few forward passes in training
    instrument.record()                           # what it did, as JSON; and the gradients of the first step

Until the first step, dropout is off and batch norms are in evaluation mode, so that gradients can be compared. Epochs are
shorter, so that several begin. Batches of a DataLoader are smaller, so that all ranks together have the same number of samples
on any number of ranks. torch.save and Checkpoints write to the test's folder.
"""

from __future__ import annotations

import gc
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from rankwise.checkpoint import Checkpoints
from rankwise.checks.determinism import Autocasts, Draws, stream, without_dropout
from rankwise.checks.settings import RankSettings
from rankwise.checks.trainer import row_digests
from rankwise.data import Loader
from rankwise.dist import private_names
from rankwise.dist.device import tensors_in
from rankwise.training.digest import digest, digests

_STEPS = 6  # steps whose gradients and parameters are kept
_OTHER_BATCHES = 2  # batches to use of a loader that is not used for training
_MOST_ROWS = 4096  # of an input whose rows are compared: a whole graph is not a batch


class Enough(SystemExit):
    """Raised when everything was seen: the script ends here, as with sys.exit(0)."""


@dataclass
class _LoaderPass:
    """One iteration over a loader."""

    loader: int
    samples: list[list[Any]] = field(default_factory=list)
    """For each batch: the indices, or digests of its content."""

    trained: bool = False
    ahead: int = 0
    """How many of the last batches no forward pass has used: a rankwise.Loader gives all micro-batches of a step at once."""

    def take(self) -> list[list[Any]]:
        """The batch of the next forward pass; without a new one, the last again. Empty if there is none."""
        first = len(self.samples) - max(self.ahead, 1)
        self.ahead = max(self.ahead - 1, 0)
        return self.samples[first : first + 1] if first >= 0 else []


class Instrument:
    """While it is open, some functions of torch and rankwise are replaced by functions that also record.

    It ends the script with Enough, after the same forward pass on all ranks.
    """

    def __init__(self, settings: RankSettings, rank: int) -> None:
        self._settings = settings
        self._rank = rank
        self._loaders: list[dict[str, Any]] = []
        self._number: dict[int, int] = {}
        self._kept: list[Any] = []  # loaders are kept alive, so that no id is used twice
        self._passes: list[_LoaderPass] = []
        self._source: _LoaderPass | None = None
        """The pass that has given the newest batch for training: one that was taken while autograd was on."""

        self._forwards = 0
        self._model: nn.Module | None = None
        self._steps: list[dict[str, Any]] = []
        self._taken = 0
        self._start: dict[str, str] = {}
        self._batches: list[list[Any]] = []
        self._contents: dict[str, str] = {}
        self.gradients: dict[str, Any] = {}
        self._draws = Draws(self._on_forward)
        self._autocasts = Autocasts()
        self._stream: str | None = None
        """The random stream when a loader has given the newest batch."""
        self._drew = False
        """Whether the script has drawn random numbers for its first step."""
        self._still_passes = 0
        self._open = ExitStack()
        self._still = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(self._draws)
        self._still.enter_context(without_dropout(hold_batchnorm=True))
        self._still.enter_context(self._autocasts)
        for hook in (register_optimizer_step_pre_hook(self._before_step), register_optimizer_step_post_hook(self._after_step)):
            self._open.callback(hook.remove)
        iterators = _class_of_iterators()
        self._replace(DataLoader, "__init__", self._loader_init)
        self._replace(DataLoader, "__iter__", self._loader_iter)
        if (methods := private_names.index_methods(iterators)) is not None:
            self._replace(iterators, methods[0], self._iter_reset)
            self._replace(iterators, methods[1], self._iter_next_index)
        self._replace(iterators, "__next__", self._iter_next)
        self._replace(Loader, "__init__", self._own_init)
        self._replace(Loader, "__iter__", self._own_iter)
        self._replace(torch, "save", self._save)
        self._replace(Checkpoints, "__init__", self._checkpoints_init)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching."""
        self._still.close()
        self._open.close()

    def _replace(self, owner: Any, name: str, by: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, by(original))
        self._open.callback(setattr, owner, name, original)

    # --- forward passes and steps

    def _on_forward(self, module: nn.Module, inputs: Any) -> None:
        self._count()
        self._model = module
        if self._source is not None:
            self._source.trained = True
            self._batches += self._source.take()
        elif rows := _rows_of(inputs):  # no loader: the script makes its batches itself
            self._batches.append(rows)

    def _count(self) -> None:
        self._forwards += 1
        if self._forwards > 2 * self._settings.cut + 3:
            raise Enough(0)

    def _count_missing(self, source: _LoaderPass, missing: int) -> None:
        """Forward passes that other ranks take in this step, and this rank does not, because it has fewer micro-batches: count
        them, so that all ranks end in the same step."""
        if torch.is_grad_enabled() and (source.trained or self._model is None):
            for _ in range(missing):
                self._count()
                self._batches.append([])

    def _took(self, batches: _LoaderPass) -> None:
        if torch.is_grad_enabled():
            self._source = batches

    def _note_draws(self) -> None:
        """Before the first step: whether the script has drawn since `_note_stream`."""
        if self._stream is not None and not self._taken:
            self._drew = self._drew or stream() != self._stream

    def _note_stream(self) -> None:
        """After a loader has given something: it may have drawn."""
        self._stream = stream() if not self._taken else None

    def _names(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        model = self._model if self._model is not None else _module_with(parameters)
        known = model.named_parameters() if model is not None else ()
        names = {id(p): name.removeprefix("module.") for name, p in known}
        return {names.get(id(p), f"parameter {number}"): p for number, p in enumerate(parameters)}

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        named = self._names(optimizer)
        if not self._start:
            self._start = digests(named)
        if len(self._steps) < _STEPS:
            grads = {name: p.grad.detach() for name, p in named.items() if p.grad is not None}
            grads = {name: grad.to_dense() if grad.is_sparse else grad for name, grad in grads.items()}
            self._steps.append({"forwards": self._forwards, "gradients": digests(grads)})
            if not self._taken:
                self.gradients = {name: g.to("cpu", torch.float64).numpy().copy() for name, g in grads.items()}
                own = str(next(iter(named.values())).dtype).removeprefix("torch.")
                self._dtype = self._autocasts.dtype or own
        if not self._taken:
            self._note_draws()
            self._still_passes = len(self._draws.passes)
            self._still.close()
        self._taken += 1

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._taken == len(self._steps):
            self._steps[-1]["parameters"] = digests(self._names(optimizer))

    # --- torch's DataLoader

    def _loader_init(self, original: Any) -> Any:
        instrument = self

        def init(self: Any, dataset: Any, batch_size: int | None = 1, *args: Any, **kwargs: Any) -> None:
            ours = type(dataset).__module__.startswith("rankwise.")
            if batch_size is not None and kwargs.get("batch_sampler") is None and not ours:
                ranks, asked, number = instrument._settings.ranks, batch_size, len(instrument._loaders)
                known = instrument._settings.batches[number : number + 1]
                whole = known[0] if known else max(asked // ranks, 1) * ranks
                batch_size = max(whole // ranks, 1)
                instrument._loaders.append({"asked": asked, "whole": whole})
                instrument._number[id(self)] = number
                instrument._kept.append(self)
            original(self, dataset, batch_size, *args, **kwargs)

        return init

    def _loader_iter(self, original: Any) -> Any:
        instrument = self

        def iter(self: Any) -> Any:
            instrument._note_draws()
            iterator = original(self)
            instrument._note_stream()
            if not type(self.dataset).__module__.startswith("rankwise."):
                iterator._rankwise_pass = instrument._begin_pass(self)
            return iterator

        return iter

    def _begin_pass(self, loader: Any) -> _LoaderPass:
        if id(loader) not in self._number:
            self._number[id(loader)] = len(self._loaders)
            self._loaders.append({"asked": None, "whole": 0})
            self._kept.append(loader)
        number, sampler = self._number[id(loader)], getattr(loader, "sampler", None)
        spread = hasattr(sampler, "set_epoch") and hasattr(sampler, "num_replicas")
        self._loaders[number] |= {
            "sampler": type(sampler).__name__,
            "shuffle": bool(getattr(sampler, "shuffle", type(sampler).__name__ == "RandomSampler")),
            "spread": spread,
            "padding": max(getattr(sampler, "total_size", 0) - len(loader.dataset), 0) if spread else 0,
        }
        self._passes.append(_LoaderPass(number))
        return self._passes[-1]

    def _iter_reset(self, original: Any) -> Any:
        def reset(self: Any, *args: Any, **kwargs: Any) -> None:
            self._rankwise_ahead = deque()
            original(self, *args, **kwargs)

        return reset

    def _iter_next_index(self, original: Any) -> Any:
        def next_index(self: Any) -> Any:
            index = original(self)
            if not hasattr(self, "_rankwise_ahead"):
                self._rankwise_ahead = deque()
            self._rankwise_ahead.append(index)
            return index

        return next_index

    def _look_into(self, indices: Sequence[int], batch: Any) -> None:
        """Record the content of the first samples: an index may have another content on another rank."""
        rows = row_digests(batch) if not self._taken else []
        if len(rows) == len(indices):
            self._contents |= dict(zip(map(str, indices), rows, strict=True))

    def _iter_next(self, original: Any) -> Any:
        instrument = self

        def next(self: Any) -> Any:
            mine: _LoaderPass | None = getattr(self, "_rankwise_pass", None)
            if mine is None:
                return original(self)
            handed = len(mine.samples)
            if handed >= (instrument._settings.cut if mine.trained else _OTHER_BATCHES):
                raise StopIteration
            instrument._note_draws()
            batch = original(self)
            instrument._note_stream()
            ahead = getattr(self, "_rankwise_ahead", None)
            index = ahead.popleft() if ahead else None
            known = isinstance(index, list) and all(isinstance(i, int) for i in index)
            if known and index is not None:
                mine.samples.append(list(index))
                instrument._look_into(index, batch)
            else:
                mine.samples.append([digest(t) for t in tensors_in(batch)])
            instrument._took(mine)
            return batch

        return next

    # --- rankwise's Loader

    def _own_init(self, original: Any) -> Any:
        """Use an odd number of samples: parts of equal size would hide a mean of means."""

        def init(loader: Any, *args: Any, global_batch_size: Any = None, **kwargs: Any) -> None:
            if isinstance(global_batch_size, int) and global_batch_size > 2:
                global_batch_size -= global_batch_size % 2 == 0
            original(loader, *args, global_batch_size=global_batch_size, **kwargs)

        return init

    def _own_iter(self, original: Any) -> Any:
        def iter(loader: Loader) -> Iterator[list[Any]]:
            mine = _LoaderPass(len(self._loaders))
            self._loaders.append({"asked": None, "whole": 0, "sampler": "rankwise.Loader", "shuffle": False, "spread": True,
                                  "padding": 0})  # fmt: skip
            self._passes.append(mine)
            for micro_batches in original(loader):
                # A position in a rank's own stream says nothing to the other ranks.
                split = loader.is_split
                indices: list[list[Any]] = [row_digests(batch) for batch in micro_batches] if split else loader.indices
                for some, batch in zip(indices, micro_batches, strict=True):
                    mine.samples.append(some)
                    self._look_into(some, batch)
                mine.ahead = len(micro_batches)
                self._count_missing(mine, loader.accumulate - len(micro_batches))
                self._took(mine)
                self._note_stream()
                yield micro_batches
                self._note_draws()

        return iter

    # --- what the script writes to disk

    def _save(self, original: Any) -> Any:
        def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
            original(obj, self._aside(f) if isinstance(f, str | os.PathLike) else f, *args, **kwargs)

        return save

    def _checkpoints_init(self, original: Any) -> Any:
        def init(checkpoints: Any, folder: Any = None, **kwargs: Any) -> None:
            original(checkpoints, Path(self._settings.folder, "saved", f"ranks-{self._settings.ranks}"), **kwargs)

        return init

    def _aside(self, path: Any) -> Path:
        folder = Path(self._settings.folder, "saved", f"rank-{self._rank}")
        folder.mkdir(parents=True, exist_ok=True)
        return folder / Path(path).name

    # --- afterwards

    def record(self, ended: str) -> dict[str, Any]:
        """Everything except the gradients. `ended`: how the script ended."""
        modules = self._model.named_modules() if self._model is not None else ()
        norms = [name or type(m).__name__ for name, m in modules if _mixes(m)]
        wrapped = [o for o in gc.get_objects() if type(o) is DistributedDataParallel]
        inner = {id(m) for o in wrapped for m in o.modules()} - set(map(id, wrapped))
        draws = [(p.at, p.layers) for p in self._draws.passes]
        return {
            "rank": self._rank, "ranks": self._settings.ranks, "ended": ended, "forwards": self._forwards,
            "loaders": self._loaders, "passes": [vars(p) for p in self._passes], "batches": self._batches,
            "contents": self._contents,
            "start": self._start, "steps": self._steps, "taken": self._taken, "dtype": getattr(self, "_dtype", "float32"),
            "drew": self._drew,
            "draws": draws[self._still_passes :], "still": draws[: self._still_passes],
            "norms": [name.removeprefix("module.") for name in norms],
            "bypassed": self._model is not None and id(self._model) in inner, "wrapped": len(wrapped),
        }  # fmt: skip


def _module_with(parameters: Sequence[torch.Tensor]) -> nn.Module | None:
    """The module that has most of these parameters: the model, on a rank that has had no sample yet."""
    wanted = set(map(id, parameters))
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    return max(modules, key=lambda m: len(wanted & set(map(id, m.parameters()))), default=None)


def _rows_of(inputs: Any) -> list[str]:
    """Digests of the rows of a model's inputs. Empty for what another module has computed, and for tensors without plain rows
    (sparse, nested, of torch.func)."""
    tensors = list(tensors_in(inputs))
    if any(t.requires_grad or t.layout is not torch.strided or (t.dim() and len(t) > _MOST_ROWS) for t in tensors):
        return []
    try:
        return row_digests(tensors)
    except (RuntimeError, TypeError):
        return []


def _mixes(module: nn.Module) -> bool:
    return isinstance(module, private_names.batch_norms()) and not isinstance(module, nn.SyncBatchNorm)


def _class_of_iterators() -> Any:
    """The common base class of torch's DataLoader iterators, with and without workers."""
    dataset: Any = [0]
    iterator = iter(DataLoader(dataset, generator=torch.Generator()))  # its own generator, because an iterator draws from it
    return next(kind for kind in type(iterator).__mro__ if "__next__" in vars(kind))
