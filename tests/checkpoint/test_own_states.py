"""The own state of each rank in checkpoints: one file per rank, which only this rank loads, whoever writes it."""

from __future__ import annotations

import contextlib
import gc
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from boxes import Box
from ranks import on_ranks
from torch.utils.data import TensorDataset

from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.manifest import Manifest
from rankwise.data import Loader
from rankwise.dist import comm
from rankwise.errors import ConfigError
from rankwise.evaluation import Evaluate
from rankwise.sync import AllReduce, LocalSGD


class Replica(Box):
    """Like a strategy between two averages: rank r has the value r + 1 everywhere, and nothing is the same on all ranks."""

    promise = "averaged"

    def __init__(self, numbers: int) -> None:
        super().__init__(0)
        self.own: dict[str, Any] | None = {
            "tensors": torch.full((numbers,), comm.rank() + 1.0),
            "weight": np.float64(comm.rank()),
        }

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        yield

    def rank_state_dict(self) -> dict[str, Any] | None:
        return self.own

    def load_rank_state_dict(self, state: dict[str, Any] | None) -> None:
        self.own = state


def saved(folder: Path, ways: dict[str, Any], numbers: int = 100) -> str:
    """Save, and return what was printed."""
    checkpoints = Checkpoints(folder, **ways)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        for step in (1, 2):
            checkpoints.save({"sync": Replica(numbers), "model": torch.nn.Linear(300, 300)}, step)
            checkpoints.wait()
    return out.getvalue()


def loaded(folder: Path, ways: dict[str, Any]) -> tuple[Any, str]:
    replica = Replica(1)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        assert Checkpoints(folder, **ways).load_latest({"sync": replica, "model": torch.nn.Linear(300, 300)}) is not None
    own = replica.own
    return own and (set(own["tensors"].tolist()), own["weight"]), out.getvalue()


WAYS = {
    "one writer": {"background": False},
    "in the background": {},
    "sharded": {"sharded": True},
    "sharded, blocking": {"sharded": True, "background": False},
}


@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@pytest.mark.one_in(2)
def test_each_rank_has_a_file_and_gets_its_own_again(tmp_path: Path, ways: dict[str, Any]) -> None:
    folder = tmp_path / "checkpoints"
    on_ranks(3, saved, folder, ways)
    manifest = manifests.verify(folder / "step-00000002")
    assert {name for name in manifest.files if name.startswith("ranks")} == {"ranks-0.pt", "ranks-1.pt", "ranks-2.pt"}
    assert [own for own, _ in on_ranks(3, loaded, folder, ways)] == [({1.0}, 0), ({2.0}, 1), ({3.0}, 2)]


@pytest.mark.parametrize("ways", [WAYS["one writer"], WAYS["sharded"]], ids=["one writer", "sharded"])
def test_on_another_number_of_ranks_nobody_gets_anothers(tmp_path: Path, ways: dict[str, Any]) -> None:
    folder = tmp_path / "checkpoints"
    on_ranks(2, saved, folder, ways)
    answers = on_ranks(3, loaded, folder, {})
    assert [own for own, _ in answers] == [None, None, None]
    assert (
        "the checkpoint has a replica of each of 2 ranks, and this run has 3 ranks: all start with the average" in answers[0][1]
    )


