"""The self-test as the user types it: it finds planted bugs, and passes correct programs."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from launched import left_over, wait_for
from ranks import on_ranks, scripts_on_ranks
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import rankwise
from rankwise import cli
from rankwise.checks import script as script_checks
from rankwise.checks import trainer as trainer_module
from rankwise.checks.trainer import findings_of
from rankwise.dist import comm
from rankwise.dist.comm import rank
from rankwise.sync import AllReduce, LocalSGD, codecs, flat, trained
from rankwise.sync.flat import FlatReduction
from rankwise.sync.reduction import Reduction
from rankwise.trainer import Trainer

EXAMPLES = Path(__file__).parents[2] / "examples"

TRAINER = """\
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import rankwise

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(45, 6), torch.randint(3, (45,)))

def step(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="sum"), len(y)

def evaluate(model, batch):
    x, y = batch
    scores = model(x)
    return {"loss": (F.cross_entropy(scores, y, reduction="sum"), len(y)), "right": ((scores.argmax(1) == y).sum(), len(y))}

model = nn.Sequential(nn.Linear(6, 8), LAYER, nn.ReLU(), nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
rankwise.Trainer(
    model, optimizer, step, dataset, global_batch_size=8, max_epochs=4, scheduler=schedule,
    evaluate=rankwise.Evaluate(dataset, evaluate),
).fit()
"""

BY_HAND = """\
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for epoch in range(1000):
    sampler.set_epoch(epoch)
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "model.pt")
"""

PARTS = """\
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset
import rankwise

world = rankwise.init()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(SAMPLES, 6), torch.randint(3, (SAMPLES,)))
loader = rankwise.Loader(dataset, global_batch_size=8 if SAMPLES > 8 else 2, accumulate=2 if SAMPLES > 8 else 1, max_epochs=50)
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sync = rankwise.AllReduce().attach(model, optimizer)
for micro_batches in loader:
    for number, (x, y) in enumerate(micro_batches, start=1):
        sync.backward(F.cross_entropy(model(x), y, reduction="sum"), len(y), last=number == len(micro_batches))
    sync.step()
