"""One writer: who is refused, who takes over, and what a writer does that was considered dead."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from rankwise.errors import RunDirError
from rankwise.host import processes
from rankwise.host.terminal import typed
from rankwise.host.text import short
from rankwise.run import lease
from rankwise.run.directory import RunDir, write_json
from rankwise.run.lease import Fence, Holder, Lease

DEADLINE_S = 120.0
_SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "runs" / "train")
    made.prepare(fresh=False)
    return made


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def dead_pid() -> int:
    """The pid of a process that has ended and was reaped."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def left_by(run: RunDir, **changes: object) -> Holder:
    """A lease as another process would have left it."""
    holder = replace(Holder.this_process(), **changes)  # type: ignore[arg-type]
    write_json(run.lease, asdict(holder))
    return holder


def test_the_second_to_take_a_run_is_refused_with_who_holds_it_and_what_to_do(run: RunDir) -> None:
    run.take()
    with pytest.raises(RunDirError) as caught:
        run.take()
    holder = run.holder()
    assert holder is not None
    said = str(caught.value)
    assert said.startswith(f"the run in {short(run.path)} is still running: pid {os.getpid()} on {holder.host} since 2")
    assert said.endswith(f"wait for it, start another run with --name NAME, or stop it: {typed('cancel', short(run.path))}")
    assert names(run.path) == ["lease.json", "logs", "telemetry"]


_HOLD = """
import sys
from pathlib import Path
from rankwise.run.directory import RunDir
lease = RunDir(Path(sys.argv[1])).take()
print("taken", flush=True)
sys.stdin.read()
"""


def test_a_run_is_anothers_until_that_process_is_killed_and_then_is_taken_at_once(run: RunDir) -> None:
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(run.path)], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(RunDirError, match=f"is still running: pid {other.pid} on "):
            run.take()
        other.kill()
        other.wait()
    run.take()
    assert names(run.path) == ["lease.json", "logs", "telemetry"]


def test_released_it_can_be_taken_again(run: RunDir) -> None:
    run.take().release()
    assert run.holder() is None
    assert names(run.path) == ["logs", "telemetry"]
    run.take()


def test_the_record_of_a_process_that_has_ended_is_replaced(run: RunDir) -> None:
    dead = left_by(run, pid=dead_pid())
    assert dead.is_gone()
    run.take()
    holder = run.holder()
    assert holder is not None
    assert (holder.pid, holder.start_time) == (os.getpid(), processes.start_time(os.getpid()))
    assert names(run.path) == ["lease.json", "logs", "telemetry"]


def test_a_pid_that_was_given_to_another_process_is_a_holder_that_is_gone(run: RunDir) -> None:
    start = processes.start_time(os.getpid())
    assert start is not None
    assert left_by(run, start_time=start - 1).is_gone()
    run.take()


def test_a_holder_of_before_a_reboot_of_this_machine_is_gone(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "machine_id", lambda: "this machine")
    assert left_by(run, boot="00000000-0000-0000-0000-000000000000").is_gone()
    run.take()


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "another-host", "boot": "another boot"},
        {"boot": "another boot", "machine": "another machine"},
        {"boot": "another boot", "machine": ""},
        {"pids": 1},
    ],
    ids=["another host", "a namesake", "a namesake without a name of its own", "a container on this host"],
)
def test_of_a_holder_elsewhere_nothing_is_known_from_its_pid(changes: dict[str, object], run: RunDir) -> None:
    other = left_by(run, pid=dead_pid(), **changes)
    assert (other.is_here(), other.is_gone()) == (False, False)


def test_a_process_that_lives_is_not_gone() -> None:
    assert not Holder.this_process().is_gone()


def test_a_machine_without_a_name_of_its_own_is_known_by_its_boot(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "machine_id", lambda: "")
    holder = left_by(run)
    assert (holder.is_here(), holder.is_gone()) == (True, False)
    assert left_by(run, pid=dead_pid()).is_gone()


def test_keys_of_a_later_version_in_a_lease_are_passed_over(run: RunDir) -> None:
    holder = Holder.this_process()
    write_json(run.lease, {**asdict(holder), "renewed": 5})
    assert run.holder() == holder


@pytest.mark.parametrize("text", ["", "{", '{"host": "a"}'])
def test_a_lease_that_cannot_be_read_is_never_taken_over(run: RunDir, text: str) -> None:
    run.lease.write_text(text)
    with pytest.raises(RunDirError, match=r"lease\.json cannot be read .*; if no run is active there, remove it$"):
        run.take()
    assert run.lease.read_text() == text


@pytest.mark.parametrize("token", ["", "another's", "~"])
def test_release_removes_ones_own_lease_alone(token: str, run: RunDir) -> None:
    mine = run.take()
    other = left_by(run, token=token)
    mine.release()
    assert run.holder() == other


