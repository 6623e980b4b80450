"""The tiny training loop of run.py, once per library: `train` saves every few steps, `resume` does what its documentation says.

The state is a weight and its momentum, 2 MB each, and the loop's own count. Every element has the value of its step.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rankwise.checkpoint import Checkpoints

NUMBERS = 500_000
EVERY = 3  # steps between two saves
ENDLESS = 100_000


class Board:
    """Memory that the child writes and its parent reads: the last save that was started, and the last that was complete."""

    def __init__(self, memory: Any, at_begin: Callable[[int], None] | None = None) -> None:
        self.memory = memory
        self.at_begin = at_begin

    def read(self) -> tuple[int, int]:
        begun, done = struct.unpack_from("qq", self.memory)
        return begun, done

    def begin(self, step: int) -> None:
        if self.at_begin is not None:
            self.at_begin(step)
        struct.pack_into("q", self.memory, 0, step)

    def done(self, step: int) -> None:
        struct.pack_into("q", self.memory, 8, step)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUMBERS))

    def forward(self, x: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.weight[:4].sum() * x.sum() * 0}


class Count:
    """The own state of the loop."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


def fill(weight: torch.Tensor, optimizer: Any, step: int) -> None:
    """The training step of this test."""
    with torch.no_grad():
        weight.fill_(step)
        optimizer.state[weight]["momentum_buffer"] = torch.full_like(weight, step)


def values(weight: torch.Tensor, optimizer: Any, step: int) -> set[float]:
    """The steps that the elements have as values: a single one if nothing is torn."""
    state = optimizer.state.get(weight, {}).get("momentum_buffer")
    momentum = {float("nan")} if state is None else set(state.detach().unique()[:9].tolist())
    return set(weight.detach().unique()[:9].tolist()) | momentum | {float(step)}


class Saver:
    """A hand-written loop with `save` and `load`."""

    name = ""
    needs = "torch"
    late = 0  # the number of steps between a save that is certainly complete and the one that has just returned

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model, self.count = Model(), Count()
        self.optimizer = optimizer_of(self.model)

    def save(self) -> None:
        raise NotImplementedError

    def load(self) -> bool:
        raise NotImplementedError

    def finish(self) -> None:
        pass

    def train(self, board: Board, steps: int) -> None:
        self.prepare()
        for step in range(1, steps + 1):
            fill(self.model.weight, self.optimizer, step)
            self.count.step = step
            time.sleep(0.001)
            if step % EVERY == 0:
                if board.at_begin is not None:
                    self.finish()  # what happens to the folder must happen to this save, not to the previous one
                board.begin(step)
                self.save()
                board.done(step - self.late)
        self.finish()
        board.done(steps)

    def prepare(self) -> None:
        pass

    def resume(self, tell: Callable[[set[float]], None]) -> None:
        self.prepare()
        if self.load():
            tell(values(self.model.weight, self.optimizer, self.count.step))


class InPlace(Saver):
    name = "torch.save, one file"

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "count": self.count.state_dict()}

    def save(self) -> None:
        torch.save(self.state(), self.folder / "last.pt")

    def load(self) -> bool:
        if not (self.folder / "last.pt").exists():
            return False
        state = torch.load(self.folder / "last.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.count.load_state_dict(state["count"])
        return True


class Renamed(InPlace):
    name = "torch.save, renamed"

    def save(self) -> None:
        torch.save(self.state(), self.folder / "last.pt.tmp")
        os.replace(self.folder / "last.pt.tmp", self.folder / "last.pt")


class Ours(Saver):
    name = "rankwise, blocking"
    background = False

    def prepare(self) -> None:
        self.checkpoints = Checkpoints(self.folder, keep_last=2, background=self.background)
        self.parts = {"model": self.model, "optimizer": self.optimizer, "count": self.count}

    def save(self) -> None:
        self.checkpoints.save(self.parts, self.count.step)

    def finish(self) -> None:
        self.checkpoints.wait()

    def load(self) -> bool:
        return self.checkpoints.load_latest(self.parts) is not None


class OursBackground(Ours):
    name = "rankwise, background"
    background = True
    late = EVERY  # when a save returns, it has waited for the previous one


class AccelerateFolder(Saver):
    name = "Accelerate, one folder"
    needs = "accelerate"
    numbered = False

    def prepare(self) -> None:
        from accelerate import Accelerator
        from accelerate.utils import ProjectConfiguration

        config = ProjectConfiguration(project_dir=str(self.folder), automatic_checkpoint_naming=self.numbered, total_limit=2)
        self.accelerator = Accelerator(cpu=True, project_config=config)
        fill(self.model.weight, self.optimizer, 0)
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.accelerator.register_for_checkpointing(self.count)

    def save(self) -> None:
        self.accelerator.save_state(str(self.folder / "state"))

    def load(self) -> bool:
        if not (self.folder / "state").exists():
            return False
        self.accelerator.load_state(str(self.folder / "state"))
        return True


class AccelerateNumbered(AccelerateFolder):
    name = "Accelerate, numbered"
    numbered = True

    def save(self) -> None:
        self.accelerator.save_state()

    def load(self) -> bool:
        if not (self.folder / "checkpoints").exists():
            return False
        self.accelerator.load_state()
        return True


class Dataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(1)}


