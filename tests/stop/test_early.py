"""A request to stop that arrives before anything can answer it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

KILLS_ITSELF = """
import os, signal
import rankwise
for signum in (signal.SIGUSR1, signal.SIGTERM):
    os.kill(os.getpid(), signum)
from rankwise.stop import early
print("remembered", early.take(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
print("never")
"""
ANSWERS = KILLS_ITSELF + "rankwise.StopSignal\n"


def ended(source: str, **environ: str) -> tuple[int, str]:
    Path("script.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "script.py"], env={**os.environ, **environ}, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("of_a_rank", ["RANKWISE_RUN_DIR", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_a_rank_remembers_the_first_request_from_its_import_until_somebody_takes_it(of_a_rank: str) -> None:
    assert ended(ANSWERS, **{of_a_rank: "0"}) == (-signal.SIGTERM, f"remembered {int(signal.SIGUSR1)}\n")


def test_a_loop_that_failed_before_its_first_step_leaves_the_request_to_the_next_one() -> None:
    left = ANSWERS.replace('print("remembered"', 'rankwise.StopSignal().leave()\nprint("remembered"')
    assert ended(left, LOCAL_RANK="0") == (-signal.SIGTERM, f"remembered {int(signal.SIGUSR1)}\n")


def test_a_trainer_in_a_module_that_the_script_imports_later_answers_too() -> None:
    Path("recipe").mkdir()
    Path("recipe/__init__.py").touch()
    Path("recipe/train.py").write_text("import rankwise\n\ndef fit():\n    rankwise.Trainer()\n")
    later = KILLS_ITSELF + "from recipe import train\n"
    assert ended(later, LOCAL_RANK="0") == (-signal.SIGTERM, f"remembered {int(signal.SIGUSR1)}\n")


@pytest.mark.parametrize(
    ("source", "environ"),
    [
        (ANSWERS, {}),
        (KILLS_ITSELF, {"LOCAL_RANK": "0"}),
        (ANSWERS + "class Trainer: ...\n", {"LOCAL_RANK": "0"}),
        (KILLS_ITSELF + "import other_house\n", {"LOCAL_RANK": "0"}),
    ],
    ids=["no rank", "nothing that answers", "a trainer of its own", "another's in a module"],
)
def test_elsewhere_a_signal_does_what_it_always_did(source: str, environ: dict[str, str]) -> None:
    Path("other_house.py").write_text("from lightning import Trainer\n")
    assert ended(source, **environ) == (-signal.SIGUSR1, "")


def test_a_handler_of_the_scripts_own_stays() -> None:
    source = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('own'))\n" + ANSWERS
    assert ended(source, LOCAL_RANK="0") == (0, f"own\nremembered {int(signal.SIGUSR1)}\nown\nnever\n")


def test_a_process_that_the_rank_forks_ends_by_a_signal() -> None:
    source = """
import os, signal
import rankwise
if (child := os.fork()) == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), rankwise.stop.early.listening)  # a StopSignal comes later
"""
    assert ended(source, LOCAL_RANK="0") == (0, "-15 True\n")
