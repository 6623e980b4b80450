"""Which frames of a traceback are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

import rankwise
from rankwise.errors import DataError
from rankwise.host.stack_text import shortened, unescaped
from rankwise.ipc.pickles import pack_error, unpack_error

OURS = Path(rankwise.__file__).parent


def frame(file: object, code: str = "    call()\n    ^^^^^^\n") -> str:
    return f'  File "{file}", line 7, in name\n{code}'


BEGIN, ERROR = "Traceback (most recent call last):\n", "KeyError: 7\nin sample 7 of Data\n"
SCRIPT, TORCH = frame("train.py"), frame("/venv/lib/python3.12/site-packages/torch/nn/module.py")
TRAINER, LOADER = frame(OURS / "trainer.py"), frame(OURS / "data" / "loader.py", "    batch = (\n        made\n    )\n")


def test_a_traceback_shows_the_frames_of_the_script_and_counts_those_of_rankwise_above_them() -> None:
    assert shortened(BEGIN + SCRIPT + TRAINER + LOADER + TORCH + TRAINER + SCRIPT + ERROR) == (
        BEGIN + SCRIPT + "  ... 2 frames in rankwise\n" + TORCH + "  ... 1 frame in rankwise\n" + SCRIPT + ERROR
    )


def test_frames_of_rankwise_below_the_last_frame_of_the_script_remain() -> None:
    assert shortened(BEGIN + SCRIPT + TRAINER + SCRIPT + LOADER + TORCH + ERROR) == (
        BEGIN + SCRIPT + "  ... 1 frame in rankwise\n" + SCRIPT + LOADER + TORCH + ERROR
    )


@pytest.mark.parametrize(
    "raised",
    [
        SCRIPT + TRAINER + LOADER,  # by rankwise itself
        SCRIPT + TRAINER + LOADER + TORCH,  # by a library that rankwise called: perhaps wrongly
        TRAINER + TORCH + LOADER,  # in a thread of rankwise
        frame("/home/me/rankwise/train.py") + frame(f"{OURS}_fork/loop.py") + SCRIPT,  # folders with similar names
        "",
    ],
)
def test_a_traceback_keeps_the_frames_of_rankwise_from_which_the_error_comes(raised: str) -> None:
    assert shortened(BEGIN + raised + ERROR) == BEGIN + raised + ERROR
    both = BEGIN + raised + ERROR + "\nThe above exception was the direct cause of the following exception:\n\n"
    assert shortened(both + BEGIN + raised + ERROR) == both + BEGIN + raised + ERROR


@pytest.mark.parametrize("message", ["KeyError: 7\nin sample 7 of Data\n", "rankwise.errors.DataError: "])
def test_frames_that_only_pass_on_the_error_of_another_process_are_counted(message: str) -> None:
    error = unpack_error(pack_error(KeyError(7)), "in a loader worker", DataError)
    (note,) = error.__notes__
    note = note.partition("\n")[0] + "\n"
    worker = BEGIN + TRAINER + SCRIPT + ERROR
    assert shortened(BEGIN + SCRIPT + TRAINER + LOADER + message + note + worker) == (
        BEGIN
        + SCRIPT
        + "  ... 2 frames in rankwise\n"
        + message
        + note
        + BEGIN
        + "  ... 1 frame in rankwise\n"
        + SCRIPT
        + ERROR
    )


@pytest.mark.parametrize("raised", [LOADER, LOADER + TORCH], ids=["by rankwise", "in a signal handler of torch"])
def test_frames_that_are_running_when_a_loader_worker_dies_are_counted(raised: str) -> None:
    died = "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. \n"
    expected = "  ... 2 frames in rankwise\n" + raised.removeprefix(LOADER)
    assert shortened(BEGIN + SCRIPT + TRAINER + raised + died) == BEGIN + SCRIPT + expected + died


def test_names_in_what_the_fault_handler_prints_are_as_they_were_written() -> None:
    written = '  File "/mes d\\xe9p\\xf4ts/\\u8bad\\u7ec3.py", line 7 in \\U00020000_\\u0394\n'
    assert unescaped(written) == '  File "/mes dépôts/训练.py", line 7 in 𠀀_Δ\n'
    no_text = '  File "/broken\\udce9.py", line 7 in f\n'
    assert unescaped(no_text) == no_text
