"""Why the ranks of any script are slow, from what the agents of all nodes have read."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict

import pytest
from launched import launch, wait_for

from rankwise.agent.node import Facts
from rankwise.agent.remote import _facts
from rankwise.agent.slow_ranks import NodeTimes, RankTime, SlowRanks
from rankwise.host import processes

__all__ = ["launch"]  # a fixture


def per_second(
    data: float = 0.0,
    queued: float = 0.0,
    used: float = 1.0,
    batches: float = 10,
    meets: bool = True,
    explains: bool = False,
    epochs: float = 0.0,
) -> RankTime:
    """What one rank does in each second; seconds of its data, its wait for a processor, and its processor time."""
    return RankTime(batches, data, 10 if meets else 0, explains, used, queued, epochs)


def node(second: float, *ranks: RankTime, first: int = 0, cores: int = 8, workers: int = 0) -> NodeTimes:
    """A node after so many seconds."""
    so_far = (
        RankTime(
            int(r.batches * second), r.data_wait_s * second, int(r.collectives * second), r.explains, r.used_s * second,
            r.queued_s * second, r.epoch_wait_s * second,
        )
        for r in ranks
    )  # fmt: skip
    return NodeTimes(second, cores, first, workers, tuple(so_far))


def lines(*nodes: list[RankTime], seconds: int = 60, cores: int = 8, workers: int = 0) -> list[tuple[int, str]]:
    """(second, what is printed then), with looks at each second and news every five."""
    watch, said = SlowRanks(), []
    hosts = [f"node{i + 1}" for i in range(len(nodes))]
    firsts = [sum(len(ranks) for ranks in nodes[:i]) for i in range(len(nodes))]
    for second in range(seconds):
        news = second // 5 * 5
        times = [
            node(news, *ranks, first=first, cores=cores, workers=workers) for ranks, first in zip(nodes, firsts, strict=True)
        ]
        if (line := watch.look(times, hosts, float(second))) is not None:
            said.append((second, line))
    return said


def test_ranks_that_all_wait_for_data_are_told_to_use_more_loader_workers() -> None:
    [(second, line)] = lines([per_second(data=0.5), per_second(data=0.4)])
    assert second == 20
    assert line == "slow: 45% of the time is data wait: raise num_workers (now 0), or make the samples cheaper to read"
    assert "(now 2)" in lines([per_second(data=0.5)], workers=2)[0][1]
    assert lines([per_second(data=0.2), per_second(data=0.3)]) == []


def test_if_the_loader_workers_use_all_cores_more_of_them_are_not_recommended() -> None:
    [(_, line)] = lines([per_second(data=0.5, used=1.9)] * 4, workers=2)
    assert line == (
        "slow: 50% of the time is data wait: the ranks and their loader workers use all 8 cores; make the samples cheaper to "
        "read"
    )


@pytest.mark.parametrize("explains", [False, True])
def test_workers_that_start_in_each_short_epoch_are_told_to_stay(explains: bool) -> None:
    [(_, line)] = lines([per_second(data=0.5, epochs=0.25, explains=explains)] * 2, workers=4)
    assert line == (
        "slow: 25% of the time loader workers start and end (4 in each epoch); give persistent_workers=True to the DataLoader "
        "or Loader, then they stay"
    )
    assert lines([per_second(data=0.2, epochs=0.1)], workers=4) == []
    assert lines([per_second(data=0.2, epochs=0.2)]) == []  # without workers, nothing can stay


def test_a_rank_whose_data_is_late_is_named_with_its_host() -> None:
    [(_, line)] = lines([per_second(data=0.01)] * 2, [per_second(data=0.01), per_second(data=0.6)])
    assert line == (
        "slow: all ranks wait for rank 3 (on node2); it waits 60% of the time for data, the others 1%: its disk or loader "
        "workers are slower, or its samples larger"
    )


def test_ranks_that_never_meet_do_not_wait_for_each_other() -> None:
    assert lines([per_second(meets=False), per_second(data=0.4, meets=False)]) == []


def test_ranks_without_a_processor_are_named() -> None:
    [(_, line)] = lines([per_second()] * 2, [per_second(queued=0.5)] * 2)
    assert line == (
        "slow: ranks 2, 3 (on node2) wait 50% of the time for a processor: their threads, loader workers and other programs "
        "need more than the 8 cores here; use fewer loader workers or threads (--threads), or ask for more cores"
    )
    [(_, line)] = lines([per_second(queued=0.4)])
    assert line.startswith("slow: rank 0 waits 40% of the time for a processor: ")


def test_more_ranks_than_cores_were_reported_at_the_start() -> None:
    assert lines([per_second(queued=0.5)] * 4, cores=2) == []


def test_a_trainer_explains_its_own_time_but_not_its_processors() -> None:
    assert lines([per_second(data=0.6, explains=True), per_second(data=0.01, explains=True)]) == []
    assert len(lines([per_second(data=0.6, queued=0.5, explains=True)])) == 1


def test_a_script_without_a_data_loader_is_not_judged_by_its_data() -> None:
    assert lines([per_second(batches=0)] * 2) == []


def test_the_same_is_reported_less_and_less_often() -> None:
    assert [second for second, _ in lines([per_second(data=0.5)], seconds=2000)] == [20, 620, 1820]


def test_slow_steps_get_a_longer_window_because_a_wait_is_known_when_its_batch_comes() -> None:
    assert [second for second, _ in lines([per_second(data=0.5, batches=0.1)], seconds=200)] == [60]


def test_nothing_is_said_before_all_nodes_have_reported_and_of_ranks_that_were_started_again() -> None:
    watch = SlowRanks()
    slow = per_second(data=0.5)
    assert watch.look([node(10, slow), None], ["a", "b"], 0.0) is None
    for second in (10, 20, 30):
        line = watch.look([node(second, slow), node(second, slow, first=1)], ["a", "b"], float(second))
    assert line is not None
    assert watch.look([node(40, slow, slow)], ["a"], 1000.0) is None
    assert watch.look([node(50, slow, slow)], ["a"], 1010.0) is not None


def test_a_message_of_another_agent_has_the_same_times() -> None:
    facts = Facts(pids=(7, 8), times=node(10, per_second(), per_second(explains=True)))
    assert _facts(json.loads(json.dumps(asdict(facts)))) == facts
    assert _facts(json.loads(json.dumps(asdict(Facts())))) == Facts()


def test_the_wait_for_a_processor_is_read_from_the_kernel() -> None:
    """Two processes that always compute share one core."""
    spin = f"import os; os.sched_setaffinity(0, [{min(os.sched_getaffinity(0))}])\nwhile True: pass"
    pids = [os.posix_spawn(sys.executable, [sys.executable, "-c", spin], os.environ) for _ in range(2)]
    try:
        wait_for(lambda: all(processes.queued_s(pid) > 0.5 for pid in pids), "a queue for the core")
        before = [processes.used_s(pid) for pid in pids]
        wait_for(lambda: all(processes.used_s(pid) > b for pid, b in zip(pids, before, strict=True)), "their time")
    finally:
        for pid in pids:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
    assert [processes.queued_s(pid) for pid in pids] == [processes.used_s(pid) for pid in pids] == [0.0, 0.0]


def test_the_processor_time_of_children_is_counted_before_and_after_they_end() -> None:
    began = processes.used_s(os.getpid())
    child = os.fork()
    if child == 0:
        while True:
            time.process_time()
    wait_for(lambda: processes.used_s(os.getpid()) > began + 0.2, "the child's time")
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert processes.used_s(os.getpid()) > began + 0.2


SLOW = """
import time, torch, torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        time.sleep(0.05 if SLOWER else 0.0)
        return torch.ones(3)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
for batch in DataLoader(Slow()):
    model(batch).sum().backward()
    time.sleep(0.02)
"""


@pytest.mark.stress
@pytest.mark.parametrize(
    ("slower", "said"),
    [
        (
            "True",
            "% of the time is data wait: raise num_workers (now 0), or make the samples cheaper to read",
        ),
        ("rank == 1", "slow: all ranks wait for rank 1; it waits "),
    ],
    ids=["all ranks", "one rank"],
)
def test_a_plain_ddp_script_that_waits_for_data_is_told_so(launch, slower: str, said: str) -> None:
    run = launch(SLOW.replace("SLOWER", slower), options=("--nproc", "2"))
    wait_for(lambda: "slow: " in run.output(), "a line", run.output)
    assert said in " ".join(run.output().split())
    run.process.terminate()
    run.wait()
