"""All files of a run: their names, their record types, and the atomic writes behind them.

    run = RunDir(Path("runs/train"));  run.prepare(fresh=False);  lease = run.take()

    config.json plan.json code.txt job.sh     the settings, the plan, the code, the job's script
    job.json                                   the job that was queued for it, if one was
    world.json                                 the attempts of the run: who ran where, and how it ended
    logs/rank-0.log ...                        what each rank printed, attempts one after the other
    logs/job-12.log                            the output of a queued job: its agents' messages, and what they show of ranks
    metrics.jsonl telemetry/                   metrics; TensorBoard's events
    checkpoints/ failure.json
    .function/                                 a function instead of a script, and what it returned; only for this user

A reader never sees an incomplete record: each is written under a unique name, flushed and renamed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

from rankwise.errors import RunDirError
from rankwise.host.disk import exists, is_folder
from rankwise.host.terminal import typed
from rankwise.host.text import listed, stamp
from rankwise.run import lease, metrics
from rankwise.run.kinds import NUMBER, SEVERAL, TABLE, TEXT, WHOLE, fits
from rankwise.run.lease import Holder, Lease

ENV_RUN_DIR = "RANKWISE_RUN_DIR"

_MOVED_ASIDE = re.compile(r"\.\d{4}-\d\d-\d\d-\d{6}(-\d+)?$")
"""The end of the folder name of a run that --fresh has moved aside."""

_MOST_NAMED = 8

_NEWEST_BYTES = 1 << 20

Say = Callable[[str], None]


def _say(text: str) -> None:
    print(text, flush=True)


def write_text(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file completely or not at all; it survives a power cut once this returns."""
    # File names need not be UTF-8: Python's surrogates for invalid bytes are written as the original bytes.
    write_bytes(path, text.encode(errors="surrogateescape"), mode)


def write_bytes(path: Path, data: bytes, mode: int = 0o644) -> None:
    """As `write_text`."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RunDirError(f"cannot write {path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def write_json(path: Path, record: Any) -> None:
    write_text(path, json.dumps(record, indent=1) + "\n")


class _Record:
    """A frozen dataclass that is stored as a JSON object; keys of a later version are ignored."""

    @classmethod
    def of(cls, record: Any) -> Self:
        """Raises TypeError for any other object."""
        if not isinstance(record, dict):
            raise TypeError(f"{type(record).__name__} instead of an object")
        known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]  # every subclass is a dataclass
        given = {key: tuple(v) if isinstance(v, list) else v for key, v in record.items() if key in known}
        for key, value in given.items():
            if not fits(value, known[key]):
                raise TypeError(f"{key} is {value!r:.40}")
        return cls(**given)


@dataclass(frozen=True)
class NodeRecord(_Record):
    """The part of an attempt on one node."""

    host: str = field(metadata=TEXT)
    first: int = field(metadata=WHOLE)
    """The lowest of its ranks."""

    ranks: int = field(metadata=WHOLE)
    page: str = field(metadata=TEXT)
    """Where these ranks find the page that they share with their agent."""

    store: str = ""
    """The one address at which all nodes reach rank 0; empty if they use several."""


@dataclass(frozen=True)
class Attempt(_Record):
    """One start of the ranks: a run has several if it was stopped or restarted."""

    life: int = field(metadata=WHOLE)
    """Counts from 1."""

    started: float = field(metadata=NUMBER)
    """Seconds since 1970."""

    host: str = field(metadata=TEXT)
    ranks: int = field(metadata=WHOLE)
    argv: tuple[str, ...] = field(metadata=SEVERAL)
    pids: tuple[int, ...] = ()
    parts: tuple[NodeRecord, ...] = ()
    """The nodes in the order of their ranks; empty without an agent."""

    checkpoint_scope: str = "main"
    """See RunConfig."""

    sync: str = ""
    """See RunConfig."""

    fresh: bool = False
    """Whether it was started with --fresh; only a first attempt can be."""

    ended: float | None = field(default=None, metadata=NUMBER)
    status: int | None = field(default=None, metadata=WHOLE)
    """The exit status of the run; None while it runs, or if it was killed together with its agent."""

    outcome: str = ""
    """How it ended, in one line."""

    @classmethod
    def of(cls, record: Any) -> Self:
        attempt = super().of(record)
        return replace(attempt, parts=tuple(NodeRecord.of(part) for part in attempt.parts))

    def record(self) -> dict[str, Any]:
        """The record in world.json; without `sync` if it is empty, as before this setting existed."""
        record = asdict(self)
        return record if self.sync else {name: value for name, value in record.items() if name != "sync"}

    def part_of(self, rank: int) -> NodeRecord | None:
        """The node that has this rank."""
        return next((part for part in self.parts if part.first <= rank < part.first + part.ranks), None)


@dataclass(frozen=True)
class Failure(_Record):
    """failure.json: the rank that is the cause, and the evidence."""

    rank: int = field(metadata=WHOLE)
    host: str = field(metadata=TEXT)
    summary: str = field(metadata=TEXT)
    """One line: what happened to which rank."""

    exit_status: int = field(metadata=WHOLE)
    exit_code: int | None = field(default=None, metadata=WHOLE)
    signal: str | None = None
    exception: str | None = None
    traceback: str | None = None
    step: int | None = field(default=None, metadata=WHOLE)
    log: str | None = None
    life: int = 1


@dataclass(frozen=True)
class Job(_Record):
    """job.json: the last job that was queued for this run."""

    scheduler: str = field(metadata=TEXT)
    id: str = field(metadata=TEXT)
    submitted: float = field(metadata=NUMBER)
    """Seconds since 1970."""

    host: str = field(metadata=TEXT)
    """The host on which the user typed the command."""

    options: Mapping[str, Any] = field(default_factory=dict, metadata=TABLE)
    """The options for its scheduler."""

    def for_scheduler(self) -> dict[str, Any]:
        """What a scheduler's `state` and `cancel` take: the options, and its `id`."""
        return {**self.options, "id": self.id}


