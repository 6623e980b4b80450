"""A Python function on every rank, from a script, a notebook or `python -c`.

losses = rankwise.run_function(train, (0.1,), nproc=4)                                    # the result of each rank
run = rankwise.run_function(train, (0.1,), nodes=2, on="slurm", wait=False)
run.status();  run.result(timeout_s=3600);  run.cancel()
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary

from xxhash import xxh3_128_digest

from rankwise import errors, schedulers
from rankwise.dist import private_names
from rankwise.errors import ConfigError, FunctionError, Interrupted, RankwiseError, Stopped
from rankwise.functions import calls
from rankwise.host.arguments import FLAG, FROM_ONE, FUNCTION, MAPPING, PATH, SECONDS, SEQUENCE, TEXT, Argument, takes
from rankwise.host.disk import check_current_folder
from rankwise.host.session import is_interactive
from rankwise.launch import status
from rankwise.launch.follow import JobEnd
from rankwise.run.config import WORKER, RunConfig, site_settings
from rankwise.run.directory import Job, RunDir
from rankwise.run.options import is_given
from rankwise.schedulers.job import slug

_TICK_S = 0.02
_LAST_OUTPUT_S = 5.0  # a process that the function left running may hold the pipe
_OF_SCRIPTS = ("argv", "module", "command", "job", "site", "wait")
_STARTED_ONCE = "a function is started once, for all its nodes; use hosts=... or a scheduler, or start a script"
_RANKS = FROM_ONE.or_(Argument(TEXT.accepts, '"auto"'))
_NODES = FROM_ONE.or_(Argument(TEXT.accepts, 'the minimum and the maximum: "1:4"'))
_OF_NO_FUNCTION = {
    "dry_run": "a function has no dry run; to see the job script, type: rankwise run --dry-run script.py",
    "array": "the results of several runs do not fit into one list; submit each with its own name",
    "node_rank": _STARTED_ONCE,
    "master_addr": _STARTED_ONCE,
}


@takes(
    fn=FUNCTION, args=SEQUENCE, kwargs=MAPPING.or_none, nproc=_RANKS.or_none, nodes=_NODES.or_none, on=TEXT.or_none,
    hosts=TEXT.or_none, name=TEXT.or_none, wait=FLAG, timeout_s=SECONDS.or_none,
)  # fmt: skip
def run_function(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    nproc: int | str | None = None,
    nodes: int | str | None = None,
    on: str | None = None,
    hosts: str | None = None,
    name: str | None = None,
    wait: bool = True,
    timeout_s: float | None = None,
    **settings: Any,
) -> Any:
    """Call `fn(*args, **kwargs)` on every rank; return the results in the order of the ranks.

    The ranks are those of `rankwise run`, with all of its settings (`max_restarts=1`, `gpus_per_node=4`, `partition="gpu"`,
    ...: the fields of RunConfig), its logs, restarts, checkpoints and error messages. The run is named after the function. If a
    rank fails, the exception of the first one is raised here, with its rank, host and traceback as a note: of the same type if
    that can be pickled, otherwise FunctionError. Stopped is raised if the run was asked to stop. Ctrl-C stops all ranks.

    The function and the results are pickled, in files of the run directory that only this user can read. Lambdas, closures and
    functions of `__main__`, which pickle cannot send, require `pip install 'rankwise[functions]'`.

    With a queue (`on="slurm"`) this waits for the job. `wait=False` returns a FunctionRun at once instead of the results.
    `timeout_s` limits the wait: after it the run is stopped, and TimeoutError raised.
    """
    errors.without_traceback()
    check_current_folder()
    given = {"nproc": nproc, "nodes": nodes, "on": on, "hosts": hosts, "name": name, **settings}
    run = FunctionRun(_config(calls.name_of(fn), given, wait), calls.pack(fn, args, kwargs or {}), calls.name_of(fn))
    if not wait:
        return run
    try:
        return run.result(timeout_s)
    except KeyboardInterrupt:
        run._stop(signal.SIGINT)
        if is_interactive():
            raise Interrupted("stopped by Ctrl-C") from None
        raise
    except TimeoutError:
        run._stop(signal.SIGTERM)  # if the function itself raised it, the run is over and this does nothing
        raise


def _config(name: str, given: Mapping[str, Any], wait: bool) -> RunConfig:
    """The settings of the run. Raises ConfigError."""
    options = schedulers.options()
    known = [
        key for key in (*(field.name for field in fields(RunConfig)), *options) if key not in (*_OF_SCRIPTS, *_OF_NO_FUNCTION)
    ]
    # False too, because the site file may say True; but not for what a function does not have.
    found = {key: value for key, value in given.items() if is_given(value) or not (value is None or key in _OF_NO_FUNCTION)}
    for key in found:
        if key in _OF_NO_FUNCTION:
            raise ConfigError(f"{key}={found[key]!r}: {_OF_NO_FUNCTION[key]}")
        if key not in known:
            raise ConfigError(f"{key}={found[key]!r}: not a setting of a run; the settings are: {', '.join(known)}")
    if type(found.get("nproc")) is int:  # a number is accepted, as well as its text
        found["nproc"] = str(found["nproc"])
    if "run_dir" in found:
        if not PATH.accepts(found["run_dir"]):
            raise ConfigError(f"run_dir={found['run_dir']!r}: give {PATH.words}")
        found["run_dir"] = os.fspath(found["run_dir"])
    own = {
        "argv": (WORKER, name),
        "module": True,
        "name": schedulers.named_by_task(slug(name.rpartition(".")[2]), os.environ),
        "wait": wait,
    }
    return RunConfig.of(options, *site_settings(os.environ, options), own, found)


_unread: WeakValueDictionary[Path, FunctionRun] = WeakValueDictionary()
"""The last call of this process in each run directory."""


class FunctionRun:
    """A run of a function; it may wait in a queue.

    A queued run continues when this process exits. A run on this machine, or on hosts that this process reaches, stops then.
    """

    def __init__(self, config: RunConfig, call: bytes, name: str) -> None:
        self._run = RunDir(config.path(name))
        self._name, self._call = name, xxh3_128_digest(call)
        before = _unread.get(self._run.path)
        if before is not None and before.done():
            before._read()  # this call will replace its results
        self._began = time.time()
        self._attempts = len(self._run.attempts()) if not config.fresh else 0
        self._reply: dict[str, Any] | None = None
        self._end: JobEnd | None = None
        self._outcome: tuple[list[Any] | None, BaseException | None] | None = None
        self._process, self._lifeline, self._replies = _start(config, call)
        if before is None or before._outcome is not None:  # otherwise this call will be refused
            _unread[self._run.path] = self
        self._pumps = [
            threading.Thread(target=_pump, args=(source, sink), daemon=True)
            for source, sink in ((self._process.stdout, sys.stdout), (self._process.stderr, sys.stderr))
            if source is not None
        ]
        for pump in self._pumps:
            pump.start()

    @property
    def run_dir(self) -> Path:
        """The run directory, as an argument for `rankwise status`, `logs` and `cancel`."""
        return self._run.path

    def done(self) -> bool:
        """Whether the run has ended: then `result` returns, or raises, at once."""
        return self._outcome is not None or not self._is_active()

    def result(self, timeout_s: float | None = None) -> list[Any]:
        """The results of the function, in the order of the ranks; raises as `run_function` does. TimeoutError if the run did
        not finish within `timeout_s`; the run continues then."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.done():
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self._name} did not finish within {timeout_s:g} s; its logs are in {self._run.logs}")
            time.sleep(_TICK_S)
        results, raised = self._read()
        if raised is not None:
            raise raised.with_traceback(None)  # the note has the traceback that matters
        assert results is not None
        return results

    def _read(self) -> tuple[list[Any] | None, BaseException | None]:
        """The results, or what to raise. Removes the files of this call, if they are its own."""
        if self._outcome is None:
            for pump in self._pumps:
                pump.join(_LAST_OUTPUT_S)
            try:
                self._outcome = (self._results(), None)
            except (Exception, Stopped) as error:
                self._outcome = (None, error)
            if self._is_ours():
                shutil.rmtree(self._run.function, ignore_errors=True)
        return self._outcome

    def _is_ours(self) -> bool:
        """Whether the files are of this call: it may have been refused, or another process may have made one of that name."""
        if self._reply is None or "error" in self._reply:
            return False
        try:
            return xxh3_128_digest(self._run.call.read_bytes()) == self._call
        except OSError:
            return False

    def status(self) -> str:
        """The state of the run now, as `rankwise status` prints it."""
        return status.as_text(status.facts(self._run))

    def cancel(self) -> None:
        """Ask the run to stop after its current step, and to save; then `result` raises Stopped, or FunctionError."""
        self._ask(signal.SIGTERM)

    def _is_active(self) -> bool:
        """Whether the run still runs or waits in a queue. Returns at once."""
        if self._process.poll() is None:
            return True
        if self._reply is None:
            with open(self._replies, "rb") as file:
                line = file.readline()
            os.close(self._lifeline)
            self._reply = json.loads(line) if line else {}
        job = self._job()
        if self._reply.get("status") != 0 or job is None:
            return False
        self._end = self._end or JobEnd(self._run, job)
        return self._end.goes_on()

    def _job(self) -> Job | None:
        """The job of this call, if it was queued."""
        job = self._run.read_job()
        return job if job is not None and job.submitted >= self._began else None

    def _ask(self, signum: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signum)
        if (job := self._job()) is not None and status.state_of(job).phase in ("waiting", "stuck", "running"):
            status.cancel(self._run)

    def _stop(self, signum: int) -> None:
        """Ask the run to stop, and wait until its launcher has exited; each further Ctrl-C asks again."""
        while True:
            try:
                self._ask(signum)
                while self._process.poll() is None:
                    time.sleep(_TICK_S)
                return
            except KeyboardInterrupt:
                signum = signal.SIGINT

    # --- how the run ended

    def _results(self) -> list[Any]:
        """The results of all ranks. Raises what the function raised, or an error with the reason why there are no results."""
        assert self._reply is not None
        if "error" in self._reply:
            raise _error(self._reply["error"], self._reply["message"])
        attempt = next(iter(self._run.attempts()[self._attempts :][-1:]), None)
        if attempt is None:
            raise FunctionError(f"{self._name} never started; {self._told()}")
        code = attempt.status
        if self._run.call.exists() and not self._is_ours():
            raise FunctionError(
                f"the results of {self._name} were replaced by those of a later call in another process; give each call its "
                'own name (name="NAME")'
            )
        if code == 0:
            return [calls.understand(self._run.result(rank), rank) for rank in range(attempt.ranks)]
        failure = self._run.read_failure()
        if failure is not None:
            error = calls.understand_error(self._run.result(failure.rank), failure.rank, failure.host)
            raise error or FunctionError(f"{failure.summary}, on {failure.host}; its output is in {failure.log}")
        if code in (errors.EXIT_PREEMPTED, errors.EXIT_INTERRUPTED):
            raise Stopped(code)
        raise FunctionError(f"{self._name}: {attempt.outcome or 'its launcher was killed'}; {self._told()}")

    def _told(self) -> str:
        job = self._job()
        if job is None:
            return f"exit status {self._process.returncode}; its output is in {self._run.logs}"
        reason = self._end.reason if self._end is not None else ""
        return f"job {job.id}{f' ({reason})' if reason else ''}; its output is in {self._run.job_log(job.id)}"


