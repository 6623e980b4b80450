"""Grid Engine's variables, the text of a job for it, and what it reports about one."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from environments import SGE_ARRAY, SGE_ONE_HOST, SGE_SCRIPT, SGE_SERIAL, SGE_TASK, Env
from plans import HOSTILE, golden, hostile, plan

from rankwise.dist.world import discover
from rankwise.errors import ConfigError, NotJoinedError, WorldError
from rankwise.run.plan import Host
from rankwise.schedulers.job import State
from rankwise.schedulers.sge import GridEngine, _error_reason, refused

sge = GridEngine()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (SGE_SCRIPT, r"^NHOSTS=2, NSLOTS=3, PE_HOSTFILE=.*: this is the job's script, on the first of its 2 hosts"),
        (SGE_TASK, r"^JOB_SCRIPT=QRSH, JOB_NAME=petask, JOB_ID=2: .*which does not give it a rank, so"),
        ({**SGE_SCRIPT, **SGE_TASK}, r"^JOB_SCRIPT=QRSH.*which does not give it a rank"),
        ({"JOB_SCRIPT": "QRSH"}, r"^JOB_SCRIPT=QRSH: .*which does not give it a rank"),
        ({"PE_HOSTFILE": "x", "NSLOTS": "3"}, r"^PE_HOSTFILE=x, NSLOTS=3 but no NHOSTS"),
        ({"PE_HOSTFILE": "x"}, r"^PE_HOSTFILE=x but no NHOSTS"),
    ],
    ids=["script", "task", "task with -V", "bare task", "no hosts", "no counts"],
)
def test_a_process_of_a_parallel_job_that_was_not_joined_is_an_error(env: Env, said: str) -> None:
    with pytest.raises(NotJoinedError, match=f"{said}.*would train alone; .*mpirun python script.py"):
        discover(env)
    world = discover(env, allow_independent=True)
    assert (world.rank, world.world_size, world.source) == (0, 1, "sge")


def test_several_slots_on_one_host_are_one_process_and_it_says_so() -> None:
    ranks = sge.ranks(SGE_ONE_HOST)
    assert (ranks.rank, ranks.world_size, ranks.node_rank) == (0, 1, 0)
    assert ranks.note == "NSLOTS=3 slots on this host, but one process; to use them all: rankwise run script.py"


def test_a_serial_job_is_single() -> None:
    world = discover(SGE_SERIAL)
    assert (world.source, world.world_size, world.note) == ("sge", 1, None)  # SGE_TASK_ID=undefined is not a task


def test_a_task_of_a_job_array_is_a_world_of_its_own_and_says_so() -> None:
    assert sge.ranks(SGE_ARRAY).note == "task 4 of job array 26: each task trains on its own"


@pytest.mark.parametrize("name", ["NHOSTS", "NSLOTS"])
def test_a_count_that_is_no_number_is_an_error_that_shows_it(name: str) -> None:
    with pytest.raises(WorldError, match=f"^{name}='x' is not a whole number"):
        sge.ranks({**SGE_SCRIPT, name: "x"})


def test_a_triple_that_the_starter_passed_is_believed() -> None:
    triple = {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "node2", "MASTER_PORT": "29500"}
    assert discover({**SGE_TASK, **triple}).source == "torchrun"


def test_a_submit_host_does_not_speak_of_a_job() -> None:
    assert not sge.detect({"SGE_ROOT": "/opt/sge", "SGE_CELL": "default", "JOB_ID": "7"})


# --- a job for its queue

JOB = {
    "slots": 8,
    "pe": "mpi",
    "resources": ("h_rt=10:00:00,gpu=1", "h_vmem=15G"),
    "queue": "gpu.q",
    "account": "speech",
    "requeue": True,
    "setup": ("module load cuda",),
}
HOSTILE_JOB = {"slots": "4-8", "pe": "m pi", "resources": ('os="a b"', "x=$(touch x);it's"), "queue": "*@!(a|b)"}


def test_the_text_of_a_job_is_the_golden_one() -> None:
    assert sge.render(plan(job=JOB)) == golden("sge.sh")


def test_the_text_of_a_job_whose_every_word_is_hostile_is_the_golden_one() -> None:
    assert sge.render(hostile(job=HOSTILE_JOB)) == golden("sge-hostile.sh")


def options(**job: Any) -> list[str]:
    lines = sge.render(plan(job=job)).splitlines()
    return [line.removeprefix("#$ ") for line in lines if line.startswith("#$ ")]


@pytest.mark.parametrize(
    ("resources", "s_rt"),
    [
        (("h_rt=10:00:00",), 36000 - 120),
        (("gpu=1,h_rt=3600",), 3480),
        (("h_rt=5:00",), 180),
        (("h_rt=:5:",), None),  # qsub reports what is wrong with it
        (("h_rt=100",), 50),  # half of it, if there is not enough time for the whole grace
        (("h_rt=3600", "s_rt=60"), None),
        (("h_rt=INFINITY",), None),
        (("gpu=1",), None),
    ],
)
def test_ranks_are_asked_to_stop_as_long_before_the_limit_as_they_may_take(
    resources: tuple[str, ...], s_rt: int | None
) -> None:
    ours = [option for option in options(resources=resources) if option.startswith("-l s_rt=") and option != "-l s_rt=60"]
    assert ours == ([] if s_rt is None else [f"-l s_rt={s_rt}"])


@pytest.mark.parametrize(
    ("resources", "after_s"),
    [
        (("h_rt=10:00:00",), 36000 - 120),
        (("h_rt=100",), 50),
        (("h_rt=3600", "s_rt=1000"), 880),
        (("s_rt=30",), 15),
        (("h_rt=INFINITY,gpu=1",), 0),
        ((), 0),
    ],
)
def test_in_a_parallel_environment_the_head_stops_the_run_itself_for_s_rt_kills_the_tasks_on_other_hosts(
    resources: tuple[str, ...], after_s: int
) -> None:
    job = {"pe": "mpi", "slots": 8, "resources": resources}
    assert sge.stop_after_s(job, 120.0) == after_s
    assert sge.stop_after_s({"resources": resources}, 120.0) == 0
    typed = [f"-l {item}" for item in resources]
    assert [option for option in options(**job) if option.startswith("-l")] == typed


@pytest.mark.parametrize(
    ("name", "job_name"),
    [
        ("1abc", "run-1abc"),
        ("None", "run-None"),
        ("all", "run-all"),
        ("a b;$(touch x)", "a-b-touch-x"),
        ("ü", "run"),
        (".x", "run-.x"),
    ],
)
def test_a_name_becomes_one_that_grid_engine_takes(name: str, job_name: str) -> None:
    assert f"#$ -N {job_name}\n" in sge.render(plan(name=name))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"job": {"slots": 8}}, "^--slots 8 without --pe: .*qconf -spl"),
        ({"job": {"pe": "mpi"}}, "^--pe mpi without --slots: .*--pe mpi --slots 8"),
        ({"job": {"resources": ("gpu=1\n#$ -now y",)}}, r"^-l 'gpu=1\\n#\$ -now y': .*cannot contain a newline"),
        ({"job": {"setup": ("a\nb",)}}, "^--setup 'a"),
        ({"job": {"resources": ('a="it\'s"',)}}, "cannot take both kinds of quotes in one value"),
        ({"job": {"account": "a b"}}, "^-A 'a b': an account"),
        ({"cwd": "/home/a\n#$ -q x"}, "^the folder .*newline"),
        ({"run_dir": "/home/a\nb"}, "^--run-dir .*newline"),
    ],
)
def test_what_no_script_of_grid_engine_can_hold_is_an_error(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sge.render(plan(**changes))


def test_one_slot_needs_no_parallel_environment() -> None:
    assert not [option for option in options(slots=1) if option.startswith("-pe")]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            'Unable to run job: job rejected: the requested parallel environment "nope" does not exist\nExiting.\n',
            'qsub refuses the job: job rejected: the requested parallel environment "nope" does not exist; to list them: '
            "qconf -spl",
        ),
        ('Unable to run job: unknown resource "nope"\nExiting.\n', "to list them: qconf -sc"),
        ('Unable to run job: attribute "h_rt" is not a time value\nExiting.\n', "for example -l h_rt=10:00:00"),
        ('Unable to run job: Job was rejected because job requests unknown queue "nope"\nExiting.\n', "qconf -sql"),
        ("Unable to run job: error: no suitable queues\nExiting.\n", "no queue can ever run it: ask for fewer slots"),
        ('Unable to run job: "job" rejected: pe range must be greater than zero\nExiting.\n', "--slots must be at least 1"),
        ("Unable to run job: Error reading answer list from qmaster\nExiting.\n", "a name has forbidden characters"),
        (
            "error: commlib error: got select error (Connection refused)\nUnable to run job: unable to send message to qmaster "
            'using port 1 on host "head": got send error\nExiting.\n',
            "server does not answer; is it up?",
        ),
        ("something new\n", "qsub refuses the job: something new"),
        ("", "qsub refuses the job: it printed no reason"),
    ],
)
def test_a_refusal_is_one_line_with_what_to_type(words: str, line: str) -> None:
    said = refused(words)
    assert line in said
    assert "\n" not in said


def test_inside_a_job_nothing_is_queued_and_on_a_submit_host_it_is() -> None:
    for env, nodes in ((SGE_SCRIPT, 2), (SGE_ONE_HOST, 1), (SGE_SERIAL, 1), (SGE_ARRAY, 1)):
        assert sge.attached(env)
        assert sge.allocated(env) == nodes
    assert sge.allocated(SGE_TASK) is None
    for env in ({}, {"SGE_ROOT": "/opt/sge", "SGE_CELL": "default"}, {"SGE_ROOT": "/opt/sge", "JOB_ID": "7"}):
        assert not sge.attached(env)
        assert sge.allocated(env) is None


# --- the hosts of a job


@pytest.mark.parametrize(
    ("text", "here", "names"),
    [
        ("node2 2 main.q@node2 UNDEFINED\nnode1 1 main.q@node1 UNDEFINED\n", "node2", [("node2", 2), ("node1", 1)]),
        ("a 1 q@a U\nb 2 q@b U\nc 3 q@c U\n", "b", [("b", 2), ("a", 1), ("c", 3)]),
        ("a.x.org 1 q U\nB.x.org 2 q U\n", "b", [("B.x.org", 2), ("a.x.org", 1)]),
        ("a 1 q U\nb 2 q U\n", "b.x.org", [("b", 2), ("a", 1)]),
        ("b.y.org 1 q U\nb.x.org 2 q U\n", "b.x.org", [("b.x.org", 2), ("b.y.org", 1)]),
        ("a 1 q1@a U\nb 2 q1@b U\na 3 q2@a U\n", "a", [("a", 4), ("b", 2)]),
    ],
    ids=["seen", "not the first", "with domain", "here with domain", "two domains", "two queues"],
)
def test_this_host_is_the_first_and_the_others_keep_their_order(
    tmp_path: Path, text: str, here: str, names: list[tuple[str, int]]
) -> None:
    (tmp_path / "pe").write_text(text)
    env = {"PE_HOSTFILE": str(tmp_path / "pe"), "HOSTNAME": here}
    assert sge.hosts(plan(), env) == tuple(Host(name, slots) for name, slots in names)


def test_a_job_without_a_parallel_environment_has_one_host_of_one_slot() -> None:
    assert sge.hosts(plan(), {"HOSTNAME": "node1"}) == (Host("node1", 1),)
    assert sge.hosts(plan(), {}) == (Host(socket.gethostname(), 1),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a 1 q U\nb 2 q U\n", r"names a, b, and this is here; start rankwise in the job's script"),
        ("here.x 1 q U\nhere.y 2 q U\n", r"names here.x, here.y, and this is here"),  # which one is this?
        ("", "names no host, and this is here"),
        ("a one q U\n", "'a one q U' is not `host slots queue processors`"),
    ],
)
def test_a_host_list_that_cannot_be_this_jobs_is_an_error_that_shows_it(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "pe").write_text(text)
    with pytest.raises(WorldError, match=said):
        sge.hosts(plan(), {"PE_HOSTFILE": str(tmp_path / "pe"), "HOSTNAME": "here"})


def test_a_host_list_that_is_on_another_host_is_an_error_that_says_where() -> None:
    with pytest.raises(WorldError, match=r"^PE_HOSTFILE=/nosuch: No such file or directory; it exists only on the first host"):
        sge.hosts(plan(), {"PE_HOSTFILE": "/nosuch"})


def test_two_shells_read_what_qrsh_is_given_and_each_word_stays_as_it_is() -> None:
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:])", HOSTILE, "*", "\\", "a\nb"]
    words = sge.reach("node1", command)
    assert words[:3] == ["qrsh", "-inherit", "node1"]
    # Like qrsh: the words joined with blanks, read by a shell on the host.
    done = subprocess.run(["/bin/sh", "-c", " ".join(words[3:])], capture_output=True, text=True, check=True)
    assert done.stdout == f"{[HOSTILE, '*', chr(92), 'a' + chr(10) + 'b']}\n"


def test_a_task_that_dies_by_a_signal_ends_with_a_status_for_grid_engine_would_kill_the_whole_job() -> None:
    words = sge.reach("node1", ["/bin/sh", "-c", "kill -KILL $$"])
    assert subprocess.run(["/bin/sh", "-c", " ".join(words[3:])], stderr=subprocess.DEVNULL).returncode == 128 + 9


def test_what_qrsh_says_at_the_end_becomes_one_line_with_what_to_type() -> None:
    words = "error: executing task of job 25 failed: failed sending task to execd@node9: can't resolve host name\n"
    line = sge.refusal("node9", words)
    assert line is not None
    assert line.startswith("qrsh cannot start a task on node9: failed sending task to execd@node9: can't resolve host name; ")
    assert sge.refusal("node9", "error: of the command's own\n") is None


# --- how it ended: a qstat and a qacct that print what the real ones did

LISTED = """<?xml version='1.0'?>
<job_info  xmlns:xsd="http://arc.liv.ac.uk/repos/darcs/sge/source/dist/util/resources/schemas/qstat/qstat.xsd">
  <queue_info>{running}</queue_info><job_info>{pending}</job_info>
