"""Checkpoints: complete or absent; corruption is found and named, and the checkpoint before it is used."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks  # its forkserver, for writers that are killed
import torch
from boxes import Box, background, loaded, of_step, save, small_disk, step_in
from ranks import on_ranks
from torch import nn

from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint import manifest as manifests
from rankwise.dist import comm, seed
from rankwise.errors import CheckpointError, ConfigError

__all__ = ["background", "small_disk"]  # fixtures

FILES = ["manifest.json", "model.pt", "loader.pt", "rng.pt"]


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not re.fullmatch(r"step-\d{8}(-\d+)?", p.name))


def contents(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def saved(folder: Path, *steps: int, keep_last: int = 9, background: bool = False) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep_last=keep_last, background=background)
    for step in steps:
        assert checkpoints.save(of_step(step), step) == folder / f"step-{step:08d}"
    checkpoints.wait()
    return checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "checkpoints"


# --- saving and loading


def test_nested_states_come_back_equal(folder: Path, background: bool) -> None:
    tensor = torch.randn(3, 4, dtype=torch.float64)
    state = {
        "none": None, "bool": True, "int": 2**62, "float": float("inf"), "text": "ä/\n", "tuple": (1, (2.5, "x")), "list": [[]],
        "keys": {0: {"exp_avg": tensor}, (1, 2): "tuple key"}, "ordered": OrderedDict(b=1, a=2), "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3), "bool_tensor": torch.tensor([True, False]), "half": torch.ones(2, dtype=torch.bfloat16),
        "transposed": tensor.t(), "slice": tensor[1:, 2], "parameter": nn.Parameter(tensor), "bytes": b"\0\xff",
    }  # fmt: skip
    checkpoints = Checkpoints(folder, background=background)
    checkpoints.save({"a": Box(state), "b": Box()}, 3, {"threads": 2, "nested": {"x": [1]}})
    checkpoints.wait()
    parts = {"a": Box(), "b": Box("other")}
    manifest = Checkpoints(folder, background=False).load_latest(parts)
    assert manifest is not None
    assert (manifest.step, manifest.world_size, manifest.torch) == (3, 1, torch.__version__)
    assert manifest.info == {"threads": 2, "nested": {"x": [1]}}
    assert parts["b"].state == {"value": None}
    back = parts["a"].state["value"]
    assert list(back) == list(state)
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            assert (back[name].dtype, back[name].stride()) == (value.dtype, value.stride())
            assert type(back[name]) is type(value)
            assert torch.equal(back[name], value)
        elif name != "keys":
            assert back[name] == value
            assert type(back[name]) is type(value)
    assert torch.equal(back["keys"][0]["exp_avg"], tensor)
    assert back["keys"][1, 2] == "tuple key"


def test_tensors_that_share_memory_are_written_once_and_share_it_again(folder: Path, background: bool) -> None:
    shared = torch.arange(10_000.0)
    checkpoints = Checkpoints(folder, background=background)
    path = checkpoints.save({"a": Box([shared, shared[5:], shared.view(100, 100)])}, 1)
    checkpoints.wait()
    assert (path / "a.pt").stat().st_size < 60_000
    box = Box()
    Checkpoints(folder, background=False).load_latest({"a": box})
    first, second, _ = box.state["value"]
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert torch.equal(second, shared[5:])


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    go_on(model, optimizer, scheduler, 3)
    return model, optimizer, scheduler


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()


def test_a_model_its_optimizer_and_the_random_stream_go_on_as_if_nothing_had_been(folder: Path, background: bool) -> None:
    model, optimizer, scheduler = trained()
    checkpoints = Checkpoints(folder, background=background)
    checkpoints.save({"model": model, "optimizer": optimizer, "scheduler": scheduler}, 3)
    go_on(model, optimizer, scheduler, 4)
    expected = model.state_dict()
    checkpoints.wait()
    torch.manual_seed(99)
    other, other_optimizer, other_scheduler = trained()
    Checkpoints(folder, background=False).load_latest(
        {"model": other, "optimizer": other_optimizer, "scheduler": other_scheduler}
    )
    shutil.rmtree(folder)  # what was loaded does not depend on the file
    go_on(other, other_optimizer, other_scheduler, 4)
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_every_file_is_read_by_torch_alone_and_names_have_no_prefix(folder: Path) -> None:
    model, optimizer, scheduler = trained()
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    path = Checkpoints(folder, background=False).save(parts, 3)
    assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "model.pt", "optimizer.pt", "rng.pt", "scheduler.pt"]
    states = {p.stem: torch.load(p, weights_only=True) for p in path.glob("*.pt")}
    assert list(states["model"]) == list(model.state_dict())
    assert not any(name.startswith("module.") for name in states["model"])
    model.load_state_dict(states["model"])
    manifest = manifests.verify(path)
    assert set(manifest.files) == {f"{name}.pt" for name in states}
    assert set(manifest.files["model.pt"].tensors) == set(model.state_dict())


def test_without_a_checkpoint_nothing_is_loaded_and_nothing_made(folder: Path) -> None:
    assert loaded(folder) is None
    assert Checkpoints(folder, background=False).find_latest() is None
    assert not folder.exists()


def test_a_folder_that_cannot_be_read_is_an_error_and_not_a_start_from_scratch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Checkpoints(folder, background=False).save({"model": nn.Linear(2, 2)}, 1)
    listdir, scandir = os.listdir, os.scandir  # root may read any folder

    def refused(path: Any, look: Any) -> Any:
        if Path(path) == folder:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return look(path)

    monkeypatch.setattr(os, "listdir", lambda path=".": refused(path, listdir))
    monkeypatch.setattr(os, "scandir", lambda path=".": refused(path, scandir))
    with pytest.raises(CheckpointError, match=rf"the folder {folder} cannot be read \(Permission denied\)"):
        Checkpoints(folder).load_latest({"model": nn.Linear(2, 2)})
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoints(folder, background=False).save({"model": nn.Linear(2, 2)}, 2)


def test_the_newest_is_loaded_and_the_oldest_are_pruned(folder: Path, background: bool) -> None:
    for keep_last, kept in ((1, [9]), (2, [5, 9]), (3, [3, 5, 9]), (9, [1, 3, 5, 9])):
        checkpoints = saved(folder, 1, 3, 5, 9, keep_last=keep_last, background=background)
        assert [path.name for path in checkpoints.all()] == [f"step-{s:08d}" for s in kept]
        assert leftovers(folder) == []
        assert loaded(folder) == 9
        shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="keep_last=0"):
        Checkpoints(folder, keep_last=0, background=False)


@pytest.mark.parametrize("keep_last", [1, 2, 3, 4, 5, 6, 7, 20])
def test_as_many_stay_as_are_to_be_kept_however_many_there_are(folder: Path, keep_last: int) -> None:
    checkpoints = Checkpoints(folder, keep_last=keep_last, background=False)
    for step in range(1, 9):
        checkpoints.save(of_step(step), step)
        kept = [f"step-{s:08d}" for s in range(max(1, step - keep_last + 1), step + 1)]
        assert [path.name for path in checkpoints.all()] == kept


@pytest.mark.parametrize("times", [2, 3, 4])
def test_a_step_that_is_saved_again_is_the_one_that_is_loaded(folder: Path, times: int, background: bool) -> None:
    checkpoints = saved(folder, 1, background=background)
    for time in range(1, times + 1):
        path = save(checkpoints, 2, time=Box(time))
        assert path.exists()
        box = Box()
        checkpoints.load_latest({"time": box})
        assert box.state == {"value": time}
        assert checkpoints.all()[-1] == path
        assert len(checkpoints.all()) == 2
    saved(folder, 3, keep_last=1)
    assert contents(folder) == {"step-00000003"} | {f"step-00000003/{name}" for name in FILES}


def test_a_folder_that_is_no_checkpoint_of_ours_is_left_alone(folder: Path) -> None:
    saved(folder, 1)
    (folder / "step-00000001-best").mkdir()
    (folder / "notes.txt").write_text("mine")
    saved(folder, 2, 3, keep_last=1)
    assert loaded(folder) == 3
    assert leftovers(folder) == ["notes.txt", "step-00000001-best"]


def test_the_time_of_saving_is_metered(folder: Path) -> None:
    checkpoints = Checkpoints(folder, background=False)
    assert checkpoints.wait_s == 0.0
    checkpoints.save(of_step(1), 1)
    assert 0.0 < checkpoints.wait_s < 60.0


# --- damage


def newest(folder: Path) -> Path:
    return Checkpoints(folder, background=False).all()[-1]


@pytest.mark.parametrize("name", ["model.pt", "loader.pt", "rng.pt", "manifest.json"])
@pytest.mark.parametrize("damage", ["missing", "emptied", "truncated", "byte", "zeroed", "hole", "folder"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(
    folder: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(folder, 1, 2)
    path = newest(folder) / name
    data = bytearray(path.read_bytes())
    if damage in ("missing", "folder"):
        path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        middle = len(data) // 2
        hole = data[: middle - 50] + bytes(100) + data[middle + 50 :]
        data[middle] ^= 0x80
        kinds = {"emptied": b"", "truncated": data[:-100], "byte": data, "zeroed": bytes(len(data)), "hole": hole}
        path.write_bytes(kinds[damage])
    assert loaded(folder) == 1
    said = capsys.readouterr().out
    assert "warning: skipped a checkpoint" in said
    assert str(path) in said


def flips(path: Path, count: int, rng: random.Random) -> Iterator[tuple[int, int]]:
    """Flip one random bit of the file, `count` times; the file is intact again after each."""
    whole = path.read_bytes()
    for _ in range(count):
        byte, bit = rng.randrange(len(whole)), rng.randrange(8)
        data = bytearray(whole)
        data[byte] ^= 1 << bit
        path.write_bytes(data)
        yield byte, bit
    path.write_bytes(whole)


def test_any_single_bit_that_flips_in_a_part_is_found_and_the_file_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(folder, 1, 2)
    rng = random.Random(0)
    for name in ("model.pt", "loader.pt", "rng.pt"):
        path = newest(folder) / name
        for at in flips(path, 25, rng):
            assert loaded(folder) == 1, f"bit {at} of {name}"
            assert str(path) in capsys.readouterr().out
    assert loaded(folder) == 2


def test_a_bit_that_flips_in_a_manifest_is_found_or_changes_no_part(folder: Path) -> None:
    saved(folder, 1, 2)
    for at in flips(newest(folder) / manifests.NAME, 150, random.Random(1)):
        parts = of_step(-1)
        manifest = Checkpoints(folder, background=False).load_latest(parts)
        assert manifest is not None
        assert step_in(parts) in (1, 2), at


@pytest.mark.parametrize("field", ["step", "world_size", "torch", "info"])
def test_a_bit_that_flips_in_a_figure_of_the_manifest_is_found(folder: Path, field: str) -> None:
    saved(folder, 1)
    Checkpoints(folder, background=False).save(of_step(4), 4, {"threads": 4})
    path = newest(folder) / manifests.NAME
    text = path.read_text()
    old, new = {
        "step": ('"step": 4', '"step": 5'),
        "world_size": ('"world_size": 1', '"world_size": 3'),
        "torch": (f'"torch": "{torch.__version__[0]}', f'"torch": "{chr(ord(torch.__version__[0]) ^ 1)}'),
        "info": ('"threads": 4', '"threads": 5'),
    }[field]
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    found = Checkpoints(folder, background=False).find_latest()
    assert found is not None
    assert found[0].name == "step-00000001"


def test_the_damaged_tensor_is_named_where_a_bit_lies_in_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(folder, 1, 2)
    path = newest(folder) / "model.pt"
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((200,), 2.0).numpy().tobytes()) + 401] ^= 1
    path.write_bytes(data)
    assert loaded(folder) == 1
    said = capsys.readouterr().out
    assert f"{path} is corrupted in tensor value" in said


def test_when_all_are_damaged_the_error_says_what_to_type(folder: Path) -> None:
    saved(folder, 1, 2)
    for path in Checkpoints(folder, background=False).all():
        (path / "model.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact \(.*model.pt has 0 of .*--fresh.*--name"):
        loaded(folder)


@pytest.mark.parametrize(("keep_last", "damaged"), [(1, [400]), (2, [400, 500])])
def test_a_save_survives_though_damaged_checkpoints_have_higher_steps(folder: Path, keep_last: int, damaged: list[int]) -> None:
    """The run went back to a step before the corrupted ones; what it saves now is the only intact checkpoint."""
    saved(folder, 200, *damaged)
    for step in damaged:
        (folder / f"step-{step:08d}" / "model.pt").write_bytes(b"")
    assert loaded(folder) == 200
    path = Checkpoints(folder, keep_last=keep_last, background=False).save(of_step(300), 300)
    assert path.exists()
    assert loaded(folder) == 300


def test_steps_of_more_digits_are_newer(folder: Path) -> None:
    checkpoints = saved(folder, 99_999_999, keep_last=1)
    checkpoints.save(of_step(100_000_000), 100_000_000)
    assert loaded(folder) == 100_000_000


# --- writers that die


def save_for_ever(folder: Path, pipe: Any, background: bool) -> None:
    torch.set_num_threads(1)
    checkpoints = Checkpoints(folder, background=background)
    step = 0
    while True:
        step += 1
        pipe.send(step)
        checkpoints.save(of_step(step, 20_000), step)


@pytest.mark.stress
def test_a_writer_killed_at_any_moment_leaves_whole_checkpoints_alone(folder: Path, background: bool) -> None:
    context = multiprocessing.get_context(ranks._CONTEXT.get_start_method())
    rng = random.Random(0)
    hit = 0
    for kill in range(400):
        if kill >= 20 and hit:
            break
        reader, pipe = context.Pipe(duplex=False)
        writer = context.Process(target=save_for_ever, args=(folder, pipe, background))
        writer.start()
        pipe.close()
        for _ in range(3):
            begun = reader.recv()
        writer.join(rng.uniform(0.0, 0.02))  # the random moment
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
        while reader.poll():
            try:
                begun = reader.recv()
            except EOFError:
                break
        reader.close()
        found = loaded(folder)
        assert found is not None
        assert begun - 1 - background <= found <= begun  # the save before it may still have been running
        hit += bool(leftovers(folder))
        for path in Checkpoints(folder, background=False).all():
            manifests.verify(path)
        # The next process finds the folder as if nobody had been killed.
        Checkpoints(folder, background=False).save(of_step(10**7), 10**7)
        assert leftovers(folder) == []
        shutil.rmtree(folder)
    assert hit > 0, "no writer was killed while it wrote"


EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "mmap.__new__", "os.listdir", "os.scandir")


def save_and_die(folder: Path, steps: tuple[int, ...], at_event: int, background: bool) -> None:
    """SIGKILL at file operation number `at_event`. Exits with 0 if there are fewer."""
    torch.set_num_threads(1)
    Checkpoints(folder, background=False).save(of_step(1), 1)  # imports everything that is imported on first use
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in EVENTS:
            count += 1
            if count == at_event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    for step in steps:
        save(Checkpoints(folder, background=background), step)
    os._exit(0)


def moments_of_death(folder: Path, steps: tuple[int, ...], background: bool, first: int = 1, every: int = 1) -> Iterator[int]:
    """The folder after the writer was killed at each of its file operations, one after the other."""
    context = multiprocessing.get_context(ranks._CONTEXT.get_start_method())
    for at_event in itertools.count(first, every):
        shutil.rmtree(folder, ignore_errors=True)
        writer = context.Process(target=save_and_die, args=(folder, steps, at_event, background))
        writer.start()
        writer.join()
        if writer.exitcode == 0:
            break
        assert writer.exitcode == -signal.SIGKILL
        yield at_event
    assert at_event > 10


@pytest.mark.parametrize("first", [1, 2], ids=["odd", "even"])
@pytest.mark.one_in(4)
def test_a_writer_killed_at_any_of_its_file_operations_leaves_a_whole_checkpoint(
    folder: Path, background: bool, first: int
) -> None:
    newest = 1
    for _ in moments_of_death(folder, (2, 3), background, first, every=2):  # the second save prunes
        found = loaded(folder)
        assert found is not None
        assert found >= newest  # a later kill does not leave an older state
        newest = found
        for path in Checkpoints(folder, background=False).all():
            manifests.verify(path)
    assert newest == 3


@pytest.mark.stress
def test_a_writer_killed_while_it_replaces_a_step_leaves_a_whole_checkpoint(folder: Path, background: bool) -> None:
    for at_event in moments_of_death(folder, (1,), background):
        assert loaded(folder) == 1, at_event


# --- disks that are full


@pytest.mark.parametrize("kind", ["one tensor", "many tensors", "text", "numbers"])
@pytest.mark.one_in(3)
def test_a_full_disk_is_an_error_in_bytes_and_leaves_all_as_it_was(small_disk: Path, kind: str, background: bool) -> None:
    folder = small_disk / "checkpoints"
    checkpoints = Checkpoints(folder, background=background)
    save(checkpoints, 1)
    before = contents(small_disk)
    big: dict[str, Any] = {
        "one tensor": torch.zeros(1_000_000),
        "many tensors": [torch.zeros(100) for _ in range(4000)],
        "text": "x" * 4_000_000,
        "numbers": list(range(2**40, 2**40 + 300_000)),
    }
    with pytest.raises(CheckpointError, match=r"cannot write .*step-00000002: it needs [\d.]+ [kM]B, and .*B are free$"):
        save(checkpoints, 2, big=Box(big[kind]))
    assert contents(small_disk) == before
    assert loaded(folder) == 1
    save(checkpoints, 3)  # what fits is still saved
    assert loaded(folder) == 3


def test_a_folder_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path, background: bool) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/checkpoints/step-00000001: Not a directory"):
        save(Checkpoints(tmp_path / "file" / "checkpoints", background=background), 1)


NOT_LOADABLE = (
    lambda: None, np.arange(3), deque([1]), Path("a"), slice(1), defaultdict(int, a=1), object(),
    np.datetime64("2020-01-01"), np.timedelta64(3, "s"), np.longdouble(1.5),
)  # fmt: skip


def test_a_state_that_cannot_be_written_leaves_nothing(folder: Path, background: bool) -> None:
    saved(folder, 1)
    for value in NOT_LOADABLE:
        text = rf"^bad/value/x/1 is a {type(value).__name__}, which could not be loaded from a checkpoint; keep it as"
        with pytest.raises(ConfigError, match=text):
            save(Checkpoints(folder, background=background), 2, bad=Box({"x": [1, value]}))
    assert loaded(folder) == 1
    assert leftovers(folder) == []


def test_a_state_that_no_save_could_contain_is_refused_before_the_first_step(folder: Path) -> None:
    for value in NOT_LOADABLE:
        with pytest.raises(ConfigError, match=rf"^bad/value is a {type(value).__name__}, which"):
            Checkpoints(folder).load_latest({"bad": Box(value)})


def test_a_state_of_numpys_numbers_can_be_read_again(folder: Path, background: bool) -> None:
    """AdamW(lr=np.float64(1e-3)), for example."""
    value = {"a": np.float64(1e-3), "b": [np.int64(3), (np.bool_(True),)], "c": Counter(a=np.int64(2)), "d": {1, 2}}
    save(checkpoints := Checkpoints(folder, background=background), 1, part=Box(value))
    checkpoints.wait()
    box = Box()
    assert Checkpoints(folder, background=False).load_latest({"part": box}) is not None
    assert box.state["value"] == value


def test_a_key_that_is_a_number_of_numpy_is_a_plain_one_when_it_is_read_again(folder: Path, background: bool) -> None:
    """{class: count for class, count in enumerate(np.unique(labels))}, for example."""
    value = OrderedDict({np.int64(7): {np.str_("a"): 1}, "b": {(np.int64(1), 2): torch.ones(2)}, np.float32(0.5): np.int64(2)})
    save(Checkpoints(folder, background=background), 1, part=Box(value))
    box = Box()
    assert Checkpoints(folder, background=False).load_latest({"part": box}) is not None
    found = box.state["value"]
    assert [(type(key), key) for key in found] == [(int, 7), (str, "b"), (float, 0.5)]
    assert [(type(key), key) for key in found[7]] == [(str, "a")]
    assert found["b"][1, 2].tolist() == [1, 1]


@pytest.mark.parametrize("key", [Path("a"), signal.SIGINT, (1, Path("a")), np.datetime64("2020-01-01")], ids=repr)
def test_a_key_that_cannot_be_loaded_is_refused_before_the_first_step_and_by_a_save(folder: Path, key: Any) -> None:
    text = rf"^bad/value/x: the key .* is a {type(key).__name__}, which could not be loaded from a checkpoint; keep it as"
    if isinstance(key, tuple):
        text = r"^bad/value/x: the key \(1, PosixPath\('a'\)\)/1 is a PosixPath, which"
    with pytest.raises(ConfigError, match=text):
        Checkpoints(folder).load_latest({"bad": Box({"x": {key: 1}})})
    with pytest.raises(ConfigError, match=text):
        save(Checkpoints(folder), 1, bad=Box({"x": {key: 1}}))


def test_a_step_may_be_a_number_of_numpy(folder: Path, background: bool) -> None:
    save(Checkpoints(folder, background=background), np.int64(5))  # type: ignore[arg-type]
    assert Checkpoints(folder).resume(of_step(-1)) == 5


def test_a_sparse_tensor_is_refused_by_its_path_before_anything_is_written(folder: Path, background: bool) -> None:
    with pytest.raises(ConfigError, match=r"part/value is a tensor of layout torch.sparse_coo, .* tensor.to_dense\(\)"):
        save(Checkpoints(folder, background=background), 1, part=Box(torch.eye(3).to_sparse()))
    assert not folder.exists() or leftovers(folder) == []


# --- ranks


def refused_info(folder: Path, sharded: bool) -> str:
    """The error of a save in which only the main rank's `info` is wrong."""
    info = {"threads": 2, "device": torch.device("cpu") if comm.is_main() else "cpu"}
    try:
        Checkpoints(folder, sharded=sharded).save(of_step(1), 1, info)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("sharded", [False, True])
