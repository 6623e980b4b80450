"""Messages between agents: who is accepted, and what a link does if its other end is slow, silent, gone or not an agent."""

from __future__ import annotations

import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from launched import wait_for

from rankwise.host import network
from rankwise.ipc import channel
from rankwise.ipc.channel import Door, Link, NobodyThere, knock, read_door

SECRET = "5ec2e7"


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door(SECRET, loopback=True)
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[tuple[Link, Link]]:
    ends = [Link.over(end) for end in connected()]
    yield ends[0], ends[1]
    for end in ends:
        end.close("the test is over")


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


def calls(door: Door, secret: str = SECRET, hello: dict[str, object] | None = None) -> tuple[list[object], list[object]]:
    """(what the caller got, whom the door accepted)."""
    found: list[object] = []

    def call() -> None:
        try:
            found.append(knock(["127.0.0.1"], door.port, secret, hello or {"node": 1}))
        except NobodyThere as reason:
            found.append(reason)

    caller = threading.Thread(target=call)
    caller.start()
    admitted: list[object] = []
    while caller.is_alive():
        admitted += door.callers()
        time.sleep(0.001)
    caller.join()
    return found, admitted + list(door.callers())


def test_who_knows_the_secret_is_let_in_with_what_he_said(door: Door) -> None:
    [got], [admitted] = calls(door, hello={"node": 3})
    link, address, own = got  # type: ignore[misc]
    here, said = admitted  # type: ignore[misc]
    assert (said["node"], said["route"], address, own) == (3, "127.0.0.1", "127.0.0.1", "127.0.0.1")
    here.send({"start": [1, 2]})
    assert wait_for(link.receive, "a message") == [{"start": [1, 2]}]
    for end in (link, here):
        end.close("the test is over")


def test_another_secret_is_not_let_in_and_is_told_that_another_run_is_there(door: Door) -> None:
    [got], admitted = calls(door, secret="another")
    assert admitted == []
    assert str(got) == f"127.0.0.1, port {door.port}: another program answers there, or another run"


