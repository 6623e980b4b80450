"""What remains after a power failure, and what a reader sees while another process saves and prunes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from boxes import background, loaded, of_step, save, step_in

from rankwise.checkpoint import Checkpoints
from rankwise.checkpoint import manifest as manifests
from rankwise.errors import CheckpointError, ConfigError

__all__ = ["background"]  # a fixture

# --- a power failure


class Disk:
    """What of a folder would survive a power failure: contents that were flushed, and names in folders that were flushed.

    A folder or file that was not flushed may still survive, so there are two outcomes: `lazy`, nothing but what was flushed;
    `hasty`, every name and every removal, but zeros instead of contents that were not flushed.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._is_folder: dict[int, bool] = {}
        self._open: list[int] = []
        self.flush(root)

    def flush(self, path: Path) -> None:
        inode = path.stat().st_ino
        self._open.append(os.open(path, os.O_RDONLY))  # so that no other file gets this number
        if path.is_dir():
            self._names[inode] = {entry.name: entry.stat().st_ino for entry in path.iterdir()}
            self._is_folder |= {entry.stat().st_ino: entry.is_dir() for entry in path.iterdir()}
            self._open += [os.open(entry, os.O_RDONLY) for entry in path.iterdir()]
        else:
            self._contents[inode] = path.read_bytes()

    def lazy(self, to: Path) -> None:
        self._restore(self.root.stat().st_ino, to)

    def _restore(self, folder: int, to: Path) -> None:
        to.mkdir()
        for name, inode in self._names.get(folder, {}).items():
            if self._is_folder[inode]:
                self._restore(inode, to / name)
            else:
                (to / name).write_bytes(self._contents.get(inode, b""))

    def hasty(self, to: Path) -> None:
        shutil.copytree(self.root, to)
        for path in [p for p in self.root.rglob("*") if p.is_file()]:
            content = self._contents.get(path.stat().st_ino, bytes(path.stat().st_size))
            (to / path.relative_to(self.root)).write_bytes(content)

    def close(self) -> None:
        for fd in self._open:
            os.close(fd)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    (tmp_path / "disk").mkdir()
    disk = Disk(tmp_path / "disk")

    def fsync(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_relative_to(disk.root):
            disk.flush(path)

    monkeypatch.setattr(os, "fsync", fsync)
    yield disk
    disk.close()


def before_each(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call `act` before each change of a name and each flush."""

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            act()
            return original(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, wrapped(getattr(os, name)))


@pytest.mark.parametrize("outcome", ["lazy", "hasty"])
@pytest.mark.one_in(2)
def test_after_a_power_cut_at_any_moment_the_last_finished_save_is_there(
    disk: Disk, outcome: str, background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = disk.root / "runs" / "a" / "checkpoints"
    checkpoints = Checkpoints(folder, keep_last=1, background=background)
    finished = 0
    seen: list[int | None] = []

    def cut() -> None:
        copy = tmp_path / "after"
        getattr(disk, outcome)(copy)
        found = loaded(copy / "runs" / "a" / "checkpoints")
        shutil.rmtree(copy)
        assert (found or 0) in (finished, finished + 1)
        seen.append(found)

    for step in (1, 2, 3):
        with monkeypatch.context() as patch:
            before_each(patch, in_peace(cut))
            save(checkpoints, step)
        finished = step
    in_peace(cut)()
    assert seen[-1] == 3
    assert {None, 1, 2, 3} >= set(seen) >= {1, 2, 3}
    assert len(seen) > 30


def in_peace(act: Callable[[], None]) -> Callable[[], None]:
    """Changes of files that `act` itself makes do not call `act`."""
    busy = False

    def call() -> None:
        nonlocal busy
        if not busy:
            busy = True
            act()
            busy = False

    return call


def test_the_simulated_power_cut_finds_what_is_not_flushed(disk: Disk, tmp_path: Path) -> None:
    path = disk.root / "file"
    path.write_bytes(b"data")
    disk.lazy(tmp_path / "1")
    disk.hasty(tmp_path / "2")
    assert list((tmp_path / "1").iterdir()) == []
    assert (tmp_path / "2" / "file").read_bytes() == b"\0\0\0\0"
    disk.flush(path)
    disk.lazy(tmp_path / "3")
    assert list((tmp_path / "3").iterdir()) == []  # its content is durable, its name is not
    disk.flush(disk.root)
    disk.lazy(tmp_path / "4")
    assert (tmp_path / "4" / "file").read_bytes() == b"data"


def test_files_are_flushed_before_the_name_and_the_name_before_anything_older_goes(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "checkpoints"
    checkpoints = Checkpoints(folder, keep_last=1, background=background)
    save(checkpoints, 1)
    order: list[str] = []
    fsync, rename = os.fsync, os.rename

    def plain(path: str) -> str:
        return re.sub(r"tmp\.[0-9a-f]{32}", "tmp", path.removeprefix(str(tmp_path)))

    def noted_fsync(fd: int) -> None:
        order.append("flush " + plain(str(Path(f"/proc/self/fd/{fd}").readlink())))
        fsync(fd)

    def noted_rename(old: Any, new: Any) -> None:
        order.append(f"rename {plain(str(old))} {plain(str(new))}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    save(checkpoints, 2)
    assert order == [
        *[f"flush /checkpoints/tmp/{name}" for name in ("model.pt", "loader.pt", "rng.pt", "manifest.json")],
        "flush /checkpoints/tmp",
        "rename /checkpoints/tmp /checkpoints/step-00000002",
        "flush /checkpoints",
        "rename /checkpoints/step-00000001 /checkpoints/tmp",
        "flush /checkpoints",
    ]


# --- a reader beside a writer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


def saving_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, steps: list[int]) -> None:
    """Another process saves the next of these steps, and prunes all older ones, each time `name` is called."""
    writer = Checkpoints(folder, keep_last=1, background=False)
    original = getattr(module, name)
    busy = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal busy
        if steps and not busy:
            busy = True
            step = steps.pop(0)
            writer.save(of_step(step), step)
            busy = False
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, call)


@pytest.mark.parametrize("newer", [[2], [2, 3], [2, 3, 4, 5]])
def test_a_checkpoint_that_is_pruned_while_it_is_verified_is_no_damage(
    folder: Path, newer: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Checkpoints(folder, background=False).save(of_step(1), 1)
    last = newer[-1]
    saving_meanwhile(folder, monkeypatch, manifests, "verify", newer)
    found = Checkpoints(folder, background=False).find_latest()
    assert found is not None
    assert found[1].step == last
    assert "skipped" not in capsys.readouterr().out


@pytest.mark.parametrize("newer", [[2], [2, 3]])
def test_a_checkpoint_that_is_pruned_while_it_is_loaded_gives_way_to_the_newer(
    folder: Path, newer: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rankwise.checkpoint import resume

    Checkpoints(folder, background=False).save(of_step(1), 1)
    last = newer[-1]
    saving_meanwhile(folder, monkeypatch, resume, "load_part", newer)
    parts = of_step(-1)
    manifest = Checkpoints(folder, background=False).load_latest(parts)
    assert manifest is not None
    assert manifest.step == step_in(parts) == last


def test_a_folder_that_is_moved_away_meanwhile_holds_no_damaged_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Checkpoints(folder, background=False).save(of_step(1), 1)
    verify = manifests.verify

    def moved(path: Path) -> Any:
        folder.rename(folder.with_name("aside"))
        return verify(path)

    monkeypatch.setattr(manifests, "verify", moved)
    assert Checkpoints(folder, background=False).find_latest() is None


def test_damage_beside_a_writer_is_still_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Checkpoints(folder, keep_last=9, background=False).save(of_step(1), 1)
    (folder / "step-00000001" / "model.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact"):
        Checkpoints(folder, background=False).find_latest()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is intact"):
        Checkpoints(folder, background=False).load_latest(of_step(0))


def test_a_part_that_a_whole_checkpoint_lacks_is_an_error_and_not_looked_for_for_ever(folder: Path) -> None:
    Checkpoints(folder, background=False).save(of_step(1), 1)
    parts = of_step(0)
    with pytest.raises(ConfigError, match="has no part 'more'"):
        Checkpoints(folder, background=False).load_latest({**parts, "more": parts["model"]})
