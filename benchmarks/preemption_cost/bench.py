"""What does a step pay for being stoppable, and what is sent for it?

    python benchmarks/preemption_cost/bench.py [STEPS]                 root, for a network of its own

Four ranks of two nodes that know nothing of each other but a connection (LOCAL_WORLD_SIZE=2), under no agent: the gate's own
call alone, STEPS times (a million), in twenty rounds, as processor time; and the packets on the loopback interface, all there
is of network here, meanwhile.
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
    """Sent on the loopback interface of this network."""
    with open("/proc/net/dev") as file:
        return next(int(line.split()[10]) for line in file if line.strip().startswith("lo:"))


def rank(steps: int) -> None:
    world = rankwise.init()
    stop = rankwise.StopSignal()
    stop.agreed(0)
    rankwise.barrier()
    time.sleep(0.5)  # what the barrier has sent has come

    def gate(_: int) -> float:
        began = time.thread_time_ns()
        for step in range(steps // ROUNDS):
            stop.agreed(step)
        return (time.thread_time_ns() - began) / (steps // ROUNDS)

    before = packets()
    took_ns = rounds({"gate": gate}, ROUNDS)["gate"]
    sent = packets() - before
    time.sleep(0.5)  # nobody begins to say anything while another counts
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
