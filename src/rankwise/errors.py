"""All exceptions that rankwise raises on purpose, as one tree. Each message has what was set, what was found, and what to type.

RankwiseError            exit status 2 unless a subclass has another
  ConfigError            a setting that cannot work
    NotAttachedError       a strategy that has no model yet
  WorldError             this process cannot tell which rank it is, or the ranks disagree
    NotJoinedError         it is one of several processes that were started, and would train alone
  DeviceError            torch cannot use a GPU of this machine
  RunDirError            the run directory cannot be used
  DataError              the dataset or its order
  StepError              a step function, or a rank's number of samples, broke its contract
  CheckpointError        a checkpoint cannot be written or read
    DamagedError         a file of a checkpoint is corrupted
    UnreadableError      a checkpoint cannot be read, and may be intact
  FunctionError          a rank of a function exited without a result, or with one that cannot be sent
  OutputError            the output of a command cannot be written
  SelftestError          a script that cannot be tested
  MainProcessError       work that only some ranks do failed there, with an exception that cannot be sent to other ranks
Stopped                  not an error: training stopped as asked, everything is saved
Interrupted              the same after Ctrl-C in a notebook, IPython, or at Python's prompt
"""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import shutil
import sys
import textwrap
import traceback
from types import TracebackType

_OURS = os.path.dirname(__file__) + os.sep

EXIT_USAGE = 2
EXIT_PREEMPTED = 75
EXIT_INTERRUPTED = 130


class RankwiseError(Exception):
    """Base of all. The launcher and the ranks print only its message, without a traceback."""

    exit_status = EXIT_USAGE

    def _render_traceback_(self) -> list[str]:
        """For IPython, which asks an exception for the lines to show."""
        if _hides_one_of_the_scripts(self):
            return traceback.format_exception(self)
        lines = [
            f"at line {number}: {linecache.getline(frame.f_code.co_filename, number).strip()}"
            for frame, number in traceback.walk_tb(self.__traceback__)
            if frame.f_globals.get("__name__") == "__main__"  # a cell
        ]
        return [f"error: {self}", *_notes_of(self), *lines[-1:]]


class ConfigError(RankwiseError):
    """A setting that cannot work, found before any work is done."""


class NotAttachedError(ConfigError, AttributeError):
    """A method of a strategy was called before `attach`."""


class WorldError(RankwiseError):
    """The environment does not show which rank this process is, or contradicts itself."""


class NotJoinedError(WorldError):
    """This is one of several processes of a job, and nothing connects them: it would train alone. `allow_independent` permits
    that."""


class CollectiveError(RankwiseError, RuntimeError):
    """The ranks could not complete a collective: one has exited, did not come in time, or called something else. Those of
    torch's collectives are RuntimeErrors, too."""

    exit_status = 1


class DeviceError(RankwiseError):
    """There is a GPU, but torch cannot use it: because of its driver, its state, or a torch built for another one."""


class RunDirError(RankwiseError):
    """The run directory cannot be used: not writable, or another run is writing there."""


class DataError(RankwiseError):
    """A dataset that cannot be used for training."""


class StepError(RankwiseError):
    """A step or evaluation function returned something else than its contract requires."""


class CheckpointError(RankwiseError):
    """A checkpoint could not be written, or none could be read."""

    exit_status = 1


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing, truncated or corrupted; the checkpoint before it may be intact."""


class UnreadableError(CheckpointError):
    """A checkpoint cannot be read now (the system gave an error), or not by this version of rankwise. It may be intact."""


class OutputError(RankwiseError):
    """The output of a command cannot be written, because a disk is full for example."""

    exit_status = 1


class SelftestError(RankwiseError):
    """A script that the self-test cannot run, or in which it finds nothing to test."""


class MainProcessError(RankwiseError):
    """Work that only some ranks do has failed there; the message is the traceback of that rank."""

    exit_status = 1


class FunctionError(RankwiseError):
    """A rank of a function exited without a result, or with a result that cannot be sent to another process."""

    exit_status = 1


class Stopped(SystemExit):
    """Training stopped after an agreed step, and is saved. The script exits with status 75, or 130 after Ctrl-C."""

    signum = 0
    """The signal because of which it stopped; 0 if that is not known."""


class Interrupted(KeyboardInterrupt):
    """Training stopped after an agreed step because of Ctrl-C, or "Interrupt" in a notebook, and is saved. Where a person types
    the code, it is raised instead of `Stopped`, which would end the session."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


def _notes_of(error: BaseException) -> list[str]:
    return [_without_frames(note) for note in getattr(error, "__notes__", ())]


def _without_frames(note: str) -> str:
    """The first line of another process's traceback, and the last place in it that is not in rankwise."""
    frames = re.findall(r'^ +File "(.+)", line (\d+)', note, re.MULTILINE)
    if not frames:
        return note
    theirs = [f" at {path}:{line}" for path, line in frames if not path.startswith(_OURS)]
    return note.partition("\n")[0].rstrip(":") + "".join(theirs[-1:])


def _hides_one_of_the_scripts(error: BaseException) -> bool:
    """Whether it was raised while the script handled another error of its own: try: train() finally: checkpoints.wait()."""
    first = error.__context__
    if error.__suppress_context__ or first is None or isinstance(first, RankwiseError) or first.__traceback__ is None:
        return False
    return not first.__traceback__.tb_frame.f_code.co_filename.startswith(_OURS)


def _folded(text: str) -> str:
    """The text; on a terminal, in lines that are broken between words."""
    is_tty = getattr(sys.stderr, "isatty", None)  # a script may have replaced it by its own object
    if "\n" in text or is_tty is None or not is_tty():
        return text
    columns = shutil.get_terminal_size().columns - 1
    return textwrap.fill(text, columns, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def end_process(error: BaseException) -> None:
    """Print the error and exit: for an exit function that finds a failure after the last line of the script. The exit status is
    always 1."""
    print(f"error: {error}", file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


def without_traceback() -> None:
    """From now on, an uncaught error of rankwise ends this process with its message, the place where it was raised, and the
    user's line. At Python's prompt, Ctrl-C that has stopped a training is one line, too."""
    before = sys.excepthook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if isinstance(error, Interrupted):
            print(error, file=sys.stderr)
            return
        if not isinstance(error, RankwiseError) or _hides_one_of_the_scripts(error):
            before(kind, error, tb)
            return
        main = getattr(sys.modules["__main__"], "__file__", None)
        lines = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(tb) if frame.filename == main]
        places = [f"at {line}" for line in lines[-1:]]
        print("\n  ".join([_folded(f"error: {error}"), *_notes_of(error), *places]), file=sys.stderr)

    sys.excepthook = hook