def _error(kind: str, message: str) -> RankwiseError:
    found = getattr(errors, kind, RankwiseError)
    return found(message) if isinstance(found, type) and issubclass(found, RankwiseError) else RankwiseError(message)


# --- the launcher


def _start(config: RunConfig, call: bytes) -> tuple[subprocess.Popen[bytes], int, int]:
    """(the launcher, a pipe that stops it when closed, the pipe of its reply)."""
    theirs_in, lifeline = _pipe()
    replies, theirs_out = _pipe()
    command = [
        sys.executable,
        *private_names.interpreter_flags(),
        "-P",  # the current folder may contain a secrets.py or platform.py, which the launcher must not import
        "-m",
        "rankwise.functions.launcher",
        str(theirs_in),
        str(theirs_out),
    ]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=_stream(sys.stdout, 1),
            stderr=_stream(sys.stderr, 2),
            pass_fds=(theirs_in, theirs_out),
            # This process passes Ctrl-C on, once; the launcher must not get it from the terminal or the notebook too.
            start_new_session=True,
        )
    finally:
        os.close(theirs_in)
        os.close(theirs_out)
    with contextlib.suppress(BrokenPipeError), open(lifeline, "wb", closefd=False) as file:
        file.write(json.dumps({"config": asdict(config), "bytes": len(call)}).encode() + b"\n" + call)
    return process, lifeline, replies


def _pipe() -> tuple[int, int]:
    """(reader, writer). Not one of the numbers of the standard streams, which may be closed: the launcher has its own there."""
    ends = os.pipe()
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in ends]
    for fd in ends:
        os.close(fd)
    return moved[0], moved[1]


def _stream(stream: Any, fd: int) -> int | None:
    """For Popen: what a child writes to instead of `stream`, whose descriptor is `fd`. In a notebook the stream is not that
    descriptor: output of a child would appear elsewhere. If Python was started without it, the stream is None."""
    if stream is None:
        return subprocess.DEVNULL
    try:
        return None if stream.fileno() == fd else subprocess.PIPE
    except (AttributeError, OSError, ValueError):
        return subprocess.PIPE


def _pump(source: IO[bytes], sink: Any) -> None:
    with source:
        for line in source:
            with contextlib.suppress(OSError, ValueError):
                sink.write(line.decode(errors="replace"))
                sink.flush()
