"""Ranks for tests: a function called on N processes of a gloo group, in a tenth of a second.

    assert on_ranks(2, add_one, 3) == [4, 4]

The processes are forked from a clean one that has imported torch (multiprocessing's forkserver), so `function` lives at the
top of a module. What it raises on a rank is raised here, with the rank's traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch._dynamo", "rankwise.train"])


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


def on_ranks(n: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[Any]:
    """What `function(*args, **kwargs)` returns on each of n ranks, in their order."""
    holder = socket.socket()  # bound and never listening: the port stays ours until the store listens on it
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    with holder:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(n)]
        processes = [
            _CONTEXT.Process(
                target=_rank, args=(r, n, holder.getsockname()[1], pipes[r][1], os.getcwd(), function, args, kwargs)
            )
            for r in range(n)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        try:
            answers = [_answer(r, reader, timeout_s) for r, (reader, _) in enumerate(pipes)]
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
    rank: int, n: int, port: int, writer: Connection, cwd: str, function: Callable[..., Any], args: Any, kwargs: Any
) -> None:
    os.chdir(cwd)
    for name in ("RANKWISE_RUN_DIR", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    if n > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), LOCAL_WORLD_SIZE=str(n), GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        )  # fmt: skip
    import torch

    import rankwise

    multiprocessing.set_start_method("fork", force=True)  # for loader workers; a forkserver's would begin with an import
    torch.set_num_threads(1)
    rankwise.init()
    try:
        answer = (True, function(*args, **kwargs))
    except BaseException:
        answer = (False, traceback.format_exc())
    writer.send(answer)
    writer.close()
    rankwise.barrier() if answer[0] else None
    os._exit(0)  # the reader has the answer; taking torch apart costs more than the test