class Lightning(Saver):
    """`ModelCheckpoint(save_last=True)` and `fit(ckpt_path="last")`; temporary files on the disk of the checkpoints."""

    name = "Lightning, last"
    needs = "lightning"

    def trainer(self, callback: Any, steps: int) -> tuple[Any, Any]:
        import lightning.pytorch as lightning

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = Model()

            def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
                return self.model(batch["x"])["loss"]

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return optimizer_of(self.model)

        saving = lightning.callbacks.ModelCheckpoint(dirpath=str(self.folder), every_n_train_steps=EVERY, save_last=True)
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=steps, callbacks=[callback, saving], logger=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=str(self.folder),
        )  # fmt: skip
        return trainer, Module()

    def train(self, board: Board, steps: int) -> None:
        import lightning.pytorch as lightning

        class Watch(lightning.Callback):
            """Must be called before ModelCheckpoint, which Lightning calls last."""

            def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
                time.sleep(0.001)
                if trainer.global_step and trainer.global_step % EVERY == 0:
                    board.done(trainer.global_step)

            def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
                fill(module.model.weight, trainer.optimizers[0], trainer.global_step)
                if trainer.global_step % EVERY == 0:
                    board.begin(trainer.global_step)

        trainer, module = self.trainer(Watch(), steps)
        trainer.fit(module, torch.utils.data.DataLoader(Dataset(), batch_size=1))
        board.done(steps)

    def resume(self, tell: Callable[[set[float]], None]) -> None:
        import lightning.pytorch as lightning

        class Look(lightning.Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
                if trainer.global_step == 0:  # it started from scratch, with a warning
                    os._exit(0)
                tell(values(module.model.weight, trainer.optimizers[0], trainer.global_step))
                os._exit(0)

        trainer, module = self.trainer(Look(), ENDLESS)
        trainer.fit(module, torch.utils.data.DataLoader(Dataset(), batch_size=1), ckpt_path="last")


class LightningElsewhere(Lightning):
    """The same with TMPDIR on another disk, as if the checkpoints are on a shared disk and temporary files in /tmp."""

    name = "Lightning, other /tmp"


class Transformers(Saver):
    name = "HF Trainer"
    needs = "transformers"

    def trainer(self, callback: Any, steps: int) -> Any:
        import transformers

        model = Model()
        optimizer = optimizer_of(model)
        arguments = transformers.TrainingArguments(
            output_dir=str(self.folder), use_cpu=True, save_strategy="steps", save_steps=EVERY, save_total_limit=2,
            max_steps=steps, per_device_train_batch_size=1, report_to=[], disable_tqdm=True, logging_strategy="no",
            ignore_data_skip=True, dataloader_pin_memory=False, remove_unused_columns=False,
        )  # fmt: skip
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return transformers.Trainer(
            model, arguments, train_dataset=Dataset(), optimizers=(optimizer, schedule), callbacks=[callback]
        )

    def train(self, board: Board, steps: int) -> None:
        import transformers

        class Watch(transformers.TrainerCallback):
            def on_step_end(self, arguments: Any, state: Any, control: Any, **of: Any) -> None:
                time.sleep(0.001)
                inner = getattr(of["optimizer"], "optimizer", of["optimizer"])
                fill(of["model"].weight, inner, state.global_step)
                if state.global_step % EVERY == 0:
                    board.begin(state.global_step)

            def on_save(self, arguments: Any, state: Any, control: Any, **of: Any) -> None:
                board.done(state.global_step)

        self.trainer(Watch(), steps).train()
        board.done(steps)

    def resume(self, tell: Callable[[set[float]], None]) -> None:
        import transformers

        class Look(transformers.TrainerCallback):
            def on_step_begin(self, arguments: Any, state: Any, control: Any, **of: Any) -> None:
                inner = getattr(of["optimizer"], "optimizer", of["optimizer"])
                tell(values(of["model"].weight, inner, state.global_step))
                os._exit(0)

        self.trainer(Look(), ENDLESS).train(resume_from_checkpoint=True)


SAVERS: list[type[Saver]] = [
    InPlace, Renamed, AccelerateFolder, AccelerateNumbered, Lightning, LightningElsewhere, Transformers, Ours, OursBackground,
]  # fmt: skip


def import_all(kinds: Collection[type[Saver]]) -> dict[str, str]:
    """The versions of the libraries that these savers need, by library. A child does not repeat an import that was done here.
    If a library is missing, its savers are skipped."""
    found = {"torch": torch.__version__}
    optimizer_of(Model())  # imports more of torch, which a child with user nobody may not be able to read
    needed = {kind.needs for kind in kinds}
    for name in ("accelerate", "lightning.pytorch", "transformers"):
        library = name.split(".")[0]
        if library in needed:
            with contextlib.suppress(ImportError):
                found[library] = __import__(name, fromlist=["__version__"]).__version__
    if "transformers" in found:
        from transformers import Trainer as _Trainer  # noqa: F401  # lazily imported otherwise
    return found