def test_a_file_that_is_replaced_on_a_network_file_system_while_it_is_read_is_read_again(run: RunDir, monkeypatch) -> None:
    holder = left_by(run, host="another-host")
    errors = [OSError(errno.ESTALE, os.strerror(errno.ESTALE))]
    usual = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: usual(path) if not errors else throw(errors.pop()))
    assert lease.read(run.lease) == holder
    errors += [OSError(errno.ESTALE, os.strerror(errno.ESTALE))] * 2
    with pytest.raises(RunDirError, match=r"cannot be read"):
        lease.read(run.lease)


def throw(error: Exception) -> str:
    raise error


def test_release_after_the_run_was_moved_or_removed_is_no_error(run: RunDir) -> None:
    lease = run.take()
    os.rename(run.path, run.path.with_name("moved"))
    lease.release()
    run.path.mkdir()
    lease.release()


def _contend(connection: Connection, barrier: Barrier) -> None:
    """Take each run directory by name, at the same moment as the other process; report whether this worked, and keep it if it
    did."""
    held: list[Lease] = []
    while (path := connection.recv()) is not None:
        barrier.wait(DEADLINE_S)
        try:
            held.append(RunDir(Path(path)).take())
            connection.send(True)
        except RunDirError as error:
            connection.send(str(error))


@pytest.fixture
def contenders() -> Iterator[list[Connection]]:
    barrier = _SPAWN.Barrier(2)
    pipes = [_SPAWN.Pipe() for _ in range(2)]
    started = [_SPAWN.Process(target=_contend, args=(theirs, barrier)) for _, theirs in pipes]
    for process in started:
        process.start()
    yield [ours for ours, _ in pipes]
    for (ours, theirs), process in zip(pipes, started, strict=True):
        process.kill()
        process.join()
        ours.close()
        theirs.close()


@pytest.mark.parametrize("stale", [True, False], ids=["the lease of a dead run", "a run that nobody holds"])
def test_of_two_processes_that_want_one_run_at_once_exactly_one_gets_it(
    contenders: list[Connection], stale: bool, tmp_path: Path
) -> None:
    pid = dead_pid()
    for number in range(30):
        run = RunDir(tmp_path / str(number))
        run.prepare(fresh=False)
        if stale:
            left_by(run, pid=pid, token=f"dead {number}")
        for contender in contenders:
            contender.send(str(run.path))
        answers = []
        for contender in contenders:
            assert contender.poll(DEADLINE_S)
            answers.append(contender.recv())
        assert answers.count(True) == 1, f"round {number}: {answers}"
        [refusal] = [answer for answer in answers if answer is not True]
        assert "is still running: pid" in refusal
        assert names(run.path) == ["lease.json", "logs", "telemetry"]


def test_where_no_thread_can_be_started_it_is_held_and_released_all_the_same(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    held = run.take()
    assert run.holder() is not None
    held.release()
    assert run.holder() is None


# --- elsewhere


class Alive:
    """A holder on another host, as this one sees it: its file is touched."""

    def __init__(self, path: Path) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._touch, args=(path,))
        self._thread.start()

    def _touch(self, path: Path) -> None:
        while not self._over.wait(lease.BEAT_S):
            os.utime(path)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def test_a_holder_on_another_host_that_is_seen_to_live_is_not_disturbed(run: RunDir) -> None:
    other = left_by(run, host="another-host", pid=dead_pid())
    alive = Alive(run.lease)
    try:
        with pytest.raises(RunDirError, match=f"is still running: pid {other.pid} on another-host since"):
            run.take()
        with pytest.raises(RunDirError, match="on another-host"):
            run.prepare(fresh=True)
    finally:
        alive.stop()
    assert run.holder() == other


def test_a_holder_on_another_host_that_gives_no_sign_of_life_is_replaced_and_that_is_said(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "GONE_S", 0.5)
    monkeypatch.setattr(lease, "_PATIENCE_S", 0.1)
    other = left_by(run, host="another-host", since=0.0)
    said: list[str] = []
    mine = run.take(said.append)
    holder = run.holder()
    assert holder is not None
    assert holder.pid == os.getpid()
    [waiting, taken] = said
    assert waiting.startswith(
        f"waiting 0 s for a heartbeat from pid {other.pid} on another-host, which has written in {run.path} since "
    )
    assert taken == f"taken over from pid {other.pid} on another-host, which sent no heartbeat for 0 s"
    mine.release()
    assert run.holder() is None


def test_one_that_ends_while_its_attempt_is_in_question_is_followed_at_once(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "GONE_S", 1e6)  # a call that waits this long does not return here
    left_by(run, host="another-host")
    ends = threading.Timer(0.2, run.lease.unlink)
    ends.start()
    run.take()


