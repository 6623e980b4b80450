"""An exception of a rank in one line: the user's own error, names instead of numbers, and what to type.

told = reword(record, rank=1, script="pkg/train.py");  told.exception, told.where, told.remark

exception_record.py writes `record`. Pure: this module reads the record, nothing else.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rankwise.host.stack_text import FROM_ELSEWHERE, is_of_a_collective, is_the_users, unescaped
from rankwise.host.terminal import typed
from rankwise.host.text import count, listed

_IN_WORKER = re.compile(r"Caught \w+ in DataLoader worker process (\d+)\.")
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in ', re.MULTILINE)
_CALL = re.compile(r'^  File "(.+)", line \d+, in (\w+)$', re.MULTILINE)
_UNUSED = re.compile(r"Parameter(?:s| indices) which did not receive grad for rank \d+: (.+)")
_COUNTS = re.compile(
    r"DDP expects same model across all ranks, but Rank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+)"
)
_SIZES = re.compile(r"params\[(\d+)\] in this process with sizes (\[.*?\]) appears not to match")
_IN_SPAWNED = re.compile(r"-- Process (\d+) terminated with the following error:\n")
_REMOTE = re.compile(r'RemoteTraceback: ?\n"""\n(.*?)"""\n', re.DOTALL)
_SIZES_OF_GLOO = re.compile(r"op\.preamble\.length <= op\.nbytes\. (\d+) vs (\d+)")
_IN_MEMORY = re.compile(r"waited for it in (\w+) \(Connection closed")
_OF_STACK = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_THREAD = re.compile(r"^(Current thread|Thread) .*\n((?:  File .*\n)+)", re.MULTILINE)
_NO_DEVICE = re.compile("invalid device ordinal|Invalid device id")
_ON_MAIN = "raised on the main rank"  # of an error of rankwise, which all ranks then raise
_MOST_NAMES = 4
_LONGEST_NOTE = 120


@dataclass(frozen=True)
class ExceptionText:
    """An exception as the final message prints it."""

    exception: str
    """`Type: message`."""

    where: str | None
    """The line of the script, `train.py:61`, and which process raised it."""

    remark: str | None = None
    """What it means or what to do."""


def collective_of(traceback: str) -> str | None:
    """The collective in which an exception was raised. Errors of rankwise have no frames, but name it."""
    found = [name for file, name in _CALL.findall(traceback) if is_of_a_collective(file, name)]
    return found[-1] if found else next(iter(_IN_MEMORY.findall(traceback)), None)


def of_abort(log: str, checked: bool) -> str | None:
    """What a C++ library printed before it aborted the process, from the end of its log; None if it printed nothing. `checked`
    as in `reword`."""
    said = re.findall(r"what\(\): *(.+)", log)
    if not said:
        return None
    sizes = _SIZES_OF_GLOO.search(said[-1])
    if sizes is None:
        return str(said[-1]).strip()
    calls = [name for file, _, name in _stack_of(log) if is_of_a_collective(file, name)]
    where = f"in {calls[-1] if calls else 'a collective'}"
    return f"{where} it received {sizes[1]} bytes but expected {sizes[2]}: {_of_sizes(checked)}"


def line_of_crash(log: str) -> str | None:
    """`train.py:26`: the user's innermost line when a signal ended the process, from the end of its log."""
    return next((f"{Path(file).name}:{line}" for file, line, _ in _stack_of(log) if is_the_users(file)), None)


def _stack_of(log: str) -> list[tuple[str, str, str]]:
    """(file, line, function) of each frame that Python's fault handler printed, the innermost first. The thread that crashed
    may be one of a library: then those of the main thread, which is printed last."""
    threads = _THREAD.findall("".join(log.split("Fatal Python error")[1:][-1:]))
    stacks = [stack for title, stack in threads if title == "Current thread"] or [stack for _, stack in threads]
    return _OF_STACK.findall(unescaped(stacks[-1])) if stacks else []


def _of_sizes(checked: bool) -> str:
    what = "the tensors of the ranks differ in shape or dtype, or the ranks are in different collectives"
    if checked:
        return f"{what}; --check-collectives found no difference, but it does not compare sends and receives"
    return f"{what}; rankwise run --check-collectives shows which ranks, with their shapes and lines"


