"""Each private name of torch that rankwise uses, missing in turn: a training has the same result, and one line says why."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import on_ranks
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info

from rankwise.checkpoint import Checkpoints, reader
from rankwise.checks.instrument import Instrument
from rankwise.checks.settings import RankSettings
from rankwise.data import Loader
from rankwise.dist import comm, log, private_names
from rankwise.sync import AllReduce
from rankwise.training.model import prepare

NONE = ""


@contextlib.contextmanager
def without(name: str) -> Iterator[io.StringIO]:
    """As if torch did not have this name, but only for rankwise: torch itself would fail without most of them. Yields what is
    printed."""

    def find(owner: object, asked: str, *default: Any) -> Any:
        return default[0] if asked == name and default else getattr(owner, asked, *default)

    log._warned.clear()
    vars(private_names)["getattr"] = find
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            yield out
    finally:
        del vars(private_names)["getattr"]


class Stream(IterableDataset[int]):
    """Divides itself, like the example in torch's documentation."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(6) if info is None else range(info.id, 6, info.num_workers)


class Model(nn.Module):
    """Batch norms, a layer to replace, and a layer that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last, self.unused = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return found


def trained(overlap: bool | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A step, another one in two micro-batches, and one with another layer."""
    world = comm.init()
    model = prepare(Model().double(), torch.device("cpu"), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1, foreach=False)
    sync = AllReduce(overlap=overlap).attach(model, optimizer, clip_norm=0.1)
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(world.rank))
    for parts in (1, 2, 1):
        for part in x.chunk(parts):
            loss = F.cross_entropy(model(part), torch.arange(len(part)) % 3, reduction="sum")
            sync.backward(loss, len(part), last=len(part) != 4 or part.data_ptr() != x.data_ptr())
        sync.step()
        if parts == 2:
            model.last = torch.manual_seed(4) and nn.Linear(8, 3).double()
            optimizer.add_param_group({"params": list(model.last.parameters())})
            sync.follow()
    with sync.averaged():
        sync.rank_state_dict()
    sync.finish()
    return model, optimizer


def results(folder: Path, workers: int) -> list[Any]:
    """The results of all parts of rankwise that need a private name."""
    found: list[torch.Tensor] = []
    for overlap in (False, True) if comm.world_size() > 1 else (False,):
        model, optimizer = trained(overlap)
        found += [tensor.detach().clone() for tensor in model.state_dict().values()]
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer}
    Checkpoints(folder, background=False).save(parts, 1)
    kept = {name: reader.own_tensors(part) for name, part in parts.items()}
    for tensors in kept.values():
        for tensor in tensors.values():
            tensor.detach().zero_()
    assert Checkpoints(folder, background=False).load_latest(parts)
    found += [tensor.detach().clone() for tensor in model.state_dict().values()]
    stream = Loader(Stream(), global_batch_size=4, workers=workers, max_epochs=1)
    return [tensor.tolist() for tensor in found] + [batch.tolist() for step in stream for batch in step]


def result_without(names: list[str], folder: Path) -> list[tuple[list[Any], str]]:
    found = []
    for name in names:
        with without(name) as out:
            workers = 2 if name in (NONE, "_worker_info") else 0  # the results of workers do not depend on the other names
            found.append((results(folder / (name or "none"), workers), out.getvalue()))
    return found


OF_THE_SELF_TEST = ("_Loss", "_reset", "_next_index")
OF_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
OF_START = ("_args_from_interpreter_flags", "_disable_dynamo", "__dynamo_disable", "_opt_called")
OF_A_GROUP = ("_get_backend", "_timeout", "_saved_reduction")
NOT_HERE = (*OF_THE_SELF_TEST, *OF_HOOKS, *OF_START, *OF_A_GROUP, "_cdata", "_fused_sgd_")
OF_BUFFERS = ("_BatchNorm", "_non_persistent_buffers_set")
NOT_ALONE = (*NOT_HERE, *OF_BUFFERS, "_push_all_rebuilt_params", "_rebuild_buckets", "_foreach_norm", "_foreach_mul_")
"""Names that a single rank does not look for either: it sums no gradients, its batch norms see complete batches, its buffers
are those of all ranks, and gradients of one dtype are in one tensor."""


@pytest.mark.parametrize("ranks", [2, 1])
@pytest.mark.one_in(2)
def test_a_training_without_a_private_name_has_the_same_result_and_the_main_rank_says_why(ranks: int, tmp_path: Path) -> None:
    for rank, found in enumerate(on_ranks(ranks, result_without, [NONE, *private_names.NAMES], tmp_path, timeout_s=120.0)):
        (expected, usual), *others = found
        for name, (got, said) in zip(private_names.NAMES, others, strict=True):
            assert len(got) == len(expected)
            for one, other in zip(got, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12, err_msg=name)
            lines = [line for line in said.splitlines() if line not in usual.splitlines()]
            needed = rank == 0 and name not in (NOT_HERE if ranks > 1 else NOT_ALONE)
            assert lines == ([f"warning: this torch has no {name}: {private_names.NAMES[name]}"] if needed else [])