def test_a_program_that_says_anything_else_is_not_let_in_and_the_door_stays_open(door: Door) -> None:
    with socket.create_connection(("127.0.0.1", door.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_for(lambda: [door.callers()] and not door.coming, "the stranger's end")
        stranger.settimeout(5.0)
        assert b"challenge" in stranger.recv(1000)
    [(link, _, _)], [(here, _)] = calls(door)  # type: ignore[misc]
    link.close("the test is over")
    here.close("the test is over")


def test_a_program_that_says_nothing_is_given_up(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_ANSWER_S", 0.05)
    with socket.create_connection(("127.0.0.1", door.port)):
        wait_for(lambda: [door.callers()] and door.coming, "the silent one")
        wait_for(lambda: [door.callers()] and not door.coming, "its end")


def test_a_server_that_is_none_of_ours_is_passed_over() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(NobodyThere, match="another program answers there"):
            knock(["127.0.0.1"], port, SECRET, {}, answer_s=0.2)
    with pytest.raises(NobodyThere, match=f"127.0.0.1, port {port}: connection refused"):
        knock(["127.0.0.1"], port, SECRET, {})


def test_the_file_that_says_where_the_door_is_is_for_its_user_alone_and_goes_with_it(tmp_path: Path) -> None:
    path = tmp_path / ".head.json"
    with pytest.raises(NobodyThere, match="no such file"):
        read_door(path)
    door = Door(SECRET, loopback=True)
    door.publish(path, "run-7", "slurm-1.0")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    record = read_door(path)
    assert (record["run_id"], record["start"], record["port"], record["home"]) == (
        "run-7",
        "slurm-1.0",
        door.port,
        network.home(),
    )
    door.close()
    assert not path.exists()


def test_the_file_of_a_later_head_is_left_to_it(tmp_path: Path) -> None:
    path = tmp_path / ".head.json"
    one, other = Door(SECRET, loopback=True), Door("other", loopback=True)
    one.publish(path, "run-1", "")
    other.publish(path, "run-2", "")
    one.close()
    assert read_door(path)["run_id"] == "run-2"
    other.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"port": 1}'])
def test_half_a_file_is_nobody_there_yet(text: str, tmp_path: Path) -> None:
    (tmp_path / "door").write_text(text)
    with pytest.raises(NobodyThere, match="not written by rankwise"):
        read_door(tmp_path / "door")


# --- links


def test_messages_arrive_whole_and_in_order_however_long(pair: tuple[Link, Link]) -> None:
    one, other = pair
    sent = [{"n": n, "text": "x" * (n * 50_000)} for n in range(40)]  # far more than the kernel accepts at once
    for message in sent:
        one.send(message)
    found: list[object] = []

    def all_there() -> bool:
        one.flush()
        found.extend(other.receive())
        return len(found) == len(sent)

    wait_for(all_there, "all messages")
    assert found == sent


def test_a_link_that_is_full_says_so_until_the_other_end_reads(pair: tuple[Link, Link]) -> None:
    one, other = pair
    assert not one.full
    while not one.full:
        one.send({"text": "x" * 100_000})
    while one.full:
        one.flush()
        other.receive()


def test_an_end_that_goes_is_noticed_with_what_it_said_last(pair: tuple[Link, Link]) -> None:
    one, other = pair
    one.send({"last": "words"})
    one.close("it goes")
    said: list[object] = []
    wait_for(lambda: [said.extend(other.receive())] and other.closed, "its end")
    assert said == [{"last": "words"}]
    assert other.closed == "its connection closed"
    other.send({"too": "late"})  # without effect


def test_an_end_that_says_nothing_is_lost_and_a_beat_is_enough_not_to_be(
    pair: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "LOST_S", 0.3)
    monkeypatch.setattr(channel, "BEAT_S", 0.05)
    one, other = pair
    deadline = time.monotonic() + 0.6
    while time.monotonic() < deadline:
        one.beat()
        assert other.receive() == []  # a heartbeat is not a message
        time.sleep(0.01)
    assert other.closed is None
    wait_for(lambda: [other.receive()] and other.closed, "its loss")
    assert other.closed == "no message came from it for 0.3 s"


def test_the_silence_while_this_process_is_suspended_does_not_count(
    pair: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, now = pair[1], time.monotonic()

    def look_after(seconds: float) -> bool:
        nonlocal now
        now += seconds
        monkeypatch.setattr(channel, "time", SimpleNamespace(monotonic=lambda: now))
        link.receive()
        return link.closed is None

    assert look_after(1.0)
    assert look_after(10 * channel.LOST_S)
    assert all(look_after(1.0) for _ in range(int(channel.LOST_S) - 1))
    assert not look_after(2.0)


@pytest.mark.parametrize("line", [b"hello\n", b"[1]\n", b"\xff\xfe\n", b'{"a": 1\n'])
def test_what_is_no_message_ends_a_link(line: bytes) -> None:
    one, end = connected()
    other = Link.over(end)
    with one, end:
        one.sendall(json.dumps({"good": 1}).encode() + b"\n" + line)
        said: list[object] = []
        wait_for(lambda: [said.extend(other.receive())] and other.closed, "its end")
        assert said == [{"good": 1}]
        assert (other.closed or "").startswith("its message cannot be read")


def test_a_link_over_pipes_is_as_one_over_a_connection() -> None:
    (there, here_out), (here, there_out) = os.pipe(), os.pipe()
    one, other = Link(here, here_out), Link(there, there_out)
    one.send({"a": 1})
    assert wait_for(other.receive, "a message") == [{"a": 1}]
    os.close(there_out)
    wait_for(lambda: [one.receive()] and one.closed, "the end of the pipe")
    for fd in (here, there, here_out):
        os.close(fd)


def test_what_a_shell_prints_before_the_first_message_is_passed_over() -> None:
    """ssh starts the user's shell, and many a ~/.bashrc prints something."""
    ours, theirs = socket.socketpair()
    link = Link(ours.fileno(), ours.fileno(), [ours], after=b'{"hello":')
    found: list[object] = []
    for sent in (b"Welcome to node1!\n{}\nno line ", b'end {"hello": {"index"', b': 1}}\n{"say": "a"}\n', b"Welcome\n"):
        theirs.sendall(sent)
        found += link.receive()
    assert found == [{"hello": {"index": 1}}, {"say": "a"}]
    assert link.closed == "its message cannot be read: Welcome"
    theirs.close()
