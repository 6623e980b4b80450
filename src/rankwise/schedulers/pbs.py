"""PBS Professional and OpenPBS: jobs for their queue, and the variables of their processes. Written from their manuals and
sources (2022.1, 23.06); never run on a real cluster.

    rankwise run --on pbs --nodes 2 --gpus-per-node 4 --time 10:00:00 -q gpu train.py

The job's script becomes the head's agent on the first host; pbsdsh starts the others, which find the head through the run
directory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rankwise.errors import ConfigError
from rankwise.run.options import Option
from rankwise.run.plan import Plan
from rankwise.schedulers.job import (
    State,
    batch_script,
    call,
    cores,
    last_line,
    limited_s,
    one_line,
    plain,
    slug,
    stop_before,
)
from rankwise.schedulers.options import ACCOUNT, CPUS_PER_TASK, GPUS_PER_NODE, MEM, NODES, QUEUE, SETUP, TIME
from rankwise.schedulers.protocols import Jobs, Launcher
from rankwise.schedulers.ranks import Ranks, not_joined, shown, single

_MISSING = "type the command on a machine that has PBS; --dry-run prints the job script on any machine"
_WAITING, _RUNNING = "QHWT", "RESUB"


class Pbs(Launcher, Jobs):
    name = "pbs"
    title = "PBS"
    variables = (
        "PBS_JOBID",
        "PBS_ENVIRONMENT",
        "PBS_TASKNUM",
        "PBS_NODENUM",
        "PBS_NODEFILE",
        "PBS_NUM_NODES",
        "PBS_ARRAY_INDEX",
    )
    needs = "PBS_JOBID"
    options = (
        NODES, GPUS_PER_NODE, CPUS_PER_TASK, MEM, TIME, QUEUE, ACCOUNT, SETUP,
        Option(
            "qsub_args", "Another option of PBS's qsub, such as \"-m abe\". Repeatable.", kind=list, metavar="ARG",
            spellings=("--qsub-arg",),
        ),
    )  # fmt: skip

    # --- who am I

    def detect(self, env: Mapping[str, str]) -> bool:
        return "PBS_JOBID" in env

    def ranks(self, env: Mapping[str, str]) -> Ranks:
        """Raises NotJoinedError: PBS gives no process a rank. Reads the file that lists the job's hosts."""
        if self.one_of_several(env):
            raise not_joined(
                shown(env, ("PBS_TASKNUM", "PBS_NODENUM")),
                "pbsdsh has started this process, and PBS does not say how many there are",
                "start the script with rankwise run script.py in the job's own script, or with rankwise run -H HOST1,HOST2",
            )
        if (count := self.allocated(env) or 1) > 1:
            raise not_joined(
                shown(env, ("PBS_JOBID", "PBS_NUM_NODES", "PBS_NODEFILE")),
                f"this is one process of a PBS job of {count} hosts",
                "on all of them: rankwise run script.py, or rankwise run -H HOST1,HOST2",
            )
        task = self.array_task(env)
        note = f"task {task} of a job array: each task trains on its own" if task is not None else None
        return single("a PBS job on one host", note)

    def one_of_several(self, env: Mapping[str, str]) -> bool:
        """The job's own script has task number 1."""
        return env.get("PBS_TASKNUM", "1") != "1"

    def start_id(self, env: Mapping[str, str], ancestors: Sequence[Sequence[str]]) -> str | None:
        return f"pbs-{env['PBS_JOBID']}" if "PBS_JOBID" in env else None

    def array_task(self, env: Mapping[str, str]) -> str | None:
        return env.get("PBS_ARRAY_INDEX") or env.get("PBS_ARRAYID")

    # --- a queue of jobs

    def allocated(self, env: Mapping[str, str]) -> int | None:
        """Reads the file that lists the job's hosts."""
        if not self.detect(env) or self.one_of_several(env):
            return None
        if env.get("PBS_NUM_NODES", "").isdecimal():
            return int(env["PBS_NUM_NODES"])
        try:
            return len(set(Path(env["PBS_NODEFILE"]).read_text().split())) or 1
        except (KeyError, OSError):
            return 1

    def attached(self, env: Mapping[str, str]) -> bool:
        return self.allocated(env) is not None

    def render(self, plan: Plan) -> str:
        """Raises ConfigError for options that PBS cannot express."""
        if plan.min_nodes != plan.nodes:
            raise ConfigError(
                f"--nodes {plan.min_nodes}:{plan.nodes}: PBS gives a job a fixed number of nodes; give one number"
            )
        job = plan.job
        kind, _, gpus = str(job.get("gpus_per_node", "")).rpartition(":")
        if kind:
            raise ConfigError(
                f"--gpus-per-node {kind}:{gpus}: PBS has no names of GPU types that all sites share; give the number, and "
                "the site's own name for the type with --qsub-arg"
            )
        chunk = [f"select={plan.nodes}", f"ncpus={cores(plan) or 1}", *([f"ngpus={gpus}"] if gpus else [])]
        chunk += [f"mem={plain('--mem', job['mem'], 'PBS')}"] if "mem" in job else []
        asked = [
            f"-N {slug(plan.name)}",
            f"-l {':'.join(chunk)}:mpiprocs=1",
            *(["-l place=scatter"] if plan.nodes > 1 else []),
            *([f"-l walltime={_clock(limited_s(job['time'], 'PBS'))}"] if "time" in job else []),
            *([f"-q {plain('-q', job['queue'], 'PBS')}"] if "queue" in job else []),
            *([f"-A {plain('-A', job['account'], 'PBS')}"] if "account" in job else []),
            *(one_line(argument, "--qsub-arg") for argument in job.get("qsub_args", ())),
            "-j oe",
            "-o /dev/null",  # PBS would deliver the output at the end; this script writes it at once
            "-r n",
        ]
        others = f"$(seq {plan.nodes - 1})"
        return batch_script(plan, [f"#PBS {option}" for option in asked], '"$PBS_JOBID"', others, 'pbsdsh -n "$node" --')

    def stop_after_s(self, job: Mapping[str, Any], grace_s: float) -> float:
        """PBS ends a job at its limit with only a few seconds' notice, so the head watches the time itself."""
        return stop_before(job.get("time"), grace_s)

    def submit(self, script: str, job: Mapping[str, Any]) -> str:
        done = call(["qsub", script], _MISSING)
        if done.returncode == 0 and (match := re.search(r"^\d+\S*$", done.stdout.strip(), re.MULTILINE)):
            return match[0]
        raise ConfigError(f"PBS refuses the job: {last_line(done)}")

    def state(self, job: Mapping[str, Any]) -> State:
        """From qstat -x, which shows a job after its end for as long as the site keeps the history."""
        try:
            done = call(["qstat", "-x", "-f", "-F", "json", job["id"]], _MISSING)
            found: dict[str, Any] = next(iter(json.loads(done.stdout)["Jobs"].values()))
        except ConfigError as error:
            return State("unknown", str(error))
        except (ValueError, KeyError, StopIteration):
            return State("unknown", last_line(done))
        letter, comment = str(found.get("job_state", "")), str(found.get("comment", ""))
        reason = f"{letter}: {comment}" if comment else letter
        if letter in _WAITING:
            return State("stuck", reason) if "Can Never Run" in comment else State("waiting", reason)
        if letter in _RUNNING:
            return State("running", reason)
        return State("ended", reason, _exit_status(found.get("Exit_status")))

    def cancel(self, job: Mapping[str, Any]) -> None:
        """Sends SIGTERM to a running job; qdel would kill it after a few seconds."""
        runs = self.state(job).phase == "running"
        done = call(["qsig", "-s", "TERM", job["id"]] if runs else ["qdel", job["id"]], _MISSING)
        if done.returncode != 0:
            raise ConfigError(f"PBS did not cancel job {job['id']}: {last_line(done)}")


def _clock(seconds: int) -> str:
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _exit_status(status: Any) -> int | None:
    """PBS writes 256 + n for signal n, and a negative number if the job never began."""
    if not isinstance(status, int):
        return None
    return 1 if status < 0 else 128 + status - 256 if status > 256 else status
