"""What does a training step cost in rankwise's Trainer and in other frameworks, compared with a hand-written loop?

    pip install lightning accelerate transformers pytorch-ignite
    python benchmarks/trainer_step/frameworks.py [turns] 2>/dev/null
    rankwise run --nproc 2 benchmarks/trainer_step/frameworks.py [turns]

All of them run in this process (with DDP on two ranks) and take turns of 40 steps. Model, data, batch size per rank and
optimizer are those of bench.py. Each does what it does by default:

    plain            torch's DataLoader; nothing else
    Trainer          rankwise: log every 50 steps, progress line, a checkpoint per second of its own time, the agreed stop
    Fabric           a hand-written loop; no log, no bar, no checkpoint
    Accelerate       a hand-written loop; no log, no bar, no checkpoint
    Ignite           a bare Engine; no log, no bar, no checkpoint
    Lightning        `self.log` of the loss in each step, its CSV logger, progress bar, a checkpoint per epoch
    Lightning bare   none of these (barebones=True; DDP does not allow this: each is switched off separately)
    HF Trainer       log and checkpoint every 500 steps, progress bar
"""

import logging
import os
import sys
import tempfile
import threading
import traceback
import warnings
from pathlib import Path

import torch
from bench import BATCH, Case, Rows, Turns, by_hand, tiny, trainer_loop
from torch.nn import functional as F
from torch.utils.data import DataLoader

import rankwise

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import median, p10, ratios

NAMES = ["plain", "Trainer", "Fabric", "Accelerate", "Ignite", "Lightning", "Lightning bare", "HF Trainer"]


def as_they_are(batch):
    return batch


def loader_of(data: Rows) -> DataLoader:
    return DataLoader(data, BATCH, shuffle=True, collate_fn=as_they_are)


def fabric_loop(turns: Turns, world, data: Rows, folder: str) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=world.world_size, strategy="ddp" if world.world_size > 1 else "auto")
    fabric.launch()
    model, optimizer = fabric.setup(*tiny())
    loader = fabric.setup_dataloaders(loader_of(data))
    step = 0
    while step < turns.steps:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            turns.after_step("Fabric", step)
            if step == turns.steps:
                break


def accelerate_loop(turns: Turns, world, data: Rows, folder: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*tiny(), loader_of(data))
    step = 0
    while step < turns.steps:
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            turns.after_step("Accelerate", step)
            if step == turns.steps:
                break


def ignite_loop(turns: Turns, world, data: Rows, folder: str) -> None:
    import ignite.distributed as idist
    from ignite.engine import Events, create_supervised_trainer

    idist.sync()
    model, optimizer = tiny()
    model, optimizer = idist.auto_model(model), idist.auto_optim(optimizer)
    loader = idist.auto_dataloader(data, batch_size=BATCH * world.world_size, shuffle=True, collate_fn=as_they_are)
    engine = create_supervised_trainer(model, optimizer, F.cross_entropy)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: turns.after_step("Ignite", engine.state.iteration))
    steps = turns.steps
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=steps), lambda engine: engine.terminate())
    engine.run(loader, max_epochs=steps)


def lightning_loop(name: str, turns: Turns, world, data: Rows, folder: str) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.optimizer = tiny()

        def training_step(self, batch, index):
            x, y = batch
            loss = F.cross_entropy(self.model(x), y)
            if name == "Lightning":
                self.log("train_loss", loss)
            return loss

        def on_train_batch_end(self, outputs, batch, index) -> None:
            turns.after_step(name, self.trainer.global_step)

        def configure_optimizers(self):
            return self.optimizer

    several = world.world_size > 1
    bare = {"barebones": True} if not several else {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    trainer = lightning.Trainer(
        accelerator="cpu", devices=world.world_size, strategy="ddp" if several else "auto", max_steps=turns.steps,
        max_epochs=-1, default_root_dir=f"{folder}/{name}", **(bare if name == "Lightning bare" else {}),
    )  # fmt: skip
    trainer.fit(Module(), loader_of(data))


def hf_loop(turns: Turns, world, data: Rows, folder: str) -> None:
    import transformers

    class WithLoss(torch.nn.Module):
        def __init__(self, model) -> None:
            super().__init__()
            self.model = model

        def forward(self, x, y):
            return {"loss": F.cross_entropy(self.model(x), y)}

    class HandOver(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_) -> None:
            turns.after_step("HF Trainer", state.global_step)

    model, optimizer = tiny()
    arguments = transformers.TrainingArguments(
        output_dir=f"{folder}/hf", per_device_train_batch_size=BATCH, max_steps=turns.steps, use_cpu=True,
        report_to="none", remove_unused_columns=False,
    )  # fmt: skip
    steady = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    trainer = transformers.Trainer(
        WithLoss(model), arguments, train_dataset=data, data_collator=lambda batch: dict(zip("xy", batch, strict=True)),
        optimizers=(optimizer, steady), callbacks=[HandOver()],
    )  # fmt: skip
    trainer.train()


LOOPS = {
    "Fabric": fabric_loop,
    "Accelerate": accelerate_loop,
    "Ignite": ignite_loop,
    "Lightning": lambda *args: lightning_loop("Lightning", *args),
    "Lightning bare": lambda *args: lightning_loop("Lightning bare", *args),
    "HF Trainer": hf_loop,
}


def in_turn(name: str, turns: Turns, *args) -> None:
    """Run one framework in its thread. An error ends the process, because the other threads would wait for this turn
    forever."""
    try:
        turns.wait(name)  # the setup is part of the first turn, because with DDP it calls collectives
        LOOPS[name](turns, *args)
        turns.over(name)
    except BaseException:
        print(f"{name}:\n{traceback.format_exc()}", flush=True)
        os._exit(1)


def main() -> None:
    for quiet in ("lightning", "lightning.pytorch", "lightning.fabric", "transformers", "ignite"):
        logging.getLogger(quiet).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 60
    world = rankwise.init()
    torch.set_num_threads(1)
    folder = str(world.run_dir) if world.run_dir else rankwise.broadcast_object(tempfile.mkdtemp())
    case = Case(Rows(16384), turns=number)
    turns = Turns(NAMES, case)
    # The Trainer runs in the main thread, which can get signals.
    threads = [threading.Thread(target=by_hand, args=("plain", turns, world, case), daemon=True)]
    threads += [threading.Thread(target=in_turn, args=(name, turns, world, case.data, folder), daemon=True) for name in LOOPS]
    for thread in threads:
        thread.start()
    turns.events["plain"].set()
    trainer_loop(turns, world, case, folder, save_every_s=len(NAMES))
    for thread in threads:
        thread.join()
    if world.is_main:
        report(turns, world.world_size, case.turn)


def report(turns: Turns, ranks: int, steps: int) -> None:
    warm = 3
    plain = turns.times["plain"][warm:-1]
    print(f"{ranks} rank(s), {len(plain)} turns of {steps} steps each; torch {torch.__version__}")
    print(f"{'':16}{'median of pairs':>16}{'p10 of turns':>14}")
    for name in NAMES:
        times = turns.times[name][warm:-1]
        print(f"{name:16}{median(ratios(times, plain)):16.2f}{p10(times) / p10(plain):14.2f}")


if __name__ == "__main__":
    main()
