"""Lines that know their rank, and errors without a traceback."""

from __future__ import annotations

import contextlib
import io
import logging
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


def warned() -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for _ in range(3):
            log.warning_once("slow disk")
            log.warning_once("my disk", force=True)
        log.warning_once("another")
    return out.getvalue()


def test_a_warning_is_given_once_a_text_and_process() -> None:
    main, other = on_ranks(2, warned)
    assert main == "warning: slow disk\n[rank 0] warning: my disk\nwarning: another\n"
    assert other == "[rank 1] warning: my disk\n"


def logged() -> list[str]:
    records = io.StringIO()
    logging.basicConfig(
        stream=records, level=logging.INFO, format="%(levelname)s %(name)s %(funcName)s %(message)s", force=True
    )
    logger = log.get_logger("mine")
    logger.info("step %d", 3)
    logger.warning("slow")
    logger.info("shard %s", "a%d", force=True)
    logger.debug("unseen", force=True)
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    return [
        line for line in records.getvalue().split("\n") if line.startswith(("INFO", "WARN", "ERROR", "DEBUG", "ValueError"))
    ]


def test_a_logger_hears_the_main_rank_what_is_forced_and_errors() -> None:
    main, other = on_ranks(2, logged)
    assert main == [
        "INFO mine logged step 3", "WARNING mine logged slow", "INFO mine logged [rank 0] shard a%d",
        "ERROR mine logged failed", "ValueError: broken",
    ]  # fmt: skip
    assert other == ["INFO mine logged [rank 1] shard a%d", "ERROR mine logged [rank 1] failed", "ValueError: broken"]
    assert on_ranks(1, logged) == [[line.replace("[rank 0] ", "") for line in main]]


def test_a_line_is_printed_also_where_the_environment_speaks_half(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rankwise.comm._world", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    log.say("before init")
    assert capsys.readouterr().out == "before init\n"


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
