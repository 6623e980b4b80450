"""Ranks for tests: a function called on N processes of a gloo group, in a tenth of a second.

    assert on_ranks(2, add_one, 3) == [4, 4]

The processes are forked from a clean one that has imported torch (multiprocessing's forkserver), so `function` lives at the
top of a module. What it raises on a rank is raised here, with the rank's traceback. `environ` has for each rank what its
launcher sets, in the place of torchrun's variables on one node; `init` goes to `rankwise.init`.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "rankwise.train"])

_EXIT_S = 5.0  # all have answered and exit by themselves; under coverage they save first (stress/coverage)


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


def torchrun(rank: int, n: int, local_world_size: int) -> dict[str, str]:
    """torchrun's variables, with `local_world_size` ranks a node."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank % local_world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size), "GROUP_RANK": str(rank // local_world_size),
    }  # fmt: skip


def on_ranks(
    n: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    environ: Sequence[Mapping[str, str]] | None = None,
    init: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """What `function(*args, **kwargs)` returns on each of n ranks, in their order."""
    holder = socket.socket()  # bound and never listening: the port stays ours until the store listens on it
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    if environ is None:
        environ = [torchrun(r, n, n) if n > 1 else {} for r in range(n)]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1])} if n > 1 else {}
    with holder:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(n)]
        calls = (function, args, kwargs, dict(init or {}))
        processes = [
            _CONTEXT.Process(target=_rank, args=({**environ[r], **address}, pipes[r][1], os.getcwd(), *calls)) for r in range(n)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        try:
            answers = [_answer(r, reader, timeout_s) for r, (reader, _) in enumerate(pipes)]
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


def _answer(rank: int, reader: Connection, timeout_s: float) -> tuple[bool, Any]:
    if not reader.poll(timeout_s):
        return False, f"no answer within {timeout_s} s"
    try:
        return reader.recv()
    except EOFError:
        return False, "it died without a word"


def _rank(
    environ: dict[str, str], writer: Connection, cwd: str, function: Callable[..., Any], args: Any, kwargs: Any, init: Any
) -> None:
    os.chdir(cwd)
    for name in ("RANKWISE_RUN_DIR", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.update(environ)
    import torch

    import rankwise

    multiprocessing.set_start_method("fork", force=True)  # for loader workers; a forkserver's would begin with an import
    torch.set_num_threads(1)
    rankwise.init(**init)
    try:
        answer = (True, function(*args, **kwargs))
    except BaseException:
        answer = (False, traceback.format_exc())
    writer.send(answer)
    writer.close()
    rankwise.barrier() if answer[0] else None
    os._exit(0)  # the reader has the answer; taking torch apart costs more than the test
