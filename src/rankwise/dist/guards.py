"""Work that only some ranks do, without dead-locks: the value or the exception reaches every rank.

    vocabulary = run_on_main(build_vocabulary, args=["corpus.txt"])
    run_once_per_node(unpack, args=["data.tar", "/tmp/data"])

A guard is called by all ranks. If the function raises where it runs, every rank raises, at once, with its traceback; the
others wait for it as long as it takes. Within a guarded function its rank is alone: another guard calls its function right
there, and collectives answer as on one rank.
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

    Then `post_func`, on the other ranks (and on the main rank too with `run_post_on_main`): for loading what `func` wrote; if
    it raises on any rank, all raise. The exception is of the same type on every rank: the original, with the traceback of the
    rank that raised it as a note, where it survives a pickle; MainProcessError with that traceback otherwise.
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

    For what every host needs for itself: unpacking onto a local disk, building an extension. `if_not_shared`: where `func`
    writes; nodes that have this place in common call it once together. The rest is as in `run_on_main`, with a node's first
    rank instead of the main rank; an exception on any node is raised on every rank of every node (of several the lowest
    rank's). A node is what `comm.nodes` says: never more than one host, also where the launcher numbers no nodes. The value
    travels to the other nodes too: return a path rather than the data.
    """
    work = functools.partial(func, *(args or ()), **(kwargs or {}))
    post = functools.partial(post_func, *(post_args or ()), **(post_kwargs or {})) if post_func is not None else None
    groups = None if comm.is_alone() else comm.nodes()
    if groups is not None and if_not_shared is not None:
        groups = _with_one_place(groups, Path(if_not_shared).absolute())
    return _guarded(groups, work, post, run_post_on_main)


def _with_one_place(nodes: Sequence[Sequence[int]], place: Path) -> list[list[int]]:
    """Collective. The ranks of these nodes, those together that see the same file system at `place`, which need not be there.

    The first rank of each node puts an empty file there, or in the nearest folder above, and looks for those of the others.
    """
    waiting = comm.patient()  # a network file system may be slow
    is_first = any(node[0] == comm.rank() for node in nodes)
    folder = next((path for path in (place, *place.parents) if path.is_dir()), place)
    mark = (
        f".rankwise-{uuid.uuid4().hex}"  # a name that nobody has looked for yet: a network file system may not know it as gone
    )
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
    """Collective. Call `func` on the first rank of each group, which have each rank once; return its value on the ranks of that
    group. The rest is as in `run_once_per_node`."""
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
    """Collective. `work` on the first rank of each group (None: this rank is alone), its value on all ranks of the group."""
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
    settle(error, waiting)  # the first message of all: nobody is told to expect a value that there is not
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
    except BaseException as problem:  # whatever it is, the other ranks wait
        error = problem
    settle(error, waiting)
    return value  # type: ignore[no-any-return]


def _attempt(work: Callable[[], Any]) -> tuple[Any, bytes, BaseException | None]:
    """(value, the value pickled, None) or (None, nothing, what was raised)."""
    try:
        with comm.alone():
            value = work()
        try:
            return value, pickle.dumps(value), None
        except BaseException as error:  # pickle raises whatever a class of the user's raises
            raise MainProcessError(
                f"what the function returned ({type(value).__name__}) cannot be pickled for the other ranks: "
                f"{type(error).__name__}: {error}"
            ) from error
    except BaseException as error:  # whatever it is, the other ranks wait for it
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
    """Collective. What the block raises on one rank, all raise after it, however long the others have to wait."""
    group = comm.patient()  # made before the work: to make it is bounded
    error: BaseException | None = None
    try:
        yield
    except BaseException as problem:
        error = problem
    settle(error, group)


def settle(error: BaseException | None, group: Any = None) -> None:
    """Collective. If any rank has an error, all ranks raise the lowest rank's. `group`: None, or `comm.patient()`."""
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
