"""Jobs for a real Grid Engine with two hosts: what it accepts, what it refuses, and what it reports about each."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from clusters import PYTHON, Start, sge
from plans import plan

from rankwise.errors import ConfigError
from rankwise.run.directory import RunDir, write_json, write_text
from rankwise.schedulers.job import State
from rankwise.schedulers.sge import GridEngine

scheduler = GridEngine()

__all__ = ["sge"]  # a fixture

pytestmark = pytest.mark.cluster

DEADLINE_S = 60.0
HOSTILE = 'a b$(touch x);it\'s "here", at: `touch y` & *'


def job(*argv: str, name: str = "train", folder: str = "run", **asked: Any) -> RunDir:
    """The run directory of a job on one host, as the launcher leaves it."""
    run = RunDir(Path(folder).absolute())
    run.prepare(fresh=False)
    planned = plan(
        str(Path.cwd()), folder, on="sge", name=name, argv=argv, interpreter=(PYTHON,), nodes=1, min_nodes=1, job=asked,
        grace_s=5.0, stall_warn_s=0.0, fork=False,  # nothing here needs torch: a rank starts at once
    )  # fmt: skip
    write_json(run.plan, planned.record())
    write_text(run.job, scheduler.render(planned), mode=0o755)
    return run


def until(phase: str, job_id: str) -> State:
    """The job's state when it has reached this phase. qacct's data is written a moment after the end."""
    deadline = time.monotonic() + DEADLINE_S
    while (state := scheduler.state({"id": job_id})).phase != phase:
        assert time.monotonic() < deadline, state
        time.sleep(0.1)
    return state


def output(run: RunDir, job_id: str) -> str:
    return (run.logs / f"job-{job_id}.log").read_text()


@pytest.mark.parametrize("folder", ["run", HOSTILE], ids=["plain", "hostile"])
def test_a_job_of_one_host_runs_its_ranks_and_ends_with_their_status(sge: Start, folder: str) -> None:
    Path("train.py").write_text(
        "import os, shutil, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], shutil.which('python-of-the-user'))\n"
        "sys.exit(4 if os.environ['RANK'] == '1' else 0)\n"
    )
    run = job(
        "train.py", folder=folder, pe="smp", slots=2, resources=("h_rt=600", "gpu=1"), requeue=True, setup=("export A=1",)
    )
    job_id = scheduler.submit(str(run.job), {})
    assert scheduler.state({"id": job_id}).phase in ("waiting", "running")
    assert until("ended", job_id) == State("ended", "ended", 4)
    assert run.log(0).read_text().startswith("0 2 "), output(run, job_id)
    assert run.attempts()[-1].status == 4
    assert not [path for path in Path.cwd().rglob("*") if path.name in ("x", "y")]


def test_the_users_own_commands_are_found_in_a_job(sge: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("bin").mkdir()
    Path("bin/ours").write_text("#!/bin/sh\necho found > found\n")
    Path("bin/ours").chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path('bin').absolute()}:/usr/local/bin:/usr/bin:/bin")
    Path("train.py").write_text("import subprocess\nsubprocess.run(['ours'], check=True)\n")
    run = job("train.py")
    job_id = scheduler.submit(str(run.job), {})
    assert until("ended", job_id).status == 0, output(run, job_id)
    assert Path("found").exists()


def test_what_is_asked_for_arrives_word_by_word(sge: Start) -> None:
    asked = {"pe": "mpi", "slots": 3, "resources": ("h_rt=1:00:00,gpu=1", "hostname=node1|node2"), "queue": "main.q@node*"}
    run = job("train.py", name="3;$(touch x) 'é\"", account="speech", **asked)
    job_id = scheduler.submit(str(run.job), {})
    said = sge("qstat", "-j", job_id).stdout
    scheduler.cancel({"id": job_id})
    facts = {key: value.strip() for key, _, value in (line.partition(":") for line in said.splitlines())}
    assert facts["job_name"] == "run-3-touch-x"
    assert facts["hard resource_list"] == "h_rt=3600,gpu=1,hostname=node1|node2"
    assert facts["hard_queue_list"] == "main.q@node*"
    assert facts["parallel environment"] == "mpi range: 3"
    assert (facts["account"], facts["notify"], facts["restart"], facts["cwd"]) == ("speech", "TRUE", "n", str(run.path))
    assert not list(Path.cwd().rglob("x"))


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        (
            {"pe": "nope", "slots": 2},
            'qsub refuses the job: job rejected: the requested parallel environment "nope" does not exist; to list them: '
            "qconf -spl",
        ),
        ({"resources": ("nope=1",)}, 'qsub refuses the job: unknown resource "nope"; to list them: qconf -sc'),
        (
            {"resources": ("h_rt=soon",)},
            'qsub refuses the job: attribute "h_rt" is not a time value; for example -l h_rt=10:00:00',
        ),
        ({"resources": ("gpu=9",)}, "qsub refuses the job: error: no suitable queues; no queue can ever run it"),
        ({"pe": "mpi", "slots": 999}, "qsub refuses the job: error: no suitable queues; no queue can ever run it"),
        (
            {"queue": "nope.q"},
            'qsub refuses the job: Job was rejected because job requests unknown queue "nope.q"; to list them: qconf -sql',
        ),
    ],
    ids=["pe", "resource", "time", "gpus", "slots", "queue"],
)
def test_what_can_never_run_is_refused_in_one_line_with_what_to_type(sge: Start, asked: dict[str, Any], line: str) -> None:
    run = job("train.py", **asked)
    with pytest.raises(ConfigError) as raised:
        scheduler.submit(str(run.job), {})
    assert str(raised.value).startswith(line)
    assert "\n" not in str(raised.value)


def test_a_job_that_waits_can_be_cancelled_and_is_then_forgotten(sge: Start) -> None:
    sge("qmod", "-d", "main.q")
    try:
        job_id = scheduler.submit(str(job("train.py").job), {})
        assert scheduler.state({"id": job_id}) == State("waiting", "waiting (qw)")
        scheduler.cancel({"id": job_id})
        assert until("unknown", job_id).reason == "it is in no queue, and qacct has no record of it"
        scheduler.cancel({"id": job_id})  # it has ended: nothing happens
    finally:
        sge("qmod", "-e", "main.q")


def test_a_job_whose_output_has_no_folder_says_that_it_will_never_start_and_why(sge: Start) -> None:
    run = job("train.py")
    sge("qmod", "-d", "main.q")
    try:
        job_id = scheduler.submit(str(run.job), {})
        run.logs.rmdir()
    finally:
        sge("qmod", "-e", "main.q")
    state = until("stuck", job_id)
    assert state.reason == (
        f'Eqw: it will never start: can\'t open output file "{run.logs}/job-{job_id}.log": No such file or directory; '
        "every host must see the run directory at this path; use --run-dir PATH with a folder that they share; "
        f"repair that, then type: qmod -cj {job_id}"
    )
    scheduler.cancel({"id": job_id})


def started(run: RunDir) -> None:
    """Returns when rank 0 has printed something."""
    deadline = time.monotonic() + DEADLINE_S
    while not (run.log(0).exists() and run.log(0).read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.1)


SLEEPER = "import time\nprint('there', flush=True)\ntime.sleep(600)\n"


def test_to_cancel_a_running_job_is_to_ask_its_ranks_first(sge: Start) -> None:
    Path("train.py").write_text(SLEEPER)
    run = job("train.py")
    job_id = scheduler.submit(str(run.job), {})
    started(run)
    scheduler.cancel({"id": job_id})
    status = until("ended", job_id).status
    last = run.attempts()[-1]
    assert (last.outcome, last.status) == ("ended by SIGUSR2", status)  # not killed: it could report this


def test_ranks_are_asked_to_stop_before_the_limit(sge: Start) -> None:
    Path("train.py").write_text(SLEEPER)
    run = job("train.py", resources=("h_rt=100,s_rt=5",))
    job_id = scheduler.submit(str(run.job), {})
    status = until("ended", job_id).status
    assert (run.attempts()[-1].outcome, run.attempts()[-1].status) == ("ended by SIGUSR1", status)


def test_exit_99_starts_the_job_once_more_under_its_number_and_its_output_goes_on(sge: Start) -> None:
    Path("train.py").write_text(
        "import os, sys\nprint('restarted', os.environ['RESTARTED'])\nsys.exit(99 * (os.environ['RESTARTED'] == '0'))\n"
    )
    run = job("train.py", requeue=True)
    write_text(run.job, run.job.read_text().replace(f"-P -m rankwise.agent {shlex.quote(str(run.path))}", "train.py"))
    job_id = scheduler.submit(str(run.job), {})
    assert until("ended", job_id).status == 0
    assert output(run, job_id) == "restarted 0\nrestarted 1\n"


def in_a_job_of_two_hosts(sge: Start, source: str) -> tuple[Any, str]:
    """What `source`, in the script of a job with three slots, has written to `found`, and how the job ended."""
    Path("head.py").write_text(
        "import json, os, subprocess, sys\nfrom rankwise.schedulers import queue\n"
        "sge = queue('sge')\n"
        "hosts = sge.hosts(None, os.environ)\nfound = {'hosts': [[host.name, host.slots] for host in hosts]}\n"
        f"{source}\njson.dump(found, open('found', 'w'))\n"
    )
    run = job("head.py", pe="mpi", slots=3)
    write_text(run.job, run.job.read_text().replace(f"-P -m rankwise.agent {shlex.quote(str(run.path))}", "head.py"))
    job_id = scheduler.submit(str(run.job), {})
    assert until("ended", job_id).status == 0, output(run, job_id)
    return json.loads(Path("found").read_text()), output(run, job_id)


REACH = """
def reach(host, command, **options):
    done = subprocess.run(sge.reach(host, command), capture_output=True, text=True, **options)
    return [done.returncode, done.stdout, done.stderr, sge.refusal(host, done.stderr)]
