"""Lines with the number of their rank."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os

import pytest
from ranks import on_ranks

from rankwise.dist import log


def said() -> list[str]:
    texts = []
    for words in (
        lambda: log.say("a\nb"),
        lambda: log.say("a\nb", force=True),
        lambda: log.say("a", 1, None),
        lambda: log.say(),
        lambda: log.say("a", 1, force=True),
        lambda: log.warn("c"),
        lambda: log.warn("d", True),
    ):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            words()
        texts.append(out.getvalue())
    return texts


def test_the_main_rank_speaks_and_a_forced_line_names_its_rank() -> None:
    main, other = on_ranks(2, said)
    assert main == [
        "a\nb\n",
        "[rank 0] a\n[rank 0] b\n",
        "a 1 None\n",
        "\n",
        "[rank 0] a 1\n",
        "warning: c\n",
        "[rank 0] warning: d\n",
    ]
    assert other == ["", "[rank 1] a\n[rank 1] b\n", "", "", "[rank 1] a 1\n", "", "[rank 1] warning: d\n"]


def test_a_single_rank_has_no_prefix() -> None:
    assert said() == ["a\nb\n", "a\nb\n", "a 1 None\n", "\n", "a 1\n", "warning: c\n", "warning: d\n"]


def test_a_line_is_lost_once_the_script_has_closed_its_output() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        out.close()
        log.say("a")


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
    monkeypatch.setattr("rankwise.dist.comm._world", None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    log.say("before init")
    assert capsys.readouterr().out == "before init\n"


class Broken(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_line_for_which_the_disk_has_no_space_ends_nothing(number: int) -> None:
    with contextlib.redirect_stdout(Broken(number)):
        log.say("epoch 1")
        log.warn("not saved", force=True)


def test_a_line_that_cannot_be_written_for_another_reason_is_an_error() -> None:
    with contextlib.redirect_stdout(Broken(errno.EPIPE)), pytest.raises(BrokenPipeError):
        log.say("epoch 1")