"""

Tested = Callable[..., tuple[int, dict[str, str], str]]


def _forked(words: Sequence[str], out: Path, timeout_s: float, env: Mapping[str, str]) -> bool:
    """Replaces `rankwise run`, without its start: the ranks are forked from a process that has imported torch."""
    ranks, argv = int(words[words.index("--nproc") + 1]), words[words.index("-m") :]
    out.write_text("".join(done.stdout for done in scripts_on_ranks(ranks, *argv, timeout_s=timeout_s, launched=True)))
    return True


@pytest.fixture
def tested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Tested:
    """(exit status, the status of each check, the output) of a script. No file is left in the current folder."""

    def test(source: str | Path, *words: str, ranks: str = "1,2", command: bool = False) -> tuple[int, dict[str, str], str]:
        script = source if isinstance(source, Path) else tmp_path / "train.py"
        if isinstance(source, str):
            script.write_text(source)
        here = sorted(path.name for path in tmp_path.iterdir())
        typed = ["selftest", "--ranks", ranks, str(script), *words]
        if command:
            monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # its ranks are forked, like a user's
            status = subprocess.run([sys.executable, "-m", "rankwise", *typed], timeout=250).returncode
        else:
            before = signal.getsignal(signal.SIGTERM)
            monkeypatch.setattr(script_checks, "_run", _forked)
            with pytest.raises(SystemExit) as end:
                cli.main(typed)
            signal.signal(signal.SIGTERM, before)
            status = int(end.value.code or 0)
        printed, said = capfd.readouterr()
        assert "Traceback" not in printed + said, printed + said
        assert sorted(path.name for path in tmp_path.iterdir()) == here
        lines = re.findall(r"^(ok|FAILED|known|open) +(gradients|samples|[a-z][a-z ]*?)  ", printed, re.MULTILINE)
        return status, {check: status for status, check in lines}, printed + said

    return test


def planted(source: str, *changes: tuple[str, str]) -> str:
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    return source


# --- planted bugs


def test_a_loss_that_is_a_mean_of_means_is_caught_with_the_trainer(tested: Tested) -> None:
    mean = ('F.cross_entropy(model(x), y, reduction="sum"), len(y)\n\ndef', "F.cross_entropy(model(x), y), 1\n\ndef")
    status, checks, told = tested(planted(TRAINER, ("LAYER", "nn.Identity()"), mean), ranks="1,2,4")
    assert (status, checks["gradients"]) == (1, "FAILED"), told
    assert "a mean of means" in told
    assert 'reduction="sum"' in told
    assert [check for check, found in checks.items() if found != "ok"] == ["gradients"]


@pytest.mark.stress
def test_a_loss_that_is_a_mean_of_means_over_ragged_counts_is_caught_by_hand(tested: Tested) -> None:
    ragged = ("F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y.where(x[:, 0] > 0.3, -100))")
    status, checks, told = tested(planted(BY_HAND, ragged), command=True)
    assert (status, checks["gradients"]) == (1, "FAILED"), told
    assert "a mean of means" in told


def test_a_missing_set_epoch_is_caught(tested: Tested) -> None:
    status, checks, told = tested(planted(BY_HAND, ("    sampler.set_epoch(epoch)\n", "")))
    assert (status, checks["order of the epochs"]) == (1, "FAILED"), told
    assert "sampler.set_epoch(epoch)" in told
    assert [check for check, found in checks.items() if found != "ok"] == ["order of the epochs"]


def test_the_same_seed_on_all_ranks_is_caught_where_a_layer_draws(tested: Tested) -> None:
    status, checks, told = tested(planted(BY_HAND, ("torch.manual_seed(1 + rank)", "torch.manual_seed(1)")))
    assert (status, checks["random numbers"]) == (1, "FAILED"), told
    assert "1 (Dropout)" in told
    assert [check for check, found in checks.items() if found != "ok"] == ["random numbers"]


def test_ddp_gone_round_is_caught(tested: Tested) -> None:
    status, checks, told = tested(planted(BY_HAND, ("model(x)", "model.module(x)")))
    assert (status, checks["gradients"], checks["steps"]) == (1, "FAILED", "FAILED"), told
    assert "model.module" in told


def test_an_optimizer_step_that_one_rank_leaves_out_is_caught(tested: Tested) -> None:
    skipped = ("        optimizer.step()\n", "        if rank == 0:\n            optimizer.step()\n")
    status, checks, told = tested(planted(BY_HAND, skipped))
    assert (status, checks["steps"]) == (1, "FAILED"), told
    assert "rank 0 took 6, rank 1 took 0" in told
    assert [check for check, found in checks.items() if found != "ok"] == ["steps"]
    assert "the optimizer steps only on some ranks" in told


BATCHES_BY_HAND = planted(
    BY_HAND,
    ("torch.randn(64, 6), torch.randint(3, (64,))", "torch.randn(65536, 6), torch.randint(3, (65536,))"),
    ("    for x, y in loader:\n", "    for _ in range(4):\n        x, y = dataset[torch.randint(65536, (8,))]\n"),
)


def test_ranks_that_draw_the_same_batches_without_a_loader_are_caught(tested: Tested) -> None:
    status, checks, told = tested(planted(BATCHES_BY_HAND, ("manual_seed(1 + rank)", "manual_seed(1)")))
    assert (status, checks["samples"]) == (1, "FAILED"), told
    assert "on 2 ranks: all ranks make the same batches" in told
    assert "torch.manual_seed(seed + rank)" in told


AN_EVALUATION = """\
    with torch.no_grad():
        for v, _ in DataLoader(dataset, batch_size=8):
            model(v)
