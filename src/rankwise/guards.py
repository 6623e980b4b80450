"""Work that only some ranks do, without dead-locks: the value or the exception reaches every rank.

    vocabulary = run_on_main(build_vocabulary, args=["corpus.txt"])

A guard is called by all ranks. If the function raises on the main rank, every rank raises, at once, with its traceback.
"""

from __future__ import annotations

import functools
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from rankwise import comm
from rankwise.errors import MainProcessError

P = ParamSpec("P")
R = TypeVar("R")

_inside = False  # a guard within a guarded function runs on this rank alone: the others are not there to answer


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

    Then `post_func`, on the other ranks (and on the main rank too with `run_post_on_main`): for loading what `func` wrote.
    The exception is the original where it survives a pickle, MainProcessError with main's traceback otherwise.
    """
    global _inside
    if _inside:
        return func(*(args or ()), **(kwargs or {}))
    answer: tuple[bool, Any, str] = (True, None, "")
    if comm.rank() == 0:
        _inside = True
        try:
            answer = (True, func(*(args or ()), **(kwargs or {})), "")
        except BaseException as error:  # whatever it is, the other ranks wait for it
            answer = (False, error, traceback.format_exc())
        finally:
            _inside = False
    answer = _to_all(answer)
    value = _value_of(answer)
    if post_func is not None:
        here = run_post_on_main or comm.rank() != 0
        _everywhere(functools.partial(post_func, *(post_args or ()), **(post_kwargs or {})) if here else None)
    return value  # type: ignore[no-any-return]


def _everywhere(work: Callable[[], Any] | None) -> None:
    """Collective. Do the work (or none); if it raises on any rank, all ranks raise: that rank its own, the others its text."""
    error: BaseException | None = None
    text = ""
    try:
        if work is not None:
            work()
    except BaseException as problem:  # whatever it is, the other ranks wait
        error, text = problem, traceback.format_exc()
    texts = comm.all_gather_object(text)
    if error is not None:
        raise error
    for rank, other in enumerate(texts):
        if other:
            raise MainProcessError(f"the function that follows raised on rank {rank}:\n{other}")


def _to_all(answer: tuple[bool, Any, str]) -> tuple[bool, Any, str]:
    if comm.world_size() == 1:
        return answer
    ok, value, text = answer
    if comm.rank() == 0 and not _survives_pickle(value):
        if ok:
            text = f"run_on_main: what the function returned ({type(value).__name__}) cannot be pickled for the other ranks"
        answer = (False, MainProcessError(text), text)
    answer = comm.broadcast_object(answer)
    if comm.rank() != 0 and not answer[0] and not isinstance(answer[1], MainProcessError):
        answer[1].add_note(f"raised on the main rank:\n{answer[2]}")
    return answer


def _value_of(answer: tuple[bool, Any, str]) -> Any:
    ok, value, _ = answer
    if not ok:
        raise value
    return value


def _survives_pickle(value: Any) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(value))) is type(value)
    except Exception:  # pickle raises whatever a class of the user's raises
        return False


def main_process_only(func: Callable[P, R]) -> Callable[P, R]:
    """Decorator: each call is `run_on_main`."""

    @functools.wraps(func)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        return run_on_main(func, args, kwargs)

    return wrapper
