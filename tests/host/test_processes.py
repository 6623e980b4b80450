"""Facts about processes, and signals to them. A test that kills everything below the caller runs in a separate process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from rankwise.errors import ConfigError
from rankwise.host import processes

DEADLINE_S = 120.0


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.002)


def gone(pid: int) -> bool:
    return processes.start_time(pid) is None


@contextlib.contextmanager
def python(source: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run the source. After the test, the process and its children have ended, whatever happened."""
    with subprocess.Popen([sys.executable, "-c", source, *words], stdin=-1, stdout=-1, text=True) as process:
        try:
            yield process
        finally:
            for pid in reversed(processes.descendants(process.pid)):
                processes.send(pid, signal.SIGKILL)
            process.kill()


def line_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


# --- start_time


def test_a_living_process_has_one_start_time_that_sets_it_apart() -> None:
    mine = processes.start_time(os.getpid())
    assert mine is not None
    assert processes.start_time(os.getpid()) == mine
    with python("input()") as child:
        began = processes.start_time(child.pid)
        assert began is not None
        assert began >= mine
        assert began / os.sysconf("SC_CLK_TCK") <= time.clock_gettime(time.CLOCK_BOOTTIME)
        child.communicate("\n")


def test_a_process_that_is_gone_or_a_zombie_has_no_start_time() -> None:
    with python("") as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended and is not reaped
        assert Path(f"/proc/{child.pid}").exists()
        assert processes.start_time(child.pid) is None
    assert not Path(f"/proc/{child.pid}").exists()
    assert processes.start_time(child.pid) is None
    assert processes.start_time(2**22 + 1) is None  # above any pid


_RENAME = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)  # PR_SET_NAME
print(0, flush=True)
input()
"""


@pytest.mark.parametrize("name", [") Z 1 (", "a b) c", "(x", "))) Z"])
def test_the_name_of_a_process_cannot_lie_about_its_start_time(name: str) -> None:
    with python(_RENAME, name) as child:
        before = processes.start_time(child.pid)
        line_of(child)
        with open(f"/proc/{child.pid}/comm") as file:
            assert file.read().rstrip("\n") == name
        assert processes.start_time(child.pid) == before is not None
        child.communicate("\n")


def test_the_boot_has_a_name_that_stays() -> None:
    assert len(processes.boot_id()) == 36
    assert processes.boot_id() == processes.boot_id()


# --- the tree

_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
print(child.pid, flush=True)
input()
child.communicate()
"""


def test_children_and_descendants_are_found_in_other_sessions_too() -> None:
    with python(_PARENT) as parent:
        [grandchild] = line_of(parent)
        assert processes.children(parent.pid) == [grandchild]
        assert parent.pid in processes.children(os.getpid())
        below = processes.descendants(os.getpid())
        assert below.index(parent.pid) < below.index(grandchild)
        parent.communicate("\n")
    assert processes.children(parent.pid) == []
    assert processes.descendants(parent.pid) == []


_CHILD_OF_A_THREAD = """
import subprocess, sys, threading
started, end = threading.Event(), threading.Event()
def start():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    print(child.pid, flush=True)
    end.wait()
    child.communicate()
threading.Thread(target=start).start()
input()
end.set()
"""


def test_the_child_of_a_thread_is_a_child_of_its_process() -> None:
    with python(_CHILD_OF_A_THREAD) as parent:
        [child] = line_of(parent)
        assert processes.children(parent.pid) == [child]
        parent.communicate("\n")


def test_a_signal_to_a_process_that_is_gone_is_no_error() -> None:
    with python("") as child:
        child.wait()
    processes.send(child.pid, signal.SIGTERM)


def test_a_signal_to_a_process_of_another_user_is_no_error_and_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.send(os.getpid(), 0)
    monkeypatch.setattr(os, "kill", Mock(side_effect=PermissionError))
    assert not processes.send(os.getpid(), 0)


WAITS = "import signal; {}; print(1, flush=True); input()"


@pytest.mark.parametrize(
    ("prepare", "status"),
    [
        ("pass", 0),
        ("signal.signal(signal.SIGRTMIN + 3, signal.SIG_IGN)", 0),
        ("signal.signal(signal.SIGRTMIN + 3, lambda *_: exit(7))", 7),
    ],
)
def test_a_signal_that_would_end_a_process_is_sent_only_to_one_that_handles_it(prepare: str, status: int) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WAITS.format(prepare)], **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == b"1\n"
        processes.send_if_handled(process.pid, signal.SIGRTMIN + 3)
        if status:
            assert process.wait(timeout=60) == status
        else:  # a signal would have come before the line
            process.communicate(b"\n", timeout=60)
            assert process.returncode == 0
    processes.send_if_handled(process.pid, signal.SIGRTMIN + 3)  # gone: no error