"""


@pytest.mark.parametrize(
    ("change", "samples", "why"),
    [
        (("model(x)", "model(x)"), "ok", "has other samples on 2 ranks"),
        (("model(x)", "model(input=x)"), "open", "each rank may make other batches"),
        (("    for _ in", AN_EVALUATION + "    for _ in"), "ok", "has other samples on 2 ranks"),
        (("torch.randint(65536, (8,))", "torch.arange(8)"), "open", "the inputs of the model are always the same"),
        (("model(x)", "model(x.to_sparse())"), "open", "each rank may make other batches"),
    ],
    ids=["seen", "given by name", "with an evaluation by a loader", "the same inputs on purpose", "sparse"],
)
@pytest.mark.one_in(2)
def test_batches_that_each_rank_makes_itself_are_no_mistake(
    change: tuple[str, str], samples: str, why: str, tested: Tested
) -> None:
    status, checks, told = tested(planted(BATCHES_BY_HAND, change))
    assert status == 0, told
    assert (checks["samples"], checks["gradients"]) == (samples, "open"), told
    assert why in " ".join(told.split())


# --- correct programs


def test_an_mlp_with_a_ragged_last_batch_passes(tested: Tested) -> None:
    status, checks, told = tested(planted(TRAINER, ("LAYER", "nn.Identity()")), ranks="1,2,4")
    assert status == 0, told
    assert set(checks.values()) == {"ok"}
    assert list(checks) == [
        "weights at the start", "samples", "gradients", "random numbers", "steps", "resume", "side effects", "evaluation",
    ]  # fmt: skip
    for layout in ("1 rank in 4 micro-batches: ", "2 ranks in 2 micro-batches: ", "4 ranks: "):
        assert layout in " ".join(told.split())
    assert "float64" in told


@pytest.mark.parametrize(
    "given",
    ["scheduler=plateau", 'actions=[rankwise.actions.Plateau(plateau, "eval_loss")]'],
    ids=["scheduler", "action"],
)
def test_a_plateau_which_waits_for_an_evaluation_passes(given: str, tested: Tested) -> None:
    plateau = ("StepLR(optimizer, 2)", "ReduceLROnPlateau(optimizer)\nplateau = schedule\nimport rankwise.actions")
    source = planted(TRAINER.replace("LAYER", "nn.Identity()"), plateau, ("scheduler=schedule", given))
    status, checks, text = tested(source, ranks="1,2")
    assert (status, set(checks.values())) == (0, {"ok"}), text


def test_dropout_passes_and_is_named(tested: Tested) -> None:
    status, checks, told = tested(planted(TRAINER, ("LAYER", "nn.Dropout(0.5)")))
    assert status == 0, told
    assert set(checks.values()) == {"ok"}
    assert "in layer 1 (Dropout)" in " ".join(told.split())


def test_batch_norm_is_a_known_difference_and_named(tested: Tested) -> None:
    status, checks, told = tested(planted(TRAINER, ("LAYER", "nn.BatchNorm1d(8)")))
    assert status == 0, told
    assert checks.pop("gradients") == "known"
    assert "BatchNorm1d '1' takes its statistics from a micro-batch" in told
    assert " ok, 1 known difference\n" in told
    assert set(checks.values()) == {"ok"}


def test_buffers_that_forward_changes_are_a_known_difference_and_named(tested: Tested) -> None:
    centre = """\
class Centre(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x):
        y = x - self.centre
        if self.training:
            self.centre.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return y

