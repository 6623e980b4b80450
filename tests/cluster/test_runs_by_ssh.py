"""`rankwise run -H` over hosts in network namespaces: the ranks' numbers, all ways to end, and what is left."""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from cluster_runs import (
    FOR_EVER,
    GATE,
    LISTENS,
    LONG_STEPS,
    RUN,
    SUM,
    TELL,
    TORCH,
    TRAIN,
    Launched,
    has_started_again,
    launch,
    left,
    on,
    steps,
    told,
    with_configuration,
    write,
)
from clusters import HOSTS, PYTHON, STATE, Start, debian_hosts, hosts
from launched import wait_for

__all__ = ["debian_hosts", "hosts", "launch"]  # fixtures

pytestmark = pytest.mark.cluster

New = Callable[..., Launched]
TWO_NAMES = ("node1", "node2")
TWO = ("-H", "node1:2,node2:1")


def test_the_store_of_a_run_listens_at_the_one_address_by_which_the_other_hosts_come(hosts: Start, launch: New) -> None:
    run = launch(*TORCH, *TWO, "--tee", "all", write(LISTENS))
    status, out = run.wait()
    assert status == 0, out
    assert sorted(line for line in out.splitlines() if line.startswith("[rank")) == [
        "[rank 0] 0 10.88.0.1", "[rank 1] 1", "[rank 2] 2",
    ]  # fmt: skip


@pytest.mark.parametrize("at", ["head", "node1"])
def test_ranks_know_their_numbers_and_reduce_over_the_hosts(hosts: Start, launch: New, at: str) -> None:
    """From a machine that has no rank, and from one of the hosts."""
    words = [*TORCH, *TWO, "--tee", "all", write(TELL + SUM)]
    if at != "head":
        Path("hosts.txt").write_text("node1 slots=2  # this one\nnode2:1\n")
        words = on(at, *TORCH, "--hostfile", "hosts.txt", "--tee", "all", "train.py")
    run = launch(*words)
    status, out = run.wait()
    assert status == 0, out
    assert told() == {
        0: ["node1", "0", "3", "0", "2", "0", "2"],
        1: ["node1", "1", "3", "1", "2", "0", "2"],
        2: ["node2", "2", "3", "0", "1", "1", "2"],
    }
    assert [Path(f"sum-{rank}").read_text() for rank in range(3)] == ["6", "6", "6"]
    assert sorted(line for line in out.splitlines() if line.startswith("[rank")) == [f"[rank {r}] rank {r}" for r in range(3)]
    assert [(part.host, part.first, part.ranks) for part in run.attempt().parts] == [("node1", 0, 2), ("node2", 2, 1)]


def test_a_rank_that_fails_on_another_host_is_named_with_its_traceback(hosts: Start, launch: New) -> None:
    source = "import os\nif os.environ['RANK'] == '2':\n    raise KeyError('lost')\n" + FOR_EVER
    status, out = launch(*RUN, *TWO, write(source)).wait()
    assert status == 1
    assert out.splitlines()[-2:] == [
        "rankwise: rank 2 raised KeyError: 'lost' (train.py:3), on node2",
        "rankwise: its output is in runs/train/logs/rank-2.log; exit status 1",
    ]
    assert out.count("    raise KeyError('lost')") == 1


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_stops_all_ranks_of_all_hosts_after_one_step(hosts: Start, launch: New, signum: int) -> None:
    run = launch(*RUN, *TWO, write(GATE))
    run.at_the_gate()
    run.signal(signum)
    status, out = run.wait()
    assert status == (130 if signum == signal.SIGINT else 75), out
    last = {Path(f"stopped-{rank}").read_text() for rank in range(3)}
    assert len(last) == 1
    assert f"rankwise: stopped by {signal.Signals(signum).name} after step {last.pop()}; to resume, type: " in out


@pytest.mark.parametrize("step_s", ["1", pytest.param("5", marks=pytest.mark.stress(dose="whole"))])
def test_a_failed_run_starts_again_though_others_are_in_a_long_step(hosts: Start, launch: New, step_s: str) -> None:
    has_started_again(launch(*RUN, *TWO, "--max-restarts", "1", write(LONG_STEPS), step_s))


def test_a_launcher_that_is_killed_leaves_nothing_on_any_host(hosts: Start, launch: New) -> None:
    run = launch(*RUN, *TWO, write(TELL + FOR_EVER))
    run.until(lambda: len(told()) == 3, "the ranks")
    run.signal(signal.SIGKILL)
    began = time.monotonic()
    run.process.wait()
    wait_for(lambda: not left(), "nothing left")
    assert time.monotonic() < began + 5


def power_cut(host: str) -> None:
    subprocess.run([HOSTS / "host-ctl", "kill", host], check=True)


def power_back() -> None:
    subprocess.run([HOSTS / "hosts-up", "2"], check=True, capture_output=True)