def test_a_signal_is_sent() -> None:
    with python("input()") as child:
        processes.send(child.pid, signal.SIGTERM)
        assert child.wait(DEADLINE_S) == -signal.SIGTERM


# --- subreaper and end_tree: this process starts a tree that does everything to survive

_TREE = """
import os, signal, subprocess, sys
from rankwise.errors import ConfigError
from rankwise.host import processes

LEAF = '''
import os, signal, sys
for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(signum, signal.SIG_IGN)
os.write(int(sys.argv[1]), b"%d " % os.getpid())
signal.pause()
'''

def leaf(fd, **options):
    return subprocess.Popen([sys.executable, "-c", LEAF, str(fd)], pass_fds=[fd], **options)

def branch(fd):
    if os.fork() == 0:
        os.setsid()
        leaf(fd, start_new_session=True)     # a grandchild in a session of its own
        if os.fork() == 0:
            leaf(fd)
            os._exit(0)                      # its leaf is an orphan at once
        os.write(fd, b"%d " % os.getpid())
        signal.pause()

def numbers(fd, count):
    text = b""
    while text.count(b" ") < count:
        text += os.read(fd, 4096)
    return [int(word) for word in text.split()]

if sys.argv[1] == "subreaper":
    processes.become_subreaper()
reader, writer = os.pipe()
branch(writer)
pids = numbers(reader, 3)
"""

_END_ALL = (
    _TREE
    + """
while len(orphans := [p for p in pids if p in processes.children(os.getpid())]) < 2:
    pass                                     # the orphan says its number, and its parent ends, in either order
clean = processes.end_tree()
print(clean, len(orphans), processes.children(os.getpid()), [p for p in pids if processes.start_time(p)], flush=True)
"""
)


def test_end_tree_leaves_nothing_of_a_tree_with_sessions_orphans_and_ignored_signals() -> None:
    with python(_END_ALL, "subreaper") as top:
        out, _ = top.communicate(timeout=DEADLINE_S)
    assert out == "True 2 [] []\n"  # the branch itself, and the orphan that the subreaper inherited


_SLOW_TO_END = """
import subprocess, sys, time
from rankwise.errors import ConfigError
from rankwise.host import processes
processes.become_subreaper()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
send, begin = processes.send, time.monotonic()
ends_after_s = float("inf" if sys.argv[3] == "False" else 0.5)
processes.send = lambda pid, signum: time.monotonic() < begin + ends_after_s or send(pid, signum)
if sys.argv[1] == "state D":
    processes.blocked_in = lambda pid: "a_driver"
print(processes.end_tree(bound_s=0.1, others_s=float(sys.argv[2])), flush=True)
child.kill()
"""


@pytest.mark.parametrize(("state", "others_s", "ended"), [("running", 60, True), ("running", 0, False), ("state D", 60, False)])
def test_end_tree_gives_up_soon_only_on_what_waits_for_a_driver(state: str, others_s: float, ended: bool) -> None:
    with python(_SLOW_TO_END, state, str(others_s), str(ended)) as top:
        out, _ = top.communicate(timeout=DEADLINE_S)
    assert out == f"{ended}\n"


_THREE_BELOW = """
import os, subprocess, sys
from rankwise.errors import ConfigError
from rankwise.host import processes
processes.become_subreaper()
PARENT = '''
import subprocess, sys
below = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print(below.pid, flush=True)
input()
below.communicate()
'''
parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
below = int(parent.stdout.readline())
other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
def alive():
    return [int(processes.start_time(pid) is not None) for pid in (parent.pid, below, other.pid)]
"""

_OF_ANOTHER_USER = f"""{_THREE_BELOW}
kill = os.kill
def kill_own(pid, signum):
    if pid in (parent.pid, below):
        raise PermissionError
    kill(pid, signum)
os.kill = kill_own
ended = processes.end_tree(others_s=float("inf"))
print(int(ended), *alive(), flush=True)
os.kill = kill
processes.end_tree()
"""


def test_end_tree_does_not_wait_for_processes_of_another_user() -> None:
    with python(_OF_ANOTHER_USER) as top:
        assert line_of(top) == [1, 1, 1, 0]
        top.communicate()