@contextlib.contextmanager
def _reading(record: str, cure: str) -> Iterator[None]:
    """Raises RunDirError for a record that is not what this version writes. A PermissionError stays: the record is of another
    user, and intact, so the advice to remove it would be wrong."""
    try:
        yield
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirError(f"{record} cannot be read ({error}); {cure}") from None


class RunDir:
    """The paths of one run, and its records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.plan = path / "plan.json"
        self.world = path / "world.json"
        self.code = path / "code.txt"
        self.job = path / "job.sh"
        self.queued = path / "job.json"
        self.logs = path / "logs"
        self.door = path / ".head.json"
        self.copy_of = path / ".copy-of"
        self.metrics = path / "metrics.jsonl"
        self.telemetry = path / "telemetry"
        self.failure = path / "failure.json"
        self.checkpoints = path / "checkpoints"
        self.lease = path / "lease.json"
        self.begun = path / "fresh.json"
        self.function = path / ".function"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def begin_log(self, rank: int) -> None:
        """An attempt begins: what is in the rank's log now is of earlier ones. A line separates them."""
        self._log_begins(rank).unlink(missing_ok=True)
        with contextlib.suppress(OSError), open(self.log(rank), "r+b") as file:  # no log yet, or a full disk
            if size := file.seek(0, os.SEEK_END):
                file.seek(size - 1)
                line_end = b"" if file.read(1) == b"\n" else b"\n"
                file.write(line_end + f"=== next attempt, {stamp(time.time())}\n".encode())
                file.flush()
                self._log_begins(rank).write_text(str(file.tell()))

    def _log_begins(self, rank: int) -> Path:
        return self.logs / f".rank-{rank}.begins"

    def log_tail(self, rank: int, most_bytes: int) -> bytes:
        """The end of a rank's output in the last attempt; empty if it cannot be read, or not on this host."""
        begins = 0
        with contextlib.suppress(OSError, ValueError):
            begins = int(self._log_begins(rank).read_text())
        try:
            with open(self.log(rank), "rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - most_bytes, begins))
                return file.read()
        except OSError:
            return b""

    def saved(self) -> list[str]:
        """The names of its checkpoints, oldest first. Not verified."""
        names = (path.name for path in self.checkpoints.glob("step-*"))
        return sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])

    def job_log(self, job_id: str) -> Path:
        """The output of a queued job."""
        return self.logs / f"job-{job_id}.log"

    def stacks(self, rank: int) -> Path:
        """Where a rank's fault handler writes its Python stacks when its agent asks."""
        return self.logs / f".rank-{rank}.stacks"

    def exception(self, rank: int) -> Path:
        """Where a rank that fails with an exception writes it for its agent."""
        return self.logs / f".rank-{rank}.exception.json"

    @property
    def call(self) -> Path:
        """The pickled function that its ranks call, if they run no script."""
        return self.function / "call"

    def result(self, rank: int) -> Path:
        """The pickled result or exception of that function on a rank."""
        return self.function / f"rank-{rank}"

    def prepare(self, fresh: bool, say: Say = _say) -> Path | None:
        """Make the folders; with `fresh`, first move an older run aside and return its new path. `say`: see `lease.take`."""
        aside = None
        try:
            if self._is_something_else():
                raise RunDirError(
                    f"{self.path} is not empty and is not the folder of a run; choose an empty or a new folder with "
                    "--run-dir PATH"
                )
            if not fresh:
                self._refuse_what_is_in_the_way()
            if fresh and self.path.is_dir() and self.path.samefile(Path.cwd()):
                raise RunDirError(f"--fresh would move {self.path}, the folder you are in; type the command in another folder")
            if fresh and self.path.is_dir():
                if (holder := self.holder()) is not None and lease.is_alive(self.lease, holder, say):
                    raise lease.in_use(self.lease, holder)
                # Of a link, what it points to: otherwise the new run would be written where the link was.
                folder = self.path.resolve() if self.path.is_symlink() else self.path
                aside = _free_name(folder)
                os.rename(folder, aside)
                folder.mkdir()
            self.logs.mkdir(parents=True, exist_ok=True)
            self.telemetry.mkdir(exist_ok=True)
        except OSError as error:
            raise RunDirError(
                f"the run directory {self.path} cannot be created or written ({error.strerror}: {error.filename}); "
                "choose another with --run-dir PATH"
            ) from None
        self._refuse_what_is_not_writable()
        return aside

    def begin_copy(self, run_id: str, fresh: bool) -> None:
        """As `prepare`, on a host that does not see the run directory of run `run_id`, and keeps its own part of it. With
        `fresh` an older run's part is moved aside, but not a part of this same run."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with lease.alone_in(self.path.parent):  # this host may have several agents
            known = self.copy_of.read_text() if self.copy_of.exists() else ""
            self.prepare(fresh and known != run_id)
            write_text(self.copy_of, run_id)

    def _refuse_what_is_in_the_way(self) -> None:
        """Raises RunDirError for a file where a folder must be, or the reverse: otherwise the run would fail after hours of
        work."""
        for path in (self.checkpoints, self.logs, self.telemetry):
            if path.exists() and not path.is_dir():
                raise RunDirError(f"{path} is a file, and the run needs a folder there; move it away, or type --fresh")
        for path in (self.world, self.metrics, self.failure, self.lease, self.config, self.plan, self.job, self.code):
            if path.is_dir():
                raise RunDirError(f"{path} is a folder, and the run needs a file there; move it away, or type --fresh")

    def _refuse_what_is_not_writable(self) -> None:
        """Raises RunDirError for what another user has made, who may have begun this run. Of the logs, only one is looked at:
        there may be thousands."""
        for path in (self.path, self.logs, self.telemetry, self.checkpoints, self.log(0), self.stacks(0)):
            if path.exists() and not os.access(path, os.W_OK):
                what = "" if path == self.path else f" ({path.relative_to(self.path)} belongs to user {path.stat().st_uid})"
                raise RunDirError(f"the run directory {self.path} is not writable{what}; choose another with --run-dir PATH")

    def _is_something_else(self) -> bool:
        """Whether the folder has content that is not from a run: writing into it, or moving it aside, would be a mistake."""
        if not self.path.is_dir() or any(p.exists() for p in (self.world, self.config, self.checkpoints, self.logs)):
            return False
        return any(not p.name.startswith(".") for p in self.path.iterdir())

    # --- one writer

    def holder(self) -> Holder | None:
        """The process that writes here now; None if there is none."""
        return lease.read(self.lease)

    def take(self, say: Say = _say) -> Lease:
        """Become the only writer of this run directory, or raise RunDirError that names the writer: see `lease.take`."""
        return lease.take(self.lease, say)

    # --- attempts

    def attempts(self) -> list[Attempt]:
        """Every attempt so far, the newest last."""
        cure = "remove that file to resume from the checkpoints, or start from scratch with --fresh"
        with _reading(f"{self.world}, the record of this run's attempts,", cure), contextlib.suppress(FileNotFoundError):
            return [Attempt.of(record) for record in json.loads(self.world.read_text())["lives"]]
        return []

    def begin_attempt(
        self,
        ranks: int,
        argv: tuple[str, ...],
        parts: tuple[NodeRecord, ...] = (),
        fresh: bool = False,
        **settings: Any,
    ) -> Attempt:
        """Add the record of a new attempt. `settings`: settings of RunConfig that the ranks read."""
        attempts = self.attempts()
        now, host = time.time(), socket.gethostname()
        number = len(attempts) + 1
        attempt = replace(Attempt(number, now, host, ranks, argv, parts=parts, fresh=fresh and number == 1), **settings)
        self._write_attempts([*attempts, attempt])
        if attempt.fresh:
            write_json(self.begun, [])
        return attempt

    def update_attempt(self, attempt: Attempt, **changes: Any) -> Attempt:
        """Change the record of `attempt`, found by its number: it is the newest, unless another run has taken over here."""
        changed = replace(attempt, **changes)
        self._write_attempts([changed if other.life == attempt.life else other for other in self.attempts()])
        return changed

    def _write_attempts(self, attempts: list[Attempt]) -> None:
        write_json(self.world, {"lives": [attempt.record() for attempt in attempts]})

    def is_first_use(self, folder: Path) -> bool:
        """Whether this run was started with --fresh and has not used this folder of checkpoints: they are of an older run."""
        used = self._used_folders()
        return str(folder) not in used if used is not None else self.attempts()[-1].fresh

    def record_use(self, folder: Path) -> None:
        write_json(self.begun, [*(self._used_folders() or []), str(folder)])

    def _used_folders(self) -> list[str] | None:
        """None if this run was not started with --fresh, or by a launcher of an earlier version."""
        try:
            return [str(folder) for folder in json.loads(self.begun.read_text())]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise RunDirError(f"{self.begun} cannot be read ({error}); start from scratch with --fresh") from None

    def newest_metrics(self) -> list[dict[str, Any]]:
        """As `read_metrics`, but only the end of the file, which may have a million lines."""
        return metrics.read(self.metrics, _NEWEST_BYTES) or self.read_metrics()

    def read_metrics(self) -> list[dict[str, Any]]:
        """All records of metrics.jsonl."""
        return metrics.read(self.metrics)

    def read_job(self) -> Job | None:
        """The last job that was queued for this run; None if there was none."""
        cure = "if no job of this run is queued or running, remove it"
        with _reading(str(self.queued), cure), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return Job.of(json.loads(self.queued.read_text()))
        return None

    def write_job(self, job: Job | None) -> None:
        """None: this run no longer belongs to a queued job."""
        if job is None:
            self.queued.unlink(missing_ok=True)
        else:
            write_json(self.queued, asdict(job))

    def read_failure(self) -> Failure | None:
        with _reading(str(self.failure), "remove it"), contextlib.suppress(FileNotFoundError):
            return Failure.of(json.loads(self.failure.read_text()))
        return None

    def write_failure(self, failure: Failure | None) -> None:
        """None removes the failure of an earlier attempt."""
        if failure is None:
            self.failure.unlink(missing_ok=True)
        else:
            write_json(self.failure, asdict(failure))


def find_run(run: str | None, verb: str) -> RunDir:
    """The run directory with this name under ./runs, or at this path; for None, the only one under ./runs.

    Raises RunDirError with the runs that exist, and what to type: `rankwise VERB RUN`.
    """
    here = runs_here(_is_run)
    names = listed((shlex.quote(path.name) for path in here), _MOST_NAMED) or "none"
    if run is None:
        if not here:
            raise RunDirError(f"there is no run under {Path('runs').absolute()}; type: {typed(verb, 'PATH')}")
        if len(here) != 1:
            raise RunDirError(f"which run? the runs here: {names}; type: {typed(verb, 'RUN')}")
        return RunDir(here[0])
    for path in (Path(run), Path("runs", run)):
        if _is_run(path):
            return RunDir(path)
    what = f"{run} is not the folder of a run (no world.json, no plan.json)" if is_folder(run) else f"there is no run {run}"
    near = get_close_matches(run, [path.name for path in here], n=1)
    raise RunDirError(f"{what}; {f'did you mean {shlex.quote(near[0])}?' if near else f'the runs here: {names}'}")


def runs_here(accepts: Callable[[Path], object]) -> list[Path]:
    """The run directories in ./runs that `accepts` accepts, without those of other nodes (hidden), and without those that
    `--fresh` has moved aside, unless there are no others: they are found only by their names."""
    found = [path for path in sorted(Path("runs").glob("[!.]*")) if accepts(path)]
    return [path for path in found if not _MOVED_ASIDE.search(path.name)] or found


def _is_run(path: Path) -> bool:
    run = RunDir(path)
    return exists(run.world) or exists(run.plan)  # a run that waits in a queue has only a plan


def _free_name(folder: Path) -> Path:
    """Where an older run is moved to."""
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    name = folder.with_name(f"{folder.name}.{stamp}")
    count = 1
    while name.exists():
        count += 1
        name = folder.with_name(f"{folder.name}.{stamp}-{count}")
    return name
