"""Preparing a model for training (device, batch norms), and its modes around an evaluation.

model = prepare(model, device, world)
with evaluating(model): ...

The parameters stay the same objects.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rankwise.dist import comm, log, private_names, seed
from rankwise.dist.divided import how_divided
from rankwise.dist.world import World
from rankwise.errors import ConfigError

_SYNCED_ON = ("cuda", "xpu", "hpu")  # the devices on which torch's SyncBatchNorm works


def check_unwrapped(model: nn.Module) -> None:
    """Raises ConfigError for a model that synchronises the ranks itself, or is divided over them."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ConfigError(
            f"the model is wrapped in {type(model).__name__}, but here the strategy synchronises the ranks; give the module "
            "inside (model.module)"
        )
    if (how := how_divided(model)) is not None:
        raise ConfigError(
            f"each rank has only a part of the model ({how}), but here each rank trains a whole copy; give the model before "
            "it was divided, or train it in your own loop without a strategy, as with torchrun"
        )


def give_own_elements(model: nn.Module) -> None:
    """Give expanded tensors (`torch.zeros(1).expand(4)`) memory for each element, as `model.to` of an accelerator does: torch
    copies nothing into one that has not, neither rank 0's values nor those of a checkpoint."""
    _give_own_elements(itertools.chain(model.parameters(), model.buffers()))


@torch.no_grad()
def _give_own_elements(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        if is_lazy(tensor) or tensor.layout != torch.strided or 0 not in tensor.stride():
            continue
        if any(step == 0 and n > 1 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
            tensor.set_(tensor.clone(memory_format=torch.contiguous_format))  # type: ignore[call-overload]


def prepare(model: nn.Module, device: torch.device, world: World) -> nn.Module:
    """Move the model, and check its batch norms. Raises ConfigError for a SyncBatchNorm on the CPU."""
    model = model.to(device)
    if world.world_size > 1 and not is_synced(model) and _trains_batch_norm(model):
        log.say(
            "BatchNorm normalises over each rank's own part of a batch, so results depend on the number of ranks; on GPUs, "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) uses the whole batch"
        )
    if world.world_size > 1 and any(map(_limits_its_norms, model.modules())):
        log.warn(
            "Embedding(max_norm=...) changes its weights in the forward pass, for the samples of each rank, so the ranks will "
            "differ; remove max_norm, and limit the norms of the weight in an action, after each step"
        )
    if world.world_size > 1 and any(getattr(module, "scale_grad_by_freq", False) is True for module in model.modules()):
        log.warn(
            "Embedding(scale_grad_by_freq=True) divides by how often an index is in a rank's part of a batch, so results "
            "depend on the number of ranks"
        )
    if is_synced(model) and device.type not in _SYNCED_ON:
        raise ConfigError(
            f"the model has a SyncBatchNorm, which works only on GPUs, and this rank uses {device.type}; convert it only "
            'if rankwise.local_device().type is "cuda"'
        )
    return model


def _limits_its_norms(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None


def _trains_batch_norm(model: nn.Module) -> bool:
    """Whether a batch norm uses the statistics of the batch. A model that is completely in evaluation mode is trained in
    training mode."""
    kinds = private_names.batch_norms()
    modes = [module.training for module in model.modules() if isinstance(module, kinds)]
    return any(modes) or (bool(modes) and not any(module.training for module in model.modules()))


def buffers_of_batch_norms(model: nn.Module) -> set[str]:
    """The names of the buffers that its batch norms have."""
    norms = ((at, module) for at, module in model.named_modules() if isinstance(module, private_names.batch_norms()))
    return {name for at, module in norms for name, _ in module.named_buffers(prefix=at)}


def is_synced(model: nn.Module) -> bool:
    """Whether its forward pass waits for other ranks: then each rank must have a sample in every micro-batch."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def check_synced(model: nn.Module, fewest: int, parts: int) -> None:
    """If a forward pass waits for other ranks, every rank must have one. Raises ConfigError if the smallest global batch, of
    `fewest` samples, has no sample for some of `parts` micro-batches."""
    if is_synced(model) and fewest < parts:
        raise ConfigError(
            f"SyncBatchNorm needs a sample on every rank, but the last global batch of an epoch may have only {fewest} "
            f"for {comm.world_size()} ranks; give Loader(drop_last=True), or choose another batch size"
        )


def check_divided(model: nn.Module, fewest: Callable[[], int]) -> None:
    """Each forward pass of a divided model waits for all ranks. Raises ConfigError if the smallest global batch, of `fewest()`
    samples, has no sample for some of them."""
    how = how_divided(model)
    if how is not None and fewest() < comm.world_size():
        raise ConfigError(
            f"each rank has only a part of the model ({how}), so each needs a sample in every batch, but the "
            f"last global batch may have only {fewest()} for {comm.world_size()} ranks; change the batch size"
        )


def begin_training(model: nn.Module) -> bool:
    """If all modules are in evaluation mode, switch to training mode and return True. If only some are, this is intended, and
    stays."""
    if any(module.training for module in model.modules()):
        return False
    model.train()
    return True


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, the model is in evaluation mode; afterwards each module has its own mode again, and each buffer and gradient its
    value. Random numbers drawn inside do not change the training's streams."""
    with unmoved(model), gradients_kept(model), buffers_kept(model):
        model.eval()
        yield


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[dict[int, torch.Tensor]]:
    """Afterwards the buffers are the same objects with the same values, also those that a forward pass has replaced. Yields
    their values now, by the `id` of the buffer."""
    kept = [(module, name, buffer) for module in model.modules() for name, buffer in module.named_buffers(recurse=False)]
    buffers = {id(buffer): buffer for _, _, buffer in kept}
    _give_own_elements(buffers.values())
    values = {key: buffer.detach().clone() for key, buffer in buffers.items()}
    try:
        yield values
    finally:
        for module, name, buffer in kept:
            buffer.copy_(values[id(buffer)])
            if dict(module.named_buffers(recurse=False)).get(name, buffer) is not buffer:
                setattr(module, name, buffer)


@contextlib.contextmanager
def gradients_kept(model: nn.Module) -> Iterator[None]:
    """Inside, parameters have no gradient, and `backward` may give them one; afterwards each has its own again."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards the attributes of each module are the same objects again: a count of its calls, the hidden state that a
    recurrent layer keeps for the next batch. What was written into such an object stays."""
    kept = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, values in kept:
            for name in attributes.keys() - values.keys():
                del attributes[name]
            attributes.update(values)


@contextlib.contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Restore the mode of each module and the random streams afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    with seed.streams_kept():
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
