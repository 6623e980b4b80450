"""A Trainer from one flat list of settings: each goes to its part. For tests that vary settings of all parts.

trainer = trainer_of(model, optimizer, step, data, max_steps=5, every_s=1e9, keep_last=1, num_workers=1, log_every=1)
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import rankwise
from rankwise.actions import CheckReplicas, Log, Plateau, scale_lr

OF_EVALUATION = {"eval_fn": "fn", "eval_metrics": "metrics", "eval_every": "every_steps"}
BESIDE = {"scheduler_metric", "lr_scale", "fresh", "log_every", "on_divergence"}


def _own(part: Any, settings: dict[str, Any], beside: set[str]) -> dict[str, Any]:
    """The settings that belong to the part and not to the Trainer; they are removed from `settings`."""
    names = inspect.signature(part).parameters.keys() - beside
    return {name: settings.pop(name) for name in list(settings) if name in names}


def trainer_of(model: Any, optimizer: Any, step_fn: Any, train_data: Any, **settings: Any) -> rankwise.Trainer:
    of_trainer = set(inspect.signature(rankwise.Trainer).parameters)
    flat = {name: settings.pop(name) for name in BESIDE & settings.keys()}
    if (eval_data := settings.pop("eval_data", None)) is not None:
        given = {theirs: settings.pop(name) for name, theirs in OF_EVALUATION.items() if name in settings}
        settings["evaluate"] = rankwise.Evaluate(eval_data, **given)
    actions = list(settings.pop("actions", ()))
    if flat.get("log_every") is not None:
        actions.append(Log(flat["log_every"]))
    if "on_divergence" in flat:
        actions.append(CheckReplicas(flat["on_divergence"]))
    if flat.get("scheduler_metric") is not None:
        actions.append(Plateau(settings.pop("scheduler"), flat["scheduler_metric"]))
    if flat.get("lr_scale", "none") != "none":
        rankwise.init()
        scale_lr(optimizer, flat["lr_scale"], settings.get("scheduler"))
    if (compile_ := settings.pop("compile", None)) is not None:
        model.compile(**compile_)
    if (fused := settings.pop("fused", None)) is not None:
        for group in optimizer.param_groups:
            group["fused"] = fused
    if (reduction := settings.pop("reduction", None)) is not None:
        settings["sync"] = rankwise.AllReduce(overlap={"flat": False, "ddp": True}.get(reduction))
    for_checkpoints = _own(rankwise.Checkpoints, settings, of_trainer)
    if for_checkpoints:
        settings["checkpoints"] = rankwise.Checkpoints(**for_checkpoints)
    for_loader = _own(rankwise.Loader, settings, of_trainer)
    if for_loader:
        shared = ("batch_size", "global_batch_size", "accumulate", "seed")
        for_loader |= {name: settings.pop(name) for name in shared if name in settings}
        train_data = rankwise.Loader(train_data, **for_loader)
    trainer = rankwise.Trainer(model, optimizer, step_fn, train_data, actions=actions, **settings)
    if flat.get("fresh"):
        trainer.fit = functools.partial(trainer.fit, fresh=True)  # type: ignore[method-assign]
    return trainer
