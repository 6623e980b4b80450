"""The private names of torch and of the standard library that rankwise uses, and what it does if one is missing.

    norms = private_names.norms(gradients, torch.float32)

No other file of rankwise uses a private name, except agent/private_names.py (for the warm process and what it loads). Any
release may remove such a name: then one feature is off or slower, and the main rank reports it once. Only functions import
torch here, because the launcher imports this file too, and must not wait for torch.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch import nn
    from torch.optim import Optimizer

NAMES = {
    "_args_from_interpreter_flags": "",
    "_foreach_norm": "the norms of gradients are taken one by one, which is slower",
    "_foreach_mul_": "gradients are scaled one by one, which is slower",
    "_cdata": "",
    "_version": "each gradient is copied once more in each step",
    "_engine_run_backward": "the backward pass takes longer",
    "_optimizer_step_pre_hooks": "",
    "_optimizer_step_post_hooks": "",
    "_global_optimizer_pre_hooks": "the optimizer's step takes longer",
    "_global_optimizer_post_hooks": "the optimizer's step takes longer",
    "_is_profiler_enabled": "the optimizer's step takes longer",
    "_use_grad_for_differentiable": "the optimizer's step takes longer",
    "_opt_called": "",
    "_disable_dynamo": "",
    "__dynamo_disable": "",
    "_fused_sgd_": "the optimizer's step takes longer",
    "_fused_adam_": "the optimizer's step takes longer",
    "_fused_adamw_": "the optimizer's step takes longer",
    "_foreach_add_": "the optimizer's step takes longer",
    "_push_all_rebuilt_params": "gradients are summed after the backward pass, not during it",
    "_rebuild_buckets": "gradients are summed after the backward pass, not during it",
    "_parameters": "the search for replaced layers takes longer in each step",
    "_modules": "the search for replaced layers takes longer in each step",
    "_non_persistent_buffers_set": "buffers that are not in the state_dict are averaged and saved for each rank, too",
    "_load_from_state_dict": "a model is loaded from a checkpoint more slowly",
    "_load_state_dict_pre_hooks": "a model is loaded from a checkpoint more slowly",
    "_optimizer_state_dict_pre_hooks": "an optimizer is loaded from a checkpoint more slowly",
    "_optimizer_state_dict_post_hooks": "an optimizer is loaded from a checkpoint more slowly",
    "_optimizer_load_state_dict_pre_hooks": "an optimizer is loaded from a checkpoint more slowly",
    "_worker_info": "an iterable dataset is read in the training process, without workers",
    "_BatchNorm": "a batch norm is recognized only if it is one of torch's layers or derives from one",
    "_Loss": "the self-test recognizes a loss only if it is one of torch's or derives from one",
    "_reset": "the self-test compares the samples of a DataLoader by their content alone",
    "_next_index": "the self-test compares the samples of a DataLoader by their content alone",
    "_saved_reduction": "",
    "_get_backend": "the time limit of a process group that the script has made is not known: 30 minutes",
    "_timeout": "the time limit of a process group that the script has made is not known: 30 minutes",
}
"""Each name, and what the main rank prints if a release does not have it; empty if nothing changes, or if a script's objects
may lack it too."""

_MISSING = object()
_OPTIMIZER_HOOKS = (
    "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks", "_optimizer_load_state_dict_pre_hooks",
)  # fmt: skip
_SETTLE = ("_push_all_rebuilt_params", "_rebuild_buckets")


def _find(owner: object, name: str, default: Any = None) -> Any:
    """The value of this owner's private name, or the default if it is missing. Every other function here calls this one."""
    found = getattr(owner, name, _MISSING)
    if found is not _MISSING:
        return found
    if NAMES[name]:
        from rankwise.dist import log

        log.warning_once(f"this torch has no {name}: {NAMES[name]}")
    return default


# --- the interpreter


def interpreter_flags() -> list[str]:
    """The options with which this Python was started (-O -W -X ...), to start another one in the same way."""
    flags: Callable[[], list[str]] | None = _find(subprocess, "_args_from_interpreter_flags")
    if flags is not None:
        return flags()
    from multiprocessing.spawn import get_command_line  # the same flags, but its import delays every launch

    return get_command_line()[1:-3]


# --- process groups


def timeout(group: Any, device: torch.device) -> timedelta | None:
    """The time limit of a process group's collectives on this device. None if it is unknown."""
    backend_of = _find(group, "_get_backend")
    options = getattr(backend_of(device), "options", None) if backend_of is not None else None
    found: timedelta | None = _find(options, "_timeout") if options is not None else None
    return found


# --- the data


