"""The options that several schedulers share, one object each, in the order of `rankwise run --help`."""

from __future__ import annotations

import re

from rankwise.run.options import Option, from_one, matching

_NODES, _QUEUE = "Several nodes", "A job in a queue"


def _numbers(gpus: str) -> str | None:
    numbers = [number.strip() for number in gpus.split(",")]
    fit = all(re.fullmatch("[0-9]{1,6}", number) for number in numbers) and len({int(n) for n in numbers}) == len(numbers)
    return None if fit else f"the numbers of GPUs, each once, for example {GPUS.typed} 0,2"


def counts(nodes: str) -> tuple[int, int]:
    """(fewest, most) of `2` or `1:4`; (0, 0) for any other text."""
    match = re.fullmatch(r"([0-9]{1,6})(?::([0-9]{1,6}))?", nodes)
    least, most = (int(match[1]), int(match[2] or match[1])) if match is not None else (0, 0)
    return (least, most) if 0 < least <= most else (0, 0)


GPUS = Option(
    "gpus", "The GPUs to use, by number; all by default.", metavar="0,2", check=_numbers, heading="This run"
)  # fmt: skip
HOSTS = Option(
    "hosts", "Hosts to reach over ssh, and how many ranks on each.", metavar="A:2,B:2", spellings=("-H", "--host", "--hosts"),
    heading=_NODES,
)  # fmt: skip
HOSTFILE = Option(
    "hostfile", "A file of hosts, one per line: `host slots=2`.", metavar="FILE", instead_of="hosts", heading=_NODES
)  # fmt: skip
NODES = Option(
    "nodes", "How many nodes; with MIN:MAX the run continues while MIN of them are left.", metavar="N|MIN:MAX",
    spellings=("--nodes", "--nnodes"), within=True, heading=_NODES,
    check=lambda value: None if counts(value) != (0, 0) else "a number of nodes, or the minimum and the maximum: 1:4",
)  # fmt: skip
GPUS_PER_NODE = Option(
    "gpus_per_node", "GPUs of each node.", metavar="[TYPE:]N", heading=_NODES,
    check=matching(r"([A-Za-z0-9_.-]+:)?[0-9]+", "a number, or a type and a number: a100:4"),
)  # fmt: skip
NODE_RANK = Option(
    "node_rank", "If you type the command on each node: the number of this node, from 0.", kind=int, metavar="N",
    spellings=("--node-rank", "--node_rank"), site=False, heading=_NODES,
)  # fmt: skip
MASTER_ADDR = Option(
    "master_addr", "If you type the command on each node: the host of node 0.", metavar="HOST",
    spellings=("--master-addr", "--master_addr"), heading=_NODES,
)  # fmt: skip
SETUP = Option(
    "setup", "A shell command that the job runs first: \"module load cuda\". Repeatable.", kind=list, metavar="LINE",
    within=True, heading=_QUEUE,
)  # fmt: skip
REQUEUE = Option(
    "requeue", "Queue the job again after its time limit or a preemption, until the run is done.", kind=bool,
    heading=_QUEUE,
)  # fmt: skip
TIME = Option(
    "time", "Time limit of the job: minutes, h:m:s, d-h:m:s.", metavar="TIME", spellings=("--time", "-t"), heading=_QUEUE
)  # fmt: skip
QUEUE = Option("queue", "The queue in which the job waits.", metavar="NAME", spellings=("--queue", "-q"), heading=_QUEUE)
ACCOUNT = Option(
    "account", "The account that the job is charged to.", metavar="NAME", spellings=("--account", "-A"), heading=_QUEUE
)  # fmt: skip
CPUS_PER_TASK = Option(
    "cpus_per_task", "Cores of each node, for all its ranks.", kind=int, metavar="N", spellings=("--cpus-per-task", "-c"),
    check=from_one, within=True, heading=_QUEUE,
)  # fmt: skip
MEM = Option("mem", "Memory of each node: 64G.", metavar="SIZE", heading=_QUEUE)

SHARED = (
    GPUS, HOSTS, HOSTFILE, NODES, GPUS_PER_NODE, NODE_RANK, MASTER_ADDR, TIME, QUEUE, ACCOUNT, CPUS_PER_TASK, MEM, SETUP,
    REQUEUE,
)  # fmt: skip