_ORPHAN = """
import os, sys
from rankwise.errors import ConfigError
from rankwise.host import processes
if sys.argv[1] == "subreaper":
    processes.become_subreaper()
reader, writer = os.pipe()
told, tell = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        os.close(tell)
        os.read(told, 1)                     # until the top has reaped the middle one
        os.write(writer, b"%d" % os.getppid())
        os._exit(0)
    os._exit(0)
os.wait()
os.write(tell, b"x")
print(int(int(os.read(reader, 100)) == os.getpid()), flush=True)
"""


@pytest.mark.parametrize(("how", "falls_to_us"), [("subreaper", 1), ("plain", 0)])
def test_an_orphan_falls_to_the_subreaper_above_it(how: str, falls_to_us: int) -> None:
    with python(_ORPHAN, how) as top:
        assert line_of(top) == [falls_to_us]
        top.communicate()


_EXCLUDE = f"""{_THREE_BELOW}
assert processes.end_tree(exclude={{parent.pid}})
print(*alive(), flush=True)
assert processes.end_tree()
print(*alive(), flush=True)
"""


def test_end_tree_spares_what_is_excluded_and_what_is_below_it() -> None:
    with python(_EXCLUDE) as top:
        assert line_of(top) == [1, 1, 0]
        assert line_of(top) == [0, 0, 0]
        top.communicate()


def test_end_tree_of_nobody_is_done_at_once() -> None:
    source = "from rankwise.host import processes\nprint(int(processes.end_tree(bound_s=0)))"
    with python(source) as top:
        assert line_of(top) == [1]
        top.communicate()


# --- death with the parent

_DIES_WITH_ITS_PARENT = """
import os, signal, sys
from rankwise.errors import ConfigError
from rankwise.host import processes
parent = os.getpid()
reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    if sys.argv[1] == "armed":
        processes.die_with_parent(parent)
    os.write(writer, b"x")
    signal.pause()
os.read(reader, 1)
print(pid, flush=True)
signal.pause()
"""


def test_a_process_dies_with_its_parent_however_that_ends() -> None:
    with python(_DIES_WITH_ITS_PARENT, "armed") as parent:
        [child] = line_of(parent)
        assert not gone(child)
        parent.kill()
        wait_for(lambda: gone(child), "the child's death")


def test_without_it_a_process_lives_on() -> None:
    with python(_DIES_WITH_ITS_PARENT, "plain") as parent:
        [child] = line_of(parent)
        parent.kill()
        parent.wait()
        assert not gone(child)
        os.kill(child, signal.SIGKILL)
        wait_for(lambda: gone(child), "the child's death")


_PARENT_ENDED_BEFORE = """
import os
from rankwise.errors import ConfigError
from rankwise.host import processes
reader, writer = os.pipe()
if os.fork() == 0:
    processes.die_with_parent(2**22 + 1)     # never its parent
    os.write(writer, b"lives on")
    os._exit(0)
os.close(writer)
print(len(os.read(reader, 100)), os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def test_a_process_whose_parent_has_ended_already_leaves_at_once() -> None:
    with python(_PARENT_ENDED_BEFORE) as top:
        assert line_of(top) == [0, 1]
        top.communicate()


def test_the_commands_above_a_process_are_listed_from_its_parent_on() -> None:
    code = "import os; from rankwise.host import processes; print(processes.ancestors(os.getpid())[0][1:])"
    inner = subprocess.run(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])", "a b", ""],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert inner.stdout.rstrip().endswith("'a b', '']")
    assert processes.ancestors(2**30) == []


def test_a_limit_on_the_size_of_files_is_a_shortage() -> None:
    script = "from rankwise.host import processes; print(processes.shortage(OSError(27, 'File too large')))"
    for limit, said in (("8", "at most 8 kB per file (ulimit -f)"), ("unlimited", "None")):  # or the file system has a limit
        line = f'ulimit -f {limit}; exec "{sys.executable}" -c "{script}"'
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
        assert done.stdout == f"{said}\n"


@pytest.mark.parametrize("who", [None, "1", "4194305"])
def test_a_proc_that_is_missing_or_of_another_namespace_is_an_error_that_says_how_to_mount_it(
    who: str | None, tmp_path: Path
) -> None:
    processes.check_proc()
    if who is not None:
        (tmp_path / "self").symlink_to(who)
    with pytest.raises(ConfigError, match=r"^/proc does not show this process .*type: mount -t proc proc /proc$"):
        processes.check_proc(tmp_path)
