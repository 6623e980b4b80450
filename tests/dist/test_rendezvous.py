"""Ranks that find rank 0 through a file. Each is a thread here; hosts are folders that the others do not see."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launched import wait_for

from rankwise.dist import rendezvous, start_file
from rankwise.dist.rendezvous import Gathering, Meeting, join
from rankwise.dist.world import World
from rankwise.errors import WorldError

START = "slurm-tc-7.0-0"
LONG_S = 20.0


def world_of(rank: int, world_size: int = 3, local_world_size: int | None = None) -> World:
    local = local_world_size or world_size
    return World(rank, world_size, rank % local, local, None, "slurm")


@pytest.fixture
def ranks() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / rendezvous.FOLDER


Lead = Callable[..., Meeting]


def lead(world: World, folders: list[Path], timeout_s: float = LONG_S, start: str = START, port: int = 1234) -> Meeting:
    with Gathering(world, start, folders) as gathering:
        gathering.wait(timeout_s)
        return gathering.release(port)


def told_by(future: Future[Any]) -> str:
    with pytest.raises(WorldError) as caught:
        future.result(LONG_S)
    return str(caught.value)


def published(folder: Path) -> dict[str, Any]:
    path = folder / START
    wait_for(path.exists, "rank 0's file")
    record: dict[str, Any] = json.loads(path.read_text())
    return record


@pytest.mark.parametrize("local_world_size", [3, 1], ids=["one host", "several"])
def test_all_ranks_meet_whoever_comes_first_and_nothing_is_left(
    folder: Path, ranks: ThreadPoolExecutor, local_world_size: int
) -> None:
    worlds = [world_of(rank, 3, local_world_size) for rank in range(3)]
    early = ranks.submit(join, worlds[2], START, [folder], LONG_S)
    first = ranks.submit(lead, worlds[0], [folder])
    late = ranks.submit(join, worlds[1], START, [folder], LONG_S)
    for meeting in (first, early, late):
        answer = meeting.result(LONG_S)
        assert (answer.master_addr, answer.master_port, answer.node_rank) == ("127.0.0.1", 1234, 0)
        assert answer.interface is None
    assert not list(folder.parent.iterdir())


def test_the_file_is_for_its_owner_alone_and_has_a_secret_of_its_own_each_time(folder: Path) -> None:
    secrets = set()
    for _ in range(2):
        with Gathering(world_of(0), START, [folder]):
            assert (folder / START).stat().st_mode & 0o777 == 0o600
            assert folder.stat().st_mode & 0o777 == 0o700
            secrets.add(published(folder)["secret"])
    assert len(secrets) == 2


def test_ranks_on_one_host_listen_on_loopback_alone_and_on_several_by_their_own_address(folder: Path) -> None:
    with Gathering(world_of(0), START, [folder]):
        assert published(folder)["addresses"] == ["127.0.0.1"]
    with Gathering(world_of(0, 4, 2), START, [folder]):
        assert not [a for a in published(folder)["addresses"] if a.startswith("127.")]


def test_who_does_not_come_is_named_to_everybody_with_where_to_look_and_what_to_type(
    folder: Path, ranks: ThreadPoolExecutor
) -> None:
    first = ranks.submit(lead, world_of(0, 6), [folder], 0.5)
    others = [ranks.submit(join, world_of(rank, 6), START, [folder], LONG_S) for rank in (1, 4)]
    for text in map(told_by, [first, *others]):
        assert text.startswith("ranks 2, 3, 5 of 6 (slurm) did not connect to rank 0 within 0.5 s; rank 0 listens on ")
        assert str(folder / START) in text
        assert "set MASTER_ADDR (rank 0's host) and MASTER_PORT (a free port there) before the launcher" in text
        assert 'rankwise.init(rdzv="HOST:PORT")' in text
    assert not folder.exists()


def test_a_folder_that_the_others_do_not_see_is_an_error_that_says_so(tmp_path: Path, ranks: ThreadPoolExecutor) -> None:
    here, there = tmp_path / "node1", tmp_path / "node2"
    here.mkdir()
    there.mkdir()
    first = ranks.submit(lead, world_of(0, 2, 1), [here / ".rankwise"], 0.5)
    other = ranks.submit(join, world_of(1, 2, 1), START, [there / ".rankwise"], 0.5)
    assert "a node does not see this folder" in told_by(first)
    text = told_by(other)
    assert text.startswith("rank 1 of 2 (slurm) has not found rank 0 within 0.5 s: ")
    assert f"{there / '.rankwise' / START}: no such file or directory (as seen on " in text
    assert "start in a folder that all nodes share under one path, or set MASTER_ADDR" in text


def test_one_folder_of_two_that_all_see_is_enough(tmp_path: Path, ranks: ThreadPoolExecutor) -> None:
    home = tmp_path / "home"
    for name in ("node1", "node2", "home"):
        (tmp_path / name).mkdir()
    first = ranks.submit(lead, world_of(0, 2, 1), [tmp_path / "node1" / ".rankwise", home / ".rankwise"])
    other = ranks.submit(join, world_of(1, 2, 1), START, [tmp_path / "node2" / ".rankwise", home / ".rankwise"], LONG_S)
    assert first.result(LONG_S).master_port == other.result(LONG_S).master_port == 1234


def test_a_folder_that_cannot_be_written_is_passed_over_and_none_is_an_error(tmp_path: Path, ranks: ThreadPoolExecutor) -> None:
    (tmp_path / "file").write_text("")
    wrong, right = tmp_path / "file" / ".rankwise", tmp_path / ".rankwise"
    first = ranks.submit(lead, world_of(0, 2), [wrong, right])
    assert ranks.submit(join, world_of(1, 2), START, [wrong, right], LONG_S).result(LONG_S).master_port == 1234
    assert first.result(LONG_S)
    with pytest.raises(WorldError, match=r"(?s)rank 0 cannot write a file with its address: .*set MASTER_ADDR"):
        lead(world_of(0, 2), [wrong])


# --- files of killed ranks


def leave_behind(folder: Path, **changes: Any) -> None:
    """Write what an earlier job of this name left when it was killed."""
    with Gathering(world_of(0), START, [folder]):
        record = {**published(folder), **changes}
    folder.mkdir(exist_ok=True)
    (folder / START).write_text(json.dumps(record))


def test_the_file_of_a_killed_start_is_passed_over_until_this_starts_own_is_there(
    folder: Path, ranks: ThreadPoolExecutor
) -> None:
    leave_behind(folder)
    with pytest.raises(
        WorldError, match=r"no rank 0 answers at the address in .*slurm-tc-7.0-0 \(at 127.0.0.1, port \d+: connection refused\)"
    ):
        join(world_of(1, 2), START, [folder], 0.3)
    other = ranks.submit(join, world_of(1, 2), START, [folder], LONG_S)
    assert lead(world_of(0, 2), [folder]).master_port == 1234
    assert other.result(LONG_S).master_port == 1234


def test_another_start_that_has_the_port_now_is_not_taken_for_ours(tmp_path: Path, ranks: ThreadPoolExecutor) -> None:
    other_folder, folder = tmp_path / "other", tmp_path / "ours"
    with Gathering(world_of(0, 2), START, [other_folder]) as gathering:
        leave_behind(folder, port=published(other_folder)["port"])
        waiting = ranks.submit(gathering.wait, 0.5)
        with pytest.raises(WorldError, match="no rank 0 answers at the address in"):
            join(world_of(1, 2), START, [folder], 0.3)
        assert told_by(waiting).startswith("rank 1 of 2")


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.2\r\n", b'{"challenge": 1}\n{"proof": "x"}\n', b"[]\n"])
def test_another_program_that_has_the_port_now_is_not_taken_for_rank_0(
    folder: Path, ranks: ThreadPoolExecutor, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        leave_behind(folder, port=stranger.getsockname()[1])
        other = ranks.submit(join, world_of(1, 2), START, [folder], 0.3)
        stranger.settimeout(LONG_S)
        conn, _ = stranger.accept()
        with conn:
            conn.sendall(answer)
            assert "no rank 0 answers at the address in" in told_by(other)


def test_strangers_at_rank_0s_door_keep_nobody_out(folder: Path, ranks: ThreadPoolExecutor) -> None:
    first = ranks.submit(lead, world_of(0, 2), [folder])
    port = published(folder)["port"]
    said = [b"", b"GET / HTTP/1.0\r\n\r\n", b'{"rank": 1, "world_size": 2, "nonce": "", "proof": "x"}\n', b"x" * 70000]
    strangers = [socket.create_connection(("127.0.0.1", port)) for _ in said]
    for stranger, text in zip(strangers, said, strict=True):
        stranger.sendall(text)
    try:
        assert join(world_of(1, 2), START, [folder], LONG_S).master_port == 1234
        first.result(LONG_S)
    finally:
        for stranger in strangers:
            stranger.close()


def test_what_a_later_start_of_the_same_name_has_written_is_not_removed(folder: Path) -> None:
    with Gathering(world_of(0), START, [folder]):
        (folder / START).write_text(later := json.dumps({**published(folder), "secret": "of the later start"}))
    assert (folder / START).read_text() == later


def test_a_file_of_yesterday_is_cleared_away_and_one_of_today_is_not(folder: Path) -> None:
    folder.mkdir()
    for name, age_s in (("yesterday", 90000), ("today", 60)):
        (folder / name).write_text("")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    with Gathering(world_of(0), START, [folder]):
        assert sorted(os.listdir(folder)) == [START, "today"]


WAITS = """
import sys
from pathlib import Path
from rankwise.dist.rendezvous import Gathering
from rankwise.dist.world import World
with Gathering(World(0, 2, 0, 2, None, "slurm"), "killed", [Path(sys.argv[1])]) as gathering:
    print("waits", flush=True)
    gathering.wait(60)
