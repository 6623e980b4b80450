"""A run on several nodes: what its ranks get, how it ends, what happens if a node is lost or refused."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import pytest
from agents import Agents, agents
from cluster_runs import LONG_STEPS
from environments import SLURM_AGENTS, SLURM_STEP, openmpi
from launched import wait_for

from rankwise.ipc.shared_page import Page
from rankwise.run.plan import Host

__all__ = ["agents"]  # a fixture

New = Callable[[], Agents]
A, B, C = Host("a", 2), Host("b", 1), Host("c", 1)

TELL = """
import json, os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
print(json.dumps({name: os.environ[name] for name in names}), flush=True)
"""

WAIT = (
    TELL
    + """
import time
time.sleep(60)
"""
)

GATE = """
import os, sys, time
from rankwise.dist.world import agent_row, discover
world = discover(os.environ)
row, step = agent_row(world), 0
row.join()
while row.pass_gate(step + 1):
    step += 1
    time.sleep(0.001 * (1 + world.rank))
print(step, flush=True)
sys.exit(75)
"""


def told(run: Agents, rank: int) -> dict[str, str]:
    found: dict[str, str] = json.loads(run.log(rank).splitlines()[-1])
    return found


def test_ranks_are_counted_over_the_hosts_in_their_order(agents: New) -> None:
    run = agents().start(TELL, A, B, C)
    assert run.wait() == (0, "")
    world = [told(run, rank) for rank in range(4)]
    assert [w["RANK"] for w in world] == ["0", "1", "2", "3"]
    assert {w["WORLD_SIZE"] for w in world} == {"4"}
    assert {(w["MASTER_ADDR"], w["MASTER_PORT"]) for w in world} == {("127.0.0.1", world[0]["MASTER_PORT"])}
    # Actually one machine: its local ranks are those of all its agents.
    assert [(w["LOCAL_RANK"], w["LOCAL_WORLD_SIZE"]) for w in world] == [(str(n), "4") for n in range(4)]
    attempt = run.run.attempts()[-1]
    assert (attempt.ranks, len(attempt.pids), [part.first for part in attempt.parts]) == (4, 4, [0, 2, 3])
    assert (attempt.status, attempt.outcome.split(";")[0]) == (0, "all ranks exited with status 0")


def test_a_file_that_the_other_host_has_in_its_first_folder_is_not_imported_by_its_agent(agents: New) -> None:
    run = agents()
    (run.folder / "secrets.py").write_text("raise ImportError('imported')")
    assert run.start("print('trained')", A, B).wait() == (0, "")


def test_what_the_agents_own_scheduler_says_of_a_rank_is_what_rank_says(agents: New, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM_AGENTS[0], "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    source = (
        "import os\nfrom rankwise.dist.world import explain\nprint(sorted(n for n in os.environ if n.startswith('OMPI')))\n"
    )
    source += (
        "print(*(os.environ[n] for n in ('SLURM_PROCID', 'SLURM_NTASKS', 'SLURM_LOCALID', 'SLURM_STEP_TASKS_PER_NODE')))\n"
    )
    source += "print([found.why for found in explain(os.environ).not_taken if found.scheduler == 'slurm'])\n"
    run = agents().start(source, A, B)
    assert run.wait() == (0, "")
    for rank in range(3):
        why = f"torchrun comes first; without it, this would be rank {rank} of 3"
        assert run.log(rank).splitlines() == ["[]", f"{rank} 3 {rank} 3", str([why])]


def test_a_script_that_takes_its_local_rank_for_the_index_of_the_one_gpu_it_sees_is_told_so(
    agents: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks with one device each on a host. Each sees the device that the scheduler gave it, because a device cgroup may
    allow no other."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    source = """