def test_info_that_json_cannot_hold_is_refused_on_every_rank_before_anything_is_written(folder: Path, sharded: bool) -> None:
    [said] = set(on_ranks(2, refused_info, folder, sharded))
    assert said.startswith("info['device'] is device(type='cpu'), which a manifest, a JSON file, cannot hold; give texts")
    assert not folder.exists()


def draws() -> list[float]:
    return [random.random(), np.random.rand(), torch.rand(()).item()]


def save_on_ranks(folder: Path) -> tuple[str, list[float]]:
    seed.seed_rank(3, comm.rank())
    draws()
    path = Checkpoints(folder, background=False).save({"model": Box(comm.rank())}, 5)
    return path.name, draws()


def load_on_ranks(folder: Path) -> tuple[Any, list[float], int]:
    seed.seed_rank(77, comm.rank())
    box = Box()
    manifest = Checkpoints(folder, background=False).load_latest({"model": box})
    assert manifest is not None
    return box.state["value"], draws(), manifest.world_size


def test_each_rank_goes_on_with_its_own_random_stream(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = on_ranks(2, save_on_ranks, folder)
    assert [name for name, _ in before] == ["step-00000005"] * 2
    assert before[0][1] != before[1][1]
    after = on_ranks(2, load_on_ranks, folder)
    assert [a[1] for a in after] == [b[1] for b in before]
    assert [(a[0], a[2]) for a in after] == [(0, 2), (0, 2)]  # the value of the main rank
    more = on_ranks(3, load_on_ranks, folder)
    assert [a[1] for a in more[:2]] == [b[1] for b in before]
    assert more[2][1] not in [b[1] for b in before]
    assert on_ranks(1, load_on_ranks, folder)[0][1] == before[0][1]


def load_with_another_listing(folder: Path) -> int:
    """A network file system may show this: other ranks do not yet see the newest checkpoint."""
    checkpoints = Checkpoints(folder, background=False)
    if comm.rank() > 0:
        checkpoints.all = lambda: [folder / "step-00000001"]  # type: ignore[method-assign]
    parts = of_step(-1)
    manifest = checkpoints.load_latest(parts)
    assert manifest is not None
    assert manifest.step == step_in(parts)
    return manifest.step


def test_the_main_rank_chooses_for_all_though_they_list_the_folder_otherwise(folder: Path) -> None:
    saved(folder, 1, 2)
    assert on_ranks(3, load_with_another_listing, folder) == [2, 2, 2]


def load_errors(folder: Path, change: str) -> tuple[str, str]:
    model: Any = nn.Linear(4, 2)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    parts = {"model": model, "optimizer": optimizer}
    if change == "save":
        Checkpoints(folder, background=False).save(parts, 1)
        return "", ""
    if change == "shape":
        parts["model"] = nn.Linear(4, 3)
    elif change == "name":
        parts["model"] = nn.Sequential(nn.Linear(4, 2))
    elif change == "groups":
        parts["optimizer"] = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    elif change == "part":
        parts["scheduler"] = Box()
    elif change == "one rank" and comm.rank() == 1:
        parts["model"] = nn.Linear(4, 3)
    try:
        Checkpoints(folder, background=False).load_latest(parts)
    except Exception as error:
        comm.barrier()  # no rank waits for the others
        return type(error).__name__, str(error)
    return "", ""


def test_a_model_that_does_not_fit_is_a_config_error_on_every_rank(folder: Path) -> None:
    on_ranks(1, load_errors, folder, "save")
    texts = {
        "shape": r"model does not fit its checkpoint .*model.pt: .*size mismatch.*--fresh.*--name",
        "name": r"model does not fit its checkpoint .*Missing key.*--fresh.*--name",
        "groups": r"optimizer does not fit its checkpoint .*--fresh.*--name",
        "part": r"has no part 'scheduler'.*--fresh.*--name",
        "one rank": r"model does not fit its checkpoint .*size mismatch",
    }
    for change, text in texts.items():
        for n in (1, 2):
            if change == "one rank" and n == 1:
                continue
            for kind, said in on_ranks(n, load_errors, folder, change):
                assert kind == "ConfigError", said
                assert re.search(text, said), said


def fail_on_ranks(folder: Path) -> list[tuple[str, str]]:
    seen = []
    for act in (
        lambda: Checkpoints(folder / "file" / "checkpoints", background=False).save({"model": Box(1)}, 1),
        lambda: Checkpoints(folder / "damaged", background=False).load_latest({"model": Box()}),
    ):
        try:
            act()
        except CheckpointError as error:
            seen.append((type(error).__name__, str(error)))
    comm.barrier()
    return seen


def test_a_failure_of_the_main_rank_is_raised_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    (saved(tmp_path / "damaged", 1).all()[0] / "model.pt").write_bytes(b"")
    answers = on_ranks(2, fail_on_ranks, tmp_path)
    assert answers[0] == answers[1]
    assert [text.split(" ")[0] for _, text in answers[0]] == ["cannot", "no"]


def save_without_the_folder(folder: Path, sharded: bool) -> str:
    """The error of a save after the folder has become unreachable for the main rank."""
    checkpoints = Checkpoints(folder, sharded=sharded)
    save(checkpoints, 1)

    def fail(_folder: Any) -> list[str]:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with pytest.MonkeyPatch.context() as patch:
        if comm.is_main():
            patch.setattr(os, "listdir", fail)
        try:
            checkpoints.save(of_step(2), 2)
        except CheckpointError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("sharded", [False, True])
def test_a_folder_that_becomes_unreachable_is_a_checkpoint_error_on_every_rank(folder: Path, sharded: bool) -> None:
    assert (
        on_ranks(2, save_without_the_folder, folder, sharded) == [f"the folder {folder} cannot be read (Stale file handle)"] * 2
    )


def test_a_damaged_checkpoint_is_not_one_of_those_that_are_kept(folder: Path) -> None:
    for step in (1, 2):
        saved(folder, step)
    path = folder / "step-00000002" / "part.pt"
    path = path if path.exists() else next((folder / "step-00000002").glob("*.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    checkpoints = Checkpoints(folder, keep_last=2, background=False)
    assert checkpoints.load_latest(of_step(0)) is not None
    checkpoints.save(of_step(3), 3)
    assert [p.name for p in checkpoints.all()] == ["step-00000001", "step-00000003"]


def test_what_was_loaded_does_not_hang_on_the_file(tmp_path: Path) -> None:
    """If a memory-mapped file is pruned by another host on NFS, reading it is a bus error."""
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 300)).sum().backward()
    optimizer.step()
    checkpoints = Checkpoints(tmp_path, background=False)
    checkpoints.save({"model": model, "optimizer": optimizer}, 1)
    checkpoints.load_latest({"model": model, "optimizer": optimizer})
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


# --- in a hand-written loop


def resumed_in_the_run(folder: Path) -> list[int]:
    os.chdir(folder)
    sys.argv = ["train.py"]
    sys.modules["__main__"].__file__ = "train.py"
    steps = []
    for _ in range(2):
        checkpoints = Checkpoints()  # before the ranks are known
        parts = of_step(0)
        steps.append(checkpoints.resume(parts))
        checkpoints.save(of_step(steps[-1] + 4), steps[-1] + 4)
        checkpoints.wait()
        assert checkpoints.folder == folder / "runs" / "train" / "checkpoints"
    return steps


@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_without_a_folder_are_those_of_the_run_and_resume_says_the_step(ranks: int, tmp_path: Path) -> None:
    assert on_ranks(ranks, resumed_in_the_run, tmp_path) == [[0, 4]] * ranks


def test_a_relative_folder_is_that_of_the_moment_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints("ck", background=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpoints.save(of_step(3), 3)
    assert loaded(tmp_path / "ck") == 3
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_part_that_may_be_new_need_not_be_in_a_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Checkpoints(folder, background=False).save({"a": Box(1)}, 3)
    new = Box(5)
    assert Checkpoints(folder).resume({"a": Box(), "ema": new}, may_be_new=["ema"]) == 3
    assert "the checkpoint has no ema: ema starts from scratch\n" in capsys.readouterr().out
    assert new.state_dict() == Box(5).state_dict()
    with pytest.raises(ConfigError, match="has no part 'ema'"):
        Checkpoints(folder).resume({"a": Box(), "ema": Box()})


def test_a_part_that_starts_from_scratch_has_nothing_of_a_corrupted_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(folder, 1)
    newest = save(Checkpoints(folder, background=False), 2, ema=Box(2))
    data = bytearray((newest / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (newest / "model.pt").write_bytes(data)
    ema = Box("new")
    assert Checkpoints(folder).resume({"ema": ema, **of_step(-1)}, may_be_new=["ema"]) == 1
    assert ema.state == {"value": "new"}
    warned, *lines = capsys.readouterr().out.splitlines()
    assert warned.startswith("warning: skipped a checkpoint: ")
    assert lines == ["the checkpoint has no ema: ema starts from scratch", "resuming from step 1"]


def test_to_start_from_scratch_sets_aside_what_is_there(folder: Path) -> None:
    checkpoints = Checkpoints(folder, background=False)
    checkpoints.save({"a": Box(1)}, 3)
    checkpoints.start_from_scratch()
    assert Checkpoints(folder).resume({"a": Box()}) == 0
    assert [path.name for path in (folder / "old-1").iterdir()] == ["step-00000003"]


@pytest.mark.parametrize("value", [None, "0.5", [0.5]])
def test_a_metric_that_is_not_a_number_is_refused(folder: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^save\(metrics=\{'eval_loss': .*\}\): give a number for each metric"):
        Checkpoints(folder).save(of_step(1), 1, metrics={"eval_loss": value})
