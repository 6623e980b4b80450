"""Background saves: they have the state of their moment, run one at a time, call no collectives, and report errors."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import random
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from boxes import Box, loaded, of_step, step_in
from ranks import on_ranks, scripts_on_ranks
from torch import nn

from rankwise.checkpoint import Checkpoints, writer
from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.background import Background, Pinned, Snapshot
from rankwise.dist import comm, seed
from rankwise.errors import CheckpointError


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No file is written before this event is set."""
    gate = threading.Event()
    hold(gate, lambda name, value: monkeypatch.setattr(writer, name, value))
    yield gate
    gate.set()


def hold(gate: threading.Event, put: Callable[[str, Any], None]) -> None:
    write_file = writer.write_file

    def wait_and_write(path: Path, state: Any) -> Any:
        assert gate.wait(60.0)
        return write_file(path, state)

    put("write_file", wait_and_write)


# --- its end


@pytest.mark.parametrize("end", [Checkpoints.wait, Checkpoints.close])
def test_a_copy_of_the_state_is_not_kept_until_the_process_ends(tmp_path: Path, end: Callable[[Checkpoints], object]) -> None:
    """A process may train hundreds of models, one after the other."""
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(of_step(step), step)
        assert end(checkpoints) is None
    kept = weakref.ref(checkpoints)
    del checkpoints
    gc.collect()
    assert kept() is None
    assert loaded(tmp_path) == 2


# --- the moment


def test_what_is_written_is_the_state_at_the_moment_of_the_save(tmp_path: Path, held: threading.Event) -> None:
    parts = {**of_step(1), "loader": Box({"step": 1, "list": [torch.tensor([1])]})}
    checkpoints = Checkpoints(tmp_path, background=True)
    checkpoints.save(parts, 1)
    expected = [random.random(), np.random.rand(), torch.rand(()).item()]
    parts["model"].state["value"].fill_(99.0)
    parts["loader"].state["value"]["step"] = 99
    parts["loader"].state["value"]["list"][0].fill_(99)
    parts["loader"].state["value"]["list"].append("more")
    parts["loader"].state["new"] = 99
    assert list(tmp_path.glob("step-*")) == []
    held.set()
    checkpoints.wait()
    assert loaded(tmp_path) == 1
    assert [random.random(), np.random.rand(), torch.rand(()).item()] == expected


