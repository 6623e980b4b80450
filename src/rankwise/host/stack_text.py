"""The text of a traceback, without the frames that do not help its reader.

print(shortened(traceback))
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from rankwise.host.text import count

_OURS = f"{Path(__file__).parents[1]}/"
_FRAME = re.compile(r'^  File "(.+)", line \d+, in .+\n(?:    .*\n)*', re.MULTILINE)
_ESCAPED = re.compile(r"\\(?:x([0-9a-f]{2})|u(?!d[89a-f])([0-9a-f]{4})|U([0-9a-f]{8}))")  # but no halves of a pair
_BEGIN = "Traceback (most recent call last):\n"
FROM_ELSEWHERE = re.compile(rf"raised (on [^\n]+|in a loader worker):\n{re.escape(_BEGIN)}")
"""Before the traceback of another process, in the message or a note of an exception that it has sent (ipc/pickles.py)."""
_DIED = "RuntimeError: DataLoader worker (pid"
_STACK = re.compile(r'(?:^  File ".+", line \d+, in .+\n(?:    .*\n)*)+', re.MULTILINE)


def unescaped(dump: str) -> str:
    """What Python's fault handler printed, with the names of files and functions as they are: it writes é as \\xe9."""
    return _ESCAPED.sub(lambda found: chr(int(found[1] or found[2] or found[3], 16)), dump)


def is_the_users(file: str) -> bool:
    """Whether the file is neither rankwise's nor that of a library."""
    return not any(part in file for part in ("/site-packages/", "/lib/python", "<frozen", _OURS))


def is_in_collectives(file: str) -> bool:
    """Whether this is a file of torch's collectives, or of those in memory that ranks share."""
    return "/torch/distributed/" in file or file.endswith("/rankwise/dist/shared_memory.py")


def is_of_a_collective(file: str, function: str) -> bool:
    """Whether this is a function that a script or rankwise calls, not one inside of it."""
    return is_in_collectives(file) and function != "wrapper" and not function.startswith("_")


def shortened(traceback: str) -> str:
    """The frames of rankwise above a frame of the user's code become one line each time. Those below the last such frame
    remain: the error comes from there. If it comes from another process, whose traceback or end follows, they do not."""
    return _STACK.sub(lambda stack: _without_ours(stack[0], _is_from_elsewhere(traceback, stack.end())), traceback)


def _is_from_elsewhere(traceback: str, end: int) -> bool:
    """Whether the error below the frames that end here is the traceback of another process, or tells that one has died."""
    if traceback.startswith(_DIED, end):
        return True
    found = FROM_ELSEWHERE.search(traceback, end)
    return found is not None and _BEGIN not in traceback[end : found.start()]


def _without_ours(stack: str, is_from_elsewhere: bool) -> str:
    frames = [(frame[0], frame[1]) for frame in _FRAME.finditer(stack)]
    last = max((number for number, (_, file) in enumerate(frames) if is_the_users(file)), default=0)
    last = len(frames) if is_from_elsewhere else last
    shown: list[str] = []
    for hidden, group in itertools.groupby(enumerate(frames), lambda item: item[0] < last and item[1][1].startswith(_OURS)):
        texts = [text for _, (text, _) in group]
        shown += [f"  ... {count(len(texts), 'frame')} in rankwise\n"] if hidden else texts
    return "".join(shown)