def watched(names: list[str]) -> list[tuple[dict[str, Any], str]]:
    """What the self-test of a script sees of one epoch and a step."""
    found = []
    for name in names:
        torch.manual_seed(0)
        x = torch.arange(12.0).reshape(6, 2)
        model, loss_fn = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with without(name) as out, Instrument(RankSettings("", 1), 0) as instrument:
            for (batch,) in DataLoader(TensorDataset(x), batch_size=3, shuffle=False):
                loss_fn(model(batch), batch).backward()
                optimizer.step()
            found.append((instrument.record(""), out.getvalue()))
    return found


def test_the_self_test_without_a_private_name_sees_the_same_passes() -> None:
    names = [NONE, "_BatchNorm", *OF_THE_SELF_TEST]
    [answers] = on_ranks(1, watched, names)
    usual = answers[0][0]
    assert usual["passes"][0]["samples"] == [[0, 1, 2], [3, 4, 5]]
    for name, (record, said) in zip(names, answers, strict=True):
        if name in ("_reset", "_next_index"):
            assert all(isinstance(digest, str) for batch in record["passes"][0].pop("samples") for digest in batch)
            assert len(record["batches"]) == len(usual["batches"])
        else:
            assert record == usual
        assert said == (f"warning: this torch has no {name}: {private_names.NAMES[name]}\n" if name else "")


def test_another_interpreter_gets_the_same_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = private_names.interpreter_flags()
    with without("_args_from_interpreter_flags") as out:
        assert private_names.interpreter_flags() == usual
    assert out.getvalue() == ""


class Loss(torch.Tensor):
    """A subclass that sees what is done to it."""

    seen: list[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func.__name__)
        return super().__torch_function__(func, types, args, kwargs or {})


class Mode(TorchFunctionMode):
    """A mode that sees all functions of torch."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_a_backward_pass_sets_the_same_gradients_and_a_subclass_and_a_mode_see_it() -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    seed, half = torch.tensor(0.5), private_names.backward()
    half((weight**2).sum(), seed)
    assert weight.grad is not None
    assert weight.grad.tolist() == [1.0, 2.0]
    Loss.seen = []
    half((weight**2).sum().as_subclass(Loss), seed)
    assert weight.grad.tolist() == [2.0, 4.0]
    assert "backward" in Loss.seen
    with Mode() as mode:
        half((weight**2).sum(), seed)
    assert weight.grad.tolist() == [3.0, 6.0]
    assert "backward" in mode.seen


@pytest.mark.parametrize("wrong", [lambda w: w, lambda w: w.detach().sum(), lambda w: w.sum().reshape(1)])
def test_a_backward_pass_of_what_is_no_loss_fails_as_in_torch(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    for run in (torch.Tensor.backward, private_names.backward()):
        with pytest.raises(RuntimeError):
            run(wrong(weight), torch.tensor(0.5))
        assert weight.grad is None


WITHOUT_COMPILER = """
import sys, torch, rankwise
from rankwise import actions, Trainer, Evaluate

def step(model, batch):
    return model(batch[0]).square().sum(), len(batch[0])

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.{optimizer}
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
data = torch.utils.data.TensorDataset(torch.randn(8, 3))
trainer = Trainer(model, optimizer, step, data, batch_size=2, max_epochs=2, scheduler=scheduler, clip_norm=1.0,
                  evaluate=Evaluate(data), actions=[actions.EMA(model, 0.9)], run_dir=sys.argv[1])
trainer.fit()
print("compiler", "torch._dynamo" in sys.modules)
"""


@pytest.mark.parametrize(
    "optimizer", ["AdamW(model.parameters())", "SGD(model.parameters(), 0.1, momentum=0.9)", "RMSprop(model.parameters())"]
)
def test_a_training_does_not_import_the_compiler(optimizer: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(WITHOUT_COMPILER.replace("{optimizer}", optimizer))
    done = subprocess.run([sys.executable, script, tmp_path / "run"], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1:] == ["compiler False"], done.stdout + done.stderr
    assert "lr_scheduler.step()" not in done.stderr


WITH_COMPILER = """
import sys, torch
from rankwise.dist import comm
from torch._compile import _disable_dynamo

optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)
method = torch.optim.Optimizer.zero_grad.__wrapped__
print("torch._dynamo" in sys.modules, vars(method)["__dynamo_disable"] is method)
import torch._dynamo
print("__dynamo_disable" in vars(method), "AtCompiler" in str(sys.meta_path))
optimizer.zero_grad()
print(vars(method)["__dynamo_disable"] is method)
"""


def test_a_compiler_that_is_imported_later_excludes_what_it_always_excludes() -> None:
    done = subprocess.run([sys.executable, "-c", WITH_COMPILER], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines() == ["False True", "False False", "False"], done.stdout + done.stderr


def test_every_name_that_is_looked_up_is_in_the_list() -> None:
    tree = ast.parse(Path(private_names.__file__).read_text())
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    found = {text for text in texts if re.fullmatch(r"__?[A-Za-z]\w+[A-Za-z]_?", text)}
    assert found == set(private_names.NAMES)