def test_a_lease_is_touched_for_as_long_as_it_is_held(run: RunDir) -> None:
    held = run.take()
    found = {run.lease.stat().st_mtime_ns}
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < 3:
        assert time.monotonic() < deadline
        found.add(run.lease.stat().st_mtime_ns)
        time.sleep(0.01)
    held.release()


def test_what_was_taken_over_is_no_longer_touched_by_who_had_it(run: RunDir) -> None:
    """Otherwise a holder that was frozen would keep its successor's lease alive after the successor's death."""
    held = run.take()
    left_by(run, token="another's")
    before = run.lease.stat().st_mtime_ns
    time.sleep(2 * lease.BEAT_S)
    assert run.lease.stat().st_mtime_ns == before
    held.release()


_ELSEWHERE = """
import socket, sys
from pathlib import Path
from rankwise.run.directory import RunDir
socket.sethostname("elsewhere")
lease = RunDir(Path(sys.argv[1])).take()
print("taken", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="a host name of one's own needs root")
def test_a_real_process_with_another_host_name_and_other_pids_is_seen_alive_within_a_second_and_its_death_noticed(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*start, sys.executable, "-c", _ELSEWHERE, str(run.path)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "taken\n"
        with pytest.raises(RunDirError, match=r"is still running: pid \d+ on elsewhere since"):
            run.take()
        other.kill()
        other.wait()
    monkeypatch.setattr(lease, "GONE_S", 2.0)
    run.take().release()


def _contend_late(connection: Connection, path: str) -> None:
    lease.GONE_S = 1.0
    lease.fcntl.flock = lambda *_: None  # type: ignore[attr-defined,assignment]  # locks that do not reach the other host
    try:
        held = RunDir(Path(path)).take()
        connection.send(True)
        connection.recv()
        held.release()
    except RunDirError as error:
        connection.send(str(error))


def test_of_two_hosts_without_common_locks_that_replace_a_dead_one_at_once_one_gets_it(run: RunDir) -> None:
    left_by(run, host="another-host")
    pipes = [_SPAWN.Pipe() for _ in range(2)]
    started = [_SPAWN.Process(target=_contend_late, args=(theirs, str(run.path))) for _, theirs in pipes]
    for process in started:
        process.start()
    answers = []
    for ours, _ in pipes:
        assert ours.poll(DEADLINE_S)
        answers.append(ours.recv())
    for ours, _ in pipes:
        ours.send(None)
    for process in started:
        process.join()
    assert answers.count(True) == 1, answers


def test_where_a_file_has_one_name_alone_the_lock_keeps_others_out(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    held = run.take()
    with pytest.raises(RunDirError, match="is still running"):
        run.take()
    held.release()
    assert run.holder() is None


def test_of_two_that_find_nobody_and_cannot_lock_the_second_finds_the_first(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = lease._write

    def second(path: Path, mine: Holder, is_first: bool) -> int | None:
        if run.holder() is None:  # between the look and the write
            left_by(run, token="another")
        return write(path, mine, is_first)

    monkeypatch.setattr(lease, "_write", second)
    with pytest.raises(RunDirError, match="is still running"):
        run.take()


# --- accidents


def test_a_forked_process_does_not_free_what_its_parent_holds(run: RunDir) -> None:
    held = run.take()
    child = os.fork()
    if child == 0:
        held.release()
        os._exit(0)
    os.waitpid(child, 0)
    holder = run.holder()
    assert holder is not None
    assert holder.pid == os.getpid()
    held.release()


def test_a_file_closed_elsewhere_in_the_process_does_not_free_it(run: RunDir) -> None:
    """As happens with POSIX locks."""
    held = run.take()
    run.lease.open("r+").close()
    with pytest.raises(RunDirError, match="is still running"):
        run.take()
    held.release()


# --- the fence


@pytest.mark.parametrize("taken", [True, False], ids=["a run that is held", "a run that nobody holds"])
def test_a_fence_lets_through_while_the_writer_is_who_it_was(run: RunDir, taken: bool) -> None:
    held = run.take() if taken else None
    fence = Fence(run.lease)
    fence.check()
    if held is not None:
        held.release()
        fence.check()  # it has exited: there is no other process


def test_a_fence_stops_who_was_taken_for_dead_and_says_by_whom(run: RunDir) -> None:
    held = run.take()
    fence = Fence(run.lease)
    left_by(run, host="another-host", pid=7, token="another's")
    with pytest.raises(RunDirError, match=r"was taken over by pid 7 on another-host at 2.* this process stops$"):
        fence.check()
    held.release()


@pytest.mark.parametrize("why", [errno.EINVAL, errno.EACCES])
def test_a_file_system_that_refuses_a_lock_is_one_without_locks(why: int, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(why, os.strerror(why))

    monkeypatch.setattr(lease.fcntl, "flock", refuse)  # type: ignore[attr-defined]
    held = run.take()
    with pytest.raises(RunDirError, match="is still running"):
        run.take()
    held.release()