def test_a_host_that_loses_its_power_is_named_and_a_run_ends_or_goes_on_without_it(hosts: Start, launch: New) -> None:
    """Two runs at once. One needs both hosts. The other also has this machine, and resumes from its checkpoint without the host
    that had rank 0."""
    needs_both = launch(*RUN, *TWO, "--name", "both", write(TELL + FOR_EVER), name="both")
    options = ["--nproc", "1", "--nodes", "2:3", "--max-restarts", "1", "--node-wait", "8", "--name", "rest"]
    goes_on = launch(*TORCH, "-H", "node1,node2,head", *options, write(TRAIN, "goes_on.py"), "20000", name="rest")
    needs_both.until(lambda: len(told()) == 3, "the ranks")
    goes_on.until(lambda: goes_on.run.saved() and len(steps()) > 5, "a checkpoint")
    began = time.monotonic()
    try:
        power_cut("node1")
        status, out = needs_both.wait()
        assert time.monotonic() < began + 22
        assert status == 1
        assert "rankwise: node 0, node1, was lost: no message came from it for 15 s" in out
        assert "rankwise: rank 0 was lost with its node: no message came from it for 15 s, on node1" in out.splitlines()
        before = len(steps())
        goes_on.until(lambda: len(steps()) > before, "new steps")
        goes_on.signal(signal.SIGINT)
        status, out = goes_on.wait()
    finally:
        power_back()
    assert status == 130, out
    attempts = [[part.host for part in attempt.parts] for attempt in goes_on.run.attempts()]
    assert attempts == [["node1", "node2", platform.node()], ["node2", platform.node()]]
    first, again = steps()[:before], steps()[before:]
    assert 1 < again[0] <= first[-1]
    assert again == list(range(again[0], again[-1] + 1))


def test_what_a_host_lacks_is_one_line_and_nothing_runs(hosts: Start, launch: New, monkeypatch: pytest.MonkeyPatch) -> None:
    write(TELL)
    subprocess.run(on("node1", PYTHON, "-m", "venv", "--without-pip", "--clear", "/run/scratch/venv"), check=True)
    own = on("node1", "env", f"PYTHONPATH={':'.join(filter(None, sys.path))}", "/run/scratch/venv/bin/python", *RUN[1:])
    cases = [
        ([*RUN, "-H", "node1,nosuch"], "node 1 (nosuch) did not start: there is no host nosuch ("),
        (
            [*RUN, "-H", "node1,10.88.0.77"],
            "node 1 (10.88.0.77) did not start: 10.88.0.77 cannot be reached (No route to host)",
        ),
        ([*own, "-H", "node1,node2"], "node 1 (node2) did not start: "),
    ]
    for words, line in cases:
        status, out = launch(*words, "train.py").wait()
        assert status == 1
        assert line in out.splitlines()[-1]
        assert out.count("\n") == 2  # what was started, and this process
    known = f"  UserKnownHostsFile {STATE}/ssh/known_hosts\n"
    with_configuration(monkeypatch, f"Host node2\n{known}  PubkeyAuthentication no\nHost node1\n{known}")
    status, out = launch(*RUN, "-H", "node1,node2", "train.py").wait()
    assert status == 1
    assert out.splitlines()[1:] == [
        "rankwise: node 1 (node2) did not start: node2 refuses the login: none of your keys is accepted there; "
        "type: ssh-copy-id node2"
    ]
    assert not told()


def test_each_host_may_have_a_folder_of_its_own_if_the_script_is_in_it(hosts: Start, launch: New) -> None:
    source = "import os, sys\nprint('rank', os.environ['RANK'])\nsys.exit(3 * (os.environ['RANK'] == '1'))\n"
    script = str(Path(write(source)).absolute())
    words = ["sh", "-c", 'cd /run/scratch/here && exec "$@"', "sh", *RUN, "-H", "node1:1,node2:1", "train.py"]
    subprocess.run(on("node1", "sh", "-c", "mkdir -p /run/scratch/here && cp $0 /run/scratch/here", script), check=True)
    status, out = launch(*on("node1", *words)).wait()
    assert status == 1
    assert out.splitlines()[1:] == [
        "rankwise: node 1 (node2) did not start: node2 has no /run/scratch/here (no such file or directory), the folder of "
        "the script: every host needs it at the same path, on a shared file system or as a copy"
    ]
    subprocess.run(on("node2", "sh", "-c", "mkdir -p /run/scratch/here && cp $0 /run/scratch/here", script), check=True)
    status, out = launch(*on("node1", *words)).wait()
    assert status == 3, out
    folder = "/run/scratch/here/runs/train"
    assert f"rankwise: node2: this host does not see {folder}: the logs of its ranks are here, in {folder}" in out.splitlines()
    assert out.splitlines()[-2:] == [
        "rankwise: rank 1 exited with status 3, on node2",
        f"rankwise: its output is in {folder}/logs/rank-1.log on node2; exit status 3",
    ]
    there = subprocess.run(on("node2", "cat", f"{folder}/logs/rank-1.log"), capture_output=True, text=True)
    assert there.stdout == "rank 1\n"


