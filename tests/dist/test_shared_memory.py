"""Collectives in memory that ranks share."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launched import wait_for
from ranks import on_ranks, scripts_on_ranks, torchrun

from rankwise.dist import comm, shared_memory
from rankwise.dist.shared_memory import SharedMemory
from rankwise.errors import CollectiveError, ConfigError

SLOT = shared_memory._LARGEST_SLOT
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
WHOLES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def memory() -> SharedMemory:
    found = comm._memory()
    assert found is not None
    return found


def of_rank(rank: int, dtype: torch.dtype, numel: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(numel, generator=generator) if dtype in FLOATS else torch.randint(100, (numel,), generator=generator)
    return values.to(dtype)


def after_one_another(ranks: int, dtype: torch.dtype, numel: int, combine: Callable[..., torch.Tensor]) -> torch.Tensor:
    total = of_rank(0, dtype, numel)
    for rank in range(1, ranks):
        total = combine(total, of_rank(rank, dtype, numel))
    return total


# --- values


def reduced(numels: Sequence[int]) -> list[str]:
    """What differs from the values that one process computes, bit for bit."""
    wrong = []
    for numel in numels:
        for dtype in (*FLOATS, *WHOLES):
            for op, combine in (("sum", torch.add), ("min", torch.minimum), ("max", torch.maximum)):
                if not dtype.is_complex or op == "sum":
                    mine = of_rank(comm.rank(), dtype, numel)
                    memory().all_reduce(mine, op)
                    if not torch.equal(mine, after_one_another(comm.world_size(), dtype, numel, combine)):
                        wrong.append(f"{op} of {numel} x {dtype}")
    return wrong


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_reduction_has_the_bits_of_one_rank_after_the_other(n: int) -> None:
    assert on_ranks(n, reduced, [1, 7, 4096]) == [[]] * n


@pytest.mark.parametrize("n", [2, 3])
def test_so_has_one_of_a_tensor_larger_than_a_slot(n: int) -> None:
    assert on_ranks(n, reduced_large) == [True] * n


def reduced_large() -> bool:
    """Several pieces, of which the last is small, and has fewer elements than there are ranks."""
    same = []
    for numel in (SLOT // 8, SLOT // 8 + 1, 2 * SLOT // 8 + 12345):
        mine = of_rank(comm.rank(), torch.float64, numel)
        memory().all_reduce(mine)
        same.append(torch.equal(mine, after_one_another(comm.world_size(), torch.float64, numel, torch.add)))
    return all(same)


def exchanged() -> list[Any]:
    rank, ranks = comm.rank(), comm.world_size()
    answers: list[Any] = []
    for length in (0, 1, SLOT - 1, SLOT, SLOT + 1, 2 * SLOT):
        lengths = [length * other // max(1, ranks - 1) for other in range(ranks)]  # rank 0 has nothing
        told = memory().all_gather_object(bytes([rank]) * lengths[rank])
        answers.append([(len(data), set(data)) for data in told] == [(k, {r} if k else set()) for r, k in enumerate(lengths)])
        sent = memory().broadcast_object(bytes([rank]) * length, ranks - 1)
        answers.append(sent == bytes([ranks - 1]) * length)
        gathered = memory().gather_object(bytes([rank]) * length, 1)
        answers.append(gathered == ([bytes([other]) * length for other in range(ranks)] if rank == 1 else []))
    return answers


@pytest.mark.parametrize("n", [2, 3])
def test_bytes_of_any_length_arrive_whole(n: int) -> None:
    assert on_ranks(n, exchanged) == [[True] * 18] * n


def broadcast_each() -> list[bool]:
    answers = []
    for numel in (0, 1, SLOT, SLOT + 3):
        for src in range(comm.world_size()):
            mine = of_rank(comm.rank(), torch.uint8, numel)
            memory().broadcast(mine, src)
            answers.append(torch.equal(mine, of_rank(src, torch.uint8, numel)))
    return answers


def test_a_broadcast_of_any_size_comes_from_the_rank_that_was_asked_for() -> None:
    assert on_ranks(3, broadcast_each) == [[True] * 12] * 3


def many_in_a_row(seed: int, longest_s: float) -> list[str]:
    """Random collectives, with pauses that differ between the ranks."""
    together, alone = random.Random(seed), random.Random(seed * 1000 + comm.rank())
    ranks, wrong = comm.world_size(), []
    for number in range(150):
        kind, numel = together.randrange(4), together.choice([1, 5, 1000, 70_000])
        if alone.random() < 0.2:
            time.sleep(alone.random() * longest_s)
        if kind == 0:
            mine = torch.full((numel,), float(comm.rank() + number))
            memory().all_reduce(mine)
            right = bool((mine == sum(range(ranks)) + ranks * number).all())
        elif kind == 1:
            right = memory().all_gather_object(b"%d" % (comm.rank() * number)) == [b"%d" % (r * number) for r in range(ranks)]
        elif kind == 2:
            mine = torch.full((numel,), comm.rank() * number)
            memory().broadcast(mine, number % ranks)
            right = bool((mine == number % ranks * number).all())
        else:
            memory().barrier()
            right = True
        wrong += [] if right else [f"{number}: {kind}"]
    return wrong


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_ranks_of_uneven_speed_never_read_the_values_of_another_collective(n: int) -> None:
    assert on_ranks(n, many_in_a_row, n, 0.005) == [[]] * n


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(6))
def test_ranks_of_uneven_speed_never_read_the_values_of_another_collective_with_longer_pauses(seed: int) -> None:
    n = 2 + seed % 4
    assert on_ranks(n, many_in_a_row, seed, 0.1) == [[]] * n


def waits_for_all() -> bool:
    """Whether no rank leaves a barrier before the last has entered it."""
    time.sleep(0.3 if comm.rank() == comm.world_size() - 1 else 0.0)
    entered = time.monotonic()
    memory().barrier()
    left = time.monotonic()
    return left >= max(float(data) for data in memory().all_gather_object(repr(entered).encode()))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_nobody_leaves_a_barrier_before_all_have_come(n: int) -> None:
    assert on_ranks(n, waits_for_all) == [True] * n


def of_inference() -> list[float]:
    with torch.inference_mode():
        mine = torch.ones(3)
        comm.all_reduce(mine)
    comm.all_reduce(mine)  # outside, where torch refuses to change such a tensor
    other = torch.ones(3, requires_grad=True)
    return [*mine.tolist(), *comm.all_reduce(other).tolist()]


def test_tensors_of_inference_mode_and_those_with_a_gradient_are_reduced() -> None:
    assert on_ranks(2, of_inference) == [[4.0] * 3 + [2.0] * 3] * 2


# --- which ranks share memory


def kind() -> tuple[str, int]:
    """How this rank communicates, and whether a collective works."""
    found = comm._memory()
    return type(found).__name__, int(comm.all_reduce(torch.tensor(1)).item())


def test_ranks_share_memory_unless_a_backend_is_given_or_they_are_on_several_nodes() -> None:
    assert on_ranks(2, kind) == [("SharedMemory", 2)] * 2
    assert on_ranks(2, kind, init={"backend": "gloo"}) == [("NoneType", 2)] * 2
    assert on_ranks(2, kind, environ=[torchrun(r, 2, 1) for r in range(2)]) == [("NoneType", 2)] * 2


def without(name: str, rank: int) -> tuple[str, int, bool]:
    """This rank cannot do one thing that is needed."""

    def refuse(*_: Any) -> int:
        raise OSError(f"no {name}")

    owner, attribute = PARTS[name]
    original = getattr(owner, attribute)
    if comm.rank() == rank:
        setattr(owner, attribute, (lambda: "another") if name == "host" else refuse)
    comm._shared = None, None
    began = time.monotonic()
    found = kind()
    setattr(owner, attribute, original)
    return *found, time.monotonic() - began < 10


PARTS: dict[str, tuple[Any, str]] = {
    "file": (os, "memfd_create"),
    "size": (os, "ftruncate"),
    "socket": (shared_memory, "_listen"),
    "address space": (shared_memory.mmap, "mmap"),
    "host": (shared_memory.network, "home"),
    "hello": (socket, "send_fds"),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", PARTS)
def test_if_one_rank_cannot_share_memory_no_rank_does_and_nobody_waits(name: str, rank: int) -> None:
    assert on_ranks(2, without, name, rank) == [("NoneType", 2, True)] * 2


def connected_again() -> list[Any]:
    """After a new process group, and with sockets that have a time limit by default."""
    connection = memory()._rounds[0].to
    socket.setdefaulttimeout(0.05)
    comm._shared = None, None
    again = memory()
    time.sleep(0.3 * comm.rank())
    return [connection.fileno(), kind(), len(again.all_gather_object(b""))]


def test_ranks_can_connect_again_and_wait_longer_than_the_default_of_their_sockets() -> None:
    assert on_ranks(3, connected_again) == [[-1, ("SharedMemory", 3), 3]] * 3


def left_behind() -> list[str]:
    """Files with a name, and sockets at which this process listens."""
    memory().all_reduce(torch.ones(1 << 20))
    files = [name for name in os.listdir("/dev/shm") if "rankwise-collectives" in name]
    opened = {os.path.basename(str(path.resolve())) for path in Path("/proc/self/fd").iterdir()}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines() if " @rankwise-" in line]
    return [*files, *(name for *_, flags, _, _, inode, name in lines if flags == "00010000" and f"socket:[{inode}]" in opened)]


def test_ranks_leave_no_file_and_listen_nowhere() -> None:
    assert on_ranks(2, left_behind) == [[]] * 2


def resident_bytes() -> tuple[int, int]:
    """Of the mapped file: before and after a large tensor was reduced."""

    def now() -> int:
        parts = Path("/proc/self/smaps").read_text().split("rankwise-collectives")[1:]
        return sum(int(part.split("Rss:")[1].split()[0]) for part in parts) << 10

    memory().all_reduce(torch.ones(10))
    before = now()
    memory().all_reduce(torch.ones(SLOT))
    memory().barrier()
    return before, now()


def test_memory_is_taken_for_what_is_sent_and_no_more_than_two_slots_of_each_rank() -> None:
    for before, after in on_ranks(2, resident_bytes):
        assert 0 < before < 1 << 17
        assert after < 4 * SLOT + (1 << 17)


# --- what goes wrong


def mismatched(calls: Sequence[str]) -> list[Any]:
    """What each rank calls, of which some do not match; then a collective that does."""
    with pytest.raises(CollectiveError) as caught:
        CALLS[calls[comm.rank()]]()
    return [str(caught.value), comm.all_reduce(torch.ones(1)).item()]


CALLS: dict[str, Callable[[], Any]] = {
    "4 floats": lambda: comm.all_reduce(torch.ones(2, 2)),
    "8 floats": lambda: comm.all_reduce(torch.ones(8)),
    "4 integers": lambda: comm.all_reduce(torch.ones(4, dtype=torch.int64)),
    "largest": lambda: comm.all_reduce(torch.ones(4), "max"),
    "3 million floats": lambda: comm.all_reduce(torch.ones(3_000_000)),
    "objects": lambda: comm.all_gather_object(1),
    "source": lambda: comm.broadcast_object(1),
    "last source": lambda: comm.broadcast_object(1, src=1),
    "gather": lambda: comm.gather_object(1),
    "last gather": lambda: comm.gather_object(1, dst=1),
    "values": lambda: comm.broadcast([torch.ones(2)]),
    "last values": lambda: comm.broadcast([torch.ones(2)], src=1),
    "barrier": comm.barrier,
}
FOUR = "all_reduce(sum, float32[4])"


@pytest.mark.parametrize(
    ("calls", "told"),
    [
        (["4 floats", "8 floats"], f"rank 0 calls {FOUR}, rank 1 calls all_reduce(sum, float32[8])"),
        (["4 floats", "4 integers", "4 floats"], f"ranks 0, 2 call {FOUR}, rank 1 calls all_reduce(sum, int64[4])"),
        (["largest", "4 floats"], f"rank 0 calls all_reduce(max, float32[4]), rank 1 calls {FOUR}"),
        (["3 million floats", "4 floats"], f"rank 0 calls all_reduce(sum, float32[3000000]), rank 1 calls {FOUR}"),
        (["objects", "source"], "rank 0 calls all_gather_object(), rank 1 calls broadcast_object(src=0)"),
        (["values", "barrier"], "rank 0 calls broadcast(uint8[8], src=0), rank 1 calls barrier()"),
        (["barrier", "objects", "barrier"], "ranks 0, 2 call barrier(), rank 1 calls all_gather_object()"),
        (["source", "last source"], "rank 0 calls broadcast_object(src=0), rank 1 calls broadcast_object(src=1)"),
        (["last values", "values"], "rank 0 calls broadcast(uint8[8], src=1), rank 1 calls broadcast(uint8[8], src=0)"),
        (["gather", "last gather"], "rank 0 calls gather_object(dst=0), rank 1 calls gather_object(dst=1)"),
    ],
)
def test_ranks_that_call_different_collectives_all_raise_what_each_calls(calls: list[str], told: str) -> None:
    for text, after in on_ranks(len(calls), mismatched, calls):
        assert text.startswith(
            f"the ranks do not match in this collective: {told}; call the same one on all ranks, with as many"
        )
        assert after == len(calls)


def interrupted() -> list[str]:
    """Exceptions end a collective of rank 0: a second Ctrl-C, for example."""
    if comm.rank() == 0:

        def end(*_: Any) -> None:
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, end)
        signal.setitimer(signal.ITIMER_REAL, 0.3, 0.3)
        with pytest.raises(KeyboardInterrupt):
            comm.barrier()
        signal.setitimer(signal.ITIMER_REAL, 0)
        Path("interrupted").touch()
    else:
        wait_for(Path("interrupted").exists, "the interrupt")
    told = []
    for _ in range(2):
        with pytest.raises(CollectiveError) as caught:
            comm.barrier()
        told.append(str(caught.value))
    return told


def test_after_a_second_exception_in_a_collective_no_rank_waits_for_the_other() -> None:
    refused = "an exception has ended an earlier collective of this rank, so it can call no other"
    first, second = on_ranks(2, interrupted)
    assert first == [refused] * 2
    assert second[0].startswith(
        "rank 0 has exited, or an exception has ended its collective, while rank 1 waited for it in barrier"
    )
    assert second[1] == refused


@contextlib.contextmanager
def interrupts(error: BaseException, every_s: float = 0.3) -> Iterator[None]:
    """A signal handler raises the error, once in this time. The file tells the other ranks."""

    def raise_it(*_: Any) -> None:
        Path("interrupted").touch()
        raise error

    signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, every_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def interrupted_once(error: BaseException) -> list[Any]:
    """Rank 0, while it waits; the others come later."""
    total = torch.ones(1)
    if comm.rank() == 0:
        with interrupts(error), pytest.raises(type(error), match="of a handler"):
            comm.all_reduce(total)
    else:
        wait_for(Path("interrupted").exists, "the interrupt")
        comm.all_reduce(total)
    return [total.item(), comm.all_gather_object(comm.rank())]


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, ConnectionError, RuntimeError])
def test_an_exception_of_a_signal_handler_is_raised_when_its_collective_is_complete(error: type[BaseException]) -> None:
    assert on_ranks(3, interrupted_once, error("of a handler")) == [[3.0, [0, 1, 2]]] * 3


def left_for_another() -> list[Any]:
    """Rank 0 is interrupted while it waits; rank 1 was so before it came, and is in the collective that both call then."""
    if comm.rank() == 0:
        with interrupts(KeyboardInterrupt("of a handler")), pytest.raises(KeyboardInterrupt, match="of a handler"):
            comm.all_reduce(torch.ones(1))
    else:
        wait_for(Path("interrupted").exists, "the interrupt")
    return [comm.all_gather_object(comm.rank()), comm.all_reduce(torch.ones(1)).item(), comm.broadcast_object(1)]


@pytest.mark.parametrize("n", [2, 4])
def test_a_rank_that_is_interrupted_alone_in_a_collective_follows_the_others_to_the_next(n: int) -> None:
    assert on_ranks(n, left_for_another) == [[list(range(n)), float(n), 1]] * n


def calls_in_a_handler() -> list[Any]:
    """A collective within another one of the same rank."""
    told = []

    def call(*_: Any) -> None:
        Path("interrupted").touch()
        with pytest.raises(CollectiveError) as caught:
            comm.barrier()
        told.append(str(caught.value))

    if comm.rank() == 0:
        signal.signal(signal.SIGALRM, call)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        wait_for(Path("interrupted").exists, "the handler")
    return [comm.all_reduce(torch.ones(1)).item(), told]


def test_a_collective_that_a_signal_handler_calls_in_another_one_is_an_error_and_the_other_one_continues() -> None:
    said = (
        "a signal handler has called a collective while its rank was in another one; set a variable in the handler, and call "
    )
    said += "the collective at the end of a step"
    assert on_ranks(2, calls_in_a_handler) == [[2.0, [said]], [2.0, []]]


def handles_a_signal() -> int:
    handled = 0

    def handle(*_: Any) -> None:
        nonlocal handled
        handled += 1
        if handled == 3:
            Path("handled").touch()

    signal.signal(signal.SIGALRM, handle)
    if comm.rank() == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    else:
        wait_for(Path("handled").exists, "three signals during the wait of rank 0")
    comm.barrier()
    signal.setitimer(signal.ITIMER_REAL, 0)
    return handled


def test_signals_are_handled_during_a_wait_and_do_not_end_it() -> None:
    number, _ = on_ranks(2, handles_a_signal)
    assert number >= 3


def out_of_time() -> str:
    """A timer of rank 0 is faster than the time limit."""
    if comm.rank() == 1:
        wait_for(Path("given up").exists, "the other rank to give up")
        return ""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    with pytest.raises(CollectiveError) as caught:
        comm.barrier()
    signal.setitimer(signal.ITIMER_REAL, 0)
    Path("given up").touch()
    return str(caught.value)


def test_signals_do_not_extend_the_time_limit() -> None:
    assert on_ranks(2, out_of_time, init={"timeout_s": 1.0})[0].startswith("Timed out waiting 1 s for rank 1 in barrier")


def after_a_refusal() -> list[Any]:
    """torch has no maximum of complex numbers: nothing is sent, and the next collective works."""
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"[cC]omplex"):
            comm.all_reduce(torch.ones(2, dtype=torch.complex64), "max")
    return comm.all_reduce(torch.ones(2, dtype=torch.complex64)).tolist()


def test_a_reduction_that_torch_refuses_ends_no_other() -> None:
    assert on_ranks(2, after_a_refusal) == [[2 + 0j, 2 + 0j]] * 2


def of_no_rank() -> list[str]:
    told = []
    calls: list[Callable[[], Any]] = [
        lambda: comm.broadcast([torch.ones(2)], src=2),
        lambda: comm.broadcast_object(1, src=2),
        lambda: comm.gather_object(1, dst=-1),
    ]
    for call in calls:
        with pytest.raises(ConfigError) as caught:
            call()
        told.append(str(caught.value))
    return [*told, str(comm.all_gather_object(1))]


@pytest.mark.parametrize("init", [{}, {"backend": "gloo"}])
def test_a_source_that_is_no_rank_is_an_error(init: dict[str, str]) -> None:
    end = ", but this run has ranks 0 to 1; give one of them"
    assert on_ranks(2, of_no_rank, init=init) == [["src=2" + end, "src=2" + end, "dst=-1" + end, "[1, 1]"]] * 2


def too_late() -> str:
    if comm.rank() == 1:
        wait_for(lambda: Path("0").exists() and Path("2").exists(), "the other ranks to give up")
    with pytest.raises(CollectiveError) as caught:
        comm.barrier()
    Path(str(comm.rank())).touch()
    return str(caught.value)


def test_a_rank_that_does_not_come_in_time_is_named() -> None:
    first, second, third = on_ranks(3, too_late, init={"timeout_s": 1.0})
    for text in (first, third):
        assert text.startswith("Timed out waiting 1 s for rank 1 in barrier; if the work between two collectives takes longer")
    assert "(Connection closed by peer)" in second


def gives_up_first() -> str:
    """Rank 2 of 4 does not come, and rank 3 gives up, for which rank 1 waits."""
    if comm.rank() == 2:
        wait_for(Path("1").exists, "rank 1 to give up")
        return ""
    for each in memory()._rounds if comm.rank() == 3 else ():
        each.source.settimeout(0.5)
    with pytest.raises(CollectiveError) as caught:
        comm.barrier()
    Path(str(comm.rank())).touch()
    return str(caught.value)


def test_a_rank_that_gave_up_is_not_the_only_one_that_is_named() -> None:
    told = on_ranks(4, gives_up_first)[1]
    assert told.startswith("rank 3 has exited, or an exception has ended its collective, while rank 1 waited for it in barrier")
    assert told.endswith("; rank 2 did not come")


def of_its_own_group() -> str:
    """The script has made the process group, with a time limit."""
    rank, store = comm.rank(), dist.FileStore("store", 2)
    dist.destroy_process_group()
    comm._world, comm._pid, comm._timeout_s, comm._shares = None, 0, 1800.0, True  # as if `init` was never called
    dist.init_process_group("gloo", store=store, timeout=timedelta(seconds=1), rank=rank, world_size=2)
    if rank == 1:
        memory()
        wait_for(Path("given up").exists, "the other rank to give up")
        return ""
    with pytest.raises(CollectiveError) as caught:
        comm.barrier()
    Path("given up").touch()
    return str(caught.value)


def test_the_time_limit_of_a_process_group_that_the_script_has_made_is_kept() -> None:
    assert on_ranks(2, of_its_own_group)[0].startswith("Timed out waiting 1 s for rank 1 in barrier")


KILLED = """
import os, signal, sys, time, rankwise, torch
world = rankwise.init()
rankwise.all_reduce(torch.ones(1))
if world.rank == 1:
    if sys.argv[1] == "with a child" and os.fork() == 0:
        time.sleep(8)  # it lives longer than its parent
        os._exit(0)
    time.sleep(0.3)  # the other is usually in its wait by then; it must also notice later
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
try:
    rankwise.all_reduce(torch.ones(1))
