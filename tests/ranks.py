"""Ranks for tests: calls a function on N processes of a gloo group, in a tenth of a second.

    assert on_ranks(2, add_one, 3) == [4, 4]

The processes are forked from a clean one that has imported torch (multiprocessing's forkserver), so `function` must be at the
top level of a module. What it raises on a rank is raised here, with the rank's traceback. `environ` has for each rank what its
launcher sets, instead of torchrun's variables on one node; `init` is passed to `rankwise.init`.

    [done] = scripts_on_ranks(1, "train.py", "--lr", "0.1")

is `python train.py --lr 0.1` without its start: a process that is also forked, prints into a file and exits like Python.

If ranks hang, the error has the stacks of all their processes.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

_CONTEXT = multiprocessing.get_context("forkserver")
_SOURCE = Path(__file__).parents[1] / "src"
_OF_RANKS = ("actions", "checkpoint", "data", "dist", "evaluation", "host", "run", "stop", "sync", "telemetry", "training")
_OURS = sorted(
    f"rankwise.{package}.{path.stem}" for package in _OF_RANKS for path in (_SOURCE / "rankwise" / package).glob("[!_]*.py")
)
# Also what the modules of tests import: each rank imports the module of its function, and pytest alone takes longer than the
# rest. Not what few of them import: a fork takes longer the more memory the process has.
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "rankwise.trainer", "numpy", "pytest", "psutil", *_OURS])

_STACKS = signal.SIGRTMIN + 4
"""On this signal a rank, and each process that is forked from it, writes its stacks."""

_WRITES_STACKS_S = 0.2
_EXIT_S = 5.0  # all have answered and exit by themselves; to measure coverage they save first (stress/coverage)


class RankError(AssertionError):
    """A rank has raised; the text is its traceback."""


def torchrun(rank: int, n: int, local_world_size: int) -> dict[str, str]:
    """torchrun's variables, with `local_world_size` ranks per node."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank % local_world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size), "GROUP_RANK": str(rank // local_world_size),
    }  # fmt: skip


def on_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 180.0,
    environ: Sequence[Mapping[str, str]] | None = None,
    init: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """What `function(*args, **kwargs)` returns on each of n ranks, in their order."""
    if environ is None:
        environ = [torchrun(r, n, n) if n > 1 else {} for r in range(n)]
    with _address() as address, _file() as stacks:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(n)]
        calls = (str(stacks), function, args, kwargs, dict(init or {}))
        processes = [
            _CONTEXT.Process(
                target=_rank, args=({**environ[r], **(address if n > 1 else {})}, pipes[r][1], os.getcwd(), *calls)
            )
            for r in range(n)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        try:
            answers = [_answer(reader, timeout_s, processes, stacks) for reader, _ in pipes]
            for process in processes if all(ok for ok, _ in answers) else ():
                process.join(_EXIT_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
    errors = [f"rank {r}:\n{value}" for r, (ok, value) in enumerate(answers) if not ok]
    if errors:
        raise RankError("\n".join(errors))
    return [value for _, value in answers]


@contextlib.contextmanager
def _address() -> Iterator[dict[str, str]]:
    """The address at which ranks connect."""
    with socket.socket() as holder:  # bound, but not listening: nobody else gets the port before the store listens on it
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("", 0))
        yield {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1])}


def scripts_on_ranks(
    n: int, *argv: str, timeout_s: float = 180.0, launched: bool = False, environ: Sequence[Mapping[str, str]] | None = None
) -> list[subprocess.CompletedProcess[str]]:
    """What `python argv` prints on each of n ranks (stdout has both streams), and how it ends; -9 if it was killed here.

    Several ranks have torchrun's variables; a single one only with `launched`. `environ` has all variables of each rank
    instead. `argv` starts with a script, or with -m and a module.
    """
    with _address() as address, contextlib.ExitStack() as files:
        out = [files.enter_context(_file()) for _ in range(n)]
        started = []
        for rank, path in enumerate(out):
            ours = {**os.environ, **({**torchrun(rank, n, n), **address} if n > 1 or launched else {})}
            variables = ours if environ is None else dict(environ[rank])
            started.append(_CONTEXT.Process(target=_script, args=(variables, str(path), os.getcwd(), argv)))
            started[-1].start()
        deadline = time.monotonic() + timeout_s
        try:
            for process in started:
                process.join(max(0.0, deadline - time.monotonic()))
            _ask_for_stacks([process for process in started if process.is_alive()])
        finally:
            for process in started:
                process.kill()
                process.join()
        return [
            subprocess.CompletedProcess(argv, process.exitcode, path.read_text(), "")
            for process, path in zip(started, out, strict=True)
        ]


def _script(environ: dict[str, str], out: str, cwd: str, argv: tuple[str, ...]) -> None:
    """Turns a forked process into `python argv`, which exits like Python."""
    gc.freeze()  # the garbage collector need not look at what was imported before the fork
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    fd = os.open(out, os.O_WRONLY | os.O_APPEND)
    _write_stacks_into(fd)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  # both are open as long as the process
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)
    import torch

    from rankwise.agent import exception_record
    from rankwise.host import main_script

    torch.set_num_threads(1)
    torch.default_generator.seed()
    sys.argv = list(argv)
    status = 0
    try:
        if argv[0] == "-m":
            sys.argv = list(argv[1:])
            sys.path.insert(0, cwd)
            sys.modules["__main__"] = types.ModuleType("__main__")
            runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
            main_script.run(argv[0])
    except SystemExit as end:
        status = exception_record.exit_status(end)
    except BaseException as error:
        status = 1
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


@contextlib.contextmanager
def _file() -> Iterator[Path]:
    path = Path(f"/dev/shm/rankwise-test-{uuid.uuid4().hex}")
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _write_stacks_into(fd: int) -> None:
    faulthandler.register(_STACKS, file=fd, all_threads=True)


def _ask_for_stacks(processes: Sequence[Any]) -> None:
    """One process after the other, so that the texts are not mixed."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(process.pid)
            for each in (found, *found.children(recursive=True)):
                each.send_signal(_STACKS)
                time.sleep(_WRITES_STACKS_S)  # nothing tells when it has written; only after a test has failed


def _answer(reader: Connection, timeout_s: float, processes: Sequence[Any], stacks: Path) -> tuple[bool, Any]:
    if not reader.poll(timeout_s):
        _ask_for_stacks(processes)
        return False, f"no answer within {timeout_s} s; the stacks of all ranks:\n{stacks.read_text()}"
    try:
        return reader.recv()
    except EOFError:
        return False, "it died without a word"


def _rank(
    environ: dict[str, str],
    writer: Connection,
    cwd: str,
    stacks: str,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    init: Any,
) -> None:
    gc.freeze()  # as above
    _write_stacks_into(os.open(stacks, os.O_WRONLY | os.O_APPEND))
    os.chdir(cwd)
    for name in ("RANKWISE_RUN_DIR", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(environ)
    import torch

    import rankwise

    multiprocessing.set_start_method("fork", force=True)  # for loader workers; those of a forkserver would start with an import
    torch.set_num_threads(1)
    rankwise.init(**init)
    try:
        answer = (True, function(*args, **kwargs))
    except BaseException:
        answer = (False, traceback.format_exc())
    writer.send(answer)
    writer.close()
    if answer[0]:
        with contextlib.suppress(RuntimeError):  # a rank that is done may be killed before another has got the answer
            rankwise.barrier()
    os._exit(0)  # the reader has the answer; to unload torch takes longer than the test
