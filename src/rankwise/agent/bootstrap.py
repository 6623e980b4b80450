"""How an agent starts: as the head of a run, or as a member that finds the head.

status = begin(["runs/train"])
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rankwise import schedulers
from rankwise.agent.event_loop import EventLoop
from rankwise.agent.head import Head
from rankwise.agent.held_port import port_taken
from rankwise.agent.node import Node
from rankwise.agent.nodes import Nodes, introduced
from rankwise.agent.remote import RemoteNode, Wire
from rankwise.agent.screen import Screen
from rankwise.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, ConfigError
from rankwise.host import network, processes
from rankwise.host.patience import Patience
from rankwise.host.processes import STOP_SIGNALS
from rankwise.ipc.address_file import ways
from rankwise.ipc.channel import Door, Link, Message, NobodyThere, knock, read_door
from rankwise.run.directory import RunDir
from rankwise.run.plan import Host, Plan
from rankwise.schedulers import Foreground, Hosts, Jobs, Launcher
from rankwise.schedulers.job import AGENT

_SAY_EVERY_S = 10.0
_FIND_S = 300.0  # how long a member looks for the head; how long the head waits for members is in the plan
_POLL_S = 0.05
_SECRET_FILE = "rankwise.secret"

_OF_THE_HOST = (
    "HOME", "USER", "LOGNAME", "SHELL", "MAIL", "PWD", "OLDPWD", "SHLVL", "_", "HOSTNAME", "TMPDIR", "TMP", "TEMP", "TERM",
    "DISPLAY", "XAUTHORITY", "DBUS_SESSION_BUS_ADDRESS", "SSH_AUTH_SOCK", "SSH_AGENT_PID", "SSH_CONNECTION", "SSH_CLIENT",
    "SSH_TTY",
)  # fmt: skip
"""Variables that describe one host; they are not passed on to another (nor is XDG_*)."""


def begin(words: list[str]) -> int:
    """Run an agent; returns its exit status."""
    status = _begin(words)
    for signum in STOP_SIGNALS:  # srun may end all tasks because one has ended: this must not change our exit status
        signal.signal(signum, signal.SIG_IGN)
    return status


def _begin(words: list[str]) -> int:
    if words == ["-"]:
        return _guarded(_called)
    run = RunDir(Path(words[0]))
    if words[1:2] == ["--node"]:
        return _calling(None, run, int(words[2]), _start_of_this_job(os.environ), EventLoop(os.getppid()))
    plan = Plan.load(run.plan)
    _enter(plan)
    scheduler = schedulers.queue(plan.on)
    if scheduler is None:
        raise ConfigError(f"{platform.node()} has no scheduler {plan.on}: install the package that provides it there too")
    index = _index(plan, scheduler)
    below_another = plan.launcher_holds and not plan.launcher_pid  # mpirun, for example, is below `rankwise run`
    parent = os.getppid() if below_another else plan.launcher_pid

    def body(guard: int | None) -> int:
        events = EventLoop(parent, guard, scheduler.taken_as if below_another else None)
        if index == 0:
            return _head(plan, run, scheduler, events)
        return _calling(plan, run, index, _start(scheduler, os.environ), events)

    return body(None) if plan.launcher_pid else _guarded(body, apart=below_another)


def _enter(plan: Plan) -> None:
    """Change to the folder of the script. Raises ConfigError if this host lacks the folder, the Python or the script."""
    cure = "every host needs it at the same path, on a shared file system or as a copy"
    try:
        os.chdir(plan.cwd)
    except OSError as error:
        why = str(error.strerror).lower()
        raise ConfigError(f"{platform.node()} has no {plan.cwd} ({why}), the folder of the script: {cure}") from None
    if plan.interpreter and not Path(plan.interpreter[0]).exists() and shutil.which(plan.interpreter[0]) is None:
        raise ConfigError(f"{platform.node()} has no Python {plan.interpreter[0]}, which runs the script: {cure}")
    if plan.interpreter and plan.argv[0] != "-m" and not Path(plan.argv[0]).exists():
        raise ConfigError(f"{platform.node()} has no script {plan.argv[0]} in {plan.cwd}: {cure}")


def _index(plan: Plan, scheduler: Jobs) -> int:
    """The index of this node; node 0 runs the head."""
    if plan.node_rank >= 0:
        return plan.node_rank
    tasks = scheduler.tasks(os.environ) if plan.nodes > 1 and isinstance(scheduler, Launcher) else None
    return tasks.index if tasks is not None else 0


def _guarded(body: Callable[[int], int], apart: bool = False) -> int:
    """Run `body` in a child of this process. If the child is killed, this process kills the child's descendants: nothing else
    on this host would.

    `body` gets the reading end of a pipe. This process writes to it the number of each stop signal that it receives. `apart`:
    the child gets its own process group, because mpirun and srun signal the whole group: the ranks too.
    """
    processes.become_subreaper()
    guard = os.getpid()
    reader, writer = os.pipe()
    agent = os.fork()
    if agent == 0:
        processes.die_with_parent(guard)
        if apart:
            os.setpgid(0, 0)
        os.close(writer)
        return body(reader)
    os.close(reader)
    for signum in processes.stop_signals():
        signal.signal(signum, lambda number, _: _pass_on(writer, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    status = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
    processes.end_tree()
    # A status, never a signal: Grid Engine ends the whole job when a task dies of a signal.
    os._exit(status if status >= 0 else 128 - status)


def _pass_on(writer: int, signum: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the agent has exited
        os.write(writer, bytes([signum]))


# --- the head


def _head(plan: Plan, run: RunDir, scheduler: Jobs, events: EventLoop) -> int:
    processes.become_subreaper()
    lease = run.take() if not plan.launcher_holds else None
    screen = Screen(plain=not plan.terminal)
    secret = _secret_of_all(plan)
    door, node, nodes, status = None, None, None, 1
    try:
        attempts = len(run.attempts())
        hosts = dict(enumerate(scheduler.hosts(plan, os.environ))) if isinstance(scheduler, Hosts) else {}
        if hosts and not plan.hosts:  # the scheduler has chosen them
            plan = replace(plan, nodes=len(hosts), min_nodes=len(hosts) if plan.min_nodes == plan.nodes else plan.min_nodes)
        here = next((index for index, host in hosts.items() if network.is_here(host.name)), None)
        index = here if hosts else 0
        if plan.nodes > 1 and index == 0:
            door = _open_door(plan, secret)
            if not hosts and not plan.master_addr:
                door.publish(run.door, plan.run_id, _start(scheduler, os.environ))
        if index is not None:
            node = Node(plan, run, index, events, screen, hosts[index].slots if index in hosts else _slots(plan, index))
            node.secret = secret
            if door is not None:
                node.door = (tuple(door.addresses), door.port)
        elsewhere = {there: host for there, host in hosts.items() if there != here}
        command = [*AGENT, "-"]
        nodes = Nodes(
            plan,
            run,
            events,
            screen,
            node,
            door,
            elsewhere,
            scheduler if elsewhere and isinstance(scheduler, Hosts) else None,
            partial(_greeting_of, plan, secret),
            command,
        )
        status = Head(plan, run, events, screen, nodes).run()
    finally:
        if nodes is not None:
            nodes.leave(status)
        elif door is not None:
            door.close()
        if node is not None:
            node.close()
        if lease is not None:
            lease.release()
        screen.close(events)
    return _exit_status_for_queue(status, plan, run, scheduler, attempts)


def _greeting_of(plan: Plan, secret: str, there: int, host: Host) -> Message:
    """The head's first message to the agent of node `there`, which the head has started over ssh or qrsh."""
    record = {**plan.record(), "launcher_pid": 0, "tee": plan.tee}
    return {"plan": record, "node": there, "ranks": host.slots, "secret": secret, "environment": _to_pass_on(os.environ)}