import os
print(os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
index = int(os.environ["LOCAL_RANK"])
if index >= len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")):
    raise RuntimeError("CUDA error: invalid device ordinal")  # as torch says it
"""
    run = agents().start(source, B, C)
    assert run.wait()[0] == 1
    assert [run.log(rank).splitlines()[0] for rank in range(2)] == ["0 2 2", "1 2 2"]
    assert run.failure().summary.startswith(
        "rank 1 raised RuntimeError: CUDA error: invalid device ordinal (script.py:6); this rank sees 1 GPU "
        "(CUDA_VISIBLE_DEVICES=2), so the index is 0 whatever LOCAL_RANK is (here 1); use rankwise.local_device(world)"
    )


def test_a_task_that_is_the_rank_keeps_all_that_its_launcher_has_told_it(agents: New, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SLURM_STEP[0], **openmpi(0, 2, 0, 1)}.items():  # two agents, both of which are numbered as the first
        monkeypatch.setenv(name, value)
    names = ("SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
    source = f"import os\nprint(*(os.environ.get(name) for name in {names}))\n"
    run = agents().start(source, B, C)
    assert run.wait() == (0, "")
    assert [run.log(rank) for rank in range(2)] == ["0 2 0 0\n", "1 2 None None\n"]


def test_agents_that_would_each_take_all_devices_of_one_host_are_one_error(agents: New) -> None:
    run = agents().start(TELL, Host("a", 0), Host("b", 0))
    status, said = run.wait()
    assert status == 1
    assert len(said.splitlines()) == 1
    assert " has 2 of the 2 agents of this run, and each would use all devices of the host; use --nproc 1" in said
    assert not run.log(0)


def test_a_rank_that_fails_elsewhere_is_the_cause_and_ends_all(agents: New) -> None:
    source = WAIT.replace("time.sleep(60)", "time.sleep(60 if os.environ['RANK'] != '2' else 0.1)\nraise KeyError(7)")
    run = agents().start(source, A, B)
    status, _ = run.wait()
    assert status == 1
    failure = run.failure()
    assert (failure.rank, failure.summary) == (2, "rank 2 raised KeyError: 7 (script.py:8)")
    assert "KeyError: 7" in (failure.traceback or "")


@pytest.mark.parametrize("tee", ["main", "all"])
@pytest.mark.one_in(2)
def test_what_ranks_print_elsewhere_is_shown_here_whole(agents: New, tee: str) -> None:
    source = "for i in range(50000):\n    print(i, 'x' * 80)\n"
    status, out = agents().start(source, A, B, tee=tee).wait()
    assert status == 0
    lines = out.splitlines()
    prefixes = ["[rank 0] ", "[rank 1] ", "[rank 2] "] if tee == "all" else [""]
    for prefix in prefixes:
        own = [line for line in lines if line.startswith(prefix)]
        assert [line.removeprefix(prefix).split()[0] for line in own] == [str(i) for i in range(50000)]


def test_all_nodes_stop_after_the_same_step(agents: New) -> None:
    run = agents().start(GATE, A, B, C)
    run.pids()
    wait_for(lambda: _has_joined(run), "the gate")
    run.signal(signal.SIGTERM)
    status, out = run.wait()
    assert status == 75
    steps = {run.log(rank).strip() for rank in range(4)}
    assert len(steps) == 1
    assert run.run.attempts()[-1].outcome == f"stopped by SIGTERM after step {steps.pop()}"
    assert out.count("SIGTERM: all ranks stop after the current step") == 1


ALARMS = """
import os, time
from rankwise.dist.world import agent_row, discover
world = discover(os.environ)
row, step, heard = agent_row(world), 0, []
def set_alarm(which):
    if world.rank == 0:
        row.set_alarm(time.monotonic_ns() + 10**8, 1)
def on_alarm(which):
    heard.append((step, which))
    set_alarm(which)
row.on_alarm = on_alarm
set_alarm(1)
row.join()
time.sleep(float(os.environ["BEHIND_S"]) if world.rank else 0)
while row.pass_gate(step + 1):
    step += 1
    if world.rank == 2 and len(heard) >= 3:  # a rank that was not scheduled for a while may hear two at one gate
        row.ask()
    time.sleep(0.002)
row.finish()
print(heard, step, row.by_script, flush=True)
"""


@pytest.mark.parametrize("behind_s", [0.0, 0.5])
@pytest.mark.one_in(2)
def test_an_alarm_and_a_scripts_wish_to_stop_reach_all_nodes_after_the_same_step(
    agents: New, behind_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where rank 0 is so far ahead that its next alarm is due before the others have heard the last one."""
    monkeypatch.setenv("BEHIND_S", str(behind_s))
    run = agents().start(ALARMS, A, B, C)
    assert run.wait()[0] == 0
    [heard] = {run.log(rank).strip() for rank in range(4)}
    assert heard.count("(") >= 4  # three by time, and one for the stop
    assert heard.endswith(" True")


def test_all_ranks_of_all_nodes_start_again_though_others_are_in_a_long_step(agents: New) -> None:
    run = agents().start(LONG_STEPS.replace("float(sys.argv[1])", "1.0"), A, B, max_restarts=1)
    status, out = run.wait()
    assert (status, [attempt.status for attempt in run.run.attempts()]) == (0, [137, 0]), out


def test_a_ctrl_c_that_every_process_of_the_run_is_sent_is_one_request(agents: New) -> None:
    """Hydra does this: it sends the signal to each agent, to its guard, which forwards it, and to the ranks."""
    source = GATE.replace("row.join()", "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nrow.join()")
    run = agents().start(source.replace("sys.exit(75)", "sys.exit(130)"), A, B, C)
    run.pids()
    wait_for(lambda: _has_joined(run), "the gate")
    assert run.process is not None
    os.killpg(run.process.pid, signal.SIGINT)
    status, out = run.wait()
    assert status == 130, out
    steps = {run.log(rank).strip() for rank in range(4)}
    assert len(steps) == 1
    assert run.run.attempts()[-1].outcome == f"stopped by SIGINT after step {steps.pop()}"
    assert "killing" not in out


def test_a_stop_is_heeded_and_recorded_while_nobody_reads_what_the_run_prints(agents: New) -> None:
    """Three times what a pipe holds, as with `| less`: the agent's writes wait, the agent does not."""
    lines = [f"line {number}" for number in range(20000)]
    source = GATE.replace(
        "row.join()", "if world.rank == 0:\n    print(*map('line {}'.format, range(20000)), sep='\\n', flush=True)\nrow.join()"
    )
    run = agents().start(source, A, B, tee="main")
    run.pids()
    wait_for(lambda: _has_joined(run), "the gate")
    run.signal(signal.SIGTERM)
    wait_for(lambda: run.run.attempts()[-1].outcome, "the record")
    assert not run.has_ended()
    status, out = run.wait()
    assert status == 75
    step = run.log(1).strip()
    assert run.run.attempts()[-1].outcome == f"stopped by SIGTERM after step {step}"
    shown = out.splitlines()
    assert [line for line in shown if line.startswith("line")] == lines
    assert "rankwise: SIGTERM: all ranks stop after the current step, and save, within 20 s" in shown


def test_a_run_that_is_over_and_whose_output_nobody_reads_ends_when_it_is_asked_to(agents: New) -> None:
    run = agents().start("print('line\\n' * 50000)\n", A, tee="main")
    wait_for(lambda: run.run.world.exists() and run.run.attempts()[-1].outcome, "the record")
    assert not run.has_ended()
    run.signal(signal.SIGTERM)
    wait_for(run.has_ended, "its end")
    assert run.wait()[0] == 0


def test_a_time_that_is_over_stops_all_nodes_after_the_same_step(agents: New) -> None:
    run = agents()
    for limit_s in (3.0, 10.0, 30.0, 90.0):  # the first that is over when all ranks have joined, on a machine of any load
        began = time.monotonic()
        run.start(GATE, A, B, stop_after_s=limit_s)
        wait_for(lambda: _has_joined(run) or run.has_ended(), "the gate")
        in_time = time.monotonic() < began + limit_s - 1
        status, out = run.wait()
        if in_time:
            break
    assert (status, len({run.run.log_tail(rank, 1000) for rank in range(3)})) == (75, 1)
    assert out.startswith(
        f"rankwise: the time limit of this run, {limit_s} s, is over\nrankwise: SIGTERM: all ranks stop after the current step"
    )


def test_a_signal_to_one_rank_elsewhere_stops_all(agents: New) -> None:

    source = GATE.replace(
        "row.join()", "row.join()\nimport signal\nsignal.signal(signal.SIGUSR1, lambda n, _: setattr(row, 'flag', n))"
    )
    run = agents().start(source, A, B)
    pids = run.pids()
    wait_for(lambda: _has_joined(run), "the gate")
    os.kill(pids[2], signal.SIGUSR1)
    assert run.wait()[0] == 75
    assert len({run.log(rank) for rank in range(3)}) == 1


def _has_joined(run: Agents) -> bool:
    try:
        return all(len(Page.open(part.page).joined()) == part.ranks for part in run.run.attempts()[-1].parts)
    except (OSError, IndexError):
        return False


def test_a_host_that_refuses_is_one_line_and_nothing_runs(agents: New) -> None:
    run = agents()
    run.refuse("b", "me@b: Permission denied (publickey).\n")
    status, out = run.start(TELL, A, B).wait()
    assert status == 1
    assert (
        out
        == "rankwise: node 1 (b) did not start: b refuses the login: none of your keys is accepted there; type: ssh-copy-id b\n"
    )
    assert not run.run.log(0).exists()
    assert run.run.attempts() == []


def test_a_host_without_our_python_is_told_in_its_own_words(agents: New) -> None:
    run = agents()
    run.refuse("b", "sh: 1: /opt/venv/bin/python: not found\n")
    assert run.start(TELL, A, B).wait() == (
        1, "rankwise: node 1 (b) did not start: sh: 1: /opt/venv/bin/python: not found\n",
    )  # fmt: skip


def test_a_node_that_is_lost_ends_the_run_and_is_named(agents: New) -> None:
    run = agents().start(WAIT, A, B)
    pids = run.pids()
    run.lose("b")
    status, out = run.wait()
    assert status == 1
    assert "rankwise: node 1, " in out
    assert "was lost: ssh to it exited" in out
    failure = run.failure()
    assert (failure.rank, failure.summary) == (2, "rank 2 was lost with its node: ssh to it exited")
    assert len(pids) == 3


def test_all_ranks_of_all_nodes_start_again_after_a_failure(agents: New) -> None:
    source = (
        TELL
        + "import sys\nsys.exit(3 if os.environ['RANK'] == '2' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    )
    run = agents().start(source, A, B, max_restarts=1)
    status, out = run.wait()
    assert (status, [attempt.status for attempt in run.run.attempts()]) == (0, [3, 0])
    assert out == "rankwise: rank 2 exited with status 3; restarting all ranks, 1 of 1\n"
    assert {told(run, rank)["TORCHELASTIC_RESTART_COUNT"] for rank in range(3)} == {"1"}


def test_a_lost_node_is_done_without_where_fewer_may_be(agents: New) -> None:
    source = WAIT.replace("time.sleep(60)", "time.sleep(60 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))")
    run = agents().start(source, A, B, C, min_nodes=2, max_restarts=1)
    run.pids()
    run.refuse("b", "ssh: connect to host b port 22: No route to host\n")
    run.lose("b")
    status, _ = run.wait()
    assert (status, [attempt.ranks for attempt in run.run.attempts()]) == (0, [4, 3])
    assert [told(run, rank)["WORLD_SIZE"] for rank in range(3)] == ["3", "3", "3"]


def test_a_lost_node_that_comes_back_takes_part_again(agents: New) -> None:
    source = WAIT.replace("time.sleep(60)", "time.sleep(60 * (os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'))")
    run = agents().start(source, A, B, min_nodes=1, max_restarts=1, node_wait_s=20.0)
    run.pids()
    run.lose("b")
    status, _ = run.wait()
    assert (status, [attempt.ranks for attempt in run.run.attempts()]) == (0, [3, 3])


def test_a_head_that_is_killed_leaves_nothing_on_any_node(agents: New) -> None:
    run = agents().start(WAIT, A, B)
    run.pids()
    run.signal(signal.SIGKILL)  # to its guard; the fixture checks that nothing is left
    assert run.wait()[0] == -signal.SIGKILL