</job_info>"""
ENTRY = "<job_list><JB_job_number>{}</JB_job_number><JB_name>7</JB_name><state>{}</state></job_list>"
REASON = (
    'error reason          1:      11/21/2026 16:42:07 [0:284]: error: can\'t open output file "/x/nologs/x": No such file or '
    "directory\nscheduling info:            Job is in error state\n"
)
RECORD = "=====\nqname        main.q              \njobnumber    7                   \nfailed       {}\nexit_status  {}\n"


@pytest.fixture
def grid_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts commands on PATH that print a text and exit with a status."""
    commands = tmp_path / "bin"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:/usr/bin:/bin")
    for name in ("qsub", "qstat", "qacct", "qdel"):  # not those of this machine
        (commands / name).write_text("#!/bin/sh\nexit 3\n")
        (commands / name).chmod(0o755)

    def put(name: str, text: str, status: int = 0) -> None:
        (commands / f"{name}.out").write_text(text)
        (commands / name).write_text(f'#!/bin/sh\necho "$PWD" "$@" >{commands}/{name}.asked\ncat "$0.out"\nexit {status}\n')

    return put


@pytest.mark.parametrize(
    ("states", "phase", "reason"),
    [
        (["r"], "running", "running (r)"),
        (["t"], "running", "starting (t)"),
        (["dr"], "running", "being deleted (dr)"),
        (["Rr"], "running", "running (Rr)"),
        (["S"], "running", "suspended (S)"),
        (["qw"], "waiting", "waiting (qw)"),
        (["hqw"], "waiting", "held (hqw)"),
        (["Rq"], "waiting", "waiting (Rq)"),
        (["qw", "r"], "running", "running (r)"),
        (["Eqw", "qw"], "waiting", "waiting (qw)"),
    ],
)
def test_a_job_in_the_queue_waits_or_runs(grid_engine: Callable[..., None], states: list[str], phase: str, reason: str) -> None:
    entries = "".join(ENTRY.format(7, letters) for letters in states)
    grid_engine("qstat", LISTED.format(running=ENTRY.format(77, "Eqw"), pending=entries))
    assert sge.state({"id": "7"}) == State(phase, reason)


