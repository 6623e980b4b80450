"""What an agent finds of a run on its host, what it sends to the process that has started it, and to whom it reports Ctrl-C."""

from __future__ import annotations

import os
import platform
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cluster_runs import GATE
from launched import wait_for
from plans import plan

from rankwise.agent import bootstrap
from rankwise.errors import ConfigError
from rankwise.ipc.channel import Door, NobodyThere
from rankwise.run.directory import RunDir, write_json
from rankwise.run.plan import Host, Plan
from rankwise.schedulers import queues

HERE = platform.node()


def planned(**changes: Any) -> Plan:
    return plan(str(Path.cwd()), **changes)


@pytest.mark.parametrize(
    ("changes", "lacks"),
    [
        ({"cwd": "/no/where"}, "has no /no/where (no such file or directory), the folder of the script: "),
        ({"argv": ("other.py",)}, "has no script other.py in "),
        ({"interpreter": ("/no/python", "-u")}, "has no Python /no/python, which runs the script"),
    ],
)
def test_what_a_host_lacks_of_a_run_is_named_with_the_host_and_the_cure(changes: dict[str, Any], lacks: str) -> None:
    Path("train.py").write_text("")
    with pytest.raises(ConfigError) as raised:
        bootstrap._enter(planned(**changes))
    assert str(raised.value).startswith(f"{HERE} {lacks}")
    assert str(raised.value).endswith("every host needs it at the same path, on a shared file system or as a copy")


@pytest.mark.parametrize("changes", [{}, {"argv": ("-m", "package.train")}, {"argv": ("sh", "-c", "true"), "interpreter": ()}])
def test_a_host_that_has_all_of_it_is_entered(changes: dict[str, Any]) -> None:
    Path("train.py").write_text("")
    bootstrap._enter(planned(**changes))


@pytest.mark.parametrize(
    ("status", "outcome", "name", "changes", "told"),
    [
        (75, "stopped by SIGUSR1 after step 3", "slurm", {}, 0),
        (75, "stopped by SIGUSR1 after step 3", "sge", {}, 0),
        (75, "stopped by SIGUSR1 after step 3", "slurm", {"job": {"requeue": True}}, 75),
        (75, "stopped by SIGUSR1 after step 3", "sge", {"job": {"requeue": True}}, 99),
        (75, "stopped by SIGUSR1 after step 3", "slurm", {"job": {"within": True}}, 75),
        (75, "stopped by SIGUSR1 after step 3", "slurm", {"launcher_holds": True}, 75),
        (75, "stopped by SIGTERM after step 3", "local", {}, 75),
        (75, "rank 0 exited with status 75", "slurm", {}, 75),
        (1, "rank 0 exited with status 1", "slurm", {}, 1),
        (0, "all ranks exited with status 0", "slurm", {}, 0),
    ],
)
def test_to_its_queue_a_job_that_has_stopped_and_saved_has_not_failed(
    status: int, outcome: str, name: str, changes: dict[str, Any], told: int, tmp_path: Path
) -> None:
    run = RunDir(tmp_path / "run")
    run.prepare(fresh=False)
    run.update_attempt(run.begin_attempt(1, ("train.py",)), status=status, outcome=outcome)
    assert bootstrap._exit_status_for_queue(status, planned(**changes), run, queues()[name], 0) == told


@pytest.mark.parametrize("earlier", [0, 1])
def test_a_job_that_is_stopped_before_its_ranks_start_is_not_taken_for_one_that_has_saved(earlier: int, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.prepare(fresh=False)
    for _ in range(earlier):
        run.update_attempt(run.begin_attempt(1, ("train.py",)), status=75, outcome="stopped by SIGUSR1 after step 3")
    assert bootstrap._exit_status_for_queue(75, planned(), run, queues()["slurm"], earlier) == 75


@pytest.mark.parametrize(
    ("first", "then"), [(signal.SIGINT, b"Ctrl-C again kills them"), (signal.SIGTERM, b"Ctrl-C kills them")]
)
def test_who_sits_at_a_terminal_is_told_what_a_second_ctrl_c_does(first: signal.Signals, then: bytes) -> None:
    """tests/test_run.py has the same test with a file instead of a terminal."""
    Path("train.py").write_text("import os\nos.environ['X'] = '1'\n" + GATE)
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "rankwise", "run", "--nproc", "1", "train.py"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=slave, stderr=slave) as process:
        wait_for(Path("joined-0").exists, "the gate")
        process.send_signal(first)
    said = os.read(master, 1 << 16)
    os.close(master)
    os.close(slave)
    assert b"all ranks stop after the current step, and save, within 120 s; " + then in said


def test_an_agent_that_the_head_starts_is_greeted_with_the_plan_and_its_own_number_and_ranks(monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "environ", {"LR": "1", "HOME": "/home/me", "XDG_RUNTIME_DIR": "/run/user/1"})
    greeting = bootstrap._greeting_of(planned(launcher_pid=42), "secret", 3, Host("node3", 2))
    assert {key: greeting[key] for key in ("node", "ranks", "secret", "environment")} == {
        "node": 3, "ranks": 2, "secret": "secret", "environment": {"LR": "1"},
    }  # fmt: skip
    assert greeting["plan"] == {**planned().record(), "launcher_pid": 0}


@pytest.fixture
def doors() -> Iterator[tuple[Door, Door]]:
    """Of a head that was killed, and of the head that was started after it in the same job."""
    pair = Door("old", loopback=True), Door("new", loopback=True)
    yield pair
    for door in pair:
        door.close()


def test_a_member_waits_for_the_first_node_if_an_earlier_run_of_the_job_has_left_its_address(
    doors: tuple[Door, Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, waited = RunDir(Path("run").absolute()), []
    run.prepare(fresh=False)
    write_json(run.plan, planned(run_id="second").record())
    doors[0].publish(run.door, "first", "pbs-1")

    def wait(*words: Any) -> None:
        waited.append(words[-1])
        doors[1].publish(run.door, "second", "pbs-1")

    monkeypatch.setattr(bootstrap, "_wait_for_head", wait)
    assert bootstrap._find_plan(run, 1, "pbs-1", mock.Mock()).run_id == "second"
    assert waited == [f"{run.plan} is not the plan of the first node"]


def test_a_member_that_nobody_answers_reads_the_address_again(
    doors: tuple[Door, Door], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, knocks = RunDir(Path("run").absolute()), []
    run.prepare(fresh=False)
    write_json(run.plan, planned().record())
    doors[0].publish(run.door, "x", "pbs-1")

    def knock(_: Any, port: int, secret: str, *__: Any) -> Any:
        knocks.append((port, secret))
        assert len(knocks) < 3
        if secret == "old":
            doors[1].publish(run.door, "x", "pbs-1")
            raise NobodyThere("connection refused")
        return mock.Mock(), "127.0.0.1", "127.0.0.1"

    monkeypatch.setattr(bootstrap, "knock", knock)
    monkeypatch.setattr(bootstrap, "_wait_for_head", mock.Mock())
    for name in ("Node", "introduced", "RemoteNode", "_enter"):
        monkeypatch.setattr(bootstrap, name, mock.Mock())
    bootstrap._calling(planned(), run, 1, "pbs-1", mock.Mock(asked=[]))
    assert knocks == [(doors[0].port, "old"), (doors[1].port, "new")]