"""


def test_the_first_host_of_a_job_reaches_the_others_word_by_word_with_stdin_and_status(sge: Start) -> None:
    words = ["a  b", "$HOME", "`touch y`", ";touch y", "it's", 'a "b"', "*", "\\", "a\nb", "é", "", "-v", "--", "~"]
    found, _ = in_a_job_of_two_hosts(
        sge,
        f"{REACH}\n"
        "source = 'import os, sys; print(os.uname().nodename, sys.stdin.read(), sys.argv[1:]); sys.exit(7)'\n"
        f"found['far'] = reach(hosts[1].name, [sys.executable, '-c', source, *{words!r}], input='sent')\n"
        "found['here'] = reach(hosts[0].name, ['/bin/hostname'], stdin=subprocess.DEVNULL)\n",
    )
    (here, here_slots), (there, there_slots) = found["hosts"]
    assert ({here, there}, here_slots + there_slots) == ({"node1", "node2"}, 3)
    assert found["far"] == [7, f"{there} sent {words}\n", "", None]
    assert found["here"] == [0, f"{here}\n", "", None]
    assert not Path("y").exists()


def test_a_command_that_dies_by_a_signal_on_another_host_does_not_take_the_job_with_it(sge: Start) -> None:
    """Grid Engine ends such a job some seconds later: a task that runs for longer shows that it did not."""
    found, _ = in_a_job_of_two_hosts(
        sge,
        f"{REACH}\n"
        "found['killed'] = reach(hosts[1].name, ['/bin/sh', '-c', 'kill -KILL $$'], stdin=subprocess.DEVNULL)[0]\n"
        "found['after'] = reach(hosts[1].name, ['sleep', '8'], stdin=subprocess.DEVNULL)[0]\n",
    )
    assert (found["killed"], found["after"]) == (137, 0)


def test_a_host_that_is_not_of_the_job_is_said_in_one_line(sge: Start) -> None:
    found, _ = in_a_job_of_two_hosts(sge, f"{REACH}\nfound['far'] = reach('nosuch', ['true'], stdin=subprocess.DEVNULL)\n")
    assert found["far"][3].startswith("qrsh cannot start a task on nosuch: failed sending task to execd@nosuch: can't resolve")
