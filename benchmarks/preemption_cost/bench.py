"""What does it cost per step that a training can be stopped, and what is sent for it?

    python benchmarks/preemption_cost/bench.py [STEPS]                 as root, for a separate network

Four ranks on two nodes that share nothing but a connection (LOCAL_WORLD_SIZE=2), without an agent. Measures the processor time
of STEPS calls of the gate (a million), in twenty rounds, and counts the packets that are sent meanwhile on the loopback
interface, which is the only network here.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import rankwise

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import rounds, spread

ROUNDS = 20


def packets() -> int:
    """The number of packets that were sent on the loopback interface of this network."""
    with open("/proc/net/dev") as file:
        return next(int(line.split()[10]) for line in file if line.strip().startswith("lo:"))


def rank(steps: int) -> None:
    world = rankwise.init()
    stop = rankwise.StopSignal()
    stop.agreed(0)
    rankwise.barrier()
    time.sleep(0.5)  # the packets of the barrier have arrived

    def gate(_: int) -> float:
        began = time.thread_time_ns()
        for step in range(steps // ROUNDS):
            stop.agreed(step)
        return (time.thread_time_ns() - began) / (steps // ROUNDS)

    before = packets()
    took_ns = rounds({"gate": gate}, ROUNDS)["gate"]
    sent = packets() - before
    time.sleep(0.5)  # no rank sends anything while another still counts
    figures = rankwise.dist.comm.all_gather_object((spread(took_ns, 0, " ns a step"), sent))
    stop.finish()
    stop.leave()
    if world.is_main:
        for number, (taken, count) in enumerate(figures):
            print(f"rank {number}: {taken}, {count} packets in {steps} steps")


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    if "RANK" in os.environ:
        rank(steps)
        return
    if "--here" not in sys.argv:
        here = [sys.executable, __file__, str(steps), "--here"]
        raise SystemExit(subprocess.call(["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *here]))
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(steps)],
            env={
                **os.environ, "RANK": str(r), "WORLD_SIZE": "4", "LOCAL_RANK": str(r % 2), "LOCAL_WORLD_SIZE": "2",
                "GROUP_RANK": str(r // 2), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
            },
        )
        for r in range(4)
    ]  # fmt: skip
    raise SystemExit(max(process.wait() for process in ranks))


if __name__ == "__main__":
    main()