def test_hosts_with_disks_of_their_own_keep_checkpoints_each_and_give_one_that_lost_its_disk_what_it_lacks(
    hosts: Start, launch: New
) -> None:
    """The first host is reinstalled: its part of the run is lost, its world.json and its checkpoints."""
    words = [*TORCH, "-H", "node1:1,node2:1", "--run-dir", "/run/scratch/run", "--checkpoint-scope", "node", write(TRAIN)]
    run = launch(*on("node1", *words, "60"))
    wait_for(lambda: len(steps()) > 5, "some steps")
    below = psutil.Process(run.process.pid).children(recursive=True)  # the host itself sees other processes
    next(process for process in below if process.cmdline()[1:4] == ["-m", "rankwise", "run"]).send_signal(signal.SIGINT)
    status, out = run.wait()
    assert status == 130, out
    stopped = steps()[-1]
    shown = "ls", "/run/scratch/run/checkpoints"
    saved = [subprocess.run(on(host, *shown), capture_output=True, text=True) for host in TWO_NAMES]
    assert [done.stdout.split()[-1] for done in saved] == [f"step-{stopped:08d}"] * 2
    subprocess.run(on("node1", "rm", "-r", "/run/scratch/run"), check=True)
    status, out = launch(*on("node1", *words, "60")).wait()
    assert status == 0, out
    assert f"copying step-{stopped:08d} (" in out
    assert "from node2 to 1 node without it" in out
    assert steps() == list(range(1, 61))
    # --fresh applies on every host.
    Path("steps").write_text("")
    status, out = launch(*on("node1", *words[:-1], "--fresh", words[-1], "20")).wait()
    assert status == 0, out
    assert steps() == list(range(1, 21))
    assert "copying step-" not in out


def test_hosts_whose_own_name_is_a_loopback_address_meet_by_another(debian_hosts: Start, launch: New) -> None:
    """Typed on the second host, which does not have rank 0."""
    status, out = launch(*on("node2", *TORCH, "-H", "node1:1,node2:2", write(TELL + SUM))).wait()
    assert status == 0, out
    assert [Path(f"sum-{rank}").read_text() for rank in range(3)] == ["6", "6", "6"]
    assert [numbers[0] for numbers in told().values()] == ["node1", "node2", "node2"]


def test_a_first_host_whose_name_is_the_address_of_a_network_of_its_own_is_met_by_the_one_that_all_reach(
    hosts: Start, launch: New
) -> None:
    """Two interfaces. The one that the host's own name leads to (a management network, a bridge for containers) reaches only
    the host itself."""
    names = Path(STATE, "node1", "hosts")
    before = names.read_text()
    network = "ip link add own0 type bridge && ip addr add 10.99.0.1/24 dev own0 && ip link set own0 up"
    subprocess.run(on("node1", "sh", "-c", network), check=True)
    try:
        names.write_text(before.replace("10.88.0.1 ", "10.99.0.1 ").replace("10.88.0.1\t", "10.99.0.1\t"))
        resolved = subprocess.run(on("node1", "getent", "hosts", "node1"), capture_output=True, text=True)
        assert resolved.stdout.startswith("10.99.0.1 ")
        status, out = launch(*TORCH, "-H", "node1:1,node2:2", write(TELL + SUM)).wait()
        assert status == 0, out
        assert [Path(f"sum-{rank}").read_text() for rank in range(3)] == ["6", "6", "6"]
    finally:
        names.write_text(before)
        subprocess.run(on("node1", "ip", "link", "del", "own0"), check=True)


@pytest.mark.parametrize("families", ["both", "IPv6 alone"])
def test_hosts_named_by_their_ipv6_addresses_meet(
    debian_hosts: Start, launch: New, monkeypatch: pytest.MonkeyPatch, families: str
) -> None:
    key = " ".join(Path(f"{STATE}/ssh/host.pub").read_text().split()[:2])
    Path("known").write_text(f"fd88::1 {key}\nfd88::2 {key}\n")
    with_configuration(monkeypatch, f"Host fd88::*\n  UserKnownHostsFile {Path('known').absolute()}\n")
    source = TELL + "open(f'way-{os.environ[\"RANK\"]}', 'w').write(os.environ['MASTER_ADDR'])\n" + SUM
    without = [] if families == "both" else [("node1", "10.88.0.1/24"), ("node2", "10.88.0.2/24")]
    try:
        for host, address in without:
            subprocess.run(on(host, "ip", "address", "del", address, "dev", "eth0"), check=True)
        status, out = launch(*TORCH, "-H", "[fd88::1]:2,[fd88::2]:1", write(source)).wait()
    finally:
        for host, address in without:
            subprocess.run(on(host, "ip", "address", "replace", address, "dev", "eth0"), check=True)
            subprocess.run(on(host, "ip", "route", "replace", "default", "via", "10.88.0.254"), check=True)
    assert status == 0, out
    assert [numbers[0] for numbers in told().values()] == ["node1", "node1", "node2"]
    assert [Path(f"sum-{rank}").read_text() for rank in range(3)] == ["6", "6", "6"]
    assert not without or Path("way-2").read_text() == "fd88::1"