def _exit_status_for_queue(status: int, plan: Plan, run: RunDir, scheduler: Jobs, attempts_before: int) -> int:
    """The exit status that the queue gets. A queue that will start the job again expects its own status. In other queues,
    a run that stopped and saved is not a failed job: how the run ended is in its record."""
    if status != EXIT_PREEMPTED or plan.launcher_holds or "within" in plan.job or isinstance(scheduler, Foreground):
        return status
    if plan.job.get("requeue"):
        return status if scheduler.requeue_status is None else scheduler.requeue_status
    newest = run.attempts()[attempts_before:][-1:]  # none if it was stopped while it waited for other nodes
    return 0 if newest and newest[0].outcome.startswith("stopped") else status


def _slots(plan: Plan, index: int) -> int:
    """The number of ranks on this host if the user has listed the hosts and something else has started the agents; 0 if not
    given."""
    here = [host for host in plan.hosts if network.is_here(host.name)] or list(plan.hosts[index : index + 1])
    return here[0].slots if here else 0


def _open_door(plan: Plan, secret: str) -> Door:
    port = plan.master_port if plan.master_addr else 0
    try:
        return Door(secret, port)
    except OSError as error:
        raise port_taken(port, error, manually=bool(plan.master_addr)) from None


def _secret_of_all(plan: Plan) -> str:
    """If each node is started manually: the secret that the user has put on all of them. If the user has put none, whoever
    reaches the port is trusted, as with torchrun. Otherwise: a random secret.
    """
    if not plan.master_addr:
        return secrets.token_hex(16)
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: this user has no home
        folder = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
        return Path(folder, _SECRET_FILE).read_text().strip()
    return ""