def test_a_model_and_its_optimizer_that_go_on_meanwhile_are_saved_as_they_were(tmp_path: Path, held: threading.Event) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])

    def step() -> None:
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()

    step()
    was = {name: value.clone() for name, value in model.state_dict().items()}
    moment = optimizer.state_dict()["state"][0]["exp_avg"].clone()
    checkpoints = Checkpoints(tmp_path, background=True)
    path = checkpoints.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, 1)
    for _ in range(5):
        step()
    held.set()
    checkpoints.wait()
    states = {file.stem: torch.load(file, weights_only=True) for file in path.glob("*.pt")}
    assert all(torch.equal(value, was[name]) for name, value in states["model"].items())
    assert torch.equal(states["optimizer"]["state"][0]["exp_avg"], moment)
    assert states["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert states["scheduler"]["last_epoch"] == 1
    assert states["model"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]


# --- one at a time


def test_a_save_returns_before_it_is_written_and_the_next_waits_for_it(tmp_path: Path, held: threading.Event) -> None:
    checkpoints = Checkpoints(tmp_path, background=True)
    path = checkpoints.save(of_step(1), 1)
    assert not path.exists()
    second = threading.Thread(target=lambda: checkpoints.save(of_step(2), 2))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    assert not path.exists()
    held.set()
    second.join(60.0)
    assert path.exists()
    checkpoints.wait()
    assert loaded(tmp_path) == 2
    assert [p.name for p in checkpoints.all()] == ["step-00000001", "step-00000002"]


def test_the_best_and_the_newest_are_told_after_what_is_under_way(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_best="loss", background=True)
    for step, figure in ((1, 3.0), (2, 2.0), (3, 2.5)):
        assert checkpoints.is_best({"loss": figure}) == (step < 3)
        path = checkpoints.save(of_step(step), step, metrics={"loss": figure})
        if step == 2:
            assert checkpoints.best() == path
    found = checkpoints.find_latest()
    assert found is not None
    assert found[1].step == 3


def test_a_program_that_ends_finishes_what_it_began(tmp_path: Path) -> None:
    code = (
        "import torch\nfrom pathlib import Path\nfrom rankwise.checkpoint import Checkpoints, writer\n"
        "write = writer.write_file\n"
        "def slow(path, state):\n    import time\n    time.sleep(0.1)\n    return write(path, state)\n"
        "writer.write_file = slow\n"
        f"Checkpoints(Path({str(tmp_path)!r}), background=True).save({{'model': torch.nn.Linear(2, 2)}}, 7)\n"
    )
    Path("train.py").write_text(code)
    [done] = scripts_on_ranks(1, "train.py")
    assert done.returncode == 0, done.stdout
    assert [manifests.verify(path).step for path in tmp_path.glob("step-*")] == [7]


def test_a_step_is_saved_twice_behind_the_loop_though_the_first_is_still_being_written(
    tmp_path: Path, monkeypatch: Any
) -> None:
    write, first = writer.write_file, threading.Event()

    def slow(path: Path, state: Any) -> Any:
        if not first.is_set():
            first.set()
            time.sleep(0.1)
        return write(path, state)

    monkeypatch.setattr(writer, "write_file", slow)
    checkpoints = Checkpoints(tmp_path, keep_last=9)
    for _ in range(2):
        checkpoints.save(of_step(3), 3)
    checkpoints.wait()
    assert checkpoints.resume(of_step(0)) == 3
    assert [path.name for path in checkpoints.all()] == ["step-00000003-2"]  # the first is removed after it


ENDS = """
import torch, rankwise
from pathlib import Path
Path("checkpoints").write_text("in the way")
parts = {"model": torch.nn.Linear(2, 2)}
checkpoints = rankwise.Checkpoints("checkpoints")
assert rankwise.init().rank == 0
checkpoints.save(parts, 7)
print("the last line", flush=True)
"""


@pytest.mark.parametrize("starter", [["python"], ["rankwise", "run", "--nproc", "1"]], ids=["python", "rankwise"])
@pytest.mark.one_in(2)
def test_a_program_whose_last_save_fails_after_its_last_line_ends_with_that_error(starter: list[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ENDS)
    command = [sys.executable, *(["-m", *starter] if starter[0] == "rankwise" else []), "train.py"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert ended.returncode == 1, ended
    assert "the last line" in ended.stdout
    assert "error: cannot write" in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


# --- errors


def test_a_save_that_fails_is_an_error_of_the_next_and_the_one_after_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.write_text("in the way")
    checkpoints = Checkpoints(folder, background=True)
    checkpoints.save(of_step(1), 1)
    error = checkpoints.close()
    assert isinstance(error, CheckpointError)
    assert checkpoints.failure is error
    folder.unlink()
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000001: File exists"):
        checkpoints.save(of_step(2), 2)
    assert checkpoints.failure is None
    checkpoints.wait()
    checkpoints.save(of_step(3), 3)
    checkpoints.wait()
    assert [p.name for p in checkpoints.all()] == ["step-00000003"]


def test_an_error_is_raised_by_wait_once_whatever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise LookupError("odd")

    monkeypatch.setattr(writer, "write_file", fail)
    checkpoints = Checkpoints(tmp_path, background=True)
    checkpoints.save(of_step(1), 1)
    with pytest.raises(LookupError, match="odd"):
        checkpoints.wait()
    checkpoints.wait()
    assert list(tmp_path.iterdir()) == []


def test_work_that_no_thread_can_be_had_for_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    background = Background()
    background.start(lambda: done.append(1))
    assert done == [1]
    background.wait()


@pytest.mark.parametrize("error", [RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError()])
def test_a_state_that_there_is_no_memory_to_copy_is_written_while_the_loop_waits(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Snapshot, states: dict[str, Any]) -> None:
        raise error

    monkeypatch.setattr(Snapshot, "take", refuse)
    checkpoints = Checkpoints(tmp_path, background=True)
    assert checkpoints.save(of_step(1), 1).exists()
    assert loaded(tmp_path) == 1
    checkpoints.wait()


def failing_on_ranks(folder: Path) -> list[str]:
    checkpoints = Checkpoints(folder / "file" / "checkpoints", background=True)
    seen = []
    for act in (lambda: checkpoints.save(of_step(1), 1), checkpoints.wait, lambda: checkpoints.save(of_step(2), 2)):
        try:
            act()
        except CheckpointError as error:
            seen.append(str(error))
    checkpoints.close()
    comm.barrier()
    return seen


def test_every_rank_hears_of_a_save_that_failed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    answers = on_ranks(2, failing_on_ranks, tmp_path)
    assert answers[0] == answers[1]
    assert len(answers[0]) == 1
    assert "step-00000001: Not a directory" in answers[0][0]


# --- no collective in the background


def save_among_collectives(folder: Path) -> tuple[set[str], float]:
    """(the threads that communicated, the sum of what was reduced). One reduction per step, while saves are written."""
    seen: set[str] = set()

    def noted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.add(threading.current_thread().name)
            return original(*args, **kwargs)

        return call

    for name in ("all_gather_object", "broadcast_object", "all_reduce", "barrier", "patient"):
        setattr(comm, name, noted(getattr(comm, name)))
    seed.seed_rank(3, comm.rank())
    checkpoints = Checkpoints(folder, keep_last=2, keep_best="loss", background=True)
    total = 0.0
    for step in range(1, 31):
        total += float(comm.all_reduce(torch.ones(1000) * (comm.rank() + step))[0])
        if step % 3 == 0:
            checkpoints.is_best({"loss": 50.0 - step}) if step % 2 else None
            checkpoints.save(of_step(step, 20_000), step, metrics={"loss": 50.0 - step})
    checkpoints.wait()
    return seen, total


def test_no_collective_is_called_behind_the_loop(tmp_path: Path) -> None:
    total = sum(2 * step + 1 for step in range(1, 31))
    assert on_ranks(2, save_among_collectives, tmp_path) == [({"MainThread"}, float(total))] * 2
    assert loaded(tmp_path) == 30
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000027", "step-00000030"]


# --- the copy


def nest() -> dict[str, Any]:
    shared = torch.arange(1000.0)
    views: Any = OrderedDict(whole=shared, view=shared[5:], turned=shared.view(10, 100).t())
    views._metadata = {"": {"version": 2}}
    return {
        "views": views, "parameter": nn.Parameter(torch.ones(3), False), "grad": torch.ones(2, requires_grad=True),
        "empty": [torch.empty(0, 3), torch.empty(0)], "half": (torch.ones(2, dtype=torch.bfloat16), 1, None, "text"),
        "sparse": torch.eye(3).to_sparse(), "conj": torch.ones(2, dtype=torch.complex64).conj(), "set": {1, 2},
        "number": np.float32(2.5),
    }  # fmt: skip


def test_a_copy_is_equal_and_hangs_on_nothing_of_the_original() -> None:
    state = nest()
    taken = Snapshot().take({"part": state})["part"]
    for name, tensor in manifests.tensors(state):
        other = dict(manifests.tensors(taken))[name]
        assert type(other) is type(tensor)
        assert torch.equal(other.to_dense(), tensor.to_dense())
        assert (other.dtype, other.requires_grad) == (tensor.dtype, tensor.requires_grad)
        if not tensor.is_sparse and tensor.numel():
            assert other.stride() == tensor.stride()
            assert other.data_ptr() != tensor.data_ptr()
    assert taken["views"]["whole"].data_ptr() + 20 == taken["views"]["view"].data_ptr()
    assert taken["views"]._metadata == {"": {"version": 2}}
    assert taken["views"]._metadata is not state["views"]._metadata
    assert (type(taken["views"]), taken["half"][1:], taken["set"]) == (OrderedDict, (1, None, "text"), {1, 2})
    assert taken["set"] is not state["set"]
    assert type(taken["number"]) is float


@pytest.mark.parametrize("width", [16, 768])
def test_pinned_buffers_take_little_more_memory_than_the_state(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch rounds each allocation of pinned memory up to a power of two: for a GPT the buffers were 1.57 times its state."""
    made: list[int] = []
    allocation = Pinned._allocation

    def counted(self: Pinned, size: int) -> Any:
        made.append(len(found := allocation(self, size)))
        return found

    monkeypatch.setattr(Pinned, "_allocation", counted)
    layer = [width, 3 * width * width, 3 * width, width * width, width, 4 * width * width, 4 * width, 4 * width * width, width]
    sizes = [0, 3, 5, 257 * width, *(4 * n for _ in range(3) for n in [50257 * width, *(12 * layer)])]
    pinned = Pinned(pin=False)
    buffers = [pinned(size, torch.uint8) for size in sizes]
    assert [buffer.untyped_storage().nbytes() for buffer in buffers] == sizes
    assert sum(made) < 1.3 * sum(sizes)
    spans = sorted((buffer.data_ptr(), buffer.data_ptr() + size) for buffer, size in zip(buffers, sizes, strict=True) if size)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    saved = io.BytesIO()
    torch.save(buffers[3], saved)
    assert saved.tell() < sizes[3] + 4096  # and not the whole allocation


@pytest.mark.parametrize("short_first", [True, False])
def test_tensors_over_one_numpy_array_keep_their_own_elements(short_first: bool, tmp_path: Path) -> None:
    array = np.arange(100.0)
    parts = {"head": torch.from_numpy(array[:10]), "full": torch.from_numpy(array), "tail": torch.from_numpy(array[90:])}
    state = dict(sorted(parts.items(), key=lambda part: len(part[1]), reverse=not short_first))
    checkpoints = Checkpoints(tmp_path, background=True)
    checkpoints.save({"part": Box(state)}, 1)
    checkpoints.wait()
    box = Box()
    assert checkpoints.load_latest({"part": box}) is not None
    for name, tensor in parts.items():
        assert torch.equal(box.state["value"][name], tensor)


def test_the_second_copy_is_in_the_memory_of_the_first_also_when_the_state_has_grown() -> None:
    snapshot = Snapshot()
    state = {"a": torch.ones(1000), "b": torch.zeros(1000), "c": torch.ones(10)}
    first = {name: t.data_ptr() for name, t in snapshot.take({"part": state})["part"].items()}
    more = {**state, "d": torch.full((10,), 5.0)}
    second = snapshot.take({"part": more})["part"]
    places = {name: t.data_ptr() for name, t in second.items()}
    assert {places[name] for name in "abc"} == set(first.values())
    assert len(set(places.values())) == 4
    assert all(torch.equal(second[name], value) for name, value in more.items())
    third = snapshot.take({"part": {"a": state["a"]}})["part"]
    assert torch.equal(third["a"], state["a"])


# --- a Trainer


def fit_with_a_disk_in_the_way(folder: Path, n: int) -> tuple[str, list[str]]:
    """Until step 3, a file is in the place of the checkpoint folder: this is reported at the step after the save, and training
    continues."""
    from test_trainer_checkpoints import end_each_save, fit

    from rankwise.training.state import TrainState

    end_each_save()
    there = folder / "checkpoints"
    told: list[str] = []
    out = io.StringIO()

    def act(state: TrainState) -> None:
        told.append(f"{state.step}: {out.getvalue().count('warning: cannot write')}")
        if comm.is_main() and state.step == 1:
            there.write_text("in the way")
        if comm.is_main() and state.step == 4:
            there.unlink()

    fit(folder, 6, said=out, actions=[act], at_steps=(2, 5))
    return out.getvalue(), told


def test_a_save_of_a_trainer_that_fails_is_told_at_the_next_step(tmp_path: Path) -> None:
    answers = on_ranks(2, fit_with_a_disk_in_the_way, tmp_path / "run", 2)
    said, told = answers[0]
    assert said.count("step-00000002: ") == 1
    assert "training continues" in said
    assert told == ["1: 0", "2: 0", "3: 1", "4: 1", "5: 1", "6: 1"]
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000005", "step-00000006"]


def broken_fit(folder: Path) -> tuple[str, list[int], bool]:
    from test_trainer_checkpoints import error_of, fit

    from rankwise.training.state import TrainState

    gate = threading.Event()
    hold(gate, lambda name, value: setattr(writer, name, value))

    def act(state: TrainState) -> None:
        if state.step == 3:
            threading.Timer(0.2, gate.set).start()
            raise ValueError("of the loop")

    with contextlib.redirect_stdout(io.StringIO()):
        kind, text = error_of(fit, folder, 6, actions=[act], at_steps=(2,))
    return (
        f"{kind}: {text}",
        [manifests.verify(p).step for p in (folder / "checkpoints").iterdir()],
        (folder / "lease.json").exists(),
    )


def test_a_loop_that_breaks_finishes_its_save_before_another_may_write(tmp_path: Path) -> None:
    assert on_ranks(1, broken_fit, tmp_path / "run") == [("ValueError: of the loop", [2], False)]


def resumed_from_each(folder: Path) -> list[bool]:
    """For each checkpoint of a training that was never stopped: does a run that resumes from it end the same?"""
    import shutil

    from test_trainer_checkpoints import fit

    unbroken, _ = fit(folder / "run", 8, every_s=0, keep_last=99)
    same = []
    for step in range(1, 8):
        shutil.copytree(folder / "run", folder / str(step)) if comm.is_main() else None
        comm.barrier()
        if comm.is_main():
            for later in range(step + 1, 9):
                shutil.rmtree(folder / str(step) / "checkpoints" / f"step-{later:08d}")
        comm.barrier()
        same.append(fit(folder / str(step), 8)[0] == unbroken)
    return same


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.one_in(2)
def test_each_checkpoint_that_was_written_behind_the_loop_leads_to_the_same_end(n: int, tmp_path: Path) -> None:
    assert on_ranks(n, resumed_from_each, tmp_path) == [[True] * 7] * n


def test_of_step_is_seen_through_a_copy() -> None:
    parts = of_step(4)
    taken = Snapshot().take({name: part.state_dict() for name, part in parts.items()})
    assert step_in({name: Box(state["value"]) for name, state in taken.items()}) == 4