model = """
    layers = "nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), Centre()"
    status, checks, told = tested(planted(TRAINER, ("model = ", centre), ("LAYER", layers)), ranks="1")
    assert status == 0, told
    assert checks.pop("gradients") == "known"
    named = "1.parametrizations.weight.0._u, 1.parametrizations.weight.0._v, 2.centre"
    assert f"why: forward changes {named}, so" in " ".join(told.split())
    assert set(checks.values()) == {"ok"}
    assert "on 1 rank, on the CPU" in told


@pytest.mark.stress
def test_a_gpt_passes(tested: Tested) -> None:
    source = (EXAMPLES / "04_gpt.py").read_text()
    small = [("CONTEXT = 128", "CONTEXT = 16"), ("width: int = 128, layers: int = 3", "width: int = 16, layers: int = 2"),
             ("64 * 1024", "2 * 1024"), ('glob("*.py")', 'glob("a*.py")')]  # fmt: skip
    status, checks, told = tested(planted(source, *small), "--batch", "8")
    assert status == 0, told
    assert set(checks.values()) == {"ok"}


@pytest.mark.parametrize("loop", ["ddp", "parts"])
@pytest.mark.one_in(2)
def test_a_loop_of_ones_own_passes(loop: str, tested: Tested) -> None:
    status, checks, told = tested(BY_HAND if loop == "ddp" else EXAMPLES / "02_own_loop.py")
    assert status == 0, told
    assert set(checks.values()) == {"ok"}
    assert {"weights at the start", "samples", "gradients", "random numbers", "steps"} <= set(checks)
    assert "not tested in your own loop: a resumed step, evaluation" in told


@pytest.mark.parametrize("samples", ["64", "7"], ids=["micro-batches", "ranks without a sample"])
def test_a_step_of_a_loader_is_its_micro_batches_also_where_a_rank_has_fewer(samples: str, tested: Tested) -> None:
    status, checks, told = tested(planted(PARTS, ("SAMPLES", samples)), ranks="1,2,3" if samples == "7" else "1,2")
    assert status == 0, told
    assert set(checks.values()) == {"ok"}, told
    assert "stopped early" not in told


@pytest.mark.stress  # with the Trainer: above
def test_a_mean_with_the_count_1_is_caught_in_a_loop_of_ones_own(tested: Tested) -> None:
    mean = ('F.cross_entropy(model(x), y, reduction="sum")', "F.cross_entropy(model(x), y)")
    source = (EXAMPLES / "02_own_loop.py").read_text()
    status, checks, told = tested(planted(source, mean, ("backward(loss, len(y))", "backward(loss, 1)")))
    assert (status, checks["gradients"]) == (1, "FAILED"), told
    assert "a mean of means" in told


@pytest.mark.parametrize("loop", ["autocast", "noise", "closure"])
@pytest.mark.one_in(3)
def test_what_a_loop_of_ones_own_may_do_and_is_no_mistake(loop: str, tested: Tested) -> None:
    changes = {
        "autocast": [("for epoch in", "torch.set_autocast_enabled('cpu', True)\nfor epoch in")],
        "noise": [("model(x)", "model(x + torch.randn_like(x))")],
        "closure": [("SGD(model.parameters(), lr=0.1)", "LBFGS(model.parameters())"), ("        loss.backward()\n", ""),
                    ("optimizer.step()", "optimizer.step(lambda: loss.backward(retain_graph=True) or loss)")],
    }[loop]  # fmt: skip
    status, checks, told = tested(planted(BY_HAND, *changes))
    assert status == 0, told
    assert checks["gradients"] == ("ok" if loop == "autocast" else "open"), told
    why = {"autocast": "in bfloat16, 0.1 is allowed", "noise": "draws random numbers for a step", "closure": "in a closure"}
    assert why[loop] in " ".join(told.split())


@pytest.mark.parametrize("changed", ["autocast", "noise"])
@pytest.mark.one_in(2)
def test_what_a_step_function_may_do_and_is_no_mistake(changed: str, tested: Tested) -> None:
    changes = {
        "autocast": [("model(x), y, red", "model(x.float()), y, red"), ("max_epochs=4", "max_epochs=4, precision='bf16'")],
        "noise": [("model(x), y, reduction", "model(x + torch.randn_like(x)), y, reduction")],
    }[changed]  # fmt: skip
    status, checks, told = tested(planted(TRAINER, ("LAYER", "nn.Identity()"), *changes), ranks="1")
    assert status == 0, told
    assert checks["gradients"] == ("ok" if changed == "autocast" else "open"), told
    assert ("in float32, 0.001 is allowed" if changed == "autocast" else "step_fn draws random") in " ".join(told.split())


# --- as a method


class _Sleepy(torch.optim.SGD):
    """It steps only on rank 0."""

    def step(self, closure: Any = None) -> None:
        if rank() == 0:
            super().step(closure)


class _Forgetful(nn.Module):
    """No state_dict has the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x / self.calls


class _Running(nn.Module):
    """Divides by a running scale of the samples of this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.scale.mul_(0.9).add_(0.1 * x.abs().mean())
        return x / self.scale


@contextlib.contextmanager
def _equalised(sync: AllReduce, module: nn.Module | None = None) -> Iterator[None]:
    """An earlier mistake: all ranks get rank 0's buffers, permanently."""
    comm.broadcast(list(sync._trained.model.buffers()))
    yield