def test_a_damaged_file_of_one_rank_means_the_checkpoint_before_on_all(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    on_ranks(2, saved, folder, {"keep_last": 3})
    path = folder / "step-00000002" / "ranks-1.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (_, said), (own, _) = on_ranks(2, loaded, folder, {})
    assert "ranks-1" in said
    assert "step-00000002" in said
    assert own == ({2.0}, 1)


def test_what_it_adds_is_said_once_where_it_is_much(tmp_path: Path) -> None:
    said, other = on_ranks(2, saved, tmp_path / "much", {}, 500_000)
    assert said.count("each checkpoint also has the state of each of 2 ranks, 4 MB in all; training waited 0.") == 1
    assert not other
    assert "the state of each of" not in on_ranks(2, saved, tmp_path / "little", {})[0]


def nothing_apart(folder: Path) -> None:
    replica = Replica(1)
    replica.own = None
    Checkpoints(folder, background=False).save({"sync": replica}, 1)


def test_a_checkpoint_without_it_is_one_that_earlier_versions_read(tmp_path: Path) -> None:
    on_ranks(2, nothing_apart, tmp_path)
    manifest = Manifest.read(tmp_path / "step-00000001")
    assert (manifest.version, sorted(manifest.files)) == (1, ["rng.pt", "sync.pt"])


def test_no_part_may_be_called_as_these_files_are() -> None:
    for name in ("ranks", "ranks-0"):
        with pytest.raises(ConfigError, match="the name becomes a file"):
            Checkpoints(Path("unused")).save({name: Box(1)}, 1)


@pytest.mark.parametrize(
    "order", [("model", "optimizer", "sync"), ("optimizer", "sync", "model"), ("sync", "model", "optimizer")]
)
def test_a_strategy_is_loaded_first_wherever_it_is_among_the_parts(order: tuple[str, ...], tmp_path: Path) -> None:
    """It adds the group that the run has added, which the state of the optimizer has."""

    def parts() -> dict[str, Any]:
        model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        optimizer = torch.optim.Adam(model[0].parameters())
        return {"model": model, "optimizer": optimizer, "sync": AllReduce().attach(model, optimizer)}

    saved, loaded = parts(), parts()
    saved["optimizer"].add_param_group({"params": list(saved["model"][1].parameters()), "lr": 0.5})
    saved["sync"].follow()
    Checkpoints(tmp_path, background=False).save({name: saved[name] for name in order}, 1)
    assert Checkpoints(tmp_path).resume({name: loaded[name] for name in order}) == 1
    assert [group["lr"] for group in loaded["optimizer"].param_groups] == [0.001, 0.5]


# --- what a script has left out

_LEFT_OUT = "warning: the checkpoint does not contain the "


def of_own_loop(folder: Path, parts: list[str], every: int, break_after: int | None = None) -> list[str]:
    """What the saves of four steps of one epoch print of parts that they do not contain. `break_after`: the loop ends with this
    step, before its save."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = LocalSGD(every=every).attach(model, optimizer)
    data = TensorDataset(torch.ones(16, 2))
    loader = Loader(data, global_batch_size=4, max_epochs=1)
    evaluated = Loader(data, global_batch_size=4, shuffle=False)
    given = {"model": model, "optimizer": optimizer, "loader": loader, "sync": sync}
    checkpoints = Checkpoints(folder, background=False)
    step = 0
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for step, micro_batches in enumerate(loader, 1):
            for [x] in micro_batches:
                sync.backward(model(x).sum(), len(x))
            sync.step()
            Evaluate(evaluated, lambda model, batch: {"loss": (model(batch[0]).sum(), len(batch[0]))}).figures(model, sync)
            if step == break_after:
                break
            checkpoints.save({name: given[name] for name in parts}, step)
        del micro_batches
        gc.collect()
        sync.finish()
        checkpoints.save({name: given[name] for name in parts}, step + 1)
    return [line.removeprefix(_LEFT_OUT) for line in out.getvalue().splitlines() if line.startswith(_LEFT_OUT)]


def test_a_save_in_the_middle_of_an_epoch_without_its_loader_is_one_warning(tmp_path: Path) -> None:
    [told, other] = on_ranks(2, of_own_loop, tmp_path, ["model", "optimizer", "sync"], 1)
    assert told == [
        "Loader: a resumed run would read its data from the start; give it to save() and resume() as one of the parts, "
        '{..., "loader": ...}'
    ]
    assert other == []


@pytest.mark.parametrize(("every", "number"), [(2, 1), (1, 0)], ids=["between averages", "right after them"])
def test_a_save_of_one_replica_without_its_strategy_is_one_warning(tmp_path: Path, every: int, number: int) -> None:
    told = on_ranks(2, of_own_loop, tmp_path, ["model", "optimizer", "loader"], every)[0]
    assert [line.split("; ")[0] for line in told] == ["LocalSGD: its model is the replica of rank 0, not the average"][:number]


def test_a_save_of_everything_and_one_on_a_single_rank_and_one_after_the_loop_say_nothing(tmp_path: Path) -> None:
    assert on_ranks(2, of_own_loop, tmp_path, ["model", "optimizer", "loader", "sync"], 2) == [[], []]
    assert on_ranks(1, of_own_loop, tmp_path, ["model", "loader"], 2) == [[]]
    assert on_ranks(2, of_own_loop, tmp_path, ["model"], 1, break_after=1) == [[], []]