def _start(scheduler: Jobs | Launcher, env: Mapping[str, str]) -> str:
    """An identifier that all agents of this start of the job share; empty if the scheduler has none."""
    return (scheduler.start_id(env, processes.ancestors(os.getpid())) if isinstance(scheduler, Launcher) else None) or ""


def _start_of_this_job(env: Mapping[str, str]) -> str:
    for launcher in schedulers.launchers(env).values():
        if launcher.detect(env) and (start := _start(launcher, env)):
            return start
    return ""


def _to_pass_on(env: Mapping[str, str]) -> dict[str, str]:
    """The variables to set for an agent on another host, which a login shell starts with its own environment."""
    return {name: value for name, value in env.items() if name not in _OF_THE_HOST and not name.startswith("XDG_")}


# --- a member that calls


def _calling(plan: Plan | None, run: RunDir, index: int, start: str, events: EventLoop) -> int:
    """Run a member whose agent something else has started: it finds the head through a file in the run directory."""
    processes.become_subreaper()
    if plan is not None and plan.master_addr:
        given = [plan.master_addr], plan.master_port, _secret_of_all(plan)
        return _join(plan, run, index, events, lambda: given)
    plan = _find_plan(run, index, start, events)
    _enter(plan)
    return _join(plan, run, index, events, partial(_way, run, start, plan.run_id))


def _join(plan: Plan, run: RunDir, index: int, events: EventLoop, way: Callable[[], tuple[list[str], int, str]]) -> int:
    """`way`: returns the addresses, the port and the secret of the head, or raises NobodyThere."""
    screen = Screen(plain=not plan.terminal)
    node = Node(plan, run, index, events, screen, _slots(plan, index))
    try:
        patience = _patience()
        while True:
            try:
                addresses, port, secret = way()  # each time: the file may have been left by a head that was killed
                link, _, own = knock(addresses, port, secret, introduced(node.introduction))
                break
            except NobodyThere as reason:
                _wait_for_head(patience, index, events, str(reason))
        node.interface = network.interface_of(own) if not network.is_loopback(own) else None
        node.sink = Wire(link)
        member = RemoteNode(node, link, events, secret)
        status = member.run()
        # The head reports the status of the run. If members returned it too, the launcher might kill the head because a task
        # has failed.
        return status if plan.node_rank >= 0 or not member.dismissed else 0
    finally:
        node.close()
        screen.close(events)