"""


@pytest.mark.parametrize(("signum", "left"), [(signal.SIGTERM, []), (signal.SIGKILL, ["killed"])])
def test_rank_0_that_is_ended_as_it_waits_clears_up_and_what_a_killed_one_leaves_its_next_neighbour_clears(
    folder: Path, signum: signal.Signals, left: list[str]
) -> None:
    process = subprocess.Popen([sys.executable, "-c", WAITS, str(folder)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        with Gathering(world_of(0), START, [folder]):  # the file of a neighbour that still runs remains
            assert sorted(os.listdir(folder)) == ["killed", START]
        process.send_signal(signum)
        assert process.wait(LONG_S) == -signum
    assert (os.listdir(folder) if folder.exists() else []) == left
    with Gathering(world_of(0), START, [folder]):
        assert os.listdir(folder) == [START]


def test_a_file_of_another_user_or_a_link_is_not_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_behind(folder)
    me = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: me + 1)
        with pytest.raises(WorldError, match=f"belongs to user {me}, and this process to user {me + 1}"):
            join(world_of(1, 2), START, [folder], 0.1)
    (folder / START).rename(folder / "elsewhere")
    (folder / START).symlink_to(folder / "elsewhere")
    with pytest.raises(WorldError, match="too many levels of symbolic links"):
        join(world_of(1, 2), START, [folder], 0.1)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"port": "x"}', "\x00"])
def test_a_file_that_is_none_of_ours_is_said(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / START).write_text(text)
    with pytest.raises(WorldError, match="was not written by rankwise"):
        join(world_of(1, 2), START, [folder], 0.1)


# --- two starts


def test_many_starts_at_once_in_one_folder_do_not_meet_each_other(folder: Path, ranks: ThreadPoolExecutor) -> None:
    jobs = range(8)
    first = [ranks.submit(lead, world_of(0, 2), [folder], LONG_S, f"job-{j}", 1000 + j) for j in jobs]
    others = [ranks.submit(join, world_of(1, 2), f"job-{j}", [folder], LONG_S) for j in jobs]
    assert [o.result(LONG_S).master_port for o in others] == [1000 + j for j in jobs]
    assert [f.result(LONG_S).master_port for f in first] == [1000 + j for j in jobs]
    assert not folder.exists()


def test_two_processes_of_one_rank_are_an_error_for_the_second(folder: Path, ranks: ThreadPoolExecutor) -> None:
    first = ranks.submit(lead, world_of(0, 3), [folder])
    same = [ranks.submit(join, world_of(1, 3), START, [folder], LONG_S) for _ in range(2)]
    wait_for(lambda: any(f.done() for f in same), "one of them to be refused")
    refused = next(f for f in same if f.done())
    assert "the script was started twice with the same id" in told_by(refused)
    ranks.submit(join, world_of(2, 3), START, [folder], LONG_S)
    assert next(f for f in same if f is not refused).result(LONG_S).master_port == 1234
    first.result(LONG_S)


def test_ranks_that_disagree_on_how_many_they_are_are_told(folder: Path, ranks: ThreadPoolExecutor) -> None:
    first = ranks.submit(lead, world_of(0, 2), [folder], 1.0)
    text = told_by(ranks.submit(join, world_of(1, 4), START, [folder], LONG_S))
    assert "is rank 1 of 4, but rank 0 on " in text
    assert "is one of 2 ranks" in text
    assert "; refused: process" in told_by(first)


def test_a_rank_that_left_again_may_come_back(folder: Path, ranks: ThreadPoolExecutor) -> None:
    first = ranks.submit(lead, world_of(0, 3), [folder])
    record = published(folder)
    caller = rendezvous._Connection("127.0.0.1")
    caller.prove(record["port"], record["secret"], START, world_of(1))
    caller.close()
    back = ranks.submit(join, world_of(1), START, [folder], LONG_S)
    ranks.submit(join, world_of(2), START, [folder], LONG_S)
    assert back.result(LONG_S).master_port == first.result(LONG_S).master_port == 1234


def test_when_rank_0_ends_before_all_are_there_the_others_look_for_its_next_attempt(
    folder: Path, ranks: ThreadPoolExecutor
) -> None:
    came = threading.Event()
    with Gathering(world_of(0, 3), START, [folder]) as gathering:
        other = ranks.submit(join, world_of(1, 3), START, [folder], LONG_S)
        while gathering.missing() == [1, 2]:
            for key, _ in gathering._selector.select(LONG_S):
                gathering._accept() if key.fileobj is gathering._listener else gathering._hear(gathering._guests[key.fileobj])
        came.set()
    assert came.is_set()
    last = ranks.submit(join, world_of(2, 3), START, [folder], LONG_S)
    assert lead(world_of(0, 3), [folder], port=4321).master_port == 4321
    assert other.result(LONG_S).master_port == last.result(LONG_S).master_port == 4321


# --- what is printed


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is printed about a wait; here the first line comes soon."""
    told: list[str] = []
    monkeypatch.setattr(rendezvous, "say", told.append)
    monkeypatch.setattr(rendezvous, "SAY_AFTER_S", 0.02)
    monkeypatch.setattr(rendezvous, "DETAIL_AFTER_S", 0.2)
    return told