def reword(record: Mapping[str, Any], rank: int, script: str, together: int = 1, checked: bool = False) -> ExceptionText:
    """`script`: what the ranks run, as the user typed it. `together`: how many ranks its agent has, which all see the same
    devices. `checked`: whether --check-collectives is on."""
    message = str(record["message"]).strip()
    told = ExceptionText(f"{record['type']}: {message}" if message else record["type"], record.get("where"), _note(record))
    if found := _IN_WORKER.search(message):
        return _of_another_process(told, message, f"in loader worker {found[1]}")
    if found := FROM_ELSEWHERE.match(message):
        return _of_another_process(told, message, found[1])
    if found := _IN_SPAWNED.search(message):
        return _of_another_process(told, message, f"in process {found[1]}, which the script spawned")
    if found := _REMOTE.search(str(record.get("traceback") or "")):
        return replace(told, where=_within(found[1], "in a process of its pool"))
    if _SIZES_OF_GLOO.search(message):
        return replace(told, remark=_of_sizes(checked))
    names = record.get("parameters") or {}
    if found := _UNUSED.search(message):
        return _unused(told, found[1].strip(), names)
    if found := _SIZES.search(message):
        name = names.get(found[1], f"number {found[1]}")
        return replace(
            told,
            exception=f"{record['type']}: its model differs from that of rank 0: parameter {name} has shape {found[2]} here",
        )
    if "attempted relative import with no known parent package" in message:
        return replace(told, remark=f"the script belongs to a package; type `{_as_module(script)}`")
    if record["type"] == "EOFError" and rank > 0 and "reading a line" in message:
        return replace(told, remark="only rank 0 can read from the terminal: ask on rank 0, and broadcast the answer")
    if _NO_DEVICE.search(message):
        return replace(told, remark=_of_devices(record.get("visible"), record.get("local_rank"), together))
    if (shortage := record.get("shortage")) is not None:
        return replace(told, remark=shortage)
    traceback = str(record.get("traceback") or "")
    if found := FROM_ELSEWHERE.search(traceback):  # in a note
        return replace(told, where=_within(traceback[found.end() :], found[1]))
    return told


def parameter_counts(exceptions: Mapping[int, str]) -> dict[int, int]:
    """By rank, the number of parameters of its model, if DDP found that they differ; empty for any other error."""
    counts = {}
    for exception in exceptions.values():
        if found := _COUNTS.search(exception):
            counts.update({int(found[1]): int(found[2]), int(found[3]): int(found[4])})
    return counts


def is_short_of_memory(exception: str) -> bool:
    """Whether the host ran out of memory (not a GPU)."""
    return exception.startswith("MemoryError") or "can't allocate memory" in exception or "Cannot allocate memory" in exception


def _note(record: Mapping[str, Any]) -> str | None:
    """The first line of the exception's first note (PEP 678), for example the sample; if the note is a traceback, with the line
    that raised."""
    notes = [str(note) for note in record.get("notes") or () if str(note).strip()]
    if not notes:
        return None
    first = notes[0].strip().splitlines()[0]
    if (place := _place(notes[0])) is not None:
        return f"{first.rstrip(':')} ({place})"
    return first[:_LONGEST_NOTE].rstrip(":") if first.rstrip(":") != _ON_MAIN else None


def _of_another_process(told: ExceptionText, message: str, where: str) -> ExceptionText:
    """Reword an exception of another process (a loader worker, a spawned process, another rank): it comes as an exception whose
    message is the traceback of that process."""
    lines = message.rpartition("Traceback (most recent call last):\n")[2].splitlines()
    last_of_frames = max((i for i, line in enumerate(lines) if line.startswith(" ")), default=-1)
    said = [line for line in lines[last_of_frames + 1 :] if line]
    return ExceptionText(
        "\n".join(said) or told.exception,
        _within("\n".join(lines), where),
        said[1][:_LONGEST_NOTE] if len(said) == 2 else told.remark,
    )


def _place(traceback: str) -> str | None:
    """`data.py:6`: the innermost line of the user's code."""
    own = [f"{Path(file).name}:{line}" for file, line in _FRAME.findall(traceback) if is_the_users(file)]
    return own[-1] if own else None


def _within(traceback: str, where: str) -> str:
    """`data.py:6, in loader worker 1`."""
    place = _place(traceback)
    return f"{place}, {where}" if place is not None else where


def _unused(told: ExceptionText, unused: str, names: Mapping[str, str]) -> ExceptionText:
    """`unused`: torch's list of parameters, by number, or by name with TORCH_DISTRIBUTED_DEBUG."""
    words = re.split(r"[, ]+", unused)
    found = [names.get(word, f"number {word}" if word.isdecimal() else word) for word in words]
    return replace(
        told,
        exception=f"{told.exception.partition(':')[0]}: the last loss did not use {listed(found, _MOST_NAMES)}",
        remark="DDP waits for every gradient; if this is intended, pass find_unused_parameters=True to DDP",
    )


def _of_devices(visible: str | None, local_rank: str | None, together: int) -> str:
    """`visible`: the rank's CUDA_VISIBLE_DEVICES."""
    visible_gpus = len(visible.split(",")) if visible else None
    sees = "fewer GPUs than that" if visible_gpus is None else f"{count(visible_gpus, 'GPU')} (CUDA_VISIBLE_DEVICES={visible})"
    if visible_gpus == 1 and together == 1:
        return (
            f"this rank sees {sees}, so the index is 0 whatever LOCAL_RANK is (here {local_rank or 'not set'}); use "
            "rankwise.local_device(world), or cuda:0 if torch.cuda.device_count() is 1; or start one task per node, with all "
            "its GPUs"
        )
    cure = f": type --nproc {visible_gpus}" if visible_gpus is not None and visible_gpus < together else ""
    return f"LOCAL_RANK is {local_rank or 'not set'}, and this rank sees {sees}{cure}"


def _as_module(script: str) -> str:
    """The command that runs a script as the module of its package."""
    path = Path(os.path.abspath(script))
    folder, names = path.parent.parent, [path.parent.name, path.stem]
    while (folder / "__init__.py").exists():
        folder, names = folder.parent, [folder.name, *names]
    command = typed("run", "-m", ".".join(names))
    return command if folder == Path.cwd() else f"cd {shlex.quote(str(folder))} && {command}"