except RuntimeError as error:
    print(type(error).__name__, "after", round(time.monotonic() - began) , "s", str(error), flush=True)
    os._exit(3)
"""


@pytest.mark.parametrize("how", ["alone", "with a child"])
def test_a_rank_that_is_killed_ends_the_wait_of_the_others_at_once(how: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(KILLED)
    first, second = scripts_on_ranks(2, str(script), how)
    assert second.returncode == -signal.SIGKILL
    assert first.returncode == 3
    found = re.search(
        r"CollectiveError after (\d+) s rank 1 has exited, or .* in all_reduce \(Connection closed by peer\)", first.stdout
    )
    assert found is not None, first.stdout
    assert int(found[1]) <= 3


def forked_status() -> int:
    """The exit status of a forked process, which calls a collective: 6 if that is an error."""
    worker = os.fork()
    if worker == 0:
        signal.alarm(20)
        with contextlib.suppress(Exception):
            memory().barrier()
            os._exit(5)
        os._exit(6)
    return os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])


def in_a_forked_process() -> tuple[int, float]:
    """A loader worker that calls a collective by mistake gets an error, and its rank continues."""
    return forked_status(), comm.all_reduce(torch.ones(1)).item()


def test_a_forked_process_does_not_disturb_its_rank() -> None:
    assert on_ranks(2, in_a_forked_process) == [(6, 2.0)] * 2


def forked_in_a_collective() -> tuple[int, int]:
    """Another thread of the rank is in a collective, and has the lock."""
    waiting = threading.Thread(target=comm.barrier)
    before = shared_memory.begun
    if comm.rank() == 0:
        waiting.start()
        wait_for(lambda: shared_memory.begun > before, "the thread to begin its collective")
        status = forked_status()
        Path("forked").touch()
        waiting.join()
    else:
        wait_for(Path("forked").exists, "the fork")
        comm.barrier()
        status = 6
    return status, len(comm.all_gather_object(1))


def test_a_process_forked_while_a_thread_is_in_a_collective_gets_an_error() -> None:
    assert on_ranks(2, forked_in_a_collective) == [(6, 2)] * 2


def counted() -> int:
    before = shared_memory.begun
    comm.barrier()
    comm.all_reduce(torch.ones(3_000_000))
    return shared_memory.begun - before


def test_collectives_are_counted_as_the_agent_needs_it() -> None:
    assert on_ranks(2, counted) == [2, 2]
