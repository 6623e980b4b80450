"""What is printed at the end of a run, and its exit status.

return conclude(run, status, attempts_before, config)
"""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from dataclasses import fields
from pathlib import Path

from rankwise import schedulers
from rankwise.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED
from rankwise.host.stack_text import shortened
from rankwise.host.terminal import message, typed
from rankwise.host.text import cut, printable, short
from rankwise.launch.caller import caller_of
from rankwise.run.config import RunConfig, misplaced, option
from rankwise.run.directory import Failure, RunDir

_MOST_LINES = 120
_LONGEST_LINE = 1000
_LOG_TAIL_BYTES = 65536  # large: the list of modules that a crash prints comes after its stack
_CRASH = re.compile(r"^(Fatal Python error: .*)\n(?:.*\n)*?Current thread .*\n((?:  File .*\n)+)", re.MULTILINE)


def conclude(
    run: RunDir, status: int, attempts_before: int, config: RunConfig, by: str = "the agent", asked: bool = False
) -> int:
    """Print how the run ended. The lines of a failure are the last that it prints.

    `status`: of the child of this process; `by`: the child's name. `asked`: whether the run was asked to stop.
    """
    attempts, caller = run.attempts(), caller_of(config.words)
    attempt = attempts[-1] if len(attempts) > attempts_before else None
    failure = run.read_failure()
    if status < 0:
        say(f"{by} was killed by {signal.Signals(-status).name}, and its ranks with it")
        return 128 - status
    if attempt is None or attempt.status is None:  # an agent that could not start the ranks, or record the end, has printed why
        if status > 128 and not asked:
            when = "before any rank started" if attempt is None else "and did not record the outcome of the run"
            say(f"{by} exited with status {status} {when}; the reason is in the lines above")
        elif status == 127 and attempt is None and by != "the agent":
            say(f"{by} was not found: the line above names the command; to use this machine alone (in a container): --on local")
        return status
    if failure is not None:
        _say_failure(run, failure, config)
    elif status in (EXIT_PREEMPTED, EXIT_INTERRUPTED) and attempt.outcome.startswith("stopped"):
        say(f"{attempt.outcome}; to resume, {caller.how_to_continue(_resume_command(config))}")
    elif status != 0 or (";" in attempt.outcome and caller.reads):
        say(attempt.outcome)
        if attempt.outcome.startswith("killed") and run.saved():
            _say_saved(run, config)
    return status


def _say_saved(run: RunDir, config: RunConfig) -> None:
    """The newest checkpoint, and how to resume from it."""
    saved, caller = run.saved(), caller_of(config.words)
    say(f"saved: {saved[-1]}; to resume, {caller.how_to_continue(_resume_command(config))}" if saved else
        f"nothing was saved yet: the same {caller.again} starts from the beginning")  # fmt: skip


def _say_failure(run: RunDir, failure: Failure, config: RunConfig) -> None:
    _show("")
    caller = caller_of(config.words)
    if failure.traceback is not None:
        if not _is_in_summary(failure) and caller.reads:
            _show(_limited(printable(shortened(failure.traceback.rstrip("\n"))), failure.log))
    elif failure.log is not None and failure.rank != 0 and (failure.exit_code or failure.signal):  # the log of rank 0 is above
        _show(_last_lines(run.log_tail(failure.rank, _LOG_TAIL_BYTES)), end="")
    if (hint := _misplaced(run, failure, config)) is not None:
        say(hint)
    say(f"{failure.summary}, on {failure.host}")
    log = Path(failure.log or "")
    where = short(log) if log.exists() else f"{log} on {failure.host}"  # the log is in a folder that only that host sees
    say(f"its output is in {where}; exit status {failure.exit_status}")
    if failure.step is not None:
        _say_saved(run, config)


def _misplaced(run: RunDir, failure: Failure, config: RunConfig) -> str | None:
    """A hint if the script has failed because of options of rankwise after its name: the command with the options in front."""
    ours, rest = misplaced(config.argv[1:], schedulers.options())
    names = [word.partition("=")[0] for word in ours if word.startswith("--")]
    said = (failure.traceback or "") + run.log_tail(failure.rank, _LOG_TAIL_BYTES).decode(errors="replace")
    if config.command or not caller_of(config.words).reads or not any(name in said for name in names):
        return None
    meant = typed("run", *ours, *_options(config), config.argv[0], *rest)
    are = "is an option" if len(names) == 1 else "are options"
    return f"{' and '.join(names)} after {config.argv[0]} {are} of the script; for rankwise, type: {meant}"


def _is_in_summary(failure: Failure) -> bool:
    """Whether the summary contains all of the traceback: for an error of rankwise, if it is one line and a place."""
    first, _, place = (failure.traceback or "").rstrip("\n").partition("\n")
    return first.startswith("error: ") and first.removeprefix("error: ") in failure.summary and "\n" not in place


def _last_lines(log: bytes, most: int = 5) -> str:
    """The last lines of a log: they often show why a rank exited without an exception. Of a crash, its innermost frames."""
    text = log.decode(errors="replace")
    if not text.strip():
        return ""
    crash = _CRASH.search(text)
    # Of a progress bar, which returns to the start of its line, only what was visible last.
    last = [line.rstrip("\r").rpartition("\r")[2] for line in text.rstrip("\n").split("\n")[-most:]]
    lines = [crash[1], *crash[2].splitlines()[:most]] if crash is not None else last
    return "".join(f"  {cut(printable(line), _LONGEST_LINE)}\n" for line in lines)


def _limited(traceback: str, log: str | None) -> str:
    """A message may have megabytes: its beginning and its end, and how much is missing, so that the last lines stay on the
    screen."""
    lines = [cut(line, _LONGEST_LINE) for line in traceback.split("\n")]
    if len(lines) > _MOST_LINES:
        half = _MOST_LINES // 2
        lines[half:-half] = [f"... {len(lines) - 2 * half} lines, which are in {log}"]
    return "\n".join(lines)


def _resume_command(config: RunConfig) -> str:
    """The same command, without --fresh."""
    return typed("run", *_options(config), *config.argv)


def _options(config: RunConfig) -> list[str]:
    """The words of the command that give these settings, up to the script."""
    words: list[str] = []
    own = {field.name: field.default for field in fields(config) if field.name not in ("argv", "job", "site")}
    own = {name: getattr(config, name) for name, default in own.items() if getattr(config, name) != default}
    given = {option(name): value for name, value in own.items() if name not in ("module", "command", "fresh")}
    for name, value in {**given, **{schedulers.options()[name].typed: value for name, value in config.job.items()}}.items():
        for each in value if isinstance(value, tuple) else (value,):
            if each is True:
                words.append(name)
            elif name.startswith("--") and str(each).startswith("-"):  # with "=", so that the value is not taken as an option
                words.append(f"{name}={each}")
            else:
                words += [name, f"{each:g}" if isinstance(each, float) else str(each)]
    return words + (["-m"] if config.module else ["--"] if config.command else [])


def say(text: str) -> None:
    """Print a message for the person who started the run, on stderr; stdout is for output that programs read."""
    _show(message(text))


def _show(text: str, end: str = "\n") -> None:
    with contextlib.suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)
