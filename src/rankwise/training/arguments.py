"""Arguments of a script for a training: combined, or refused before anything is created.

loader = as_loader(train_data, max_epochs=3, batch_size=16);  check_length(loader.max_epochs, max_steps)
"""

from __future__ import annotations

from typing import Any

from rankwise.data import Loader
from rankwise.errors import ConfigError

MOVED = {
    **dict.fromkeys(("eval_data", "eval_fn"), "it is now evaluate=Evaluate(data, fn)"),
    "eval_metrics": "it is now evaluate=Evaluate(data, fn, metrics=...)",
    "eval_every": "it is now evaluate=Evaluate(data, fn, every_steps=...)",
    "batch_tokens": "it is now Loader(dataset, batches=LengthBatches(tokens=...))",
    "global_batch_tokens": "it is now Loader(dataset, batches=LengthBatches(global_tokens=...))",
    "lengths": "it is now Loader(dataset, batches=LengthBatches(tokens=..., lengths=...))",
    "batch_sampler": "it is now Loader(dataset, batches=...)",
    "drop_last": "it is now Loader(dataset, drop_last=...)",
    "uneven": "it is now Loader(dataset, uneven=...)",
    **dict.fromkeys(("workers", "num_workers"), "it is now Loader(dataset, num_workers=...)"),
    "collate_fn": "it is now Loader(dataset, collate_fn=...)",
    "save_every_s": "it is now checkpoints=Checkpoints(every_s=...)",
    "keep_last": "it is now checkpoints=Checkpoints(keep_last=...)",
    "keep_best": "it is now checkpoints=Checkpoints(keep_best=...)",
    "larger_is_better": "it is now checkpoints=Checkpoints(keep_best=..., larger_is_better=...)",
    "keep_steps": "it is now checkpoints=Checkpoints(at_steps=...)",
    "keep_younger_than_s": "it is now checkpoints=Checkpoints(keep_younger_than_s=...)",
    "background_saves": "it is now checkpoints=Checkpoints(background=...)",
    "sharded_saves": "it is now checkpoints=Checkpoints(sharded=...)",
    "checkpoint_scope": "it is now checkpoints=Checkpoints(scope=...)",
    "checkpoint_mirror": "it is now checkpoints=Checkpoints(mirror=...)",
    "log_every": "it is now actions=[rankwise.actions.Log(every_steps=...)]",
    "scheduler_metric": "it is now actions=[rankwise.actions.Plateau(scheduler, metric)], without scheduler=...",
    "on_divergence": "it is now actions=[rankwise.actions.CheckReplicas(on_divergence=...)]",
    "lr_scale": "call rankwise.actions.scale_lr(optimizer, rule) after rankwise.init(), before the Trainer",
    "reduction": "it is now sync=AllReduce(overlap=...): True for ddp, False for flat",
    "compile": "call model.compile() before",
    "fused": "give it to the optimizer: torch.optim.AdamW(..., fused=True)",
    "sync_batchnorm": "call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before, on GPUs",
    "fresh": "it is now trainer.fit(fresh=True)",
}
"""Arguments of earlier versions, with what to write."""

ELSEWHERE = {
    **dict.fromkeys(("devices", "accelerator", "num_nodes", "gpus"), "type it: rankwise run --nproc 4 train.py"),
    "strategy": "it is sync=...; by default the exact gradient",
    "gradient_clip_val": "it is clip_norm",
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), "it is accumulate"),
    **dict.fromkeys(("val_dataloaders", "val_data", "eval_dataset"), "it is evaluate=Evaluate(dataset, fn)"),
    **dict.fromkeys(("val_check_interval", "check_val_every_n_epoch"), "it is evaluate=Evaluate(dataset, fn, every_steps=...)"),
    "callbacks": "it is actions=[...]: functions of the state, run after each step",
    "logger": "metrics are written to metrics.jsonl and for TensorBoard; for another writer use actions=[...]",
    "log_every_n_steps": "it is actions=[rankwise.actions.Log(every_steps=...)]",
    "default_root_dir": "it is run_dir, or rankwise run --name NAME",
    **dict.fromkeys(("ckpt_path", "resume_from_checkpoint"), "fit() resumes the run; fit(fresh=True) starts from scratch"),
    **dict.fromkeys(("shuffle", "pin_memory"), "it is Loader(dataset, ...)'s argument"),
}
"""The names of other libraries for an argument, with what to write instead."""

NOT_OF_FIT = dict.fromkeys(
    ("model", "train_data", "train_dataloaders", "datamodule", "max_epochs", "max_steps"), "it is an argument of Trainer(...)"
)


def check_length(max_epochs: int | None, max_steps: int | None) -> None:
    if max_epochs is None and max_steps is None:
        raise ConfigError("say how long to train: max_epochs=... or max_steps=...")


def as_loader(train_data: Any, max_epochs: int | None, **given: Any) -> Loader:
    """The given Loader, or a new one for the dataset. Raises ConfigError if the Trainer and the Loader get the same
    argument."""
    given = {name: value for name, value in given.items() if value is not None}
    if not isinstance(train_data, Loader):
        return Loader(train_data, max_epochs=max_epochs, **given)
    for name in given:
        raise ConfigError(f"Trainer({name}={given[name]}), but the Loader decides this: give {name} to the Loader only")
    if max_epochs is not None:
        if train_data.max_epochs is not None:
            raise ConfigError(
                f"Trainer(max_epochs={max_epochs}) and Loader(max_epochs={train_data.max_epochs}) say the same: remove one"
            )
        train_data.max_epochs = max_epochs
    return train_data
