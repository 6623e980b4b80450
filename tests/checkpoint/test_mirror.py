"""Checkpoints in a second place: they exist there when their manifest does, and are copied back completely or not at all."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from boxes import loaded, of_step, save, step_in
from ranks import on_ranks

from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint import manifest as manifests
from rankwise.checkpoint.mirror import Mirror
from rankwise.errors import CheckpointError, ConfigError


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "here" / "checkpoints"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


@pytest.fixture
def mirror(there: Path) -> Mirror:
    return Mirror(f"file://{there}")


def saved(here: Path, *steps: int) -> list[Path]:
    checkpoints = Checkpoints(here, keep_last=9, background=False)
    return [save(checkpoints, step) for step in steps]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def failing(mirror: Mirror, name: str, times: int = 1) -> None:
    """The copy of the first files with this name fails in the middle."""
    whole: Callable[..., Any] = mirror._fs.put_file
    left = [times]

    def put_file(source: str, target: str) -> None:
        if left[0] and source.endswith(name):
            left[0] -= 1
            Path(target).write_bytes(Path(source).read_bytes()[:20])
            raise TimeoutError("the store did not\nanswer")
        whole(source, target)

    mirror._fs.put_file = put_file


# --- copying


def test_a_checkpoint_is_there_byte_for_byte_once_waited_for(here: Path, there: Path, mirror: Mirror) -> None:
    [path] = saved(here, 1)
    mirror.offer(path)
    mirror.wait()
    assert contents(there / path.name) == contents(path)
    assert mirror.names() == [path.name]


def test_what_has_gone_here_goes_there_only_after_the_newer_one_is_there(here: Path, mirror: Mirror) -> None:
    first, second, third = saved(here, 1, 2, 3)
    mirror.offer(first)
    mirror.wait()
    failing(mirror, "loader.pt", times=2)
    mirror.offer(second, gone=[first.name])
    mirror.wait()  # tried twice
    assert mirror.names() == [first.name]
    mirror.offer(third, gone=[second.name])
    mirror.wait()
    assert mirror.names() == [third.name]


@pytest.mark.parametrize("name", ["loader.pt", manifests.NAME])
def test_a_copy_that_breaks_off_is_a_warning_and_no_checkpoint_and_is_tried_again_in_the_end(
    name: str, here: Path, there: Path, mirror: Mirror, capsys: pytest.CaptureFixture[str]
) -> None:
    [path] = saved(here, 1)
    failing(mirror, name)
    mirror.offer(path)
    mirror._joined()
    with pytest.raises(CheckpointError):
        mirror.fetch(path.name, here)
    assert capsys.readouterr().out == (
        f"warning: {path.name} was not copied to file://{there}: TimeoutError: the store did not answer; "
        "rankwise tries again at the next checkpoint\n"
    )
    assert loaded(here) == 1
    mirror.wait()
    assert contents(there / path.name) == contents(path)


def test_of_several_that_wait_only_the_newest_is_copied_and_a_long_wait_is_said(
    here: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = saved(here, 1, 2, 3)
    gate = threading.Event()
    whole = mirror._fs.put_file
    mirror._fs.put_file = lambda source, target: (gate.wait(30), whole(source, target))
    for path in paths:
        mirror.offer(path)
        while path == paths[0] and mirror._offered is not None:  # the thread has not yet taken it
            pass
    monkeypatch.setattr("rankwise.checkpoint.mirror._PATIENCE_S", 0.01)
    threading.Timer(0.3, gate.set).start()
    mirror.wait()
    assert mirror.names() == [paths[0].name, paths[2].name]
    assert capsys.readouterr().out == f"waiting until the last checkpoint is copied to {mirror.url}\n"


def test_one_that_is_pruned_while_it_is_copied_is_no_warning(
    here: Path, mirror: Mirror, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror.offer(here / "step-00000001")
    mirror.wait()
    assert capsys.readouterr().out == ""
    assert mirror.names() == []


# --- copying back


def test_a_checkpoint_comes_back_whole_into_an_empty_folder(here: Path, mirror: Mirror, tmp_path: Path) -> None:
    [path] = saved(here, 7)
    mirror.offer(path)
    mirror.wait()
    assert contents(mirror.fetch(path.name, tmp_path / "new")) == contents(path)
    assert loaded(tmp_path / "new") == 7


def test_a_damaged_one_there_is_named_and_changes_nothing_here(here: Path, there: Path, mirror: Mirror) -> None:
    [path] = saved(here, 7)
    mirror.offer(path)
    mirror.wait()
    file = there / path.name / "model.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"^{path.name} in file://.*: {path.name}/model.pt is corrupted"):
        mirror.fetch(path.name, here)
    assert loaded(here) == 7
    assert [p.name for p in here.iterdir()] == [path.name]


def test_one_of_the_same_name_is_replaced(here: Path, mirror: Mirror) -> None:
    [path] = saved(here, 7)
    mirror.offer(path)
    mirror.wait()
    (path / "model.pt").write_bytes(b"damaged")
    mirror.fetch(path.name, here)
    assert loaded(here) == 7


def test_a_store_that_cannot_be_read_is_an_error_that_names_it(mirror: Mirror, there: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("403 Forbidden")

    mirror._fs.ls = refuse
    with pytest.raises(CheckpointError, match=re.escape(f"file://{there} cannot be read: PermissionError: 403 Forbidden")):
        mirror.names()
    assert Mirror(f"file://{there}/nothing").names() == []


@pytest.mark.parametrize("url", ["s4://bucket/x", "nosuch://x"])
def test_a_protocol_that_nobody_speaks_is_an_error_with_the_url(url: str) -> None:
    with pytest.raises(ConfigError, match=rf"^mirror='{url}': .*(Protocol|protocol|Install).*; give a path, or a URL"):
        Mirror(url)


def test_what_else_lies_there_is_somebody_s_own(here: Path, there: Path, mirror: Mirror) -> None:
    [path] = saved(here, 3)
    mirror.offer(path)
    mirror.wait()
    (there / "step-best").mkdir()
    (there / "step-best" / manifests.NAME).write_text("{}")
    (there / "step-00000009").mkdir()  # not yet complete, or being removed
    assert mirror.names() == [path.name]


def test_a_store_in_memory_works_as_a_folder_does(here: Path, tmp_path: Path) -> None:
    mirror = Mirror("memory://bucket/run")
    [path] = saved(here, 3)
    mirror.offer(path)
    mirror.wait()
    mirror.fetch(path.name, tmp_path / "new")
    assert loaded(tmp_path / "new") == 3


@pytest.mark.parametrize("store", ["file://{}/there", "memory://{}"])
@pytest.mark.parametrize(("name", "other"), [("lr=[0.1,0.2]", "lr=0"), ("what?", "whatX"), ("a*b", "aXb")])
def test_a_url_is_never_taken_as_a_pattern(name: str, other: str, store: str, here: Path, tmp_path: Path) -> None:
    mirror, neighbor = (Mirror(f"{store.format(tmp_path)}/{each}") for each in (name, other))
    paths = saved(here, 1, 2)
    for one in (neighbor, mirror):
        one.offer(paths[0])
        one.wait()
    mirror.offer(paths[1], gone=[paths[0].name])
    mirror.wait()
    assert mirror.names() == [paths[1].name]
    assert neighbor.names() == [paths[0].name]
    mirror.fetch(paths[1].name, tmp_path / "new")
    assert loaded(tmp_path / "new") == 2


# --- used by Checkpoints


def mirrored(here: Path, there: Path, **settings: Any) -> Checkpoints:
    return Checkpoints(here, mirror=f"file://{there}", **settings)


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_what_is_saved_is_there_in_the_end_and_what_is_pruned_here_goes_there(
    background: bool, here: Path, there: Path
) -> None:
    checkpoints = mirrored(here, there, keep_last=2, background=background)
    for step in range(1, 6):
        checkpoints.save(of_step(step), step)
    checkpoints.wait()
    assert sorted(path.name for path in there.iterdir() if (path / manifests.NAME).exists())[-1] == "step-00000005"
    assert {path.name for path in there.iterdir()} <= {"step-00000003", "step-00000004", "step-00000005"}
    assert contents(there / "step-00000005") == contents(here / "step-00000005")


def mirror_waits(tmp: Path, sharded: bool) -> list[int]:
    """How often the program waited for the mirror: in three saves, and then in `wait`."""
    checkpoints = mirrored(tmp / "here", tmp / "there", sharded=sharded)
    waits: list[int] = []
    assert checkpoints._mirror is not None
    checkpoints._mirror.wait = lambda: waits.append(1)  # type: ignore[method-assign]
    for step in (1, 2, 3):
        checkpoints.save(of_step(step), step)
    by_saves = len(waits)
    checkpoints.wait()
    return [by_saves, len(waits)]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_save_does_not_wait_for_the_mirror_and_the_end_does(sharded: bool, tmp_path: Path) -> None:
    assert on_ranks(2, mirror_waits, tmp_path, sharded) == [[0, 1], [0, 0]]


def test_a_machine_with_an_empty_disk_goes_on_from_there(here: Path, there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoints = mirrored(here, there)
    checkpoints.save(of_step(7), 7)
    checkpoints.wait()
    shutil.rmtree(here)
    parts = of_step(-1)
    assert mirrored(here, there).load_latest(parts) is not None
    assert step_in(parts) == 7
    assert capsys.readouterr().out == f"step-00000007 was copied from file://{there}\n"


def by_accuracy(here: Path, there: Path) -> Checkpoints:
    return mirrored(here, there, keep_last=1, keep_best="eval_acc", larger_is_better=True)


def save_with(checkpoints: Checkpoints, values: dict[int, float]) -> None:
    for step, accuracy in values.items():
        checkpoints.save(of_step(step), step, metrics={"eval_acc": accuracy})
        checkpoints.wait()


def test_a_machine_with_an_empty_disk_gets_the_best_from_there_too(
    here: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with(by_accuracy(here, there), {1: 0.5, 2: 0.9, 3: 0.6})
    shutil.rmtree(here)
    capsys.readouterr()
    again = by_accuracy(here, there)
    assert again.resume(of_step(-1)) == 3
    assert again.best() == here / "step-00000002"
    assert not again.is_best({"eval_acc": 0.7})
    assert capsys.readouterr().out == (
        f"step-00000003 was copied from file://{there}\nstep-00000002 was copied from file://{there}\nresuming from step 3\n"
    )
    save_with(again, {4: 0.7})
    for folder in (here, there):
        assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("file", ["model.pt", manifests.NAME])
def test_a_best_that_is_damaged_there_is_reported_and_does_not_stop_the_run(
    file: str, here: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_with(by_accuracy(here, there), {1: 0.5, 2: 0.9, 3: 0.6})
    shutil.rmtree(here)
    (there / "step-00000002" / file).write_bytes(b"")
    again = by_accuracy(here, there)
    assert again.resume(of_step(-1)) == 3
    assert again.best() == here / "step-00000003"
    assert f"warning: skipped a checkpoint: step-00000002 in file://{there}: step-00000002/{file}" in capsys.readouterr().out


def test_what_is_better_here_is_not_copied_from_there(here: Path, there: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_with(by_accuracy(here, there), {1: 0.5, 2: 0.9, 3: 0.6})
    shutil.copytree(there / "step-00000003", there / "step-00000001")  # a leftover
    assert by_accuracy(here, there).resume(of_step(-1)) == 3
    assert capsys.readouterr().out == "resuming from step 3\n"


def test_what_is_newer_here_is_gone_on_from_here(here: Path, there: Path) -> None:
    checkpoints = mirrored(here, there)
    checkpoints.save(of_step(7), 7)
    checkpoints.wait()
    Checkpoints(here, background=False).save(of_step(8), 8)
    parts = of_step(-1)
    assert mirrored(here, there).load_latest(parts) is not None
    assert step_in(parts) == 8


def damage(path: Path) -> None:
    data = bytearray((path / "model.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "model.pt").write_bytes(data)


def test_what_is_damaged_here_and_whole_there_comes_from_there(here: Path, there: Path) -> None:
    checkpoints = mirrored(here, there)
    checkpoints.save(of_step(7), 7)
    checkpoints.wait()
    damage(here / "step-00000007")
    parts = of_step(-1)
    assert mirrored(here, there).load_latest(parts) is not None
    assert step_in(parts) == 7
    assert loaded(here) == 7


def cut(path: Path) -> None:
    os.truncate(path / "model.pt", 100)


def without_manifest(path: Path) -> None:
    (path / manifests.NAME).unlink()


def with_an_empty_manifest(path: Path) -> None:
    (path / manifests.NAME).write_bytes(b"")


@pytest.mark.parametrize("harm", [cut, without_manifest, with_an_empty_manifest])
def test_what_is_incomplete_here_and_whole_there_comes_from_there(
    harm: Callable[[Path], None], here: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = mirrored(here, there)
    checkpoints.save(of_step(7), 7)
    checkpoints.wait()
    harm(here / "step-00000007")
    parts = of_step(-1)
    assert mirrored(here, there).load_latest(parts) is not None
    assert step_in(parts) == 7
    assert loaded(here) == 7
    skipped, copied = capsys.readouterr().out.splitlines()
    assert skipped.startswith("warning: skipped a checkpoint: ")
    assert copied == f"step-00000007 was copied from file://{there}"


def test_what_is_damaged_here_and_there_is_passed_over(here: Path, there: Path) -> None:
    checkpoints = mirrored(here, there)
    for step in (6, 7):
        checkpoints.save(of_step(step), step)
        checkpoints.wait()
    for folder in (here, there):
        damage(folder / "step-00000007")
    parts = of_step(-1)
    assert mirrored(here, there).load_latest(parts) is not None
    assert step_in(parts) == 6


def test_a_store_that_cannot_be_read_does_not_start_from_scratch_in_silence(
    here: Path, there: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = mirrored(here, there)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("403 Forbidden")

    assert checkpoints._mirror is not None
    checkpoints._mirror._fs.ls = refuse
    with pytest.raises(CheckpointError, match=r"cannot be read: PermissionError: 403 Forbidden$"):
        checkpoints.load_latest(of_step(-1))
    Checkpoints(here, background=False).save(of_step(8), 8)
    parts = of_step(-1)
    assert checkpoints.load_latest(parts) is not None
    assert step_in(parts) == 8
    assert "403 Forbidden; using the local checkpoints" in capsys.readouterr().out


# --- used by a Trainer


def fit_mirrored(tmp: Path, name: str, steps: int, **settings: Any) -> tuple[list[float], str]:
    from test_trainer_checkpoints import fit

    try:
        return fit(tmp / name, steps, mirror=f"file://{tmp}/there", **settings)
    except ConfigError as error:
        return [], str(error)


@pytest.mark.parametrize("n", [1, 2])
def test_a_training_goes_on_on_another_machine_as_if_nothing_had_been(n: int, tmp_path: Path) -> None:
    from test_trainer_checkpoints import fit

    unbroken = [parameters for parameters, _ in on_ranks(n, fit, tmp_path / "unbroken", 8)]
    on_ranks(n, fit_mirrored, tmp_path, "here", 5)
    found = on_ranks(n, fit_mirrored, tmp_path, "elsewhere", 8)
    assert [parameters for parameters, _ in found] == unbroken
    assert f"step-00000005 was copied from file://{tmp_path}/there" in found[0][1]


def test_a_run_from_scratch_does_not_resume_from_what_is_there(tmp_path: Path) -> None:
    on_ranks(1, fit_mirrored, tmp_path, "here", 5)
    for text in [text for _, text in on_ranks(2, fit_mirrored, tmp_path, "here", 8, fresh=True)]:
        assert text == (
            f"to start from scratch, mirror='file://{tmp_path}/there' must be empty, and it has step-00000005; "
            "give another URL, or empty this one"
        )


def test_an_incomplete_copy_of_what_has_gone_is_removed_there(here: Path, there: Path, mirror: Mirror) -> None:
    first, second = saved(here, 1, 2)
    (there / first.name).mkdir(parents=True)
    (there / first.name / "model.pt").write_bytes(b"half")
    mirror.offer(second, gone=[first.name])
    mirror.wait()
    assert [path.name for path in there.iterdir()] == [second.name]
