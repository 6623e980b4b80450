"""Copies of remote files on this machine: each is made once, complete or absent, kept while it is used, and never required."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from file_server import FileServer, serving
from ranks import scripts_on_ranks

from rankwise.errors import ConfigError, DataError
from rankwise.files import FileCache, cache, remote

SIZE = 300_001
DAY_S = 24 * 3600.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    (tmp_path / "there").mkdir()
    for number in range(3):
        (tmp_path / "there" / f"x{number}.bin").write_bytes(bytes([number]) * SIZE)
    with serving(tmp_path / "there") as found:
        yield found


def here(tmp_path: Path) -> Path:
    return tmp_path / "here" / f"rankwise-{os.getuid()}"


def names(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in here(tmp_path).iterdir())


SCRIPT = """\
import sys; from pathlib import Path; from rankwise.files import FileCache
cache = FileCache(sys.argv[1]); paths = cache.paths(sys.argv[2:])
print([sum(Path(path).read_bytes()) for path in paths], flush=True)
"""


def process(tmp_path: Path, *sources: str, then: str = "") -> subprocess.Popen[str]:
    """A process that has copies of these files, prints the sum of their bytes, and then runs `then`."""
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + then, str(tmp_path / "here"), *sources],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def until(condition: object, limit_s: float = 120) -> None:
    assert callable(condition)
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_four_processes_copy_each_file_once(tmp_path: Path, server: FileServer) -> None:
    urls = [server.url(f"x{number}.bin") for number in range(3)]
    Path("reader.py").write_text(SCRIPT)
    with ThreadPoolExecutor(4) as pool:  # each is alone, and would print a warning
        words = ("reader.py", str(tmp_path / "here"), *urls)
        for [done] in pool.map(lambda _: scripts_on_ranks(1, *words, timeout_s=200), range(4)):
            assert (done.stdout, done.returncode) == (f"{[0, SIZE, 2 * SIZE]}\n", 0)
    assert all(SIZE <= server.sent[f"x{number}.bin"] < 1.5 * SIZE for number in range(3)), server.sent
    assert [re.sub("-[0-9a-f]{16}", "", name) for name in names(tmp_path)] == ["x0.bin", "x1.bin", "x2.bin"]
    assert here(tmp_path).stat().st_mode & 0o777 == 0o700


def test_a_kill_while_it_copies_leaves_no_lock_and_another_process_goes_on(tmp_path: Path, server: FileServer) -> None:
    server.stalls_after = 100_000
    first = process(tmp_path, server.url("x1.bin"))
    until(lambda: server.sent.get("x1.bin", 0) >= 100_000)
    asked = server.asked
    waiting = process(tmp_path, server.url("x1.bin"))
    until(lambda: any(name.endswith(".part") for name in names(tmp_path)))
    until(lambda: server.asked > asked)  # it knows which file this is, and looks for its copy
    assert waiting.poll() is None
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    server.stalls_after = None
    output, errors = waiting.communicate(timeout=200)
    assert (output, errors) == (f"{[SIZE]}\n", "")
    assert len(names(tmp_path)) == 1


def test_sources_may_be_paths_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    [copy] = FileCache(tmp_path / "here").paths([tmp_path / "x"])
    assert Path(copy).read_bytes() == b"abc"
    for wrong in ([3], [""], "x"):
        with pytest.raises(ConfigError, match="give paths or URLs in a list"):
            FileCache(tmp_path / "here").paths(wrong)  # type: ignore[arg-type]


def test_a_cache_at_a_url_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="cache='s3://bucket/x' is a URL, but copies need a folder of this machine"):
        FileCache("s3://bucket/x")


def test_another_file_of_that_name_is_another_copy(tmp_path: Path, server: FileServer) -> None:
    [first] = FileCache(tmp_path / "here").paths([server.url("x1.bin")])
    (server.folder / "x1.bin").write_bytes(bytes([7]) * SIZE)
    [second] = FileCache(tmp_path / "here").paths([server.url("x1.bin")])
    assert Path(second).read_bytes() == bytes([7]) * SIZE
    assert first != second
    [third] = FileCache(tmp_path / "here").paths([str(server.folder / "x1.bin")])
    assert third not in (first, second)


def test_a_copy_that_is_not_whole_is_made_again(tmp_path: Path, server: FileServer) -> None:
    [path] = FileCache(tmp_path / "here").paths([server.url("x1.bin")])
    os.truncate(path, 1000)
    [again] = FileCache(tmp_path / "here").paths([server.url("x1.bin")])
    assert again == path
    assert Path(path).read_bytes() == bytes([1]) * SIZE


def test_a_copy_that_is_not_whole_and_in_use_is_left_alone_and_the_source_is_read(
    tmp_path: Path, server: FileServer, capsys: pytest.CaptureFixture[str]
) -> None:
    user = FileCache(tmp_path / "here")
    [path] = user.paths([server.url("x1.bin")])
    os.truncate(path, 1000)
    assert FileCache(tmp_path / "here").paths([server.url("x1.bin")]) == [server.url("x1.bin")]
    assert f"{path} is incomplete, and another process uses it; 1 file of 1 are read without" in capsys.readouterr().out
    assert user.paths([]) == []


def test_a_file_that_is_changed_while_it_is_copied_is_an_error_and_nothing_is_left(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = cache._copy

    def changed_meanwhile(*args: Any) -> None:
        copy(*args)
        (server.folder / "x1.bin").write_bytes(b"y" * SIZE)

    monkeypatch.setattr(cache, "_copy", changed_meanwhile)
    with pytest.raises(DataError, match=r"x1.bin changed while it was copied: wait until it is complete"):
        FileCache(tmp_path / "here").paths([server.url("x1.bin")])
    assert names(tmp_path) == []


def test_a_source_that_is_gone_or_stalls_is_an_error_and_nothing_is_left(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"none.bin: there is no such file"):
        FileCache(tmp_path / "here").paths([server.url("none.bin")])
    monkeypatch.setattr(remote, "STALLED_S", 0.5)
    server.stalls_after = 100_000
    with pytest.raises(DataError, match=r"x1.bin has stalled"):
        FileCache(tmp_path / "here").paths([server.url("x1.bin")])
    assert names(tmp_path) == []


# --- no space


def with_room_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, files: int) -> None:
    """A disk with the size of 100 of the files, on which there is space for `files`."""

    def statvfs(path: object) -> SimpleNamespace:
        used = sum(found.stat().st_size for found in here(tmp_path).iterdir())
        return SimpleNamespace(f_blocks=100 * SIZE, f_frsize=1, f_bavail=files * SIZE + 5 * SIZE - used)

    monkeypatch.setattr(os, "statvfs", statvfs)


def test_those_used_longest_ago_make_room_and_those_in_use_stay(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with_room_for(monkeypatch, tmp_path, 2)
    users = [FileCache(tmp_path / "here") for _ in range(4)]
    (here(tmp_path)).mkdir(parents=True)
    (here(tmp_path) / "notes.txt").write_text("")
    [first], [second] = users[0].paths([server.url("x0.bin")]), users[1].paths([server.url("x1.bin")])
    os.utime(first, (1, time.time() - 100))
    del users[0]  # now nobody uses the first
    [third] = users[1].paths([server.url("x2.bin")])
    assert [Path(path).exists() for path in (first, second, third)] == [False, True, True]
    url = server.url("x0.bin")
    assert users[2].paths([url, server.url("x1.bin")]) == [url, second]
    assert (
        f"warning: cache='{tmp_path / 'here'}': the copy needs 300 kB, and the disk must have 300 kB more free; "
        f"1 file of 2 are read without a copy: {url}\n"
    ) in capfd.readouterr().out
    assert (here(tmp_path) / "notes.txt").exists()


def test_what_nobody_has_used_for_a_month_goes_when_another_is_made(tmp_path: Path, server: FileServer) -> None:
    urls = [server.url(f"x{number}.bin") for number in range(3)]
    old, young = FileCache(tmp_path / "here").paths(urls[:2])
    (here(tmp_path) / ("left-" + "0" * 16 + ".bin.part")).write_text("by a kill")
    os.utime(old, (1, time.time() - 31 * DAY_S))
    os.utime(young, (1, time.time() - 29 * DAY_S))
    [third] = FileCache(tmp_path / "here").paths(urls[2:])
    assert sorted(names(tmp_path)) == sorted([Path(young).name, Path(third).name])


def test_a_process_that_is_given_it_keeps_the_copy_too(tmp_path: Path, server: FileServer) -> None:
    mine = FileCache(tmp_path / "here")
    [path] = mine.paths([server.url("x1.bin")])
    theirs = pickle.loads(pickle.dumps(mine))
    for holder in (mine, theirs):
        cache._remove(Path(path))
        assert Path(path).exists()
        holder._used.clear()
    cache._remove(Path(path))
    assert not Path(path).exists()


def test_no_lock_survives_a_kill_of_one_that_uses_a_copy(tmp_path: Path, server: FileServer) -> None:
    user = process(tmp_path, server.url("x1.bin"), then="sys.stdin.read()")
    assert user.stdout is not None
    assert user.stdout.readline() == f"{[SIZE]}\n"
    [name] = names(tmp_path)
    cache._remove(here(tmp_path) / name)
    assert names(tmp_path) == [name]
    user.kill()
    user.communicate()
    cache._remove(here(tmp_path) / name)
    assert names(tmp_path) == []


# --- no copy at all


def a_file(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.touch()


def of_somebody_else(folder: Path) -> None:
    folder.mkdir(parents=True)
    os.chown(folder, 12345, 12345)


def open_to_all(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)


def a_link(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (a_file, "File exists"),
        (of_somebody_else, "must be your own folder, which only you can write to"),
        (open_to_all, "must be your own folder, which only you can write to"),
        (a_link, "must be your own folder, which only you can write to"),
    ],
)
def test_without_a_folder_the_source_stands_for_itself_and_one_warning_says_why(
    tmp_path: Path, server: FileServer, capfd: pytest.CaptureFixture[str], make: object, why: str
) -> None:
    if make is of_somebody_else and os.getuid() != 0:
        pytest.skip("only root may give a folder away")
    assert callable(make)
    make(here(tmp_path))
    urls = [server.url(f"x{number}.bin") for number in range(3)]
    assert FileCache(tmp_path / "here").paths(urls) == urls
    [line] = capfd.readouterr().out.splitlines()
    assert line.startswith(f"warning: cache='{tmp_path / 'here'}': ")
    assert why in line
    assert line.endswith(f"; 3 files of 3 are read without a copy: {urls[0]}, ...")


def test_a_disk_that_is_full_in_the_middle_of_a_copy_leaves_nothing_there(tmp_path: Path, server: FileServer) -> None:
    script = (
        "import resource, sys; from rankwise.files import FileCache, cache\n"
        "cache._reserve = lambda *args: None\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "print(FileCache(sys.argv[1]).paths(sys.argv[2:]))"
    )
    url = server.url("x1.bin")
    Path("script.py").write_text(script)
    [done] = scripts_on_ranks(1, "script.py", str(tmp_path / "here"), url)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines() == [
        f"warning: cache='{tmp_path / 'here'}': File too large; 1 file of 1 are read without a copy: {url}",
        f"['{url}']",
    ]
    assert names(tmp_path) == []


def test_a_file_system_without_locks_is_no_place_for_copies(
    tmp_path: Path, server: FileServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def none(*args: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", none)
    url = server.url("x1.bin")
    assert FileCache(tmp_path / "here").paths([url]) == [url]
    assert "its file system has no locks (Function not implemented); 1 file of 1 are read without" in capfd.readouterr().out


MANY = """\
import resource, sys
from pathlib import Path
from rankwise.files import FileCache

resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
for number in range(100):
    Path(f"x{number}").write_bytes(b"x")
cache = FileCache("cache")
print(sum("cache" in path for path in cache.paths([f"x{number}" for number in range(100)])))
"""


def test_there_may_be_more_files_than_a_process_may_open_at_first() -> None:
    Path("many.py").write_text(MANY)
    [done] = scripts_on_ranks(1, "many.py")
    assert (done.returncode, done.stdout) == (0, "100\n")
