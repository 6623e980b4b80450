"""A batch queue in a folder: jobs are files that a daemon moves from `waiting` to `running`, and to `done` or `cancelled`.

    python -m rankwise_spool /shared/spool --slots 2          the daemon
    rankwise run --on spool --spool /shared/spool train.py    a job

It is a separate package, as anybody may write one; docs/schedulers.md explains it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankwise.errors import ConfigError
from rankwise.run.directory import write_text
from rankwise.run.options import Option
from rankwise.run.plan import Plan
from rankwise.schedulers.job import State, agent, enter, one_line
from rankwise.schedulers.options import REQUEUE, SETUP
from rankwise.schedulers.protocols import Jobs, Launcher
from rankwise.schedulers.ranks import Ranks, single

FOLDERS = ("waiting", "running", "done", "cancelled", "stop")
AGAIN = 100
"""The exit status of a job that must wait again."""


class Spool(Launcher, Jobs):
    name = "spool"
    title = "Spool folder"
    variables = ("SPOOL_JOB_ID",)
    needs = "SPOOL_JOB_ID"
    requeue_status = AGAIN
    options = (
        Option("spool", "The folder that the daemon watches.", kind=Path, metavar="DIR"),
        Option(
            "priority", "Jobs with a higher priority start first: 0 to 99.", kind=int, metavar="P",
            check=lambda value: None if 0 <= value <= 99 else "a number from 0 to 99",
        ),
        SETUP,
        REQUEUE,
    )  # fmt: skip

    # --- which rank this is

    def detect(self, env: Mapping[str, str]) -> bool:
        return "SPOOL_JOB_ID" in env

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        return single(f"job {env['SPOOL_JOB_ID']} of the spool folder")

    # --- a queue of jobs

    def check(self, job: Mapping[str, Any]) -> None:
        if "within" not in job and not Path(job.get("spool", "")).joinpath("waiting").is_dir():
            raise ConfigError(
                f"--spool {job['spool']}: no daemon has used that folder; start one: python -m rankwise_spool {job['spool']}"
                if "spool" in job
                else "--on spool: which folder does the daemon watch? Type --spool DIR, or write it into the site file"
            )

    def allocated(self, env: Mapping[str, str]) -> int | None:
        return 1 if self.detect(env) else None

    def attached(self, env: Mapping[str, str]) -> bool:
        return self.detect(env)

    def render(self, plan: Plan) -> str:
        setup = [one_line(line, "--setup") for line in plan.job.get("setup", ())]
        return "\n".join(["#!/bin/bash", *setup, enter(plan.cwd), f"exec {agent(plan.run_dir)}"]) + "\n"

    def submit(self, script: str, job: Mapping[str, Any]) -> str:
        job_id = f"{99 - job.get('priority', 0):02d}-{time.time_ns()}"
        write_text(Path(job["spool"], "waiting", job_id), script)
        return job_id

    def state(self, job: Mapping[str, Any]) -> State:
        for phase in ("waiting", "running", "waiting"):  # a job that is requeued meanwhile is found the second time
            if at(job, phase).exists():
                return State(phase)
        if at(job, "cancelled").exists():
            return State("ended", "cancelled before it began", 128 + signal.SIGTERM)
        try:
            return State("ended", status=int(at(job, "done").read_text()))
        except FileNotFoundError:
            return State("unknown", f"{job['spool']} has no such job")

    def cancel(self, job: Mapping[str, Any]) -> None:
        try:
            at(job, "waiting").rename(at(job, "cancelled"))
        except FileNotFoundError:
            at(job, "stop").touch()


def at(job: Mapping[str, Any], folder: str) -> Path:
    return Path(job["spool"], folder, job["id"])


# --- the daemon


class Running:
    """A job that the daemon has started, in a separate session."""

    def __init__(self, spool: Path, job_id: str) -> None:
        self.spool, self.id = spool, job_id
        script = Path((spool / "running" / job_id).read_text())
        self.cancelled = False
        with open(script.parent / "logs" / f"job-{job_id}.log", "ab") as log:
            self.process = subprocess.Popen(
                ["bash", str(script)], cwd=script.parent, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env={**os.environ, "SPOOL_JOB_ID": job_id},
            )  # fmt: skip

    def is_over(self) -> bool:
        """Stop the job if this was requested. If it has ended, record how."""
        asked = self.spool / "stop" / self.id
        if asked.exists():
            self.cancelled = asked.read_text() != "requeue\n"
            asked.unlink()
            self.process.terminate()
        if (status := self.process.poll()) is None:
            return False
        entry = self.spool / "running" / self.id
        if status == AGAIN and not self.cancelled:
            entry.rename(self.spool / "waiting" / self.id)
            return True
        write_text(self.spool / "done" / self.id, str(status if status >= 0 else 128 - status))
        entry.unlink()
        return True


def daemon(spool: Path, slots: int) -> None:
    for folder in FOLDERS:
        (spool / folder).mkdir(parents=True, exist_ok=True)
    running: list[Running] = []
    while True:
        running = [job for job in running if not job.is_over()]
        for entry in sorted((spool / "waiting").glob("[0-9]*"))[: slots - len(running)]:
            try:
                entry.rename(spool / "running" / entry.name)  # this is the lock: only one of two daemons succeeds, or a cancel
            except FileNotFoundError:
                continue
            running.append(Running(spool, entry.name))
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rankwise_spool", description="Run the jobs of a spool folder.")
    parser.add_argument("spool", type=Path)
    parser.add_argument("--slots", type=int, default=1, help="how many at once")
    asked = parser.parse_args()
    daemon(asked.spool, asked.slots)


if __name__ == "__main__":
    main()