def test_a_wait_is_told_of_in_one_short_line_for_a_minute_and_then_ever_more_seldom() -> None:
    """To import torch from a slow file system takes as long: the details of the rendezvous would mislead."""
    wait = rendezvous.Wait()
    due = [(s, due) for s in range(1000) if (due := wait.due(wait.began + s))]
    assert due == [(5, "short"), (60, "whole"), (120, "whole"), (240, "whole"), (480, "whole"), (960, "whole")]


def test_a_wait_says_who_is_missing_and_later_where_it_looks(folder: Path, said: list[str]) -> None:
    with pytest.raises(WorldError):
        join(world_of(1, 4), START, [folder], 0.7)
    with pytest.raises(WorldError):
        join(world_of(2, 4), START, [folder], 0.2)  # one rank per node, and rank 1, are enough
    assert said[0] == "rank 1 has waited 0 s for rank 0; torch may still be loading there"
    assert said[1:]
    assert all(text.startswith(f"rank 1 has waited {text[18]} s for rank 0: {folder / START}: no such") for text in said[1:])
    said.clear()
    with pytest.raises(WorldError):
        lead(world_of(0, 4), [folder], 0.7)
    assert said[0] == "rank 0 has waited 0 s for ranks 1-3 of 4 (slurm); torch may still be loading there"
    assert said[1:]
    assert all("for ranks 1-3 of 4 (slurm); rank 0 listens on " in text for text in said[1:])


def test_an_address_that_was_given_and_where_nothing_listens_is_waited_for_with_a_bound(said: list[str]) -> None:
    world = dataclasses.replace(world_of(1, 2), origin={"master_addr": "MASTER_ADDR"})
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        with pytest.raises(
            WorldError, match=rf"has not reached rank 0 at 127.0.0.1, port {port} \(MASTER_ADDR\): connection ref"
        ):
            rendezvous.reach(world, "127.0.0.1", port, 0.3)
    assert said


@pytest.mark.parametrize("start", ["../../etc/x", "a b;$(touch x)", "node1:4242", "x" * 300, ".."])
def test_the_name_of_a_start_is_a_name_of_a_file_and_two_are_two(start: str) -> None:
    name = start_file.file_name(start)
    assert "/" not in name
    assert 0 < len(name) <= 100
    assert not name.startswith(".")
    assert name != start_file.file_name(start + "x")
