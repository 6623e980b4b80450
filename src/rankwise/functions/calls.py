"""A function call that is sent to the ranks, and their results; both are files in the run directory of this user.

data = pack(fn, args, kwargs);  call = load(path, rank)          # caller, rank
data = answer(value, rank);     value = understand(data, ...)    # rank, caller
"""

from __future__ import annotations

import functools
import inspect
import json
import linecache
import pickle
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

from rankwise.errors import ConfigError, FunctionError
from rankwise.ipc import pickles
from rankwise.stop import early

_VALUE, _ERROR = "value", "error"


def pack(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The call as bytes: a line of JSON, which a rank reads before it unpickles anything, then the pickle of (fn, args,
    kwargs).

    The line has what Python needs to find the function's modules, and the function's source if it is in no file (a notebook).
    Raises ConfigError, which names what cannot be sent.
    """
    given: Any = fn
    if not callable(given):
        raise ConfigError(f"fn={given!r:.60}: give the function itself, not what it returns: run_function(train, (0.1,))")
    if isinstance(args, str) or not hasattr(args, "__iter__"):
        raise ConfigError(f"args={args!r}: give the arguments as a tuple: ({args!r},)")
    parts = (fn, tuple(args), dict(kwargs))
    try:
        pickled = pickles.dumps(parts)
    except pickles.NotPortableError as whole:
        raise ConfigError(_blame(fn, args, kwargs, str(whole))) from None
    file = _file_of(fn)
    lines = [] if file is None or Path(file).is_file() else linecache.getlines(file)
    header = {"path": [str(Path(entry).absolute()) for entry in sys.path], "file": file, "lines": lines}
    return json.dumps(header).encode() + b"\n" + pickled


def _blame(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], otherwise: str) -> str:
    """Which part of the call cannot be sent, and why."""
    parts = [(f"the function {name_of(fn)}", fn)]
    parts += [(f"args[{i}] ({_kind(value)})", value) for i, value in enumerate(args)]
    parts += [(f"kwargs[{name!r}] ({_kind(value)})", value) for name, value in kwargs.items()]
    for called, value in parts:
        try:
            pickles.dumps(value)
        except pickles.NotPortableError as error:
            return f"{called} cannot be sent to the ranks: {error}"
    return f"this call of {name_of(fn)} cannot be sent to the ranks: {otherwise}"


def _kind(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"


def name_of(fn: Callable[..., Any]) -> str:
    """The function's name for people: `train`, `digits.train`."""
    inner = _inner(fn)
    name = str(getattr(inner, "__qualname__", type(inner).__qualname__)).rpartition("<locals>.")[2]
    module = getattr(inner, "__module__", None)
    return name if module in (None, "__main__", "builtins") else f"{module}.{name}"


def _inner(fn: Callable[..., Any]) -> Any:
    """The user's own function, inside decorators and partials."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return inspect.unwrap(fn)


def _file_of(fn: Callable[..., Any]) -> str | None:
    inner = _inner(fn)
    function = getattr(inner, "__func__", inner)
    function = function if hasattr(function, "__code__") else type(inner).__call__
    code = getattr(function, "__code__", None)
    return code.co_filename if isinstance(code, CodeType) else None


def load(path: Path) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """In a rank: read the call, and give Python the caller's path; the function's file now counts as the script.

    From here on a request to stop is remembered, if that file names a Trainer or a StopSignal (stop/early.py).
    """
    try:
        data = pickles.read(path)
    except FileNotFoundError:
        raise FunctionError(
            f"there is no {path} on {platform.node()}: a function needs a run directory that all hosts see; "
            'name one: run_dir="/a/shared/folder"'
        ) from None
    line, _, pickled = data.partition(b"\n")
    header = json.loads(line)
    sys.path[:] = [*header["path"], *(entry for entry in sys.path if entry not in header["path"])]
    if header["file"] is not None:
        sys.modules["__main__"].__file__ = header["file"]  # error messages look here for the user's line
    if header["lines"]:
        text = "".join(header["lines"])
        linecache.cache[header["file"]] = (len(text), None, header["lines"], header["file"])
    if header["file"] is not None:
        early.listen(header["file"])
    fn, args, kwargs = pickle.loads(pickled)
    return fn, args, kwargs


# --- the answer of a rank


def answer(value: Any, rank: int) -> bytes:
    """The bytes of a result. Raises FunctionError if it cannot be sent back."""
    try:
        return pickle.dumps((_VALUE, pickles.dumps(value)))
    except pickles.NotPortableError as error:
        raise FunctionError(
            f"rank {rank} returned a {_kind(value)}, which cannot be sent back: {error}; return what it is made of: "
            "numbers, lists, dicts, tensors"
        ) from None


def answer_error(error: BaseException) -> bytes:
    return pickle.dumps((_ERROR, pickles.pack_error(error, pickles.dumps)))


def understand(path: Path, rank: int) -> Any:
    """In the caller: what the function returned on a rank; deletes the file. Raises FunctionError if there is none."""
    kind, content = _taken(path) or (None, None)
    if kind != _VALUE or content is None:
        raise FunctionError(
            f"rank {rank} exited without returning anything (did the function call sys.exit or os._exit?): {path} is missing"
        )
    try:
        return pickle.loads(content)
    except Exception as error:
        raise FunctionError(
            f"what rank {rank} returned cannot be unpickled here: {type(error).__name__}: {error}"
        ) from error  # fmt: skip


def understand_error(path: Path, rank: int, host: str) -> BaseException | None:
    """What the function raised on a rank, with that rank's traceback as a note; None if the rank left nothing."""
    kind, content = _taken(path) or (None, None)
    if kind != _ERROR or content is None:
        return None
    return pickles.unpack_error(content, f"on rank {rank}, on {host}", FunctionError)


def _taken(path: Path) -> tuple[str, Any] | None:
    try:
        data = pickles.take(path)
    except FileNotFoundError:
        return None
    kind, content = pickle.loads(data)
    return kind, content