def test_a_job_that_will_never_start_says_why_and_what_to_type(grid_engine: Callable[..., None]) -> None:
    grid_engine("qstat", LISTED.format(running="", pending=ENTRY.format(7, "Eqw")))
    assert sge.state({"id": "7"}).reason.startswith("Eqw: it will never start: qstat -j does not say why")
    assert _error_reason(REASON) == 'can\'t open output file "/x/nologs/x": No such file or directory'


@pytest.mark.parametrize(
    ("records", "state"),
    [
        ([("0", "4")], State("ended", "ended", 4)),
        (
            [("0", "137                  (Killed)"), ("0", "0")],
            State("ended", "ended", 0),
        ),  # of a qrsh task, then of the job itself
        (
            [("37  : qmaster enforced h_rt, h_cpu, or h_vmem limit", "137   (Killed)")],
            State("ended", "qmaster enforced h_rt, h_cpu, or h_vmem limit", 137),
        ),
    ],
)
def test_a_job_that_is_over_has_the_status_of_its_last_record(
    grid_engine: Callable[..., None], records: list[tuple[str, str]], state: State
) -> None:
    grid_engine("qstat", LISTED.format(running="", pending=""))
    grid_engine("qacct", "".join(RECORD.format(*record) for record in records))
    assert sge.state({"id": "7"}) == state


