"""What ranks do together, in your own loop: run a function on one rank, print, exchange values.

    python examples/05_ranks.py                 one device
    rankwise run examples/05_ranks.py           all devices of this machine

Computes pi from darts thrown at a square; each rank throws its own darts.
"""

import tempfile
from pathlib import Path

import torch

import rankwise
from rankwise.dist import broadcast, is_local_main, local_world_size
from rankwise.dist.guards import main_process_only, once_per_node
from rankwise.dist.log import get_logger, warning_once

ROUNDS, DARTS = 5, 200_000


@main_process_only
def make_plan() -> dict[str, int]:
    """Runs only on rank 0. The other ranks get what it returns, or raise what it raises."""
    return {"rounds": ROUNDS, "darts": DARTS // rankwise.world_size()}


@once_per_node
def make_scratch() -> Path:
    """Runs on the first rank of each node: for what every host needs, such as unpacked data."""
    return Path(tempfile.mkdtemp(prefix="rankwise-example-"))


def main() -> None:
    world = rankwise.init(timeout_s=60)
    device = rankwise.local_device(world)  # this rank's GPU, or the CPU if there is none
    rankwise.seed_everything(0)  # the same on every rank: create a model here
    board = torch.rand(2, device=device)
    broadcast([board])  # to be sure, use rank 0's
    rankwise.seed_rank(0, rankwise.rank())  # from here on, each rank draws different numbers
    here = f"local rank {rankwise.local_rank()} of {local_world_size()}"
    rankwise.say(f"{'main' if rankwise.is_main() else 'another'} rank, {here}", force=True)

    plan, scratch = make_plan(), make_scratch()
    hits = 0.0
    for number in range(1, plan["rounds"] + 1):
        darts = torch.rand(plan["darts"], 2, device=device)
        mine = ((darts**2).sum(1) <= 1).double().mean()
        share = rankwise.all_reduce(mine, "mean")  # the mean over all ranks; with one rank, its own value
        hits += float(share)
        rankwise.say(f"round {number}: pi is about {4 * hits / number:.4f}")
        warning_once("darts are a slow way to pi")
    (scratch / f"rank-{rankwise.rank()}").write_text(f"{hits}\n")

    rankwise.barrier()  # all ranks have written
    files = len(list(scratch.iterdir())) if is_local_main() else 0
    told = rankwise.all_gather_object({"rank": rankwise.rank(), "files": files})
    rankwise.run_once_per_node(lambda: [file.unlink() for file in scratch.iterdir()] and scratch.rmdir())
    winner = rankwise.broadcast_object(f"rank {rankwise.rank()}")  # the text of rank 0
    get_logger(__name__).warning("%d files on all nodes, says %s", sum(t["files"] for t in told), winner)
    rankwise.say(f"done: {4 * hits / plan['rounds']:.2f}")


if __name__ == "__main__":
    main()
