"""The launcher of a function, in a separate process, so that it does not change the signals and processes of its caller.

    python -m rankwise.functions.launcher CALL_FD REPLY_FD

It reads from CALL_FD one line of JSON, {"config": RunConfig, "bytes": n}, and then the n bytes of the call. The pipe stays
open: when the caller exits for any reason, the run is asked to stop. It writes to REPLY_FD {"status": n} or {"error": type,
"message": text}.
"""

import contextlib
import fcntl
import json
import os
import signal
import sys
from typing import Any

from rankwise import schedulers
from rankwise.errors import RankwiseError, WorldError
from rankwise.host import terminal
from rankwise.launch import join
from rankwise.launch.launch import launch
from rankwise.run.config import RunConfig


def main() -> int:
    calling, replying = int(sys.argv[1]), int(sys.argv[2])
    for fd in (calling, replying):
        os.set_inheritable(fd, False)
    with open(calling, "rb", closefd=False) as file:
        head = json.loads(file.readline())
        call = file.read(head["bytes"])
    _stop_with_the_caller(calling)
    reply: dict[str, Any]
    status = 0
    try:
        if join.together(os.environ) is not None:
            raise WorldError(
                "this is one of several processes of one job, and each would start the function again; call it "
                "from one process, or start a script: rankwise run script.py"
            )
        status = launch(_config(head["config"]), os.environ, call)
        reply = {"status": status}
    except RankwiseError as error:
        reply = {"error": type(error).__name__, "message": str(error)}
    with contextlib.suppress(BrokenPipeError):  # the caller is gone
        os.write(replying, json.dumps(reply).encode() + b"\n")
    return status


def _config(record: dict[str, Any]) -> RunConfig:
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items() if name != "job"}
    return RunConfig.of(schedulers.options(), settings, record["job"])


def _stop_with_the_caller(pipe: int) -> None:
    """Get SIGTERM when the other end of the pipe is closed. Not PR_SET_PDEATHSIG: that signal comes when the parent's thread
    ends."""
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


if __name__ == "__main__":
    terminal.leave(main())
