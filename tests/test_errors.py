"""Errors without a traceback."""

from __future__ import annotations

import contextlib
import linecache
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from rankwise import errors
from rankwise.errors import ConfigError

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
    monkeypatch.setattr(sys.modules["__main__"], "__file__", __file__, raising=False)
    errors.without_traceback()
    try:
        raise ConfigError("set x, not y")
    except ConfigError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        line = error.__traceback__.tb_lineno if error.__traceback__ else 0
    assert capsys.readouterr().err == f"error: set x, not y\n  at {__file__}:{line}\n"
    assert before == []


def test_an_interrupt_at_the_prompt_is_one_line(before: Hooked, capsys: pytest.CaptureFixture[str]) -> None:
    errors.without_traceback()
    sys.excepthook(errors.Interrupted, errors.Interrupted("stopped by Ctrl-C"), None)
    assert (capsys.readouterr().err, before) == ("stopped by Ctrl-C\n", [])


def test_any_other_error_goes_to_the_hook_before(before: Hooked, capsys: pytest.CaptureFixture[str]) -> None:
    errors.without_traceback()
    first = sys.excepthook
    errors.without_traceback()
    assert sys.excepthook is first  # the second call changes nothing
    error = ValueError("yours")
    sys.excepthook(ValueError, error, None)
    assert before == [(ValueError, error)]
    assert capsys.readouterr().err == ""


def test_an_error_of_another_rank_says_which_without_its_traceback(before: Hooked, capsys: pytest.CaptureFixture[str]) -> None:
    errors.without_traceback()
    error = ConfigError("set x, not y")
    ours = errors.__file__
    error.add_note(
        "raised on rank 1:\nTraceback (most recent call last):\n"
        f'  File "/home/u/train.py", line 7, in train\n    init()\n  File "{ours}", line 9, in check\n    raise ...'
    )
    error.add_note("a note of the user's,\nof two lines")
    sys.excepthook(type(error), error, None)
    told = "error: set x, not y\n  raised on rank 1 at /home/u/train.py:7\n  a note of the user's,\nof two lines\n"
    assert capsys.readouterr().err == told
    assert before == []


def test_an_error_of_ours_that_follows_one_of_the_scripts_hides_neither(before: Hooked) -> None:
    """try: train() finally: checkpoints.wait()"""
    errors.without_traceback()
    error = ConfigError("ours")
    with contextlib.suppress(ConfigError):
        try:
            raise ValueError("yours")
        finally:
            raise error
    sys.excepthook(ConfigError, error, error.__traceback__)
    assert before == [(ConfigError, error)]


def test_an_error_of_ours_that_follows_one_that_we_handle_is_its_message_alone(
    before: Hooked, capsys: pytest.CaptureFixture[str]
) -> None:
    errors.without_traceback()
    namespace: dict[str, Any] = {"ConfigError": ConfigError}
    source = "def ours():\n  try: {}['x']\n  except KeyError: waited()\ndef waited(): raise ConfigError('set x')"
    exec(compile(source, str(Path(errors.__file__).with_name("comm.py")), "exec"), namespace)
    with pytest.raises(ConfigError) as caught:
        namespace["ours"]()
    sys.excepthook(ConfigError, caught.value, None)
    assert capsys.readouterr().err == "error: set x\n"
    assert before == []


def rendered(cell: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What IPython shows of the error of a cell."""
    monkeypatch.setitem(linecache.cache, "<cell>", (len(cell), None, cell.splitlines(keepends=True), "<cell>"))
    with pytest.raises(ConfigError) as caught:
        exec(compile(cell, "<cell>", "exec"), {"__name__": "__main__"})
    return caught.value._render_traceback_()


def test_a_notebook_shows_the_message_and_the_line_of_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "import rankwise\ndef train(seed):\n    rankwise.Loader([1], batch_size=1, seed=seed)\ntrain(-1)\n"
    shown = rendered(cell, monkeypatch)
    assert shown[0].startswith("error: Loader(seed=-1): give a whole number of at least 0")
    assert shown[1:] == ["at line 3: rankwise.Loader([1], batch_size=1, seed=seed)"]


def test_a_notebook_shows_an_error_of_the_script_that_ours_hides(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "import rankwise\ntry:\n    1 / 0\nfinally:\n    rankwise.Loader([1], batch_size=1, seed=-1)\n"
    assert "ZeroDivisionError" in "".join(rendered(cell, monkeypatch))
