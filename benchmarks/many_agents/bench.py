"""Up to a thousand agents without ranks and one real head: how long does it take them to join, and what does it cost?

python benchmarks/many_agents/bench.py [agents ...]

The head is a real agent in its own process, with one short rank. The other agents are light members in one process that use
real connections: they prove the secret, introduce themselves, report that their rank runs when the head starts it, send a
heartbeat every second, and report how it ended. All this is on one machine: both processes share its cores, and a thousand
sockets are all on loopback. Exits with 1 if a member lost its connection, an agent waits for more than 120 s, or the head
failed.
"""

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import psutil

from rankwise.agent.node import Facts
from rankwise.ipc.channel import NobodyThere, knock, read_door
from rankwise.run.directory import RunDir, write_json
from rankwise.run.plan import Plan

HOLD_S = 6.0
LIMIT_S = 120.0
VERSIONS = {"rankwise": version("rankwise"), "Python": platform.python_version()}


class Member:
    """Sends what the agent of a node sends, without a node."""

    def __init__(self, index: int, record: dict) -> None:
        hello = {
            "hello": {
                "index": index, "host": f"node{index}", "home": record["home"], "ranks": 1, "why": "simulated", "page": "",
                "port": 1, "versions": VERSIONS, "door": None,
            }
        }  # fmt: skip
        self.link, _, _ = knock(["127.0.0.1"], record["port"], record["secret"], hello)
        self.messages = 1
        self.first = index
        self.started = self.over = False

    def look(self) -> None:
        for message in self.link.receive():
            self.messages += 1
            if "start" in message:
                self.first, self.started = message["start"]["first"], True
                self.say({"facts": asdict(Facts(pids=(1,), alive=(self.first,), awaited=False))})
            elif "finish" in message:
                evidence = {"rank": self.first, "exit_code": 0, "signum": None, "sent": False, "ended": time.time()}
                self.say({"end": {"evidence": [evidence], "groups": True, "stuck": False, "port": 1}})
            elif "bye" in message:
                self.over = True
        self.link.beat()

    def say(self, message: dict) -> None:
        self.messages += 1
        self.link.send(message)


def head(folder: Path, agents: int) -> tuple[subprocess.Popen, RunDir]:
    run = RunDir(folder / "runs" / "train")
    run.prepare(fresh=True)
    plan = Plan(
        version=2, run_id=uuid.uuid4().hex, run_dir=str(run.path), argv=("sh", "-c", f"sleep {HOLD_S}"), interpreter=(),
        environment={}, cwd=str(folder), name="train", on="openmpi", nodes=agents, min_nodes=agents, hosts=(), node_rank=-1,
        nproc=1, threads=1, job={}, fork=False, master_addr="", master_port=0, join_timeout_s=300.0, node_wait_s=30.0,
        max_restarts=0, stop_after_s=0.0, grace_s=10.0, stall_warn_s=0.0, check_collectives=False, tee="none",
        launcher_pid=0,
    )  # fmt: skip
    write_json(run.plan, plan.record())
    environment = {**os.environ, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": str(agents)}
    return subprocess.Popen([sys.executable, "-m", "rankwise.agent", str(run.path)], env=environment), run


def agent_of(guard: int) -> psutil.Process:
    while not (children := psutil.Process(guard).children()):
        time.sleep(0.01)
    return children[0]


def measure(agents: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        process, run = head(Path(folder), agents)
        record = None
        while record is None:
            try:
                record = read_door(run.door)
            except NobodyThere:
                time.sleep(0.005)
        agent = agent_of(process.pid)
        began, cpu = time.perf_counter(), sum(agent.cpu_times()[:2])
        members = []
        with ThreadPoolExecutor(64) as pool:
            calls = [pool.submit(Member, index, record) for index in range(1, agents)]
            for call in calls:
                members.append(call.result())
                if len(members) % 50 == 0:
                    turn(members, lambda: True)
        called = time.perf_counter()
        turn(members, lambda: all(member.started for member in members))
        joined, cpu_joined = time.perf_counter(), sum(agent.cpu_times()[:2])
        told = sum(member.messages for member in members)
        turn(members, lambda: time.perf_counter() > joined + 4.0)
        idle = sum(agent.cpu_times()[:2])
        turn(members, lambda: all(member.over or member.link.closed for member in members))
        lost = sum(not member.over for member in members)
        status = process.wait(timeout=LIMIT_S)
    return {
        "agents": agents, "calls_s": called - began, "to_start_s": joined - called, "head_cpu_s": cpu_joined - cpu,
        "messages_an_agent": told / max(1, agents - 1), "head_share_while_running": (idle - cpu_joined) / 4.0,
        "lost": lost, "status": status,
    }  # fmt: skip


def turn(members: list, over) -> None:
    until = time.monotonic() + LIMIT_S
    while True:
        for member in members:
            if member.link.closed is None:
                member.look()
        if over():
            return
        if time.monotonic() > until:
            raise SystemExit(f"WRONG: the head or a member still waits after {LIMIT_S:g} s")
        time.sleep(0.02)


def main() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    right = True
    for agents in [int(word) for word in sys.argv[1:]] or [2, 10, 100, 300, 1000]:
        found = measure(agents)
        print(json.dumps({key: round(value, 4) for key, value in found.items()}), flush=True)
        right = right and found["status"] == found["lost"] == 0
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