def address(generator: torch.Generator) -> int | None:
    """The address of the object in memory. If it is unknown, each batch takes some microseconds more."""
    found: int | None = _find(generator, "_cdata")
    return found


# --- a step


def norms(gradients: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The 2-norm of each tensor. `nn.utils.get_total_norm` takes no dtype: norms of bfloat16 would be bfloat16."""
    import torch

    foreach = _find(torch, "_foreach_norm")
    if foreach is not None:
        return foreach(gradients, 2, dtype)  # type: ignore[no-any-return]
    return [torch.linalg.vector_norm(gradient, 2, dtype=dtype) for gradient in gradients]


def scale(gradients: list[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply each tensor in place, by a number or a tensor that has one. With public names only, this would be one kernel per
    tensor on a GPU."""
    import torch

    foreach = _find(torch, "_foreach_mul_") if len(gradients) > 1 else None  # for one tensor it takes longer
    if foreach is not None:
        foreach(gradients, factor)
    else:
        for gradient in gradients:
            gradient.mul_(factor)


def version_of() -> Callable[[torch.Tensor], int] | None:
    """A function that returns how often a tensor was written to. If there is none, a gradient must not be a view before the
    backward pass: then the existence of a gradient shows that the pass has set it."""
    import torch

    return attrgetter("_version") if _find(torch.Tensor, "_version") is not None else None


def backward() -> Callable[[torch.Tensor, torch.Tensor], object]:
    """A function that does what `tensor.backward(gradient)` does, but leaves it to the engine to compare the two, which saves
    20 us. If torch does not have it, the method itself."""
    import torch
    from torch.autograd import graph
    from torch.overrides import has_torch_function_unary

    run = _find(graph, "_engine_run_backward")
    return torch.Tensor.backward if run is None else partial(_backward, run, has_torch_function_unary)


def _backward(run: Any, is_special: Callable[[object], bool], tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    if is_special(tensor):  # a subclass, or a mode that is on
        tensor.backward(gradient)  # type: ignore[no-untyped-call]
    else:
        run((tensor,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def watch_on_steps(optimizer: Optimizer, own_hook: Callable[..., Any]) -> Callable[[], bool] | None:
    """A function that returns whether something sees the next step of this optimizer: a hook (other than `own_hook`, which must
    be there), or a profiler. None if this is not known."""
    from torch.autograd import profiler

    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    names_of_all = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
    module = sys.modules[_optimizer_class().__module__]
    of_all = [_find(module, name) for name in names_of_all]
    if None in [*(_find(optimizer, name) for name in names), *of_all, _find(profiler, "_is_profiler_enabled")]:
        return None
    own, profiled, (before_all, after_all) = attrgetter(*names), attrgetter("_is_profiler_enabled"), of_all

    def is_watched() -> bool:
        before, after = own(optimizer)
        return bool(after or before_all or after_all or profiled(profiler) or [*before.values()] != [own_hook])

    return is_watched


def unwrapped_step(step: Callable[..., Any]) -> Callable[[Optimizer], Any] | None:
    """What is inside of the two functions that torch wraps around the step of each of its optimizers: one is for hooks and
    profilers, one switches gradients off. None if this step is not wrapped in just these."""
    kind = _optimizer_class()
    switch_off = _find(sys.modules[kind.__module__], "_use_grad_for_differentiable")
    if switch_off is None:
        return None
    for wrapper in (kind.profile_hook_step, switch_off):
        if getattr(step, "__code__", None) is not wrapper(kind.step).__code__:
            return None
        step = vars(step)["__wrapped__"]
    return step


def note_step(optimizer: Any, step: Any) -> bool:
    """Note for the schedulers of this optimizer that it steps, as the `step` does that they have given it. Otherwise they would
    warn. False if `step` does this in another way."""
    if "_opt_called" not in step.__code__.co_names:
        return False
    optimizer._opt_called = True
    return True


def postpone_compiler() -> None:
    """Optimizers without torch's compiler, unless something imports it: torch itself imports it for the first one, to exclude
    some of its methods from what is compiled, which takes as long as the import of torch."""
    import torch

    if "torch._dynamo" in sys.modules or any(isinstance(finder, _AtCompiler) for finder in sys.meta_path):
        return
    exclude = _find(torch, "_disable_dynamo")
    if exclude is None:
        return
    excluded = exclude(postpone_compiler).__code__
    methods = [method for method in vars(_optimizer_class()).values() if getattr(method, "__code__", None) is excluded]
    inner = [method.__wrapped__ for method in methods]
    for function in inner:
        setattr(function, "__dynamo_disable", function)
    sys.meta_path.insert(0, _AtCompiler(inner))


class _AtCompiler:
    """A finder of modules: as soon as the compiler is imported, torch may exclude these methods itself."""

    def __init__(self, methods: list[Any]) -> None:
        self._methods = methods

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> None:
        if name == "torch._dynamo":
            sys.meta_path.remove(self)
            for method in self._methods:
                delattr(method, "__dynamo_disable")


def _optimizer_class() -> Any:
    from torch.optim import Optimizer

    return Optimizer


def fused_kernel(name: str) -> Callable[..., object] | None:
    import torch

    found: Callable[..., object] | None = _find(torch, name)
    return found


def can_settle_buckets(reducer: type) -> bool:
    """Whether DDP's reducer can fix its buckets at once. Otherwise rankwise does not use it: it would collect the order of all
    gradients forever."""
    return all(_find(reducer, name) is not None for name in _SETTLE)


def settle_buckets(reducer: Any) -> None:
    for name in _SETTLE:
        getattr(reducer, name)()


def homes(module: nn.Module) -> tuple[dict[str, Any], ...]:
    """The dicts in which a module keeps its own parameters and its children. Empty if one is missing or not a dict, as in
    TorchScript: then all parameters must be listed to see a change."""
    found = (_find(module, "_parameters"), _find(module, "_modules"))
    return found if all(isinstance(home, dict) for home in found) else ()


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are in the state_dict, by name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}  # each once, also one that two modules share
    for prefix, module in model.named_modules():
        left_out = _find(module, "_non_persistent_buffers_set", ())
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in left_out:
                found.setdefault(id(buffer), (name, buffer))
    return dict(found.values())


# --- a checkpoint


def only_copies(module: nn.Module) -> bool:
    """Whether load_state_dict of this module (without its children) does nothing but copy. False if this is not known."""
    from torch import nn

    load, hooks = _find(module, "_load_from_state_dict"), _find(module, "_load_state_dict_pre_hooks", True)
    # Batch norms also add a count, which older files do not have.
    plain = [_find(kind, "_load_from_state_dict") for kind in (nn.Module, nn.BatchNorm1d)]
    return load is not None and getattr(load, "__func__", None) in plain and not hooks


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether a hook runs when the optimizer's state is read or loaded. True if this is not known."""
    return any(_find(optimizer, name, True) for name in _OPTIMIZER_HOOKS)


# --- data


def can_hide_worker() -> bool:
    """Whether `hidden_worker` works with this torch."""
    return _find(_of_workers(), "_worker_info", _MISSING) is not _MISSING


@contextlib.contextmanager
def hidden_worker() -> Iterator[None]:
    """Hide from a dataset that it is in one of several workers: `get_worker_info()` returns None inside. If this is
    not possible, there must be no workers."""
    module: Any = _of_workers()
    before = _find(module, "_worker_info", _MISSING)
    if before is _MISSING:
        yield
        return
    module._worker_info = None
    try:
        yield
    finally:
        module._worker_info = before


def set_dataset_of_worker(dataset: Any) -> None:
    """In a worker: `get_worker_info().dataset` is this object from now on. No effect if torch does not allow it."""
    from torch.utils.data import get_worker_info

    with contextlib.suppress(AttributeError, TypeError, RuntimeError):
        object.__setattr__(get_worker_info(), "dataset", dataset)


def _of_workers() -> object:
    """The module that knows whether this process is a worker."""
    from torch.utils.data import get_worker_info

    return sys.modules[get_worker_info.__module__]


# --- kinds of layers


def batch_norms() -> tuple[type[nn.Module], ...]:
    """For isinstance: all batch norms. With public names only, those of torch and their subclasses."""
    from torch import nn

    base = _find(nn.modules.batchnorm, "_BatchNorm")
    lazy = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)
    return (base,) if base is not None else (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *lazy)


def losses() -> tuple[type[nn.Module], ...]:
    """For isinstance: all losses. With public names only, those of torch and their subclasses."""
    from torch.nn.modules import loss

    base = _find(loss, "_Loss")
    return (base,) if base is not None else tuple(getattr(loss, name) for name in loss.__all__)


def is_mean(loss: torch.Tensor) -> bool:
    """Whether the last operation of a loss is the mean over its samples, as far as its graph tells."""
    node = loss.grad_fn
    return node is not None and (node.name().startswith("MeanBackward") or _find(node, "_saved_reduction") == 1)


def index_methods(iterators: type) -> tuple[str, str] | None:
    """The two methods of torch's DataLoader iterators that start a pass and that draw the indices of a batch."""
    names = ("_reset", "_next_index")
    return names if all(_find(iterators, name) is not None for name in names) else None