def _find_plan(run: RunDir, index: int, start: str, events: EventLoop) -> Plan:
    """Wait until the head of this same start has published its address; returns its plan."""
    patience = _patience()
    while True:
        try:
            _door(run, start)  # the head writes it after the plan
            plan = Plan.load(run.plan)
            _way(run, start, plan.run_id)
            return plan
        except NobodyThere as reason:
            _wait_for_head(patience, index, events, str(reason))


def _way(run: RunDir, start: str, run_id: str) -> tuple[list[str], int, str]:
    record = _door(run, start)
    if record["run_id"] != run_id:
        raise NobodyThere(f"{run.plan} is not the plan of the first node")
    return ways(record), int(record["port"]), str(record["secret"])


def _door(run: RunDir, start: str) -> Mapping[str, Any]:
    """What the head has published. Raises NobodyThere if another start has; in PBS and LSF, all of one job share their
    `start`."""
    record = read_door(run.door)
    if record["start"] != start:
        raise NobodyThere(f"{run.door} belongs to another start of this run")
    return record


def _patience() -> Patience:
    return Patience(_FIND_S, say_after_s=_SAY_EVERY_S, say_every_s=_SAY_EVERY_S)


def _wait_for_head(patience: Patience, index: int, events: EventLoop, why: str) -> None:
    """Wait a moment. Raises ConfigError if the wait has lasted too long; exits if a stop was requested."""
    if events.asked or events.parent_ended:
        asked = (events.asked or [signal.SIGTERM])[0]
        sys.exit(EXIT_INTERRUPTED if asked == signal.SIGINT else EXIT_PREEMPTED)  # no rank has started: nothing is lost
    name = f"node {index} ({platform.node()})"
    if patience.is_over:
        raise ConfigError(
            f"{name} did not find the first node within {_FIND_S:g} s: {why}; all nodes must see the run directory under the "
            "same path, and be able to connect to the first node"
        )
    if patience.due():
        waited = f"{name}: waiting for the first node for {patience.waited_s:.0f} s: {why}"
        print(f"rankwise: {waited}", file=sys.stderr, flush=True)
    events.wait(_POLL_S)


# --- a member that was called


def _called(guard: int) -> int:
    """The head has started this agent over ssh or qrsh: its first message, over stdin, has all that this agent must know."""
    processes.become_subreaper()
    link = Link(os.dup(0), os.dup(1))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a rank that reads stdin must not read the head's messages
    os.dup2(2, 1)
    events = EventLoop(0, guard)
    events.register(link)
    greeting = _greeting(link, events)
    os.environ.update({name: value for name, value in greeting["environment"].items() if name not in _OF_THE_HOST})
    plan = Plan.of(greeting["plan"], "the plan of the first node")
    index, secret = int(greeting["node"]), str(greeting["secret"])
    _enter(plan)
    node = Node(plan, RunDir(Path(plan.run_dir)), index, events, Wire(link), int(greeting["ranks"]))
    door = None
    try:
        if index == 0 or plan.min_nodes < plan.nodes:  # node 0, or a node that may become the first one when others are lost
            door = Door(secret)
            node.door = (tuple(door.addresses), door.port)
            events.register(door)
        link.send(introduced(node.introduction))
        member = RemoteNode(node, link, events, secret, door)
        member.settle(plan.run_id, Path(plan.run_dir))
        return member.run()
    finally:
        if door is not None:
            door.close()
        node.close()


def _greeting(link: Link, events: EventLoop) -> Message:
    while True:
        events.wait(1.0)
        for message in link.receive():
            return message
        if link.closed is not None or events.asked:
            sys.exit(1)  # nobody would read a message
