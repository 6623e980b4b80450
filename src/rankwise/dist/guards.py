"""Run work on some ranks only, without deadlocks: every rank gets the value or the exception.

    vocabulary = run_on_main(build_vocabulary, args=["corpus.txt"])
    run_once_per_node(unpack, args=["data.tar", "/tmp/data"])

All ranks call a guard. If the function raises where it runs, every rank raises at once, with that traceback. The other ranks
wait as long as the function takes. Inside a guarded function the rank is alone: another guard calls its function directly, and
collectives behave as on one rank.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from rankwise.dist import comm
from rankwise.errors import MainProcessError
from rankwise.host.arguments import FLAG, FUNCTION, MAPPING, PATH, SEQUENCE, takes
from rankwise.ipc.pickles import pack_error, unpack_error

P = ParamSpec("P")
R = TypeVar("R")


_OF_A_GUARD: dict[str, Any] = {
    "func": FUNCTION, "args": SEQUENCE.or_none, "kwargs": MAPPING.or_none, "post_func": FUNCTION.or_none,
    "post_args": SEQUENCE.or_none, "post_kwargs": MAPPING.or_none, "run_post_on_main": FLAG,
}  # fmt: skip


@takes(**_OF_A_GUARD)
def run_on_main(
    func: Callable[..., R],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    post_func: Callable[..., Any] | None = None,
    post_args: Sequence[Any] | None = None,
    post_kwargs: Mapping[str, Any] | None = None,
    run_post_on_main: bool = False,
) -> R:
    """Collective. Call `func` on the main rank; return its value, or raise its exception, on every rank.

    Then call `post_func` on the other ranks (with `run_post_on_main` on the main rank too), for example to load what `func`
    wrote. If it raises on any rank, all ranks raise. Every rank raises the same type of exception: the original, with the
    traceback of the rank that raised it as a note, if it can be pickled; otherwise MainProcessError with that traceback.
    """
    work = functools.partial(func, *(args or ()), **(kwargs or {}))
    post = functools.partial(post_func, *(post_args or ()), **(post_kwargs or {})) if post_func is not None else None
    groups = None if comm.is_alone() else [list(range(comm.world_size()))]
    return _guarded(groups, work, post, run_post_on_main)


@takes(**_OF_A_GUARD, if_not_shared=PATH.or_none)
def run_once_per_node(
    func: Callable[..., R],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    post_func: Callable[..., Any] | None = None,
    post_args: Sequence[Any] | None = None,
    post_kwargs: Mapping[str, Any] | None = None,
    run_post_on_main: bool = False,
    if_not_shared: str | os.PathLike[str] | None = None,
) -> R:
    """Collective. Call `func` on the first rank of each node; return its value on the ranks of that node.

    For what every host needs, such as unpacking to a local disk or building an extension. `if_not_shared`: the path that `func`
    writes to; nodes that share this path call `func` only once. Everything else is as in `run_on_main`, with the first rank of
    a node instead of the main rank. An exception on any node is raised on every rank of every node (if several ranks raise,
    that of the lowest rank). A node is never more than one host, even if the launcher does not number the nodes. The value is
    also sent to the other nodes, so return a path and not the data.
    """
    work = functools.partial(func, *(args or ()), **(kwargs or {}))
    post = functools.partial(post_func, *(post_args or ()), **(post_kwargs or {})) if post_func is not None else None
    groups = None if comm.is_alone() else comm.nodes()
    if groups is not None and if_not_shared is not None:
        groups = _with_one_place(groups, Path(if_not_shared).absolute())
    return _guarded(groups, work, post, run_post_on_main)


def _with_one_place(nodes: Sequence[Sequence[int]], place: Path) -> list[list[int]]:
    """Collective. The ranks of these nodes, grouped by the file system that they see at `place`, which need not exist.

    The first rank of each node creates an empty file at `place`, or in the nearest folder above it that exists, and looks for
    the files of the others.
    """
    waiting = comm.patient()  # a network file system may be slow
    is_first = any(node[0] == comm.rank() for node in nodes)
    folder = next((path for path in (place, *place.parents) if path.is_dir()), place)
    mark = f".rankwise-{uuid.uuid4().hex}"  # a new name: a network file system may remember that an old name did not exist
    try:
        if is_first:
            with contextlib.suppress(OSError):
                (folder / mark).touch()
        marks = comm.all_gather_object(mark, waiting)
        seen = [number for number, node in enumerate(nodes) if is_first and (folder / marks[node[0]]).exists()]
        told = comm.all_gather_object(seen, waiting)
    finally:
        if is_first:
            with contextlib.suppress(OSError):
                (folder / mark).unlink()
    together: dict[int, list[int]] = {}
    for number, node in enumerate(nodes):
        together.setdefault(min(told[node[0]], default=number), []).extend(node)
    return list(together.values())


def run_on_firsts(groups: Sequence[Sequence[int]], func: Callable[[], R]) -> R:
    """Collective. Call `func` on the first rank of each group; return its value on the ranks of that group. Each rank is in one
    group. Everything else is as in `run_once_per_node`."""
    return _guarded(None if comm.is_alone() else [list(ranks) for ranks in groups], func, None, False)


def main_process_only(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: each call is `run_on_main`."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return run_on_main(func, args, kwargs)

    return wrapper


def once_per_node(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: each call is `run_once_per_node`."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return run_once_per_node(func, args, kwargs)

    return wrapper


def _guarded(groups: list[list[int]] | None, work: Callable[[], R], post: Callable[[], Any] | None, on_first: bool) -> R:
    """Collective. Run `work` on the first rank of each group; return its value on all ranks of the group. None: this rank is
    alone."""
    value: Any = None
    packed, error = b"", None
    if groups is None:
        value = work()
        if post is not None and on_first:
            post()
        return value  # type: ignore[no-any-return]
    me = comm.rank()
    first = any(group[0] == me for group in groups)
    waiting = comm.patient()
    if first:
        value, packed, error = _attempt(work)
    settle(error, waiting)  # before the value is sent, so that no rank waits for a value that never comes
    for group in groups:
        sent = comm.broadcast_object(packed, group[0], waiting)
        if me in group:
            packed = sent
    error = None
    try:
        if not first:
            value = _loaded(packed)
        if post is not None and (on_first or not first):
            with comm.alone():
                post()
    except BaseException as problem:  # whatever was raised, the other ranks wait for it
        error = problem
    settle(error, waiting)
    return value  # type: ignore[no-any-return]


def _attempt(work: Callable[[], Any]) -> tuple[Any, bytes, BaseException | None]:
    """(value, the pickled value, None), or (None, nothing, the exception)."""
    try:
        with comm.alone():
            value = work()
        try:
            return value, pickle.dumps(value), None
        except BaseException as error:  # pickle raises whatever a class of the user raises
            raise MainProcessError(
                f"what the function returned ({type(value).__name__}) cannot be pickled for the other ranks: "
                f"{type(error).__name__}: {error}"
            ) from error
    except BaseException as error:  # whatever was raised, the other ranks wait for it
        return None, b"", error


def _loaded(packed: bytes) -> Any:
    try:
        return pickle.loads(packed)
    except BaseException as error:
        raise MainProcessError(
            f"rank {comm.rank()} cannot unpickle what the function returned: {type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def agreed() -> Iterator[None]:
    """Collective. If the block raises on one rank, all ranks raise this error when they leave the block; they wait for each
    other."""
    group = comm.patient()  # before the work, because creating it has a time limit
    error: BaseException | None = None
    try:
        yield
    except BaseException as problem:
        error = problem
    settle(error, group)


def settle(error: BaseException | None, group: Any = None) -> None:
    """Collective. If any rank has an error, all ranks raise that of the lowest rank. `group`: None, or `comm.patient()`."""
    if comm.is_alone():
        if error is not None:
            raise error
        return
    told = comm.all_gather_object(None if error is None else pack_error(error), group)
    rank, packed = next(((r, p) for r, p in enumerate(told) if p is not None), (-1, None))
    if packed is None:
        return
    if rank == comm.rank() and packed[0] is not None and error is not None:
        raise error
    raise unpack_error(packed, "on the main rank" if rank == 0 else f"on rank {rank}", MainProcessError) from error