def test_a_job_that_nobody_knows_any_more_is_unknown_and_that_raises_nothing(
    grid_engine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sge.state({"id": "7"}).phase == "unknown"  # if qstat prints nothing, its server is down
    grid_engine("qstat", LISTED.format(running="", pending=""))
    grid_engine("qacct", "", 1)
    assert sge.state({"id": "7"}) == State("unknown", "it is in no queue, and qacct has no record of it")
    monkeypatch.setenv("PATH", "/nosuch")
    assert "source $SGE_ROOT/default/common/settings.sh" in sge.state({"id": "7"}).reason


def test_a_job_is_submitted_from_its_own_folder_where_a_folder_for_its_output_is(
    grid_engine: Callable[..., None], tmp_path: Path
) -> None:
    grid_engine("qsub", "26.2-6:2\n")
    run = tmp_path / HOSTILE.replace("/", "")
    run.mkdir()
    assert sge.submit(str(run / "job.sh"), {}) == "26"
    assert (run / "logs").is_dir()
    assert (tmp_path / "bin" / "qsub.asked").read_text() == f"{run} -terse job.sh\n"


def test_a_submission_that_is_refused_is_an_error(grid_engine: Callable[..., None], tmp_path: Path) -> None:
    grid_engine("qsub", 'Unable to run job: unknown resource "nope"\nExiting.\n', 1)
    with pytest.raises(ConfigError, match=r'^qsub refuses the job: unknown resource "nope"; to list them: qconf -sc$'):
        sge.submit(str(tmp_path / "job.sh"), {})


def test_to_cancel_a_job_that_is_over_is_no_error_and_one_of_somebody_else_is(grid_engine: Callable[..., None]) -> None:
    grid_engine("qdel", 'denied: job "7" does not exist\n', 1)
    sge.cancel({"id": "7"})
    grid_engine("qdel", "you - you do not have the necessary privileges to delete the job 7\n", 1)
    with pytest.raises(ConfigError, match=r"^qdel 7: you - you do not have the necessary privileges"):
        sge.cancel({"id": "7"})
