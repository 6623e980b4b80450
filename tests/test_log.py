"""Lines that know their rank, and errors without a traceback."""

from __future__ import annotations

import contextlib
import io
import sys
from types import TracebackType

import pytest
from ranks import on_ranks

from rankwise import log
from rankwise.errors import ConfigError


def said() -> list[str]:
    texts = []
    for words in (
        lambda: log.say("a\nb"),
        lambda: log.say("a\nb", force=True),
        lambda: log.warn("c"),
        lambda: log.warn("d", True),
    ):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            words()
        texts.append(out.getvalue())
    return texts


def test_the_main_rank_speaks_and_a_forced_line_names_its_rank() -> None:
    main, other = on_ranks(2, said)
    assert main == ["a\nb\n", "[rank 0] a\n[rank 0] b\n", "warning: c\n", "[rank 0] warning: d\n"]
    assert other == ["", "[rank 1] a\n[rank 1] b\n", "", "[rank 1] warning: d\n"]


def test_a_single_rank_has_no_prefix() -> None:
    assert said() == ["a\nb\n", "a\nb\n", "warning: c\n", "warning: d\n"]


Hooked = list[tuple[type[BaseException], BaseException]]


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Hooked:
    """What reaches the hook that was there before ours."""
    seen: Hooked = []

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        seen.append((kind, error))

    monkeypatch.setattr(sys, "excepthook", hook)
    return seen


def test_an_error_of_ours_ends_with_its_message_and_the_users_line(
    before: Hooked, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__)
    log.errors_without_traceback()
    try:
        raise ConfigError("set x, not y")
    except ConfigError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        line = error.__traceback__.tb_lineno if error.__traceback__ else 0
    assert capsys.readouterr().err == f"error: set x, not y\n  at {__file__}:{line}\n"
    assert before == []


def test_any_other_error_goes_to_the_hook_before(before: Hooked, capsys: pytest.CaptureFixture[str]) -> None:
    log.errors_without_traceback()
    first = sys.excepthook
    log.errors_without_traceback()
    assert sys.excepthook is first  # twice is once
    error = ValueError("yours")
    sys.excepthook(ValueError, error, None)
    assert before == [(ValueError, error)]
    assert capsys.readouterr().err == ""
