"""What is done to a model before training: its device, its batch norms; and its modes around an evaluation.

model = prepare(model, device, world)
with evaluating(model): ...

The parameters stay the same objects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from rankwise.dist import comm, log, private_names, seed
from rankwise.dist.world import World
from rankwise.errors import ConfigError

_SYNCED_ON = ("cuda", "xpu", "hpu")  # where torch's SyncBatchNorm works


def check_unwrapped(model: nn.Module) -> None:
    """Raises ConfigError for a model that synchronises itself."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ConfigError(
            f"the model is wrapped in {type(model).__name__}, but here the strategy synchronises the ranks; give the module "
            "inside (model.module)"
        )


def prepare(model: nn.Module, device: torch.device, world: World) -> nn.Module:
    """Move it, and look at its batch norms. Raises ConfigError for a SyncBatchNorm on the CPU."""
    model = model.to(device)
    if world.world_size > 1 and not is_synced(model) and _has_batch_norm(model):
        log.say(
            "BatchNorm normalises by each rank's own part of a batch, so results depend on the number of ranks; on GPUs, "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) uses the whole batch"
        )
    if is_synced(model) and device.type not in _SYNCED_ON:
        raise ConfigError(
            f"the model has a SyncBatchNorm, which works only on GPUs, and this rank uses {device.type}; convert it only "
            'if rankwise.local_device().type is "cuda"'
        )
    return model


def _has_batch_norm(model: nn.Module) -> bool:
    kinds = private_names.batch_norms()
    return any(isinstance(module, kinds) for module in model.modules())


def is_synced(model: nn.Module) -> bool:
    """Whether its forward pass waits for the other ranks: then each must have a sample in every micro-batch."""
    return any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())


def check_synced(model: nn.Module, fewest: int, parts: int) -> None:
    """A forward pass that waits for the other ranks must not be left out on one of them. Raises ConfigError where the smallest
    global batch, of `fewest` samples, has none for some of `parts` micro-batches."""
    if is_synced(model) and fewest < parts:
        raise ConfigError(
            f"SyncBatchNorm needs a sample on every rank, but the last global batch of an epoch may have only {fewest} "
            f"for {comm.world_size()} ranks; give Loader(drop_last=True), or choose another batch size"
        )


def begin_training(model: nn.Module) -> bool:
    """Put a model that is wholly in evaluation mode into training mode; True if it was. A mixture is meant, and stays."""
    if any(module.training for module in model.modules()):
        return False
    model.train()
    return True


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and each module afterwards in its own; what is drawn at random inside does not move the
    training's streams."""
    with unmoved(model):
        model.eval()
        yield


@contextlib.contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """Afterwards each module's mode and the random streams are what they were."""
    modes, streams = [(module, module.training) for module in model.modules()], seed.rng_state()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        seed.set_rng_state(streams)