def _without_memory(codec: codecs.Codec, flat: torch.Tensor) -> torch.Tensor:
    codec._new_rights = codec._sum(flat.clone(), flat)
    codec._work.zero_()
    return flat


@contextlib.contextmanager
def _left_alone(sync: LocalSGD, module: nn.Module | None = None) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _all_in_training(model: nn.Module) -> Iterator[None]:
    model.eval()
    yield
    model.train()


def _of_the_model_alone(sync: AllReduce) -> Reduction:
    """An earlier mistake: what the optimizer trains outside the model is ignored."""
    sync._overlaps = False
    return FlatReduction(list(sync._trained.model.parameters()), sync._together)


def _asked_on_a_rank(bug: str, strategy: str = "all-reduce") -> tuple[list[str], bool]:
    """(the checks that failed, whether the Trainer has not changed and prints the same)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    if bug == "forgets":
        model.append(_Forgetful())
    if bug == "weight norm":
        model[0] = nn.utils.weight_norm(model[0])
    if bug == "compiled":
        model = torch.compile(model)  # type: ignore[assignment]
    if bug == "other strides":
        flat._view = lambda piece, parameter: piece.data.view_as(parameter)
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    if bug == "own buffers":
        model.append(_Running())
        AllReduce.averaged = _equalised  # type: ignore[method-assign, assignment]
    if bug == "modes":
        trainer_module.evaluating = _all_in_training  # type: ignore[attr-defined]
        model.insert(1, nn.BatchNorm1d(8).eval())
    if bug == "trained taken once":
        trained.Trained.changed = lambda self: False  # type: ignore[method-assign]
    if bug == "rounding lost":
        codecs.Codec.sum_ = _without_memory  # type: ignore[method-assign]
    if bug == "not averaged":
        LocalSGD.averaged = _left_alone  # type: ignore[method-assign, assignment]
    if bug == "own state not loaded":
        LocalSGD.load_rank_state_dict = lambda self, state: None  # type: ignore[method-assign]
    if bug == "outside left alone":
        AllReduce._new_reduction = _of_the_model_alone  # type: ignore[method-assign]
    if bug in ("outside not saved", "frozen not saved"):
        part = bug.split()[0]
        whole = trained.Trained.state_dict
        empty: dict[str, Any] = {} if part == "outside" else []  # type: ignore[assignment]
        trained.Trained.state_dict = lambda self: {**whole(self), part: empty}  # type: ignore[method-assign]
    data = TensorDataset(torch.randn(45, 6), torch.randint(3, (45,)))
    scale = nn.Parameter(torch.tensor(1.5))  # outside the model, like the weights of a loss
    outside = [scale] if "outside" in bug else []

    def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        if bug == "seeds":
            torch.manual_seed(7)
        scores = model(batch[0]) * scale if outside else model(batch[0])
        return functional.cross_entropy(scores, batch[1], reduction="sum"), len(batch[1])

    optimizer = (_Sleepy if bug == "skips" else torch.optim.SGD)([*model.parameters(), *outside], lr=0.1)
    sync = AllReduce(reduce="sum") if strategy == "sum" else strategy
    trainer = Trainer(model, optimizer, step, data, global_batch_size=8, max_epochs=1, sync=sync)
    parameters = [*model.parameters(), *outside]
    before, streams = [p.clone() for p in parameters], torch.get_rng_state()
    failed = [finding.check for finding in findings_of(trainer) if finding.status == "FAILED"]
    same = all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    same = same and all(p.requires_grad and (p.grad is None or not p.grad.any()) for p in parameters)
    same = same and torch.equal(streams, torch.get_rng_state()) and trainer.loader.position == 0
    return failed, same and rankwise.selftest(trainer) == (not failed)


@pytest.mark.parametrize(
    ("ranks", "honest"), [(1, ""), (3, ""), (1, "outside"), (2, "outside"), (1, "weight norm"), (1, "compiled")]
)
@pytest.mark.one_in(2)
def test_a_trainer_can_be_asked_on_the_ranks_that_there_are_and_is_not_changed(ranks: int, honest: str) -> None:
    assert on_ranks(ranks, _asked_on_a_rank, honest) == [([], True)] * ranks


@pytest.mark.parametrize(
    "strategy",
    [
        "sum",
        "all-reduce:int8",
        "local-sgd:4",
        *(
            pytest.param(name, marks=pytest.mark.stress)
            for name in ("all-reduce:bf16", "all-reduce:fp16", "local-sgd:1", "post-local-sgd:1:3", "diloco:1", "diloco:4:int8")
        ),
    ],
)
@pytest.mark.one_in(2)
def test_each_strategy_is_tested_by_what_it_promises(strategy: str) -> None:
    assert on_ranks(2, _asked_on_a_rank, "", strategy) == [([], True)] * 2


def _of_a_wide_model(sync: str) -> str:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(45, 64), torch.randint(10, (45,)))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, step, data, global_batch_size=16, max_epochs=1, sync=sync)
    return next(finding.status for finding in findings_of(trainer) if finding.check == "gradients")


def test_a_matrix_that_needs_more_steps_than_16_is_not_lost() -> None:
    assert on_ranks(2, _of_a_wide_model, "all-reduce:powersgd:1") == ["ok", "ok"]


@pytest.mark.parametrize(
    ("bug", "strategy", "check"),
    [
        ("rounding lost", "all-reduce:powersgd:1", "gradients"),
        ("not averaged", "local-sgd:4", "steps"),
        ("own state not loaded", "local-sgd:4", "resume"),
    ],
)
@pytest.mark.one_in(3)
def test_a_strategy_that_breaks_its_promise_is_named(bug: str, strategy: str, check: str) -> None:
    told = on_ranks(2, _asked_on_a_rank, bug, strategy)
    assert all(check in failed and same for failed, same in told), told


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        ("seeds", "random"),
        ("skips", "steps"),
        ("forgets", "resume"),
        ("other strides", "gradients"),
        ("own buffers", "looking"),
        ("modes", "looking"),
        ("trained taken once", "gradients"),
        ("outside left alone", "gradients"),
        ("outside not saved", "resume"),
        ("frozen not saved", "resume"),
    ],
)
@pytest.mark.one_in(2)
def test_a_trainer_that_is_asked_names_the_mistake(bug: str, check: str) -> None:
    told = on_ranks(2, _asked_on_a_rank, bug)
    assert all(check in failed and same for failed, same in told), told


# --- what is refused


def test_a_script_that_fails_is_told_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import torch\nraise ValueError('no data')\n")
    monkeypatch.setattr(script_checks, "_run", _forked)
    with pytest.raises(SystemExit) as end:
        cli.main(["selftest", "--ranks", "1", "train.py"])
    said = capfd.readouterr().err
    assert end.value.code == 2
    assert "rankwise: train.py failed on rank 0 of 1:" in said
    assert "ValueError: no data" in said
    assert "rank_process.py" not in said, "frames of rankwise do not help"


def test_a_script_that_trains_nothing_is_refused(rankwise: Callable[..., Any], tmp_path: Path) -> None:
    """The current folder has a file that is named like a module of Python: our own module must not import it."""
    (tmp_path / "platform.py").write_text("raise ImportError('imported')\n")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "beside.py").touch()
    (tmp_path / "own" / "train.py").write_text("import beside\nprint('done')\n")
    done = rankwise("selftest", "--ranks", "1", "own/train.py")
    assert done.returncode == 2
    assert "took no step of a torch optimizer (" in done.stderr


def test_ranks_that_are_no_numbers_are_refused(rankwise: Callable[..., Any]) -> None:
    done = rankwise("selftest", "--ranks", "one", "train.py")
    assert (done.returncode, done.stderr) == (2, "rankwise: --ranks one: give numbers of ranks, for example --ranks 1,2,4\n")


def test_a_script_that_hangs_is_ended(rankwise: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import signal\nsignal.pause()\n")
    done = rankwise("selftest", "--ranks", "1", "--timeout", "3", str(tmp_path / "train.py"))
    assert done.returncode == 2
    assert "train.py did not finish within 3 s on 1 rank" in done.stderr
    assert wait_for(lambda: not left_over(tmp_path / "train.py"), "nothing left in ps")
