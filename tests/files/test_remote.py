"""Files in a store or on a network: the same bytes as a local file. A broken connection is tried again, a stall is an error."""

from __future__ import annotations

import os
import pickle
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from file_server import FileServer, serving

from rankwise.errors import ConfigError, DataError
from rankwise.files import remote
from rankwise.files.remote import RemoteFile, expanded, facts

CONTENT = np.random.default_rng(0).bytes(1_000_003)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(remote, "_PAUSES_S", (0.01, 0.01))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "x.bin").write_bytes(CONTENT)
    with serving(tmp_path / "there") as found:
        yield found


@pytest.mark.parametrize("kind", ["http", "path", "file"])
def test_any_part_of_a_file_is_read(server: FileServer, kind: str) -> None:
    path = str(server.folder / "x.bin")
    with RemoteFile({"http": server.url("x.bin"), "path": path, "file": f"file://{path}"}[kind]) as file:
        chance = np.random.default_rng(1)
        for _ in range(40):
            at, n = int(chance.integers(0, 1_000_100)), int(chance.choice([0, 1, 100, 300_000, 2_000_000]))
            assert file.seek(at) == at
            assert file.read(n) == CONTENT[at : at + n]
            assert file.tell() == max(at, min(at + n, len(CONTENT)))
        assert file.seek(-3, os.SEEK_END) == len(CONTENT) - 3
        assert file.seek(1, os.SEEK_CUR) == len(CONTENT) - 2
        assert file.read() == CONTENT[-2:]


def test_small_reads_side_by_side_are_one_request(server: FileServer) -> None:
    with RemoteFile(server.url("x.bin")) as file:
        for at in range(0, 200_000, 1000):
            file.seek(at)
            file.read(100)
    assert server.sent["x.bin"] == 1 + (1 << 18)


def test_a_connection_that_breaks_is_tried_again(server: FileServer) -> None:
    server.breaks_off = 2
    with RemoteFile(server.url("x.bin")) as file:
        server.breaks_off = 2
        assert file.read() == CONTENT


def test_one_that_breaks_each_time_is_an_error_that_names_the_file(server: FileServer) -> None:
    server.breaks_off = 100
    with pytest.raises(DataError, match=r"^http://127.0.0.1:\d+/x.bin cannot be read: ClientPayloadError"):
        RemoteFile(server.url("x.bin"))


def test_a_stall_is_an_error_and_stays_one(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STALLED_S", 0.5)
    with RemoteFile(server.url("x.bin")) as file:
        file.read(1000)
        server.stalls_after = 400_000
        with pytest.raises(DataError, match=r"x.bin has stalled: nothing came from it for 0 s"):
            file.read()
        began = time.monotonic()
        with pytest.raises(DataError, match="has stalled"):
            file.read()
        assert time.monotonic() - began < 0.4


def test_what_is_slow_and_does_not_stall_is_read(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STALLED_S", 0.5)
    with RemoteFile(server.url("x.bin")) as file:
        found = b""
        for _ in range(4):
            time.sleep(0.3)  # the limit applies to each call, not to all together
            found += file.read(300_000)
    assert found == CONTENT


def test_a_server_that_gives_no_parts_is_read_from_the_beginning_alone(server: FileServer) -> None:
    server.parts = False
    with RemoteFile(server.url("x.bin")) as file:
        assert not file.seekable()
        assert file.read(5) + file.read() == CONTENT
        with pytest.raises(DataError, match="cannot send a part of the file; give cache="):
            file.seek(0)


def test_a_file_that_was_cut_is_an_error(server: FileServer) -> None:
    with RemoteFile(str(server.folder / "x.bin")) as file:
        os.truncate(server.folder / "x.bin", 500_000)
        with pytest.raises(DataError, match=r"x.bin ends after 500000 of 1000003 bytes: it was shortened after it was opened"):
            file.read()


def test_a_file_has_another_version_when_it_is_another(server: FileServer) -> None:
    for path in (server.url("x.bin"), str(server.folder / "x.bin")):
        before = facts(path)
        assert before == facts(path)
        assert before.size == (server.folder / "x.bin").stat().st_size
        (server.folder / "x.bin").write_bytes(b"y" * before.size)
        assert facts(path).version != before.version
        assert pickle.loads(pickle.dumps(before)) == before


def test_a_pattern_stands_for_files_in_the_order_of_their_names(server: FileServer) -> None:
    for name in ("b2", "b10", "b1"):
        (server.folder / name).touch()
    assert expanded(server.url("b*")) == [server.url(name) for name in ("b1", "b10", "b2")]
    assert expanded(f"file://{server.folder}/b*") == [f"file://{server.folder}/{name}" for name in ("b1", "b10", "b2")]
    assert expanded(server.url("none")) == [server.url("none")]


def test_files_in_an_archive_are_read_and_have_a_version(tmp_path: Path) -> None:
    before = []
    for first in (9, 0):
        with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
            for number in range(3):
                archive.writestr(zipfile.ZipInfo(f"{number}.bin"), bytes([first + number]) * 1000)  # the same time
        before.append(facts(f"zip://0.bin::file://{tmp_path}/all.zip"))
    assert before[0].version != before[1].version
    found = expanded(f"zip://*.bin::file://{tmp_path}/all.zip")
    assert found == [f"zip://{number}.bin::file://{tmp_path}/all.zip" for number in range(3)]
    for number, url in enumerate(found):
        with RemoteFile(url) as file:
            assert file.read() == bytes([number]) * 1000


@pytest.mark.parametrize("call", [RemoteFile, facts])
def test_what_is_not_there_is_said_at_once(server: FileServer, call: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_PAUSES_S", (100, 100))
    assert callable(call)
    for path in (str(server.folder / "y"), server.url("y")):
        with pytest.raises(DataError, match="y: there is no such file"):
            call(path)
    with pytest.raises(ConfigError, match=r"^nothing://x: ValueError: Protocol not known: nothing; give a path, or a URL"):
        call("nothing://x")
